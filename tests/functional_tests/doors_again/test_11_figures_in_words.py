"""Number 11: figures are said in one way, by `core/words`, and what is not known is said so, with its reason."""

import io
import json
import re
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.report.progress import ProgressLine
from megatron.training.run import arguments
from tests.harness.launch_lines import SMALL
from tools import preprocess_data
from tools.conversion import contents
from tools.schedules.held_over_time import summary
from tools.schedules.text import to_text

ROOT = Path(__file__).resolve().parents[3]
LARGE = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --pipeline-schedule zbv --micro-batch-size 1 "
    "--global-batch-size 64 --train-iters 10 --lr 0.0000003 --bf16 --mock-data --world-size 64 --tokenizer-type"
).split()
NULL = "NullTokenizer --vocab-size 128000".split()


@pytest.fixture
def page(capsys, monkeypatch):
    """page(words, terminal): --check-config's entries by label on a terminal, else its text."""

    def shown(*words, terminal=True):
        monkeypatch.setattr(arguments, "on_terminal", lambda fd=1: terminal)
        monkeypatch.setenv("COLUMNS", "400")
        with pytest.raises(SystemExit):
            arguments.launch_config([*words, "--check-config"])
        text = capsys.readouterr().out
        rows = (line.split(maxsplit=1) for line in text.splitlines()) if terminal else ()
        return dict(row for row in rows if len(row) == 2) if terminal else text

    return shown


@pytest.mark.parametrize(
    "asked", ["--moe-use-upcycling", "--multi-latent-attention", "--mtp-num-layers 1", "--window-size 128,0"]
)
def test_nothing_is_said_of_another_model(page, asked):
    """README's own line said what its dense part computes."""
    found, why = page(*LARGE, *NULL, *asked.split()), f"not known: not supported yet: {asked.split()[0]}"
    assert {label: found[label] for label in ("parameters", "memory", "compute")} == dict.fromkeys(
        ("parameters", "memory", "compute"), why
    )
    assert ", bubble" not in found["pipeline"], "by the FLOPs of other stages"
    facts = json.loads(page(*LARGE, *NULL, *asked.split(), "--json", terminal=False))
    assert facts["pipeline"]["bubble_rate"] is facts["parameters"]["total"] is None
    assert "FLOP a step" in page(*LARGE, *NULL)["compute"]


def test_no_page_sends_to_problems_that_there_are_not(page):
    """The vocabulary is not known here, and nothing is wrong."""
    found = page(*LARGE, *"HuggingFaceTokenizer --tokenizer-model not-here".split())
    assert found["launch"].startswith("line  valid: no problems found")
    for label in ("parameters", "memory", "compute"):
        assert found[label] == "not known: the tokenizer's files are not here; give --vocab-size"
    assert page(*LARGE, *NULL, "--micro-batch-size", "7")["batch"] == "not known: see the problems"


@pytest.mark.grid
def test_more_memory_than_this_machine_has_draws_a_word(page, monkeypatch):
    each = 5 * 2**20  # one rank has room, four have not
    for words, here, fits in (
        ((*LARGE, *NULL), 2**30, False),
        ((*LARGE, *NULL), 2**50, True),
        (SMALL, each, True),
        ((*SMALL, "--world-size", "4"), each, False),
    ):
        monkeypatch.setattr(LaunchEnv, "memory_bytes", staticmethod(lambda here=here: here))
        found = page(*words, "--device-profile", "cpu")["memory"]
        told = r": fits [\d.]+ \S+ of a rank's part of this machine; "
        assert bool(re.search(told, found)) is fits, found
        assert (": does not fit " in found) is not fits
    monkeypatch.setattr(LaunchEnv, "gpu_present", lambda env: True)
    gpu = page(*SMALL, "--distributed-backend", "nccl", "--world-size", "4")["memory"]
    assert "this machine" not in gpu or "this machine's device" in gpu


def test_counts_have_commas_and_rates_no_exponent(page):
    text = page(*LARGE, *NULL, terminal=False)
    assert re.search(r"^# parameters: \d,\d{3},\d{3},\d{3} in all$", text, re.M)
    assert re.search(r"^#   pipeline rank 0 \(each of 16 ranks\): \d+,\d{3},\d{3}$", text, re.M)
    assert "lr 0.0000003 to 0" in page(*LARGE, *NULL)["optimizer"]


@pytest.mark.parametrize("unit", [0.1, 0.3, 1 / 3, 1e-9])
def test_a_bubble_is_no_rounding_error(unit):
    costs = {"time_f": [unit], "time_b": [unit], "time_w": [unit]}
    for schedule in ("zbv", "zb-h2"):
        plan = build_plan(schedule, Request(4, 12))
        found = simulate(
            lower(plan, CostModel.of_ranks(plan.placement, **costs)),
            CostModel.of_ranks(plan.placement, **costs),
        )
        assert "bubble 0 (0.00%)" in summary(found)
        assert not re.search(r"\de[-+]?\d|\d[afz]\b", to_text(found).replace("[", " "))


def test_one_document_is(tmp_path, capsys):
    for texts, said in (([""], "1 document is empty: "), (["", ""], "2 documents are empty: ")):
        source = tmp_path / f"{len(texts)}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, "word"]))
        words = f"--input {source} --output-prefix {tmp_path}/{len(texts)} --tokenizer-type ByteTokenizer --append-eod"
        assert preprocess_data.main(words.split()) == 0
        assert said in capsys.readouterr().out


def test_a_resumed_run_has_a_last_checkpoint():
    for first, said in ((1, "no checkpoint yet"), (1241, "last checkpoint at step 1,240")):
        out = io.StringIO()
        progress = ProgressLine(5000, first_iteration=first, stream=out)
        for _ in range(2):
            progress.update(first)
            progress.update(5000)
            progress.show()
        assert out.getvalue().splitlines()[0].endswith(f" | {said}")
        progress.checkpoint_saved()
        progress.show()
        assert out.getvalue().splitlines()[-1].endswith(" | last checkpoint 0 s ago")


def test_one_file_and_one_tensor(capsys):
    facts = {
        "directory": "d", "iteration": 1, "consumed_train_samples": 1, "world_size": 1, "code_version": "1",
        "torch_version": "2", "total_bytes": 4, "files": {"a": {"bytes": 4, "sha256": "0" * 64}},
        "tensors": {"t": {"shape": [1], "dtype": "fp32", "chunks": 1}},
        "summary": dict.fromkeys("model tokenizer tokens seq_length train_iters loss validation_loss layout".split())
        | {"parameters": 1, "dtypes": ["fp32"], "losses_unknown": "none"},
    }  # fmt: skip
    contents.print_table(facts)
    text = capsys.readouterr().out
    for said in ("1 sample\n", "  1 file\n", "  1 tensor, 4 bytes", "size         4 bytes"):
        assert said in text, text


def test_only_words_make_figures():
    """Where a person reads them. Forms of Megatron's log lines, units of drawing and messages to programmers stay."""
    kept = {
        "metrics.py", "timers.py", "reporter.py", "words.py", "screen.py", "lease.py", "rendezvous.py", "saving.py",
        "schema.py", "simulate.py", "initial_orders.py",
        "page.py", "lanes.py", "charts.py", "run_tests.py", "fsdp_hiding.py",
        "flags.py", "fully_shard.py", "peer_loss.py", "shared_memory.py",
        "progress.py", "hang_diagnosis.py",
    }  # fmt: skip
    own = re.compile(
        r"""/ ?2\*\*[123]0|\{[^{}"]*:[,0-9]*\.\d[efg%]\}|\{[^{}"]*:g\}|'s' \*|"s" if|'' if \w+ == 1"""
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("megatron", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name not in kept
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if own.search(line)
    ]
    assert found == []


def test_the_page_of_measurements_has_one_unit_of_bytes():
    """MB are those of a wire in a second, and of the name of a line of the log that is Megatron's."""
    page = (ROOT / "docs" / "performance.md").read_text().replace("`memory (MB)`", "")
    assert re.findall(r"[^\n]*\b[MGT]B\b(?!/s)[^\n]*", page) == []
