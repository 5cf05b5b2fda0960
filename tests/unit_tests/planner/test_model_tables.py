import pytest

from megatron.planner.communication import Rates, WireBytes
from megatron.planner.model_tables import (
    ModelRun,
    all_tables,
    efficiency_rows,
    strategy_rows,
    working_set_rows,
)
from megatron.planner.quantities import CommunicationError


def run(**changes):
    """12 * 80 * 8192^2 = 64.4e9 parameters."""
    facts = {"num_layers": 80, "hidden_size": 8192, "num_heads": 64, "seq_length": 2048} | changes
    return ModelRun(**facts)


def test_strategies_keep_and_send():
    rows = {row["strategy"]: row for row in strategy_rows(run(num_microbatches=4))}
    params, n = 12 * 80 * 8192**2, 64
    kept = {
        "no_shard": 18,
        "optim": 6 + 12 / n,
        "optim_grads": 2 + 16 / n,
        "optim_grads_params": 18 / n,
    }
    assert {name: row["persistent_gb"] for name, row in rows.items()} == pytest.approx(
        {name: params * each / 1e9 for name, each in kept.items()}
    )
    calls = {
        name: (row["all_gathers"], row["reduce_scatters"], row["all_reduces"]) for name, row in rows.items()
    }
    assert calls == {
        "no_shard": (0, 0, 80),
        "optim": (80, 80, 0),
        "optim_grads": (80, 320, 0),
        "optim_grads_params": (640, 320, 0),
    }
    sent = {"no_shard": 8, "optim": 6, "optim_grads": 2 + 16, "optim_grads_params": 16 + 16}
    assert {name: row["sent_gb"] for name, row in rows.items()} == pytest.approx(
        {name: params * each * 63 / 64 / 1e9 for name, each in sent.items()}
    )


def test_fp32_has_no_main_weights_of_its_own():
    rows = strategy_rows(run(wire=WireBytes(4, 4), shard_size=1))
    kept = [row["persistent_gb"] * 1e9 / (12 * 80 * 8192**2) for row in rows]
    assert kept == pytest.approx([16] * 4)
    assert {row["sent_gb"] for row in rows} == {0.0}


def test_working_sets_by_hand():
    checkpoints, activations, layer, units = (
        row["gb"] * 1e9 for row in working_set_rows(run(batch=2, checkpoint_interval=4))
    )
    assert checkpoints == pytest.approx(2 * 2 * 2048 * 8192 * 80 / 4)
    assert activations == pytest.approx(2 * 2048 * 4 * (16 * 8192 + 2 * 64 * 2048))
    assert layer == pytest.approx(16 * 8192**2)
    assert units == pytest.approx(2 * 12 * 8192**2 * (2 + 4))


def test_efficiency_is_half_where_feeding_equals_computing():
    rows = efficiency_rows(run(seq_length=1024, batch=1), Rates(70e12, 70e12 / 1024))
    assert [row["efficiency"] for row in rows] == pytest.approx([1 / 2, 1 / 5, 192 / 193])


def test_all_tables():
    assert sorted(all_tables(run(), Rates(1e12, 1e9))) == ["efficiency", "strategies", "working_sets"]


@pytest.mark.parametrize("field", ["num_layers", "num_heads", "shard_size", "num_microbatches"])
def test_impossible_quantities_are_named(field):
    with pytest.raises(CommunicationError, match="must be at least 1, not 0") as caught:
        run(**{field: 0})
    assert caught.value.field == field
