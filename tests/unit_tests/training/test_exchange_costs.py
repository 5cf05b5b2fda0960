"""Exchanges between tokens and experts cost what the wire between their ranks was measured to."""

import dataclasses

import pytest

from megatron.estimate.description import EXCHANGE
from megatron.estimate.exchange_wire import ExchangeWire
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from megatron.training.run.describe import described
from megatron.training.run.measuring import measured_exchange_wire
from tests.harness.launch_lines import SMALL
from tests.harness.ranks import run_ranks

EXPERTS = "--num-experts 4 --disable-bias-linear --swiglu --expert-model-parallel-size 2"


def config_of(words=""):
    flags = f"--global-batch-size 8 --padded-vocab-size 386 {EXPERTS} {words}"
    return described(parse_config([*SMALL, *flags.split()], env=LaunchEnv(world_size=2)))


def test_prices_are_powers_of_two_that_the_next_start_finds_again():
    assert ExchangeWire(1e-9, 50e9).flops_per_byte == ExchangeWire(1.3e-9, 46e9).flops_per_byte == 64
    assert ExchangeWire(1e-9, 0.4e9).flops_per_byte == 0.5


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize("words", ["", RECOMPUTED])
def test_the_measured_wire_prices_what_experts_units_exchange_in_f_and_b(words):
    """Of a layer that is computed again, exchanges of its forward are made again in B."""
    config = config_of(f"--moe-token-dispatcher-type alltoall {words}")
    stage = config.staged_model.spec("1f1b").stages[0]
    before = config.model_costs.of_units(stage)
    slower = dataclasses.replace(config, exchange_wire=ExchangeWire(1e-6, 1e9))
    after = slower.model_costs.of_units(stage)
    chunks = config.model.recompute_chunks(len(stage.layers))
    pieces = config.description.pieces(stage.layers, chunks, embeds=True, ends=True)
    moved = {
        computation: sum(
            size
            for piece, _, _ in pieces
            for key, size in piece.collectives.items()
            if key[:2] == (computation, EXCHANGE)
        )
        for computation in "FBW"
    }
    assert moved["B"] == (2 if words else 1) * moved["F"] > 0 == moved["W"]
    for computation, size in moved.items():
        column = computation.lower()
        more = {name: getattr(after[name], column) - getattr(work, column) for name, work in before.items()}
        assert sum(more.values()) == pytest.approx((1024 - config.model_costs.rates.exchanged) * size)
        assert {name.rpartition(".")[2] for name, time in more.items() if time} <= {"experts"}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_all_ranks_measure_one_wire_before_there_is_a_plan(dispatcher):
    config = config_of(f"--moe-token-dispatcher-type {dispatcher}")

    def body(ctx):
        ps = ctx.make_ps(dp=2, experts=config.world_part().experts)
        traffic = ps.ep_etp_group.traffic
        kinds = "all_to_all" if dispatcher == "alltoall" else "all_gather", "all_reduce"
        before = [traffic.moved(kind).calls for kind in kinds]
        wire = measured_exchange_wire(config, ps)
        calls, others = (traffic.moved(kind).calls - was for kind, was in zip(kinds, before, strict=True))
        assert others == 0
        return wire, calls, measured_exchange_wire(config, ctx.make_ps(dp=2)) is None

    (wire, calls, none), other = run_ranks(body, 2)
    assert (wire, calls, none) == other
    assert min(wire) > 0
    assert calls == 6
    assert none
