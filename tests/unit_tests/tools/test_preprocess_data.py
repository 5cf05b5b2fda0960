import itertools
import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset_reader import IndexedDataset
from tests.harness.scripts import run_script
from tools.preprocessing import job, sources


def run(*words):
    return run_script("tools/preprocess_data.py", *words)


def documents(prefix):
    """Text of each document, end-of-document tokens as \x00."""
    with IndexedDataset(str(prefix)) as corpus:
        bounds = corpus.index.boundaries.tolist()
        rows = []
        for first, last in itertools.pairwise(bounds):
            ids = np.concatenate([np.zeros(0, int), *(corpus.get(i) for i in range(first, last))])
            rows.append(bytes(0 if i == 256 else int(i) for i in ids).decode())
        return rows


BYTES = ("--tokenizer-type", "ByteTokenizer")


def write_lines(path, count=500):
    rng = np.random.default_rng(0)
    with open(path, "w") as file:
        for i in range(count):
            text = f"document {i} " + "é" * int(rng.integers(0, 200))
            file.write(
                json.dumps({"text": text if i % 17 else "", "title": f"t{i}"})
                + ("\n\n" if i % 50 == 0 else "\n")
            )


def test_jsonl(tmp_path):
    rows = [
        {"text": "héllo", "title": "a"},
        {"text": "", "title": "b"},
        {"text": ["x", "", "yz"], "title": "c"},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))  # no newline at the end
    done = run(
        "--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "sub" / "o", *BYTES, "--append-eod",
        "--json-keys", "text", "title",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "sub" / "o_text_document") == ["héllo\0", "", "xyz\0"]
    assert documents(tmp_path / "sub" / "o_title_document") == ["a\0", "b\0", "c\0"]
    with IndexedDataset(str(tmp_path / "sub" / "o_text_document")) as corpus:
        assert corpus.lengths.tolist() == [7, 1, 3]
        assert corpus.index.dtype == np.uint16
    assert "3 documents, 17 tokens" in done.stdout
    assert sorted(os.listdir(tmp_path / "sub")) == sorted(
        f"o_{key}_document.{ending}" for key in ("text", "title") for ending in ("bin", "idx", "sha256.json")
    )


def test_tree_and_text(tmp_path):
    tree = tmp_path / "tree"
    for name, content in {"b.py": "B", "a/z.py": "Z", "a.py": "A", "skip/c.py": "C", "d.txt": "D"}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(content)
    done = run(
        "--input", tree, "--suffix", ".py", "--exclude", "skip", "--output-prefix", tmp_path / "t", *BYTES
    )
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "t_text_document") == ["Z", "A", "B"]
    done = run(
        "--input",
        tree / "*.txt",
        tree / "b.py",
        "--format",
        "text",
        "--output-prefix",
        tmp_path / "u",
        *BYTES,
    )
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "u_text_document") == ["D", "B"]
    (tmp_path / "l.txt").write_text("one\r\n\ntwo")
    done = run("--input", tmp_path / "l.txt", "--format", "lines", "--output-prefix", tmp_path / "v", *BYTES)
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "v_text_document") == ["one", "", "two"]


def build(tmp_path, name, workers):
    from megatron.core.tokenizers.tokenizer import ByteTokenizer

    found = sources.find_sources([str(tmp_path / "in.jsonl")], "auto", [], [])
    work = job.Job(tuple(found), str(tmp_path / name), ByteTokenizer, append_eod=True, workers=workers)
    done = job.run_job(work)
    return done, [(tmp_path / f"{name}_text_document{e}").read_bytes() for e in (".bin", ".idx")]


def test_same_bytes_for_any_workers_and_chunks(tmp_path, monkeypatch):
    write_lines(tmp_path / "in.jsonl", 150)
    done, whole = build(tmp_path, "whole", 1)
    assert done.documents == 150
    assert done.empty_documents == 9
    for workers, chunk in ((1, 1000), (2, 1000), (3, 7777), (2, 3001)):
        monkeypatch.setattr(sources, "CHUNK_BYTES", chunk)
        again, content = build(tmp_path, f"w{workers}c{chunk}", workers)
        assert content == whole
        assert again == done


def test_goes_on_after_a_failure(tmp_path, monkeypatch):
    write_lines(tmp_path / "in.jsonl")
    _, whole = build(tmp_path, "whole", 1)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 4000)
    made = []
    make = job._make_part

    def failing(work, tokenizer, index, chunk):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(index)
        return make(work, tokenizer, index, chunk)

    monkeypatch.setattr(job, "_make_part", failing)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, "cut", 1)
    assert made == [0, 1, 2, 3, 4]
    # A part that was damaged meanwhile is made again.
    (tmp_path / "cut.parts" / "00000002-0.bin").write_bytes(b"x")
    again = []
    monkeypatch.setattr(job, "_make_part", lambda *a: again.append(a[2]) or make(*a))
    done, content = build(tmp_path, "cut", 1)
    assert content == whole
    assert done.documents == 500
    assert again[:2] == [2, 5]
    assert not os.path.exists(tmp_path / "cut.parts")


def test_changed_input_starts_anew(tmp_path, monkeypatch):
    write_lines(tmp_path / "in.jsonl", 100)

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(job.shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, "o", 1)
    monkeypatch.undo()
    write_lines(tmp_path / "in.jsonl", 120)
    _, content = build(tmp_path, "o", 1)
    assert content == build(tmp_path, "fresh", 1)[1]


@pytest.mark.parametrize("parts", [1, 10])
def test_killed_and_run_again(tmp_path, monkeypatch, parts):
    """SIGKILL once so many parts are there; the same job then gives the same bytes."""
    write_lines(tmp_path / "in.jsonl", 600)
    _, whole = build(tmp_path, "whole", 1)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 4000)
    process = multiprocessing.get_context("fork").Process(target=build, args=(tmp_path, "cut", 1))
    process.start()
    while process.is_alive() and len(list(tmp_path.glob("cut.parts/*.bin"))) < parts:
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "cut_text_document.idx").exists()
    assert build(tmp_path, "cut", 1)[1] == whole


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON"),
        ('{"title": 1}', "line 3: no key 'text'; it has 'title'"),
        ('{"text": 5}', "line 3: key 'text': expected text"),
        ("[1]", "line 3: expected a JSON object, found list"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_line(tmp_path, monkeypatch, line, message, workers):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n' + line + "\n")
    monkeypatch.setattr(sources, "CHUNK_BYTES", 20)
    with pytest.raises(sources.DataError, match=message) as error:
        build(tmp_path, "o", workers)
    assert str(path) in str(error.value)
    assert not os.path.exists(tmp_path / "o_text_document.idx")


def test_exit_statuses(tmp_path):
    good = tmp_path / "in.jsonl"
    good.write_text('{"text": "a"}\n')
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n")
    prefix = ("--output-prefix", tmp_path / "o")
    assert run("--input", bad, *prefix, *BYTES).returncode == 4
    assert run("--input", tmp_path / "absent", *prefix, *BYTES).returncode == 4
    assert run("--input", tmp_path, *prefix, *BYTES).returncode == 4  # a folder without --suffix
    assert run("--input", good, *prefix, *BYTES, "--split-sentences").returncode == 2
    assert run("--input", good, *prefix, *BYTES, "--workers", "0").returncode == 2
    missing = run("--input", good, *prefix, "--tokenizer-type", "HuggingFaceTokenizer")
    assert missing.returncode == 2
    assert "--tokenizer-model" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_output_that_cannot_be_written(tmp_path):
    good = tmp_path / "in.jsonl"
    good.write_text('{"text": "a"}\n')
    for ending in ("bin", "idx"):
        (tmp_path / f"{ending}_text_document.{ending}").mkdir()
    (tmp_path / "locked.lock").mkdir()  # only seen when it is opened
    for prefix, path, why in (
        (good / "o", good, "Not a directory"),
        (good / "deep" / "o", good, "Not a directory"),
        (tmp_path / "bin", tmp_path / "bin_text_document.bin", "Is a directory"),
        (tmp_path / "idx", tmp_path / "idx_text_document.idx", "Is a directory"),
        (tmp_path / "locked", tmp_path / "locked.lock", "is a folder, not a regular file"),
    ):
        done = run("--input", good, "--output-prefix", prefix, *BYTES)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"error: --output-prefix {path}: {why}" in done.stderr
        assert "Traceback" not in done.stderr


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"1 2 \xff")
    done = run("--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "o", *BYTES)
    assert done.returncode == 0
    with IndexedDataset(str(tmp_path / "o_text_document")) as corpus:
        assert corpus.get(0).tolist() == [49, 32, 50, 32, 255]
