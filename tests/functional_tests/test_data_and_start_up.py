"""Mistakes that show when a run starts, or when it meets its data: one clear message, its status, no traceback."""

import os

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.training.run.data import first_difference
from tests.harness import launch

FAULTY = "tests/functional_tests/trainers/faulty.py"


def write_corpus(folder, name="corpus", documents=60, vocab_size=127, seed=0):
    dice = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(folder / name), np.dtype("<u2")) as writer:
        for _ in range(documents):
            writer.add_document(dice.integers(0, vocab_size, dice.integers(10, 60)))
    return name


def flags(corpus="corpus", *more):
    return [*launch.TINY_DATA, "--train-iters", "4", "--data-path", corpus, "--split", "100,0,0", *more]


def refused(run, status, folder=None):
    """folder: where the run was started; None: it was refused before it had a folder to leave a record in."""
    launch.ended(run, status)
    assert "Traceback" not in run.output
    if folder is None:
        return run.output
    record = launch.exit_record(folder)
    assert record["status"] == status
    assert not record["requeue"]
    return run.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_truncated_index(tmp_path, ranks):
    write_corpus(tmp_path)
    path = tmp_path / "corpus.idx"
    path.write_bytes(path.read_bytes()[:-9])
    output = refused(launch.run_forked(flags(), ranks=ranks, cwd=tmp_path), 4, tmp_path)
    assert "corpus.idx" in output
    assert "expected" in output
    assert "corpus.idx" in launch.exit_record(tmp_path)["reason"]  # whichever rank wrote it


def test_corpus_that_is_not_there(tmp_path):
    output = refused(launch.run_forked(flags("nowhere"), cwd=tmp_path), 4, tmp_path)
    assert "nowhere.idx" in output


def test_shorter_data_file(tmp_path):
    write_corpus(tmp_path)
    path = tmp_path / "corpus.bin"
    path.write_bytes(path.read_bytes()[:-10])
    assert "corpus.bin" in refused(launch.run_forked(flags(), cwd=tmp_path), 4, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("more", [(), ("--num-workers", "2")])
def test_token_out_of_range(tmp_path, more):
    write_corpus(tmp_path, vocab_size=300)  # a corpus of another tokenizer
    output = refused(launch.run_forked(flags("corpus", *more), cwd=tmp_path), 4, tmp_path)
    assert "corpus" in output
    assert "128" in output


@pytest.mark.grid
def test_file_that_shrinks_under_the_run(tmp_path):
    write_corpus(tmp_path)
    slow = flags("corpus", "--train-iters", "400", "--slow-s", "0.05")
    with launch.forked(slow, script=FAULTY, cwd=tmp_path) as group:
        group.wait_for("iteration        2/")
        with open(tmp_path / "corpus.bin", "r+b") as file:
            file.truncate(20)
        output = refused(group.wait(), 4, tmp_path)
    assert "corpus.bin" in output


def test_missing_tokenizer_file(tmp_path):
    words = flags("corpus", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "no/such.json")
    words = [word for word in words if word not in ("--vocab-size", "127")]
    run = launch.ended(launch.run_forked(words, cwd=tmp_path), 2)
    assert "not found: --tokenizer-model no/such.json" in run.output
    assert "Traceback" not in run.output


def test_damaged_tokenizer_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    words = flags("corpus", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "tokenizer.json")
    words = [word for word in words if word not in ("--vocab-size", "127")]
    assert "tokenizer.json" in refused(launch.run_forked(words, cwd=tmp_path), 4)
    assert os.listdir(tmp_path) == ["tokenizer.json"]


@pytest.mark.grid
def test_wrong_flags_under_torchrun(tmp_path):
    """Said once, all at once, before torch; no rank prints a traceback of ours."""
    words = [
        *launch.TINY,
        "--train-iters",
        "4",
        "--num-attention-heads",
        "5",
        "--clip-gradd",
        "1",
        "--fp16",
        "--bf16",
    ]
    run = launch.run(words, ranks=2, cwd=tmp_path)
    assert run.status != 0
    assert run.output.count("configuration: 3 problems") == 1
    assert "--clip-grad" in run.output
    assert 'pretrain_gpt.py", line' not in run.output
    alone = launch.run(words, cwd=tmp_path)
    assert alone.status == 2
    assert "Traceback" not in alone.output


def test_ranks_started_differently(tmp_path):
    run = launch.run_forked(
        [*launch.TINY, "--train-iters", "4"],
        ranks=2,
        script=FAULTY,
        cwd=tmp_path,
        rank_env=lambda rank: {"LR_OF_RANK_1": "0.005"},
    )
    output = refused(run, 2)
    assert not list(tmp_path.iterdir())
    assert "min_lr: rank 1 has 0.005, rank 0 0.0" in output
    assert output.count("the ranks were not started alike") == 1


def test_vocabulary_larger_than_its_padding(tmp_path):
    words = [
        *launch.TINY,
        "--train-iters",
        "4",
        "--padded-vocab-size",
        "64",
        "--tokenizer-type",
        "ByteTokenizer",
    ]
    words = [word for word in words if word not in ("--vocab-size", "127")]
    assert "--padded-vocab-size 64" in launch.ended(launch.run_forked(words, cwd=tmp_path), 2).output


def test_data_that_ends_too_early(tmp_path):
    """A provider that returns less than it was asked for."""
    words = [*launch.TINY, "--train-iters", "400", "--short-data", "24"]
    output = refused(launch.run_forked(words, script=FAULTY, cwd=tmp_path), 4, tmp_path)
    assert "the training data has 24 samples" in output
    assert launch.exit_record(tmp_path)["iteration"] == 0  # told before training, not after it


@pytest.mark.grid
def test_blends_and_several_validation_sets(tmp_path):
    for seed, name in enumerate("abc"):
        write_corpus(tmp_path, name, seed=seed)
    common = [*launch.TINY_DATA, "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "2"]
    weighted = launch.ok(
        launch.run_forked(
            [*common, "--data-path", "0.7", "a", "0.3", "b", "--split", "8,1,1"], ranks=2, cwd=tmp_path
        )
    )
    assert list(weighted.losses()) == [1, 2, 3, 4]
    several = [
        *common, "--train-data-path", "a", "--valid-data-path", "b", "c", "--test-data-path", "c",
        "--multiple-validation-sets", "--full-validation",
    ]  # fmt: skip
    run = launch.ok(launch.run_forked(several, ranks=2, cwd=tmp_path))
    for line in (
        "validation-0 loss at iteration 2 |",
        "validation-1 loss at iteration 4 on validation set |",
    ):
        assert line in run.output
    assert "validation loss at iteration 4 on test set |" in run.output
    lines = [line for line in launch.metrics_lines(tmp_path) if "lm loss validation-1" in line]
    assert [line["iteration"] for line in lines] == [2, 4, 4]
    assert lines[1]["lm loss validation-1"] == lines[2]["lm loss validation-1"]  # all of the set, both times


@pytest.mark.grid
def test_full_validation_reads_all_of_one_set_every_time(tmp_path):
    write_corpus(tmp_path, documents=80)
    words = [*launch.TINY_DATA, "--train-iters", "4", "--data-path", "corpus", "--split", "6,4,0"]
    words += "--eval-interval 1 --eval-iters 1 --full-validation --lr 0 --min-lr 0 --weight-decay 0".split()
    launch.ok(launch.run_forked([*words, "--dataloader-type", "cyclic"], cwd=tmp_path))
    values = [
        line["lm loss validation"] for line in launch.metrics_lines(tmp_path) if "lm loss validation" in line
    ]
    assert len(values) == 5
    assert len(set(values)) == 1  # the same samples, and weights that do not move


@pytest.mark.grid
def test_iterations_to_skip(tmp_path):
    words = [*launch.TINY, "--train-iters", "5", "--iterations-to-skip", "2", "3", "--save", "ck"]
    run = launch.ok(launch.run_forked([*words, "--save-interval", "1"], ranks=2, cwd=tmp_path))
    assert list(run.losses()) == [1, 4, 5]
    assert "skipped samples:           16" in run.output
    assert launch.digests(tmp_path / "ck", 1) == launch.digests(tmp_path / "ck", 3)
    plain = launch.ok(launch.run_forked([*launch.TINY, "--train-iters", "5"], ranks=2, cwd=tmp_path))
    assert run.losses()[4] != plain.losses()[4]


@pytest.mark.grid
def test_resume_on_other_data_is_said(tmp_path):
    """A changed corpus under the same name, and an unchanged one."""
    write_corpus(tmp_path)
    saving = flags("corpus", "--save", "ck", "--load", "ck", "--save-interval", "2")
    launch.ok(launch.run_forked([*saving, "--exit-interval", "2"], cwd=tmp_path))
    same = launch.ok(launch.run_forked([*saving, "--exit-interval", "3"], cwd=tmp_path))
    assert "training data is not the checkpoint's" not in same.output
    write_corpus(tmp_path, seed=1)
    other = launch.ok(launch.run_forked(saving, cwd=tmp_path))
    assert "training data is not the checkpoint's (corpus." in other.output


def test_first_difference_of_data_descriptions():
    saved = {"weights": [0.5, 0.5], "members": [{"prefix": "a"}, {"prefix": "b"}]}
    assert first_difference(saved, {**saved}) is None
    assert first_difference(saved, {**saved, "weights": [0.4, 0.6]}) == "weights[0]: saved 0.5, now 0.4"
    other = {**saved, "members": [{"prefix": "a"}, {"prefix": "c"}]}
    assert first_difference(saved, other) == "members[1].prefix: saved 'b', now 'c'"


@pytest.mark.grid
def test_too_little_data_is_told_at_the_start(tmp_path):
    """A blend without weights takes each corpus once; without evaluations nothing is asked of the validation data."""
    for name in ("a", "b"):
        write_corpus(tmp_path, name, documents=20)
    blend = [*launch.TINY_DATA, "--data-path", "a", "b", "--split", "80,20,0", "--train-iters", "40"]
    output = refused(launch.run_forked(blend, cwd=tmp_path), 4, tmp_path)
    assert "the training data has" in output
    assert "asks for 320" in output
    assert "iteration        1/" not in output
    few = [*blend, "--train-iters", "2", "--dataloader-type", "cyclic"]
    launch.ok(launch.run_forked(few, cwd=tmp_path))
