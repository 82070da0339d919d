"""How the command line writes what it has found."""

from datetime import timedelta

import pytest

from fairqueue._words import parse_duration
from fairqueue.cli.output import duration, printable
from fairqueue.cli.types import Duration


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        *((-3, "0.0 s"), (0.04, "0.0 s"), (9.9, "9.9 s"), (10, "10 s"), (119, "119 s"), (120, "2 min")),
        *((7199, "120 min"), (7200, "2 h"), (172_799, "48 h"), (172_800, "2 d"), (1e8, "1,157 d")),
    ],
)
def test_durations(seconds: float, written: str) -> None:
    """In two or three digits; what may be over by now is no less than nothing."""
    assert duration(timedelta(seconds=seconds)) == written


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("15 min", 900), ("1 hour", 3600), (" 2 Hours ", 7200), ("1D", 86_400), ("0s", 0)],
)
def test_durations_as_they_are_given(text: str, seconds: float) -> None:
    """With a letter, or as people write them: the same for all options."""
    assert Duration().convert(text, None, None) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "10", "m", "-1m", "1.5h", "1 month", "1h 30m", "1000000s", "1 \u017f"])
def test_what_is_no_duration(text: str) -> None:
    assert parse_duration(text) is None


@pytest.mark.parametrize("character", ["\t", "\n", "\r", "\x1b", "\x9b", "\u202e", "\u2028", "\x00"])
def test_what_a_terminal_would_obey(character: str) -> None:
    """Or would show as more than a line, or a column."""
    shown = printable(f"a{character}b")
    assert shown.isprintable()
    assert shown.encode().decode("unicode_escape") == f"a{character}b"
