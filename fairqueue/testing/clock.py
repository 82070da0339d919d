"""Time travel: the time by which the queue of a test database goes.

::

    import fairqueue as fq
    from fairqueue.testing import Clock

    with Clock(engine, test_database="shop_test") as clock:
        fq.enqueue(session, "acme", {"doc": 1}, delay=3600)
        session.commit()
        assert session.scalars(fq.dequeue()).all() == []
        session.commit()
        clock.tick(3600)
        assert len(session.scalars(fq.dequeue()).all()) == 1
        session.commit()

Everything in a queue goes by one SQL function, ``clock()``: when a message is due, when a lease runs out, backoffs,
rates, pauses, the days of history. Within the block it is replaced by one that can be moved. A move is there at once,
for every connection of the database, in open transactions too, and no rollback takes it back. Afterwards the function
is what it was, and time is real.

A delay counts from the flush of its message: ``session.flush()``, if not a commit, comes before the move.

The clock runs on, from wherever it was moved to, until it is told to :meth:`~Clock.freeze`; then it stands still but
for moves, and a test can say to the millisecond when something is due.

Limitations: it is the time of the queue, not that of Python's ``datetime.now()``, for which there are freezegun and
time-machine, nor of your own tables. One Clock at a time in a database. A transaction that is open when the block
begins may go on by real time until it ends. A message that is put back from the dead can't end again in the very
microsecond in which it died: where time stands still, move it before.
"""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta
from typing import Self

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from fairqueue._checks import TEN_YEARS, check_moment, check_seconds
from fairqueue.errors import InvalidValue
from fairqueue.schedule import EPOCH, since_epoch
from fairqueue.schema import literal, quote, run, schema_of, verify

from ._databases import COMMENT

__all__ = ["Clock"]

_MICROSECOND = timedelta(microseconds=1)

# A sequence is a number and a flag that everybody reads as they are now, in any transaction, whatever its isolation
# level. With the flag time stands still, at so many microseconds since 1970; else it runs, so many ahead of real time.
_REPLACEMENT = """\
CREATE OR REPLACE FUNCTION {function} RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN (
    SELECT CASE WHEN c.is_called THEN timestamptz 'epoch' ELSE clock_timestamp() END
        + (c.last_value / 1000000) * interval '1 second' + (c.last_value % 1000000) * interval '1 microsecond'
    FROM {sequence} c)"""


class Clock:
    """The time of a test database's queue, to be moved within a ``with`` block.

    :param engine: an Engine of the database. One with the execution options of :func:`fairqueue.in_schema` means the
        queue in that schema.
    :param test_database: the name of the database, unless the fixtures of this package made it. Time moves for
        everybody who uses it, so this has to be the name of the one that the engine turns out to be connected to: write
        it out, don't take it from the engine.
    :raises InvalidValue: on entering the block, if it is another database. Nothing has been done to it then.
    """

    def __init__(self, engine: Engine, *, test_database: str | None = None) -> None:
        if not isinstance(engine, Engine):
            raise InvalidValue(f"engine must be an Engine, not {type(engine).__name__}: make one of the same URL")
        self._engine = engine
        self._test_database = test_database
        self._schema = schema_of(engine.get_execution_options())
        self._function = f"{quote(self._schema)}.clock()"
        self._sequence = f"{quote(self._schema)}.moved_clock"

    def __enter__(self) -> Self:
        with self._engine.begin() as connection:
            self._check_database(connection)
            verify(connection, self._schema)
            if not self._is_replaced(connection):
                self._replace(connection)
            self._reset(connection)
        return self

    def __exit__(self, *_: object) -> None:
        with self._engine.begin() as connection:
            if self._is_replaced(connection):  # and the queue hasn't been removed since
                self._reset(connection)  # for a transaction that is open and keeps to the function that it knows
                regclass = literal(self._sequence)
                original = run(connection, f"SELECT obj_description({regclass}::regclass, 'pg_class')").scalar_one()
                run(connection, original)
        # Such a transaction keeps the sequence from being dropped. Then it stays, and does no harm.
        with contextlib.suppress(OperationalError), self._engine.connect() as connection:
            connection.execution_options(isolation_level="READ COMMITTED")  # in AUTOCOMMIT nothing is LOCAL
            run(connection, "SET LOCAL lock_timeout = '1ms'")
            run(connection, f"DROP SEQUENCE IF EXISTS {self._sequence}")
            connection.commit()

    def now(self) -> datetime:
        """The time by this clock, in UTC."""
        with self._engine.begin() as connection:
            microseconds: int = run(connection, f"SELECT {_unix(self._function)}").scalar_one()
        return EPOCH + microseconds * _MICROSECOND

    def freeze(self) -> None:
        """Let it stand still, but for moves."""
        self._set(_unix(self._function), "true")

    def tick(self, by: float | timedelta) -> None:
        """Move it by so many seconds, or a timedelta, of at most ten years; negative: back."""
        self._set(f"c.last_value + {round(check_seconds('by', by, minimum=-TEN_YEARS) * 1_000_000)}")

    def move_to(self, at: datetime) -> None:
        """Move it to a moment, a datetime with a time zone. A frozen clock stands there, another runs on from there."""
        unix = since_epoch(check_moment("at", at)) // _MICROSECOND
        self._set(f"CASE WHEN c.is_called THEN {unix} ELSE {unix} - {_unix('clock_timestamp()')} END")

    def _set(self, value: str, frozen: str = "c.is_called") -> None:
        with self._engine.begin() as connection:
            run(connection, f"SELECT setval(c.tableoid::regclass, {value}, {frozen}) FROM {self._sequence} c")

    def _reset(self, connection: Connection) -> None:
        """Real time; not taken back where the transaction fails."""
        run(connection, f"SELECT setval({literal(self._sequence)}::regclass, 0, false)")

    def _check_database(self, connection: Connection) -> None:
        query = "SELECT shobj_description(d.oid, 'pg_database') FROM pg_database d WHERE d.datname = current_database()"
        name = run(connection, "SELECT current_database()").scalar_one()
        comment = run(connection, query).scalar_one()
        if self._test_database is None and comment != COMMENT:
            raise InvalidValue(
                f"database {name!r} was not made by fairqueue.testing, so its time is left alone: if it is only for"
                f" tests, say Clock(engine, test_database={name!r})"
            )
        if self._test_database not in {None, name}:
            raise InvalidValue(f"test_database is {self._test_database!r}, but the engine is connected to {name!r}")

    def _definition(self, connection: Connection) -> str | None:
        query = f"SELECT pg_get_functiondef(to_regprocedure({literal(self._function)}))"
        definition: str | None = run(connection, query).scalar_one()
        return definition

    def _is_replaced(self, connection: Connection) -> bool:
        return "moved_clock" in (self._definition(connection) or "")

    def _replace(self, connection: Connection) -> None:
        original = self._definition(connection)
        assert original is not None
        run(connection, f"CREATE SEQUENCE IF NOT EXISTS {self._sequence} AS bigint MINVALUE {-(2**63)} START 0")
        # Kept in the database, for whoever comes after a run that was killed.
        run(connection, f"COMMENT ON SEQUENCE {self._sequence} IS {literal(original)}")
        # Column defaults call the function with the rights of whoever inserts.
        run(connection, f"GRANT SELECT ON SEQUENCE {self._sequence} TO PUBLIC")
        run(connection, _REPLACEMENT.format(function=self._function, sequence=self._sequence))


def _unix(moment: str) -> str:
    """Microseconds since 1970, as SQL."""
    return f"(extract(epoch FROM {moment}) * 1000000)::bigint"
