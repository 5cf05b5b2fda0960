"""Ids of 2^63, lengths that no memory holds, hostile metrics: a message and its status, no traceback, no wait."""

import contextlib
import html
import importlib.util
import json
import os
import random
import re
import struct
from pathlib import Path

import pytest

from megatron.core.datasets.blend import read_per_split_file
from megatron.core.datasets.blended_samples import BlendedDataset
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.gpt_samples import GPTDataset, MockCorpus, SampleFormat
from megatron.core.datasets.indexed_dataset_reader import IndexedDataset
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import read_timeline
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.text import load_plan, to_json
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.tokenizer import TokenizerError
from tests.harness import launch

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def tool(capsys):
    """Runs a tool here: (status, stdout, stderr)."""

    def run(name, *words):
        spec = importlib.util.spec_from_file_location(f"{name}_tool", ROOT / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            status = module.main([str(word) for word in words])
        except SystemExit as leaving:
            status = leaving.code
        return status, *capsys.readouterr()

    return run


# Ids -----------------------------------------------------------------------------------------------------

IDS = [
    "9223372036854775808",
    "-9223372036854775809",
    "-1",
    "128",
    "1e5",
    "1_0",
    "+5",
    "0x7",
    "9" * 5000,
    "nan",
]


@pytest.mark.parametrize("word", IDS)
def test_words_that_are_no_ids(word):
    with pytest.raises(TokenizerError, match=r"numbers from 0 to 127 .*, found "):
        build_tokenizer("NullTokenizer", vocab_size=127).tokenize(f"1 {word} 2")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("vocab_size", [127, 70_000])
def test_ids_in_the_text_to_preprocess(tmp_path, tool, vocab_size, workers):
    for number, word in enumerate([*IDS[:3], IDS[4], str(2**31)]):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(f'{{"text": "1 2"}}\n{{"text": "1 {word}"}}\n')
        words = ["--input", path, "--output-prefix", tmp_path / "o", "--tokenizer-type", "NullTokenizer"]
        status, _, said = tool("preprocess_data", *words, "--vocab-size", vocab_size, "--workers", workers)
        assert status == 4
        assert f"{path}, bytes 0 to {path.stat().st_size}, key 'text'" in said
        assert word in said
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize("size", [-1, 2**31, 2**63, 10**30])
@pytest.mark.parametrize("flag", ["--vocab-size", "--tiktoken-num-special-tokens"])
def test_sizes_of_a_vocabulary_to_preprocess(tmp_path, tool, flag, size):
    """An id that such a vocabulary would allow, and no array holds."""
    (tmp_path / "i.txt").write_text(str(2**63))
    words = [
        "--input",
        tmp_path / "i.txt",
        "--output-prefix",
        tmp_path / "o",
        "--tokenizer-type",
        "NullTokenizer",
    ]
    status, _, said = tool("preprocess_data", *words, flag, size)
    assert status == 2
    assert f"{flag} {size}: must be from " in said


@pytest.mark.parametrize("flag", ["--stages", "--microbatches", "--chunks"])
@pytest.mark.parametrize("number", [10**6, 2**63])
def test_schedules_without_end(tool, flag, number):
    words = {"--stages": 4, "--microbatches": 8, "--chunks": 2} | {flag: number}
    for name in ("zb-1p", "interleaved", "auto") if flag != "--chunks" else ("interleaved",):
        given = [
            word for pair in words.items() if name == "interleaved" or pair[0] != "--chunks" for word in pair
        ]
        status, _, said = tool("show_schedule", "--schedule", name, *given)
        assert status != 0
        assert f"{flag.replace('--chunks', 'chunks')} {number}" in said
        assert "a plan holds at most 262144" in said


def test_text_for_preprocessing_of_any_bytes(tmp_path, tool):
    dice = random.Random(0)
    pieces = [
        b'{"text": "',
        b'"',
        b"}",
        b"\n",
        b"{",
        b"[" * 2000,
        b"1" * 5000,
        b"1e400",
        b"NaN",
        b"\xff\xfe",
        b"\0",
    ]
    pieces += [
        b'"\\ud800"',
        b'"text": ',
        b'["a", "b"]',
        b"null",
        b"true",
        b"{}",
        b"9223372036854775808",
        b"\r",
        b",",
    ]
    path = tmp_path / "in.jsonl"
    words = ["--input", path, "--output-prefix", tmp_path / "o"]
    for _ in range(25):
        path.write_bytes(b"".join(dice.choices(pieces, k=dice.randint(0, 9))))
        for tokenizer in (["ByteTokenizer"], ["NullTokenizer", "--vocab-size", "70000"]):
            status, _, said = tool("preprocess_data", *words, "--tokenizer-type", *tokenizer)
            assert status in (0, 4)
            assert ("in.jsonl" in said) == (status == 4)


# Lengths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "length", "told"),
    [
        (10**12, 8, "making the index of 10000"),
        (
            2**40,
            2**20,
            "(--train-samples, or iterations x --global-batch-size) of --seq-length 1048576",
        ),
        (1, 2**40, "one sample of --seq-length 1099511627776"),
        (None, 2**40, None),
    ],
)
def test_indices_that_no_memory_holds_name_the_flag_before_anything_is_allocated(requested, length, told):
    corpus = MockCorpus(0, 100)
    if told is None:  # one epoch is too short for a sample
        assert (
            len(GPTDataset(corpus, range(len(corpus)), "train", requested, SampleFormat(length), seed=1)) == 0
        )
        return
    with pytest.raises(DataError, match="this machine has") as error:
        GPTDataset(corpus, range(len(corpus)), "train", requested, SampleFormat(length), seed=1)
    assert told in str(error.value)
    assert re.search(r"[TP]iB of memory; this machine has", str(error.value))


def test_a_blend_that_no_memory_holds():
    member = GPTDataset(MockCorpus(0, 100), range(9), "train", 9, SampleFormat(8), seed=1)
    with pytest.raises(DataError, match=r"1000000000000 samples of a blend \(--train-samples\)"):
        BlendedDataset([member, member], [0.5, 0.5], 10**12)


def test_a_run_of_absurd_length(tmp_path):
    words = [*launch.TINY_DATA, "--data-path", "corpus"]
    run = launch.run_forked([*words, "--train-samples", str(10**12), "--lr-decay-samples", "9"], cwd=tmp_path)
    launch.ended(run, 2)
    assert "asks for 1,000,000,000,000 samples" in run.output
    assert "Traceback" not in run.output


def test_a_forged_index_that_no_memory_holds(tmp_path):
    """Its counts fit its size: a file of 4 TiB that takes no disk."""
    sequences = (1 << 42) // 20
    with open(tmp_path / "c.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, sequences, sequences + 1))
        file.truncate(34 + 12 * sequences + 8 * (sequences + 1))
    (tmp_path / "c.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"c\.idx of \d+ bytes takes .* GiB"):
        IndexedDataset(str(tmp_path / "c"))


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"train": [[]]}',
        '{"train": [true]}',
        '{"train": [1e400, "a"]}',
        '{"train": ["a\\u0000b"]}',
    ]
    + [
        '{"train": ["1", "\\ud800"]}',
        '{"train": [%s, "a"]}' % ("9" * 5000),
        '{"train": [%s, "a"]}' % ("9" * 4000),
    ],
)
def test_hostile_blends(tmp_path, content, tool):
    path = tmp_path / "blend.json"
    path.write_text(content)
    words = ["--per-split-data-args-path", path, "--seq-length", 8, "--sizes", "9,9,9"]
    status, _, said = tool("inspect_data", *words)
    assert (status, said.startswith("error: ")) == (4, True)
    if "u0000" not in content and "ud800" not in content:
        with pytest.raises(DataError, match=r"blend\.json"):
            read_per_split_file(str(path))


# Reports -------------------------------------------------------------------------------------------------

GOOD = '{"iteration": 1, "time": 1.5, "consumed_samples": 8, "lm loss": 2.0}'
BAD_LINES = {
    "iteration that is infinite": '{"iteration": 1e400}',
    "iteration that is huge": '{"iteration": 1%s}' % ("0" * 400),
    "iteration of too many digits": '{"iteration": 1%s}' % ("0" * 5000),
    "iteration that is no number": '{"iteration": "7"}',
    "iteration that is true": '{"iteration": true}',
    "iteration below zero": '{"iteration": -1}',
    "loss that is text": '{"iteration": 2, "lm loss": "low"}',
    "loss that is a list": '{"iteration": 2, "lm loss": [1]}',
    "loss that is true": '{"iteration": 2, "lm loss": true}',
    "loss that is nothing": '{"iteration": 2, "lm loss": null}',
    "loss that no float holds": '{"iteration": 2, "lm loss": 1%s}' % ("0" * 400),
    "time that is NaN": '{"iteration": 2, "time": NaN}',
    "time that is infinite": '{"iteration": 2, "time": 1e400}',
    "time that is text": '{"iteration": 2, "time": "nan"}',
    "samples that are text": '{"iteration": 2, "consumed_samples": "8"}',
    "samples that are infinite": '{"iteration": 2, "consumed_samples": Infinity}',
    "event without a name": '{"iteration": 2, "event": 5}',
    "configuration that is none": '{"iteration": 2, "event": "start", "config": "x"}',
    "nested": '{"iteration": 2, "a": %s}' % ("[" * 100_000 + "]" * 100_000),
    "list": "[1, 2]",
    "number": "7",
    "junk": "\x00\x01\xfe",
    "long": "x" * 10**6,
    "cut": '{"iteration": 2',
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_with_its_number(tmp_path, tool, name):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{GOOD}\n{BAD_LINES[name]}\n{GOOD}\n")
    status, _, said = tool("report", tmp_path)
    assert status == 2
    assert f"report.py: {path}, line 2: " in said
    assert len(said) < 500 + len(str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


EXTREME = {
    "not finite": ["NaN", "Infinity", "-Infinity", "1e400", '"nan"', '"inf"'],
    "largest": ["1.7e308", "-1.7e308", "1e201", "1e200", "-1e200"],
    "smallest": ["5e-324", "-5e-324", "1e-200", "1e-201", "0"],
    "hardly different": ["1", "1.0000000000000002", "0.9999999999999999"],
    "integers": ["9007199254740993", "-3", "1" + "0" * 300],
}


@pytest.mark.parametrize("name", EXTREME)
def test_any_number_is_drawn_or_counted(tmp_path, tool, name):
    lines = []
    for iteration, value in enumerate([*EXTREME[name], *EXTREME[name]]):
        tags = ("lm loss", "grad-norm", "learning-rate", "tokens-per-second", "lm loss validation")
        numbers = ", ".join(f'"{tag}": {value}' for tag in tags)
        lines.append(f'{{"iteration": {iteration * 2**44}, {numbers}}}\n')
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert tool("report", tmp_path)[0] == 0
    assert "NaN" not in (tmp_path / "report.html").read_text().replace("(NaN or infinite)", "")


def test_names_cannot_carry_markup(tmp_path, tool):
    evil = "</title><script>alert(1)</script>\" onload='x' \\ud800"
    run = tmp_path / "<script>run"
    run.mkdir()
    record = {"iteration": 1, "lm loss": 1.0, evil: 2.0, f"{evil} validation": 2.0}
    start = {"iteration": 1, "event": "start", "config": {evil: evil, "seed": evil}, "world_size": evil}
    event = {"iteration": 1, "event": evil, "time": 5, evil: evil, "long": "y" * 10**6, "path": "\ud800"}
    mark = {"iteration": 1, "event": "checkpoint", "path": evil}
    records = [start, record, event, mark, {**record, "iteration": 2}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (run / "exit.json").write_text(
        json.dumps(
            {"status": 4, "reason": evil, "iteration": 1, "checkpoint": evil, "rank": 0, "requeue": False}
        )
    )
    assert tool("report", run, "--title", evil)[0] == 0
    text = (run / "report.html").read_text()
    assert text.count("<script") == 1  # the page's own
    assert "alert" not in text.replace(html.escape(evil), "").replace(
        "&lt;script&gt;alert(1)&lt;/script&gt;", ""
    )
    assert "onload='x'" not in text
    assert len(text) < 100_000


def test_lists_in_lists_of_an_event_are_shown_or_refused(tmp_path, tool):
    for depth in (10, 300, 900, 960, 990):
        (tmp_path / "metrics.jsonl").write_text(
            '{"iteration": 1, "event": "start", "config": {"a": %s}, "b": %s}\n'
            % (("[" * depth + "]" * depth,) * 2)
        )
        assert tool("report", tmp_path)[0] in (0, 2)


def test_too_many_names_are_refused(tmp_path, tool):
    many = {f"loss {k}": 1.0 for k in range(5000)}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1, **many}) + "\n")
    status, _, said = tool("report", tmp_path)
    assert (status, "more than 1000 names" in said) == (2, True)


@pytest.mark.parametrize("kind", ["pipe", "zeros", "huge", "folder", "nothing", "device out"])
def test_what_is_no_metrics_file_is_a_message(tmp_path, tool, kind):
    path, out = tmp_path / "metrics.jsonl", tmp_path / "out.html"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "huge":
            with open(path, "wb") as file:
                file.truncate(1 << 42)
        case "folder":
            path.mkdir()
        case "device out":
            path.write_text(GOOD + "\n")
            out = "/dev/zero"
    status, _, said = tool("report", path, "--out", out)
    assert status == 2
    assert said.startswith("report.py: ")
    assert not Path("/dev/zero").is_file()


# Plans and timelines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunks", 10**12),
        ("microbatches", 10**15),
        ("ranks", 10**12),
        ("microbatches", 1e400),
        ("ops", [["9" * 5000 + "F0"]]),
    ]
    + [("ops", [["9" * 18 + "F0"], []]), ("placement", ["looped"]), ("ranks", "1" * 5000)],
)
def test_plans_that_claim_absurd_numbers(tmp_path, name, value):
    content = json.loads(to_json(build_plan("1f1b", Request(2, 4))))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**content, name: value}))
    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(str(path), 2, post_validation=False)


@pytest.mark.parametrize("content", ["[" * 100_000, "{", "\x00", "[]", "1" * 5000])
def test_plans_that_are_none(tmp_path, content):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(str(tmp_path / "plan.json"), 2, post_validation=False)


HEADER = {
    "version": 1, "plan": "x", "schedule": "1f1b", "placement": {"kind": "linear", "ranks": 1, "chunks": 1},
    "num_microbatches": 1, "bitwise": True, "forward_only": False, "rank": 0, "pipeline": [0], "stages": [0],
    "num_ops": 1, "clock_unix_s": 1.0,
}  # fmt: skip
OP = {"iteration": 1, "op": "0F0", "start_s": 0.0, "end_s": 1.0, "wait_s": 0.0}


def test_timelines_of_any_values_are_a_message(tmp_path):
    values = [
        None,
        True,
        -1,
        10**400,
        1.5,
        "x",
        [],
        {},
        [[0]],
        [10**12],
        {"kind": [], "ranks": 10**12, "chunks": 1},
    ]
    path = tmp_path / "rank-00000.jsonl"
    contents = [({**HEADER, name: value}, OP) for name in HEADER for value in values]
    contents += [
        (HEADER, {**OP, name: value}) for name in OP for value in [*values, float("nan"), float("inf")]
    ]
    for header, op in contents:
        path.write_text(json.dumps(header) + "\n" + json.dumps(op) + "\n")
        with contextlib.suppress(PlanError):  # or a step without its end, which is left out
            assert read_timeline(tmp_path) == []
    for line in ("[" * 100_000, "7", "[]", "x" * 10**6, "1" * 5000):
        path.write_text(json.dumps(HEADER) + "\n" + line + "\n")
        with pytest.raises(PlanError, match=r"rank-00000\.jsonl, line 2"):
            read_timeline(tmp_path)
