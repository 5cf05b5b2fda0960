import pytest

from megatron.core.pipeline_parallel.plan.ir import LAST_COMPUTE, F
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.verify import verify
from megatron.training.arguments import parse_config
from megatron.training.launch_env import LaunchEnv
from megatron.training.pipeline_facts import pipeline_facts
from megatron.training.plans import Plans
from tests.harness import launch

CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


def plans(flags, ranks=2):
    return Plans(configure(flags, ranks))


def configure(flags, ranks=2):
    words = [*launch.TINY, *f"--num-layers 4 --train-iters 4 --pipeline-model-parallel-size {ranks}".split()]
    return parse_config([*words, *flags.split()], env=LaunchEnv(world_size=ranks, launched=True, rank=0))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--pipeline-schedule gpipe",
        CHUNKS,
        f"{CHUNKS} --microbatch-group-size-per-virtual-pipeline-stage 3",
    ],
)
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 7])
def test_an_evaluation_of_any_number_of_microbatches(flags, num_microbatches):
    """Each forward once, also of fewer than interleaving takes in turn."""
    made = plans(flags)
    plan = made.evaluate(num_microbatches)
    verify(plan)
    stages = made.placement.num_stages
    forwards = sorted((op[1], op[2]) for row in plan.rows for op in row if op[0] == F)
    assert forwards == [(stage, m) for stage in range(stages) for m in range(num_microbatches)]
    assert plan.num_microbatches == num_microbatches


@pytest.mark.parametrize(("flags", "group"), [("", None), (CHUNKS, 2), (f"{CHUNKS} {GROUP} 3", 3)])
def test_what_is_planned_is_what_is_told_before(flags, group):
    config = configure(flags)
    made, facts = Plans(config), pipeline_facts(config)
    assert (facts.placement, facts.stages, facts.schedule) == (made.placement, made.stages, made.schedule)
    assert facts.group_size == made.group_size == group
    computations = made.computations(facts.num_microbatches)
    lowered = tuple(
        tuple(op for op in row if op[0] <= LAST_COMPUTE) for row in made.train(facts.num_microbatches).rows
    )
    assert computations.rows == lowered
    assert facts.bubble_rate == simulate(computations, made.costs).bubble_rate


def test_evaluation_keeps_the_order_of_training():
    made = plans(CHUNKS)
    for trained, evaluated in zip(made.train(4).rows, made.evaluate(4).rows, strict=True):
        assert [op[:3] for op in trained if op[0] == F] == [op[:3] for op in evaluated if op[0] == F]


def test_who_reads():
    made = plans("", ranks=4)
    assert [made.reads_data(rank) for rank in range(4)] == [True, False, False, True]
    assert made.local_stages(2) == (2,)
    assert plans(CHUNKS).local_stages(1) == (1, 3)
