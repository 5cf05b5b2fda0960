"""A run that begins with a model of others: the loss of transformers, steps, and transformers' own words after them."""

import json
import math
import shutil
import sys

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy as negative_log_likelihood

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from tests.harness import launch
from tests.harness.hugging_face import POSITIONS, TOYS, VOCAB, toy_model
from tools import generate
from tools.checkpoint import main as checkpoint

SAMPLE = torch.randint(VOCAB - 1, (POSITIONS,), generator=torch.Generator().manual_seed(2))
PIPELINE = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --zero-bubble-v-schedule"
).split()
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params".split()
LAYOUTS = {"tp 2 x pp 2": (4, PIPELINE), "fsdp 2": (2, FSDP)}
# What a run says by itself: nothing of the model. Its last id is the end of a document.
RUN = (
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2 --lr-decay-style constant "
    "--tokenizer-type NullTokenizer --vocab-size 60 --num-workers 0 --log-interval 1 --eval-iters 0 --split 1 "
    "--attention-dropout 0 --hidden-dropout 0 --save ck --save-interval 3 --data-path corpus"
).split()


def begin(name, folder):
    """A toy in folder/theirs, and a corpus of which every sample is SAMPLE and its first token. The model."""
    model = toy_model(name, layers=4, vocab=VOCAB)
    model.save_pretrained(folder / "theirs")
    with IndexedDatasetWriter(str(folder / "corpus"), dtype="uint16") as writer:
        writer.add_document(SAMPLE.tolist() * 30)
    return model


def first_loss(run):
    return float(launch.ok(run).losses()[1].split()[0])


def cross_entropy(model):
    with torch.no_grad():
        logits = model(SAMPLE[None]).logits[0]
    return negative_log_likelihood(logits, SAMPLE.roll(-1)).item()


def words_of(load, prompt, capsys, monkeypatch):
    """What tools/generate.py makes of it."""
    line = ["generate.py", "--load", str(load), "--prompt", " ".join(map(str, prompt)), "--greedy"]
    monkeypatch.setattr(sys, "argv", [*line, "--max-new-tokens", "8"])
    generate.main()
    return [int(word) for word in capsys.readouterr().out.split()]


SAMPLED = [("llama3.2", "tp 2 x pp 2"), ("gpt2", "fsdp 2")]
GRID = [(name, layout) for name in TOYS for layout in LAYOUTS]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "layout"),
    [case if case in SAMPLED else pytest.param(*case, marks=pytest.mark.full) for case in GRID],
)
def test_in_by_load_three_steps_and_out(name, layout, tmp_path, capsys, monkeypatch):
    theirs = begin(name, tmp_path)
    ranks, flags = LAYOUTS[layout]
    line = [*RUN, *flags, "--load", "theirs", "--finetune", "--use-checkpoint-args"]
    run = launch.run_forked(line, ranks=ranks, cwd=tmp_path)
    assert first_loss(run) == pytest.approx(cross_entropy(theirs), rel=1e-5)
    out = ["--hf", str(tmp_path / "back"), "--like", str(tmp_path / "theirs")]  # the architecture's name
    assert checkpoint(["export", "--load", str(tmp_path / "ck"), *out]) == 0
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(after) is type(theirs)
    assert cross_entropy(after) < cross_entropy(theirs), "it has learned"
    prompt, stop = SAMPLE[:5], {"eos_token_id": VOCAB - 1, "pad_token_id": VOCAB - 1}
    expected = after.generate(prompt[None], max_new_tokens=8, do_sample=False, **stop)[0].tolist()
    capsys.readouterr()
    assert words_of(tmp_path / "ck", prompt.tolist(), capsys, monkeypatch) == expected
    assert words_of(tmp_path / "back", prompt.tolist(), capsys, monkeypatch) == expected


@pytest.mark.grid
def test_a_restart_loop_begins_with_a_pretrained_model_and_survives_a_kill(tmp_path):
    """The same line again and again; what it saves is loaded without a flag of the model's origin."""
    begin("qwen2", tmp_path)
    line = [
        *RUN,
        "--pretrained-checkpoint",
        str(tmp_path / "theirs"),
        "--use-checkpoint-args",
        "--load",
        "ck",
    ]
    line += ["--train-iters", "4", "--save-interval", "2"]
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    line[line.index("corpus")] = str(tmp_path / "corpus")
    whole = launch.ok(launch.run_forked(line, cwd=tmp_path / "whole"))
    assert "as with --finetune" in whole.output
    with launch.forked(line, cwd=tmp_path / "killed") as ranks:
        ranks.wait_for("successfully saved checkpoint from iteration +2")
        ranks.kill()
    shutil.rmtree(tmp_path / "killed" / "ck" / "iter_0000004", ignore_errors=True)
    again = launch.ok(launch.run_forked(line, cwd=tmp_path / "killed"))
    assert again.losses() == {n: loss for n, loss in whole.losses().items() if n > 2}
    words = [word for word in line if "retrained" not in word and word != str(tmp_path / "theirs")]
    longer = [*words, "--train-iters", "5", "--override-opt_param-scheduler"]
    assert list(launch.ok(launch.run_forked(longer, cwd=tmp_path / "killed")).losses()) == [5]


def test_a_model_from_scratch_by_its_config_json(tmp_path):
    """Its checkpoint is loaded without the flag."""
    begin("phi3", tmp_path)
    run = launch.ok(launch.run_forked([*RUN, "--hf-config", "theirs"], cwd=tmp_path))
    assert set(run.losses()) == {1, 2, 3}
    assert first_loss(run) == pytest.approx(math.log(VOCAB), abs=0.1)
    more = ["--load", "ck", "--use-checkpoint-args", "--train-iters", "4", "--override-opt_param-scheduler"]
    assert list(launch.ok(launch.run_forked([*RUN, *more], cwd=tmp_path)).losses()) == [4]
    assert checkpoint(["export", "--load", str(tmp_path / "ck"), "--hf", str(tmp_path / "back")]) == 0
    sizes = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "back")]
    assert {
        key: sizes[0][key] for key in ("hidden_size", "vocab_size", "intermediate_size")
    }.items() <= sizes[1].items()


def test_a_conversion_by_ranks_changes_no_bit(tmp_path):
    begin("gemma", tmp_path)
    line = "--load theirs --finetune --use-checkpoint-args --ckpt-convert-format torch_dist --ckpt-convert-save out"
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 60"
    run = launch.run_forked([*line.split(), *tokenizer.split(), *FSDP], ranks=2, cwd=tmp_path)
    assert "> converted checkpoint: theirs -> out/torch_dist" in launch.ok(run).output
    assert checkpoint(["compare", str(tmp_path / "theirs"), str(tmp_path / "out" / "torch_dist")]) == 0
    names = json.loads((tmp_path / "out/torch_dist/iter_0000000/manifest.json").read_text())["tensors"]
    assert not any(name.startswith("optimizer.") for name in names)


def test_settings_that_contradict_config_json_are_named(tmp_path):
    begin("llama2", tmp_path)
    shape = "--num-layers 4 --hidden-size 32 --ffn-hidden-size 56 --num-attention-heads 4 --swiglu "
    shape += "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    shape += "--untie-embeddings-and-output-weights"
    line = [
        *RUN,
        *shape.split(),
        "--load",
        "theirs",
        "--finetune",
        "--rotary-base",
        "5000",
        "--train-iters",
        "1",
    ]
    run = launch.ok(launch.run_forked([*line, "--max-position-embeddings", "32"], cwd=tmp_path))
    told = "WARNING: --finetune goes on from weights of another model: rotary_base: checkpoint 10000, this run 5000"
    assert told in run.output
    misfit = launch.run_forked([*line, "--ffn-hidden-size", "64", "--num-layers", "5"], cwd=tmp_path)
    assert misfit.status == 3
    assert "num_layers: checkpoint 4, this run 5" in misfit.output
    assert "ffn_hidden_size: checkpoint 56, this run 64" in misfit.output
    assert "expected shape (128, 32), found (112, 32)" in misfit.output
    assert "tensors that this run needs are missing: model.decoder.layers.4." in misfit.output
