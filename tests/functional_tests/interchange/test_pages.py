"""The commands of README's "In and out" and of docs/evaluation.md run as they are printed."""

import json
import re
import shlex

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from tests.harness.hugging_face import save_character_tokenizer, saved_toy
from tests.harness.launch import ROOT, run_forked
from tools.commands import COMMANDS

README = (ROOT / "README.md").read_text().split("## In and out\n")[1]
EVALUATION = (ROOT / "docs" / "evaluation.md").read_text()


def commands(page):
    """The words of each line of the page's first block."""
    block = re.search(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]


def run(words, cwd):
    """As a shell would run it, without starting Python anew."""
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "launch" in words else 1
    words = words[words.index("--") + 1 :] if "launch" in words else words[1:]
    script, flags = (COMMANDS[words[0]].script, words[1:]) if words[0] in COMMANDS else (words[0], words[1:])
    return run_forked(flags, script=script, ranks=ranks, cwd=cwd)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where README's commands have run: with a toy in the place of Llama."""
    made = tmp_path_factory.mktemp("pages")
    saved_toy("odd", made / "llama-3-8b")
    save_character_tokenizer(made / "llama-3-8b")
    (made / "held-out.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("Ein Satz.", "x", "no end"))
    )
    (made / "questions.jsonl").write_text('{"prompt": "Was?"}\n{"prompt": "Ein Satz"}\n')
    with IndexedDatasetWriter(str(made / "corpus_text_document"), np.dtype("uint16")) as writer:
        writer.add_document(np.arange(5, 40), [35])
    return made


def test_commands_of_the_readme(folder):
    lines = commands(README)
    outputs = []
    for words in lines:
        done = run(words, folder)
        assert done.status == 0, f"{shlex.join(words)}\n{done.output}"
        outputs.append(done.output)
    _, inspected, _, compared, generated, evaluated, launched = outputs
    assert "vocabulary 101" in inspected
    assert "every tensor is the same, bit for bit" in compared
    answers = [json.loads(line) for line in generated.splitlines() if line.startswith("{")]
    assert [answer["prompt"] for answer in answers] == ["Was?", "Ein Satz"]
    alone, shared = (
        {
            name: float(text)
            for name, text in re.findall(
                r"^(predicted tokens|nats per token) +([0-9.]+)$", output, re.MULTILINE
            )
        }
        for output in (evaluated, launched)
    )
    assert alone["predicted tokens"] == json.loads(evaluated.splitlines()[-1])["tokens"] == 8 + 0 + 5
    assert shared == pytest.approx(alone, abs=1e-4)


def test_commands_of_the_page_on_evaluation(folder):
    if not (folder / "checkpoints").exists():
        assert run(commands(README)[0], folder).status == 0
    text, corpus, launched, tasks = commands(EVALUATION)
    assert [text[2:], launched] == [
        words[2:] if words[1] == "evaluate" else words for words in commands(README)[-2:]
    ]
    assert run(corpus, folder).status == 0
    (folder / "my_tasks").mkdir()
    done = run(tasks, folder)  # tests/wheels has the package
    assert done.status == 2
    assert "pip install 'megatron-zero[eval]'" in done.output
