"""Testing an application that uses fairqueue: a pytest plugin, and functions for any other way to test.

Install ``fairqueue[testing]``; pytest finds the plugin by itself. A test asks for what it needs::

    from fairqueue.testing import assert_enqueued, drain

    def test_upload(fairqueue_session):
        upload(fairqueue_session, "acme", "a.pdf")                              # the application's own function
        assert_enqueued(fairqueue_session, channel="acme", payload={"path": "a.pdf"})

        drain(fairqueue_session, app)                                           # its fq.Worker, here and now
        assert pages(fairqueue_session, "a.pdf") == 3

* :mod:`fairqueue.testing.plugin`: the fixtures, a database of its own for each test
* :mod:`fairqueue.testing.clock`: ``Clock``, time travel
* :mod:`fairqueue.testing.messages`: ``enqueued``, ``assert_enqueued``
* :mod:`fairqueue.testing.draining`: ``drain``

All but the fixtures works with an engine or a session of your own as well.

Names are loaded when they are first used: pytest imports the plugin, and so this package, in every run of everybody who
has fairqueue installed.
"""

from typing import TYPE_CHECKING

from fairqueue._lazy import lazily

if TYPE_CHECKING:
    from .clock import Clock
    from .draining import drain
    from .messages import assert_enqueued, enqueued

_HOMES = {"clock": ["Clock"], "draining": ["drain"], "messages": ["assert_enqueued", "enqueued"]}

__all__ = ["Clock", "assert_enqueued", "drain", "enqueued"]


if not TYPE_CHECKING:  # a name that isn't there is an error to type checkers, too
    __getattr__, __dir__ = lazily(__name__, _HOMES)
