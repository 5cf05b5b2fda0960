"""From words to a configuration: value shapes, files, user flags, refusals."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.saving import save
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.training.config.command_line import read_command_line
from megatron.training.config.config import FIELDS, Config
from megatron.training.run.arguments import ConfigurationError, launch_config, parse_config
from tests.harness.launch_lines import GPT3_175B, GPT_345M, LLAMA3_8B, MIXTRAL_8X7B, SMALL

ROOT = Path(__file__).resolve().parents[3]


def problems_of(*words, base=SMALL):
    with pytest.raises(ConfigurationError) as caught:
        parse_config([*base, *words])
    return caught.value.problems


def rules_of(*words, base=SMALL):
    return [problem.rule for problem in problems_of(*words, base=base)]


def test_the_smallest_line():
    config = parse_config(SMALL)
    assert (config.model.num_layers, config.model.ffn_hidden_size, config.model.kv_channels) == (2, 256, 16)
    assert config.training.global_batch_size == 2
    assert config.model.padded_vocab_size == 384  # 257 ids in steps of 128
    assert config.origin["num_layers"] == "flag"
    assert config.origin["ffn_hidden_size"] == "derived"
    assert config.origin["adam_eps"] == "default"


@pytest.mark.parametrize("text", ["1.0e-5", ".00001", "1e-5", "0.1E-4"])
def test_floats_in_any_notation(text):
    assert parse_config([*SMALL, "--lr", text]).optimizer.lr == pytest.approx(1e-5)


def test_negative_numbers_with_an_exponent_are_values():
    line = read_command_line(["--lr", "-1e-5", "--bf16"])
    assert [problem.message for problem in line.problems] == ["--lr -1e-05: must be at least 0"]
    assert line.values == {"bf16": True}


def test_value_shapes():
    line = read_command_line(
        "--data-path 0.3 a .7 b --recompute-modules core_attn --rampup-batch-size 16 16 300 --bf16 "
        "--split='99,1,0' "
        "--save-interval=5 --window-size (127,0) --moe-layer-freq ([0]*3+[1]*2) --cp-comm-type p2p a2a "
        "--pipeline-model-parallel-layout Et*2|(tt|)*5t|tmL --no-mmap-bin-files --disable-bias-linear".split()
    )
    assert not line.problems
    assert line.values == {
        "data_path": ("0.3", "a", ".7", "b"),
        "recompute_modules": ("core_attn",),
        "rampup_batch_size": (16, 16, 300),
        "bf16": True,
        "split": "'99,1,0'",
        "save_interval": 5,
        "pipeline_model_parallel_layout": "Et*2|(tt|)*5t|tmL",
        "mmap_bin_files": False,
        "add_bias_linear": False,
        "moe_layer_freq": "([0]*3+[1]*2)",
    }
    assert [(used.spelling, used.words) for used in line.used] == [
        ("--window-size", ("(127,0)",)),
        ("--cp-comm-type", ("p2p", "a2a")),
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--bf16 true", "--bf16 takes no value, got true"),
        ("--lr", "--lr expects one value, got none"),
        ("--lr 1 2", "--lr expects one value, got 1 2"),
        ("--lr fast", "--lr expects a number, got 'fast'"),
        ("--lr nan", "--lr expects a finite number"),
        ("--num-layers 2.5", "--num-layers expects an integer, got '2.5'"),
        ("--rampup-batch-size 16 16", "--rampup-batch-size expects 3 values, got 16 16"),
        ("--data-path", "--data-path expects at least one value"),
        ("--lr-decay-style cosin", "--lr-decay-style expects one of constant, linear, cosine"),
        ("--optimizer muon", "--optimizer muon is not supported (roadmap: more optimizers)"),
        ("--position-embedding-type yarn", "yarn is not supported"),
        ("--window-size 1,2,3", "is no pair of integers"),
        ("--moe-layer-freq [0]*9**9", "is no list expression"),
    ],
)
def test_values_of_the_wrong_shape(words, expected):
    told = [problem.message for problem in read_command_line(words.split()).problems]
    assert len(told) == 1
    assert expected in told[0]


def test_flags_are_never_abbreviated_and_unknown_ones_name_the_closest():
    problems = problems_of("--num-layer", "4", "--learning-rate", "1", "--bf61")
    assert [p.rule for p in problems] == ["unknown-flag"] * 3
    assert problems[0].fix.startswith("did you mean --num-layers")
    assert problems[2].fix.startswith("did you mean --bf16")


def test_all_problems_are_told_at_once():
    assert rules_of(
        "--bf16", "--fp16", "--save", "x", "--num-layer", "3", "--lr", "x", "--mtp-num-layers", "1"
    ) == [
        "unknown-flag",
        "value",
        "not-supported",
        "precision",
        "save-interval",
    ]


def test_the_last_of_repeated_flags_counts():
    assert parse_config([*SMALL, "--seed", "1", "--seed", "2"]).training.seed == 2


def test_a_yaml_file_lies_below_the_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "num_layers: 4\nmodel:\n  hidden_size: 128\n  add_bias_linear: false\noptimizer.lr: 1e-2\n"
        "adam-beta2: .95\nbf16: true\nuse_mcore_models: true\nrampup_batch_size: 2 2 10\n"
    )
    line = read_command_line(["--yaml-cfg", str(file), "--num-layers", "6", "--no-bf16"])
    assert not line.problems
    assert line.values == {
        "num_layers": 6,
        "hidden_size": 128,
        "add_bias_linear": False,
        "lr": 0.01,
        "adam_beta2": 0.95,
        "bf16": False,
        "rampup_batch_size": (2, 2, 10),
        "yaml_cfg": str(file),
    }
    assert line.origin["hidden_size"] == f"{file}:3"
    assert line.origin["num_layers"] == "flag"
    assert [used.entry.name for used in line.used] == ["use_mcore_models"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_layer: 3", "unknown setting num_layer"),
        ("bogus_key: 3", "unknown setting bogus_key"),
        ("data:\n  num_layers: 3", "has no setting num_layers in section data"),
        ("num_layers: 3\nnum_layers: 4", "a second time"),
        ("num_layers: {a: 1}", "no plain value"),
        ("num_layers: [1, 2]", "expects one value"),
        ("bf16: 1", "expects true or false"),
        ("- 1", "holds no mapping"),
        ("a: [1", "no valid YAML"),
        ("lr: !!python/object/apply:os.system ['true']", "no plain value"),
        ("lr: true", "expects float"),
    ],
)
def test_wrong_yaml_is_told_with_its_line(tmp_path, text, expected):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    told = [problem.message for problem in read_command_line(["--yaml-cfg", str(file)]).problems]
    assert len(told) == 1
    assert expected in told[0]
    assert str(file) in told[0]


def test_far_guesses_are_not_offered(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("bogus_key: 3\nnum_layer: 4\n")
    fixes = [problem.fix for problem in read_command_line(["--yaml-cfg", str(file)]).problems]
    assert fixes == ["see docs/flags.md for the names", "did you mean num_layers?"]
    with pytest.raises(ValueError, match=r"bogus_key$"):
        Config.from_flat({"bogus_key": 3})
    (problem,) = read_command_line(["--bogus-key", "3"]).problems
    assert problem.fix == "see docs/flags.md for every known flag"


def test_a_missing_yaml_file_is_a_problem():
    assert rules_of("--yaml-cfg", "no/such.yaml") == ["yaml"]


def test_the_printed_yaml_reads_back(tmp_path):
    config = parse_config([*SMALL, "--bf16", "--adam-eps", "1e-9", "--train-data-path", "x"][:-2])
    file = tmp_path / "resolved.yaml"
    file.write_text(config.to_yaml())
    again = parse_config(["--yaml-cfg", str(file)])
    changed = {"yaml_cfg"}
    assert {k: v for k, v in again.flat().items() if k not in changed} == {
        k: v for k, v in config.flat().items() if k not in changed
    }


def add_own_flags(parser):
    group = parser.add_argument_group(title="mine")
    group.add_argument("--my-factor", type=float, default=1.5, help="a factor of 50 %%")
    group.add_argument("--my-words", nargs="*", default=[])
    group.add_argument("--fim-rate", type=float, default=0.0)
    return parser


def test_user_flags_land_in_extra_and_win_over_flags_that_are_only_known(tmp_path):
    config = parse_config(
        [*SMALL, "--my-words", "a", "b", "--fim-rate", ".5"], extra_args_provider=add_own_flags
    )
    assert config.extra == {"my_factor": 1.5, "my_words": ["a", "b"], "fim_rate": 0.5}
    assert config.origin["my_words"] == "flag"
    file = tmp_path / "run.yaml"
    file.write_text("my_factor: 2.5\n")
    words = [*SMALL, "--yaml-cfg", str(file)]
    config = parse_config(words, extra_args_provider=add_own_flags)
    assert config.extra["my_factor"] == 2.5
    assert config.origin["my_factor"] == f"{file}:1"
    config = parse_config([*words, "--my-factor", "3"], extra_args_provider=add_own_flags)
    assert config.extra["my_factor"] == 3.0
    assert config.origin["my_factor"] == "flag"


def test_user_flags_that_clash_or_fail_are_told():
    def clashing(parser):
        parser.add_argument("--lr", type=float)

    with pytest.raises(ConfigurationError, match="--lr"):
        parse_config(SMALL, extra_args_provider=clashing)
    with pytest.raises(ConfigurationError, match="invalid float value"):
        parse_config([*SMALL, "--my-factor", "x"], extra_args_provider=add_own_flags)
    with pytest.raises(ConfigurationError, match="did you mean --my-factor"):
        parse_config([*SMALL, "--my-facto", "1"], extra_args_provider=add_own_flags)

    def with_a_positional(parser):
        parser.add_argument("count", type=int, nargs="?")
        return parser

    with pytest.raises(ConfigurationError, match="invalid int value"):
        parse_config(["many", *SMALL], extra_args_provider=with_a_positional)


def test_args_defaults_lie_below_everything():
    defaults = {"tokenizer_type": "GPT2BPETokenizer", "lr": 5.0, "num_workers": 0, "my_factor": 9.0}
    config = parse_config(SMALL, extra_args_provider=add_own_flags, args_defaults=defaults)
    assert (config.tokenizer.tokenizer_type, config.optimizer.lr) == ("ByteTokenizer", 1e-3)
    assert config.data.num_workers == 0
    assert config.origin["num_workers"] == "args_defaults"
    assert config.extra["my_factor"] == 9.0
    with pytest.raises(ConfigurationError, match="did you mean num_workers"):
        parse_config(SMALL, args_defaults={"num_worker": 0})


def test_flat_and_replace_and_from_flat_are_inverse():
    config = parse_config(SMALL)
    assert Config.from_flat(config.flat()).flat() == config.flat()
    assert set(config.flat()) == set(FIELDS)
    assert Config.from_flat(json.loads(json.dumps(config.flat()))).flat() == config.flat()
    changed = config.replace(padded_vocab_size=512)
    assert changed.model.padded_vocab_size == 512
    assert changed.origin["padded_vocab_size"] == "derived"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.num_layers = 3
    with pytest.raises(ValueError, match="did you mean num_layers"):
        Config.from_flat({"num_layer": 3})


def save_shape(root, iteration, **shape):
    words = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config = parse_config([*SMALL, *words, "--swiglu"]).flat()
    weight = LocalPiece("model.w", (2,), (0,), torch.zeros(2))
    save(root, iteration, [weight], {"config": config, "consumed_train_samples": 0}, {})


def test_use_checkpoint_args_takes_the_newest_shape(tmp_path):
    save_shape(tmp_path, 10, hidden_size=32)
    save_shape(tmp_path, 20, hidden_size=128)
    (tmp_path / "iter_0000030.tmp-1").mkdir()
    words = [*SMALL, "--load", str(tmp_path), "--use-checkpoint-args", "--lr", "2"]
    config = parse_config(words)
    assert (config.model.hidden_size, config.model.swiglu, config.optimizer.lr) == (128, True, 2.0)
    assert config.origin["hidden_size"] == "checkpoint"
    assert any("hidden_size is 128" in warning for warning in config.warnings)
    assert parse_config([*words, "--ckpt-step", "10"]).model.hidden_size == 32


def test_use_checkpoint_args_without_a_checkpoint_warns_and_refuses_a_damaged_one(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--load", str(tmp_path), "--use-checkpoint-args"]
    words += ["--save", str(tmp_path), "--save-interval", "1"]
    assert any("no checkpoint" in warning for warning in parse_config(words).warnings)
    save_shape(tmp_path, 10, hidden_size=32)
    manifest = tmp_path / "iter_0000010" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-10])
    with pytest.raises(SystemExit) as ended:
        launch_config(words)
    assert ended.value.code == 3
    assert "manifest.json" in capsys.readouterr().err
    assert json.loads((tmp_path / "exit.json").read_text())["status"] == 3


def test_launch_lines_of_megatron_that_this_can_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        Path(name).write_text("{}")
    config = parse_config(GPT_345M)
    assert config.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    assert config.optimizer.lr_warmup_fraction == 0.01
    assert config.parallel.distributed_backend == "gloo"
    assert any("nccl" in warning for warning in config.warnings)
    assert config.reliability.check_for_nan_in_loss_and_grad is False


def test_launch_lines_of_megatron_that_need_more_are_refused_with_all_reasons():
    def unsupported(line):
        return {p.flags[0] for p in problems_of(base=line) if p.rule == "not-supported"}

    assert {p.rule for p in problems_of(base=GPT3_175B)} == {"world-size", "files"}  # one process here
    assert unsupported(LLAMA3_8B) == {
        "--fp8-format",
        "--fp8-amax-history-len",
        "--fp8-amax-compute-algo",
        "--fp8-param-gather",
        "--context-parallel-size",
    }
    told = problems_of(base=LLAMA3_8B)
    assert all("docs/roadmap.md" in p.fix for p in told if p.rule == "not-supported")
    assert {p.rule for p in problems_of(base=MIXTRAL_8X7B)} == {"world-size", "files"}  # one process here


def test_help_lists_groups_units_defaults_and_states(capsys):
    with pytest.raises(SystemExit) as ended:
        launch_config(["--help"], extra_args_provider=add_own_flags)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "data parallel engine:" in text
    assert "mine:" in text
    assert "a factor of 50 %" in text
    assert "--seq-length N" in text
    assert "unit: tokens; required" in " ".join(text.split())
    assert "only fp32 supported so far, roadmap: more optimizers" in " ".join(text.split())
