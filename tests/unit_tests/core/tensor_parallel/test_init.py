"""Any rectangle of a parameter can be drawn alone, on the meta device or not, in any dtype."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.param_meta import InitKind, ParamMeta, Region
from megatron.core.tensor_parallel.random import ROW_BLOCK, fill, fill_rectangle
from tests.harness.tiny_models import VOCAB, tiny_config

ROWS, COLUMNS = 300, 5


def whole(rows=ROWS, dtype=torch.float32, seed=1, name="a.weight"):
    tensor = torch.empty(rows, COLUMNS, dtype=dtype)
    fill(tensor, ParamMeta(name, (rows, COLUMNS), init_std=0.5), seed)
    return tensor


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.data())
def test_any_rectangle_alone(data):
    r0 = data.draw(st.integers(0, ROWS))
    r1 = data.draw(st.integers(r0, ROWS))
    c0 = data.draw(st.integers(0, COLUMNS))
    c1 = data.draw(st.integers(c0, COLUMNS))
    part = torch.empty(r1 - r0, c1 - c0)
    fill_rectangle(part, ParamMeta("a.weight", (ROWS, COLUMNS), init_std=0.5), 1, row_start=r0, col_start=c0)
    assert torch.equal(part, whole()[r0:r1, c0:c1])


def test_seed_name_and_std():
    assert not torch.equal(whole(), whole(seed=2))
    assert not torch.equal(whole(), whole(name="b.weight"))
    assert whole().std().item() == pytest.approx(0.5, rel=0.05)
    assert not torch.equal(whole()[:ROW_BLOCK], whole()[ROW_BLOCK : 2 * ROW_BLOCK])


def test_longer_table_starts_the_same_and_dtypes_agree():
    assert torch.equal(whole(rows=260)[:200], whole(rows=200))
    assert torch.equal(whole(dtype=torch.float64), whole().double())
    assert torch.equal(whole(dtype=torch.bfloat16), whole().bfloat16())


def test_zeros_and_ones():
    tensor = torch.empty(4)
    fill(tensor, ParamMeta("n.weight", (4,), init=InitKind.ONES), 1)
    assert tensor.tolist() == [1.0] * 4
    fill(tensor, ParamMeta("n.bias", (4,), init=InitKind.ZEROS), 1)
    assert tensor.tolist() == [0.0] * 4


def test_outside_the_parameter_is_refused():
    with pytest.raises(AssertionError, match="rows 299"):
        fill_rectangle(torch.empty(2, COLUMNS), ParamMeta("a.weight", (ROWS, COLUMNS)), 1, row_start=299)


def test_a_part_of_several_regions():
    """Two bands of rows, as the gate and up rows of a gated MLP."""
    regions = (Region((0, 0), (140, 0), (20, COLUMNS)), Region((20, 0), (290, 0), (10, COLUMNS)))
    part = torch.empty(30, COLUMNS)
    fill(part, ParamMeta("a.weight", (ROWS, COLUMNS), init_std=0.5, regions=regions), 1)
    assert torch.equal(part, torch.cat((whole()[140:160], whole()[290:300])))
    columns = (Region((0, 0), (0, 3), (ROWS, 2)),)
    part = torch.empty(ROWS, 2)
    fill(part, ParamMeta("a.weight", (ROWS, COLUMNS), init_std=0.5, regions=columns), 1)
    assert torch.equal(part, whole()[:, 3:])
    with pytest.raises(AssertionError, match=r"a.weight: \(2, 2\) != "):
        fill(torch.empty(2, 2), ParamMeta("a.weight", (ROWS, COLUMNS), regions=columns), 1)


def materialise(model, seed):
    """As an engine does with a model built on the meta device."""
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        fill(parameter, model.param_meta[name], seed)


def test_meta_model_materialised_later_is_the_same():
    config = tiny_config()
    direct = GPTModel(config, padded_vocab_size=VOCAB, seed=3)
    later = GPTModel(config, padded_vocab_size=VOCAB, seed=3, device="meta")
    assert all(p.is_meta for p in later.parameters())
    materialise(later, 3)
    for (name, a), (_, b) in zip(direct.named_parameters(), later.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_built_under_the_meta_device():
    with torch.device("meta"):
        model = GPTModel(tiny_config(position_embedding_type="rope"), padded_vocab_size=VOCAB, seed=3)
    materialise(model, 3)
    assert model(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, VOCAB)


def test_residual_outputs_start_smaller():
    model = GPTModel(tiny_config(num_layers=8), padded_vocab_size=VOCAB, seed=3)
    for name, meta in model.param_meta.items():
        if name.endswith((".linear_proj.weight", ".linear_fc2.weight")):
            assert meta.init_std == pytest.approx(0.02 / math.sqrt(16))
        elif meta.init is InitKind.NORMAL:
            assert meta.init_std == 0.02
