"""Line 5: --check-config says first what one wants first, and what is wrong by cause."""

import json
import re
from pathlib import Path

import pytest
import yaml

from megatron.training.config.problems import Problem, render_causes
from megatron.training.run import arguments
from megatron.training.run.arguments import launch_config
from tests.harness.launch_lines import GPT3_175B, SMALL

# Of examples/deepseek for Megatron: what the model is made of.
DEEPSEEK_V2_LITE = (
    "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --kv-channels 16 "
    "--seq-length 4096 --max-position-embeddings 163840 --multi-latent-attention --kv-lora-rank 512 --v-head-dim 128 "
    "--qk-head-dim 128 --qk-layernorm --qk-pos-emb-head-dim 64 --q-lora-rank 1536 --num-experts 64 "
    "--moe-layer-freq [0]+[1]*26 --moe-ffn-hidden-size 1408 --moe-grouped-gemm --moe-router-score-function softmax "
    "--moe-router-topk 6 --moe-router-topk-scaling-factor 1.0 --moe-shared-expert-intermediate-size 2816 "
    "--moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --moe-token-drop-policy probs "
    "--moe-router-load-balancing-type seq_aux_loss --expert-model-parallel-size 4 --fp8-format hybrid "
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
    "--tokenizer-type NullTokenizer --vocab-size 128000 --weigth-decay 0.1 --num-experts 8"
).split()
FIRST = "model parameters ranks sharding pipeline memory batch training compute optimizer data checkpoints".split()


@pytest.fixture
def check(capsys, monkeypatch):
    """check(words, columns of the terminal or 0 for a pipe): status, standard output, standard error."""

    def run(words, columns=80):
        monkeypatch.setattr(arguments, "on_terminal", lambda: columns > 0)
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            launch_config([*words, "--check-config"])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


def entries(page):
    """label -> text of the page's lines, those that go on joined."""
    lines = re.sub(r"\n {10,}", " ", page).splitlines()
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def test_twelve_lines_come_first(check):
    status, page, wrong = check([*GPT3_175B, "--world-size", "1024", "--vocab-size", "50257"])
    assert (status, wrong) == (0, "")
    told = entries(page)
    assert list(told)[:12] == FIRST
    assert told["parameters"] == "174,615,846,912; at most 1,463,270,400 on a rank"
    assert told["ranks"] == "1,024 = tensor 8 x data 8 x pipeline 16"
    assert told["memory"].startswith("23 GB a rank")
    assert told["batch"].startswith(
        "1,536 samples = 3,145,728 tokens a step: 8 replicas x 192 microbatches of 1"
    )
    assert told["training"] == "500,000 steps, 743,443,552 samples, 1,522,572,394,496 tokens"
    assert told["compute"] == "3.34 EFLOP a step, 3.26 PFLOP on each rank"
    assert told["checkpoints"] == "to /ckpt every 10,000 steps; from /ckpt"
    assert "not found: --vocab-file vocab.json" in page, "nothing is dropped"
    assert page.splitlines()[-1].startswith(" --full shows all ")
    assert all(len(line) <= 80 for line in page.splitlines())


def test_the_smallest_line_of_one_rank(check):
    _, page, _ = check(SMALL, 140)
    told = entries(page)
    assert told["ranks"] == "1"
    assert told["pipeline"].startswith("1f1b, 1 rank, ")
    assert told["sharding"] == "no_shard: a rank holds all of its part of the model"
    assert told["checkpoints"] == "none"
    assert all(told[label] for label in FIRST)


def test_problems_are_grouped_by_cause(check):
    status, page, wrong = check(DEEPSEEK_V2_LITE)
    assert status == 2
    assert list(entries(page))[:12] == FIRST
    _, _, each = check(DEEPSEEK_V2_LITE, 0)
    number = len(re.findall(r"^ *\d+\. \[", each, re.MULTILINE))
    causes = re.findall(r"^ *\d+\. \[", wrong, re.MULTILINE)
    assert number > 20
    assert len(causes) <= 5
    assert wrong.startswith(f"configuration: {number} problems of {len(causes)} causes\n")
    assert wrong.count("fix: ") == len(causes), "one line of what to do"
    flat = re.sub(r"\s+", " ", wrong)
    assert "13 flags are not supported: --num-experts 64, --moe-layer-freq [0]+[1]*26, " in flat
    assert "9 flags are not supported: --multi-latent-attention, --kv-lora-rank 512, " in flat
    assert "see docs/roadmap.md, 'multi-latent attention'" in flat
    named = set(re.findall(r"--[a-z0-9-]+", each))
    assert named <= set(re.findall(r"--[a-z0-9-]+", flat)), "nothing is dropped"


def test_readme_quotes_what_a_terminal_shows(check):
    status, page, wrong = check(TWO_SLIPS, 110)
    assert status == 2
    assert wrong.startswith("configuration: 2 problems\n"), (
        "each has a cause of its own: causes are not counted"
    )
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    assert f"```\n{page}{wrong}```\n" in readme


def test_one_cause_of_one_problem():
    told = render_causes([Problem("a-rule", ("--a",), "--a 1: wrong", "give 2")], 80)
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
    keys = "config origin grid sharding pipeline parameters problems warnings notes not_found".split()
    assert list(json.loads(text)) == keys
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
