"""zbpp_light on a stand-in for megatron-core: patching, refusals, and W where no release runs on CPU."""

import contextlib
import copy
import functools
import json
import sys
import types

import pytest
import torch
import zbpp_light
from torch import nn
from zbpp_light import checks, schedules

from tests.harness.ranks import RanksError, run_ranks
from tests.unit_tests.extras import megatron_stand_in as stand_in
from tests.unit_tests.extras.megatron_stand_in import ColumnParallelLinear, Config, Model, step

LINE, VIRTUAL = (
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


@pytest.fixture
def megatron(monkeypatch):
    """The stand-in's module of schedules, and Megatron unpatched afterwards."""
    modules = stand_in.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield modules[stand_in.SCHEDULES]
    with contextlib.suppress(ValueError):
        zbpp_light.unpatch_megatron()


def saved(capsys, folder, name):
    """A plan of two stages and four microbatches."""
    from tools import show_schedule

    words = ["--schedule", name, "--stages", "2", "--microbatches", "4", "--format", "plan"]
    assert show_schedule.main(words) == 0
    path = folder / f"{name}.json"
    path.write_text(capsys.readouterr().out)
    return path


def test_what_is_replaced_is_given_back(megatron):
    before = {name: value for name, value in vars(megatron).items() if callable(value)}
    linear = stand_in.LinearWithGradAccumulationAndAsyncCommunication
    zbpp_light.patch_megatron()
    assert [name for name, value in before.items() if getattr(megatron, name) is not value] == [LINE, VIRTUAL]
    assert "apply" in vars(linear)
    zbpp_light.unpatch_megatron()
    assert all(getattr(megatron, name) is value for name, value in before.items())
    assert "apply" not in vars(linear)
    with pytest.raises(ValueError, match="nothing is patched"):
        zbpp_light.unpatch_megatron()


def test_evaluation_is_megatrons(megatron):
    zbpp_light.patch_megatron()
    model = Model(Config(), ColumnParallelLinear())
    assert step(megatron, model, forward_only=True) == "Megatron's own"
    megatron.forward_backward_pipelining_without_interleaving = getattr(megatron, VIRTUAL)
    assert step(megatron, model, forward_only=True) == "Megatron's own, interleaved"


def test_patching_twice(megatron):
    zbpp_light.patch_megatron()
    with pytest.raises(ValueError, match="patched already; call unpatch_megatron"):
        zbpp_light.patch_megatron()


def test_switched_off(megatron, monkeypatch, capsys):
    before = getattr(megatron, LINE)
    monkeypatch.setenv("ZBPP_LIGHT", "0")
    zbpp_light.patch_megatron("no such schedule")
    assert getattr(megatron, LINE) is before
    assert capsys.readouterr().out == "zbpp_light: ZBPP_LIGHT=0: Megatron is left as it is\n"
    zbpp_light.unpatch_megatron()
    monkeypatch.setenv("ZBPP_LIGHT", "off")
    with pytest.raises(ValueError, match=r"ZBPP_LIGHT is 0 .* or 1, not 'off'"):
        zbpp_light.patch_megatron()


def test_asked_wrongly(megatron, tmp_path):
    with pytest.raises(ValueError, match="zbpp_light: no schedule 'zbh1': did you mean zb-h1"):
        zbpp_light.patch_megatron("zbh1")
    with pytest.raises(ValueError, match=r"zbpp_light: .*none\.json cannot be read"):
        zbpp_light.patch_megatron(plan=tmp_path / "none.json")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"zbpp_light: .*plan\.json: this is no plan"):
        zbpp_light.patch_megatron(plan=tmp_path / "plan.json")


def test_a_schedule_beside_a_plan_of_another(megatron, tmp_path, capsys):
    path = saved(capsys, tmp_path, "zb-1p")
    with pytest.raises(
        ValueError, match=r"zbpp_light: schedule='zb-2p' and .*, a plan of zb-1p: give one of"
    ):
        zbpp_light.patch_megatron("zb-2p", plan=path)
    zbpp_light.patch_megatron("zb-1p", plan=path)


def test_an_unknown_signature_leaves_megatron_alone(megatron, monkeypatch):
    before = getattr(megatron, LINE)

    def backward_step(input_tensor, output_tensor, output_tensor_grad, config, later): ...

    monkeypatch.setattr(megatron, "backward_step", backward_step)
    with pytest.raises(ValueError, match="backward_step has a parameter later that is not known"):
        zbpp_light.patch_megatron()
    assert getattr(megatron, LINE) is before


# Steps, on ranks --------------------------------------------------------------------------------------


def on_stand_in(function):
    """A rank's function gets the stand-in's module of schedules first."""

    @functools.wraps(function)
    def on_rank(ctx, *values):
        torch.set_num_threads(1)
        modules = stand_in.modules()
        sys.modules.update(modules)
        torch.manual_seed(3 + ctx.rank)
        return function(modules[stand_in.SCHEDULES], modules[stand_in.LAYERS], *values)

    return on_rank


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def two_ways(megatron, model, **patch):
    """Gradients and losses of a step by the patch, and by plain autograd where no layer is split."""
    twin = copy.deepcopy(model)
    zbpp_light.patch_megatron(**patch)
    losses = step(megatron, model)
    apply = stand_in.LinearWithGradAccumulationAndAsyncCommunication.apply
    del stand_in.LinearWithGradAccumulationAndAsyncCommunication.apply
    expected = step(megatron, twin)
    stand_in.LinearWithGradAccumulationAndAsyncCommunication.apply = apply
    assert losses == expected
    return gradients(model), gradients(twin)


@on_stand_in
def same_bits(megatron, layers):
    here, expected = two_ways(megatron, Model(Config(), ColumnParallelLinear(), ColumnParallelLinear()))
    assert all(torch.equal(here[name], expected[name]) for name in expected)
    assert all(gradient.abs().sum() > 0 for gradient in here.values())


def test_a_weight_used_twice_has_autograds_bits():
    run_ranks(same_bits, 2)


@on_stand_in
def waits(megatron, layers):
    """How many weight gradients wait at most in a step of ZB-H1."""
    from zbpp_light.weights import WeightGradients

    most, run = [0], WeightGradients.run

    def counted(gradients, microbatch):
        most.append(sum(len(several) for each in gradients.waiting.values() for several in each.values()))
        run(gradients, microbatch)
        assert microbatch not in gradients.waiting

    WeightGradients.run = counted
    zbpp_light.patch_megatron()
    step(megatron, Model(Config(), ColumnParallelLinear()), 6)
    return max(most)


def test_the_first_stage_computes_w_with_b():
    """Nobody waits for its B: nothing is kept between B and W. A layer used twice has two products a microbatch."""
    assert run_ranks(waits, 3) == [0, 4, 6]


@on_stand_in
def says(megatron, layers):
    import io

    said = io.StringIO()
    zbpp_light.patch_megatron()
    with contextlib.redirect_stdout(said):
        model = Model(Config(), ColumnParallelLinear())
        for _ in range(3):
            step(megatron, model)
        step(megatron, model, 6)
    return said.getvalue()


def test_the_line_of_the_first_step():
    first, other = run_ranks(says, 2)
    lines = first.splitlines()
    assert lines[0] == (
        "zbpp_light: zb-h1, 2 stages, 4 microbatches, planned bubble 7.7% (1f1b 20.0%); W computes 80.0% of the "
        "weights; waiting for W: at most 2 microbatches by plan, at most 0.0 MiB measured (stage 1)"
    )
    assert lines[1].startswith("zbpp_light: zb-h1, 2 stages, 6 microbatches")
    assert len(lines) == 2
    assert other == ""


@on_stand_in
def registered(megatron, layers):
    """What a DDP with overlap would see: its hook on each weight, and whether gradients are reduced as they come."""
    model, seen, syncs = Model(Config(), ColumnParallelLinear(), ColumnParallelLinear()), [], [True]

    @contextlib.contextmanager
    def no_sync():
        syncs[0] = False
        yield
        syncs[0] = True

    def take(name, weight):
        assert weight.grad is not None, name
        weight.main_grad += weight.grad
        weight.grad = None
        seen.append((name, syncs[0]))

    kept = []
    for name, weight in model.named_parameters():
        weight.main_grad = torch.zeros_like(weight)
        kept.append(weight.expand_as(weight).grad_fn.next_functions[0][0])
        kept[-1].register_hook(lambda *_, name=name, weight=weight: take(name, weight))
    model.config.no_sync_func = no_sync
    zbpp_light.patch_megatron()
    step(megatron, model)
    assert len(kept) == 4
    return seen


def test_a_parameter_is_registered_once_behind_its_last_w():
    for seen in run_ranks(registered, 2):
        for name in ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"):
            assert [synced for other, synced in seen if other == name] == [False, False, False, True], name


@on_stand_in
def hookless(megatron, layers):
    model = Model(Config(), ColumnParallelLinear())
    zbpp_light.patch_megatron()
    step(megatron, model)
    for weight in model.parameters():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    step(megatron, model)


def test_a_ddp_without_a_hook_on_the_weight_is_refused():
    with pytest.raises(RanksError, match="takes no gradients by a hook on the weight"):
        run_ranks(hookless, 2)


@on_stand_in
def fused(megatron, layers, zero_out):
    """Megatron's kernel, and what its hooks are left to see."""
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=lambda x, grad, main: main.add_(grad.t().matmul(x)),
        wgrad_gemm_accum_fp16=lambda x, grad, main: main.add_(grad.t().matmul(x).to(main.dtype)),
    )
    splits = torch.distributed.get_rank() == 1  # the first stage computes W with B, as Megatron does
    model = Model(Config(), ColumnParallelLinear(fusion=splits))
    weight, seen = model.layers[0].weight, []
    weight.main_grad = torch.zeros_like(weight)
    if zero_out is not None:
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zero_out
    kept = weight.expand_as(weight).grad_fn.next_functions[0][0]

    def hook(*_):
        seen.append(weight.grad.abs().max().item() if weight.grad is not None else None)
        weight.grad = None

    kept.register_hook(hook)
    twin = Model(Config(), ColumnParallelLinear())
    twin.load_state_dict(model.state_dict())
    zbpp_light.patch_megatron()
    step(megatron, model)
    step(megatron, twin)
    if not splits:
        return
    torch.testing.assert_close(weight.main_grad, twin.layers[0].weight.grad)
    if zero_out is None:
        assert seen == [None] * 4  # autograd gets nothing, as from Megatron
    else:
        assert weight.grad_added_to_main_grad
        assert len(seen) == 4
        assert not zero_out or seen == [0.0] * 4


@pytest.mark.parametrize("zero_out", [None, False, True])
def test_fused_accumulation(zero_out):
    run_ranks(fused, 2, zero_out)


class EngineLinear(nn.Module):
    """As a layer of Transformer Engine under delay_wgrad_compute: its weight's gradient waits for `backward_dw`."""

    __module__ = "transformer_engine.pytorch"

    def __init__(self):
        super().__init__()
        self.weight, self.waiting = nn.Parameter(torch.randn(4, 4)), []

    def forward(self, x):
        output = x.matmul(self.weight.detach().t())
        if output.requires_grad:
            output.register_hook(lambda grad: self.waiting.append((x.detach(), grad)))
        return output

    def backward_dw(self):
        x, grad = self.waiting.pop(0)
        gradient = grad.flatten(0, 1).t().matmul(x.flatten(0, 1))
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient


class PlainLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x):
        return x.matmul(self.weight.t())


@on_stand_in
def engine(megatron, layers):
    config = Config(delay_wgrad_compute=True)
    model, twin = Model(config, EngineLinear(), EngineLinear()), Model(Config(), PlainLinear(), PlainLinear())
    twin.load_state_dict(model.state_dict())
    zbpp_light.patch_megatron()
    step(megatron, model)
    assert [layer.waiting for layer in model.layers] == [[], []]
    with pytest.raises(ValueError, match="no linear layer of Megatron's"):
        step(megatron, twin)
    layers.ColumnParallelLinear = PlainLinear
    step(megatron, twin)
    for name, gradient in gradients(twin).items():
        torch.testing.assert_close(gradients(model)[name], gradient)
    zbpp_light.unpatch_megatron()
    assert not any(layer._forward_hooks for layer in model.layers)


def test_layers_of_transformer_engine_by_backward_dw():
    run_ranks(engine, 2)


@on_stand_in
def refusals(megatron, layers):
    """All reasons of all stages, on each."""
    rank = torch.distributed.get_rank()
    zbpp_light.patch_megatron()
    config = Config(defer_embedding_wgrad_compute=rank == 0, cuda_graph_impl="local" if rank else "none")
    with pytest.raises(ValueError, match="cannot run this training step") as refused:
        step(megatron, Model(config, EngineLinear()))
    step(megatron, Model(Config(), ColumnParallelLinear()))  # and the next step is a step
    return str(refused.value)


def test_all_reasons_of_all_stages_at_once():
    first, other = run_ranks(refusals, 2)
    assert first == other
    lines = first.split("\n- ")
    assert lines[1].startswith("defer_embedding_wgrad_compute is True: leave it out")
    assert lines[2].startswith(
        "layers.0 is a EngineLinear of Transformer Engine, which computes B and W together"
    )
    assert lines[3].startswith("cuda_graph_impl is 'local': CUDA graphs")
    assert lines[4].startswith("the model has no linear layer of Megatron's")


@on_stand_in
def other_sizes(megatron, layers, path):
    zbpp_light.patch_megatron(plan=path)
    step(megatron, Model(Config(), ColumnParallelLinear()), 4)
    with pytest.raises(ValueError, match="is a plan for 4 microbatches a step, this run has 5"):
        step(megatron, Model(Config(), ColumnParallelLinear()), 5)


def test_a_plan_of_other_sizes(tmp_path, capsys):
    path = saved(capsys, tmp_path, "zb-1p")
    run_ranks(other_sizes, 2, path)
    with pytest.raises(RanksError, match="is a plan for 2 stages, this run has 1"):
        run_ranks(other_sizes, 1, path)


@on_stand_in
def each_their_own(megatron, layers, paths):
    zbpp_light.patch_megatron(plan=paths[torch.distributed.get_rank()])
    with pytest.raises(ValueError, match="stages have different plans") as refused:
        step(megatron, Model(Config(), ColumnParallelLinear()), 4)
    return str(refused.value)


def test_stages_with_different_plans(tmp_path, capsys):
    """Each would wait for messages that the other does not send."""
    paths = [saved(capsys, tmp_path, name) for name in ("zb-1p", "zb-2p")]
    hashes = [json.loads(path.read_text())["hash"] for path in paths]
    assert all(
        said.endswith(f"different plans: {', '.join(hashes)}") for said in run_ranks(each_their_own, 2, paths)
    )
    (no_file,) = {*run_ranks(each_their_own, 2, [None, paths[1]])}
    assert no_file.endswith(f"different plans: zb-h1, {hashes[1]}")


@on_stand_in
def inside(megatron, layers):
    zbpp_light.patch_megatron()
    model = Model(Config(), ColumnParallelLinear())

    def meddle(what):
        def forward(data, model, received):
            what()
            raise AssertionError("not refused")

        with pytest.raises(ValueError, match="inside a running step"):
            step(megatron, model, forward_step_func=forward)

    meddle(zbpp_light.patch_megatron)
    meddle(zbpp_light.unpatch_megatron)
    meddle(lambda: step(megatron, model))
    step(megatron, model)


def test_inside_a_running_step():
    run_ranks(inside, 1)


@on_stand_in
def several(megatron, layers):
    """Messages of more than one tensor."""
    megatron.P2PCommunicator = type("P2PCommunicator", (), {})
    zbpp_light.patch_megatron()
    model = Model(Config(), ColumnParallelLinear())
    with pytest.raises(ValueError, match="messages of a MultiModule are of pipelines of several modules"):
        step(megatron, model, p2p_communicator=type("MultiModule", (), {})())
    with pytest.raises(
        ValueError, match=r"shapes \[\[\(3, 2, 4\), \(3, 2, 4\)\], .* where it sends one tensor"
    ):
        step(megatron, model, adjust_tensor_shapes_fn=lambda received, sent: (2 * received, sent))
    step(megatron, model)


def test_messages_of_several_tensors():
    run_ranks(several, 1)


@on_stand_in
def fails(megatron, layers):
    zbpp_light.patch_megatron()
    model = Model(Config(), ColumnParallelLinear())

    def forward(data, model, received):
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("the user's own error")
        return model(next(data))

    step(megatron, model, forward_step_func=forward)


def test_an_error_in_a_forward_comes_out_as_it_is():
    with pytest.raises(RanksError, match="the user's own error"):
        run_ranks(fails, 2, timeout=20)


@on_stand_in
def tokens(megatron, layers):
    calls = []
    config = Config(calculate_per_token_loss=True)
    config.finalize_model_grads_func = lambda models, count, **words: calls.append(
        (len(models), count.item(), words)
    )
    zbpp_light.patch_megatron()
    step(megatron, Model(config, ColumnParallelLinear()), force_all_reduce=True)
    config.calculate_per_token_loss = False
    config.finalize_model_grads_func = lambda models, count, **words: calls.append(
        (len(models), count, words)
    )
    step(megatron, Model(config, ColumnParallelLinear()))
    return calls


def test_what_finalize_model_grads_gets():
    for calls in run_ranks(tokens, 2):
        assert calls == [(1, 12, {"force_all_reduce": True}), (1, None, {})]


@on_stand_in
def narrow(megatron, layers):
    zbpp_light.patch_megatron()
    step(megatron, Model(Config(pipeline_dtype=torch.bfloat16), ColumnParallelLinear()))


def test_what_is_sent_is_what_is_received():
    with pytest.raises(
        RanksError, match=r"\(3, 2, 4\) of torch.float32 .* receives \(3, 2, 4\) of torch.bfloat16"
    ):
        run_ranks(narrow, 2, timeout=20)


# Checks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", checks._SETTINGS)
def test_each_setting_is_refused_by_name(name):
    right, why = checks._SETTINGS[name]
    model = Model(Config(), ColumnParallelLinear())
    for value in (None, *right):
        assert checks.problems(Config(**{name: value}), [model]) == []
    assert checks.problems(Config(**{name: 2}), [model]) == [f"{name} is 2: {why}"]


def test_models_that_are_refused():
    class GroupedMLP(nn.Module):
        """By its name."""

    sharded = ColumnParallelLinear()
    sharded.weight.__fsdp_param__ = True
    model = nn.Sequential(GroupedMLP(), EngineLinear(), sharded)
    model.model_type = types.SimpleNamespace(name="encoder_and_decoder")
    wrapped = nn.ModuleDict({"module": model})
    assert checks.model_type(wrapped) is model.model_type
    reasons = checks.problems(Config(), [wrapped, nn.Linear(2, 2)])
    for reason, words in zip(
        reasons,
        (
            "2 chunks of the model",
            "module.0 is a GroupedMLP",
            "module.1 is a EngineLinear",
            "FSDP",
            "encoder and decoder",
        ),
        strict=True,
    ):
        assert words in reason


def test_engine_layers_under_a_ddp_that_does_not_wait():
    model = nn.Sequential(EngineLinear())
    config = Config(delay_wgrad_compute=True)
    assert list(checks.engine_linears(config, model)) == [model[0]]
    model.ddp_config = types.SimpleNamespace(delay_wgrad_compute=False)
    assert list(checks.engine_linears(config, model)) == []
    assert "1 is" not in checks.problems(config, [model])[0]
    model.ddp_config.delay_wgrad_compute = True
    assert checks.problems(config, [model]) == []


def test_an_embeddings_weight_is_not_split():
    layers = stand_in.modules()[stand_in.LAYERS]
    embedding, head = stand_in.VocabParallelEmbedding(4, 4), ColumnParallelLinear()
    head.weight = embedding.weight
    assert checks.embedding_weights(layers, nn.Sequential(embedding, head)) == [head.weight]
    assert schedules.MADE_HERE == "zb-h1"
