"""What every tenant got: figures of history by channel and window, as Parquet, a page, and a table.

::

    from pathlib import Path

    from fairqueue.spark import local_session
    from fairqueue.spark.reporting import page, report, summary

    with local_session() as spark:
        history = spark.read.parquet("archive")
        found = report(history, "report", window="1 hour")
        found.channels.orderBy("starved", ascending=False).show()
        Path("report/index.html").write_text(page(summary(found)))

A tenant is a channel of a queue. What is in the tables is said in :mod:`.figures`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairqueue._lazy import lazily

if TYPE_CHECKING:
    from .pages import page
    from .summaries import QueueSummary, Summary, summary
    from .tables import EXACT_ROWS, Report, report

__all__ = ["EXACT_ROWS", "QueueSummary", "Report", "Summary", "page", "report", "summary"]

# A command looks at its arguments before it imports PySpark, and the tables need no Matplotlib.
_HOMES = {
    "pages": ["page"],
    "summaries": ["QueueSummary", "Summary", "summary"],
    "tables": ["EXACT_ROWS", "Report", "report"],
}


if not TYPE_CHECKING:  # a name that isn't there is an error to type checkers, too
    __getattr__, __dir__ = lazily(__name__, _HOMES)
