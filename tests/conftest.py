"""The fixtures are in `tests/fixtures`, by topic."""

from hypothesis import HealthCheck, settings

# A timing never fails a test; and a fixture that all examples share is one that cleans up between them.
settings.register_profile(
    "fairqueue", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("fairqueue")

pytest_plugins = (
    "pytester",
    "tests.fixtures.postgres",
    "tests.fixtures.databases",
    "tests.fixtures.connections",
    "tests.fixtures.commands",
    "tests.fixtures.plans",
    "tests.fixtures.workers",
    "tests.fixtures.spark",
)
