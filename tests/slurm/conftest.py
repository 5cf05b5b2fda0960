"""A cluster for the tests of this folder. `make test-slurm` takes those that are not marked `full` themselves."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, ready, unavailable


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "slurm":
            if item.get_closest_marker("full") is None:
                item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.full)  # `make test` leaves them out
            item.add_marker(pytest.mark.timeout(1800, func_only=True))


@pytest.fixture(scope="session")
def slurm():
    if why := ready():
        unavailable(why)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # not pytest's, which user munge cannot reach
    folder.chmod(0o755)
    with Cluster(folder) as cluster:
        yield cluster
    assert not cluster.processes()
    shutil.rmtree(folder)
