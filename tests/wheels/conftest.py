"""Environments for the tests of this folder, which `make test` leaves out."""

import pytest

from tests.wheels.environments import UnavailableError, environment, unavailable


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "wheels":
            item.add_marker(pytest.mark.full)
            item.add_marker(
                pytest.mark.timeout(240, func_only=True)
            )  # pip, in a fixture, takes what it takes


@pytest.fixture(scope="session")
def wheels():
    """A row of ENVIRONMENTS -> its `Environment`."""

    def ready(name):
        try:
            return environment(name)
        except UnavailableError as error:
            unavailable(str(error))

    return ready
