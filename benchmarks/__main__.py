"""The one command: `python -m benchmarks [--full] [scenario ...]`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import psycopg
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fairqueue.errors import FairqueueError

from .consumers import Consumers
from .environment import environment
from .measuring import SIZES, Bench, Case, chosen
from .pictures import draw
from .place import opened
from .report import PAGE, load, page, save, write
from .scenarios import SCENARIOS
from .systems import SYSTEMS

#: In the quick run only where they are named: more of what others ask, and Spark, would take longer than all the rest.
_FURTHER = ("draining", "sizes", "flood", "imports", "spark")
_ROOT = Path(__file__).parent.parent
#: What is published comes from full runs alone; others must not take its place.
_PUBLISHED, _SCRATCH = _ROOT / "docs" / "benchmarks", _ROOT / "build" / "benchmarks"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("scenarios", nargs=-1, type=click.Choice(list(SCENARIOS)), metavar="[SCENARIO]...")
@click.option("--full", "size", flag_value="full", help="At full size: about four and a half hours.")
@click.option("--tiny", "size", flag_value="tiny", help="As small as can be, to see that everything runs.")
@click.option("--systems", metavar="NAME,...", help=f"Only these. [{', '.join(SYSTEMS)}]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="[default: build/benchmarks; with --full docs/benchmarks]",
)
def main(scenarios: Sequence[str], size: str | None, systems: str | None, out: Path | None) -> None:
    """Measure, and write JSON, a page in Markdown and pictures into a folder.

    All scenarios, unless some are named; but draining, sizes, flood, imports and spark only with --full, or where they
    are named.

    PostgreSQL is an embedded one of this run's own, with PostgreSQL's own settings, on disk (TMPDIR says which), or the
    server in FAIRQUEUE_DSN, where databases are made and dropped. Ctrl-C leaves nothing behind but what was written.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    names = list(SYSTEMS) if systems is None else [name.strip() for name in systems.split(",")]
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise click.BadParameter(
            f"unknown system {unknown[0]!r}: known are {', '.join(SYSTEMS)}", param_hint="--systems"
        )
    selected = scenarios or [name for name in SCENARIOS if size == "full" or name not in _FURTHER]
    out = out or (_PUBLISHED if size == "full" else _SCRATCH)
    try:
        out.mkdir(parents=True, exist_ok=True)
        failed = run(selected, size or "quick", names, out, Console())
    except (FairqueueError, OSError) as error:  # of a server that can't be started, FAIRQUEUE_DSN, or a folder
        raise click.ClickException(str(error)) from error
    except psycopg.Error as error:  # it isn't there, is gone, or lets this role make no databases
        raise click.ClickException(f"the server can't be used: {' '.join(str(error).split())}") from error
    except KeyboardInterrupt:
        click.echo("Stopped. What is written is complete; nothing else is left.", err=True)
        sys.exit(130)
    if failed:
        raise click.ClickException(f"{failed} of the cases could not be measured: the page says which")


def run(names: Sequence[str], size: str, systems: Sequence[str], out: Path, console: Console) -> int:
    """Measure and write; how many cases failed."""
    failed = 0
    found, missing = chosen(systems)
    plan = {name: SCENARIOS[name].cases(SIZES[size]) for name in names}
    total = sum(case.seconds for cases in plan.values() for case in cases)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=console,
        speed_estimate_period=86_400,
    )
    with opened() as (place, server), Consumers() as consumers, progress:
        for system, reason in missing.items():
            console.print(f"{system} is left out: {reason}", soft_wrap=True, markup=False)
        task = progress.add_task("", total=total)
        for name, cases in plan.items():
            bench = Bench(place, consumers, SIZES[size], found, server, missing=missing)
            result = measure(bench, name, cases, progress, task)
            failed += bench.failed
            save(out, name, result)  # before what can go wrong with pictures
            try:
                result["pictures"] = draw(out, name, result["records"])
            except Exception as error:  # noqa: BLE001 (whatever Matplotlib raises: what is measured later has figures)
                bench.note(f"no pictures: {' '.join(str(error).split()) or type(error).__name__}")
            save(out, name, result)
            results = load(out, SCENARIOS)
            write(out / PAGE, page(results, SCENARIOS, SYSTEMS))
            console.print(f"{name}: {result['seconds']:.0f} s, {out / name}.json", soft_wrap=True)
    return failed


def measure(bench: Bench, name: str, cases: Sequence[Case], progress: Progress, task: Any) -> dict[str, Any]:
    """The result of one scenario."""
    surroundings, start = environment(bench.place.dsn), time.monotonic()
    records, took = [], {}
    for case in cases:
        began = time.monotonic()
        progress.update(task, description=f"{name}: {case.label}")
        if not progress.console.is_terminal:
            progress.console.print(f"{name}: {case.label}", soft_wrap=True)
        try:
            for record in case.run(bench):
                records.append(asdict(record))  # noqa: PERF401 (what it has yielded stays if it fails later)
        except Exception as error:  # noqa: BLE001 (the systems that are measured raise what they like)
            # The others have their figures all the same, but without a server nobody has: earlier ones stay.
            bench.place.check()
            said = str(error).splitlines() or [type(error).__name__]
            bench.note(f"no figures of {case.label}: {said[0]}")
            bench.failed += 1
        took[case.label] = round(time.monotonic() - began, 1)
        progress.advance(task, case.seconds)
    return {
        "scenario": name,
        "size": bench.size.name,
        "seconds": round(time.monotonic() - start, 1),
        "environment": surroundings,
        "seconds by case": took,
        "failed": bench.failed,
        "notes": bench.notes,
        "records": records,
    }


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
