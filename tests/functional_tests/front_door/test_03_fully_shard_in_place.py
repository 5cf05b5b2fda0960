"""`fully_shard(model)` with the return value ignored trains; the model stays what it is; calls nest; its state goes
through torch.distributed.checkpoint to any number of ranks."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.sharded_module.fully_shard import fully_shard
from megatron.core.module import ModelError
from tests.harness.ranks import run_ranks, share_ranks
from tests.harness.sharded_training import (
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    Tied,
    adamw,
    assert_same_weights,
    seeded,
    token_loss,
    tokens,
    train_whole,
    vectors,
)


def net() -> nn.Module:
    return Net().double()


def steps(ctx, model: nn.Module, optimizer: torch.optim.Optimizer, which=range(2)) -> None:
    for step in which:
        optimizer.zero_grad()
        token_loss(model, 1000 * step + ctx.rank).backward()
        optimizer.step()


def config(strategy: str) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)


def in_torchs_way(make=net, seed: int = 0) -> nn.Module:
    """Return values ignored."""
    model = seeded(make, seed)
    for layer in model.blocks:
        fully_shard(layer)
    fully_shard(model)
    return model


# In place ----------------------------------------------------------------------------------------------


def torchs_idiom_trains_as_one_process(ctx) -> None:
    model = in_torchs_way()
    assert [unit.name for unit in model.engine.units] == [
        "embed", "blocks.0", "blocks.1", "blocks.2", "norm+head"
    ]  # fmt: skip
    steps(ctx, model, adamw(model.parameters()))
    assert_same_weights(model.full_state_dict(), train_whole(net, token_loss, ctx.world_size).weights)


def a_call_without_units_trains_too(ctx) -> None:
    for strategy in STRATEGIES:
        model = seeded(net)
        fully_shard(model, config=config(strategy))
        steps(ctx, model, adamw(model.parameters()))
        assert_same_weights(model.full_state_dict(), train_whole(net, token_loss, ctx.world_size).weights)


class Sizes:
    width = WIDTH


class Pretrained(Net):
    """As a Hugging Face model: a configuration, methods beside forward, names that are ours elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Sizes()
        self.engine = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("no_sync", torch.ones(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.engine(self.embed(batch)) * self.no_sync
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).to(next(self.parameters()).dtype))

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            prompt = torch.cat((prompt, self(prompt)[:, -1:].argmax(-1)), 1)
        return prompt

    def save_pretrained(self, path: str, state_dict: dict[str, torch.Tensor]) -> None:
        torch.save(state_dict, path)

    def clip_grad_norm_(self) -> str:
        return "the model's own"


def the_model_stays_what_it_is(ctx, folder) -> None:
    plain = seeded(Pretrained)
    model = copy.deepcopy(plain)
    names, children, marked = (
        [name for name, _ in model.named_parameters()],
        list(model.children()),
        model.config,
    )
    assert fully_shard(model, fsdp_unit_modules=[Block]) is model
    assert isinstance(model, Pretrained)
    assert type(model).__name__ == "FullyShardedPretrained"
    assert (model.config, model.config.width) == (marked, WIDTH)
    assert model.engine is children[-1], "the model's own names go first"
    assert model.no_sync.shape == ()
    assert model.clip_grad_norm_() == "the model's own"
    assert torch.equal(model.generate(tokens(0), 2), plain.generate(tokens(0), 2))
    found = dict(model.named_parameters())
    assert list(found) == names == [name for name in model.state_dict() if name in found]
    assert [p.shape for p in found.values()] == [p.shape for p in plain.parameters()]
    held = sum(p.to_local().numel() for p in found.values())
    assert held < 0.8 * sum(p.numel() for p in plain.parameters())
    assert model.head.weight is found["head.weight"], "an attribute outside of a forward is the shard as well"
    model.unshard()
    assert torch.equal(model.head.weight, plain.head.weight)
    model.reshard()
    path = folder / f"{ctx.rank}.pt"
    model.save_pretrained(path, state_dict=model.full_state_dict())
    plain.load_state_dict(torch.load(path))
    with pytest.raises(ModelError, match=r"cannot be copied or pickled.*load full_state_dict"):
        torch.save(model, path)
    with pytest.raises(ModelError, match="cannot be copied or pickled"):
        copy.deepcopy(model.blocks[0])
    with pytest.raises(
        ModelError, match=r"'embed.weight' is pickled .*checkpoint.save\(\).*full_state_dict\(\)"
    ):
        torch.save(model.state_dict(), path)
    with pytest.raises(ModelError, match=r"'new' is registered, tied or removed after fully_shard"):
        model.new = nn.Parameter(torch.ones(2))
    late = in_torchs_way()
    late.head = nn.Linear(WIDTH, 2)
    for _ in range(2):  # not in the first forward alone
        with pytest.raises(
            ModelError, match=r"'head.weight', 'head.bias'\] came with a module that was put in after"
        ):
            late(tokens(0))
    fewer = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    fully_shard(fewer[0][1])
    fully_shard(fewer[0])
    fewer[0][1] = nn.Identity()  # taken out between two calls
    assert fully_shard(fewer)(torch.ones(2, WIDTH)).shape == (2, WIDTH)


class Deep(nn.Module):
    """Three levels."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList(
            nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), Block()) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for group in self.groups:
            x = group(x * self.scale)
        return x


def calls_nest_in_any_depth(ctx) -> None:
    def deep() -> nn.Module:
        return Deep().double()

    def loss(model: nn.Module, sample: int) -> torch.Tensor:
        return model(vectors(sample, WIDTH)).square().mean()

    expected = train_whole(deep, loss, ctx.world_size)
    for levels in ("blocks", "blocks groups", "groups by class", "groups"):
        model = seeded(deep)
        for group in model.groups:
            for block in (group[0], group[2]) if "blocks" in levels else ():
                assert fully_shard(block) is block
            if "groups" in levels:
                fully_shard(group, fsdp_unit_modules=[Block] if "class" in levels else None)
        fully_shard(model)
        units = {unit.name for unit in model.engine.units}
        assert ({"groups.0.0", "groups.1.2"} <= units) is (levels != "groups"), units
        assert ("groups.1" in units) is ("groups" in levels), units
        optimizer = adamw(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            loss(model, 1000 * step + ctx.rank).backward()
            optimizer.step()
        assert_same_weights(model.full_state_dict(), expected.weights)
        inner = model.groups[0] if "groups" in levels else model.groups[0][0]
        with pytest.raises(ModelError, match=r"FullySharded\w+ is a unit of FullyShardedDeep"):
            inner.full_state_dict()


def layers_without_a_call_around_them_train_by_themselves(ctx) -> None:
    model = seeded(lambda: nn.Sequential(Block(), Block()).double())
    plain = seeded(lambda: nn.Sequential(Block(), Block()).double())
    for block in model:
        fully_shard(block)
    optimizer, whole = adamw(model.parameters()), adamw(plain.parameters())
    model(vectors(ctx.rank, WIDTH)).square().mean().backward()
    optimizer.step()
    sum(
        plain(vectors(rank, WIDTH)).square().mean() / ctx.world_size for rank in range(ctx.world_size)
    ).backward()
    whole.step()
    for index, block in enumerate(model):
        assert_same_weights(block.full_state_dict(), dict(plain[index].named_parameters()))


def what_the_calls_around_take_from_those_inside(ctx) -> None:
    """Strategy and ranks; other frozen, tied, 16-bit and meta parameters as with one call."""
    model = seeded(net)
    fully_shard(model.blocks[1], ctx.ps, config("optim_grads"))
    fully_shard(model)
    assert model.engine.config.data_parallel_sharding_strategy == "optim_grads"
    assert model.engine.ps is ctx.ps
    model = seeded(lambda: Tied().bfloat16())
    model.blocks[0].norm.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model.blocks[0])
    fully_shard(model, fsdp_unit_modules=[("embed", "head")])
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"blocks.0.norm.weight"}
    assert all(torch.equal(value, before[name]) for name, value in model.full_state_dict().items())
    with torch.device("meta"):
        model = Net()
    fully_shard(model.blocks[0])
    fully_shard(model)
    whole = seeded(Net).state_dict()
    model.load_state_dict(whole)  # whole weights: each rank takes its part
    assert all(torch.equal(value, whole[name]) for name, value in model.full_state_dict().items())


def refusals(ctx) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model.blocks[0])
    between = torch.optim.SGD(model.parameters(), lr=0.1)
    own = model.head.weight
    fully_shard(model)
    for built_before, name in ((optimizer, "AdamW"), (between, "SGD")):
        token_loss(model, 0).backward()
        with pytest.raises(
            ModelError,
            match=rf"{name} has parameters that fully_shard has cut, .*build the optimizer after the last fully_shard",
        ):
            built_before.step()
        model.zero_grad()
    with pytest.raises(ModelError, match=r"SGD has parameters that fully_shard has cut, \['head.weight'\]"):
        torch.optim.SGD([own], lr=0.1).step()
    with pytest.raises(ModelError, match=r"fully_shard\(FullyShardedNet\) for a second time"):
        fully_shard(model)
    with pytest.raises(ModelError, match=r"a module around it is sharded already.*inside out"):
        fully_shard(model.blocks[1])
    shared = Tied()
    fully_shard(shared.embed)
    with pytest.raises(
        ModelError, match=r"fully_shard\(Linear\): 'weight' is shared with .* leave out the calls"
    ):
        fully_shard(shared.head)
    fully_shard(shared)
    assert {"embed", "head"} <= set(shared.engine.units[0].name.split("+"))
    pair = nn.Sequential(Block(), Block())
    fully_shard(pair[0])
    pair[0](torch.ones(2, WIDTH))
    with pytest.raises(ModelError, match=r"'0' inside it has run since its own call"):
        fully_shard(pair)
    pair = nn.Sequential(Block(), Block())
    fully_shard(pair[1], config=config("optim"))
    with pytest.raises(ModelError, match=r"'1' inside it was given another data_parallel_sharding_strategy:"):
        fully_shard(pair, config=config("optim_grads"))


CHECKS = (
    torchs_idiom_trains_as_one_process,
    a_call_without_units_trains_too,
    calls_nest_in_any_depth,
    layers_without_a_call_around_them_train_by_themselves,
    what_the_calls_around_take_from_those_inside,
    refusals,
)


@pytest.mark.grid
def test_fully_shard_works_in_place_and_nests(tmp_path):
    checks = {check.__name__: check for check in CHECKS}
    checks["the_model_stays_what_it_is"] = functools.partial(the_model_stays_what_it_is, folder=tmp_path)
    share_ranks(2, checks)


@pytest.mark.grid
def test_torchs_idiom_on_four_ranks():
    run_ranks(torchs_idiom_trains_as_one_process, 4)


# torch.distributed.checkpoint --------------------------------------------------------------------------


def save(ctx, model, optimizer, folder) -> None:
    """As plain state dicts, and as torch's functions make them, which name moments after parameters."""
    dcp.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / "plain"
    )
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "named")


def load(ctx, folder, make) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = in_torchs_way(make, seed=5)
    optimizer = adamw(model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "named")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    again = in_torchs_way(make, seed=6)
    theirs = adamw(again.parameters())
    get_state_dict(again, theirs)  # makes moments
    state = {"model": again.state_dict(), "optimizer": theirs.state_dict()}
    dcp.load(state, checkpoint_id=folder / "plain")
    again.load_state_dict(state["model"])
    theirs.load_state_dict(state["optimizer"])
    for ours, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, other)
        kept = optimizer.state[ours]
        assert kept["exp_avg"].shape == kept["exp_avg_sq"].shape == ours.shape, "sharded likewise"
        assert all(torch.equal(value, theirs.state[other][name]) for name, value in kept.items())
    return model, optimizer


def train_and_save(ctx, folder, make) -> None:
    model = in_torchs_way(make)
    optimizer = adamw(model.parameters())
    steps(ctx, model, optimizer)
    save(ctx, model, optimizer, folder)


def load_and_save(ctx, source, target, make) -> None:
    model, optimizer = load(ctx, source, make)
    save(ctx, model, optimizer, target)


def go_on(ctx, folder, make) -> None:
    """On as many ranks as at first: the bits of a run that never stopped."""
    model, optimizer = load(ctx, folder, make)
    unbroken = in_torchs_way(make)
    theirs = adamw(unbroken.parameters())
    steps(ctx, unbroken, theirs)
    for one in ((model, optimizer), (unbroken, theirs)):
        steps(ctx, *one, range(2, 4))
    assert_same_weights(model.full_state_dict(), unbroken.full_state_dict(), 0.0)


def flat(state: dict, prefix: str = "") -> dict[str, object]:
    pairs = (
        flat(v, f"{prefix}{k}.") if isinstance(v, dict) else {f"{prefix}{k}": v} for k, v in state.items()
    )
    return {name: value for pair in pairs for name, value in pair.items()}


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.full), torch.bfloat16])
def test_two_to_one_to_two_ranks_is_bit_equal(tmp_path, dtype):
    make = functools.partial(_net_of, dtype)
    run_ranks(train_and_save, 2, tmp_path / "two", make)
    run_ranks(load_and_save, 1, tmp_path / "two", tmp_path / "one", make)
    run_ranks(load_and_save, 2, tmp_path / "one", tmp_path / "again", make)
    run_ranks(go_on, 2, tmp_path / "again", make)
    for way in ("plain", "named"):
        read = []
        for name in ("two", "one", "again"):  # torch's own reader
            dcp_to_torch_save(tmp_path / name / way, tmp_path / "whole.pt")
            read.append(flat(torch.load(tmp_path / "whole.pt")))
        assert read[0]["model.blocks.1.up.weight"].shape == (2 * WIDTH, WIDTH)
        for other in read[1:]:
            assert other.keys() == read[0].keys()
            for name, value in read[0].items():
                same = (
                    torch.equal(value, other[name])
                    if isinstance(value, torch.Tensor)
                    else value == other[name]
                )
                assert same, (way, name)


def _net_of(dtype: torch.dtype) -> nn.Module:
    return Net().to(dtype)


def other_ways_through_torchs_checkpoints(ctx, folder) -> None:
    """A plain model's checkpoint into every strategy, a sharded one's into a plain model, in the background."""
    plain = seeded(net, 3)
    dcp.save(plain.state_dict(), checkpoint_id=folder / "plain")
    for strategy in STRATEGIES:
        model = seeded(net)
        fully_shard(model, config=config(strategy), fsdp_unit_modules=[Block])
        dcp.load(model.state_dict(), checkpoint_id=folder / "plain")
        assert_same_weights(model.full_state_dict(), plain.state_dict(), 0.0)
        dcp.async_save(model.state_dict(), checkpoint_id=folder / strategy).result()
        state = seeded(net, 4).state_dict()
        dcp.load(state, checkpoint_id=folder / strategy)
        assert_same_weights(state, plain.state_dict(), 0.0)
    pieces = model.state_dict()
    with pytest.raises(
        RuntimeError, match=r"writing a whole tensor .* of 'embed.weight'.*full_state_dict\(\)"
    ):
        seeded(net).load_state_dict(pieces)  # a part would be spread over the whole


def test_other_ways(tmp_path):
    checks = (other_ways_through_torchs_checkpoints,)
    share_ranks(2, {check.__name__: functools.partial(check, folder=tmp_path) for check in checks})
