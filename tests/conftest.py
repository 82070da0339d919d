"""The fixtures are in `tests/fixtures`, by topic."""

pytest_plugins = (
    "tests.fixtures.postgres",
    "tests.fixtures.databases",
    "tests.fixtures.connections",
)
