"""What test_zbpp_light.py runs on the ranks of a real megatron-core: refusals, patching, failures. Not collected."""

import contextlib
import dataclasses
import inspect
import os
import signal
import threading

import training
import zbpp_light
from cases import Case

import megatron.core.pipeline_parallel as package
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers

# Settings of Megatron's configuration -> a value that cannot run.
REFUSED = {
    "virtual_pipeline_model_parallel_size": 2,
    "overlap_p2p_comm": True,
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "cuda_graph_impl": "local",
    "defer_embedding_wgrad_compute": True,
    "moe_use_legacy_grouped_gemm": True,
    "overlap_moe_expert_parallel_comm": True,
    "variable_seq_lengths": True,
    "cpu_offloading": True,
    "mtp_num_layers": 1,
}


@contextlib.contextmanager
def stage(**changes):
    """A case, and this rank's stage of its model."""
    case = Case("tiny", steps=1, **changes)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case.pipeline)
    config = training.transformer_config(case)
    try:
        yield case, config, training.wrapped(case, config, training.gpt(case, config))
    finally:
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def patched(**words):
    zbpp_light.patch_megatron(**words)
    try:
        yield
    finally:
        zbpp_light.unpatch_megatron()


def message(function, *args, **words):
    """Of the ValueError that a call raises."""
    try:
        function(*args, **words)
    except ValueError as error:
        return str(error)
    return None


def step(case, model, **changes):
    model.zero_grad_buffer()
    return training.run_step(dataclasses.replace(case, **changes), model, 0, forward_only=False)


def refusals(ctx, other_plan):
    """Messages: of each setting alone, of all at once, and of what is wrong with a call."""
    said = {}
    with stage() as (case, config, model):
        with patched():
            for name, value in REFUSED.items():
                before = getattr(config, name, None)
                setattr(config, name, value)
                said[name] = message(step, case, model)
                setattr(config, name, before)
            for name, value in REFUSED.items():
                setattr(config, name, value)
            said["all at once"] = message(step, case, model)
            for name in REFUSED:
                setattr(config, name, None)
            said["patched twice"] = message(zbpp_light.patch_megatron)
            said["runs then"] = len(step(case, model))
            said["within a step"] = within_a_step(case, model)
        with patched(plan=other_plan):
            said["a plan of other numbers"] = message(step, case, model)
        said["not patched"] = message(zbpp_light.unpatch_megatron)
        linear, layers.ColumnParallelLinear = layers.ColumnParallelLinear, type("Other", (), {})
        row, layers.RowParallelLinear = layers.RowParallelLinear, type("Other", (), {})
        with patched():
            said["no linear layer"] = message(step, case, model)
        layers.ColumnParallelLinear, layers.RowParallelLinear = linear, row
    return said


def within_a_step(case, model):
    found, plain = [], training.loss

    def loss(*args):
        found.append(message(zbpp_light.patch_megatron))
        found.append(message(zbpp_light.unpatch_megatron))
        return plain(*args)

    training.loss = loss
    try:
        step(case, model, microbatches=1)
    finally:
        training.loss = plain
    return found


def identity(ctx):
    """Names of Megatron's that are others while it is patched, and that are not themselves again afterwards."""
    names = {
        f"{owner.__name__}.{name}": (owner, name)
        for owner in (package, schedules, layers)
        for name, value in vars(owner).items()
        if inspect.isroutine(value) or inspect.isclass(value)
    }
    linear = layers.LinearWithGradAccumulationAndAsyncCommunication

    def now():
        values = {name: getattr(owner, key) for name, (owner, key) in names.items()}
        return {**values, "apply": vars(linear).get("apply"), "backward": vars(linear)["backward"]}

    before = now()
    with patched():
        during = now()
    after = now()
    os.environ["ZBPP_LIGHT"] = "0"
    zbpp_light.patch_megatron()
    switched_off = now()
    zbpp_light.unpatch_megatron()
    del os.environ["ZBPP_LIGHT"]
    return {
        "patched": [name for name in before if during[name] is not before[name]],
        "left": [name for name in before if after[name] is not before[name]],
        "with ZBPP_LIGHT=0": [name for name in before if switched_off[name] is not before[name]],
    }


def imported_before(ctx):
    """`get_forward_backward_func` as a trainer has it that was imported before the patch."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with stage(), patched():
        return get_forward_backward_func().__module__ + " " + get_forward_backward_func().__wrapped__.__name__


def fails_in_forward(ctx):
    """The last rank's forward step raises in its second microbatch."""
    _planted(ctx, lambda: (_ for _ in ()).throw(ArithmeticError("planted in forward_step")))


def killed(ctx):
    """The last rank is killed in its second microbatch."""
    _planted(ctx, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _planted(ctx, what):
    calls, plain = [], training.forward_step

    def forward_step(*args):
        calls.append(args)
        if ctx.rank == ctx.world_size - 1 and len(calls) == 2:
            what()
        return plain(*args)

    training.forward_step = forward_step
    with stage(microbatches=6) as (case, _, model), patched():
        step(case, model)


def threads_of_a_step(ctx):
    """Threads that a step has left."""
    with stage() as (case, _, model):
        step(case, model)
        before = set(threading.enumerate())
        with patched():
            step(case, model)
    return [thread.name for thread in set(threading.enumerate()) - before]
