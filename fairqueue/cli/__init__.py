"""The command line: ``fairqueue --help``. Needs ``pip install 'fairqueue[cli]'``.

Another command line, such as Flask's, may have the same commands for a database of its own::

    import click
    from fairqueue.cli import Target, commands

    @click.group()
    @click.pass_context
    def queue(context: click.Context) -> None:
        context.obj = Target(engine, schema="fairqueue")

    for command in commands:
        queue.add_command(command)

* ``program.py``: the group of all commands, and ``commands``, those that work on a :class:`Target`
* ``base.py``: what the commands have in common: exit codes, and errors in one line
* ``failures.py``: what a command could not do
* ``target.py``: the database that a command works on
* ``types.py``: types of options
* ``errors.py``: what an error means, and the way out
* ``output.py``: tables, JSON, and text that is safe on a terminal
* ``signals.py``: signals that mean something else for a while
* ``status.py``, ``queues.py``, ``channels.py``, ``messages.py``, ``database.py``, ``bench.py``, ``spark/``: commands by
  topic
* ``policies.py``: what the commands of queues and channels have in common
* ``worker.py``, ``processes.py``: running workers, in this process or in several
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from fairqueue._lazy import lazily

if TYPE_CHECKING:
    from .program import commands
    from .target import Target

__all__ = ["Target", "commands", "main"]


def main() -> NoReturn:
    """The console script: runs the command line of this process and exits with its code."""
    try:
        from .program import program
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("fairqueue: click is not installed; pip install 'fairqueue[cli]'")
    program.main(prog_name="fairqueue")
    raise AssertionError("the program has exited")


if not TYPE_CHECKING:  # a name that isn't there is an error to type checkers, too
    # Not at once: without click the console script still has to say what is missing.
    __getattr__, __dir__ = lazily(__name__, {"program": ["commands"], "target": ["Target"]})
