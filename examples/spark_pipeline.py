"""The whole pipeline on this machine: ``python -m examples.spark_pipeline`` (or ``make demo-spark``). Needs Java.

One noisy customer has 4,000 documents, fifteen others 20 each, all in Parquet. Spark enqueues them, twice, as if the
first run had not been heard of; workers drain the queue; its history goes to a Parquet archive; and the report says
what every customer got. PostgreSQL is an embedded, throw-away one. What is left is the folder ``fairqueue-spark-demo``.
"""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import click
from rich.console import Console
from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import embedded, schema
from fairqueue.cli.base import Command
from fairqueue.cli.failures import Failed
from fairqueue.spark.java import has_java

NOISY, QUIET = 4_000, 20
CUSTOMERS = 15
WORKERS = 4
#: Seconds that a document takes.
WORK = 0.002

OUT = Path("fairqueue-spark-demo")
#: What is in it.
LEFT = {"archive", "documents.parquet", "report"}


@click.command(cls=Command)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=OUT, show_default=True)
def main(out: Path) -> None:
    """Parquet into the queue by Spark, workers, the archive, a report."""
    try:
        from fairqueue.spark import archive, enqueue, local_session
        from fairqueue.spark.reporting import page, report, summary
    except ModuleNotFoundError as error:
        raise Failed(f"{error.name} is not installed; pip install 'fairqueue[spark]'") from None
    if not has_java():
        raise Failed("there is no java, which Spark needs: install one of version 17 or later, or set JAVA_HOME")
    there = {each.name for each in out.glob("*")}
    if there and not {"documents.parquet"} <= there <= LEFT:
        raise Failed(f"--out: {str(out)!r} has something that this demo hasn't made, and would be lost: name another")
    console = Console(soft_wrap=True, highlight=False)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with embedded.ephemeral() as server:
        engine = create_engine(server.url())
        with engine.begin() as connection:
            schema.install(connection)
        with console.status("Starting Spark"), local_session() as spark:
            documents = spark.sql(
                f"SELECT 'noisy' AS customer, id AS document FROM range({NOISY})"
                f" UNION ALL SELECT concat('quiet ', 1 + id % {CUSTOMERS}), {NOISY} + id"
                f" FROM range({CUSTOMERS * QUIET})"
            )
            documents.write.parquet(str(out / "documents.parquet"))
            console.print(f"Parquet: {documents.count():,} documents of {CUSTOMERS + 1} customers")

            for attempt in ("first", "again"):
                start = time.monotonic()
                done = enqueue(
                    spark,
                    str(out / "documents.parquet"),
                    channel="customer",
                    expressions={"key": "cast(document AS string)"},
                    options={"url": server.dsn},
                    job="documents",
                )
                with Session(engine) as session:
                    waiting = session.scalar(select(func.count()).select_from(fq.Message))
                console.print(
                    f"Enqueued {attempt}: {done.rows:,} rows in {time.monotonic() - start:.1f} s;"
                    f" {'nothing was added' if done.repeated else 'all at once'}; {waiting:,} messages wait"
                )

            took = drain(engine)
            console.print(f"Workers: {done.rows:,} documents in {took:.1f} s, {WORKERS} at a time")

            archived = 0
            while archived < done.rows:  # what an open transaction holds back comes with the next run
                archived += archive(spark, str(out / "archive"), url=server.dsn).rows
            console.print(f"Archived: {archived:,} outcomes to {out / 'archive'}")

            found = report(spark.read.parquet(str(out / "archive")), out / "report", window="1 second")
            shown = summary(found, CUSTOMERS + 1)
            (out / "report" / "index.html").write_text(page(shown), encoding="utf-8")
            for row in shown.queues[0].largest[:4]:
                console.print(
                    f"  {row['channel']:<9} {row['started']:>5,} served, p95 of the waits {row['wait_p95']:.1f} s"
                )
        engine.dispose()
    console.print(f"The report, with pictures: {out / 'report' / 'index.html'}")


def drain(engine: Engine) -> float:
    """Let a worker handle all there is; in how many seconds."""
    worker = fq.Worker(engine, concurrency=WORKERS, prefetch=2 * WORKERS)

    @worker.handler
    def convert(message: fq.LeasedMessage[object], session: Session) -> None:
        time.sleep(WORK)

    def stop_when_empty() -> None:
        with Session(engine) as session:
            while session.scalar(select(func.count()).select_from(fq.Message)):
                session.rollback()
                time.sleep(0.05)
        worker.stop()

    threading.Thread(target=stop_when_empty, daemon=True).start()
    start = time.monotonic()
    worker.run()
    return time.monotonic() - start


if __name__ == "__main__":
    main()
