"""The Makefile's environments, with a Python that installs nothing, but notes what it was asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pages import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")

#: Makes an environment whose Python is itself; refuses to install what REFUSED matches.
PYTHON = """#!/bin/sh
test "$*" = "-c import pip" && exit
echo "$@" >>"$LOG"
case "$*" in
    "-m venv "*) for folder; do :; done
        case "$*" in *" --clear "*) rm -rf "$folder" ;; esac
        mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python"; exit ;;
    "-m pip "*) ! echo "$*" | grep -qE "${REFUSED:-nothing}"; exit ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "requirements.lock", "requirements-spark.lock", "requirements-benchmarks.lock"):
        (folder / name).write_text("dbos==3.4.0 \\\n")
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return folder


def make(folder: Path, *arguments: str, **environment: str) -> tuple[str, list[str]]:
    """What it printed, and what Python was asked for."""
    log = folder / "log"
    log.write_text("")
    done = subprocess.run(
        ["make", f"PYTHON={folder.parent / 'python'}", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "LOG": str(log), "JAVA_HOME": "/nowhere", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout, log.read_text().splitlines()


def test_an_environment_whose_python_is_gone_is_made_anew(folder: Path) -> None:
    make(folder, ".venv/.ready")
    assert make(folder, ".venv/.ready")[1] == []
    python = folder / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("python3.0")
    assert make(folder, ".venv/.ready")[1][0] == "-m venv --clear .venv"
    python.write_text("#!/bin/sh\nexit 1\n")  # as of a later version, which has none of what is installed there
    assert make(folder, ".venv/.ready")[1][0] == "-m venv --clear .venv"


def test_what_cannot_be_measured_beside_is_said_and_tried_again(folder: Path) -> None:
    for _ in range(2):
        printed, asked = make(folder, "bench", REFUSED="requirements-benchmarks.lock|pins (dbos|oban)$")
        assert "Left out: dbos oban.\n" in printed
        assert asked[-1] == "-m benchmarks"
    printed, asked = make(folder, "bench")
    assert "Left out" not in printed
    assert make(folder, "bench", "OUT=a folder", "SCENARIOS=cost")[1] == ["-m benchmarks --out a folder cost"]


@pytest.mark.parametrize(("status", "installed"), [(0, True), (1, False)])
def test_spark_is_installed_where_java_runs(status: int, installed: bool, folder: Path) -> None:
    java = folder.parent / "home" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\nexit {status}\n")
    java.chmod(0o755)
    _, asked = make(folder, "test", JAVA_HOME=str(folder.parent / "home"))
    assert any(line.endswith("-r requirements-spark.lock") for line in asked) == installed
