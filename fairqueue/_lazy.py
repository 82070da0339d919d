"""Names of a package that are imported when they are first used.

For packages that are imported where little or nothing of them is needed. In one's ``__init__.py``::

    if TYPE_CHECKING:
        from .draining import drain

    __all__ = ["drain"]

    if not TYPE_CHECKING:  # a name that isn't there is an error to type checkers, too
        __getattr__, __dir__ = lazily(__name__, {"draining": ["drain"]})
"""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, Collection[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package (PEP 562).

    :param homes: the names in each of its modules.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    known = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = known[name] = getattr(import_module(f"{package}.{home_of[name]}"), name)
        return value

    return get, lambda: sorted({*known, *home_of})
