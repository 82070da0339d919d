"""What fairqueue raises.

Every error is a :class:`FairqueueError`. Those about a value name the field, the value and the way out::

    try:
        fq.Message(channel="")
    except fq.InvalidValue as error:
        print(error)  # channel must have 1 to 255 characters, not 0
"""

from __future__ import annotations

from sqlalchemy.exc import DontWrapMixin

__all__ = ["FairqueueError", "InvalidValue", "SchemaVersionError"]


class FairqueueError(Exception):
    """The base of all errors that fairqueue raises itself."""


class InvalidValue(FairqueueError, ValueError, DontWrapMixin):
    """A value was refused before anything was written. The message names the field and the value."""


class SchemaVersionError(FairqueueError):
    """The database holds another version of the schema than this library works with, or none."""
