"""What of the GPT is gathered and reduced together: every parameter once, every read within its unit."""

import itertools

import pytest
import torch

from megatron.core.models.gpt.gpt import GPTModel
from tests.harness.tiny_models import VOCAB, tiny_batch, tiny_config


def build(*, pre, post, tied, layers=(0, 1), positions="learned_absolute", **arguments):
    config = tiny_config(
        untie_embeddings_and_output_weights=not tied, position_embedding_type=positions, num_layers=4
    )
    return GPTModel(
        config,
        padded_vocab_size=VOCAB,
        seed=3,
        pre_process=pre,
        post_process=post,
        layers=list(layers),
        **arguments,
    )


COMBINATIONS = list(
    itertools.product(
        (True, False), (True, False), (True, False), ((), (2,), (0, 1, 3)), ("learned_absolute", "rope")
    )
)


@pytest.mark.parametrize(("pre", "post", "tied", "layers", "positions"), COMBINATIONS)
def test_every_parameter_is_in_exactly_one_unit(pre, post, tied, layers, positions):
    model = build(pre=pre, post=post, tied=tied, layers=layers, positions=positions)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [name_of[id(p)] for unit in model.units() for module in unit.modules for p in module.parameters()]
    assert sorted(found) == sorted(model.param_meta)
    names = [unit.name for unit in model.units()]
    assert len(set(names)) == len(names)
    both = pre and post and tied
    first = ["embedding_and_head"] if both else ["embedding"] * pre
    last = ["head"] if post and not both else []
    assert names == [*first, *(f"decoder.layers.{n}" for n in layers), *last]


def test_only_lookup_tables_are_not_read_by_the_backward():
    for pre, post, tied in itertools.product((True, False), repeat=3):
        for unit in build(pre=pre, post=post, tied=tied).units():
            assert unit.backward_reads == (unit.name != "embedding")


@pytest.mark.parametrize(("pre", "post", "tied"), list(itertools.product((True, False), repeat=3)))
def test_weights_are_read_between_their_units_first_and_last_forward(pre, post, tied):
    """With every unit's weights poisoned but from its first module's forward to its last one's end, nothing changes."""
    model = build(pre=pre, post=post, tied=tied)
    tokens, labels, positions = tiny_batch()
    hidden = torch.linspace(-1.0, 1.0, tokens.numel() * 32).reshape(*tokens.t().shape, 32)

    def run():
        if not pre:
            model.set_input_tensor(hidden)
        with torch.no_grad():
            return model(tokens, positions, labels=labels if post else None).clone()

    expected = run()
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    hooks, ended = [], []
    for unit in model.units():
        own = [p for module in unit.modules for p in module.parameters()]
        names = [name for name, p in model.named_parameters() if any(p is other for other in own)]

        def restore(*_, names=tuple(names)):
            for name in names:
                model.get_parameter(name).data.copy_(kept[name])

        def poison(*_, names=tuple(names), unit=unit):
            ended.append(unit.name)
            for name in names:
                model.get_parameter(name).data.fill_(float("nan"))

        entered = unit.entered_by or unit.modules
        hooks.append(entered[0].register_forward_pre_hook(restore))
        hooks.append(entered[-1].register_forward_hook(poison))
        poison()
    ended.clear()
    assert torch.equal(run(), expected)
    assert sorted(ended) == sorted(unit.name for unit in model.units())
    for hook in hooks:
        hook.remove()


def test_units_of_a_model_without_memory_are_the_same():
    plain = [unit.name for unit in build(pre=True, post=True, tied=True).units()]
    meta = build(pre=True, post=True, tied=True, device="meta")
    assert [unit.name for unit in meta.units()] == plain


def test_an_empty_stage_has_no_units():
    assert build(pre=False, post=False, tied=True, layers=()).units() == ()
