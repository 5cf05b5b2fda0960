"""The paths that docs/tour.md walks: counted in a run, within their limits, and the page's table is of them."""

from pathlib import Path

import pytest

from tools import call_paths

TOUR = Path(__file__).resolve().parents[3] / "docs" / "tour.md"


@pytest.mark.grid
def test_the_tours_paths_are_those_of_a_run_and_within_their_limits():
    seen = call_paths.traced()
    for path in call_paths.PATHS:
        files = call_paths.files_of(path, seen)
        assert len(files) <= path.most, f"{path.name}: {files}"
    assert call_paths.table(seen) in TOUR.read_text()


def test_a_leg_that_no_call_takes_is_named():
    with pytest.raises(LookupError, match=r"no call of .*decoder.py.* below .*loop.py.*: mend call_paths.py"):
        call_paths.files_of(call_paths.PATHS[0], {})
