"""Layers over stages: by hand for every flag, by property for all of them together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.models.gpt.stage_layers import (
    StageLayersError,
    StageSpec,
    layer_map_lines,
    split_stages,
)
from megatron.core.parallelism_config import ModelParallelConfig
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement

SHORT = {
    "pp": "pipeline_model_parallel_size",
    "per_chunk": "num_layers_per_virtual_pipeline_stage",
    "chunks": "num_virtual_stages_per_pipeline_rank",
    "layout": "pipeline_model_parallel_layout",
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "embedding": "account_for_embedding_in_pipeline_split",
    "loss": "account_for_loss_in_pipeline_split",
    "pad": "allow_padding_num_layers",
}


def config_of(**flags):
    return ModelParallelConfig(**{SHORT[name]: value for name, value in flags.items()})


def counts(num_layers, **flags):
    return [len(spec.layers) for spec in split_stages(config_of(**flags), num_layers)]


BY_HAND = [
    (8, {}, [8]),
    (8, {"pp": 4}, [2, 2, 2, 2]),
    (8, {"pp": 2, "chunks": 2}, [2, 2, 2, 2]),
    (8, {"pp": 2, "chunks": 1}, [4, 4]),
    (8, {"pp": 2, "per_chunk": 1}, [1] * 8),
    (8, {"pp": 2, "per_chunk": 4}, [4, 4]),
    (8, {"per_chunk": 8}, [8]),
    # the ends of the first and the last rank
    (8, {"pp": 2, "first": 3}, [3, 5]),
    (11, {"pp": 4, "first": 2, "last": 3}, [2, 3, 3, 3]),
    (12, {"pp": 4, "chunks": 2, "first": 2, "last": 2}, [1, 2, 2, 1, 1, 2, 2, 1]),
    (5, {"pp": 2, "first": 2, "last": 3}, [2, 3]),
    (4, {"pp": 1, "first": 4}, [4]),
    # the embedding and the loss count
    (7, {"pp": 2, "embedding": True}, [3, 4]),
    (7, {"pp": 2, "loss": True}, [4, 3]),
    (14, {"pp": 4, "chunks": 2, "embedding": True, "loss": True}, [1, 2, 2, 2, 2, 2, 2, 1]),
    (14, {"pp": 4, "per_chunk": 2, "embedding": True, "loss": True}, [1, 2, 2, 2, 2, 2, 2, 1]),
    # ... also as the only layer of a stage
    (3, {"pp": 4, "loss": True}, [1, 1, 1, 0]),
    (3, {"pp": 4, "embedding": True}, [0, 1, 1, 1]),
    (2, {"pp": 4, "embedding": True, "loss": True}, [0, 1, 1, 0]),
    (6, {"pp": 4, "chunks": 2, "embedding": True, "loss": True}, [0, 1, 1, 1, 1, 1, 1, 0]),
    # padding then takes from stages that have a layer
    (2, {"pp": 4, "embedding": True, "pad": True}, [0, 1, 1, 0]),
    (1, {"pp": 4, "embedding": True, "loss": True, "pad": True}, [0, 0, 1, 0]),
    (5, {"pp": 4, "embedding": True, "loss": True, "pad": True}, [1, 2, 2, 0]),
    # padding: the last stage first, then 0, 1, 2, ...
    (8, {"pp": 4, "pad": True}, [2, 2, 2, 2]),
    (7, {"pp": 4, "pad": True}, [2, 2, 2, 1]),
    (6, {"pp": 4, "pad": True}, [1, 2, 2, 1]),
    (5, {"pp": 4, "pad": True}, [1, 1, 2, 1]),
    (5, {"pp": 8, "pad": True}, [0, 0, 1, 1, 1, 1, 1, 0]),
    (6, {"pp": 4, "per_chunk": 1, "pad": True}, [0, 1, 1, 1, 1, 1, 1, 0]),
    (13, {"pp": 2, "chunks": 4, "pad": True}, [1, 1, 2, 2, 2, 2, 2, 1]),
    # layouts
    (14, {"pp": 8, "layout": "Et*2|(tt|)*5t|tL"}, [2, 2, 2, 2, 2, 2, 1, 1]),
    (14, {"pp": 4, "layout": "Et*2|(tt|)*5t|tL"}, [2, 2, 2, 2, 2, 2, 1, 1]),
    (3, {"pp": 2, "layout": "E|t||ttL"}, [0, 1, 0, 2]),
    (4, {"pp": 4, "layout": "E|t*2|t*2|L"}, [0, 2, 2, 0]),
    (6, {"pp": 2, "layout": "'E,t | tt, t | t | t L'"}, [1, 3, 1, 1]),
]


@pytest.mark.parametrize(("num_layers", "flags", "expected"), BY_HAND)
def test_by_hand(num_layers, flags, expected):
    assert counts(num_layers, **flags) == expected


def test_layers_are_global_and_follow_the_stages():
    specs = split_stages(config_of(pp=2, chunks=2), 6 + 2)
    assert specs == (
        StageSpec((0, 1), embedding=True, loss=False),
        StageSpec((2, 3), embedding=False, loss=False),
        StageSpec((4, 5), embedding=False, loss=False),
        StageSpec((6, 7), embedding=False, loss=True),
    )


def layers_on_ranks(specs, ranks):
    """Layers of each rank, all its chunks together: stages go round the ranks."""
    return [sum(len(spec.layers) for spec in specs[rank::ranks]) for rank in range(ranks)]


def test_ranks_hold_the_layers_of_their_chunks():
    interleaved = config_of(pp=4, chunks=2, embedding=True, loss=True)
    assert layers_on_ranks(split_stages(interleaved, 14), 4) == [3, 4, 4, 3]
    layout = "Et*2|(tt|)*5t|tL"
    for num_stages, config, num_layers in (
        (4 * 2, interleaved, 14),
        (4 * 2, config_of(pp=4, layout=layout), 14),
        (8 * 1, config_of(pp=8, layout=layout), 14),
        (2 * 2, config_of(pp=2, per_chunk=2), 8),
    ):
        assert len(split_stages(config, num_layers)) == num_stages


REFUSED = [
    (7, {"pp": 4}, "--num-layers 7 is not divisible by --pipeline-model-parallel-size 4"),
    (3, {"pp": 8}, "--num-layers 3 is not divisible"),
    (8, {"pp": 4, "chunks": 3}, "4 pipeline ranks x 3 chunks"),
    (8, {"pp": 2, "per_chunk": 3}, "--num-layers-per-virtual-pipeline-stage 3"),
    (7, {"pp": 2, "per_chunk": 4}, "--num-layers-per-virtual-pipeline-stage 4"),
    (9, {"pp": 2, "per_chunk": 3, "pad": True}, "--num-layers-per-virtual-pipeline-stage 3"),
    (8, {"pp": 2, "per_chunk": 2, "chunks": 2}, "exclude each other"),
    (8, {"chunks": 2}, "--num-virtual-stages-per-pipeline-rank"),
    (3, {"layout": "Et|ttL"}, "--pipeline-model-parallel-size 1: interleaving"),
    (8, {"pp": 2, "first": 3, "per_chunk": 1}, "use --num-virtual-stages-per-pipeline-rank"),
    (8, {"pp": 2, "first": 3, "chunks": 2}, "--num-virtual-stages-per-pipeline-rank 2 does not divide"),
    (8, {"pp": 2, "first": 3, "loss": True}, "--account-for-loss-in-pipeline-split exclude each other"),
    (8, {"pp": 2, "last": 3, "pad": True}, "--allow-padding-num-layers exclude each other"),
    (8, {"pp": 4, "first": 3}, "leaves 5 layers for 3 pipeline ranks"),
    (8, {"pp": 2, "first": 3, "last": 3}, "leaves 2 layers for 0 pipeline ranks"),
    (8, {"pp": 2, "first": 9}, "--decoder-first-pipeline-num-layers 9 leaves -1"),
    (8, {"first": 4, "last": 4}, "one rank is both"),
    # an unasked-for empty stage
    (2, {"pp": 4, "first": 2}, "leaves stages 1, 2, 3 without layers"),
    (8, {"pp": 2, "first": 0}, "--decoder-first-pipeline-num-layers 0: must be at least 1"),
    # layouts
    (14, {"pp": 8, "layout": "Et*2|(tt|)*5t|tmL"}, "m (a block of multi-token prediction)"),
    (13, {"pp": 8, "layout": "Et*2|(tt|)*5t|tL"}, "holds 14 layers, --num-layers asks for 13"),
    (
        14,
        {"pp": 3, "layout": "Et*2|(tt|)*5t|tL"},
        "8 stages, no multiple of --pipeline-model-parallel-size 3",
    ),
    (3, {"pp": 2, "layout": "tE|ttL"}, "write E once, at the start"),
    (3, {"pp": 2, "layout": "Et|Ltt"}, "L once, at the end"),
    (3, {"pp": 2, "layout": "Et|EttL"}, "write E once"),
    (3, {"pp": 2, "layout": "ttt"}, "write E once"),
    (3, {"pp": 2, "layout": "|Et|ttL|"}, "write E once"),
    (3, {"pp": 2, "layout": ""}, "holds 0 layers"),
    (3, {"pp": 2, "layout": "E(tt|tL"}, "a bracket is not closed"),
    (3, {"pp": 2, "layout": "Et|xttL"}, "unexpected 'x'"),
    (3, {"pp": 2, "layout": "Et|ttL", "chunks": 1}, "exclude each other"),
    (3, {"pp": 2, "layout": "Et|ttL", "loss": True}, "exclude each other"),
    (3, {"pp": 2, "layout": "Et|ttL", "pad": True}, "exclude each other"),
    # slips of the fingers cost nothing
    (10**12, {}, "--num-layers 1000000000000"),
    (8, {"pp": 10**9, "pad": True}, "--pipeline-model-parallel-size 1000000000"),
    (8, {"pp": 2, "chunks": 10**9, "pad": True}, "--num-virtual-stages-per-pipeline-rank 1000000000"),
    (0, {"pp": 2, "pad": True}, "--num-layers 0"),
]


@pytest.mark.parametrize(("num_layers", "flags", "expected"), REFUSED)
def test_refusals_name_flags_and_a_fix(num_layers, flags, expected):
    with pytest.raises(StageLayersError) as caught:
        split_stages(config_of(**flags), num_layers)
    assert expected in str(caught.value)
    assert "--" in str(caught.value)


options = st.none() | st.integers(0, 9)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(
    num_layers=st.integers(1, 48),
    pp=st.integers(1, 8),
    chunks=st.none() | st.integers(1, 4),
    per_chunk=st.none() | st.integers(1, 4),
    first=options,
    last=options,
    embedding=st.booleans(),
    loss=st.booleans(),
    pad=st.booleans(),
    drop=st.sets(st.sampled_from(["chunks", "per_chunk", "ends", "counted", "pad"])),
)
def test_every_layer_once_in_order_or_an_error(num_layers, pp, drop, **flags):
    if "ends" in drop:
        flags |= {"first": None, "last": None}
    if "counted" in drop:
        flags |= {"embedding": False, "loss": False}
    flags |= {name: None for name in ("chunks", "per_chunk") if name in drop}
    flags["pad"] = flags["pad"] and "pad" not in drop
    config = config_of(pp=pp, **flags)
    try:
        specs = split_stages(config, num_layers)
    except StageLayersError:
        return
    assert [layer for spec in specs for layer in spec.layers] == list(range(num_layers))
    assert [spec.embedding for spec in specs] == [stage == 0 for stage in range(len(specs))]
    assert [spec.loss for spec in specs] == [stage == len(specs) - 1 for stage in range(len(specs))]
    assert len(specs) % pp == 0
    if flags["chunks"] is not None:
        assert len(specs) == pp * flags["chunks"]
    sizes = [len(spec.layers) for spec in specs]
    may_be_empty = {0: flags["embedding"], len(sizes) - 1: flags["loss"]}
    for stage, size in enumerate(sizes):
        assert size > 0 or flags["pad"] or may_be_empty[stage], sizes
    if flags["first"] is not None:
        assert layers_on_ranks(specs, pp)[0] == flags["first"]
    if flags["last"] is not None:
        assert layers_on_ranks(specs, pp)[-1] == flags["last"]
    if flags["first"] is None is flags["last"]:
        assert max(sizes) - min(sizes) <= 1 + flags["embedding"] + flags["loss"]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(num_layers=st.integers(1, 40), pp=st.integers(1, 9), chunks=st.integers(1, 3))
def test_padding_takes_from_the_last_then_from_the_first_on(num_layers, pp, chunks):
    """Where there are ranks to pad over, padding never fails, and is as the order of emptying says."""
    if pp == 1 and chunks > 1:
        return
    sizes, stages = counts(num_layers, pp=pp, chunks=chunks, pad=True), pp * chunks
    full = -(-num_layers // stages)
    missing = full * stages - num_layers
    emptied = [stages - 1, *range(stages)][:missing]
    assert sizes == [full - (stage in emptied) for stage in range(stages)]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=2, max_size=12).filter(sum),
    pp=st.integers(1, 6),
)
def test_any_layout_string_is_what_it_says(sizes, pp):
    layout = "E" + "|".join("t" * size for size in sizes) + "L"
    config = config_of(pp=pp, layout=layout)
    if len(sizes) % pp or pp == 1:
        with pytest.raises(StageLayersError):
            split_stages(config, sum(sizes))
    else:
        assert counts(sum(sizes), pp=pp, layout=layout) == sizes


def test_the_log_shows_the_map():
    def lines(num_layers, kind, **flags):
        specs, pp = split_stages(config_of(**flags), num_layers), flags.get("pp", 1)
        return layer_map_lines(specs, Placement(kind, pp, len(specs) // pp))

    assert lines(8, LINEAR) == [" > stages: 1 of 8 layers"]
    assert lines(8, LINEAR, pp=4) == [" > stages: 4 of 2 layers; embedding on stage 0, loss on stage 3"]
    assert lines(4, LOOPED, pp=2, chunks=2) == [
        " > stages: 4 of 1 layer, 2 on each of 2 pipeline ranks; embedding on stage 0, loss on stage 3"
    ]
    assert lines(3, LOOPED, pp=2, layout="E|t||ttL") == [
        " > stage 0 on pipeline rank 0: embedding, no layers",
        " > stage 1 on pipeline rank 1: layer 0",
        " > stage 2 on pipeline rank 0: no layers",
        " > stage 3 on pipeline rank 1: layers 1-2, loss",
    ]


def v_counts(num_layers, **flags):
    specs = split_stages(config_of(**flags), num_layers, chunks=2, kind=V_SHAPED)
    return [len(spec.layers) for spec in specs]


V_BY_HAND = [
    (8, {"pp": 4}, [1] * 8),
    (8, {"pp": 2, "chunks": 2}, [2, 2, 2, 2]),
    (8, {"pp": 2, "per_chunk": 2}, [2, 2, 2, 2]),
    # given layers are those of ranks, whose second chunks run backwards
    (12, {"pp": 4, "first": 2, "last": 4}, [1, 1.5, 1.5, 2, 2, 1.5, 1.5, 1]),
    (12, {"pp": 3, "first": 2, "last": 6}, [1, 2, 3, 3, 2, 1]),
    (6, {"pp": 2, "embedding": True, "loss": True}, [1, 2, 2, 1]),
    (2, {"pp": 2, "embedding": True, "loss": True}, [0, 1, 1, 0]),
    # padding: the last stage first, then 0, 1, ...; any number of layers
    (5, {"pp": 2, "pad": True}, [1, 1, 2, 1]),
    (3, {"pp": 2, "pad": True}, [1, 1, 1, 0]),
    (1, {"pp": 2, "pad": True}, [0, 0, 1, 0]),
    (1, {"pp": 4, "pad": True}, [0, 0, 0, 0, 0, 0, 1, 0]),
    (9, {"pp": 4, "pad": True}, [1, 1, 1, 1, 1, 1, 2, 1]),
    (3, {"pp": 2, "layout": "E|t|tt|L"}, [0, 1, 2, 0]),
]


@pytest.mark.parametrize(("num_layers", "flags", "expected"), V_BY_HAND)
def test_on_a_v(num_layers, flags, expected):
    if any(count % 1 for count in expected):
        with pytest.raises(StageLayersError, match="number of chunks a rank, 2, does not divide"):
            v_counts(num_layers, **flags)
        return
    assert v_counts(num_layers, **flags) == expected


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"chunks": 4}, "--num-virtual-stages-per-pipeline-rank 4: the pipeline's schedule has 2"),
        ({"per_chunk": 1}, "--num-layers-per-virtual-pipeline-stage 1 makes 8 stages"),
        ({"layout": "Etttt|ttttL"}, "--pipeline-model-parallel-layout makes 2 stages"),
    ],
)
def test_flags_of_other_chunks_than_the_schedules_are_refused(flags, told):
    with pytest.raises(StageLayersError, match=told):
        v_counts(8, pp=2, **flags)
