"""Large models under one limit: the choice is as fast as what a study of the same settings found, or faster, and beats
FSDP2 under torch's ZBV.

The study walked orders unit by unit with up to 4 chunks a rank. Named differences of the model: 8 chunks are tried
here, which is worth up to 7 % (with 4 chunks the choice is within 1 % of the study's at S1 and S3); our layers compute
SwiGLU's product again, so that they keep 460 MB of a layer of S3 rather than about 530, and that with norms computed
again 393 rather than about 350; between B and W they hold 2.2 times what F leaves, so that V's get less of a limit.
"""

import pytest

from tests.harness.budget_settings import SETTINGS

GB = 1e9
STUDIED = {  # seconds of a step by the study, by limit in GB
    "S1": {50: 9.12, 60: 9.06, 70: 8.81},
    "S3": {70: 13.40, 80: 13.08, 90: 13.06, 100: 12.58},
    "S3 bf16 reductions": {70: 13.34, 90: 12.64},
    "S4": {70: 13.50, 90: 12.66},
    "S5": {35: 4.88, 40: 4.85},
    "S6": {60: 13.55, 70: 13.15, 80: 12.71, 90: 12.71},
}
QUICK = ("S3", 70)
# GB at which the choice takes no longer than torch; the study's are 60, 80, 90, none and 65.
AS_FAST_AS_TORCH = {"S1": 60, "S3": 70, "S4": 70, "S5": 35, "S6": 60}


def marked(name, limit):
    return pytest.param(name, limit, marks=() if (name, limit) == QUICK else pytest.mark.full)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "limit"), [marked(name, limit) for name, limits in STUDIED.items() for limit in limits]
)
def test_the_choice_is_as_fast_as_the_study_found(name, limit):
    setting = SETTINGS[name]
    _, found = setting.chosen(limit * GB)
    assert setting.seconds(found.cost) <= 1.01 * STUDIED[name][limit]


@pytest.mark.full
@pytest.mark.parametrize("name", STUDIED)
def test_at_the_bytes_of_torch_the_choice_is_faster(name):
    setting = SETTINGS[name]
    torch, peak = setting.torch_zbv()
    _, found = setting.chosen(peak)
    assert found.cost <= 0.98 * torch.cost


@pytest.mark.full
@pytest.mark.parametrize("name", AS_FAST_AS_TORCH)
def test_in_the_time_of_torch_the_choice_does_with_less(name):
    setting = SETTINGS[name]
    torch, peak = setting.torch_zbv()
    assert AS_FAST_AS_TORCH[name] * GB < 0.9 * peak
    _, found = setting.chosen(AS_FAST_AS_TORCH[name] * GB)
    assert found.cost <= torch.cost
