"""Each environment has the package `megatron` that its row says."""

import pytest

from tests.wheels.environments import ENVIRONMENTS, ROOT


@pytest.fixture(params=ENVIRONMENTS)
def named(request, wheels):
    return request.param, wheels(request.param)


def test_the_package_megatron_is_the_rows(named):
    (name, env), row = named, ENVIRONMENTS[named[0]]
    path, version = env.run("which_megatron.py").split()
    assert path.startswith(str(ROOT / "megatron" if row.checkout else env.folder))
    if name.startswith("megatron-core-"):
        assert version == name.removeprefix("megatron-core-")
