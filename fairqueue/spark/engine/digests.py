"""The checksum of history's rows, as history_digest has it in the database: made here of what has been read elsewhere.

::

    for batch in dataset.to_batches():
        for day, digest in digests(batch).items():
            total[day] = total.get(day, Digest()) + digest

It is the sum over the rows of the first 60 bits of md5 of their columns, so it doesn't depend on their order, and a row
that is there twice counts twice. It finds what got lost or was changed by mistake; it is no protection from somebody
who means harm.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from hashlib import md5
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Digest", "digests"]

# In the order in which history_digest has them: in 8 bytes each, and by their lengths first.
_NUMBERS = ("message_id", "attempt", "cost", "dequeue_at", "created_at", "first_leased_at", "leased_at", "finished_at")
_TEXTS = ("queue", "channel", "key", "outcome", "error", "worker")

_EPOCH = date(1970, 1, 1)
_DAY = 86_400_000_000  # microseconds
#: PostgreSQL counts from the year 2000.
_EPOCH_OF_POSTGRES = int(
    (datetime(2000, 1, 1, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1)
)
_LEAST = -(2**63)


@dataclass(frozen=True)
class Digest:
    """So many rows, with this checksum."""

    rows: int = 0
    checksum: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest(self.rows + other.rows, self.checksum + other.checksum)


def digests(batch: pa.RecordBatch) -> dict[date, Digest]:
    """Those of each day, in UTC, of rows of history."""
    import numpy as np

    columns = {name: batch.column(name) for name in batch.schema.names}
    values = _row_numbers(columns, batch.num_rows)
    days, which = np.unique(_integers(columns["finished_at"]) // _DAY, return_inverse=True)
    # In two halves, as a sum of 60 bits would not fit.
    result = {}
    for number, day in enumerate(days.tolist()):
        mine = values[which == number]
        checksum = (int((mine >> np.uint64(30)).sum()) << 30) + int((mine & np.uint64(2**30 - 1)).sum())
        result[_EPOCH + timedelta(days=day)] = Digest(len(mine), checksum)
    return result


def _row_numbers(columns: dict[str, Any], rows: int) -> Any:
    """The number of each row."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = [columns[name].cast(pa.string()).cast(pa.binary()) for name in _TEXTS]
    fixed = np.empty((rows, len(_NUMBERS) + 1 + len(_TEXTS)), dtype=">i8")
    for number, name in enumerate((*_NUMBERS, "xid")):
        fixed[:, number] = _integers(columns[name], since_2000=True)
    for number, text in enumerate(texts, len(_NUMBERS) + 1):
        fixed[:, number] = pc.fill_null(pc.binary_length(text), -1).to_numpy(zero_copy_only=False)
    heads = pa.FixedSizeBinaryArray.from_buffers(pa.binary(8 * fixed.shape[1]), rows, [None, pa.py_buffer(fixed.data)])
    joined = pc.binary_join_element_wise(
        heads.cast(pa.binary()), *texts, pa.scalar(b"", pa.binary()), null_handling="replace", null_replacement=b""
    )
    hashed = b"".join([md5(row, usedforsecurity=False).digest()[:8] for row in joined.to_pylist()])
    return np.frombuffer(hashed, dtype=">u8").astype(np.uint64) >> np.uint64(4)


def _integers(column: Any, *, since_2000: bool = False) -> Any:
    """The numbers of a column as 8 bytes: a double's bits, a time's microseconds."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type):
        return column.to_numpy(zero_copy_only=False).view(np.int64)
    if not pa.types.is_timestamp(column.type):
        return column.to_numpy(zero_copy_only=False)
    times = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    if since_2000:
        times = pc.fill_null(pc.subtract(times, _EPOCH_OF_POSTGRES), _LEAST)
    return times.to_numpy(zero_copy_only=False)
