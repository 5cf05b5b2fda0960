"""Kill the process at every change it makes to the disk: the folder always loads, old or new, never mixed."""

import json
import os
import re
import signal
import time

import pytest
import torch

from megatron.core.dist_checkpointing.catalog import TRACKER_NAME, choose
from megatron.core.dist_checkpointing.commit import retain, to_remove
from megatron.core.dist_checkpointing.loading import find, load_pieces
from megatron.core.dist_checkpointing.saving import save
from tests.harness.faults import KILLED, count_points, run_killed
from tests.harness.pieces import whole_tensors
from tests.harness.ranks import rank_outcomes

SHAPE = (50, 20)


def save_state(root, iteration, value, ps=None, **kwargs):
    pieces = whole_tensors({"a": torch.full(SHAPE, value), "b": torch.full((7,), value)})
    save(root, iteration, pieces, {"value": value}, {"rank": 0}, ps, **kwargs)


def load_state(root):
    """(iteration, value), after checking that every part of the checkpoint is of the same save."""
    tensors = {"a": torch.zeros(SHAPE), "b": torch.zeros(7)}
    found = find(root).found
    load_pieces(found, whole_tensors(tensors))
    value = found.manifest.common["value"]
    assert all(tensor.eq(value).all() for tensor in tensors.values()), "parts of two saves"
    return found.iteration, value


# What is there before, what is saved, and what may be there after a kill.
SCENES = {
    "first save": ([], (5, 1.0), {}, {None, (5, 1.0)}),
    "next save": ([(5, 1.0)], (6, 2.0), {}, {(5, 1.0), (6, 2.0)}),
    "same iteration": ([(5, 1.0)], (5, 2.0), {}, {(5, 1.0), (5, 2.0)}),
    "with retention": (
        [(5, 1.0), (6, 1.5), (7, 1.75)],
        (8, 2.0),
        {"retain_interval": 100},
        {(7, 1.75), (8, 2.0)},
    ),
}


def crash_scene(tmp_path, name, step):
    """Kill at every `step`-th call; returns how many kills there were."""
    before, (iteration, value), kwargs, allowed = SCENES[name]
    index = 0

    def fresh():
        nonlocal index
        index += 1
        root = tmp_path / f"{name.replace(' ', '-')}-{index}"
        root.mkdir()
        for old_iteration, old_value in before:
            save_state(root, old_iteration, old_value)
        return root

    root = fresh()
    points = count_points(lambda: save_state(root, iteration, value, **kwargs))
    seen = set()
    kills = 0
    for point in range(len(points) % step, len(points), step):
        root = fresh()
        status = run_killed(lambda root=root: save_state(root, iteration, value, **kwargs), point)
        assert status == KILLED, f"point {point} of {points}: exit status {status}"
        kills += 1
        found = choose(root).found
        state = None if found is None else load_state(root)
        assert state in allowed, f"killed at {points[point]}: loaded {state}"
        seen.add(state)
        # The next save cleans up, and the folder then holds checkpoints only.
        save_state(root, 9, 3.0)
        assert load_state(root) == (9, 3.0)
        leftovers = [p.name for p in root.iterdir() if "." in p.name and p.name != TRACKER_NAME]
        assert leftovers == [], f"killed at {points[point]}: left {leftovers}"
        if state is not None:
            assert (root / f"iter_{state[0]:07d}").is_dir(), "a loadable checkpoint was cleaned away"
    if step == 1:
        assert seen == allowed, f"the kills showed {seen} of {allowed}"
    return kills


@pytest.mark.parametrize("name", SCENES)
def test_every_fourth_point(tmp_path, name):
    assert crash_scene(tmp_path, name, 4) >= 4


@pytest.mark.full
@pytest.mark.parametrize("name", SCENES)
def test_every_point(tmp_path, name):
    assert crash_scene(tmp_path, name, 1) >= 16


def test_the_order_of_durable_steps(tmp_path):
    """No rename before what it publishes is fsynced; nothing removed before the tracker points on."""
    save_state(tmp_path, 5, 1.0)
    points = count_points(lambda: save_state(tmp_path, 5, 2.0))
    names = [(call, re.sub(r"-.*|\.[0-9a-f]{16}\.tmp$", "", name)) for call, name in points]
    temporary, old = "iter_0000005.tmp", "iter_0000005"
    order = [
        ("mkdir", temporary),
        ("fsync", "shard_00000.safetensors"),
        ("fsync", "manifest.json"),
        ("fsync", temporary),
        ("rename", old),
        ("rename", temporary),
        ("fsync", tmp_path.name.partition("-")[0]),
        ("fsync", f".{TRACKER_NAME}"),
        ("replace", f".{TRACKER_NAME}"),
        ("rmdir", "iter_0000005.old"),
    ]
    places = [names.index(step) for step in order]
    assert places == sorted(places)
    writes = [i for i, (call, _) in enumerate(names) if call == "write"]
    tracker_write = writes[-1]
    assert all(i < names.index(("fsync", temporary)) for i in writes if i != tracker_write)


def killed_rank(ctx, root, victim, point):
    from tests.harness.faults import FileFaults

    save_state(root, 5, 1.0, ctx.ps)
    with FileFaults(kill_at=point if ctx.rank == victim else None):
        save_state(root, 6, 2.0, ctx.ps)


@pytest.mark.parametrize(("victim", "point"), [(0, 1), (1, 1), (0, 5), (1, 2)])
def test_one_of_two_ranks_killed(tmp_path, victim, point):
    outcomes = rank_outcomes(killed_rank, 2, tmp_path, victim, point, timeout=20)
    assert outcomes[victim].died is not None
    assert not outcomes[1 - victim].ok
    assert load_state(tmp_path) in {(5, 1.0), (6, 2.0)}


def keep_saving(root):
    for iteration in range(100, 100_000):
        save_state(root, iteration % 3 + 100, float(iteration), retain_interval=100)


def random_kills(tmp_path, count):
    """SIGKILL at random moments of a process that does nothing but save: newer or older, never lost, never mixed."""
    save_state(tmp_path, 1, 1.0)
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            keep_saving(tmp_path)
            os._exit(0)
        time.sleep(0.005 + 0.03 * float(torch.rand((), generator=generator)))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        load_state(tmp_path)


def test_random_kills(tmp_path):
    random_kills(tmp_path, 10)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_random_kills_many(tmp_path):
    random_kills(tmp_path, 500)


@pytest.mark.parametrize(
    ("iterations", "newest", "interval", "gone"),
    [
        ([10, 20, 30, 40, 50], 50, 20, [10, 30]),
        ([10, 20, 30, 40, 50], 50, 1000, [10, 20, 30]),
        ([10, 20], 20, 1000, []),
        ([10, 20, 30, 90], 30, 1000, [10]),
        ([10], 10, 3, []),
        ([5, 10, 15], 15, 5, []),
    ],
)
def test_what_retention_gives_up(iterations, newest, interval, gone):
    assert to_remove(iterations, newest, interval) == gone


def test_retention_keeps_multiples_and_the_newest_two(tmp_path):
    for iteration in range(1, 8):
        save_state(tmp_path, iteration, float(iteration), retain_interval=3)
    there = sorted(int(p.name[5:]) for p in tmp_path.glob("iter_*"))
    assert there == [3, 6, 7]
    save_state(tmp_path, 8, 8.0, retain_interval=3)
    assert sorted(int(p.name[5:]) for p in tmp_path.glob("iter_*")) == [3, 6, 7, 8]


def test_retention_removes_nothing_while_one_of_the_newest_two_is_damaged(tmp_path):
    for iteration in (1, 2, 3, 4):
        save_state(tmp_path, iteration, 1.0)
    (tmp_path / "iter_0000003" / "shard_00000.safetensors").write_bytes(b"")
    (note,) = retain(tmp_path, 4, 100)
    assert "nothing removed" in note
    assert "iter_0000003/shard_00000.safetensors" in note
    assert len(list(tmp_path.glob("iter_*"))) == 4


def test_retention_leaves_other_projects_checkpoints_alone(tmp_path):
    foreign = tmp_path / "iter_0000001"
    foreign.mkdir()
    (foreign / "common.pt").write_bytes(b"x")
    for iteration in (2, 3, 4, 5):
        save_state(tmp_path, iteration, 1.0, retain_interval=100)
    assert foreign.is_dir()
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000004", "iter_0000005"]


def test_another_projects_checkpoint_in_the_way_is_put_aside(tmp_path):
    foreign = tmp_path / "iter_0000005"
    foreign.mkdir()
    (foreign / "common.pt").write_bytes(b"x")
    lines = []
    save_state(tmp_path, 5, 1.0, log=lines.append)
    assert any("was not written by this project" in line for line in lines)
    save_state(tmp_path, 6, 2.0)
    (kept,) = tmp_path.glob("iter_0000005.kept-*")
    assert (kept / "common.pt").read_bytes() == b"x"


def test_the_tracker_holds_the_number_and_nothing_else(tmp_path):
    save_state(tmp_path, 123, 1.0)
    assert (tmp_path / TRACKER_NAME).read_bytes() == b"123"
    assert json.loads((tmp_path / "iter_0000123" / "manifest.json").read_text())["iteration"] == 123
