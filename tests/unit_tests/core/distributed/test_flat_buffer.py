"""One flat buffer: parameters are views, values survive, accumulators of tied uses combine once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.distributed.custom_fsdp.bucket_memory import BucketMemory
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.shard_layout import ALIGNMENT
from megatron.core.distributed.custom_fsdp.transient_memory import own_storage
from megatron.core.param_meta import LOOKUP, ParamMeta, infer_param_meta
from megatron.core.sharding_table import STRATEGIES, ShardOver, ShardPlace, sharding_of

CPU = torch.device("cpu")
FIRST_OF_TWO = ShardPlace(0, 2)


def plain(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def buffer_of(
    module, config=None, meta=None, sharding=STRATEGIES["no_shard"], place=FIRST_OF_TWO, **more
) -> FlatBuffer:
    config = config or DistributedDataParallelConfig()
    parameters = dict(module.named_parameters())
    meta = meta or infer_param_meta(module)
    return FlatBuffer(parameters, meta, config, sharding=sharding, place=place, device=CPU, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_parameters_become_views_and_keep_their_values_and_identity(dtype):
    module = plain(dtype)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    objects = {name: id(p) for name, p in module.named_parameters()}
    buffer = buffer_of(module)
    (arena,) = buffer.arenas
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])
        assert id(p) == objects[name]
        assert isinstance(p, nn.Parameter)
        assert p.untyped_storage().data_ptr() == arena.weights.untyped_storage().data_ptr()
        assert torch.equal(buffer.main_weight(name), before[name].to(buffer.main_weight(name).dtype))
    assert buffer.names == tuple(before)
    assert arena.layout.numel % 256 == 0
    out = module(torch.ones(2, 7, dtype=dtype))
    buffer.weight("2.weight").zero_()
    assert torch.equal(module(torch.ones(2, 7, dtype=dtype)), module[2].bias.expand(2, 3))
    assert not torch.equal(out, module[2].bias.expand(2, 3))


def test_main_weights_exist_only_for_16_bit_weights():
    for dtype in (torch.float32, torch.float64):
        buffer = buffer_of(plain(dtype))
        assert buffer.main_weight("0.weight").data_ptr() == buffer.weight("0.weight").data_ptr()
        assert not buffer.has_own_main_weight("0.weight")
        assert buffer.persistent_bytes()["main_weights"] == 0
    buffer = buffer_of(plain(torch.bfloat16))
    assert buffer.main_weight("0.weight").dtype == torch.float32
    buffer.main_weight("0.weight").fill_(1 + 2**-12)
    buffer.copy_main_to_weights()
    assert buffer.weight("0.weight").unique().tolist() == [1.0]
    buffer.copy_weights_to_main()
    assert buffer.main_weight("0.weight").unique().tolist() == [1.0]


def test_persistent_bytes_per_parameter_are_those_of_the_table():
    # no_shard, bf16 weights: 2 (weights) + 4 (main) + 4 (fp32 gradients, or 2) bytes a parameter
    for config, grad_bytes in (
        (DistributedDataParallelConfig(), 4),
        (DistributedDataParallelConfig(grad_reduce_in_bf16=True), 2),
    ):
        buffer = buffer_of(plain(torch.bfloat16), config)
        numel = buffer.arenas[0].layout.numel
        assert buffer.persistent_bytes() == {
            "weights": 2 * numel,
            "main_weights": 4 * numel,
            "main_grads": grad_bytes * numel,
            "extra_grads": 0,
        }


def test_meta_parameters_get_storage_and_keep_their_identity():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    module[1].weight.requires_grad_(False)
    objects = {name: id(p) for name, p in module.named_parameters()}
    buffer = buffer_of(module)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        buffer.weight(name).fill_(0.5)
    assert {name: id(p) for name, p in module.named_parameters()} == objects
    assert [p.requires_grad for p in module.parameters()] == [True, True, False, True]
    assert all(p.device == CPU for p in module.parameters())
    assert module(torch.ones(1, 4)).tolist() == [[4.25, 4.25]]


def test_tied_uses_have_their_own_accumulators():
    module = nn.Embedding(4, 2)
    meta = {"weight": ParamMeta("weight", (4, 2), uses=("weight", "weight" + LOOKUP))}
    buffer = buffer_of(module, meta=meta)
    assert set(buffer.extra_grads) == {"weight" + LOOKUP}
    buffer.main_grad("weight").fill_(1.0)
    buffer.main_grad("weight" + LOOKUP).fill_(2.0)
    assert buffer.param_of_key("weight" + LOOKUP) == "weight"
    assert buffer.main_grad("weight").unique().tolist() == [1.0]
    assert buffer.persistent_bytes()["extra_grads"] == 4 * 2 * 4


def test_plainly_shared_parameter_is_stored_once():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    buffer = buffer_of(module)
    assert buffer.names == ("0.weight",)
    assert module[0].weight is module[1].weight


def test_two_dtypes_are_two_arenas():
    module = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    buffer = buffer_of(module)
    assert sorted(str(a.weights.dtype) for a in buffer.arenas) == ["torch.bfloat16", "torch.float32"]
    assert buffer.has_own_main_weight("0.weight")
    assert not buffer.has_own_main_weight("1.weight")
    assert buffer.main_weight("1.bias").data_ptr() == module[1].bias.data_ptr()


def test_frozen_parameters_stay_out_of_gradients_and_main_weights():
    module = plain(torch.bfloat16)
    module[0].weight.requires_grad_(False)
    buffer = buffer_of(module)
    assert buffer.frozen == ("0.weight",)
    assert "0.weight" not in buffer.names
    with pytest.raises(KeyError):
        buffer.main_grad("0.weight")
    assert torch.equal(buffer.weight("0.weight"), module[0].weight)


def test_unusable_dtype_and_missing_facts_are_refused():
    with pytest.raises(ValueError, match=r"parameter 0 is torch.complex64"):
        buffer_of(nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))]))
    with pytest.raises(AssertionError, match=r"without ParamMeta: \['bias'\]"):
        buffer_of(nn.Linear(2, 2), meta={"weight": ParamMeta("weight", (2, 2))})


# Every row of the table; outer instances are there in all of them but no_shard.
ROWS = {name: sharding_of(name) for name in STRATEGIES} | {
    "hybrid": sharding_of("optim_grads_params"),
    "fully_hybrid": sharding_of("optim_grads_params", "optim"),
}


def places_of(row: str) -> list[ShardPlace]:
    if "hybrid" in row:
        return [ShardPlace(i, 2, o, 2) for i in range(2) for o in range(2)]
    return [ShardPlace(i, 3) for i in range(3)]


def values(module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def all_ranks(row, dtype=torch.float32, *, by_unit=True, frozen=(), meta=None, config=None, **more):
    """One buffer a rank, from the same module: [(buffer, module)], and the values."""
    made, before = [], {}
    for place in places_of(row):
        module = plain(dtype)
        for name, p in module.named_parameters():
            p.requires_grad_(name not in frozen)
        before = values(module)
        units = {name: f"layer {name[0]}" for name in before} if by_unit else None
        made.append(
            (buffer_of(module, config, meta, ROWS[row], place, units=units, **more), module)
        )  # fmt: skip
    return made, before


def gathered(made, name_of_field: str, cut: ShardOver, bucket: int) -> torch.Tensor:
    """The whole bucket from every rank's part, in the order of parts."""
    part_of = {b.place.index(cut): getattr(b.buckets[bucket], name_of_field) for b, _ in reversed(made)}
    return torch.cat([part_of[index] for index in sorted(part_of)])


def give_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    return tensor


@pytest.mark.parametrize("by_unit", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", ROWS)
def test_what_all_ranks_hold_makes_up_the_model(row, dtype, by_unit):
    made, before = all_ranks(row, dtype, by_unit=by_unit, frozen=("0.bias",))
    for index, (buffer, module) in enumerate(made):
        sharding = buffer.sharding
        for name, value in before.items():
            start, end = buffer.part(name, sharding.weights)
            assert torch.equal(buffer.weight_part(name), value.view(-1)[start:end])
        for name in buffer.names:
            start, end = buffer.part(name, sharding.optimizer)
            assert buffer.main_weight_part(name).dtype == torch.float32
            assert torch.equal(buffer.main_weight_part(name), value_part(before[name], start, end))
            assert buffer.main_grad_part(name).numel() == end - start
            low, high = buffer.part(name, ShardOver.FULL)
            assert torch.equal(
                buffer.main_weight_part(name, ShardOver.FULL), value_part(before[name], low, high)
            )
            assert buffer.main_grad_part(name, ShardOver.FULL).numel() == high - low
        for number, memory in enumerate(buffer.buckets):
            check_bucket(buffer, memory)
            whole = gathered(made, "weights_at_rest", sharding.weights, number)
            if sharding.weights is not ShardOver.NONE:
                assert memory.full_weights.untyped_storage().nbytes() == 0
                give_memory(memory.full_weights).copy_(whole)
        for name, p in module.named_parameters():  # views of what was gathered
            assert torch.equal(p, before[name]), (name, index)
            assert torch.equal(buffer.weight(name), before[name])
            assert p.data_ptr() == buffer.weight(name).data_ptr()
        assert module(torch.ones(2, 7, dtype=dtype)).shape == (2, 3)


def value_part(value: torch.Tensor, start: int, end: int) -> torch.Tensor:
    return value.float().view(-1)[start:end]


def check_bucket(buffer: FlatBuffer, memory: BucketMemory) -> None:
    """Sizes, and which tensors are the same memory."""
    place, sharding, numel = buffer.place, buffer.sharding, memory.bucket.numel
    assert memory.weights.numel() == numel // place.ways(sharding.weights)
    assert memory.full_weights.numel() == numel
    assert (memory.full_weights is memory.weights) == (sharding.weights is ShardOver.NONE)
    if not memory.trained:
        assert (memory.main_weights, memory.main_grads, memory.full_grads) == (None, None, None)
        assert (memory.optimizer_grads, memory.optimizer_weights) == (None, None)
        return
    part = numel // place.ways(sharding.optimizer)
    assert memory.main_weights.numel() == memory.optimizer_grads.numel() == part
    assert memory.main_grads.numel() == numel // place.ways(sharding.main_grads)
    assert memory.full_grads.numel() == numel
    assert (memory.full_grads is memory.main_grads) == (sharding.main_grads is ShardOver.NONE)
    own = memory.weights.dtype != torch.float32
    assert (memory.main_weights.data_ptr() == memory.optimizer_weights.data_ptr()) != own
    for narrow, wide in (("optimizer_grads", "main_grads"), ("optimizer_weights", "weights")):
        inside, outside = getattr(memory, narrow), getattr(memory, wide)
        cut = getattr(sharding, wide)
        first = buffer.arenas[memory.arena].layout.shard(memory.bucket.index, place, sharding.optimizer)[0]
        shift = first - buffer.arenas[memory.arena].layout.shard(memory.bucket.index, place, cut)[0]
        assert inside.storage_offset() == outside.storage_offset() + shift
        assert inside.untyped_storage()._cdata == outside.untyped_storage()._cdata


@pytest.mark.parametrize("row", ROWS)
def test_gradients_of_a_bucket_reach_the_parts_of_its_parameters(row):
    """Numbers written through `main_grad`, reduced by hand, are found in `main_grad_part`."""
    made, before = all_ranks(row)
    expected = {name: torch.randn(value.shape) for name, value in before.items()}
    for buffer, _ in made:
        cut = buffer.sharding.main_grads is not ShardOver.NONE
        for memory in buffer.buckets:
            if cut:
                assert memory.full_grads.untyped_storage().nbytes() == 0
                give_memory(memory.full_grads).fill_(float("nan"))  # padding is anything
            for name in memory.bucket.names:
                buffer.main_grad(name).copy_(expected[name])
            if cut:
                layout = buffer.arenas[memory.arena].layout
                start, end = layout.shard(memory.bucket.index, buffer.place, buffer.sharding.main_grads)
                first = memory.bucket.start
                memory.main_grads.copy_(memory.full_grads[start - first : end - first])
                memory.full_grads.untyped_storage().resize_(0)
        for name in buffer.names:
            start, end = buffer.part(name, buffer.sharding.optimizer)
            assert torch.equal(buffer.main_grad_part(name), expected[name].view(-1)[start:end])


@pytest.mark.parametrize("row", ROWS)
def test_main_weights_reach_the_weights_at_rest(row):
    made, before = all_ranks(row, torch.bfloat16)
    for buffer, _ in made:
        for name in buffer.names:
            buffer.main_weight_part(name).add_(0.5)
        buffer.copy_main_to_weights()
        for name in buffer.names:
            start, end = buffer.part(name, buffer.sharding.optimizer)
            first, _ = buffer.part(name, buffer.sharding.weights)
            if start == end:
                continue
            held = buffer.weight_part(name)[start - first : end - first]
            expected = (before[name].float() + 0.5).bfloat16().view(-1)
            assert torch.equal(held, expected[start:end])
        with buffer.resting_weights():
            for name in buffer.names:
                buffer.weight_part(name).fill_(2.0)
            buffer.copy_weights_to_main()
        for name in buffer.names:
            assert (buffer.main_weight_part(name) == 2.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", ROWS)
def test_persistent_bytes_are_those_of_the_table_to_the_padding(row, dtype):
    made, before = all_ranks(row, dtype)
    for buffer, _ in made:
        total = sum(arena.layout.numel for arena in buffer.arenas)
        padding = total - sum(value.numel() for value in before.values())
        most = sum(arena.layout.dp_size * len(arena.layout.buckets) for arena in buffer.arenas)
        assert 0 <= padding < ALIGNMENT * most
        ways = {
            what: buffer.place.ways(getattr(buffer.sharding, what))
            for what in ("weights", "main_grads", "optimizer")
        }
        rounded = dtype == torch.bfloat16 and 1 < ways["weights"] == ways["optimizer"]
        assert buffer.persistent_bytes() == {
            "weights": 0 if rounded else dtype.itemsize * total // ways["weights"],
            "main_weights": 0 if dtype == torch.float32 else 4 * total // ways["optimizer"],
            "main_grads": 4 * total // ways["main_grads"],
            "extra_grads": 0,
        }


def test_no_more_than_one_bucket_is_whole_while_it_is_built():
    """Transient storages have memory one after the other; what the caller brought is freed bucket by bucket."""
    made: list[torch.Tensor] = []
    most = 0

    def watched(role, name, numel, dtype, device):
        nonlocal most
        most = max(most, sum(tensor.untyped_storage().nbytes() > 0 for tensor in made))
        made.append(own_storage(role, name, numel, dtype, device))
        asked.append((role, name))
        return made[-1]

    asked: list[tuple[str, str]] = []
    ranks, _ = all_ranks("optim_grads_params", torch.bfloat16, new_full=watched)
    assert most == 0  # at the moment of the next request
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in made)
    units = ["layer 2", "layer 1", "layer 0"]
    assert asked == [(role, unit) for unit in units for role in ("weights", "grads")] * len(ranks)
    buffer, _ = ranks[0]
    assert [memory.name for memory in buffer.buckets] == units
    assert buffer.buckets_of_unit("layer 1") == (buffer.buckets[1],)


def test_lasting_slots_serve_as_full_tensors():
    """Several units in one storage that is never emptied: each is put to rest before the next is whole."""
    slots = {role: torch.zeros(4096) for role in ("weights", "grads")}
    made, before = all_ranks(
        "optim_grads_params", new_full=lambda role, name, numel, dtype, device: slots[role][:numel]
    )
    for buffer, module in made:
        for index, memory in enumerate(buffer.buckets):
            memory.full_weights.copy_(gathered(made, "weights", ShardOver.INNER, index))
            for name in memory.bucket.names:
                assert torch.equal(module.get_parameter(name), before[name])
    assert slots["weights"].untyped_storage().nbytes() == 4 * 4096


def test_gathering_is_no_modification_to_autograd():
    """A parameter saved for backward, freed and filled again between forward and backward."""
    for on_meta in (False, True):
        module = nn.Linear(4, 3)
        before = values(module)
        buffer = buffer_of(module.to("meta") if on_meta else module, sharding=ROWS["optim_grads_params"])
        (memory,) = buffer.buckets
        for name, value in before.items():
            give_memory(memory.full_weights)
            buffer.weight(name).copy_(value)
        out = module(torch.ones(2, 4, requires_grad=True))
        kept = memory.full_weights.clone()
        memory.full_weights.untyped_storage().resize_(0)
        give_memory(memory.full_weights)
        memory.full_weights.copy_(kept)  # an in-place write that bumps the tensor's own version
        out.sum().backward()
        assert torch.equal(module.bias.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("row", ROWS)
def test_meta_parameters_are_written_into_the_shards(row):
    module = plain(torch.bfloat16)
    module[2].bias.requires_grad_(False)
    before = values(module)
    for place in places_of(row):
        with torch.device("meta"):
            empty = plain(torch.bfloat16)
            empty[2].bias.requires_grad_(False)
        objects = {name: id(p) for name, p in empty.named_parameters()}
        buffer = buffer_of(empty, None, None, ROWS[row], place, units=dict.fromkeys(before, "all"))
        for name, value in before.items():
            buffer.write_weight(name, value)
        with pytest.raises(
            AssertionError, match=r"0.bias: a value of shape \(3,\), the parameter has \(5,\)"
        ):
            buffer.write_weight("0.bias", torch.zeros(3))
        for name, value in before.items():
            start, end = buffer.part(name, buffer.sharding.weights)
            assert torch.equal(buffer.weight_part(name), value.view(-1)[start:end])
            if name in buffer.names:
                start, end = buffer.part(name, buffer.sharding.optimizer)
                assert torch.equal(buffer.main_weight_part(name), value_part(value, start, end))
        assert {name: id(p) for name, p in empty.named_parameters()} == objects


@pytest.mark.parametrize("row", ["optim", "optim_grads", "optim_grads_params", "fully_hybrid"])
def test_accumulators_of_further_uses(row):
    meta = {"weight": ParamMeta("weight", (40, 20), uses=("weight", "weight" + LOOKUP))}
    for place in places_of(row):
        buffer = buffer_of(nn.Embedding(40, 20), None, meta, ROWS[row], place)
        cut = buffer.sharding.main_grads is not ShardOver.NONE
        extra = buffer.extra_grads["weight" + LOOKUP]
        assert buffer.persistent_bytes()["extra_grads"] == (0 if cut else 4 * 800)
        if cut:
            assert extra.untyped_storage().nbytes() == 0
            give_memory(extra)
            give_memory(buffer.buckets[0].full_grads)
        buffer.main_grad("weight").fill_(1.0)
        buffer.main_grad("weight" + LOOKUP).fill_(2.0)
        assert buffer.main_grad("weight").unique().tolist() == [1.0]
        assert extra.unique().tolist() == [2.0]


def test_wire_dtype_is_that_of_full_gradients_where_they_are_cut():
    config = DistributedDataParallelConfig(megatron_fsdp_grad_comm_dtype="bf16")
    for row, expected in (("optim", torch.float32), ("optim_grads", torch.bfloat16)):
        made, _ = all_ranks(row, torch.bfloat16, config=config)
        for buffer, _ in made:
            for memory in buffer.buckets:
                assert memory.main_grads.dtype == memory.optimizer_grads.dtype == torch.float32
                assert memory.full_grads.dtype == expected


def test_whole_gradients_are_one_allocation_a_dtype_and_cut_ones_one_a_bucket():
    module = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4), nn.Linear(4, 4).double())
    whole = buffer_of(module, None, None, ROWS["optim"])
    assert [flat.dtype for flat in whole.grads_at_rest()] == [torch.float64, torch.float32]
    for flat in whole.grads_at_rest():
        grads = [memory.main_grads for memory in whole.buckets if memory.main_grads.dtype == flat.dtype]
        assert flat.numel() == sum(grad.numel() for grad in grads)
        assert {grad.untyped_storage().data_ptr() for grad in grads} == {flat.untyped_storage().data_ptr()}
        assert len({grad.data_ptr() for grad in grads}) == len(grads)
    cut = buffer_of(module, None, None, ROWS["optim_grads_params"])
    for flat, memory in zip(cut.grads_at_rest(), cut.buckets, strict=True):
        assert flat is memory.main_grads
        assert flat.untyped_storage().nbytes() == flat.numel() * flat.element_size()


def test_parameters_that_are_not_split_between_ranks():
    made, before = all_ranks("optim_grads_params", torch.bfloat16, placement="tensor_atomic")
    for name, value in before.items():
        parts = [buffer.part(name, ShardOver.INNER) for buffer, _ in made]
        assert sorted(end - start for start, end in parts) == [0, 0, value.numel()]
        held = torch.cat([buffer.main_weight_part(name) for buffer, _ in made])
        assert torch.equal(held, value.float().view(-1))


def test_fewer_elements_than_ranks():
    parts = []
    for rank in range(5):
        module = nn.Linear(1, 1)
        nn.init.constant_(module.weight, 3.0)
        nn.init.constant_(module.bias, 4.0)
        place = ShardPlace(rank, 5)
        buffer = buffer_of(module, None, None, ROWS["optim_grads_params"], place)
        assert buffer.weight_part("weight").numel() == (rank == 0)
        parts.append(torch.cat([buffer.main_weight_part(name) for name in ("weight", "bias")]))
    assert torch.cat(parts).tolist() == [3.0, 4.0]


def test_whole_main_weights_only_where_the_optimizer_is_whole():
    made, _ = all_ranks("optim")
    with pytest.raises(AssertionError, match=r"main weight of 0.weight: this rank holds a part only"):
        made[0][0].main_weight("0.weight")
    alone = buffer_of(plain(), None, None, ROWS["optim_grads_params"], ShardPlace())
    assert alone.main_weight("0.weight").shape == (5, 7)


def test_every_parameter_has_a_unit():
    with pytest.raises(AssertionError, match=r"parameters without a unit: \['bias'\]"):
        buffer_of(nn.Linear(2, 2), units={"weight": "all"})
