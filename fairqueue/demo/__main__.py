"""``python -m fairqueue.demo``: reads the options, runs the demo, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from .load import FEW, find_files, plan, standard_library


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code; the arguments are the command line's unless given."""
    terminate = signal.signal(signal.SIGTERM, _terminate)  # ends as Ctrl-C does: nothing is left behind
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("Stopped. Nothing is left in the database.", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, terminate)


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    folder: Path = options.files or standard_library()
    paths = find_files(folder, suffix="" if options.files else ".py")
    if not paths:
        parser.error(f"argument --files: no files in {folder}")
    load = plan(folder, paths, options.tenants)
    try:
        # Not before: a worker imports this module too, and needs neither a plotting library nor a server.
        from .show import DemoError, show
    except ModuleNotFoundError as error:
        return _failed(f"{error.name} is missing: pip install 'fairqueue[demo]'")
    try:
        exact = show(load, workers=options.workers, batch=options.batch, picture=options.picture)
    except DemoError as error:
        return _failed(str(error))
    return 0 if exact else 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"fairqueue.demo: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fairqueue.demo",
        description="One noisy tenant uploads a folder of files, then quiet tenants a few each. The same load goes"
        " through a queue in arrival order and through fairqueue; then a table and a picture show who waited.",
        epilog="PostgreSQL is an embedded, throw-away one, or the server in FAIRQUEUE_DSN, where the demo uses two"
        " schemas of its own and drops them at the end.",
    )
    parser.add_argument(
        "--tenants",
        type=_number(1, 1_000),
        default=15,
        metavar="N",
        help=f"quiet tenants, {FEW} files each, beside the noisy one (default: 15)",
    )
    parser.add_argument(
        "--files",
        type=_folder,
        metavar="PATH",
        help="a folder, of any files (default: the .py files of Python's standard library)",
    )
    parser.add_argument(
        "--workers",
        type=_number(1, 64),
        default=min(max(2, _cores()), 16),
        metavar="N",
        help="worker processes for each queue (default: one a core, 2 to 16)",
    )
    parser.add_argument(
        "--batch", type=_number(1, 1_000), default=8, metavar="N", help="messages a dequeue (default: 8)"
    )
    parser.add_argument(
        "--picture",
        type=_picture,
        default="fairqueue-demo.png",
        metavar="PATH",
        help="where the picture goes (default: %(default)s)",
    )
    return parser


def _number(low: int, high: int) -> Callable[[str], int]:
    def number(value: str) -> int:
        if not value.isascii() or not value.isdigit() or not low <= int(value[:9]) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high:,}, not {value!r}")
        return int(value)

    return number


def _folder(value: str) -> Path:
    folder = Path(value)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {value!r}")
    return folder.absolute()


def _picture(value: str) -> Path:
    """Looked at before the work, not after it."""
    path = Path(value)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, not {value!r}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"can't be written: {value!r}")
    return path


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _terminate(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _failed(message: str) -> int:
    print(f"fairqueue.demo: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
