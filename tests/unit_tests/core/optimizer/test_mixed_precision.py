"""Our optimizer over flat slices against torch's, parameter by parameter; resume; agreement between ranks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.shard_layout import bucket_size_of
from megatron.core.memory_tracker import MemoryTracker
from megatron.core.module import ModelError
from megatron.core.optimizer import converted_grads
from megatron.core.optimizer.mixed_precision import OptimizerStateError, RollbackBy, build_optimizer
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.param_meta import ParamMeta, infer_param_meta
from megatron.core.sharding_table import STRATEGIES, ShardOver, ShardPlace, sharding_of
from megatron.core.transport.parallel_state import single_process
from megatron.training.engine import weight_pieces
from tests.harness.ranks import run_ranks
from tests.harness.units_of_size import units_of_size

WHOLE = STRATEGIES["no_shard"]
ALONE = ShardPlace()
PS = single_process(Device("cpu"))


def model(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def make(module, ps=PS, ddp_config=None, sharding=WHOLE, place=ALONE, units=None, **flags):
    meta = infer_param_meta(module)
    for name in ("2.weight", "2.bias"):  # the last layer counts as the output layer
        if name in meta:
            old = meta[name]
            meta[name] = ParamMeta(name, old.global_shape, decay=old.decay, embedding_or_output=True)
    config = ddp_config or DistributedDataParallelConfig(ddp_bucket_size=20)
    parameters = dict(module.named_parameters())
    if units is None:
        numels = {name: p.numel() for name, p in parameters.items()}
        sizes = (config.ddp_bucket_size, config.ddp_num_buckets)
        units = units_of_size(numels, bucket_size_of(sum(numels.values()), place.dp_size, *sizes))
    buffer = FlatBuffer(
        parameters, meta, config, sharding=sharding, place=place, device=torch.device("cpu"), units=units
    )
    return buffer, build_optimizer(OptimizerConfig(**{"lr": 1e-2, **flags}), buffer, ps)


def set_grads(buffer, step, scale=1.0):
    """The same gradients for the same step, wherever the buffer puts them."""
    for index, name in enumerate(buffer.names):
        generator = torch.Generator().manual_seed(1000 * step + index)
        grad = buffer.main_grad(name)
        grad.copy_(torch.randn(grad.shape, generator=generator, dtype=torch.float64) * scale)


def reference_groups(module, weight_decay, lr, decoupled_lr=None):
    groups = []
    for name, p in module.named_parameters():
        decays = name.endswith("weight") and not name.startswith("1.")
        own_lr = decoupled_lr if decoupled_lr is not None and name.startswith("2.") else lr
        groups.append({"params": [p], "lr": own_lr, "weight_decay": weight_decay if decays else 0.0})
    return groups


class WholeVectors(nn.Module):
    """A model's parameters one by one, each filled up with zeros to whole vectors: torch's fused CPU kernels round what
    is left behind the last vector in another way than all the rest, so without it a reference of tensors as short as
    these would be one of that remainder (see flat_update)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.filled = {name: nn.Parameter(self.fill(p.detach())) for name, p in module.named_parameters()}

    def fill(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(value.flatten(), (0, -value.numel() % 64))

    def named_parameters(self, *args, **kwargs):
        return iter(self.filled.items())

    def set_grad(self, name: str, grad: torch.Tensor) -> None:
        self.filled[name].grad = self.fill(grad)

    def value(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        return self.filled[name].detach()[: shape.numel()].view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decoupled_lr", [None, 3e-3])
@pytest.mark.parametrize("name", ["adam", "sgd", "sgd_plain"])
def test_ten_steps_equal_torch_bit_for_bit(dtype, decoupled_lr, name):
    flags = {"optimizer": "adam", "weight_decay": 0.1, "adam_beta2": 0.95, "decoupled_lr": decoupled_lr}
    if name != "adam":
        flags.update(optimizer="sgd", sgd_momentum=0.9 if name == "sgd" else 0.0)
    reference = WholeVectors(model(dtype))
    groups = reference_groups(reference, 0.1, 1e-2, decoupled_lr)
    if name == "adam":
        theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
    else:
        theirs = torch.optim.SGD(groups, momentum=flags["sgd_momentum"], fused=True)
    module = model(dtype)
    buffer, ours = make(module, **flags)
    for step in range(10):
        set_grads(buffer, step)
        for parameter_name in buffer.names:
            reference.set_grad(parameter_name, buffer.main_grad(parameter_name) * 0.25)
        theirs.step()
        ours.step(divisor=2.0, clip_coefficient=0.5)
    assert ours.num_steps == 10
    for parameter_name, p in module.named_parameters():
        assert torch.equal(p, reference.value(parameter_name)), parameter_name


def test_naive_adamw_formula_in_fp64():
    module = model(torch.float64)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    buffer, ours = make(module, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)
    m = {name: torch.zeros_like(p) for name, p in before.items()}
    v = {name: torch.zeros_like(p) for name, p in before.items()}
    for step in range(1, 6):
        set_grads(buffer, step)
        for name, w in before.items():
            g = buffer.main_grad(name).clone() / 7
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g * g
            decay = 0.1 if w.dim() > 1 else 0.0
            update = (m[name] / (1 - 0.8**step)) / ((v[name] / (1 - 0.9**step)).sqrt() + 1e-6)
            before[name] = w * (1 - 1e-2 * decay) - 1e-2 * update
        ours.step(divisor=7.0)
    for name, w in before.items():
        torch.testing.assert_close(buffer.weight(name), w, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("grad_reduce_in_bf16", [False, True])
def test_bf16_weights_follow_fp32_main_weights(grad_reduce_in_bf16):
    module = model(torch.bfloat16)
    reference = WholeVectors(copy.deepcopy(module).float())
    theirs = torch.optim.AdamW(reference_groups(reference, 0.01, 1e-2), fused=True)
    config = DistributedDataParallelConfig(grad_reduce_in_bf16=grad_reduce_in_bf16)
    buffer, ours = make(module, ddp_config=config)
    for step in range(5):
        set_grads(buffer, step)
        for name in buffer.names:
            reference.set_grad(name, buffer.main_grad(name).float() * 0.125)
        theirs.step()
        ours.step(divisor=8.0)
    for name, p in module.named_parameters():
        assert torch.equal(buffer.main_weight(name), reference.value(name))
        assert torch.equal(p, reference.value(name).bfloat16())


def test_moments_exist_before_the_first_step_and_resume_is_bit_identical():
    straight_buffer, straight = make(model(torch.bfloat16))
    for step in range(6):
        set_grads(straight_buffer, step)
        straight.step(1.0)

    first_buffer, first = make(model(torch.bfloat16))
    for step in range(3):
        set_grads(first_buffer, step)
        first.step(1.0)
    saved = {piece.name: piece.tensor.clone() for piece in first.pieces()}
    state = copy.deepcopy(first.state())

    second_buffer, second = make(
        model(torch.bfloat16), ddp_config=DistributedDataParallelConfig(ddp_num_buckets=1)
    )  # a checkpoint does not know about buckets
    assert {piece.name for piece in second.pieces()} == set(saved)
    for piece in second.pieces():
        assert not piece.tensor.any() or ".main_weight." in piece.name
        assert piece.offset == (0,) * len(piece.global_shape)
        assert tuple(piece.tensor.shape) == piece.global_shape
        piece.tensor.copy_(saved[piece.name])
    second.load_state(state)
    second_buffer.copy_main_to_weights()
    for step in range(3, 6):
        set_grads(second_buffer, step)
        second.step(1.0)
    assert second.num_steps == straight.num_steps == 6
    expected = {piece.name: piece.tensor for piece in straight.pieces()}
    for piece in second.pieces():
        assert torch.equal(piece.tensor, expected[piece.name]), piece.name
    for name in straight_buffer.names:
        assert torch.equal(second_buffer.weight(name), straight_buffer.weight(name))


def test_piece_names():
    buffer, adam = make(nn.Linear(2, 2, bias=False))
    assert [p.name for p in adam.pieces()] == ["optimizer.exp_avg.weight", "optimizer.exp_avg_sq.weight"]
    _, half = make(nn.Linear(2, 2, bias=False).bfloat16())
    assert half.pieces()[0].name == "optimizer.main_weight.weight"
    _, sgd = make(nn.Linear(2, 2, bias=False), optimizer="sgd")
    assert [p.name for p in sgd.pieces()] == ["optimizer.momentum_buffer.weight"]
    _, plain_sgd = make(nn.Linear(2, 2, bias=False), optimizer="sgd", sgd_momentum=0.0)
    assert plain_sgd.pieces() == []
    numel = buffer.arenas[0].layout.numel
    assert adam.persistent_bytes() == {"exp_avg": 4 * numel, "exp_avg_sq": 4 * numel}


def test_state_of_another_optimizer_is_refused():
    _, adam = make(model())
    _, sgd = make(model(), optimizer="sgd")
    with pytest.raises(OptimizerStateError, match=r"--optimizer sgd, this run uses adam.*--no-load-optim"):
        adam.load_state(sgd.state())


def test_prepare_measures_without_changing():
    buffer, ours = make(model())
    set_grads(buffer, 0)
    buffer.main_grad("0.bias").zero_()
    before = {name: buffer.main_grad(name).clone() for name in buffer.names}
    stats = ours.prepare(4.0, count_zero_grads=True)
    flat = torch.cat([before[name].double().flatten() for name in buffer.names])
    assert stats.norm == pytest.approx(flat.norm().item() / 4, rel=1e-14)
    assert (stats.nonfinite, stats.num_zeros) == (False, 8)
    assert ours.prepare(4.0).num_zeros is None
    assert all(torch.equal(buffer.main_grad(name), grad) for name, grad in before.items())
    weights = torch.cat([buffer.weight(name).double().flatten() for name in buffer.names])
    assert ours.params_norm() == pytest.approx(weights.norm().item(), rel=1e-14)


def test_norm_does_not_depend_on_the_layout():
    norms = set()
    for sizes in ({"ddp_bucket_size": 1}, {"ddp_num_buckets": 2}, {}):
        buffer, ours = make(model(), ddp_config=DistributedDataParallelConfig(**sizes))
        set_grads(buffer, 0)
        norms.add(ours.prepare(3.0).norm)
    assert len(norms) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_is_agreed_by_all_ranks(bad):
    def body(ctx):
        buffer, ours = make(model(), ps=ctx.ps)
        set_grads(buffer, 0)
        if ctx.rank == 1:
            buffer.main_grad("1.bias")[2] = bad
        stats = ours.prepare(1.0)
        return stats.nonfinite, math.isfinite(stats.norm)

    assert run_ranks(body, 2) == [(True, True), (True, False)]


def test_param_groups_hold_what_the_scheduler_sets():
    _, ours = make(model(), weight_decay=0.1, decoupled_lr=5e-3, min_lr=1e-5)
    rows = {(g["wd_mult"], g["decoupled"]): (g["max_lr"], g["min_lr"]) for g in ours.param_groups}
    assert rows == {
        (1.0, False): (1e-2, 1e-5),
        (0.0, False): (1e-2, 1e-5),
        (1.0, True): (5e-3, 1e-5),
        (0.0, True): (5e-3, 1e-5),
    }
    for group in ours.param_groups:
        group["lr"] = 0.0
    buffer = ours.buffer
    before = {name: buffer.weight(name).clone() for name in buffer.names}
    set_grads(buffer, 0)
    ours.step(1.0)
    assert all(torch.equal(buffer.weight(name), w) for name, w in before.items())


def test_nothing_to_train_is_refused():
    with pytest.raises(ModelError, match="all parameters are frozen"):
        make(model().requires_grad_(False))


def mutable_state(ours):
    """Bits of everything that a step changes."""
    tensors = [piece.tensor for piece in ours.pieces()]
    tensors += [ours.buffer.weight(name) for name in ours.buffer.names] + list(ours._update.mutable())
    return ours.num_steps, [tensor.clone() for tensor in tensors]


def same(a, b):
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adam", "sgd", "sgd_plain"])
def test_rollback_puts_back_every_bit_and_the_step_can_be_taken_again(dtype, name):
    flags = {"optimizer": "adam"} if name == "adam" else {"optimizer": "sgd"}
    if name == "sgd_plain":
        flags["sgd_momentum"] = 0.0
    buffer, ours = make(model(dtype), **flags)
    straight_buffer, straight = make(model(dtype), **flags)
    for step in range(2):
        set_grads(buffer, step)
        set_grads(straight_buffer, step)
        ours.step(2.0)
        straight.step(2.0)
    set_grads(buffer, 2)
    set_grads(straight_buffer, 2)
    before = mutable_state(ours)
    ours.snapshot()
    ours.step(4.0, 0.5)  # with a coefficient that proves wrong
    assert not same(mutable_state(ours), before)
    ours.rollback()
    assert same(mutable_state(ours), before)
    ours.step(4.0, 0.125)  # gradients are still there
    straight.step(4.0, 0.125)
    assert same(mutable_state(ours), mutable_state(straight))
    ours.rollback()
    assert same(mutable_state(ours), before)
    ours.commit()
    ours.step(4.0, 0.125)
    assert same(mutable_state(ours), mutable_state(straight))


def test_snapshots_are_taken_and_given_back_one_at_a_time():
    _, ours = make(model())
    for call, message in ((ours.rollback, r"rollback\(\) without"), (ours.commit, r"commit\(\) without")):
        with pytest.raises(AssertionError, match=message):
            call()
    ours.snapshot()
    with pytest.raises(AssertionError, match="a snapshot is kept already"):
        ours.snapshot()


# Every strategy, and ranks by inner and outer size, each emulated in this process: nothing communicates in `step`.
CUTS = [
    ("no_shard", sharding_of("no_shard"), 2, 1),
    ("optim", sharding_of("optim"), 2, 1),
    ("optim", sharding_of("optim"), 3, 2),
    ("optim_grads", sharding_of("optim_grads"), 2, 1),
    ("optim_grads_params", sharding_of("optim_grads_params"), 1, 1),
    ("optim_grads_params", sharding_of("optim_grads_params"), 2, 1),
    ("optim_grads_params", sharding_of("optim_grads_params"), 5, 1),
    ("hybrid", sharding_of("optim_grads_params"), 2, 2),
    ("fully_hybrid", sharding_of("optim_grads_params", "optim"), 2, 2),
]
cuts = pytest.mark.parametrize(
    ("sharding", "inner", "outer"), [row[1:] for row in CUTS], ids=[f"{r[0]}-{r[2]}x{r[3]}" for r in CUTS]
)


def larger(dtype) -> nn.Module:
    """Parts of its parameters begin and end in the middle of vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 23), nn.LayerNorm(23), nn.Linear(23, 31)).to(dtype)


def all_ranks(sharding, inner, outer, dtype=torch.float32, **flags):
    return [
        make(
            larger(dtype),
            ddp_config=DistributedDataParallelConfig(),
            sharding=sharding,
            place=ShardPlace(i, inner, o, outer),
            units={name: name[0] for name, _ in larger(dtype).named_parameters()},
            **flags,
        )
        for i in range(inner)
        for o in range(outer)
    ]


def gradient(name, shape, step):
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    return torch.randn(shape, generator=generator)


def set_part_grads(buffer, step):
    """The optimizer's part of the same gradients; all else that is at rest must not matter."""
    for flat in buffer.grads_at_rest():
        flat.fill_(float("nan"))
    for name in buffer.names:
        start, end = buffer.part(name, buffer.sharding.optimizer)
        whole = gradient(name, buffer.param_meta[name].global_shape, step).view(-1)
        buffer.main_grad_part(name).copy_(whole[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adam", "sgd", "sgd_plain"])
@cuts
def test_every_cut_updates_with_the_bits_of_torch_over_whole_tensors(sharding, inner, outer, dtype, name):
    flags = {"weight_decay": 0.1, "decoupled_lr": 3e-3}
    if name != "adam":
        flags.update(optimizer="sgd", sgd_momentum=0.9 if name == "sgd" else 0.0)
    reference = WholeVectors(larger(dtype).float())
    groups = reference_groups(reference, 0.1, 1e-2, 3e-3)
    if name == "adam":
        theirs = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, fused=True)
    else:
        theirs = torch.optim.SGD(groups, momentum=flags["sgd_momentum"], fused=True)
    ranks = all_ranks(sharding, inner, outer, dtype, **flags)
    for step in range(5):
        for parameter, shape in reference.shapes.items():
            reference.set_grad(parameter, gradient(parameter, shape, step) * 0.25)
        theirs.step()
        for buffer, ours in ranks:
            set_part_grads(buffer, step)
            ours.step(divisor=2.0, clip_coefficient=0.5)
    for buffer, _ in ranks:
        for parameter in buffer.names:
            expected = reference.value(parameter).view(-1)
            start, end = buffer.part(parameter, sharding.optimizer)
            assert torch.equal(buffer.main_weight_part(parameter), expected[start:end]), parameter
            first, _ = buffer.part(parameter, sharding.weights)
            held = buffer.weight_part(parameter)[start - first : end - first] if end > start else None
            assert held is None or torch.equal(held, expected[start:end].to(dtype)), parameter


def checkpoint_of(ranks) -> dict[str, torch.Tensor]:
    """All ranks' pieces put together; what no rank has stays NaN, and replicas agree."""
    whole: dict[str, torch.Tensor] = {}
    for buffer, ours in ranks:
        for piece in [*weight_pieces(buffer), *ours.pieces()]:
            tensor = whole.setdefault(
                piece.name, torch.full(piece.global_shape, float("nan"), dtype=piece.tensor.dtype)
            )
            view = tensor[
                tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
            ]
            assert view.isnan().all() or torch.equal(view, piece.tensor), piece.name
            view.copy_(piece.tensor)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def load(ranks, whole: dict[str, torch.Tensor], state) -> None:
    for buffer, ours in ranks:
        with buffer.resting_weights():
            for piece in [*weight_pieces(buffer), *ours.pieces()]:
                slot = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
                piece.tensor.copy_(whole[piece.name][slot])
        ours.load_state(state)


def gather(ranks) -> None:
    """What the engine does after a step: whole weights take what each rank has updated."""
    for buffer, _ in ranks:
        if buffer.sharding.weights is ShardOver.INNER and buffer.sharding.optimizer is ShardOver.INNER:
            continue
        for other, _ in ranks:
            for name in buffer.names:
                low, high = buffer.part(name, buffer.sharding.weights)
                start, end = other.part(name, other.sharding.optimizer)
                first, _ = other.part(name, other.sharding.weights)
                if low <= start < end <= high:
                    held = other.weight_part(name)[start - first : end - first]
                    buffer.weight_part(name)[start - low : end - low].copy_(held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@cuts
def test_any_cut_goes_on_from_any_other(sharding, inner, outer, dtype):
    """Three steps under one strategy, its pieces into another, three more: weights and moments bit by bit those of six
    steps of one process."""
    straight = all_ranks(WHOLE, 1, 1, dtype)
    for before, after in (((WHOLE, 1, 1), (sharding, inner, outer)), ((sharding, inner, outer), CUTS[3][1:])):
        first, second = all_ranks(*before, dtype), all_ranks(*after, dtype)
        for step in range(3):
            run_step(first, step)
        load(second, checkpoint_of(first), first[0][1].state())
        for step in range(3, 6):
            run_step(second, step)
        if not straight[0][1].num_steps:
            for step in range(6):
                run_step(straight, step)
        expected, found = checkpoint_of(straight), checkpoint_of(second)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def run_step(ranks, step) -> None:
    for buffer, ours in ranks:
        set_part_grads(buffer, step)
        ours.step(2.0, 0.5)
    gather(ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@cuts
def test_rollback_puts_back_every_bit_of_a_shard(sharding, inner, outer, dtype):
    for buffer, ours in all_ranks(sharding, inner, outer, dtype):
        set_part_grads(buffer, 0)
        ours.step(2.0)
        set_part_grads(buffer, 1)
        before = shard_bits(buffer, ours)
        ours.snapshot()
        ours.step(4.0, 0.5)
        after = shard_bits(buffer, ours)
        held = sum(buffer.main_weight_part(name).numel() for name in buffer.names)
        assert all(map(torch.equal, before, after)) == (held == 0)  # a rank may have nothing but padding
        ours.rollback()
        assert all(map(torch.equal, before, shard_bits(buffer, ours)))
        assert ours.num_steps == 1
        ours.step(4.0, 0.5)  # gradients are still there
        assert all(map(torch.equal, after, shard_bits(buffer, ours)))
        ours.commit()


def shard_bits(buffer, ours) -> list[torch.Tensor]:
    pieces = [*weight_pieces(buffer), *ours.pieces()]
    return [tensor.clone() for tensor in (*(piece.tensor for piece in pieces), *ours._update.mutable())]


@cuts
def test_moments_are_as_large_as_the_optimizers_part(sharding, inner, outer):
    for buffer, ours in all_ranks(sharding, inner, outer, torch.bfloat16):
        numel = sum(arena.layout.numel for arena in buffer.arenas) // buffer.place.ways(sharding.optimizer)
        assert ours.persistent_bytes() == {"exp_avg": 4 * numel, "exp_avg_sq": 4 * numel}


def test_a_rank_without_any_part_steps_too():
    module = nn.Linear(2, 2)
    meta_units = dict.fromkeys(("weight", "bias"), "all")
    place = ShardPlace(1, 2)
    buffer, ours = make(
        module, ddp_config=DistributedDataParallelConfig(), sharding=STRATEGIES["optim_grads_params"],
        place=place, units=meta_units,
    )  # fmt: skip
    assert [buffer.main_weight_part(name).numel() for name in buffer.names] == [0, 0]
    ours.snapshot()
    ours.step(1.0)
    ours.rollback()
    ours.commit()
    assert (ours.num_steps, ours.pieces(), ours.param_groups) == (0, [], [])


def test_main_weights_of_the_models_own_dtype():
    """--megatron-fsdp-main-params-dtype auto: nothing but the weights themselves is updated."""
    config = DistributedDataParallelConfig(megatron_fsdp_main_params_dtype="auto")
    buffer, ours = make(model(torch.bfloat16), ddp_config=config)
    reference = WholeVectors(model(torch.bfloat16))
    theirs = torch.optim.AdamW(reference_groups(reference, 0.01, 1e-2), fused=True)
    for step in range(3):
        set_grads(buffer, step)
        for name in buffer.names:
            reference.set_grad(name, (buffer.main_grad(name) * 0.5).bfloat16())
        theirs.step()
        ours.step(2.0)
    assert buffer.persistent_bytes()["main_weights"] == 0
    for name in buffer.names:
        assert buffer.main_weight(name).dtype == torch.bfloat16
        assert torch.equal(buffer.weight(name), reference.value(name))


# Converted gradients, and what the memory tracker knows of them

CASTS = {  # (weights, flags) -> bytes of temporaries an element: of the batch, and for a moment
    "bf16 gradients of fp32 weights": (torch.bfloat16, {"grad_reduce_in_bf16": True}, 4, 0),
    "fp16 gradients of fp32 weights": (torch.float16, {}, 4, 0),
    "fp32 gradients of bf16 weights": (torch.bfloat16, {"megatron_fsdp_main_params_dtype": "auto"}, 2, 4),
    "no conversion": (torch.bfloat16, {}, 0, 0),
}


def steps_of(dtype, flags, *, most: int | None, monkeypatch, snapshot: bool = False):
    """(weights after three steps, tracked peaks, buffer, calls of the update). most: bytes of temporaries."""
    if most is not None:
        monkeypatch.setattr(converted_grads, "MAX_CAST_BYTES", most)
    config = DistributedDataParallelConfig(ddp_bucket_size=20, **flags)
    buffer, _ = make(model(dtype), ddp_config=config)
    tracker = MemoryTracker()
    optimizer = build_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1), buffer, PS, tracker)
    calls, real = [], optimizer._update._update
    monkeypatch.setattr(optimizer._update, "_update", lambda due: (calls.append(1), real(due))[1])
    for step in range(3):
        set_grads(buffer, step)
        if snapshot:
            optimizer.snapshot()
        optimizer.step(4.0, 0.7)
        planned = optimizer.step_bytes()["optimizer"]
        assert snapshot or planned == {kind: tracker.peak(kind) for kind in ("casts", "tails")}
        if snapshot:
            assert tracker.live("snapshot") > 0
            optimizer.commit()
        assert tracker.transient_bytes == 0
    weights = {name: buffer.main_weight_part(name).clone() for name in buffer.names}
    return weights, tracker, buffer, len(calls) // 3


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("case", CASTS)
def test_gradients_are_converted_a_few_buckets_at_a_time_with_the_same_bits(case, snapshot, monkeypatch):
    dtype, flags, lasting, momentary = CASTS[case]
    if snapshot and not lasting:
        lasting = 4  # scaled beside what the snapshot may have to read again
    at_once, tracker, buffer, calls = steps_of(
        dtype, flags, most=None, monkeypatch=monkeypatch, snapshot=snapshot
    )
    sizes = [bucket.bucket.numel for bucket in buffer.buckets]
    assert len(sizes) >= 3
    assert calls == 1
    assert tracker.peak("casts") == lasting * sum(sizes) + momentary * max(sizes)
    one_each, tracker, _, calls = steps_of(dtype, flags, most=1, monkeypatch=monkeypatch, snapshot=snapshot)
    assert calls == (len(sizes) if lasting else 1)
    assert tracker.peak("casts") == (lasting + momentary) * max(sizes)
    assert all(torch.equal(at_once[name], one_each[name]) for name in at_once)


# What post-validation asks of it


def test_the_state_of_a_stage_has_the_bits_of_the_norm():
    """Over one data parallel rank, two and three, cut and not: order of addition matters from three on."""

    def body(ctx, dp):
        found = []
        for sharding in ("no_shard", "optim", "optim_grads_params") if dp > 1 else ("no_shard",):
            cut = sharding_of(sharding)
            place = ShardPlace(ctx.rank, dp)
            units = {name: name[0] for name, _ in larger(torch.float32).named_parameters()}
            buffer, ours = make(
                larger(torch.float32), ps=ctx.make_ps(dp=dp), ddp_config=DistributedDataParallelConfig(), sharding=cut,
                place=place, units=units if sharding != "no_shard" else None,
            )  # fmt: skip
            for step in range(4):
                set_part_grads(buffer, step)
                stats = ours.prepare(3.0, count_zero_grads=True)
                state = ours.stage_state(False, count_zero_grads=True, extras=(float(ctx.rank), 1.0))
                assert ours.norm(state.sums, 3.0) == stats.norm, (sharding, step)
                assert (state.num_zeros, state.finite) == (stats.num_zeros, True)
                assert state.extras == (sum(range(dp)), dp)
                found.append((sharding, stats.norm))
            assert not ours.stage_state(ctx.rank == dp - 1).finite  # one rank's loss
            part = next(p for p in map(buffer.main_grad_part, buffer.names) if p.numel() or ctx.rank)
            if ctx.rank == 0:
                part[0] = math.inf
            state, stats = ours.stage_state(False), ours.prepare(3.0)
            # Where nothing is cut ranks hold the same gradients, and this is one rank's mistake: all hear of it anyway.
            assert state.nonfinite
            assert stats.nonfinite
        return found

    alone = run_ranks(body, 1, 1)[0]
    for dp in (2, 3):
        by_rank = run_ranks(body, dp, dp)
        assert by_rank == [by_rank[0]] * dp
        assert by_rank[0][:4] == alone
        for (_, norm), (_, expected) in zip(by_rank[0][4:], [*alone, *alone], strict=True):
            assert norm == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["adam", "sgd", "sgd_plain"])
@pytest.mark.parametrize("num_before", [0, 3])
def test_the_inverse_comes_back_to_about_a_rounding_and_keeps_no_copy(dtype, name, num_before):
    flags = {"optimizer": "adam"} if name == "adam" else {"optimizer": "sgd"}
    if name == "sgd_plain":
        flags["sgd_momentum"] = 0.0
    tracker = MemoryTracker()
    buffer, _ = make(model(dtype))
    ours = build_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1, **flags), buffer, PS, tracker)
    ours.rollback_by = RollbackBy.INVERSE
    for step in range(num_before):
        set_grads(buffer, step)
        ours.step(2.0)
    set_grads(buffer, 7, scale=3.0)
    grads = [buffer.main_grad(key).clone() for key in buffer.names]
    before = mutable_state(ours)
    ours.snapshot()
    assert ours.snapshot_bytes() == 0
    assert not any("snapshot" in line for line in tracker.lines())
    ours.step(4.0, 1.0)
    assert not same(mutable_state(ours), before)
    ours.rollback()
    assert ours.num_steps == num_before
    eps = {torch.float64: 1e-15}.get(dtype, 3e-7)
    for number, (now, then) in enumerate(zip(mutable_state(ours)[1], before[1], strict=True)):
        size = max(1.0, float(then.abs().max()) if then.numel() else 1.0)
        assert float((now - then).abs().max()) <= (8e-3 if now.dtype == torch.bfloat16 else eps) * size, (
            number
        )
    assert all(map(torch.equal, grads, (buffer.main_grad(key) for key in buffer.names)))  # for the right step
    ours.commit()
    ours.rollback_by = RollbackBy.SNAPSHOT
    assert ours.snapshot_bytes() > 0
