"""An archive of the history in Parquet: each row once, whatever is interrupted, for any reader of Parquet.

::

    PATH/_archive.json                              whose history this is, and where it begins
    PATH/day=2026-11-21/queue=default/*.parquet     the rows
    PATH/_batches/FROM-TO.json                      what a batch holds, and which files are its
    PATH/_staging/...                               what isn't in its place yet

A batch is what a feed has between two offsets, so its rows are always the same. Its files are written to the stage and
read back; then its manifest is written, at once, and from that moment on the batch is archived: the files go to their
places, by names that follow from the offsets, and the feed is moved. Who comes after an interruption finds a manifest,
and finishes what it says, as often as need be; or finds none, and begins the batch again. Readers see the folders that
begin with ``day=``, so no row is ever seen twice; the last batch may become visible file by file.

Days are dropped in the database when all that is read back from their files is just what history_release finds there.

Renames on object stores are copies: there a batch is written twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import psycopg
from pyarrow import fs

from fairqueue.errors import FairqueueError, InvalidValue

from .digests import Digest
from .feeds import Feed, Offset, Range
from .files import Folder, Staged, flush, read_back, write_part
from .place import Place, row_of

__all__ = ["Archive", "Archived", "Each"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_MANIFEST = re.compile(r"(\d+)_(-?\d+)-(\d+)_(-?\d+)\.json")


class Each(Protocol):
    """Calls a function for each of the items, somewhere, and returns what that returns, in their order."""

    def __call__(self, function: Callable[[Item], Result], items: Sequence[Item], /) -> Sequence[Result]: ...


@dataclass
class Archived:
    """What a run has done.

    :param rows: of history that it has archived.
    :param batches: in so many batches.
    :param released: days that it has dropped in the database.
    :param kept: days that it was to drop, and why it hasn't.
    """

    rows: int = 0
    batches: int = 0
    released: list[date] = field(default_factory=list)
    kept: dict[date, str] = field(default_factory=dict)


class Archive:
    """One archive.

    :param path: of its folder: see :class:`.files.Folder`.
    :param feed: the name of the feed by which the database knows how far it is.
    :param each: where the work is done.
    """

    def __init__(self, place: Place, path: str, *, feed: str, each: Each) -> None:
        self._place = place
        self._folder = Folder(path)
        self._system, self._root = self._folder.open()
        self._name = feed
        self._feed = Feed(place, feed)
        self._each = each

    def run(
        self,
        *,
        max_rows: int,
        release_before: timedelta | None = None,
        progress: Callable[[Archived], None] = lambda _: None,
    ) -> Archived:
        """Archive what there is now, then drop days that ended longer than ``release_before`` ago; None: no day.

        :param max_rows: in a batch.
        :param progress: is told after each batch and each day.
        """
        done = Archived()
        with self._alone() as still_alone:
            horizon = self._feed.horizon()
            start = self._resumed(horizon)
            while (end := self._feed.next(start, max_rows=max_rows, horizon=horizon)) != start:
                manifest = self._written(start, end)
                self._reached("staged")
                still_alone()
                self._save(f"_batches/{_batch(start, end)}.json", manifest)
                self._reached("recorded")
                self._publish(manifest)
                start = end
                done.rows += manifest["rows"]
                done.batches += 1
                progress(done)
            faults: list[str] = []
            for day in [] if release_before is None else self._over(release_before):
                faults += self._release(day, done)
                progress(done)
            if faults:
                raise FairqueueError(f"not dropped: {'; '.join(faults)}")
        return done

    def _reached(self, step: str) -> None:
        """For tests, which interrupt it here."""

    @contextmanager
    def _alone(self) -> Iterator[Callable[[], None]]:
        """Nobody else writes to this archive; what it yields raises when that is no longer sure."""
        with self._place.connect(autocommit=True) as connection:
            # It is idle while a batch is written, and ending it would be the end of each run.
            connection.execute("SET idle_session_timeout = 0")
            name = f"fairqueue archive {self._place.schema} {self._name}"
            (locked,) = row_of(connection, "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", name)
            if not locked:
                raise FairqueueError(f"another process writes to the archive of feed {self._name!r}; wait for it")

            def still_alone() -> None:
                # The lock goes with its connection.
                connection.execute("SELECT 1")

            try:
                yield still_alone
            finally:
                # Said, as the server may notice a closed connection only after the next run has begun.
                with suppress(psycopg.Error):
                    connection.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", (name,))

    def _resumed(self, horizon: Offset) -> Offset:
        """From where to go on, when what an interrupted run had begun is finished or undone."""
        cursor = self._feed.cursor()
        found = self._load("_archive.json")
        if found is None:
            if cursor is not None:
                raise FairqueueError(
                    f"feed {self._name!r} has its archive elsewhere, not in {self._folder.path}; name another feed"
                )
            begin = self._feed.begin()
            self._save("_archive.json", {"feed": self._name, "begin": begin.document()})
            self._reached("begun")
            self._feed.move(begin)
            return begin
        if found.get("feed") != self._name:
            raise InvalidValue(
                f"{self._folder.path} is the archive of feed {found.get('feed')!r}, not of {self._name!r}"
            )
        last = self._last_manifest()
        end = Offset.of(found["begin"] if last is None else last["end"])
        self._feed.check(end, horizon)
        if cursor is not None and cursor > (end.xid, end.message_id):
            raise FairqueueError(
                f"feed {self._name!r} is ahead of {self._folder.path}: something else moves it, or batches are lost;"
                " name another feed, and begin another archive"
            )
        if last is not None and (cursor is None or cursor < (end.xid, end.message_id)):
            self._publish(last)
        self._feed.move(end)
        self._clear()
        return end

    def _written(self, start: Offset, end: Offset) -> dict[str, Any]:
        """The manifest of a batch that is on the stage."""
        batch = _batch(start, end)
        parts = self._feed.plan(start, end)
        write: Callable[[Range], list[Staged]] = partial(write_part, self._feed, self._folder, f"_staging/{batch}")
        staged = [file for files in self._each(write, parts) for file in files]
        total = sum((file.digest for file in staged), Digest())
        if total.rows != sum(part.rows for part in parts):
            raise FairqueueError(f"{sum(part.rows for part in parts)} rows of history are on the stage as {total.rows}")
        days = {
            day: sum((each.digest for each in staged if each.day == day), Digest()) for day in {f.day for f in staged}
        }
        return {
            "start": start.document(),
            "end": end.document(),
            "rows": total.rows,
            "days": {day.isoformat(): _plain(days[day]) for day in sorted(days)},
            "files": [
                {"path": file.place(f"{batch}-{number:05}"), "staged": file.path, **_plain(file.digest)}
                for number, file in enumerate(staged)
            ],
        }

    def _publish(self, manifest: dict[str, Any]) -> None:
        """Put the files of a batch in their place, as far as they aren't there, and move the feed."""
        folders = set()
        for file in manifest["files"]:
            source, target = (f"{self._root}/{file[name]}" for name in ("staged", "path"))
            found = {info.path: info.type == fs.FileType.File for info in self._system.get_file_info([source, target])}
            if found[source]:
                folder = target.rpartition("/")[0]
                self._system.create_dir(folder, recursive=True)
                self._system.move(source, target)
                folders |= {folder, folder.rpartition("/")[0]}
                self._reached("moved")
            elif not found[target]:
                raise FairqueueError(
                    f"{target} is missing, which the archive has had: {manifest['rows']} rows of history"
                )
        for folder in sorted(folders, reverse=True):
            flush(self._system, folder)
        self._reached("published")
        self._feed.move(Offset.of(manifest["end"]))
        self._reached("finished")
        self._clear()

    def _over(self, age: timedelta) -> list[date]:
        """The days in the database that ended so long ago."""
        place = self._place
        query = f"""
            SELECT d.day FROM (
                SELECT to_date(c.relname, '"history_"YYYY_MM_DD') AS day
                FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                WHERE i.inhparent = %s::regclass AND c.relname ~ '^history_\\d{{4}}_\\d\\d_\\d\\d$'
                UNION
                SELECT (h.finished_at AT TIME ZONE 'UTC')::date FROM {place.name("history_default")} h) d
            WHERE (d.day + 1)::timestamp AT TIME ZONE 'UTC' <= {place.name("clock")}() - %s
            ORDER BY d.day"""
        with place.connect() as connection:
            return [day for (day,) in connection.execute(query.encode(), (place.name("history"), age)).fetchall()]

    def _release(self, day: date, done: Archived) -> Iterator[str]:
        """Drop a day in the database, if its files have just what is there. What is wrong with them, if anything."""
        selector = fs.FileSelector(f"{self._root}/day={day}", recursive=True, allow_not_found=True)
        files = [
            info.path.removeprefix(f"{self._root}/")
            for info in self._system.get_file_info(selector)
            if info.type == fs.FileType.File and info.extension == "parquet"
        ]
        found = self._each(partial(read_back, self._folder), files)
        for path, days in zip(files, found, strict=True):
            if days.keys() - {day}:
                yield f"{path} has rows of {', '.join(str(each) for each in sorted(days))}"
                return
        digest = sum((days[day] for days in found if days), Digest())
        statement = f"SELECT {self._place.name('history_release')}(%s, %s, %s)"
        try:
            self._place.row(statement, day, digest.rows, digest.checksum)
        except (psycopg.errors.ObjectNotInPrerequisiteState, psycopg.errors.LockNotAvailable) as error:
            done.kept[day] = str(error.diag.message_primary)
        except psycopg.errors.DataCorrupted as error:
            if day not in self._over(timedelta()):
                return  # dropped as old meanwhile, which the feed allows from now on
            yield f"{error.diag.message_primary} in {self._root}/day={day}"
        else:
            done.released.append(day)
        self._reached("released")

    def _last_manifest(self) -> dict[str, Any] | None:
        selector = fs.FileSelector(f"{self._root}/_batches", allow_not_found=True)
        names = [info.base_name for info in self._system.get_file_info(selector)]
        matches = [found for name in names if (found := _MANIFEST.fullmatch(name))]
        last = max(matches, key=lambda found: (int(found[3]), int(found[4])), default=None)
        return None if last is None else self._load(f"_batches/{last[0]}")

    def _load(self, path: str) -> Any:
        """A document; None: there is none."""
        if self._system.get_file_info(f"{self._root}/{path}").type == fs.FileType.NotFound:
            return None
        with self._system.open_input_stream(f"{self._root}/{path}") as file:
            return json.loads(file.read())

    def _save(self, path: str, document: dict[str, Any]) -> None:
        """Write a document: all of it is there, or nothing."""
        folder, _, name = f"{self._root}/{path}".rpartition("/")
        for each in (folder, f"{self._root}/_staging"):
            self._system.create_dir(each, recursive=True)
        draft = f"{self._root}/_staging/{name}"
        with self._system.open_output_stream(draft) as file:
            file.write(json.dumps(document, indent=1).encode())
        flush(self._system, draft)
        self._system.move(draft, f"{folder}/{name}")
        flush(self._system, folder)

    def _clear(self) -> None:
        """Whatever is still on the stage is of nobody: of tasks that were tried again, or of a run that died."""
        self._system.delete_dir_contents(f"{self._root}/_staging", missing_dir_ok=True)


def _batch(start: Offset, end: Offset) -> str:
    return f"{start.xid}_{start.message_id}-{end.xid}_{end.message_id}"


def _plain(digest: Digest) -> dict[str, Any]:
    """As JSON; the checksum is text, as it is larger than what many take for a whole number."""
    return {"rows": digest.rows, "checksum": str(digest.checksum)}
