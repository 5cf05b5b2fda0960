"""Number 1: whatever a launch line's flags can be, the checkpoint that it writes passes its own schema and loads; those
written under `--rank-memory-limit` before this held load too."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config_base import bounds_of
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.optimizer.grad_scaler import SCALER_SCHEMA, build_grad_scaler
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.optimizer.optimizer_param_scheduler import SCHEDULER_SCHEMA, build_schedule
from megatron.core.schema import Place, check
from megatron.training.config.config import FIELDS, Config
from megatron.training.config.flag_table import flag_table
from megatron.training.config.saved_config import SCHEMAS
from megatron.training.config.values import check_bounds, convert_loaded, convert_words
from tests.harness import forgery, launch
from tests.harness.scripts import run_script

PLACE = Path("manifest.json")
# Words that a parser of a field's own reads, beside numbers or among texts that it refuses.
OWN_WORDS = {
    "zero_bubble_max_pending_backward": ("auto",),
    "rank_memory_limit": ("auto", "512M", "1g", "75G"),
    "pipeline_memory_limit": ("512M", "4G"),
    "embedding_multiplier": ("sqrt_hidden", "-1.5", "1e38"),
    "moe_layer_freq": ("2", "[0,1]", "([0]*3+[1]*58)"),
}
TEXTS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)


def one_word(name):
    """A word that the flag of a field takes."""
    field, kind = FIELDS[name][1], flag_table()[name].kind
    ways = (
        [st.sampled_from((*kind.choices, *OWN_WORDS.get(name, ())))]
        if kind.choices or name in OWN_WORDS
        else []
    )
    if kind.kind is str and not kind.choices:
        ways.append(TEXTS)
    elif kind.kind in (int, float):
        bounds = bounds_of(field)
        most = bounds.least if bounds.below else bounds.most
        ends = st.sampled_from([bounds.least, most])
        between = (
            st.integers(int(bounds.least), int(bounds.most))
            if kind.kind is int
            else st.floats(bounds.least, bounds.most, exclude_max=bounds.below)
        )
        ways.append((ends | between).map(lambda number: repr(kind.kind(number))))
    return st.one_of(ways)


def words_of(name):
    """The words after the flag of a field."""
    entry = flag_table()[name]
    if not entry.kind.many:
        return one_word(name).map(lambda word: [word])
    exactly = entry.info.nargs if isinstance(entry.info.nargs, int) else None
    return st.lists(one_word(name), min_size=exactly or 1, max_size=exactly or 3)


def goes_round(name, value):
    """Written into a manifest, read, checked, and taken again."""
    group = FIELDS[name][0]
    written = getattr(getattr(Config.from_flat({name: value}), group), name)
    saved = json.loads(json.dumps(written))
    check(SCHEMAS[name], saved, Place(PLACE, name, CheckpointError))
    assert getattr(getattr(Config.from_flat({name: saved}), group), name) == value
    if value is not None:
        assert convert_loaded(flag_table()[name], saved) == value


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(st.data())
def check_field(name, data):
    words = data.draw(words_of(name))
    try:
        value = convert_words(flag_table()[name], words)
    except ValueError:
        assert name in OWN_WORDS or FIELDS[name][1].default is None, (name, words)
        return  # 0 where a parser of its own wants more
    check_bounds(FIELDS[name][1], value)
    goes_round(name, value)


@pytest.mark.parametrize("group", sorted({group for group, _ in FIELDS.values()}))
def test_every_kind_of_value_of_every_flag_goes_round(group):
    for name, (of, field) in FIELDS.items():
        if of != group:
            continue
        goes_round(name, field.default)
        kind = flag_table()[name].kind
        if kind.kind is bool:
            goes_round(name, not field.default)
            continue
        for word in (*kind.choices, *OWN_WORDS.get(name, ())):
            goes_round(name, convert_words(flag_table()[name], [word]))
        check_field(name)


def test_words_and_numbers_of_one_flag_are_told_apart_from_others():
    for wrong in ("1G", "automatic", True, [1], 0.5):
        with pytest.raises(CheckpointError, match="rank_memory_limit"):
            check(SCHEMAS["rank_memory_limit"], wrong, Place(PLACE, "rank_memory_limit", CheckpointError))


def test_what_follows_from_the_largest_flags_passes_too():
    """The schedule's lengths are products, the loss scale is a flag's."""
    most = bounds_of(FIELDS["train_iters"][1]).most
    for style in ("cosine", "WSD"):
        flags = OptimizerConfig(
            lr=bounds_of(FIELDS["lr"][1]).most,
            lr_decay_style=style,
            lr_decay_iters=most,
            lr_warmup_iters=most // 4,
            lr_wsd_decay_iters=most // 2,
            weight_decay_incr_style="linear",
            start_weight_decay=0.0,
            end_weight_decay=bounds_of(FIELDS["end_weight_decay"][1]).most,
        )
        largest = bounds_of(FIELDS["global_batch_size"][1]).most
        schedule = build_schedule(flags, train_iters=most, train_samples=None, global_batch_size=largest)
        state = {"samples": 0, "schedule": json.loads(json.dumps(dataclasses.asdict(schedule)))}
        check(SCHEDULER_SCHEMA, state, Place(PLACE, "scheduler", CheckpointError))
    for scale in (1e-40, bounds_of(FIELDS["loss_scale"][1]).most):
        state = build_grad_scaler(OptimizerConfig(fp16=True, loss_scale=scale)).state()
        check(SCALER_SCHEMA, json.loads(json.dumps(state)), Place(PLACE, "scaler", CheckpointError))


# The layout of `make quickstart`, small.
QUICKSTART = [
    *launch.TINY,
    *(
        "--pipeline-model-parallel-size 2 --zero-bubble-v-schedule --enable-optimizer-post-validation "
        "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params --num-layers 4 "
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --micro-batch-size 1 --train-iters 4 "
        "--save ck --load ck --save-interval 2"
    ).split(),
]


@pytest.mark.grid
def test_the_quickstarts_layout_resumes_under_a_limit_and_generates(tmp_path):
    first = [*QUICKSTART, "--exit-interval", "2", "--rank-memory-limit", "256M"]
    launch.ok(launch.run_forked(first, ranks=4, cwd=tmp_path))
    manifest = json.loads((tmp_path / "ck" / "iter_0000002" / "manifest.json").read_text())
    assert manifest["common"]["config"]["rank_memory_limit"] == 256 << 20
    seen = run_script("tools/checkpoint.py", "inspect", "ck", "--verify", cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    sample = run_script(
        "tools/generate.py", "--load", "ck", "--prompt", "1 2", "--max-new-tokens", 2, cwd=tmp_path
    )
    assert sample.returncode == 0, sample.stderr
    resumed = launch.ok(
        launch.run_forked([*QUICKSTART, "--rank-memory-limit", "auto"], ranks=4, cwd=tmp_path)
    )
    assert list(resumed.losses()) == [3, 4]


def test_a_checkpoint_of_before_with_a_limit_goes_on_without(tmp_path):
    """What earlier versions wrote under the flag: the bytes, where the schema let the word `auto` pass only."""
    root = forgery.copy_of(forgery.SAVED_BEFORE, tmp_path / "ck")
    forgery.forge(
        root / "iter_0000002", lambda fields: fields["common"]["config"].update(rank_memory_limit=1 << 30)
    )
    loader = forgery.Loader(forgery.FLAGS)
    assert loader.load(root) == loader.load(forgery.SAVED_BEFORE)


def test_verify_judges_as_a_load_does(tmp_path):
    """It called a checkpoint good that no run could load."""
    root = forgery.copy_of(forgery.SAVED_BEFORE, tmp_path / "ck")
    assert run_script("tools/checkpoint.py", "inspect", root, "--verify").returncode == 0
    for section, name in (("config", "rank_memory_limit"), ("optimizer", "num_steps")):
        root = forgery.copy_of(forgery.SAVED_BEFORE, tmp_path / "ck")
        forgery.forge(
            root / "iter_0000002", lambda fields, s=section, n=name: fields["common"][s].update({n: "much"})
        )
        seen = run_script("tools/checkpoint.py", "inspect", root, "--verify")
        assert seen.returncode == 3
        assert f"common.{section}.{name}" in seen.stderr
