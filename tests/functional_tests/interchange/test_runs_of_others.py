"""A run that begins with a model of others: the loss of transformers, steps, and transformers' own words after them."""

import json
import os
import signal
import sys

import pytest
import torch
import torch.nn.functional as F
import transformers

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from tests.harness import launch
from tests.harness.hugging_face import POSITIONS, TOYS, toy_model
from tools import generate
from tools.checkpoint import main as checkpoint

VOCAB = 62  # one id is the end of a document; tensor parallel ranks share them
SAMPLE = torch.randint(VOCAB - 1, (POSITIONS,), generator=torch.Generator().manual_seed(2))
PIPELINE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-bubble-v-schedule".split()
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params".split()
LAYOUTS = {"tp 2 x pp 2": (4, PIPELINE), "fsdp 2": (2, FSDP)}
# What a run says by itself: nothing of the model.
RUN = (
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2 --lr-decay-style constant "
    "--tokenizer-type NullTokenizer --vocab-size 61 --num-workers 0 --log-interval 1 --eval-iters 0 --split 1 "
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
    return F.cross_entropy(logits, SAMPLE.roll(-1)).item()


def words_of(load, prompt, capsys, monkeypatch):
    """What tools/generate.py makes of it."""
    line = ["generate.py", "--load", str(load), "--prompt", " ".join(map(str, prompt)), "--greedy"]
    monkeypatch.setattr(sys, "argv", [*line, "--max-new-tokens", "8"])
    generate.main()
    return [int(word) for word in capsys.readouterr().out.split()]


SAMPLED = [("llama3.2", "tp 2 x pp 2"), ("gpt2", "fsdp 2")]
GRID = [(name, layout) for name in TOYS for layout in LAYOUTS]


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
    assert checkpoint(["export", "--load", str(tmp_path / "ck"), "--hf", str(tmp_path / "back")]) == 0
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(after) is type(theirs)
    assert cross_entropy(after) < cross_entropy(theirs), "it has learned"
    prompt, stop = SAMPLE[:5], {"eos_token_id": VOCAB - 1, "pad_token_id": VOCAB - 1}
    expected = after.generate(prompt[None], max_new_tokens=8, do_sample=False, **stop)[0].tolist()
    capsys.readouterr()
    assert words_of(tmp_path / "ck", prompt.tolist(), capsys, monkeypatch) == expected
    assert words_of(tmp_path / "back", prompt.tolist(), capsys, monkeypatch) == expected
