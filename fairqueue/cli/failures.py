"""What a command could not do, in one line on stderr."""

from __future__ import annotations

from typing import IO, Any

import click

from fairqueue._words import printable

__all__ = ["Failed", "Invalid", "complain"]


class Failed(click.ClickException):
    """The command could not do what it was asked to; the message says why and what to do, in one line."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        complain(self.message, file)


class Invalid(Failed):
    """A value on the command line, or in the environment, can't be."""

    exit_code = 2


def complain(message: str, file: IO[Any] | None = None) -> None:
    click.echo(f"fairqueue: {printable(' '.join(message.split()))}", file=file, err=file is None)
