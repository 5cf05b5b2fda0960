import pytest

from megatron.planner.quantities import CommunicationError, require_count, require_positive


def test_what_is_possible_passes():
    require_positive(a=1e-9, b=5)
    require_count(a=1, b=2)
    require_count(0, a=0)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_not_positive(value):
    with pytest.raises(CommunicationError, match="b must be finite and more than 0") as caught:
        require_positive(a=1, b=value)
    assert caught.value.field == "b"


def test_too_few():
    with pytest.raises(CommunicationError, match="b must be at least 2, not 1"):
        require_count(2, a=2, b=1)
