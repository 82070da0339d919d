"""Policies with bad input get one clear error, that names field, value and what it may be."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.wrong import INF, NAMES, NAN, NOON

NOT_COUNTS = [-1, 0, 1.5, NAN, INF, True, "1", 2**31]
NOT_SECONDS = [-1, NAN, INF, True, "1", 31_557_600.1]
WEIGHT = (r"a number from 0.01 to 1000", [-1, 0, NAN, INF, -INF, True, "1", 0.0099, 1000.1])
COUNT = (r"a whole number from 1 to 2147483647", NOT_COUNTS)
INTERVAL = (r"a whole number from 0 to 31557600000", [-1, 1.5, NAN, True, "1", timedelta(1), 31_557_600_001])
BURST = (r"a whole number from 1 to 1000000", [*NOT_COUNTS, 1_000_001])
OVERFLOW = (r"'reject' or 'drop'", ["", "Drop", 1, True, b"drop"])
FLAG = (r"True or False", [None, 0, 1, "yes"])
MOMENT = (r"a datetime with a time zone", [datetime(2030, 1, 1), "tomorrow", 0, date(2030, 1, 1)])  # noqa: DTZ001
SECONDS = (r"between 0 and 31557600 seconds", NOT_SECONDS)

CHANNEL: dict[str, tuple[str, list[Any]]] = {
    "weight": WEIGHT,
    "max_concurrency": COUNT,
    "release_interval_ms": INTERVAL,
    "burst": BURST,
    "max_size": COUNT,
    "overflow": OVERFLOW,
    "paused": FLAG,
    "resume_at": MOMENT,
}
QUEUE: dict[str, tuple[str, list[Any]]] = {
    "max_concurrency": COUNT,
    "paused": FLAG,
    "resume_at": MOMENT,
    "max_attempts": (COUNT[0], [*NOT_COUNTS, None]),
    "backoff": (SECONDS[0], [*NOT_SECONDS, None]),
    "max_backoff": (SECONDS[0], [*NOT_SECONDS, None]),
    "history_days": (r"a whole number from 0 to 36500", [-1, 1.5, NAN, True, "1", 36_501, None]),
    "channel_weight": (WEIGHT[0], [*WEIGHT[1], None]),
    "channel_max_concurrency": COUNT,
    "channel_release_interval_ms": (INTERVAL[0], [*INTERVAL[1], None]),
    "channel_burst": (BURST[0], [*BURST[1], None]),
    "channel_max_size": COUNT,
    "channel_overflow": (OVERFLOW[0], [*OVERFLOW[1], None]),
}
FIELDS = [(fq.Channel, field) for field in CHANNEL] + [(fq.Queue, field) for field in QUEUE]


class TestPolicies:
    def test_every_field_is_here(self) -> None:
        for model, fields in ((fq.Channel, CHANNEL), (fq.Queue, QUEUE)):
            assert fields.keys() == set(model.__table__.c.keys()) - {"queue", "name", "created_at"}

    @pytest.mark.parametrize(("model", "field"), FIELDS, ids=lambda each: getattr(each, "__name__", each))
    def test_fields(self, model: Any, field: str) -> None:
        """When it is made, and later; the error names field, value and what it may be."""
        expected, values = (CHANNEL if model is fq.Channel else QUEUE)[field]
        other = {"paused": True} if field == "resume_at" else {}
        for value in values:
            with pytest.raises(fq.InvalidValue, match=f"^{field} must be {expected}, not ") as error:
                model("acme", **{field: value, **other})
            assert repr(value) in str(error.value)
            with pytest.raises(fq.InvalidValue, match=f"^{field} must be {expected}, not "):
                setattr(model("acme"), field, value)

    def test_extremes(self, session: Session) -> None:
        most: dict[str, Any] = {"release_interval_ms": 31_557_600_000, "burst": 1_000_000, "max_size": 2**31 - 1}
        ends: dict[str, Any] = {"max_attempts": 2**31 - 1, "backoff": 31_557_600, "max_backoff": 31_557_600}
        for weight in (0.01, 1000):
            own = {"weight": weight, "max_concurrency": 2**31 - 1, **most}
            session.merge(fq.Channel("acme", **own))
            channels = {f"channel_{field}": value for field, value in own.items()}
            session.merge(fq.Queue("default", history_days=36_500, **ends, **channels))
            session.flush()

    @pytest.mark.parametrize("model", [fq.Channel, fq.Queue])
    def test_an_end_without_a_pause(self, model: Any) -> None:
        for paused in ({}, {"paused": False}):
            with pytest.raises(fq.InvalidValue, match="resume_at says until when a pause lasts: give paused=True"):
                model("acme", resume_at=NOON, **paused)

    @pytest.mark.parametrize("until", MOMENT[1], ids=map(str, MOMENT[1]))
    def test_until(self, until: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^until must be a datetime with a time zone, not"):
            fq.pause(queue="default", until=until)

    @pytest.mark.parametrize("end", [datetime.max, datetime(9999, 1, 1), datetime.min], ids=str)  # noqa: DTZ001, DTZ901
    def test_an_end_that_could_not_be_read_back(self, end: datetime) -> None:
        """Where the server is in another time zone, Python may not know the year."""
        end = end.replace(tzinfo=UTC)
        said = r"must be in the years 2 to 9998 \(UTC\), not (9999|0001)-.*\+00:00: leave it out for no end$"
        for model in (fq.Channel, fq.Queue):
            with pytest.raises(fq.InvalidValue, match=f"^resume_at {said}"):
                model("acme", paused=True, resume_at=end)
            with pytest.raises(fq.InvalidValue, match=f"^resume_at {said}"):
                model("acme").resume_at = end
        with pytest.raises(fq.InvalidValue, match=f"^until {said}"):
            fq.pause(queue="default", until=end)

    @pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
    def test_names_to_pause(self, name: Any) -> None:
        statements: list[Callable[..., object]] = [fq.pause, fq.resume]
        for statement in statements:
            for field in ("queue", "channel"):
                # A name that is missing by mistake must not stop everybody, in whichever queue.
                for other in ({}, {"queue": "transcode", "channel": "acme"}):
                    with pytest.raises(fq.InvalidValue, match=f"^{field} (must|holds)"):
                        statement(**{**other, field: name})
            with pytest.raises(fq.InvalidValue, match=r"^one of queue and channel must be given: "):
                statement()

    @pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
    def test_names(self, name: Any) -> None:
        for model, field in ((fq.Channel, "name"), (fq.Channel, "queue"), (fq.Queue, "name")):
            with pytest.raises(fq.InvalidValue, match=f"^{field} (must|holds)"):
                model(**{"name": "acme", field: name})
