"""tools/generate.py: the trained model, its tokenizer, and errors with their exit status."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.device import Device
from megatron.core.dist_checkpointing.saving import save
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.models.gpt.generate import generate
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.tokenizers.tokenizer import ByteTokenizer
from megatron.training.config.config import Config
from tests.harness.tiny_models import tiny_config
from tests.harness.whole_models import load_model
from tools.generation import run as generation
from tools.generation.writer import Writer

TOOL = Path(__file__).resolve().parents[3] / "tools" / "generate.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("generate_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trained(tmp_path):
    return saved(
        tmp_path, tiny_config(position_embedding_type="rope", swiglu=True, max_position_embeddings=64)
    )


def saved(directory, model_config):
    """A checkpoint as training leaves it, and its model."""
    model_config = dataclasses.replace(model_config, padded_vocab_size=384)
    flat = Config.from_flat(
        {**dataclasses.asdict(model_config), "tokenizer_type": "ByteTokenizer", "bf16": True}
    ).flat()
    model = GPTModel(model_config, padded_vocab_size=384, seed=5, params_dtype=torch.bfloat16)
    pieces = [
        LocalPiece(f"model.{name}", tuple(p.shape), (0,) * p.dim(), p.detach())
        for name, p in model.named_parameters()
    ]
    save(directory, 7, pieces, {"config": flat, "consumed_train_samples": 0}, {})
    return directory, model


def run(tool, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--device", "cpu", *map(str, words)])
    tool.main()


def test_prints_what_the_trained_model_says(tool, trained, monkeypatch, capsys):
    directory, model = trained
    run(tool, monkeypatch, "--load", directory, "--prompt", "def f(", "--max-new-tokens", 12, "--greedy")
    tokenizer = ByteTokenizer()
    prompt = tokenizer.tokenize("def f(")
    (made,) = generate(model, [prompt], 12, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
    expected = tokenizer.detokenize(prompt + made.ids)
    assert capsys.readouterr().out == expected + "\n"


def test_seed_decides_what_is_drawn(tool, trained, monkeypatch, capsys):
    outputs = []
    for seed in (1, 1, 2):
        run(tool, monkeypatch, "--load", trained[0], "--prompt", "x", "--max-new-tokens", 20, "--seed", seed)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_loaded_weights_are_the_saved_ones(tool, trained):
    directory, model = trained
    loaded, config = load_model(directory)
    assert config.params_dtype == "bfloat16"
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight), name


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--load", "/nowhere", "--prompt", "x"), 3, "no checkpoint in /nowhere"),
        (("--load", "/nowhere", "--prompt", "x", "--top-p", "2"), 2, "--top-p 2.0"),
        (("--load", "/nowhere", "--prompt", "x", "--top-p", "nan"), 2, "--top-p nan"),
        (("--load", "/nowhere", "--prompt", "x", "--temperature", "nan"), 2, "--temperature nan"),
        (("--load", "/nowhere", "--prompt", "x", "--temperature", "inf"), 2, "--temperature inf"),
        (("--load", "/nowhere", "--prompt", "x", "--device", "bogus"), 2, "--device bogus: cannot be used"),
        (("--load", "/nowhere", "--prompt", "x", "--device", "meta"), 2, "--device meta: holds no values"),
    ],
)
def test_errors_name_the_flag_or_folder(tool, monkeypatch, capsys, words, status, message):
    with pytest.raises(SystemExit) as left:
        run(tool, monkeypatch, *words)
    assert left.value.code == status
    assert message in capsys.readouterr().err


def lines_of(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_many_prompts_as_json_lines(tool, trained, monkeypatch, capsys, tmp_path):
    """From every source, in order; each one's text is that of the prompt alone with the seed of its number."""
    plain, rows = tmp_path / "plain.txt", tmp_path / "rows.jsonl"
    plain.write_text("ab\r\nünï code\n")
    rows.write_text('{"id": "x7", "prompt": "c\\nd"}\n\n{"text": "e"}\n')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from stdin\n")))
    words = ("--load", trained[0], "--max-new-tokens", 9, "--top-k", 40)
    files = ("--prompts", plain, "--prompts", rows, "--prompts", "-")
    run(
        tool, monkeypatch, *words, "--prompt", "first", *files, "--batch-size", 4, "--json-lines", "--seed", 5
    )
    found = lines_of(capsys)
    prompts = ["first", "ab", "ünï code", "c\nd", "e", "from stdin"]
    assert [row["prompt"] for row in found] == prompts
    assert [row["index"] for row in found] == list(range(6))
    assert [row.get("id") for row in found] == [None, None, None, "x7", None, None]
    assert [row["prompt_tokens"] for row in found] == [len(prompt.encode()) for prompt in prompts]
    for row in found[::3]:
        alone = ("--prompt", row["prompt"], "--seed", 5 + row["index"], "--json-lines")
        run(tool, monkeypatch, *words, *alone)
        (one,) = lines_of(capsys)
        assert {**one, "index": row["index"], **({"id": "x7"} if "id" in row else {})} == row
        assert (row["finish_reason"], row["completion_tokens"]) == ("length", 9)


def test_plain_text_of_several_prompts_and_stop_strings(tool, trained, monkeypatch, capsys):
    words = ("--load", trained[0], "--max-new-tokens", 30, "--top-k", 3, "--json-lines", "--prompt", "a")
    run(tool, monkeypatch, *words)
    (whole,) = lines_of(capsys)
    stop = whole["text"][3:5]
    run(tool, monkeypatch, *words, "--stop", stop, "--stop", "nowhere in it")
    (cut,) = lines_of(capsys)
    assert cut["text"] == whole["text"][: whole["text"].find(stop)]
    assert cut["finish_reason"] == "stop"
    assert cut["completion_tokens"] < 30
    run(tool, monkeypatch, *words[:-3], "--prompt", "a", "--prompt", "b", "--stop", stop)
    out = capsys.readouterr().out
    assert out.startswith(f"=== prompt 1 of 2 ===\na{cut['text']}\n=== prompt 2 of 2 ===\nb")


@pytest.mark.parametrize("terminal", [True, False])
def test_text_appears_as_it_is_made(tool, trained, monkeypatch, capsys, terminal):
    """On a terminal, or with --stream; what is written in the end is the same."""
    words = ("--load", trained[0], "--max-new-tokens", 12, "--prompt", "é")
    run(tool, monkeypatch, *words)
    whole, shown = capsys.readouterr().out, []
    show = Writer.show

    def noted(writer, text):
        show(writer, text)
        shown.append(sys.stdout.getvalue() if hasattr(sys.stdout, "getvalue") else text)

    monkeypatch.setattr(Writer, "show", noted)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    run(tool, monkeypatch, *words, *(() if terminal else ("--stream",)))
    assert capsys.readouterr().out == whole
    assert len(shown) == 12 + 1
    assert all(whole.startswith(text) for text in shown)


def test_ctrl_c_keeps_what_was_written(tool, trained, monkeypatch, capsys):
    def interrupted(*given, **options):
        made = generate(*given, **options)
        yield next(made)
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generate", interrupted)
    words = ("--load", trained[0], "--max-new-tokens", 2, "--prompt", "a", "--prompt", "b", "--json-lines")
    with pytest.raises(SystemExit) as left:
        run(tool, monkeypatch, *words)
    assert left.value.code == 130
    out, err = capsys.readouterr()
    assert [json.loads(line)["index"] for line in out.splitlines()] == [0]
    assert "interrupted" in err


def test_all_that_is_wrong_is_said_at_once(tool, trained, monkeypatch, capsys, tmp_path):
    """With status 2, before the checkpoint is opened; then what only model and tokenizer know."""
    rows, plain = tmp_path / "rows.jsonl", tmp_path / "plain.txt"
    rows.write_text('{"prompt": "a"}\n{"question": "b"}\n[1]\n{"text": 3}\nno\n' + "[" * 9999)
    plain.write_text("a\n\nb\n")
    (tmp_path / "binary.txt").write_bytes(b"a\n\xff")
    flags = (
        "--batch-size",
        0,
        "--stop",
        "",
        "--max-new-tokens",
        -1,
        "--top-p",
        7,
        "--stream",
        "--json-lines",
    )
    ranks = ("--tensor-model-parallel-size", 2, "--device", "bogus")
    files = ("--prompts", rows, "--prompts", "/nowhere/file", "--prompts", tmp_path / "binary.txt")
    with pytest.raises(SystemExit, match="2"):
        run(tool, monkeypatch, "--load", "/nowhere", *flags, *ranks, *files)
    told = capsys.readouterr().err
    for expected in (
        "--batch-size 0: must be at least 1",
        "--stop ''",
        "--max-new-tokens -1: must be 0 or more",
        "--top-p 7.0",
        "--stream with --json-lines",
        "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 do not divide 1 rank",
        "--device bogus",
        'rows.jsonl:2: expected text in the field "prompt" or "text"',
        "rows.jsonl:3: expected a JSON object, found list",
        'rows.jsonl:4: expected text in the field "prompt" or "text"',
        "rows.jsonl:5: not JSON",
        "rows.jsonl:6: nested too deeply",
        "--prompts /nowhere/file: No such file",
        "binary.txt: not UTF-8 text",
    ):
        assert told.count(expected) == 1, expected
    assert len(told.splitlines()) == 14
    with pytest.raises(SystemExit, match="2"):
        run(tool, monkeypatch, "--load", trained[0], "--prompts", plain, "--prompt", "", "--prompt", "x")
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" holds no token")[0].rpartition("/")[2] for line in told] == [
        "generate.py: --prompt number 1",
        "plain.txt:2",
    ]


def test_no_prompt(tool, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(tool, monkeypatch, "--load", "/nowhere")
    assert "no prompt is given: give --prompt TEXT, --prompts FILE" in capsys.readouterr().err


def test_prompts_that_learned_positions_do_not_reach(tool, monkeypatch, capsys, tmp_path):
    directory, _ = saved(tmp_path / "learned", tiny_config(max_position_embeddings=16))
    (tmp_path / "plain.txt").write_text("short\nthis prompt is too long\n")
    words = ("--load", directory, "--prompts", tmp_path / "plain.txt", "--max-new-tokens", 11)
    with pytest.raises(SystemExit, match="2"):
        run(tool, monkeypatch, *words)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "plain.txt:2: 23 prompt tokens and 11 new ones exceed the model's 16 learned positions" in told[0]


@pytest.mark.parametrize(("new_tokens", "beyond"), [(60, False), (61, True)])
def test_positions_that_the_model_was_not_made_for_are_pointed_out(
    tool, trained, monkeypatch, capsys, new_tokens, beyond
):
    """Rotary positions have no end; an imported model may have had a window from there on."""
    words = ("--load", trained[0], "--prompt", "abcd", "--max-new-tokens", new_tokens, "--json-lines")
    run(tool, monkeypatch, *words)
    out, err = capsys.readouterr()
    assert json.loads(out)["prompt_tokens"] == 4
    assert ("note: 65 tokens go beyond the 64 positions" in err) == beyond


def test_fp32_computes_a_bf16_checkpoint_in_fp32(tool, trained, monkeypatch, capsys):
    """Then a batch has the tokens of the same weights in fp32, prompt by prompt."""
    directory, model = trained
    words = ("--load", directory, "--greedy", "--max-new-tokens", 8, "--json-lines", "--fp32")
    run(tool, monkeypatch, *words, "--prompt", "a", "--prompt", "bcd", "--prompt", "efghi")
    model.float()
    tokenizer = ByteTokenizer()
    for row in lines_of(capsys):
        prompt = tokenizer.tokenize(row["prompt"])
        (made,) = generate(model, [prompt], 8, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
        assert tokenizer.detokenize(made.ids) == row["text"]
    dtypes = set()

    def noted(model, *given, **options):
        dtypes.update(weight.dtype for weight in model.parameters())
        return generate(model, *given, **options)

    monkeypatch.setattr(generation, "generate", noted)
    run(tool, monkeypatch, *words, "--prompt", "a")
    assert dtypes == {torch.float32}


def test_caches_of_a_batch_need_memory(tool, trained, monkeypatch, capsys):
    """What they take is that of all prompts in flight."""
    monkeypatch.setattr(Device, "free_bytes", lambda self: 13_000)
    words = ("--load", trained[0], "--max-new-tokens", 4, *("--prompt", "abcd") * 9)
    # 2 (keys and values) x 2 layers x 32 x 2 bytes a token
    for batch_size, refused in ((6, False), (7, True)):
        arguments = (*words, "--batch-size", batch_size)
        with pytest.raises(SystemExit, match="2") if refused else contextlib.nullcontext():
            run(tool, monkeypatch, *arguments)
    told = capsys.readouterr().err
    assert "--max-new-tokens 4: keys and values of 7 prompts take 14 KiB, 12.7 KiB are left" in told
    assert "--batch-size 7" in told


def test_empty_prompt(tool, trained, monkeypatch, capsys):
    with pytest.raises(SystemExit) as left:
        run(tool, monkeypatch, "--load", trained[0], "--prompt", "")
    assert left.value.code == 2
    assert "--prompt holds no token" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", [-1, 10**13])
def test_numbers_of_new_tokens_that_cannot_be(tool, trained, monkeypatch, capsys, tokens):
    with pytest.raises(SystemExit, match="2"):
        run(tool, monkeypatch, "--load", trained[0], "--prompt", "a", "--max-new-tokens", tokens)
    assert f"--max-new-tokens {tokens}: " in capsys.readouterr().err


def test_a_tokenizer_with_more_ids_than_the_model(tool, trained, monkeypatch, capsys):
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 385)
    with pytest.raises(SystemExit, match="2"):
        run(tool, monkeypatch, "--load", trained[0], "--prompt", "a", "--max-new-tokens", 1)
    assert "the tokenizer has 385 ids, the model 384" in capsys.readouterr().err
