"""How the command line writes what it has found."""

from datetime import timedelta

import pytest

from fairqueue.cli.output import duration, printable


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


@pytest.mark.parametrize("character", ["\t", "\n", "\r", "\x1b", "\x9b", "\u202e", "\u2028", "\x00"])
def test_what_a_terminal_would_obey(character: str) -> None:
    """Or would show as more than a line, or a column."""
    shown = printable(f"a{character}b")
    assert shown.isprintable()
    assert shown.encode().decode("unicode_escape") == f"a{character}b"
