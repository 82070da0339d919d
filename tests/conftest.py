"""The fixtures are in `tests/fixtures`, by topic."""

pytest_plugins = (
    "pytester",
    "tests.fixtures.postgres",
    "tests.fixtures.databases",
    "tests.fixtures.connections",
    "tests.fixtures.workers",
    "tests.fixtures.spark",
)
