"""The command line, in this process and as a process of its own."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

#: ``subprocess.run([*COMMAND, "status"])``
COMMAND = [sys.executable, "-m", "fairqueue.cli"]

#: A terminal would clear its screen, write backwards, colour, and draw a picture.
ODD = "\x1b[2J\u202e[red]x[/red]:smile:"

#: What the fixture `run` is.
Run = Callable[..., Result]


def document(result: Result) -> Any:
    """The one JSON document that is all of stdout."""
    return json.loads(result.stdout)


@contextmanager
def in_folder_of(shop: Path) -> Iterator[None]:
    """As if a command ran there, in this process: the modules of the package are found, and forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shop.parent)
        patch.setattr(sys, "path", [*sys.path])
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == shop.name]:
                del sys.modules[name]
