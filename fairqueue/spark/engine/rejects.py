"""Rows that were refused, in files: written by each attempt at a part, put in their place when the load is entered.

``PATH/_attempts/RUN-PART-ATTEMPT.parquet`` becomes ``PATH/LOAD-PART.parquet``, where LOAD is the same for the same
load, so readers of the folder see each row once, however often a task, or the load, was tried. PATH is what pyarrow can
write to: a folder, ``s3://``, ``hdfs://``, ...
"""

from __future__ import annotations

import hashlib
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from .files import Folder

__all__ = ["Rejects", "discard", "keep"]

_ATTEMPTS = "_attempts"


class Rejects:
    """The file of one attempt; there is none unless something is added.

    :param path: the folder of all of them.
    """

    def __init__(self, path: str, run: str, part: int) -> None:
        self._path = path
        self.name = f"{run}-{part}-{uuid.uuid4().hex[:8]}.parquet"
        self._writer: pq.ParquetWriter | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        if not len(batch):
            return
        if self._writer is None:
            system, root = Folder(self._path).open()
            system.create_dir(f"{root}/{_ATTEMPTS}", recursive=True)
            self._writer = pq.ParquetWriter(f"{root}/{_ATTEMPTS}/{self.name}", batch.schema, filesystem=system)
        self._writer.write_batch(batch)

    def close(self) -> str | None:
        """The name of the file, if there is one."""
        if self._writer is None:
            return None
        self._writer.close()
        return self.name


def keep(path: str, load: str, names: list[str]) -> None:
    """Put the files of the attempts that count in their place, instead of what is there of the same load.

    :param load: the name of what was loaded.
    """
    system, root = Folder(path).open()
    stem = hashlib.sha256(load.encode()).hexdigest()[:32]
    _delete(system, root, f"{stem}-")
    for name in names:
        part = name.split("-")[1]
        system.move(f"{root}/{_ATTEMPTS}/{name}", f"{root}/{stem}-{part}.parquet")


def discard(path: str, run: str) -> None:
    """Delete what other attempts of a run have written."""
    system, root = Folder(path).open()
    _delete(system, f"{root}/{_ATTEMPTS}", f"{run}-")


def _delete(system: fs.FileSystem, folder: str, prefix: str) -> None:
    for found in system.get_file_info(fs.FileSelector(folder, allow_not_found=True)):
        if found.base_name.startswith(prefix):
            system.delete_file(found.path)
