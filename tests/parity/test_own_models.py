"""A model of a user's own is described by running its provider and forward step, and held to that to the byte."""

import pytest
import torch
from torch import nn

import pretrain_gpt
from megatron.core.device import Device
from megatron.core.models.gpt.gpt import GPTModel
from megatron.training.global_vars import get_args, get_config, get_parallel_state
from megatron.training.run.build import build_gpt_model, fake_state
from megatron.training.run.rehearse.comparison import account_of, differences, parts_of
from megatron.training.run.rehearse.own_stages import own_stages
from megatron.training.run.rehearse.rehearsal import compared, rehearsed, steps_of, tell_of_peers
from tests.parity.test_rehearsal import PP, ZERO_3, config_of

SIZE, SAVED = 24, 1001


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.new_empty(SAVED))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Block(nn.Module):
    """Saves an odd tensor."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, 48), nn.GELU(), nn.Linear(48, SIZE))

    def forward(self, x):
        return x + self.inner(Saves.apply(x))


class Net(nn.Module):
    """Of plain modules, as a stage of a pipeline."""

    def __init__(self, stage, pre_process, post_process):
        super().__init__()
        self.given = None
        self.embedding = nn.Embedding(386, SIZE) if pre_process else None
        self.layers = nn.ModuleDict({f"{stage}_{number}": Block() for number in range(2)})
        self.output = nn.Linear(SIZE, 386) if post_process else None

    def set_input_tensor(self, tensor):
        self.given = tensor

    def forward(self, tokens):
        x = self.given if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.output is None else self.output(x)


def net_provider(pre_process=True, post_process=True):
    assert get_args().rank == get_parallel_state().rank
    return Net(get_parallel_state().pp_rank, pre_process, post_process)


def net_step(data_iterator, model):
    batch = next(data_iterator)
    out = model(batch["tokens"] if model.embedding is not None else None)

    def loss_func(out):
        loss = nn.functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())
        return loss, {"lm loss": loss.detach()}

    return out, loss_func


class OwnGPT(GPTModel):
    """Of ours, and more."""


def own_gpt(pre_process=True, post_process=True, vp_stage=None):
    ends = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
    model = build_gpt_model(get_config(), get_parallel_state(), **ends)
    model.__class__ = OwnGPT
    return model


NETS, GPTS = (net_provider, net_step), (own_gpt, pretrain_gpt.forward_step)
MODELS = (
    (1, NETS, "--use-distributed-optimizer"),
    (4, NETS, f"{PP} {ZERO_3}"),
    (4, GPTS, f"{PP} {ZERO_3} --zero-bubble-v-schedule"),
)


@pytest.mark.parametrize(("ranks", "providers", "words"), MODELS)
def test_rehearsals_hold_what_was_seen(ranks, providers, words):
    config = config_of(words, ranks)
    together = rehearsed(config, *providers)
    assert not any(one.engine.is_described for one in together)
    assert compared(config, together, providers) == []


@pytest.mark.parametrize(("ranks", "providers", "words"), MODELS[1:])
def test_a_rank_that_is_there_holds_it_too(ranks, providers, words):
    config = config_of(words, ranks)
    ps = fake_state(config, 3, Device("cpu"))
    tell_of_peers(config, ps, *providers)
    mine = steps_of(config, ps, *providers)
    spec = mine.runner.spec
    pieces = own_stages(config, spec, *providers, rank=3)
    account = account_of(mine.plan, spec, ps.pp_rank, parts_of(config, spec, pieces, mine.engine.model))
    assert len(mine.seen) == len(account.row) + 1
    assert differences(account, mine.seen) == []


def test_what_a_block_saves_is_seen_and_random_numbers_are_left_alone():
    config = config_of("--micro-batch-size 1", 1)
    spec, before = config.planner().spec, torch.get_rng_state()

    def drawing(*args, **ends):
        torch.rand(3, device="cpu")
        return net_provider(*args, **ends)

    (piece,) = own_stages(config, spec, drawing, net_step).values()
    assert torch.equal(torch.get_rng_state(), before)
    assert piece.modules["layers.0_0"].kept_bytes >= 4 * SAVED
    assert piece.work("BW").products == 2 * piece.work("F").products
    with pytest.raises(RuntimeError, match="meta"):
        own_stages(
            config, spec, net_provider, lambda data, model: net_step(iter([values(next(data))]), model)
        )


def values(batch):
    assert int(batch["tokens"].max()) < 386
    return batch
