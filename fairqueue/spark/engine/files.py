"""History in Parquet files, by day and queue: what any task of an archive does.

A file holds rows of one day (UTC, of ``finished_at``) and one queue. Where it is says which, as in Hive:
``day=2026-11-21/queue=default/NAME.parquet``. Times are microseconds in UTC, and the rest is as the types say; there is
nothing in it that only Spark would understand.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from fairqueue.errors import FairqueueError, InvalidValue

from .digests import Digest, digests
from .reading import Selection, arrow_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .feeds import Feed, Range

__all__ = ["Folder", "Staged", "flush", "read_back", "write_part"]

_SELECTION = Selection("history")
#: What is held back until it is written: every file gets a row group of it.
_BUFFER_BYTES = 64 << 20
# What Spark would escape in the name of a folder; readers of other kinds take %XX for the same.
_SPECIAL = re.compile(r"""[\x00-\x1f"#%'*/:=?\\\x7f{}\[\]^]""")


@dataclass(frozen=True)
class Folder:
    """A place for files: a path, or a URL of what pyarrow understands (``s3://``, ``gs://``, ``hdfs://``, ...)."""

    path: str

    def __post_init__(self) -> None:
        if re.match(r"[A-Za-z][\w+.-]+:/(?!/)", self.path):
            raise InvalidValue(
                f"{self.path!r} is a URL with one slash, which Spark knows and pyarrow doesn't: write a path, or"
                " file:///data, s3://bucket/data, ..."
            )
        if "://" not in self.path:
            # Tasks may run elsewhere.
            object.__setattr__(self, "path", str(Path(self.path).absolute()))

    def open(self) -> tuple[fs.FileSystem, str]:
        """The file system, and the path in it."""
        if "://" not in self.path:
            return fs.LocalFileSystem(), self.path
        # The names by which Hadoop, and so Spark, knows the same.
        system, root = fs.FileSystem.from_uri(re.sub(r"^s3[an]://", "s3://", self.path))
        return system, root.rstrip("/")


@dataclass(frozen=True)
class Staged:
    """A file that has been written and read back.

    :param path: within the folder.
    """

    path: str
    day: date
    queue: str
    digest: Digest

    def place(self, name: str) -> str:
        """Where a file of its rows belongs, within the folder."""
        return f"day={self.day}/queue={_escaped(self.queue)}/{name}.parquet"


def write_part(feed: Feed, folder: Folder, stage: str, part: Range) -> list[Staged]:
    """Write a part of a feed to files of its own in the stage, and read them back."""
    system, root = folder.open()
    stage = f"{stage}/{uuid.uuid4().hex}"  # another attempt at the same part may be under way
    system.create_dir(f"{root}/{stage}", recursive=True)
    writers: dict[tuple[date, str], pq.ParquetWriter] = {}
    paths: dict[tuple[date, str], str] = {}
    try:
        for table in _tables(feed, part):
            for key, rows in _grouped(table):
                if key not in writers:
                    paths[key] = f"{stage}/{len(paths):05}.parquet"
                    writers[key] = pq.ParquetWriter(
                        f"{root}/{paths[key]}", rows.schema, filesystem=system, compression="zstd"
                    )
                writers[key].write_table(rows)
    finally:
        for writer in writers.values():
            writer.close()
    staged = []
    for (day, queue), path in paths.items():
        flush(system, f"{root}/{path}")
        found = _digests_of(system, f"{root}/{path}", queue)
        if found.keys() != {day}:
            raise FairqueueError(f"{path} has been written with rows of {day}, and read back with {sorted(found)}")
        staged.append(Staged(path, day, queue, found[day]))
    rows = sum(each.digest.rows for each in staged)
    if rows != part.rows:
        raise FairqueueError(f"{part.rows} rows of history are in the files as {rows}")
    return staged


def read_back(folder: Folder, path: str) -> dict[date, Digest]:
    """What is in a file that is in its place."""
    system, root = folder.open()
    return _digests_of(system, f"{root}/{path}", _unescaped(path.split("/")[-2].removeprefix("queue=")))


def flush(system: fs.FileSystem, path: str) -> None:
    """See that a file, or what is in a folder, survives a crash of the machine, where that is ours to do."""
    if isinstance(system, fs.LocalFileSystem):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _tables(feed: Feed, part: Range) -> Iterator[pa.Table]:
    """The rows of a part, much at a time."""
    batches: list[pa.RecordBatch] = []
    for batch in feed.read(part, _SELECTION, arrow_schema(_SELECTION)):
        batches.append(batch)
        if sum(each.nbytes for each in batches) >= _BUFFER_BYTES:
            yield pa.Table.from_batches(batches)
            batches.clear()
    if batches:
        yield pa.Table.from_batches(batches)


def _grouped(table: pa.Table) -> Iterator[tuple[tuple[date, str], pa.Table]]:
    """The rows of each day and queue, without the queue."""
    days = pc.floor_temporal(table["finished_at"], unit="day")
    keys = pa.table({"day": days, "queue": table["queue"]})
    for key in keys.group_by(["day", "queue"]).aggregate([]).to_pylist():
        day: datetime = key["day"]
        mine = pc.and_(pc.equal(days, pa.scalar(day, days.type)), pc.equal(table["queue"], key["queue"]))
        yield (day.astimezone(UTC).date(), key["queue"]), table.filter(mine).drop_columns(["queue"])


def _digests_of(system: fs.FileSystem, path: str, queue: str) -> dict[date, Digest]:
    total: dict[date, Digest] = {}
    with system.open_input_file(path) as file:
        for batch in pq.ParquetFile(file).iter_batches():
            queues = pa.repeat(pa.scalar(queue, pa.string()), len(batch))
            for day, digest in digests(batch.append_column("queue", queues)).items():
                total[day] = total.get(day, Digest()) + digest
    return total


def _escaped(name: str) -> str:
    escaped = _SPECIAL.sub(lambda found: f"%{ord(found[0]):02X}", name)
    if len(f"queue={escaped}".encode()) > 255:
        raise FairqueueError(
            f"queue {name[:40]}... can't be archived: its name is too long for a folder; set its history_days to 0, and"
            " delete what history has of it"
        )
    return escaped


def _unescaped(name: str) -> str:
    return re.sub(r"%([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), name)
