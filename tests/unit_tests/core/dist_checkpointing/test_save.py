"""Saving: resharding between worlds, reused plans, full disks."""

import errno
import json
import random
import shutil

import pytest
import torch

from megatron.core.dist_checkpointing import saving as save_module
from megatron.core.dist_checkpointing.agree import gather_json
from megatron.core.dist_checkpointing.catalog import choose
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.loading import find, load_pieces
from megatron.core.dist_checkpointing.pieces import PlanCache
from megatron.core.dist_checkpointing.saving import save
from tests.harness.faults import FileFaults
from tests.harness.pieces import FlatShard, flat_shards, whole_tensors
from tests.harness.ranks import run_ranks

SHAPES = {"a": (7, 5), "b": (13,), "c": (2, 3, 4), "d": (), "e": (3, 1, 5)}


def values(name, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(name) + ord(name[0]))
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def uneven_cuts(world_size, numel, seed):
    """Slices of [0, numel) for each rank, some of them empty."""
    rng = random.Random(seed)
    cuts = sorted(rng.randint(0, numel) for _ in range(world_size - 1))
    return list(zip([0, *cuts], [*cuts, numel], strict=True))


def shards(rank, world_size, seed, fill):
    """Each tensor's flat slice on this rank; `fill` holds the true values, or zeros to load into."""
    out, buffers = [], {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        dtype = torch.bfloat16 if name == "c" else torch.float32
        whole = values(name, dtype)
        start, end = uneven_cuts(world_size, whole.numel(), seed + index)[rank]
        part = whole.flatten()[start:end].clone() if fill else torch.zeros(end - start, dtype=dtype)
        buffers[name] = (whole.flatten()[start:end], part)
        out.append(FlatShard("model." + name, shape, start, end, part))
    return flat_shards(out), buffers


def save_shards(ctx, root, seed):
    pieces, _ = shards(ctx.rank, ctx.world_size, seed, fill=True)
    replicated = whole_tensors({"replicated": torch.arange(4.0)}, "model.")
    save(root, 7, [*pieces, *replicated], {"consumed_train_samples": 56}, {"rank": ctx.rank}, ctx.ps)


def load_shards(ctx, root, seed):
    pieces, buffers = shards(ctx.rank, ctx.world_size, seed, fill=False)
    replica = torch.zeros(4)
    found = find(root, ctx.ps).found
    load_pieces(found, [*pieces, *whole_tensors({"replicated": replica}, "model.")], ctx.ps)
    assert replica.tolist() == [0, 1, 2, 3]
    for expected, loaded in buffers.values():
        assert torch.equal(expected, loaded)
    assert [own["rank"] for own in found.manifest.per_rank] == list(range(found.manifest.world_size))
    return found.manifest.consumed_train_samples


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 2), (2, 1)])
def test_uneven_flat_slices_reshard_exactly(tmp_path, before, after):
    run_ranks(save_shards, before, tmp_path, 10)
    for seed in (20, 30):
        assert run_ranks(load_shards, after, tmp_path, seed) == [56] * after
    manifest = choose(tmp_path).found.manifest
    assert manifest.topology == {"tp": 1, "cp": 1, "ep": 1, "dp": before, "pp": 1}


def test_an_unchanged_plan_is_made_once(tmp_path):
    cache = PlanCache()
    tensors = {"w": torch.zeros(3)}
    save(tmp_path, 1, whole_tensors(tensors), {}, {}, cache=cache)
    plans = cache.plans
    save(tmp_path, 2, whole_tensors(tensors), {}, {}, cache=cache)
    assert cache.plans is plans
    save(tmp_path, 3, whole_tensors({**tensors, "v": torch.zeros(2)}), {}, {}, cache=cache)
    assert set(choose(tmp_path).found.manifest.tensors) == {"w", "v"}


def test_saving_the_same_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 5, whole_tensors({"w": torch.zeros(3)}), {"run": 1}, {})
    save(tmp_path, 5, whole_tensors({"w": torch.ones(3)}), {"run": 2}, {})
    loaded = torch.full((3,), 9.0)
    found = choose(tmp_path).found
    load_pieces(found, whole_tensors({"w": loaded}))
    assert loaded.tolist() == [1, 1, 1]
    assert found.manifest.common == {"run": 2}
    assert {p.name for p in tmp_path.iterdir()} == {"iter_0000005", "latest_checkpointed_iteration.txt"}


def test_the_caller_may_change_common_after_begin(tmp_path):
    common = {"list": [1, 2]}
    save(tmp_path, 1, [], common, {})
    common["list"].append(3)
    assert choose(tmp_path).found.manifest.common == {"list": [1, 2]}


def test_values_that_are_no_json_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        save(tmp_path, 1, [], {"scale": float("inf")}, {})
    assert list(tmp_path.iterdir()) == []


def world_of_one(tensor, root, iteration, **kwargs):
    return save(root, iteration, whole_tensors({"w": tensor}), {"n": iteration}, {}, **kwargs)


def assert_only_first_is_there(root):
    assert {p.name for p in root.iterdir()} == {"iter_0000001", "latest_checkpointed_iteration.txt"}
    loaded = torch.zeros(1000)
    load_pieces(choose(root).found, whole_tensors({"w": loaded}))
    assert loaded.eq(1).all()


def test_a_disk_that_is_too_small_is_told_before_writing(tmp_path, monkeypatch):
    world_of_one(torch.ones(1000), tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1234))
    with pytest.raises(CheckpointError) as error:
        world_of_one(torch.zeros(1000), tmp_path, 2)
    needed = next(int(word) for word in str(error.value).split() if word.isdigit())
    assert str(tmp_path) in str(error.value)
    assert "1234 bytes are free" in str(error.value)
    monkeypatch.undo()
    assert_only_first_is_there(tmp_path)
    directory = world_of_one(torch.zeros(1000), tmp_path, 2)
    size = sum(path.stat().st_size for path in directory.iterdir())
    assert abs(needed - size) < 0.25 * size  # a 4 kB checkpoint: the manifest is half of it


def test_the_estimate_is_within_a_tenth_for_real_sizes(tmp_path, monkeypatch):
    tensors = {f"layer.{i}.weight": torch.zeros(64, 64) for i in range(20)}
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1))
        with pytest.raises(CheckpointError) as error:
            save(tmp_path, 1, whole_tensors(tensors), {}, {})
    needed = next(int(word) for word in str(error.value).split() if word.isdigit())
    directory = save(tmp_path, 1, whole_tensors(tensors), {}, {})
    size = sum(path.stat().st_size for path in directory.iterdir())
    assert abs(needed - size) < 0.1 * size


@pytest.mark.parametrize("full_after", [0, 100, 2000, 4200])
def test_a_disk_that_fills_up_while_writing(tmp_path, full_after):
    world_of_one(torch.ones(1000), tmp_path, 1)
    with FileFaults(full_after_bytes=full_after), pytest.raises(CheckpointError) as error:
        world_of_one(torch.zeros(1000), tmp_path, 2)
    message = str(error.value)
    assert "No space left" in message
    assert "iter_0000002.tmp-" in message
    assert "bytes are free" in message
    assert_only_first_is_there(tmp_path)


def test_an_error_at_every_call_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    """EIO at each system call: CheckpointError, or the save is complete; never anything in between."""
    for point in range(60):
        root = tmp_path / str(point)
        world_of_one(torch.ones(1000), root, 1)
        with FileFaults(fail_at=point, code=errno.EIO) as faults:
            try:
                world_of_one(torch.zeros(1000), root, 2, retain_interval=1)
            except CheckpointError as error:
                assert "Input/output" in str(error)  # noqa: PT017 - a removal may fail untold
        found = choose(root).found
        loaded = torch.full((1000,), 9.0)
        load_pieces(found, whole_tensors({"w": loaded}))
        assert loaded.eq(1 if found.iteration == 1 else 0).all()
        if len(faults.trace) <= point:
            break
    else:
        raise AssertionError("a save of one tensor makes more than 60 calls")


def failing_on_rank_1(ctx, root):
    tensors = {"w": torch.ones(8), "v": torch.ones(8)}
    save(root, 1, whole_tensors(tensors), {}, {}, ctx.ps)
    faults = FileFaults(full_after_bytes=10 if ctx.rank == 1 else 1 << 30)
    try:
        with faults:
            save(root, 2, whole_tensors(tensors), {}, {}, ctx.ps)
    except CheckpointError as error:
        gather_json(0, ctx.ps)
        return str(error)
    return None


def test_one_ranks_full_disk_stops_the_save_on_all(tmp_path):
    messages = run_ranks(failing_on_rank_1, 2, tmp_path)
    assert messages[0] == messages[1]
    assert "rank 1: " in messages[0]
    assert "shard_00001.safetensors: No space left" in messages[0]
    assert {p.name for p in tmp_path.iterdir()} == {"iter_0000001", "latest_checkpointed_iteration.txt"}


def test_manifest_names_versions_and_hashes_the_configuration(tmp_path):
    directory = save(tmp_path, 1, [], {"config": {"hidden_size": 8}}, {})
    first = json.loads((directory / "manifest.json").read_text())
    directory = save(tmp_path, 2, [], {"config": {"hidden_size": 9}}, {})
    second = json.loads((directory / "manifest.json").read_text())
    assert first["config_hash"] != second["config_hash"]
    assert first["code_version"] == second["code_version"] != ""


def test_a_save_whose_directory_another_removed_says_so_and_nothing_of_space(tmp_path, monkeypatch):
    def removed(path, layout, resolve):
        shutil.rmtree(path.parent)
        return open(path, "rb")

    monkeypatch.setattr(save_module.storage, "write_shard", removed)
    with pytest.raises(
        CheckpointError, match=r"iter_0000001\.tmp-\w+ was removed while .* one run at a time"
    ) as error:
        world_of_one(torch.ones(8), tmp_path, 1)
    assert "bytes" not in str(error.value)


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_guard_that_refuses_stops_a_save_before_it_cleans_up_and_before_it_commits(tmp_path, allowed):
    world_of_one(torch.ones(8), tmp_path, 1)
    left = tmp_path / "iter_0000002.tmp-1234abcd"
    left.mkdir()  # another run's save under way, as far as this one knows
    calls = []

    def guard():
        calls.append(1)
        if len(calls) > allowed:
            raise CheckpointError("the folder is another run's")

    with pytest.raises(CheckpointError, match="the folder is another run's"):
        world_of_one(torch.zeros(8), tmp_path, 2, guard=guard)
    assert left.exists() == (allowed == 0)
    assert choose(tmp_path).found.iteration == 1
    assert not (tmp_path / "iter_0000002").exists()


def test_whoever_removed_the_directory_of_a_save_under_way_is_named_by_the_guard(tmp_path):
    """This process was stopped while it wrote, and another run has taken the folder and cleaned up there."""
    taken = []

    def guard():
        if taken:
            raise CheckpointError("the folder is another run's")

    pending = save_module.PendingSave(tmp_path, 1, whole_tensors({"w": torch.ones(8)}), {}, {}, guard=guard)
    shutil.rmtree(pending.temporary)
    with pytest.raises(CheckpointError, match="was removed while this save was writing it"):
        pending.write()
    taken.append(True)
    with pytest.raises(CheckpointError, match="the folder is another run's"):
        pending.write()
