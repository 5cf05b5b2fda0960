"""Row D3 of the fault matrix: bad caches are rebuilt, builders do not disturb each other, no pickle."""

import hashlib
import json
import logging
import multiprocessing
import os

import numpy as np
import pytest

from megatron.core.datasets.index_cache import IndexCache

KEY = {"class": "GPTDataset", "path_prefix": "p", "index_split": "train", "random_seed": 1}
CORPUS = {"idx_sha256": "abc"}


class Build:
    def __init__(self, value=3):
        self.calls = 0
        self.value = value

    def __call__(self):
        self.calls += 1
        yield "document_index", [np.full(4, self.value, dtype=np.int32)]
        yield "shuffle_index", [np.arange(5), np.arange(5, 9)]


def built(value=3):
    return {"document_index": [value] * 4, "shuffle_index": list(range(9))}


LAYOUTS = {"document_index": (np.dtype(np.int32), (4,)), "shuffle_index": (np.dtype(np.int64), (9,))}


def cache(folder, key=KEY, corpus=CORPUS):
    return IndexCache(str(folder), key, corpus, LAYOUTS, lambda arrays: None)


def values(arrays):
    return {name: array.tolist() for name, array in arrays.items()}


def test_built_once_then_read(tmp_path):
    build = Build()
    first = values(cache(tmp_path).load_or_build(build))
    assert values(cache(tmp_path).load_or_build(build)) == first == built()
    assert build.calls == 1
    stem = os.path.basename(cache(tmp_path).stem)
    assert stem.endswith("-GPTDataset-train")
    assert len(stem.split("-")[0]) == 32
    endings = ["-description.txt", "-document_index.npy", "-shuffle_index.npy", ".lock"]
    assert sorted(os.listdir(tmp_path)) == sorted(stem + ending for ending in endings)


def test_other_key_is_another_index(tmp_path):
    cache(tmp_path).load_or_build(Build(1))
    other = cache(tmp_path, key={**KEY, "random_seed": 2}).load_or_build(Build(2))
    assert other["document_index"][0] == 2
    assert cache(tmp_path).load_or_build(Build(3))["document_index"][0] == 1


def test_stale_when_the_corpus_changed(tmp_path):
    cache(tmp_path).load_or_build(Build(1))
    again = cache(tmp_path, corpus={"idx_sha256": "def"}).load_or_build(Build(2))
    assert again["document_index"][0] == 2


def hide_a_pickle(index):
    """A pickled object inside .npy, under a digest that fits: refused, never run."""
    path = index.path("document_index")
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with open(index.description_path) as file:
        description = json.load(file)
    with open(path, "rb") as file:
        description["files"]["document_index"] = hashlib.sha256(file.read()).hexdigest()
    with open(index.description_path, "w") as file:
        json.dump(description, file)


def change(path, edit):
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(edit(content))


DAMAGE = {
    "flipped bit": lambda i: change(i.path("document_index"), lambda c: c[:-3] + bytes([c[-3] ^ 4]) + c[-2:]),
    "truncated": lambda i: change(i.path("document_index"), lambda c: c[:-2]),
    "empty": lambda i: change(i.path("shuffle_index"), lambda c: b""),
    "deleted": lambda i: os.unlink(i.path("shuffle_index")),
    "pickle": hide_a_pickle,
    "other description": lambda i: change(i.description_path, lambda c: b"[]"),
    "cut description": lambda i: change(i.description_path, lambda c: c[:-9]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_repaired(tmp_path, damage):
    cache(tmp_path).load_or_build(Build(1))
    DAMAGE[damage](cache(tmp_path))
    build = Build(1)
    assert values(cache(tmp_path).load_or_build(build)) == built(1)
    assert build.calls == 1
    again = Build(1)
    cache(tmp_path).load_or_build(again)
    assert again.calls == 0


def test_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    build = Build()
    with caplog.at_level(logging.WARNING):
        arrays = cache(tmp_path / "file" / "cache").load_or_build(build)
    assert values(arrays) == built()
    assert build.calls == 1
    assert "--data-cache-path" in caplog.text


def _race(folder, barrier, queue):
    build = Build(5)
    barrier.wait()
    arrays = cache(folder).load_or_build(build)
    queue.put((build.calls, values(arrays)))


def test_builders_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_race, args=(tmp_path, barrier, queue)) for _ in range(4)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(30)
    assert sum(calls for calls, _ in results) == 1
    assert all(arrays == built(5) for _, arrays in results)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
