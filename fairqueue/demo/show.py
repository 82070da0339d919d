"""The demo from its first line to its last: a server, two runs, and what came of them."""

from __future__ import annotations

import io
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from sqlalchemy import text

from fairqueue import embedded
from fairqueue._url import sqlalchemy_url
from fairqueue.cli.output import make_console

from .figures import Figures, measure
from .load import Load
from .picture import draw
from .progress import Display
from .queues import QUEUES
from .report import print_report
from .run import race
from .tables import Place, installed
from .work import EXAMINED_UP_TO


def show(load: Load, *, dsn: str | None, workers: int, batch: int, picture: Path) -> bool:
    """Run the whole demo; says whether each file has exactly one result in both runs.

    :param dsn: the database to use; None: that of FAIRQUEUE_DSN, else an embedded server's.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where there is no arrow, a question mark will do
    console = make_console()
    arrival, fair = _race(console, load, workers, batch, dsn)
    print_report(console, arrival, fair)
    draw(picture, load, arrival, fair)
    console.print(f"Picture: {picture.absolute()}", soft_wrap=True)
    return arrival.count.exact and fair.count.exact


def _race(console: Console, load: Load, workers: int, batch: int, dsn: str | None) -> list[Figures]:
    with nullcontext(sqlalchemy_url(dsn)) if dsn else embedded.database_url() as url, installed(url) as place:
        _announce(console, load, place, dsn, workers=workers, batch=batch)
        with Display(console, load) as display:
            race(place, load, workers=workers, batch=batch, watch=display.show)
        with place.engine() as engine:
            return [measure(engine, name) for name in QUEUES]


def _announce(console: Console, load: Load, place: Place, dsn: str | None, *, workers: int, batch: int) -> None:
    lines = {
        "Files": str(load.folder),
        "Work": f"parse, hash, compress up to {EXAMINED_UP_TO >> 20} MB of each; result and completion commit together",
        "Queues": f"arrival order and fairqueue, side by side, {_many(workers, 'worker')} each, batches of {batch}",
        "Server": _server(place, dsn),
    }
    quiet, few = len(load.quiet), len(load.uploads[load.quiet[0]])
    console.print(f"A noisy tenant uploads {_many(load.noisy_files, 'file')}, then", end=" ", style="bold")
    console.print(f"{quiet:,} quiet tenants {few} each." if quiet > 1 else f"a quiet tenant {few}.", style="bold")
    for name, line in lines.items():
        console.print(f"{name:<8}{line}", style="dim", soft_wrap=True)
    console.print()


def _server(place: Place, dsn: str | None) -> str:
    with place.engine() as engine, engine.connect() as connection:
        version = str(connection.scalar(text("SHOW server_version"))).split()[0]
    if dsn or os.environ.get("FAIRQUEUE_DSN"):
        return f"PostgreSQL {version} at {'--dsn' if dsn else 'FAIRQUEUE_DSN'}, schemas {place.schema}*"
    return f"PostgreSQL {version}, embedded, thrown away afterwards"


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"
