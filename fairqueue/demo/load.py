"""The load: which files there are, and which tenant uploads which.

The noisy tenant uploads all of them at once, then each quiet one a few of the same.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NOISY = "noisy"
#: How many files a quiet tenant uploads.
FEW = 3

_LEFT_OUT = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class Load:
    """``uploads`` maps each tenant to its paths, in the order in which they upload: the noisy one first."""

    folder: Path
    uploads: dict[str, list[str]]

    @property
    def quiet(self) -> list[str]:
        return [tenant for tenant in self.uploads if tenant != NOISY]

    @property
    def noisy_files(self) -> int:
        return len(self.uploads[NOISY])

    @property
    def quiet_files(self) -> int:
        return len(self) - self.noisy_files

    def __len__(self) -> int:
        return sum(len(paths) for paths in self.uploads.values())


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def find_files(folder: Path, suffix: str = "") -> list[str]:
    """The regular files below ``folder``, sorted.

    Links to folders are not followed, and names that aren't UTF-8 left out.
    """
    return sorted(_walk(folder, suffix))


def plan(folder: Path, paths: list[str], tenants: int) -> Load:
    """Everything for the noisy tenant; for each of ``tenants`` quiet ones a few files from all over the list."""
    few = min(FEW, len(paths))
    width = len(str(tenants))
    uploads = {NOISY: paths}
    for number in range(tenants):
        start = number * len(paths) // tenants
        places = [(start + step * len(paths) // few) % len(paths) for step in range(few)]
        uploads[f"quiet {number + 1:0{width}}"] = [paths[place] for place in places]
    return Load(folder, uploads)


def _walk(folder: Path, suffix: str) -> Iterator[str]:
    for directory, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in names:
            path = os.path.join(directory, name)  # noqa: PTH118 (os.walk gives text, a payload takes text)
            if name.endswith(suffix) and _is_text(path) and os.path.isfile(path):  # noqa: PTH113
                yield path


def _is_text(path: str) -> bool:
    """False for a name that isn't UTF-8, which no text column takes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
