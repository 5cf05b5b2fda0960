"""Line 5: --check-config says first what one wants first, and a refusal what is wrong by cause."""

import json
import re
import typing
from pathlib import Path

import pytest
import yaml

from megatron.estimate.device_profiles import DEVICE_PROFILES
from megatron.training.config.problems import MAX_SHOWN, Problem, render_problems
from megatron.training.config.training_config import TrainingConfig
from megatron.training.guard.exit_status import ExitStatus, report_failure
from megatron.training.run import arguments
from megatron.training.run.arguments import ConfigurationError, launch_config, parse_config
from tests.harness.launch_lines import GPT3_175B, SMALL

# Of examples/deepseek for Megatron: what the model is made of; and more of experts that is not here.
DEEPSEEK_V2_LITE = (
    "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --kv-channels 16 "
    "--seq-length 4096 --max-position-embeddings 163840 --multi-latent-attention --kv-lora-rank 512 --v-head-dim 128 "
    "--qk-head-dim 128 --qk-layernorm --qk-pos-emb-head-dim 64 --q-lora-rank 1536 --num-experts 64 "
    "--moe-layer-freq [0]+[1]*26 --moe-ffn-hidden-size 1408 --moe-grouped-gemm --moe-router-score-function softmax "
    "--moe-router-topk 6 --moe-router-topk-scaling-factor 1.0 --moe-shared-expert-intermediate-size 2816 "
    "--moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --moe-token-drop-policy probs "
    "--moe-router-load-balancing-type seq_aux_loss --expert-model-parallel-size 4 --expert-tensor-parallel-size 2 "
    "--moe-use-upcycling --moe-upcycling-granularity 2 --moe-apply-probs-on-input --moe-latent-size 512 "
    "--moe-paged-stash --moe-paged-stash-page-size 64 --moe-paged-stash-buffer-size-factor-cuda 1.1 "
    "--moe-enable-routing-replay --moe-expert-rank-capacity-factor 1.5 --moe-mlp-glu-interleave-size 32 "
    "--moe-router-force-biased 0.5 --fp8-format hybrid "
    "--fp8-recipe blockwise --rotary-scaling-factor 40 --beta-fast 32 --mscale 0.707 --position-embedding-type rope "
    "--swiglu --normalization RMSNorm --disable-bias-linear --micro-batch-size 1 --global-batch-size 1024 "
    "--train-samples 268554688 --lr 4.2e-4 --min-lr 4.2e-5 --bf16 --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model deepseek-ai/DeepSeek-V2-Lite --mock-data --pipeline-model-parallel-size 4 --world-size 64"
).split()
# Of README.
TWO_SLIPS = (
    "--world-size 64 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --zero-bubble-v-schedule "
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 1024 --train-iters 100000 --lr 3e-4 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128000 --weigth-decay 0.1 --mtp-num-layers 1"
).split()
FIRST = "model parameters ranks sharding pipeline memory batch training compute optimizer data checkpoints".split()


@pytest.fixture
def launched(capsys, monkeypatch):
    """launched(words, columns of the terminal or 0 for a pipe): status, standard output, standard error."""

    def run(words, columns=80):
        monkeypatch.setattr(arguments, "on_terminal", lambda fd=1: columns > 0)
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            launch_config(words)
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


@pytest.fixture
def check(launched):
    return lambda words, columns=80: launched([*words, "--check-config"], columns)


def entries(page):
    """label -> text of the page's lines, those that go on joined."""
    lines = re.sub(r"\n {10,}", " ", page).splitlines()
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def test_twelve_lines_come_first(check):
    status, page, wrong = check([*GPT3_175B, "--world-size", "1024", "--vocab-size", "50257"])
    assert (status, wrong) == (0, "")
    told = entries(page)
    assert list(told)[:12] == FIRST
    assert told["parameters"] == "174,615,846,912; at most 1,463,270,400 in a rank's part of the model"
    assert told["ranks"] == "1,024 = tensor 8 x data 8 x pipeline 16"
    assert re.match(
        r"at most \S+ GiB a rank, in 0B\S+, .* \(by 32 of 192 microbatches\): .* a rank's part of",
        told["memory"],
    )
    rows = re.findall(r"\s+(\d+)\s+(\S+) GiB\s+(\S+) GiB\s+.* in\s+\d+B", page)
    assert [row[0] for row in rows] == [str(rank) for rank in range(16)]
    assert rows[0][1] == "21.8", "GiB: 16 bytes of each parameter"
    assert told["pipeline"].startswith("1f1b (forward, backward in turns), 16 ranks, 192 microbatches")
    assert told["batch"].startswith(
        "1,536 samples = 3,145,728 tokens a step: 8 replicas x 192 microbatches of 1"
    )
    assert told["training"] == "500,000 steps, 743,443,552 samples, 1,522,572,394,496 tokens"
    assert told["compute"] == "3.34 EFLOP a step, 3.26 PFLOP on each rank"
    assert told["checkpoints"] == "to /ckpt every 10,000 steps; from /ckpt"
    assert page.splitlines()[-5].startswith(" not found: ")
    assert "\n launch line  valid: no problems found; files are not found on this machine\n" in page
    assert "not found: --vocab-file vocab.json" in page, "nothing is dropped"
    assert page.splitlines()[-1].startswith(" --full shows all ")
    assert all(len(line) <= 80 for line in page.splitlines())


def test_the_smallest_line_of_one_rank(check):
    _, page, _ = check(SMALL, 140)
    told = entries(page)
    assert told["ranks"] == "1"
    assert told["pipeline"].startswith("1f1b (forward, backward in turns), 1 rank, ")
    assert "\n launch line  valid: no problems found\n --full shows" in page
    assert told["sharding"] == "no_shard: a rank holds all of its part of the model"
    assert told["checkpoints"] == "none"
    assert all(told[label] for label in FIRST)


@pytest.mark.parametrize(("device", "fits"), [("h200", True), ("a100-40gb", False)])
def test_a_device_by_name(check, device, fits):
    _, page, _ = check(
        [*GPT3_175B, "--world-size", "1024", "--vocab-size", "50257", "--device-profile", device], 200
    )
    told = entries(page)["memory"]
    assert (": fits " in told, " does not fit " in told) == (fits, not fits)
    assert f" GiB of {device}" in told


def test_devices_are_those_of_a_table(launched):
    status, _, wrong = launched([*SMALL, "--check-config", "--device-profile", "h100"])
    assert status == 2
    assert "expects one of cpu, a100-40gb, " in wrong
    assert "fix: did you mean h200?" in wrong
    status, _, wrong = launched([*SMALL, "--device-profile", "cpu"], 0)
    assert "--device-profile belongs to --check-config and --rehearse" in wrong
    choices = typing.get_args(typing.get_args(typing.get_type_hints(TrainingConfig)["device_profile"])[0])
    assert set(choices) == set(DEVICE_PROFILES)


@pytest.mark.parametrize(("columns", "checked"), [(80, True), (0, True), (80, False), (0, False)])
def test_problems_are_grouped_by_cause(launched, columns, checked):
    """The same of a plain launch and of --check-config, on a terminal and in a pipe."""
    status, page, wrong = launched([*DEEPSEEK_V2_LITE, *["--check-config"] * checked], columns)
    assert status == 2
    lines = wrong.splitlines()
    assert max(map(len, lines)) <= columns or not columns
    heading = re.fullmatch(r"configuration: (\d+) problems of (\d) causes", lines[0])
    assert int(heading[1]) > 20
    assert int(heading[2]) == wrong.count("     fix: ") == len(re.findall(r"^ +\d\. \[", wrong, re.MULTILINE))
    flat = re.sub(r"\s+", " ", wrong)
    assert "11 flags are not supported: --moe-use-upcycling, --moe-upcycling-granularity 2, " in flat
    assert "9 flags are not supported: --multi-latent-attention, --kv-lora-rank 512, " in flat
    assert "see docs/roadmap.md, 'multi-latent attention'" in flat
    with pytest.raises(ConfigurationError) as each:
        parse_config([word for word in DEEPSEEK_V2_LITE if word not in ("--world-size", "64")])
    for problem in each.value.problems:
        if problem.rule == "not-supported":
            assert problem.flags[0] in flat, "nothing is dropped"
    if checked and columns:
        assert list(entries(page))[:12] == FIRST
        assert f" launch line  not valid: {heading[1]} problems, told below\n" in page


@pytest.mark.parametrize(
    ("typed", "meant", "follows"),
    [
        ("--train-iter", "--train-iters", "the length of the run is not given"),
        ("--learning-rate", "--lr", None),
        ("-micro-batch-size", "--micro-batch-size", None),
        ("--mock-dta", "--mock-data", "no training data is named"),
    ],
)
def test_a_slip_is_one_cause_of_what_follows_from_it(launched, typed, meant, follows):
    words = [typed if word == meant else word for word in SMALL]
    assert words != SMALL
    _, _, wrong = launched(words)
    told = [
        "configuration: 2 problems of 1 cause" if follows else "configuration: 1 problem",
        f"  1. [unknown-flag] unknown flag {typed}",
        f"     fix: did you mean {meant}?",
        *([f"     follows from it: {follows}"] if follows else []),
    ]
    assert wrong.splitlines() == told


def test_what_a_file_would_have_said_follows_from_its_absence(launched):
    _, _, wrong = launched(["--yaml-cfg", "nowhere.yaml"], 0)
    assert wrong.startswith("configuration: 4 problems of 1 cause\n  1. [yaml] nowhere.yaml cannot be read")
    assert "is required" not in wrong


def test_missing_flags_hide_no_wrong_ones(launched):
    """Of all that can be judged without them; and neither do a trainer's own flags."""
    slips = "--lr-decay-style cosin --bf16 --fp16 --tensor-model-parallel-size -1 --dropuot 0 --enable-zero-bubble"
    _, _, wrong = launched(slips.split(), 0)
    expected = [
        "did you mean cosine?",
        "--fp16 and --bf16 exclude each other",
        "--tensor-model-parallel-size -1: must be at least 1",
        "unknown flag --dropuot",
        "--enable-zero-bubble (schedule zb-1p) needs --pipeline-model-parallel-size 2 or more",
        "6 flags are required: --num-layers (decoder layers), --hidden-size (width h of the model), ",
    ]
    assert not [text for text in expected if text not in wrong]

    def own_flags(parser):
        parser.add_argument("--my-data", required=True)
        parser.add_argument("--my-factor", type=float, choices=[1.0])
        return parser

    for words, fault in (
        ([], "required: --my-data"),
        (["--my-data", "x", "--my-factor", "y", "z"], "my-factor"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            parse_config([*slips.split(), *words], extra_args_provider=own_flags)
        assert not [text for text in expected if text not in str(refused.value)]
        assert fault in refused.value.problems[0].message
        assert "unknown flag --my" not in str(refused.value)


def test_one_fix_is_told_once_whatever_rules_ask_for_it(launched):
    words = [
        *SMALL,
        "--tensor-model-parallel-size",
        "3",
        "--sequence-parallel",
        "--swiglu",
        "--geglu",
        "--bf16",
        "--fp16",
    ]
    _, _, wrong = launched(words, 0)
    causes = re.findall(r"^ +\d\. \[(.*?)\]", wrong, re.MULTILINE)
    assert causes[0] == "heads-tensor-parallel, ffn-tensor-parallel, sequence-tensor-parallel"
    assert causes[1:] == ["world-size", "precision", "activation"], (
        "`keep one of them` speaks of each rule's flags"
    )
    assert "fix: ask for a multiple of 3 ranks (torchrun --nproc-per-node N; " in wrong


def test_scripts_are_named_as_the_process_was_called(launched, monkeypatch, capsys):
    words = [word for word in SMALL if word != "--mock-data"]
    assert "(made by python tools/preprocess_data.py)" in launched(words, 0)[2]
    monkeypatch.setattr("sys.argv", ["megatron-zero train", *words])
    assert "(made by megatron-zero data preprocess)" in launched(words, 0)[2]
    report_failure(
        ValueError("write it with tools/inspect_data.py --x"), {ValueError: ExitStatus.DATA}, rank=0
    )
    assert capsys.readouterr().err.endswith("write it with megatron-zero data inspect --x\n")


def test_very_many_problems_are_counted():
    same = [Problem("a", (), f"{n}", "mend") for n in range(MAX_SHOWN + 2)]
    assert render_problems(same).count(";") == MAX_SHOWN
    assert "; ... and 2 more\n" in render_problems(same)
    other = [Problem("a", (), f"{n}", f"mend {n}") for n in range(MAX_SHOWN + 3)]
    assert render_problems(other).endswith("\n     ... and 3 more")


def test_readme_quotes_what_a_terminal_shows(check):
    status, page, wrong = check(TWO_SLIPS, 110)
    assert status == 2
    assert wrong.startswith("configuration: 2 problems\n"), (
        "each has a cause of its own: causes are not counted"
    )
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    assert f"```\n{page}{wrong}```\n" in readme


def test_one_cause_of_one_problem():
    told = render_problems([Problem("a-rule", ("--a",), "--a 1: wrong", "give 2")], 80)
    assert told == "configuration: 1 problem\n  1. [a-rule] --a 1: wrong\n     fix: give 2"


@pytest.mark.parametrize(("words", "columns"), [((), 0), (("--full",), 0), (("--full",), 80)])
def test_the_whole_configuration_off_a_terminal_and_with_full(check, words, columns):
    status, text, _ = check([*SMALL, *words], columns)
    assert status == 0
    assert yaml.safe_load(text)["model"]["num_layers"] == 2
    assert "num_layers: 2  # flag" in text
    assert "\n# rank grid: 1 rank, order" in text


def test_json_keeps_its_keys_on_a_terminal(check):
    _, text, wrong = check([*SMALL, "--num-experts", "8", "--json"])
    keys = (
        "config origin grid sharding pipeline parameters estimate exchanges problems warnings notes not_found"
    )
    assert list(json.loads(text)) == keys.split()
    assert not wrong


def test_full_belongs_to_check_config(capsys):
    with pytest.raises(SystemExit) as ended:
        launch_config([*SMALL, "--full"])
    assert ended.value.code == 2
    assert "[full-flag] --full belongs to --check-config" in capsys.readouterr().err


def test_a_page_of_an_incomplete_line_says_what_is_not_known(check):
    status, page, _ = check(["--lr", "1e-3"])
    assert status == 2
    assert list(entries(page))[:12] == FIRST
    assert entries(page)["memory"] == "not known: see the problems"
