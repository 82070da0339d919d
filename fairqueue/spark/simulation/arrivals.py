"""Arrivals from a file, such as those of a day that went wrong, exported from history."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fairqueue.errors import InvalidValue

from .loads import SECOND, Integers, Numbers

__all__ = ["Arrivals", "read_arrivals"]


class Arrivals(NamedTuple):
    """In the order of time; those of one time in the order of the file.

    :param at: nanoseconds from the first.
    :param channel: its number; the channel with the most messages is 0.
    :param service: seconds, where the file has them.
    :param channels: how many there are.
    """

    at: Integers
    channel: Integers
    cost: Numbers
    service: Numbers | None
    channels: int


def read_arrivals(path: str) -> Arrivals:
    """A CSV file (``.csv``, with a header) or Parquet: ``at`` in seconds, ``channel``, and, where it has them, ``cost``
    and ``service_seconds``. Other columns are ignored.

    :raises InvalidValue: if there is no such file, or a column is missing or holds what it can't.
    """
    table = _read(path)
    for name in ("at", "channel"):
        if name not in table.column_names:
            raise InvalidValue(f"{path} must have the column {name!r}, not only {', '.join(table.column_names)}")
    if not table.num_rows:
        raise InvalidValue(f"{path} must have at least one arrival, not none")
    at = _numbers(path, table, "at", -1e12, 1e12)
    # So that seconds since 1970 keep their digits.
    order = np.argsort(at, kind="stable")
    at = at[order] - at.min()
    cost = _numbers(path, table, "cost", 0, 1e6)[order] if "cost" in table.column_names else np.ones(len(at))
    service = None
    if "service_seconds" in table.column_names:
        service = _numbers(path, table, "service_seconds", 0, 1e9)[order]
    if table["channel"].null_count:
        raise InvalidValue(f"{path}: channel must not be null: give each row one, or leave it out")
    names, numbers, counts = np.unique(
        np.array(table["channel"].cast("string").to_pylist())[order], return_inverse=True, return_counts=True
    )
    if len(names) < 2:
        raise InvalidValue(f"{path} must have at least 2 channels, not only {str(names[0])!r}")
    ranks = np.empty(len(names), dtype=np.int64)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(len(names))
    return Arrivals(np.rint(at * SECOND).astype(np.int64), ranks[numbers], cost, service, len(names))


def _read(path: str) -> Any:
    import pyarrow as pa

    try:
        if Path(path).suffix.lower() == ".csv":
            from pyarrow import csv

            # A tenant may be called 007.
            options = csv.ConvertOptions(column_types={"channel": pa.string()})
            return csv.read_csv(path, convert_options=options)
        from pyarrow import parquet

        return parquet.read_table(path)
    except FileNotFoundError:
        raise InvalidValue(f"arrivals must be a file that is there, not {path!r}") from None
    except (OSError, pa.ArrowInvalid) as error:
        reason = str(error).splitlines()[0]
        raise InvalidValue(
            f"arrivals must be a CSV file, whose name ends in .csv, or Parquet, not {path!r}: {reason}"
        ) from None


def _numbers(path: str, table: Any, name: str, least: float, most: float) -> Numbers:
    import pyarrow as pa

    column = table[name]
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type) or pa.types.is_decimal(column.type)):
        raise InvalidValue(f"{path}: {name} must be numbers, not {column.type}")
    # Rounded where they must be: what is out of range is told below.
    values: Numbers = np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
    wrong = np.flatnonzero(~((values >= least) & (values <= most)))
    if len(wrong):
        row = int(wrong[0])
        raise InvalidValue(
            f"{path}: {name} must be a number from {least:g} to {most:g} in each row, not {column[row].as_py()}"
            f" (row {row + 1:,})"
        )
    return values
