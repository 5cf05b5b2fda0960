"""Number 17: layers and region mappings at Megatron's paths, by its own arguments, over two ranks as in one process."""

import functools

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core import transformer as core_transformer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from tests.harness.ranks import share_ranks

WIDTH, INNER, VOCABULARY, SEQUENCE, BATCH, STEPS = 8, 16, 12, 6, 2, 3


def test_the_base_of_models_is_at_both_of_its_paths():
    assert core_transformer.MegatronModule is MegatronModule
    assert core_transformer.TransformerConfig is TransformerConfig


def groups(ctx):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ctx.world_size)
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def move(ctx, mapping, x, dy):
    """(what the mapping makes of x, the gradient of x)."""
    x = x.clone().requires_grad_()
    y = mapping(x)
    y.backward(dy)
    return y.detach(), x.grad


def region_mappings(ctx):
    """Each with its gradient, against the same by hand from what both ranks have."""
    groups(ctx)
    r, group = ctx.rank, parallel_state.get_tensor_model_parallel_group()
    x = [torch.arange(16.0).view(4, 4) + 100 * rank for rank in range(2)]
    both = x[0] + x[1]
    rows, columns = torch.cat(x), torch.cat(x, -1)

    def half(whole, dim):
        return whole.chunk(2, dim)[r]

    for mapping, made, dy, gradient in (
        (copy_to_tensor_model_parallel_region, x[r], x, both),
        (reduce_from_tensor_model_parallel_region, both, x, x[r]),
        (scatter_to_tensor_model_parallel_region, half(x[r], -1), [half(one, -1) for one in x], None),
        (gather_from_tensor_model_parallel_region, columns, [columns] * 2, x[r]),
        (scatter_to_sequence_parallel_region, half(x[r], 0), [half(one, 0) for one in x], None),
        (gather_from_sequence_parallel_region, rows, [rows] * 2, 2 * x[r]),
        (reduce_scatter_to_sequence_parallel_region, half(both, 0), [half(one, 0) for one in x], None),
        (all_gather_last_dim_from_tensor_parallel_region, columns, [columns] * 2, 2 * x[r]),
        (
            reduce_scatter_last_dim_to_tensor_parallel_region,
            half(both, -1),
            [half(one, -1) for one in x],
            None,
        ),
    ):
        for named in ({}, {"group": group}):
            y, found = move(ctx, functools.partial(mapping, **named), x[r], dy[r])
            assert torch.equal(y, made), mapping.__name__
            if gradient is not None:
                assert torch.equal(found, gradient), mapping.__name__
            else:  # gathered: of the same shape as what was cut
                assert found.shape == x[r].shape, mapping.__name__
                assert torch.equal(
                    found.chunk(2, -1 if "last" in mapping.__name__ or "tensor_m" in mapping.__name__ else 0)[
                        r
                    ],
                    dy[r],
                )
    whole = functools.partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=False)
    assert torch.equal(move(ctx, whole, x[r], rows)[1], x[r])
    with pytest.raises(ValueError, match=r"copy_to_tensor_model_parallel_region\(group\)"):
        copy_to_tensor_model_parallel_region(x[r], group=torch.distributed.group.WORLD)


class Model(MegatronModule):
    """Embedding, an MLP of a column and a row layer, and logits over the embedding's own matrix."""

    def __init__(self, config, sequence_parallel):
        super().__init__(config=config)
        init = functools.partial(torch.nn.init.normal_, std=0.1)
        self.words = VocabParallelEmbedding(
            VOCABULARY, WIDTH, init_method=init, reduce_scatter_embeddings=sequence_parallel, config=config
        )
        self.up = ColumnParallelLinear(
            WIDTH, INNER, config=config, init_method=init, bias=True, gather_output=False, skip_bias_add=True
        )
        self.down = RowParallelLinear(
            *(INNER, WIDTH),
            config=config,
            init_method=init,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        self.logits = ColumnParallelLinear(
            *(WIDTH, VOCABULARY),
            config=config,
            init_method=init,
            bias=False,
            gather_output=not sequence_parallel,
            skip_weight_param_allocation=True,
        )

    def forward(self, ids, labels):
        x = self.words(ids)
        inner, bias = self.up(x if self.words.reduce_scatter_embeddings else x.transpose(0, 1).contiguous())
        x, bias = self.down(torch.nn.functional.gelu(inner + bias))
        assert bias is None
        logits, _ = self.logits(x, weight=self.words.weight, runtime_gather_output=False)
        return tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels.transpose(0, 1)).mean()


def trained(ctx, sequence_parallel, folder):
    """Steps of Megatron's wrapper and optimizer over a model of these layers; then saved, zeroed, loaded."""
    groups(ctx)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=ctx.world_size,
    )
    assert isinstance(config, ModelParallelConfig)
    model = Model(config, sequence_parallel and ctx.world_size > 1)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, clip_grad=0.5), [wrapped])
    ids = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) * 5 % VOCABULARY
    told = []
    for _ in range(STEPS):
        wrapped.zero_grad_buffer()
        loss = wrapped(ids, ids.roll(1, -1))
        loss.backward()
        wrapped.finish_grad_sync()
        updated, norm, _ = optimizer.step()
        assert updated
        told.append([loss.item(), norm])
    dist_checkpointing.save(wrapped.sharded_state_dict(), folder)
    kept = {name: one.detach().clone() for name, one in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dist_checkpointing.load(wrapped.sharded_state_dict(), folder)
    assert all(torch.equal(one, kept[name]) for name, one in model.named_parameters())
    shapes = {name: meta.global_shape for name, meta in model.param_meta.items()}
    assert shapes["words.weight"] == (VOCABULARY, WIDTH)
    assert shapes["up.bias"] == (INNER,)
    return told


def number(weight):
    """An `init_method`: 0, 1, 2, ..."""
    return weight.copy_(torch.arange(weight.numel()).view_as(weight))


def flat(rows):
    return [number for row in rows for number in row]


def arguments(ctx):
    """What a rank holds of bands, and what is refused."""
    groups(ctx)
    config = ModelParallelConfig(tensor_model_parallel_size=ctx.world_size, params_dtype=torch.bfloat16)
    make = functools.partial(ColumnParallelLinear, 4, 8, config=config, init_method=torch.nn.init.normal_)
    numbered = functools.partial(ColumnParallelLinear, 4, 8, config=config, init_method=number)
    layer, whole = numbered(bias=False, stride=2), number(torch.empty(8, 4)).bfloat16()
    expected = torch.cat([whole[2 * ctx.rank :][:2], whole[4 + 2 * ctx.rank :][:2]])
    assert torch.equal(layer.weight, expected)
    assert layer.weight.tensor_model_parallel
    assert (layer.weight.partition_dim, layer.weight.partition_stride) == (0, 2)
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    assert make(bias=False, gather_output=True)(x)[0].shape == (3, 8)
    row = RowParallelLinear(
        *(4, 6),
        config=config,
        init_method=torch.nn.init.ones_,
        bias=True,
        input_is_parallel=False,
        skip_bias_add=True,
        tp_comm_buffer_name="proj",
    )
    y, bias = row(x)
    assert y[0, 0] == 4
    assert bias.shape == (6,)
    with pytest.raises(ValueError, match=r"ColumnParallelLinear\(is_expert\)"):
        make(is_expert=True)
    with pytest.raises(ValueError, match="does not divide over 2 ranks"):
        ColumnParallelLinear(4, 7, config=config, init_method=torch.nn.init.normal_)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [str(tmp_path_factory.mktemp("saved")) for _ in range(3)]


@pytest.fixture(scope="module")
def on_two_ranks(folders):
    return share_ranks(
        2,
        {
            "mappings": region_mappings,
            "arguments": arguments,
            "tp": functools.partial(trained, sequence_parallel=False, folder=folders[0]),
            "sp": functools.partial(trained, sequence_parallel=True, folder=folders[1]),
        },
    )


def test_region_mappings_and_their_gradients(on_two_ranks):
    assert on_two_ranks["mappings"] == [None, None]


def test_arguments_of_the_layers(on_two_ranks):
    assert on_two_ranks["arguments"] == [None, None]


def test_a_model_of_these_layers_trains_on_two_ranks_as_on_one(on_two_ranks, folders):
    alone = functools.partial(trained, sequence_parallel=True, folder=folders[2])
    (reference,) = share_ranks(1, {"alone": alone})["alone"]
    assert reference[-1][0] < reference[0][0]
    for way in ("tp", "sp"):
        for told in on_two_ranks[way]:
            assert flat(told) == pytest.approx(flat(reference), rel=1e-4)
