"""What benchmarks run with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.consumers import Consumers
from benchmarks.place import Place
from tests.fixtures.postgres import Postgres, libpq


@pytest.fixture(scope="module")
def place(postgres: Postgres) -> Iterator[Place]:
    place = Place(libpq(postgres.url.render_as_string(hide_password=False)))
    yield place
    place.close()


@pytest.fixture(scope="module")
def consumers() -> Iterator[Consumers]:
    with Consumers() as consumers:
        yield consumers
