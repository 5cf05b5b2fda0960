"""Names, shapes and facts of parallel layers' parameters."""

import torch

from megatron.core.param_meta import LOOKUP, GradRoute
from megatron.core.tensor_parallel.parallel_layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.sink_module import LayerFactory
from megatron.core.weight_grad import WeightGradAccumulator
from tests.harness.tiny_models import tiny_batch, tiny_model


def factory():
    sink = WeightGradAccumulator()
    return sink, LayerFactory(sink, torch.float64, torch.device("cpu"), init_std=0.5)


def test_column_linear_meta():
    _, make = factory()
    layer = ColumnParallelLinear(6, 4, make.at("decoder.layers.3.x"), bias=True)
    weight, bias = layer.meta["decoder.layers.3.x.weight"], layer.meta["decoder.layers.3.x.bias"]
    assert weight.global_shape == (4, 6)
    assert weight.decay
    assert weight.init_std == 0.5
    assert not bias.decay
    assert weight.route is bias.route is GradRoute.SINK


def test_embedding_gradient_adds_repeated_ids():
    sink, make = factory()
    table = VocabParallelEmbedding(5, 3, make.at("words"))
    with torch.no_grad():
        table.weight.normal_()
    sink.bind_new({"words.weight": (5, 3)}, torch.float64, torch.device("cpu"))
    ids = torch.tensor([[1, 1], [4, 1]])
    out = table(ids)
    dy = torch.randn_like(out)
    out.backward(dy)
    expected = torch.zeros(5, 3, dtype=torch.float64)
    for i in range(2):
        for j in range(2):
            expected[ids[i, j]] += dy[i, j]
    torch.testing.assert_close(sink.main_grads["words.weight"], expected, rtol=0, atol=1e-14)


def test_tied_uses_have_separate_accumulators():
    model = tiny_model()
    name = "embedding.word_embeddings.weight"
    assert model.param_meta[name].grad_keys == (name, name + LOOKUP)
    tokens, labels, positions = tiny_batch()
    losses = model(tokens, positions, labels=labels)
    losses.sum().backward()
    lookup = model.context.grads.main_grads[name + LOOKUP]
    unused = [i for i in range(lookup.shape[0]) if i not in tokens]
    assert unused, "the batch uses every id"
    assert lookup[unused].abs().max() == 0
    assert model.context.grads.main_grads[name][unused].abs().max() > 0
