"""`tools/generate.py` over ranks: each prompt's tokens are those of one process alone; and transformers' own."""

import dataclasses
import json

import pytest
import torch

from megatron.core.dist_checkpointing.saving import save
from megatron.core.models.gpt.generate import generate
from megatron.core.models.gpt.gpt import GPTModel
from megatron.training.config.config import Config
from tests.harness.hugging_face import our_model, saved_toy
from tests.harness.launch import ok, run_forked
from tests.harness.pieces import whole_tensors
from tests.harness.scripts import run_script
from tests.harness.tiny_models import VARIANTS, make_talkative, tiny_config

SCRIPT = "tools/generate.py"
LINES = "one\nof many prompts\nü\nxyz\nand another\n"
# Embeddings: 257 rows are not even, stages of three layers are unequal.
MODELS = {"gpt": {}, "llama": VARIANTS["llama"]}
SAMPLING = {"greedy": ["--greedy"], "sampled": ["--top-k", 50, "--seed", 11]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of each model, and the prompts."""
    made = tmp_path_factory.mktemp("generation")
    (made / "lines.txt").write_text(LINES)
    for name, flags in MODELS.items():
        config = tiny_config(**flags, num_layers=3, max_position_embeddings=40)
        config = dataclasses.replace(config, padded_vocab_size=257)
        model = make_talkative(GPTModel(config, padded_vocab_size=257, seed=5, params_dtype=torch.float32))
        flat = Config.from_flat({**dataclasses.asdict(config), "tokenizer_type": "ByteTokenizer"}).flat()
        save(
            made / name,
            3,
            whole_tensors(dict(model.named_parameters()), "model."),
            {"config": flat, "consumed_train_samples": 0},
            {},
        )
    return made


@pytest.fixture(scope="module")
def alone(folder):
    """Of each prompt in a process of its own, by model and sampling: the seed is that of its number."""
    found: dict[tuple[str, str], list[str]] = {}

    def rows(name, how):
        if (name, how) not in found:
            flags = [*words(folder, name), *SAMPLING[how], "--batch-size", 1]
            done = run_script(SCRIPT, *flags)
            assert done.returncode == 0, done.stderr
            found[name, how] = done.stdout.splitlines()
            assert len({json.loads(row)["text"] for row in found[name, how]}) == 5
        return found[name, how]

    return rows


def words(folder, name):
    prompts = ["--prompts", folder / "lines.txt", "--max-new-tokens", 12, "--stop", "a"]
    return ["--load", folder / name, *prompts, "--device", "cpu", "--json-lines"]


LAYOUTS = [
    ("llama", "greedy", 2, 1, 2),
    ("gpt", "sampled", 2, 2, 1),
    *(
        pytest.param(name, how, *layout, marks=pytest.mark.full)
        for name in MODELS
        for how in SAMPLING
        for layout in ((4, 2, 2), (2, 1, 1), (3, 1, 3), (4, 2, 1), (2, 2, 1), (2, 1, 2))
    ),
]


@pytest.mark.parametrize(("name", "how", "ranks", "tp", "pp"), LAYOUTS)
def test_over_ranks_output_is_that_of_one_process(folder, alone, name, how, ranks, tp, pp):
    """Line for line, written by rank 0; ranks that are left over share prompts out."""
    sizes = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp, "--batch-size", 2]
    done = ok(run_forked([*words(folder, name), *SAMPLING[how], *sizes], ranks=ranks, script=SCRIPT))
    assert [line for line in done.output.splitlines() if line.startswith("{")] == alone(name, how)


def test_what_is_wrong_is_said_by_one_rank_and_ends_all(folder):
    """Lines that only rank 0 has read, and what the tokenizer makes of them, together."""
    flags = [
        "--load",
        folder / "gpt",
        "--device",
        "cpu",
        "--pipeline-model-parallel-size",
        2,
        "--max-new-tokens",
        4,
    ]
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n{"q": 1}\n')
    done = run_forked([*flags, "--prompts", folder / "bad.jsonl", "--prompt", ""], ranks=2, script=SCRIPT)
    assert done.statuses == (2, 2)
    assert done.output.count("bad.jsonl:2: expected text") == 1
    assert done.output.count("--prompt holds no token") == 1
    assert len(done.output.splitlines()) == 2


@pytest.mark.full
def test_more_stages_than_layers(folder):
    flags = [*words(folder, "gpt"), "--pipeline-model-parallel-size", 4]
    done = run_forked(flags, ranks=4, script=SCRIPT)
    assert done.statuses == (2,) * 4
    assert "--pipeline-model-parallel-size 4: the model has 3 layers" in done.output


@pytest.mark.parametrize("name", ["gpt2", "llama3.2", "gemma", "qwen3"])
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    """Of prompts of unequal lengths in one batch, each against transformers alone; with its end of document."""
    theirs = saved_toy(name, tmp_path)
    model, prompts = our_model(tmp_path), [[5, 9, 2, 33, 7], [44], [3, 3, 8]]
    made = list(generate(model, prompts, 16, eod=1))
    for prompt, one in zip(prompts, made, strict=True):
        ids = torch.tensor([prompt])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        expected = out[0, len(prompt) :].tolist()
        assert one.ids + [1] * (one.finish_reason == "eod") == expected
    assert len({tuple(one.ids) for one in made}) == 3


@pytest.mark.parametrize(
    ("name", "ranks", "tp", "pp"),
    [
        ("llama3.2", 2, 1, 2),
        pytest.param("llama3.2", 4, 2, 2, marks=pytest.mark.full),
        pytest.param("gpt2", 4, 2, 2, marks=pytest.mark.full),
    ],
)
def test_a_hugging_face_folder_over_ranks_writes_what_transformers_writes(name, ranks, tp, pp, tmp_path):
    """Read by every rank as it is; its vocabulary of 61 ids is odd. Ids are written as numbers."""
    theirs, prompts = saved_toy(name, tmp_path), [[5, 9, 2, 33, 7], [44], [3, 3, 8]]
    words = [word for prompt in prompts for word in ("--prompt", " ".join(map(str, prompt)))]
    flags = ["--load", tmp_path, "--tokenizer-type", "NullTokenizer", "--vocab-size", 60, "--device", "cpu"]
    sizes = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]
    more = ["--greedy", "--max-new-tokens", 10, "--json-lines", "--batch-size", 2]
    done = ok(run_forked([*flags, *words, *sizes, *more], ranks=ranks, script=SCRIPT))
    rows = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    for prompt, row in zip(prompts, rows, strict=True):
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": 60}
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        assert [int(word) for word in row["text"].split()] == [i for i in out if i != 60]
    assert len({row["text"] for row in rows}) == 3
