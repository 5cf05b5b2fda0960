"""Which checkpoint is loaded, and when none is."""

import shutil

import pytest
import torch

from megatron.core.dist_checkpointing.catalog import (
    TRACKER_NAME,
    CheckpointKind,
    choose,
    config_of,
    directory_name,
    list_entries,
    read_tracker,
)
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.loading import find
from megatron.core.dist_checkpointing.saving import save
from tests.harness.pieces import whole_tensors
from tests.harness.ranks import run_ranks


@pytest.fixture
def root(tmp_path):
    """Iterations 10, 20, 30; the tracker names 30."""
    for iteration in (10, 20, 30):
        tensors = whole_tensors({"w": torch.full((4,), float(iteration))})
        save(tmp_path, iteration, tensors, {"config": {"step": iteration}}, {})
    return tmp_path


def chosen(root, **kwargs):
    found = choose(root, **kwargs).found
    return None if found is None else found.iteration


def truncate(root, iteration):
    (root / directory_name(iteration) / "shard_00000.safetensors").write_bytes(b"short")


def test_names_are_megatrons():
    assert directory_name(123) == "iter_0000123"
    assert directory_name(12345678) == "iter_12345678"
    assert directory_name(5, CheckpointKind.TEMPORARY, "ab") == "iter_0000005.tmp-ab"


def test_the_tracker_decides(root):
    assert chosen(root) == 30
    assert (root / TRACKER_NAME).read_text() == "30"
    (root / TRACKER_NAME).write_text("20\n")  # as a user rewinds
    assert chosen(root) == 20
    assert choose(root).notes == ()


def test_a_tracker_to_a_missing_step_takes_the_newest_not_beyond_it_and_says_so(root):
    shutil.rmtree(root / "iter_0000030")
    choice = choose(root)
    assert choice.found.iteration == 20
    assert "names iteration 30" in choice.notes[0]
    assert "loading iteration 20" in choice.notes[1]
    (root / TRACKER_NAME).write_text("15")
    assert chosen(root) == 10
    (root / TRACKER_NAME).write_text("5")
    assert chosen(root) == 20


@pytest.mark.parametrize(
    "text", ["", "\n", "release", "-5", "3.5", "99999999999999", "10 20", "\x00", "1" * 100]
)
def test_a_tracker_that_says_nothing_is_told_and_the_newest_taken(root, text):
    (root / TRACKER_NAME).write_text(text)
    choice = choose(root)
    assert choice.found.iteration == 30
    assert str(root / TRACKER_NAME) in choice.notes[0]


def test_bad_utf8_in_the_tracker(root):
    (root / TRACKER_NAME).write_bytes(b"\xff\xfe")
    assert chosen(root) == 30
    assert "\\\\xff" in str(read_tracker(root))


def test_without_tracker_the_newest_valid_one(root):
    (root / TRACKER_NAME).unlink()
    truncate(root, 30)
    choice = choose(root)
    assert choice.found.iteration == 20
    assert any("iter_0000030/shard_00000.safetensors: 5 bytes, expected" in note for note in choice.notes)


def test_the_tracked_one_damaged_is_refused_and_the_older_offered(root):
    truncate(root, 30)
    with pytest.raises(CheckpointError, match=r"iter_0000030/shard_00000\.safetensors: 5 bytes") as error:
        choose(root)
    assert "--ckpt-step 20" in str(error.value)
    assert chosen(root, ckpt_step=20) == 20


def test_nothing_valid_is_an_error_that_lists_everything(root):
    for iteration in (10, 20, 30):
        truncate(root, iteration)
    (root / TRACKER_NAME).write_text("40")
    with pytest.raises(CheckpointError, match="no valid checkpoint") as error:
        choose(root)
    assert all(f"iter_00000{iteration}" in str(error.value) for iteration in (10, 20, 30))


@pytest.mark.parametrize("text", ["", "7", "release"])
def test_a_tracker_and_nothing_else_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / TRACKER_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=TRACKER_NAME):
        choose(tmp_path)


@pytest.mark.parametrize("there", ["missing", "empty", "other files", "unfinished save"])
def test_nothing_there_starts_from_scratch_and_says_so(tmp_path, there):
    root = tmp_path / "checkpoints"
    if there != "missing":
        root.mkdir()
    if there == "other files":
        (root / "metrics.jsonl").write_text("{}")
        (root / "iter_7").mkdir()
    if there == "unfinished save":
        (root / "iter_0000005.tmp-1f").mkdir()
    choice = choose(root)
    assert choice.found is None
    assert "no checkpoint in" in choice.notes[0]
    assert str(root) in choice.notes[0]


def test_a_missing_or_damaged_ckpt_step_is_an_error(root):
    with pytest.raises(CheckpointError, match=r"--ckpt-step 25 is not in .*\(iterations there: 10, 20, 30\)"):
        choose(root, 25)
    truncate(root, 20)
    with pytest.raises(CheckpointError, match="iter_0000020"):
        choose(root, 20)


def test_a_directory_of_another_project_is_no_checkpoint(tmp_path):
    foreign = tmp_path / "iter_0000100"
    foreign.mkdir()
    (foreign / ".metadata").write_bytes(b"pickle")
    (tmp_path / TRACKER_NAME).write_text("100")
    with pytest.raises(
        CheckpointError, match=r"iter_0000100/manifest\.json: missing: not a checkpoint of ours"
    ):
        choose(tmp_path)


def test_a_replaced_checkpoint_counts_while_nothing_took_its_place(root):
    (root / "iter_0000030").rename(root / "iter_0000030.old-ab")
    choice = choose(root)
    assert choice.found.iteration == 30
    assert choice.found.directory.name == "iter_0000030.old-ab"
    shutil.copytree(root / "iter_0000030.old-ab", root / "iter_0000030")
    assert choose(root).found.directory.name == "iter_0000030"


def test_kinds(root):
    for suffix in ("tmp", "trash", "kept"):
        (root / f"iter_0000040.{suffix}-0a").mkdir()
    kinds = {entry.path.name: entry.kind for entry in list_entries(root)}
    assert kinds["iter_0000040.trash-0a"] is CheckpointKind.TRASH
    assert kinds["iter_0000030"] is CheckpointKind.COMMITTED
    assert chosen(root) == 30


def test_load_names_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not a directory"):
        choose(tmp_path / "file")


def test_the_configuration_is_read_from_the_manifest_alone(root):
    assert config_of(choose(root).found) == {"step": 30}
    assert config_of(choose(root, 10).found) == {"step": 10}
    assert choose(root / "none").found is None
    save(root, 40, [], {}, {})
    with pytest.raises(CheckpointError, match=r"common\.config"):
        config_of(choose(root).found)


def test_all_ranks_choose_alike(root):
    def choose_on_ranks(ctx):
        choice = find(root, ctx.ps)
        return choice.found.iteration, choice.notes

    shutil.rmtree(root / "iter_0000030")
    first, second = run_ranks(choose_on_ranks, 2)
    assert first == second
    assert first[0] == 20
