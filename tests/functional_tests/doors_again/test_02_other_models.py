"""Number 2: weights go on only as the model that they are of. What decides their meaning is said at the field."""

import dataclasses
import json

import pytest

from megatron.core.config_base import arg_info
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from megatron.core.transformer.model_config import TransformerConfig
from megatron.training.config.config import FIELDS, Config
from megatron.training.config.saved_config import CHECKPOINT_FIELDS, WEIGHT_FIELDS, weight_differences
from megatron.training.run.arguments import launch_config
from tests.harness import launch

# Fields of the model's configurations that weights mean the same with, whatever their value.
MEANINGLESS = {
    "seq_length": "how much of the positions a run trains on",
    "group_query_attention": "num_query_groups says how many there are",
    "use_rotary_position_embeddings": "position_embedding_type says it",
    "make_vocab_size_divisible_by": "padded_vocab_size says what came of it",
    "moe_router_bias_update_rate": "of training alone: the biases themselves are saved",
    "moe_router_force_load_balancing": "of benchmarks alone",
    "moe_input_jitter_eps": "of training alone",
    "moe_router_load_balancing_type": "losses of training, which may change; of sinkhorn docs/moe.md tells",
    "moe_aux_loss_coeff": "of training alone",
    "moe_z_loss_coeff": "of training alone",
    "moe_expert_capacity_factor": "how many tokens find room, whatever the weights",
    "moe_token_drop_policy": "which tokens find room, whatever the weights",
    "moe_grouped_gemm": "the same mathematics",
    "moe_shared_expert_overlap": "the same mathematics",
    "moe_token_dispatcher_type": "the same mathematics",
    "keep_activation_output": "the same activations, kept or computed again",
    "moe_per_layer_logging": "of the record alone",
    "attention_dropout": "of training alone",
    "hidden_dropout": "of training alone",
    "init_method_std": "of the first step alone",
    "init_model_with_meta_device": "how memory is taken",
    "transformer_impl": "the same mathematics",
    "attention_backend": "the same mathematics",
    "use_flash_attn": "attention_backend says it",
    "attention_softmax_in_fp32": "rounding",
    "apply_query_key_layer_scaling": "rounding: what is scaled is scaled back",
    "fp32_residual_connection": "rounding",
    "calculate_per_token_loss": "of training alone",
    "recompute_granularity": "the same activations, computed again",
    "recompute_method": "the same activations, computed again",
    "recompute_num_layers": "the same activations, computed again",
    "recompute_modules": "the same activations, computed again",
    "recompute_activations": "the same activations, computed again",
    "moe_layer_recompute": "the same activations, computed again",
    "tokenizer_model": "where a file lies on this machine",
    "vocab_file": "where a file lies on this machine",
    "merge_file": "where a file lies on this machine",
}


def test_every_field_of_the_model_says_whether_weights_depend_on_it():
    fields = [f for cls in (TransformerConfig, TokenizerConfig) for f in dataclasses.fields(cls)]
    unmarked = {field.name for field in fields if not arg_info(field).weights}
    assert unmarked == MEANINGLESS.keys()
    assert set(WEIGHT_FIELDS) == {field.name for field in fields} - unmarked
    assert set(WEIGHT_FIELDS) <= set(CHECKPOINT_FIELDS) <= {field.name for field in fields}


def other_value(name):
    """One that is not the default's."""
    field = FIELDS[name][1]
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, tuple):
        return field.default[1:]
    if isinstance(field.default, str):
        return f"other than {field.default}"
    return 3 if field.default is None else field.default + 1


@pytest.mark.parametrize("name", WEIGHT_FIELDS)
def test_each_of_them_is_compared_where_it_has_an_effect(name):
    mark, here = arg_info(FIELDS[name][1]).weights, dict.fromkeys(WEIGHT_FIELDS)
    here |= Config.from_flat({"num_layers": 2, "hidden_size": 8, "position_embedding_type": "rope"}).flat()
    if mark is not True:
        here[mark[0]] = mark[1]
    saved = here | {name: other_value(name)}
    before, now = ([*v] if isinstance(v, tuple) else v for v in (saved[name], here[name]))
    told = f"{name}: checkpoint {before!r}, this run {now!r}"
    assert told in weight_differences(saved, here)
    assert weight_differences(here, here) == []
    assert weight_differences({k: v for k, v in here.items() if k != name}, here) == []
    if mark is not True:
        setting, value = mark
        idle = not value if isinstance(value, bool) else "another"
        assert weight_differences(saved | {setting: idle}, here | {setting: idle}) == []


def test_what_older_checkpoints_leave_unset_is_the_default():
    here = Config.from_flat({"tokenizer_type": "TikTokenizer"}).flat()
    assert weight_differences(here | {"tiktoken_pattern": None, "tiktoken_special_tokens": None}, here) == []
    (told,) = weight_differences(here | {"tiktoken_pattern": None}, here | {"tiktoken_pattern": "v2"})
    assert told == "tiktoken_pattern: checkpoint 'v1', this run 'v2'"


ROPE = [
    *launch.TINY,
    *"--position-embedding-type rope --train-iters 4 --save ck --load ck --save-interval 2".split(),
]


def problems_of(capfd, *words):
    """What --check-config says of a line, as (rule, message)."""
    with pytest.raises(SystemExit) as ended:
        launch_config([*words, "--check-config", "--json"])
    problems = json.loads(capfd.readouterr().out)["problems"]
    assert ended.value.code == (2 if problems else 0)
    return [(problem["rule"], problem["message"]) for problem in problems]


@pytest.mark.grid
def test_a_run_with_another_base_of_rotation_is_refused_and_finetune_says_so(tmp_path, monkeypatch, capfd):
    launch.ok(launch.run_forked([*ROPE, "--exit-interval", "2"], cwd=tmp_path))
    other = [*ROPE, "--rotary-base", "500000", "--norm-epsilon", "1e-6"]
    refused = launch.ended(launch.run_forked(other, cwd=tmp_path), 3)
    assert (
        "rotary_base: checkpoint 10000, this run 500000; norm_epsilon: checkpoint 1e-05, this run 1e-06"
        in (refused.output)
    )
    assert "--use-checkpoint-args" in refused.output
    assert "--finetune" in refused.output
    # --check-config judges each of these lines as a launch does.
    monkeypatch.chdir(tmp_path)
    ((rule, message),) = problems_of(capfd, *other)
    assert rule == "load"
    assert message.endswith(
        "iter_0000002: saved from another model: rotary_base: checkpoint 10000, this run 500000; "
        "norm_epsilon: checkpoint 1e-05, this run 1e-06"
    )
    assert message.partition("saved from")[2] in refused.output
    for line in (ROPE, [*other, "--finetune"], [*other, "--use-checkpoint-args"]):
        assert problems_of(capfd, *line) == []
    # What is missing is told once, and is no difference.
    missing = problems_of(capfd, "--load", "ck", "--rotary-base", "500000")
    (message,) = [message for rule, message in missing if rule == "load"]
    assert "rotary_base" not in message, "without rotary positions it decides nothing"
    assert "position_embedding_type: checkpoint 'rope'" in message
    assert "None" not in message
    tuned = launch.ok(launch.run_forked([*other, "--finetune", "--save", "tuned"], cwd=tmp_path))
    (line,) = [line for line in tuned.output.splitlines() if "rotary_base" in line]
    assert line.startswith(
        "WARNING: --finetune goes on from weights of another model: rotary_base: checkpoint 10000"
    )
    assert list(tuned.losses()) == [1, 2, 3, 4]
    taken = launch.ok(launch.run_forked([*other, "--use-checkpoint-args"], cwd=tmp_path))
    assert list(taken.losses()) == [3, 4]
    assert "rotary_base is 10000 as in the checkpoint, not 500000" in taken.output
