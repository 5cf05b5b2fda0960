import math

import pytest
import torch

from megatron.core.module import ModelError
from megatron.training.report.step_metrics import MicrobatchLoss, StepMetrics, evaluate_loss
from tests.harness.ranks import run_ranks

CPU = torch.device("cpu")


def test_both_shapes_of_a_loss_function():
    two = evaluate_loss(torch.ones(3), lambda output: (output.mean(), {"lm loss": output.mean()}))
    assert two.num_tokens is None
    three = evaluate_loss(torch.ones(3), lambda output: (output.sum(), 3, {"lm loss": (output.sum(), 3)}))
    assert three.num_tokens is not None
    assert three.num_tokens.item() == 3
    with pytest.raises(ValueError, match="returned 4 values"):
        evaluate_loss(torch.ones(3), lambda output: (1, 2, 3, 4))


def numbers_of(rank):
    numbers = StepMetrics(CPU)
    for microbatch in range(2):
        value = float(10 * rank + microbatch)
        loss = torch.tensor(math.nan if (rank, microbatch) == (1, 1) else value)
        numbers.add(
            MicrobatchLoss(
                loss,
                torch.tensor(4),
                {"lm loss": (torch.tensor(value), 4), "pair": torch.tensor([value, 2.0]), "one": 5.0},
            )
        )
    return numbers


def check(ctx):
    numbers = numbers_of(ctx.rank)
    totals = numbers.reduce(ctx.ps, (float(ctx.rank == 1), 0.0))
    return numbers.first_nonfinite_microbatch, totals


def test_numbers_are_summed_over_ranks_in_one_vector():
    by_rank = run_ranks(check, 2)
    assert [first for first, _ in by_rank] == [None, 1]
    assert by_rank[0][1] == by_rank[1][1]
    totals = by_rank[0][1]
    assert totals.nonfinite_microbatches == 1
    assert totals.num_tokens == 16
    assert totals.flags == (1.0, 0.0)
    assert totals.losses == {"lm loss": (22.0, 16.0), "pair": (22.0, 8.0), "one": (20.0, 4.0)}


@pytest.mark.parametrize("value", [(1, 2, 3), torch.ones(3), (1.0, torch.ones(2))])
def test_a_report_of_three_numbers_is_refused_by_name(value):
    with pytest.raises(ModelError, match=r"reported 3 values as 'x': report a number or \(sum, count\)"):
        StepMetrics(CPU).add(MicrobatchLoss(torch.zeros(()), None, {"x": value}))
