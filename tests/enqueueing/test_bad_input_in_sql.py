"""Bad input in SQL, as any other language meets it: an SQLSTATE, the field's name in the text, and nothing is written.

And what one producer may insert can't stop the queue for the others.
"""

import psycopg
import pytest
from psycopg import errors
from sqlalchemy import Engine

from tests.acts import alter
from tests.fixtures.connections import Raw
from tests.observing import impatient, observer, rows, value

pytestmark = pytest.mark.shared_database

NULL, CHECK, PARAMETER = errors.NotNullViolation, errors.CheckViolation, errors.InvalidParameterValue
PLACE = ("constraint", "table", "column")
LONG = "repeat('x', 256)"
HUGE = "repeat('x', 1000000)"
LETTER = "'x'"
# That can't be compressed to what an index holds.
DENSE = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 200) g)"
TEN_YEARS = "must be between {} and 315576000, not {}"

# queues, channels, keys and costs; the other lists of message_create_many are empty.
MANY = "{}, {}, {}, NULL, NULL, NULL, NULL, {}, NULL, NULL"
NAMES = ("queue", "channel", "key")

# What may be set for a channel, the end of its constraint's name, and what it may not be.
POLICY: list[tuple[str, str, tuple[object, ...]]] = [
    ("weight", "range", (-1, 0, "NaN", "Infinity", 0.0099, 1001)),
    ("max_concurrency", "range", (0, -1)),
    ("release_interval_ms", "range", (-1, 31557600001)),
    ("burst", "range", (0, -1, 1000001)),
    ("max_size", "range", (0, -1)),
    ("overflow", "known", ("", "Drop")),
]

CASES: list[tuple[str, type[psycopg.Error], str]] = [
    # message_create
    ("message_create(NULL)", NULL, 'column "channel"'),
    ("message_create('')", CHECK, "message_channel_length"),
    (f"message_create({LONG})", CHECK, "channel must have 1 to 255 characters, not 256"),
    (f"message_create({HUGE})", CHECK, "message_channel_length"),
    ("message_create('a', queue => NULL)", NULL, 'column "queue"'),
    ("message_create('a', queue => '')", CHECK, "message_queue_length"),
    (f"message_create('a', queue => {LONG})", CHECK, "queue must have 1 to 255 characters, not 256"),
    ("message_create('a', cost => NULL)", NULL, 'column "cost"'),
    *[(f"message_create('a', cost => '{n}')", CHECK, "message_cost_range") for n in (-1, 0, "NaN", "Infinity", 1e7)],
    *[
        (f"message_create('a', delay_seconds => '{n}')", PARAMETER, "delay_seconds " + TEN_YEARS.format(0, n))
        for n in (-1, "NaN", "Infinity", "-Infinity", 315576001)
    ],
    ("message_create('a', priority => -1)", PARAMETER, "priority must be 0 or more, not -1"),
    (
        "message_create('a', priority => 1, delay_seconds => 1)",
        PARAMETER,
        "only one of delay_seconds, dequeue_at and priority may be given",
    ),
    ("message_create('a', priority => 1, dequeue_at => 1)", PARAMETER, "only one of delay_seconds, dequeue_at"),
    ("message_create('a', payload => 'NaN')", errors.InvalidTextRepresentation, "type json"),
    ("message_create('a', payload => '\"\\u0000\"')", errors.UntranslatableCharacter, "Unicode escape"),
    ("message_create('a', pirority => 1)", errors.UndefinedFunction, "pirority"),
    ("message_create('a', key => '')", CHECK, "message_key_length"),
    (f"message_create('a', key => {LONG})", CHECK, "key must have 1 to 255 characters, not 256"),
    *[(f"message_create('a', max_attempts => {n})", CHECK, "message_max_attempts_range") for n in (0, -1)],
    *[
        (f"message_create('a', backoff => '{n}')", CHECK, "message_backoff_range")
        for n in (-1, "NaN", "Infinity", 31557601)
    ],
    *[
        (
            f"message_create('a', key => 'k', on_conflict => {n})",
            PARAMETER,
            "on_conflict must be raise, ignore or replace",
        )
        for n in ("NULL", "''", "'update'")
    ],
    *[
        (f"message_create('a', on_conflict => '{n}')", PARAMETER, f"on_conflict is '{n}', but there is no key")
        for n in ("ignore", "replace")
    ],
    *[
        (f"message_create('', key => 'k', on_conflict => '{n}')", CHECK, "message_channel_length")
        for n in ("ignore", "replace")
    ],
    # message_create_many
    *[
        (f"message_create_many({lists}, on_conflict => '{mode}')", state, text)
        for mode in ("raise", "ignore", "replace")
        for lists, state, text in [
            (MANY.format("'{q}'", "'{NULL}'", "'{k}'", "'{1}'"), NULL, 'column "channel"'),
            (MANY.format("'{q}'", "NULL", "'{k}'", "'{1}'"), NULL, 'column "channel"'),
            (MANY.format("'{q,q}'", "'{a}'", "'{k,l}'", "'{1,1}'"), PARAMETER, "as many elements as queues, 2"),
            *[
                (
                    f"'{{q}}', '{{a}}', '{{k}}', NULL, NULL, NULL, '{{{n}}}', '{{1}}', NULL, NULL",
                    PARAMETER,
                    "delays must be between 0 and 315576000",
                )
                for n in (-5, "NaN", "Infinity", 1e300)
            ],
            ("'{q}', '{a}', '{k}', NULL, NULL, '{1}', '{1}', '{1}', NULL, NULL", PARAMETER, "only one of dequeue_ats"),
            (MANY.format("'{NULL}'", "'{a}'", "'{k}'", "'{1}'"), NULL, 'column "queue"'),
            (MANY.format("'{q}'", "'{a}'", "ARRAY['']", "'{1}'"), CHECK, "message_key_length"),
            (MANY.format("'{q}'", "'{a}'", f"ARRAY[{LONG}]", "'{1}'"), CHECK, "key must have 1 to 255 characters"),
            *[
                (
                    MANY.format(*(f"ARRAY['a', {DENSE if name == field else LETTER}]" for name in NAMES), "'{1, 1}'"),
                    CHECK,
                    f"{field} must have 1 to 255 characters, not 6400",
                )
                for field in NAMES
            ],
            (MANY.format("'{q}'", "'{a}'", "'{k}'", "'{NaN}'"), CHECK, "message_cost_range"),
        ]
    ],
    *[
        (
            f"message_create_many('{{q}}', '{{a}}', {'NULL, ' * n}'{{1,1}}'{', NULL' * (7 - n)})",
            PARAMETER,
            "as many elements as queues, 1",
        )
        for n in range(8)
    ],
    (f"message_create_many({MANY.format(*['NULL'] * 4)}, NULL)", PARAMETER, "on_conflict must be raise, ignore or"),
    # message_dequeue
    ("message_dequeue(NULL)", PARAMETER, "queue must have 1 to 255 characters, not null"),
    ("message_dequeue('')", PARAMETER, "queue must have 1 to 255 characters, not 0"),
    (f"message_dequeue({HUGE})", PARAMETER, "queue must have 1 to 255 characters, not 1000000"),
    *[
        (f"message_dequeue('a', {n})", PARAMETER, f"max_messages must be 1 to 10000, not {n}".lower())
        for n in ("NULL", 0, -1, 10001)
    ],
    *[
        (f"message_dequeue('a', 1, {n})", PARAMETER, "lease_seconds " + TEN_YEARS.format(0.001, n.strip("'").lower()))
        for n in ("NULL", "0", "-1", "315576001")
    ],
    *[
        (f"message_dequeue('a', 1, '{n}')", PARAMETER, "lease_seconds " + TEN_YEARS.format(0.001, n))
        for n in ("NaN", "Infinity")
    ],
    (f"message_dequeue('a', worker => {LONG})", PARAMETER, "worker must have at most 255 characters, not 256"),
    # the acts on leases
    *[
        (f"message_{verb}({lists})", PARAMETER, f"ids and attempts must have the same length, not {lengths}")
        for verb in ("complete", "fail", "defer", "heartbeat")
        for lists, lengths in {
            "ARRAY[1, 2], ARRAY[1]": "2 and 1",
            "'{}', ARRAY[1]": "0 and 1",
            "NULL, NULL": "null and null",
            "ARRAY[1], NULL": "1 and null",
            "NULL, ARRAY[1]": "null and 1",
        }.items()
    ],
    *[
        (f"message_{verb}('{{1}}', '{{1}}', delay_seconds => '{n}')", PARAMETER, "delay_seconds must be between 0 and")
        for verb in ("fail", "defer")
        for n in (-1, "NaN", "Infinity")
    ],
    ("message_fail('{1}', '{1}', retry => NULL)", PARAMETER, "retry must be true or false, not null"),
    ("message_heartbeat('{1}', '{1}', 0)", PARAMETER, "lease_seconds " + TEN_YEARS.format(0.001, 0)),
    ("message_heartbeat('{1}', '{1}', 'NaN')", PARAMETER, "lease_seconds " + TEN_YEARS.format(0.001, "NaN")),
    (
        "message_defer('{1}', '{1}', states => ARRAY['1', '2']::jsonb[])",
        PARAMETER,
        "ids and states must have the same length, not 1 and 2",
    ),
    ("message_cancel(NULL)", PARAMETER, "ids must be a list of message ids, not null"),
    ("message_ending(NULL)", PARAMETER, "ids must be a list of message ids, not null"),
    # message_redrive
    ("message_redrive()", PARAMETER, "one of ids and queue must be given, not none"),
    ("message_redrive('{1}', 'default')", PARAMETER, "one of ids and queue must be given, not both"),
    ("message_redrive('{1}', channel => 'acme')", PARAMETER, "channel 'acme' must be given with its queue"),
    ("message_redrive(channel => 'acme')", PARAMETER, "one of ids and queue must be given, not none"),
    # channel_set
    ("channel_set(NULL)", NULL, 'column "name"'),
    ("channel_set('')", CHECK, "channel_name_length"),
    (f"channel_set({HUGE})", CHECK, "channel_name_length"),
    ("channel_set('a', queue => NULL)", NULL, 'column "queue"'),
    ("channel_set('a', queue => '')", CHECK, "channel_queue_length"),
    *[
        (f"channel_set('a', {field} => '{n}')", CHECK, f"channel_{field}_{suffix}")
        for field, suffix, values in POLICY
        for n in values
    ],
    ("channel_set('a', paused => true, resume_at => 'infinity')", CHECK, "channel_resume_at_finite"),
    (
        "channel_set('a', resume_at => '2100-01-01')",
        PARAMETER,
        "but paused is null",
    ),
    ("channel_set('a', paused => false, resume_at => '2100-01-01')", PARAMETER, "but paused is false"),
    # queue_set
    ("queue_set(NULL)", NULL, 'column "name"'),
    ("queue_set('')", CHECK, "queue_name_length"),
    (f"queue_set({HUGE})", CHECK, "queue_name_length"),
    *[
        (f"queue_set('a', channel_{field} => '{n}')", CHECK, f"queue_channel_{field}_{suffix}")
        for field, suffix, values in POLICY
        for n in values
    ],
    *[
        (f"queue_set('a', {field} => '{n}')", CHECK, f"queue_{field}_range")
        for field, values in {
            "max_concurrency": (0, -1),
            "max_attempts": (0, -1),
            "backoff": (-1, "NaN", "Infinity", 31557601),
            "max_backoff": (-1, "NaN", "Infinity", 31557601),
            "history_days": (-1, 36501),
        }.items()
        for n in values
    ],
    ("queue_set('a', paused => true, resume_at => '-infinity')", CHECK, "queue_resume_at_finite"),
    ("queue_set('a', resume_at => '2100-01-01')", PARAMETER, "but paused is null"),
]

INSERTS: list[tuple[str, type[psycopg.Error], str]] = [
    ("message (channel) VALUES (NULL)", NULL, 'column "channel"'),
    ("message (payload) VALUES ('1')", NULL, 'column "channel"'),
    ("message (channel) VALUES ('')", CHECK, "message_channel_length"),
    ("message (channel, queue) VALUES ('a', '')", CHECK, "message_queue_length"),
    ("message (channel, cost) VALUES ('a', 'NaN')", CHECK, "message_cost_range"),
    ("message (channel, dequeue_at) VALUES ('a', NULL)", NULL, 'column "dequeue_at"'),
    ("message (channel, dequeue_at) VALUES ('a', 1e30)", errors.NumericValueOutOfRange, "bigint out of range"),
    ("message (channel, prioritty) VALUES ('a', 1)", errors.UndefinedColumn, 'column "prioritty"'),
    ("message (channel, id) VALUES ('a', 1)", errors.GeneratedAlways, 'column "id"'),
    (
        "message (channel, body) VALUES ('a', repeat('x', 67108865)::bytea)",
        CHECK,
        "body must have at most 67108864 bytes, not 67108865",
    ),
    (
        "message (channel, payload) VALUES ('a', to_jsonb(repeat('x', 67108865)))",
        CHECK,
        "message_payload_size",
    ),
    ("message (channel, key) VALUES ('a', '')", CHECK, "message_key_length"),
    ("message (channel, key) VALUES ('a', 'k'), ('b', '')", CHECK, "key must have 1 to 255 characters, not 0"),
    ("message (channel, max_attempts) VALUES ('a', 0)", CHECK, "message_max_attempts_range"),
    ("message (channel, backoff) VALUES ('a', 'NaN')", CHECK, "message_backoff_range"),
    *[
        (f"message (channel, {field}) VALUES ('a', '{at}')", CHECK, f"{field} must be in the years 2 to 9998, not")
        for field in ("created_at", "first_leased_at")
        for at in ("infinity", "-infinity", "9999-01-01 UTC", "20000-01-01", "0001-06-01 UTC", "0044-03-15 BC")
    ],
    ("channel (name, weight) VALUES ('a', 'NaN')", CHECK, "channel_weight_range"),
    ("channel (name, max_size) VALUES ('a', 0)", CHECK, "channel_max_size_range"),
    ("channel (name, paused) VALUES ('a', NULL)", NULL, 'column "paused"'),
    ("queue (name, max_attempts) VALUES ('a', NULL)", NULL, 'column "max_attempts"'),
    ("channel (name) VALUES (NULL)", NULL, 'column "name"'),
    (f"queue (name) VALUES ({LONG})", CHECK, "queue_name_length"),
]


def test_refused(raw: Raw, database_url: str) -> None:
    """Each statement: its SQLSTATE, the field in its text and for programs, and in the end no row in any table."""
    connection = observer(raw, database_url)
    statements = [(f"SELECT * FROM fairqueue.{call}", state, text) for call, state, text in CASES]
    statements += [(f"INSERT INTO fairqueue.{insert}", state, text) for insert, state, text in INSERTS]
    for statement, sqlstate, text in statements:
        with pytest.raises(sqlstate) as error:
            connection.execute(statement.encode())
        constraint, table, column = (getattr(error.value.diag, f"{kind}_name") for kind in PLACE)
        assert text in f"{error.value} {constraint}", statement
        if sqlstate is CHECK:
            # PostgreSQL itself names no column of a constraint.
            assert constraint.startswith(f"message_{column}_" if table == "message" else f"{table}_"), statement
    assert rows(connection) == {}


@pytest.mark.shared_database(False)
def test_a_change_is_refused_as_what_is_new_is(engine: Engine, raw: Raw, database_url: str) -> None:
    """Of each column by itself. Here 10,001 bytes are too large, which are few when they are compressed."""
    for function in ("message_valid", "message_refuse"):
        alter(engine, function, "67108864", "10000")
    connection = observer(raw, database_url)
    connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('a')")
    changes = {"queue": "''", "channel": "''", "key": "''", "cost": "0", "max_attempts": "0", "backoff": "-1"}
    changes |= {"payload": "to_jsonb(repeat('x', 10001))", "body": "repeat('x', 10001)::bytea"}
    for column, new in changes.items():
        with pytest.raises(CHECK, match=f"{column} must"):
            connection.execute(f"UPDATE fairqueue.message SET {column} = {new}".encode())


def test_times_that_programs_cannot_read(raw: Raw, database_url: str) -> None:
    """A batch is leased before they are read, so one of them would take the others with it."""
    connection = observer(raw, database_url)
    connection.execute("INSERT INTO fairqueue.message (channel, created_at) VALUES ('a', '0002-01-01 UTC')")
    connection.execute("INSERT INTO fairqueue.message (channel, created_at) VALUES ('a', '9998-12-31 UTC')")
    with pytest.raises(CHECK, match="created_at must be in the years 2 to 9998, not infinity"):
        connection.execute("UPDATE fairqueue.message SET created_at = 'infinity'")
    for zone in ("Etc/GMT+12", "Pacific/Kiritimati"):
        connection.execute("SELECT set_config('TimeZone', %s, false)", (zone,))
        found = connection.execute("SELECT created_at FROM fairqueue.message_dequeue('default', 1)").fetchall()
        assert len(found) == 1


def test_codes() -> None:
    """Those that the documentation promises to other languages."""
    assert (NULL.sqlstate, CHECK.sqlstate, PARAMETER.sqlstate) == ("23502", "23514", "22023")


def test_odd_but_harmless_ids(raw: Raw, database_url: str) -> None:
    connection = observer(raw, database_url)
    for verb in ("complete", "fail", "defer", "heartbeat"):
        query = f"SELECT * FROM fairqueue.message_{verb}(ARRAY[NULL, -1, 9223372036854775807], ARRAY[1, NULL, 1])"
        told = connection.execute(query.encode()).fetchall()
        assert told == [(None, "not_found"), (-1, "not_found"), (9223372036854775807, "not_found")]


@pytest.mark.parametrize(
    "columns",
    [
        "dequeue_at) VALUES ('evil', 9223372036854775807)",
        "dequeue_at) VALUES ('evil', -9223372036854775808)",
        "attempt) VALUES ('evil', 2147483647)",
        "attempt) VALUES ('evil', -2147483648)",
        "forgiven) VALUES ('evil', 2147483647)",
        "forgiven) VALUES ('evil', -2147483648)",
        "attempt, forgiven) VALUES ('evil', 2147483647, -2147483648)",
        "attempt, max_attempts) VALUES ('evil', 7, 1)",
        "backoff) VALUES ('evil', 31557600)",
        "id) OVERRIDING SYSTEM VALUE VALUES ('evil', 9223372036854775807)",
        "id) OVERRIDING SYSTEM VALUE VALUES ('evil', -9223372036854775808)",
        "cost) VALUES ('evil', 1e-300)",
        "cost) VALUES ('evil', 1000000)",
        "leased_until) VALUES ('evil', '-infinity')",
        "leased_until) VALUES ('evil', 'infinity')",
        "leased_until) VALUES ('evil', '2001-01-01')",
        "created_at) VALUES ('evil', '-infinity')",
    ],
    ids=lambda columns: columns.replace(" OVERRIDING SYSTEM VALUE", "").replace(" VALUES ('evil', ", "").strip(")"),
)
def test_odd_rows_stop_nobody_else(raw: Raw, database_url: str, columns: str) -> None:
    """They are refused or served, and either way everybody else's messages go on."""
    connection = impatient(raw, database_url)
    connection.autocommit = True
    connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('acme')")
    try:
        connection.execute(f"INSERT INTO fairqueue.message (channel, {columns}".encode())
    except psycopg.Error as error:
        assert error.sqlstate in {"22023", "23514", "23502", "42501"}  # noqa: PT017
    connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('acme')")
    served = []
    for limit in (1, 1, 1, 10, 10):
        batch = connection.execute(
            "SELECT channel, id, attempt FROM fairqueue.message_dequeue('default', %s)", (limit,)
        ).fetchall()
        served += [channel for channel, _, _ in batch if channel == "acme"]
        for _, id_, attempt in batch:
            connection.execute("SELECT * FROM fairqueue.message_fail(ARRAY[%s], ARRAY[%s], 'x', 1000)", (id_, attempt))
    assert served == ["acme", "acme"]


@pytest.mark.parametrize("before", [3, 4, 10])
def test_the_last_of_all_ids(raw: Raw, database_url: str, before: int) -> None:
    """Right behind what a batch takes of its channel."""
    connection = impatient(raw, database_url)
    connection.autocommit = True
    connection.execute(
        "INSERT INTO fairqueue.message (channel, dequeue_at) SELECT 'evil', 0 FROM generate_series(1, %s)", (before,)
    )
    connection.execute(
        "INSERT INTO fairqueue.message (channel, dequeue_at, id) OVERRIDING SYSTEM VALUE"
        " VALUES ('evil', 0, 9223372036854775807)"
    )
    served = [
        len(connection.execute("SELECT FROM fairqueue.message_dequeue('default', %s)", (before,)).fetchall())
        for _ in range(2)
    ]
    assert served == [before, 1]


@pytest.mark.shared_database(False)
def test_heavy_messages_of_light_channels(raw: Raw, database_url: str) -> None:
    """The largest cost and the least weight, in the largest batches: virtual time doesn't run out of numbers."""
    connection = impatient(raw, database_url)
    connection.autocommit = True
    connection.execute("SELECT fairqueue.channel_set('heavy', weight => 0.01)")
    connection.execute(
        "INSERT INTO fairqueue.message (channel, cost) SELECT 'heavy', 1000000 FROM generate_series(1, 30000)"
    )
    connection.execute("INSERT INTO fairqueue.message (channel) SELECT 'light' FROM generate_series(1, 3)")
    served = 0
    for _ in range(4):
        query = "SELECT count(*) FROM fairqueue.message_dequeue('default', 10000)"
        served += value(connection, query)
    assert served == 30003
