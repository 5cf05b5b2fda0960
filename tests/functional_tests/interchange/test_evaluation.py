"""tools/evaluate.py: the perplexity of transformers under every layout of ranks, and what it refuses."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.tokenizers.build import build_tokenizer
from tests.harness import launch
from tests.harness.hugging_face import save_character_tokenizer, saved_toy
from tests.harness.ranks import run_ranks
from tools import checkpoint, evaluate, inference
from tools.evaluation import perplexity
from tools.evaluation.documents import of_texts
from tools.evaluation.perplexity import predict
from tools.evaluation.scorer import Scorer

LENGTH = 24
TEXTS = [
    "Das Caf\u00e9 ist gro\u00df.\nEin zweiter Satz, der bis in ein drittes Fenster reicht.",
    "x",
    "",
    "no end",
]


def main(*words):
    """Its exit status."""
    saved, sys.argv = sys.argv, ["evaluate.py", *map(str, words)]
    try:
        evaluate.main()
    except SystemExit as ended:
        return ended.code
    finally:
        sys.argv = saved
    return 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """theirs: transformers' model of 101 ids. ours: its import. hf: its folder. texts: files of one and many documents.
    losses: transformers' of every token but a document's first."""
    folder = tmp_path_factory.mktemp("evaluation")
    theirs = saved_toy("odd", folder / "hf")
    save_character_tokenizer(folder / "hf")
    assert checkpoint.main(["import", "--hf", str(folder / "hf"), "--save", str(folder / "ours")]) == 0
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS))
    (folder / "one.txt").write_text(TEXTS[0])
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder / "hf"))
    losses = [loss for text in TEXTS for loss in expected(theirs, tokenizer.tokenize(text))]
    return SimpleNamespace(
        theirs=theirs, folder=folder, ours=folder / "ours", tokenizer=tokenizer, losses=losses
    )


def expected(theirs, ids):
    """Nats of each token but the first, in windows of LENGTH inputs."""
    found = []
    for begin in range(0, len(ids) - 1, LENGTH):
        window = torch.tensor(ids[begin : begin + LENGTH + 1])
        with torch.no_grad():
            logits = theirs(window[None, :-1]).logits[0]
        found += F.cross_entropy(logits.double(), window[1:], reduction="none").tolist()
    return found


def assert_theirs(figures, model, losses, text):
    nats = sum(losses) / len(losses)
    assert figures["tokens"] == len(losses)
    assert figures["nats_per_token"] == pytest.approx(nats, abs=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(nats), rel=1e-5)
    assert figures["bits_per_byte"] == pytest.approx(sum(losses) / math.log(2) / len(text.encode()), rel=1e-5)


def flags(model, *words):
    return ["--load", model.ours, "--device", "cpu", "--seq-length", LENGTH, "--json", *words]


def test_one_process(model, capsys):
    assert main(*flags(model, "--text", model.folder / "t.jsonl", "--micro-batch-size", 3)) == 0
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])
    assert list(figures) == ["tokens", "nats_per_token", "perplexity", "bits_per_byte"]
    assert_theirs(figures, model, model.losses, "".join(TEXTS))
    assert f"predicted tokens  {len(model.losses)}\n" in out


def test_a_file_is_a_document_that_may_begin_with_bos(model, capsys):
    assert main(*flags(model, "--text", model.folder / "one.txt", "--prepend-bos")) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    ids = [model.tokenizer.bos, *model.tokenizer.tokenize(TEXTS[0])]
    assert ids == model.tokenizer.tokenize_whole(TEXTS[0])
    assert_theirs(figures, model, expected(model.theirs, ids), TEXTS[0])


LAYOUTS = [{"tp": 4}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}]


def of_layouts(ctx, ours, text, tokenizer):
    """The figures under each layout, on this rank."""
    torch.set_num_threads(1)
    config, load = inference.open_checkpoint(str(ours), None)
    config = config.replace(seq_length=LENGTH)
    found = []
    for layout in LAYOUTS:
        ps = ctx.make_ps(**layout)
        scorer = Scorer(inference.filled_model(config, load, ps), ps)
        documents = of_texts([str(text)], tokenizer)
        found.append(predict(scorer, documents, length=LENGTH, batch_size=2).figures())
    return found


def test_every_layout_has_the_same_figures(model):
    """101 rows over four tensor parallel ranks: 26, 26, 26 and 23."""
    ranks = run_ranks(of_layouts, 4, model.ours, model.folder / "t.jsonl", model.tokenizer, timeout=120)
    assert all(rank == ranks[0] for rank in ranks)
    for figures in ranks[0]:
        assert_theirs(figures, model, model.losses, "".join(TEXTS))


def tokenized(ctx, ours, text, tokenizer):
    """What this of two data parallel ranks tokenizes, with each document alone and shared out by windows; the figures;
    and what is raised where one rank cannot tokenize."""
    torch.set_num_threads(1)
    config, load = inference.open_checkpoint(str(ours), None)
    ps = ctx.make_ps(dp=2)
    scorer = Scorer(inference.filled_model(config.replace(seq_length=LENGTH), load, ps), ps)
    real, found = tokenizer.tokenize, []

    def tokenize(text):
        if text == unfit:
            raise ValueError("cannot be tokenized")
        seen.append(text)
        return real(text)

    tokenizer.tokenize = tokenize
    for long, bad in ((99, None), (9, None), (99, TEXTS[3])):
        perplexity.LONG, unfit, seen = long, bad, []
        try:
            documents = of_texts([str(text)], tokenizer)
            found.append([seen, predict(scorer, documents, length=LENGTH, batch_size=2).figures()])
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_rank_tokenizes_its_share_alone(model):
    first, second = run_ranks(tokenized, 2, model.ours, model.folder / "t.jsonl", model.tokenizer)
    assert [rank[0][0] for rank in (first, second)] == [TEXTS[0::2], TEXTS[1::2]]
    assert [rank[1][0] for rank in (first, second)] == [TEXTS[0::2], [TEXTS[0], *TEXTS[1::2]]]
    for rank in (first, second):
        for _, figures in rank[:2]:
            assert_theirs(figures, model, model.losses, "".join(TEXTS))
        assert rank[2] == f"{model.folder / 't.jsonl'}:7: cannot be tokenized", "by the second rank alone"


def test_a_launch_prints_one_object(model):
    words = flags(model, "--text", model.folder / "t.jsonl", "--tensor-model-parallel-size", 2)
    done = launch.ok(launch.run_forked(words, ranks=2, script="tools/evaluate.py", cwd=model.folder))
    (line,) = [line for line in done.output.splitlines() if line.startswith("{")]
    assert_theirs(json.loads(line), model, model.losses, "".join(TEXTS))


def corpus(model, name, *documents):
    with IndexedDatasetWriter(str(model.folder / name), np.dtype("uint16")) as writer:
        for ids in documents:
            writer.add_document(np.array(ids), [len(ids)])
    return model.folder / name


def test_documents_of_a_corpus(model, capsys):
    eod, tokenize = model.tokenizer.eod, model.tokenizer.tokenize
    ids = [[*tokenize(text), eod] for text in TEXTS]
    prefix = corpus(model, "known", *ids)
    assert main(*flags(model, "--data-path", prefix)) == 0
    losses = [loss for one in ids for loss in expected(model.theirs, one)]
    assert_theirs(json.loads(capsys.readouterr().out.splitlines()[-1]), model, losses, "".join(TEXTS))
    strange = [*tokenize("a"), 98, 7]  # <unk>: which bytes it was made of is not known
    assert main(*flags(model, "--data-path", prefix, corpus(model, "strange", strange))) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["tokens"], figures["bits_per_byte"]) == (len(losses) + 2, None)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--text nowhere.txt --seq-length 0", 2, ["--text nowhere.txt: no such file", "--seq-length 0: must be"]),
        ("--load /nowhere --text one.txt", 3, ["no checkpoint in /nowhere"]),
        ("--data-path nowhere", 4, ["nowhere.idx: no such file"]),
        ("--text empty.txt", 2, ["--text: 1 document, none of more than one token: nothing is predicted"]),
        ("--text bad.jsonl", 2, ['bad.jsonl:2: expected text in the field "text"']),
        ("--text latin.txt", 2, ["latin.txt: not UTF-8 text"]),
        ("--text one.txt --tokenizer-type ByteTokenizer", 2, ["the tokenizer has 257 ids, the model 101"]),
        ("--data-path large", 2, ["document 0: has ids from 5 to 300, the model 101 ids"]),
        ("--text one.txt --tensor-model-parallel-size 2", 2, ["do not divide 1 rank"]),
        ("--text one.txt --limit 3", 2, ["--limit: goes with --tasks"]),
        ("--data-path large --prepend-bos", 2, ["--prepend-bos: goes with --text"]),
        ("--tasks arc --include-path nowhere", 2, ["--include-path nowhere: no such folder"]),
        ("--tasks arc_easy", 2, ["pip install 'megatron-zero[eval]'"]),
        ("--text one.txt --seq-length 99999999999", 2, ["logits take", "lower either"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(words, status, message, model, monkeypatch, capsys):
    monkeypatch.chdir(model.folder)
    (model.folder / "empty.txt").touch()
    (model.folder / "bad.jsonl").write_text('{"text": "a"}\n{"words": "a"}\n')
    (model.folder / "latin.txt").write_bytes(b"caf\xe9")
    corpus(model, "large", [5, 300])
    assert main("--device", "cpu", "--load", "ours", *words.split()) == status
    told = capsys.readouterr()
    assert not told.out
    for one in message:
        assert one in told.err


def test_learned_positions_end(tmp_path, capsys):
    saved_toy("gpt2", tmp_path / "hf")
    assert checkpoint.main(["import", "--hf", str(tmp_path / "hf"), "--save", str(tmp_path / "ours")]) == 0
    (tmp_path / "t.txt").write_text("5 6 7")
    words = ["--load", tmp_path / "ours", "--text", tmp_path / "t.txt", "--device", "cpu", "--seq-length"]
    assert main(*words, 33) == 2
    assert "--seq-length 33: the model has 32 learned positions" in capsys.readouterr().err
    assert main(*words, 32) == 0
