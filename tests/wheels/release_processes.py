"""Releases of megatron-core for tests of extras/: once this is imported, modules of extras/proof are by their names."""

import sys

from tests.wheels.environments import ROOT, unavailable

sys.path[:0] = [str(ROOT / "extras" / "proof"), str(ROOT / "extras")]

import releases  # noqa: E402
from release_process import ReleaseProcess  # noqa: E402


def started(release):
    """A process under a release. Where its wheels cannot be had the test is skipped, or fails as root in CI."""
    try:
        releases.path_of(release)
    except SystemExit as error:
        unavailable(str(error))
    return ReleaseProcess(release)
