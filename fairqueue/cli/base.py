"""What all commands have in common: an error is one line on stderr, and the exit code says what it was."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click
from click.exceptions import Exit

from .failures import complain

__all__ = ["EXIT_CODES", "INTERRUPTED", "Command", "Group", "OwnersCommand", "ended"]

INTERRUPTED = 130

EXIT_CODES = """\
\b
Exit codes:
  0    fine
  1    what was asked about is not fine, or could not be done
  2    the command line is wrong, or a value in it
  130  stopped by Ctrl-C
"""

# click 8.2 and later
_NoArguments: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _Program(click.Command):
    """Complains in one line, without the usage."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            code = super().main(
                args, prog_name, complete_var, standalone_mode=False, windows_expand_args=windows_expand_args, **extra
            )
        except (click.Abort, click.ClickException) as error:
            if not standalone_mode:
                raise
            _exit(error)
        if not standalone_mode:
            return code
        sys.exit(code or 0)


class Command(_Program):
    """A command whose known errors are one line on stderr. Its callback returns nothing."""

    #: The kind of role that the command is for, or ``owner``; None: an observer or an operator.
    kind: str | None = None

    def invoke(self, ctx: click.Context) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A tenant's name may have letters that the terminal's encoding has not.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            super().invoke(ctx)
        except KeyboardInterrupt:
            raise Exit(INTERRUPTED) from None
        except (click.Abort, Exit):
            raise
        except Exception as error:
            if (end := ended(error)) is not None:
                from fairqueue.errors import FairqueueError

                if isinstance(error, FairqueueError):  # of what is done at the end: it may have left something behind
                    complain(str(error))
                raise end from error
            if isinstance(error, click.ClickException):
                raise
            from .errors import explained

            failure = explained(error, kind=self.kind)
            if failure is None:
                raise
            raise failure from error


def ended(error: BaseException) -> BaseException | None:
    """The exit that a signal asked for, where a driver that it interrupted has raised an error in its place."""
    while (earlier := error.__context__) is not None:
        if isinstance(earlier, SystemExit):
            return earlier
        if isinstance(earlier, KeyboardInterrupt):
            return Exit(INTERRUPTED)
        error = earlier
    return None


class OwnersCommand(Command):
    """One that the owner of the queue's schema has to run: no right that `fairqueue grant` gives is enough."""

    kind = "owner"


class Group(_Program, click.Group):
    """A group of such commands."""

    command_class = Command
    group_class = type


def _exit(error: click.Abort | click.ClickException) -> NoReturn:
    if isinstance(error, click.Abort):
        sys.exit(INTERRUPTED)
    if isinstance(error, click.UsageError) and not isinstance(error, _NoArguments):
        complain(_usage_line(error))
    else:
        error.show()
    sys.exit(error.exit_code)


def _usage_line(error: click.UsageError) -> str:
    message = error.format_message()
    if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter):
        hint = error.param_hint or (error.param.get_error_hint(error.ctx) if error.param and error.ctx else None)
        if hint:
            names = hint if isinstance(hint, str) else ", ".join(hint)
            message = f"{names.replace(chr(39), '')}: {error.message}"
    way_out = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
    return message.rstrip(".") + way_out
