"""A result as a scenario's JSON has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.records import Record

SURROUNDINGS: dict[str, str] = dict.fromkeys(("time", "revision", "load before", "durable commit", "processor"), "1")


def result_of(records: Sequence[Record], surroundings: dict[str, str], **more: Any) -> dict[str, Any]:
    written = [asdict(record) for record in records]
    return {"size": "tiny", "seconds": 1.0, "environment": surroundings, "notes": [], "records": written, **more}
