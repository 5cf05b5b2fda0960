"""Background saves: the same bytes, one at a time, committed by all ranks together."""

import threading

import pytest
import torch

from megatron.core.dist_checkpointing.catalog import choose
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.load import load_pieces
from megatron.core.dist_checkpointing.save import AsyncSaver, PendingSave, save
from tests.harness.faults import FileFaults
from tests.harness.pieces import whole_tensors
from tests.harness.ranks import run_ranks


def state(value):
    return {
        "w": torch.full((30, 7), value),
        "half": torch.full((5,), value, dtype=torch.bfloat16),
        "step": torch.tensor(int(value)),
        "t": torch.arange(12.0).view(3, 4).t() + value,
    }


@pytest.fixture
def gate(monkeypatch):
    """The writer thread waits until the test lets it."""
    event, real = threading.Event(), PendingSave.write

    def held(self):
        event.wait(20)
        return real(self)

    monkeypatch.setattr(PendingSave, "write", held)
    yield event
    event.set()


def test_the_bytes_are_those_of_a_synchronous_save(tmp_path):
    tensors = state(3.0)
    a = save(tmp_path / "sync", 7, whole_tensors(tensors), {"x": 1}, {"r": 0})
    saver = AsyncSaver()
    saver.save(tmp_path / "async", 7, whole_tensors(tensors), {"x": 1}, {"r": 0})
    b = saver.maybe_finalize(blocking=True)
    assert b == tmp_path / "async" / "iter_0000007"
    names = sorted(path.name for path in a.iterdir())
    assert names == sorted(path.name for path in b.iterdir())
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def test_what_is_saved_is_the_moment_of_the_call(tmp_path, gate):
    tensors, common = state(1.0), {"list": [1]}
    saver = AsyncSaver()
    assert saver.save(tmp_path, 1, whole_tensors(tensors), common, {}) is None
    for tensor in tensors.values():
        tensor.fill_(9)
    common["list"].append(2)
    assert saver.in_flight == 1
    assert saver.maybe_finalize() is None, "committed before it was written"
    assert choose(tmp_path).found is None
    gate.set()
    assert saver.maybe_finalize(blocking=True) is not None
    assert saver.in_flight is None
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    found = choose(tmp_path).found
    load_pieces(found, whole_tensors(loaded))
    assert all(torch.equal(loaded[name], value) for name, value in state(1.0).items())
    assert found.manifest.common == {"list": [1]}


def test_the_next_save_waits_and_says_so(tmp_path, gate):
    lines = []
    saver = AsyncSaver(lines.append)
    saver.save(tmp_path, 1, whole_tensors(state(1.0)), {}, {})
    threading.Timer(0.05, gate.set).start()
    assert saver.save(tmp_path, 2, whole_tensors(state(2.0)), {}, {}) == tmp_path / "iter_0000001"
    assert any("waiting for the save of iteration 1 before starting that of 2" in line for line in lines)
    saver.maybe_finalize(blocking=True)
    assert choose(tmp_path).found.iteration == 2


def test_the_host_copy_is_reused(tmp_path):
    saver = AsyncSaver()
    places = set()
    for iteration in (1, 2, 3):
        saver.save(tmp_path, iteration, whole_tensors(state(float(iteration))), {}, {})
        saver.maybe_finalize(blocking=True)
        places.add(saver._buffer.data_ptr())
    assert len(places) == 1


def test_a_full_disk_surfaces_when_the_save_is_finalized(tmp_path):
    saver = AsyncSaver()
    saver.save(tmp_path, 1, whole_tensors(state(1.0)), {}, {})
    saver.maybe_finalize(blocking=True)
    with FileFaults(full_after_bytes=50):
        saver.save(tmp_path, 2, whole_tensors(state(2.0)), {}, {})
        with pytest.raises(CheckpointError, match=r"shard_00000\.safetensors: No space left"):
            saver.maybe_finalize(blocking=True)
    assert saver.in_flight is None
    assert {p.name for p in tmp_path.iterdir()} == {"iter_0000001", "latest_checkpointed_iteration.txt"}
    saver.save(tmp_path, 3, whole_tensors(state(3.0)), {}, {})
    assert saver.maybe_finalize(blocking=True) == tmp_path / "iter_0000003"


def test_a_bug_in_the_writer_is_not_swallowed(tmp_path, monkeypatch):
    monkeypatch.setattr(PendingSave, "write", lambda self: 1 / 0)
    saver = AsyncSaver()
    saver.save(tmp_path, 1, whole_tensors(state(1.0)), {}, {})
    with pytest.raises(ZeroDivisionError):
        saver.maybe_finalize(blocking=True)


def two_ranks(ctx, root):
    """Rank 1 is slow: rank 0's poll must not commit before it."""
    event, real = threading.Event(), PendingSave.write

    def held(self):
        if ctx.rank == 1:
            event.wait(20)
        return real(self)

    PendingSave.write = held
    saver = AsyncSaver()
    saver.save(root, 4, whole_tensors(state(4.0)), {}, {"rank": ctx.rank}, ctx.ps)
    if ctx.rank == 0:
        saver._written.exception()  # waits
    early = saver.maybe_finalize()
    event.set()
    if ctx.rank == 1:
        saver._written.exception()  # waits
    late = saver.maybe_finalize()
    return early, late is not None, saver.in_flight


def test_no_rank_commits_before_all_have_written(tmp_path):
    assert run_ranks(two_ranks, 2, tmp_path) == [(None, True, None)] * 2
    found = choose(tmp_path).found
    assert [own["rank"] for own in found.manifest.per_rank] == [0, 1]


def one_rank_fails(ctx, root):
    saver = AsyncSaver()
    faults = FileFaults(full_after_bytes=0 if ctx.rank == 1 else 1 << 30)
    with faults:
        saver.save(root, 4, whole_tensors(state(4.0)), {}, {}, ctx.ps)
        try:
            saver.maybe_finalize(blocking=True)
        except CheckpointError as error:
            return str(error)
    return None


def test_one_ranks_failure_is_every_ranks(tmp_path):
    messages = run_ranks(one_rank_fails, 2, tmp_path)
    assert messages[0] == messages[1]
    assert "rank 1: " in messages[0]
    assert choose(tmp_path).found is None
