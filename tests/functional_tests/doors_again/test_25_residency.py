"""25: what the residency lines print is what was held: the printed figures are compared with what this test's own
listeners have seen of the tracker's bytes and of the collectives in the same run."""

import json
import re

import pytest

from megatron.core import memory_tracker
from megatron.core.distributed import plan_inputs
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import peak_activation
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.words import size_text
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from megatron.training.run.describe import described
from tests.harness import launch

FLAGS = [
    *launch.TINY,
    *"--num-layers 4 --padded-vocab-size 128 --train-iters 3 --log-interval 1 --save ck --save-interval 9".split(),
]
SIZE = r"([\d.,]+ (?:bytes|KiB|MiB|GiB))"
HELD = rf"{SIZE} \(at rest {SIZE}, gathered {SIZE}, gradients {SIZE}"
START = re.compile(rf"^ > residency: .* holds the most at once: {HELD}, activations {SIZE}\)$", re.M)
STATES = re.compile(
    rf"^ residency of iteration (\d+), pipeline rank (\d): weights and gradients at once: planned {HELD}\); "
    rf"measured {HELD}\)$",
    re.M,
)
MOVES = re.compile(
    r"^ moves of iteration (\d+), .*?: planned (\d+) gathers?, (\d+) reductions?, ([^,;]*?)[,;].*measured "
    r"(\d+) gathers?, (\d+) reductions?, ([^,;]*?),",
    re.M,
)
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy"
FAULTY_STEPS = "tests/functional_tests/trainers/faulty_steps.py"


def train(folder, flags, ranks, script=launch.GPT):
    return launch.ok(
        launch.run_forked([*FLAGS, *flags.split()], ranks=ranks, script=script, cwd=folder)
    ).output


def in_bytes(text):
    number, unit = text.split()
    return float(number.replace(",", "")) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """What each rank's tracker has held at most of weights and gradients together, by step: a file a process."""
    booked = memory_tracker.MemoryTracker.hold
    begins, ends = memory_tracker.MemoryTracker.begin_step, plan_inputs.measured_moves
    now, most, steps = {}, {}, {}

    def hold(self, category, unit, num_bytes):
        booked(self, category, unit, num_bytes)
        if category in ("gathered", "grads", "extra"):
            now[category] = now.get(category, 0) + num_bytes
            if sum(now.values()) > sum(most.values()):
                most.clear()
                most.update(now)

    def begin_step(self):
        begins(self)
        most.clear()
        most.update(now)

    def measured_moves(model, wire, step_s):
        steps[len(steps) + 1] = [sum(most.values()), most.get("gathered", 0)]
        (tmp_path / f"seen-{model.ps.rank}.json").write_text(json.dumps([model.ps.pp_rank, steps]))
        return ends(model, wire, step_s)

    monkeypatch.setattr(memory_tracker.MemoryTracker, "hold", hold)
    monkeypatch.setattr(memory_tracker.MemoryTracker, "begin_step", begin_step)
    monkeypatch.setattr("megatron.training.run.pipeline.measured_moves", measured_moves)
    return lambda: [json.loads(one.read_text()) for one in sorted(tmp_path.glob("seen-*.json"))]


@pytest.mark.grid
def test_printed_weights_and_gradients_are_those_of_one_moment_that_the_tracker_saw(tmp_path, seen):
    output = train(
        tmp_path, f"--pipeline-model-parallel-size 2 --global-batch-size 16 {FSDP} optim_grads_params", 4
    )
    ranks, lines = seen(), STATES.findall(output)
    assert [line[0] for line in lines] == ["1", "2", "3"]
    for iteration, pp_rank, *texts in lines:
        planned, measured = texts[:4], texts[4:]
        assert planned == measured
        total, at_rest, gathered, gradients = map(in_bytes, measured)
        assert total == pytest.approx(at_rest + gathered + gradients, rel=1e-3)
        held = [steps[iteration] for of, steps in ranks if of == int(pp_rank)]
        assert max(both for both, _ in held) == pytest.approx(gathered + gradients, rel=1e-3)
        assert [alone for _, alone in held] == pytest.approx([gathered] * len(held), rel=1e-3)


@pytest.mark.grid
def test_a_fixed_order_says_its_activations_and_kinds_add_up(tmp_path):
    flags = f"--pipeline-model-parallel-size 2 --global-batch-size 16 {FSDP} optim_grads_params"
    output = train(tmp_path, flags, 4)
    total, *kinds = map(in_bytes, START.search(output).groups())
    assert total == pytest.approx(sum(kinds), rel=1e-3)
    words = [*FLAGS, *flags.split()]
    config = described(parse_config(words, env=LaunchEnv(world_size=4)))
    spec = config.planner().spec
    assert not spec.estimated
    costs = config.staged_model.costs.of_stages(spec.stages)
    rows = plan_for(spec, 4, PlanPurpose.TRAIN).rows
    most = re.search(
        r"^ activations of iteration 3, pipeline rank (\d): at most: planned (.*?);", output, re.M
    )
    assert most[2] == size_text(peak_activation(int(most[1]), rows[int(most[1])], costs))
    assert "MB" not in "".join(re.findall(r"^ > (?:residency|a step moves).*$", output, re.M))


@pytest.mark.grid
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_the_first_iteration_counts_only_the_gathers_that_happen(tmp_path, strategy):
    moves = MOVES.findall(train(tmp_path, f"{FSDP} {strategy}", 2))
    assert [one[0] for one in moves] == ["1", "2", "3"]
    for _, *planned, gathers, reductions, moved in moves:
        assert planned == [gathers, reductions, moved]
    assert [one[1] == "0" for one in moves] == [True, False, False]


@pytest.mark.grid
def test_forwards_that_ran_again_are_counted_and_the_last_validated_step_says_what_was_held(tmp_path):
    """Steps 4 and 6 are taken back in those behind them; nothing runs behind the last one."""
    flags = (
        "--num-layers 4 --train-iters 7 --untie-embeddings-and-output-weights --pipeline-schedule zbv --clip-grad 4 "
        f"--faults 4:0.5:4096 6:0.5:4096 --pipeline-model-parallel-size 2 {FSDP} optim_grads "
        "--enable-optimizer-post-validation --post-validation-after 0"
    )
    output = train(tmp_path, flags, 4, FAULTY_STEPS)
    assert re.findall(r" rollbacks: (\d+) \|", output) == ["0", "0", "0", "1", "0", "1", "0"]
    moves = MOVES.findall(output)
    assert [one[0] for one in moves] == list("1234567")
    for _, *planned, gathers, reductions, moved in moves:
        assert planned == [gathers, reductions, moved]
    gathers = [int(one[1]) for one in moves]
    assert gathers[0] == 0
    assert gathers[4] == gathers[6] == 2 * gathers[5] > 0
    last = STATES.findall(output)[-1]
    assert last[0] == "7"
    assert last[2:6] == last[6:]
    assert in_bytes(last[9]) > 0  # whole gradients
