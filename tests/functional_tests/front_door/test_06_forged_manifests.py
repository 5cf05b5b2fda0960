"""A manifest with right digests and wrong content is refused by file and field, or means nothing to the run."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron.core.dist_checkpointing.catalog import TRACKER_NAME
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.optimizer.optimizer_param_scheduler import ScheduleError
from megatron.core.transport.parallel_state import single_process
from megatron.training.config.saved_config import saved_config
from megatron.training.config.training_config import CheckpointConfig
from megatron.training.run.checkpointing import Checkpointer, load_for_inference
from tests.harness import forgery, launch
from tests.harness.pieces import whole_tensors

NEWEST = "iter_0000002"


@pytest.fixture(scope="module")
def loader():
    return forgery.Loader(forgery.FLAGS)


@pytest.fixture(scope="module")
def undisturbed(loader):
    return loader.load(forgery.SAVED_BEFORE)


def cases(every):
    """(kind of field, path, name of the forgery, change of the object or list that holds the field)."""
    fields = json.loads((forgery.SAVED_BEFORE / NEWEST / "manifest.json").read_text())
    del fields["digest"]
    number = 0
    for kind, path in forgery.kinds(fields).items():
        value, name = forgery.at(fields, path), path[-1]
        forged = {
            label: (lambda holder, name=name, wrong=wrong: holder.__setitem__(name, wrong))
            for label, wrong in forgery.hostile_values(value).items()
        }
        forged["removed"] = lambda holder, name=name: holder.pop(name)
        if isinstance(value, dict):
            forged["one more"] = lambda holder, name=name: holder[name].update(extra=1)
        for label, change in forged.items():
            number += 1
            if every or number % (199 if "config" in kind else 29) == 0:  # most fields are flags
                yield kind, path, label, change


def check_grid(loader, undisturbed, folder, every):
    harmless, refused, wrong = set(), set(), []
    for kind, path, label, change in cases(every):
        root = forgery.copy_of(forgery.SAVED_BEFORE, folder / "ck")
        forgery.forge(root / NEWEST, lambda fields, p=path, do=change: do(forgery.at(fields, p[:-1])))
        told = f"{'.'.join(map(str, kind))} {label}"
        try:
            found = loader.load(root)
        except CheckpointError as error:
            refused.add(kind)
            if not well_told(str(error), path):
                wrong.append(f"{told}: {str(error)!r:.500}")
        except ScheduleError as error:  # a schedule, but not this run's: the flags to choose with are named
            if kind[:3] != ("common", "scheduler", "schedule") or f"{path[-1]}: checkpoint" not in str(error):
                wrong.append(f"{told}: {error}")
        except Exception as error:
            wrong.append(f"{told}: {error!r}")
        else:
            harmless.add(".".join(map(str, kind)))
            if found != undisturbed:
                changed = [name for name in found if found[name] != undisturbed[name]]
                wrong.append(f"{told}: loaded, with another {changed}")
    assert not wrong, f"{len(wrong)} forgeries:\n" + "\n".join(wrong)
    return refused, harmless


def well_told(message, path):
    """Whether a refusal names file and field, and can be printed anywhere."""
    named = [step for step in path if isinstance(step, str)] + ["per_rank", "world_size", "config_hash"]
    return (
        f"{NEWEST}/" in message
        and any(step in message for step in named)
        and len(message) < 3000
        and message.replace("\n", "").isprintable()
    )


def test_each_forged_field_is_refused_by_name_or_changes_nothing(loader, undisturbed, tmp_path):
    check_grid(loader, undisturbed, tmp_path, every=False)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_each_forged_field_is_refused_by_name_or_changes_nothing_full(loader, undisturbed, tmp_path):
    refused, harmless = check_grid(loader, undisturbed, tmp_path, every=True)
    print(len(refused), sorted(harmless))
    assert len(refused) > 80


# What a forged manifest did: the run went back, and wrote over older checkpoints.


def forged_counter(fields):
    """Iteration 1 inside iter_0000002."""
    fields["common"]["train_state"]["iteration"] = 1


def forged_everywhere(fields):
    forged_counter(fields)
    fields["iteration"] = fields["common"]["iteration"] = 1


@pytest.fixture
def folder(tmp_path):
    forgery.copy_of(forgery.SAVED_BEFORE, tmp_path / "ck")
    return tmp_path


def snapshot(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("iter_*/*")}


@pytest.mark.parametrize(
    ("change", "field"),
    [(forged_counter, "common.train_state.iteration"), (forged_everywhere, "iteration")],
)
def test_another_iteration_than_the_folders_is_refused_and_nothing_written(loader, folder, change, field):
    forgery.forge(folder / "ck" / NEWEST, change)
    before = snapshot(folder / "ck")
    with pytest.raises(CheckpointError, match=f"field '{field}': expected .*2.*, found 1"):
        loader.load(folder / "ck")
    assert snapshot(folder / "ck") == before


def test_a_launch_ends_with_3_and_one_line(folder):
    forgery.forge(folder / "ck" / NEWEST, forged_counter)
    before = snapshot(folder / "ck")
    run = launch.ended(launch.run_forked([*forgery.FLAGS, "--save", "ck", "--load", "ck"], cwd=folder), 3)
    assert "ck/iter_0000002/manifest.json: field 'common.train_state.iteration': expected 2" in run.output
    assert "Traceback" not in run.output
    assert launch.exit_record(folder / "ck")["status"] == 3
    assert snapshot(folder / "ck") == before


@pytest.mark.grid
def test_a_checkpoint_written_before_the_schema_goes_on_as_its_own_run_did(folder):
    run = launch.ok(launch.run_forked([*forgery.FLAGS, "--save", "ck", "--load", "ck"], cwd=folder))
    losses = [float(text.split()[0]) for text in run.losses().values()]
    assert list(run.losses()) == [3, 4]
    assert losses == pytest.approx([2.745114, 2.737582], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("hidden_size", 16),
        ("padded_vocab_size", 1 << 40),
        ("num_layers", 10_000),
        ("ffn_hidden_size", 1 << 30),
        ("num_attention_heads", 0),
        ("kv_channels", 1 << 50),
        ("swiglu", "yes"),
    ],
)
def test_a_forged_shape_takes_no_memory(folder, name, size):
    """What --use-checkpoint-args and tools/generate.py build a model from."""
    forgery.forge(folder / "ck" / NEWEST, lambda fields: fields["common"]["config"].update({name: size}))
    for read in (saved_config, load_for_inference):
        with pytest.raises(
            CheckpointError, match=rf"manifest\.json: field 'common\.config\.{name}': expected"
        ):
            read(str(folder / "ck"))


# A run that went back replaces only what it was told to.


class Run:
    """One run that saves what it is told, in the folder that it loads from."""

    def __init__(self, value, root, load=True, **flags):
        self.lines, self.weight = [], torch.full((4,), value)
        self.checkpointer = Checkpointer(
            single_process(),
            CheckpointConfig(save=str(root), load=str(root) if load is True else load, **flags),
            log=self.lines.append,
        )
        self.restored = self.checkpointer.load(self.pieces, [], config={})

    @property
    def pieces(self):
        return whole_tensors({"w": self.weight}, "model.")

    def save(self, *iterations):
        for iteration in iterations:
            self.checkpointer.save(iteration, self.pieces, [], {"config": {}})


def values(root):
    """Name of each directory -> the weight in it."""
    return {
        path.name.partition("-")[0]: float(load_file(path / "shard_00000.safetensors")["model.w[0:4]"][0])
        for path in sorted(root.glob("iter_*"))
        if (path / "shard_00000.safetensors").exists()
    }


PARTIAL = {"no_load_optim": True}  # these runs have no optimizer


@pytest.fixture
def three(tmp_path):
    """Iterations 10, 20, 30, each of weight 1."""
    Run(1.0, tmp_path).save(10, 20, 30)
    return tmp_path


def test_told_to_go_back_it_replaces(three):
    run = Run(2.0, three, ckpt_step=10, **PARTIAL)
    run.weight.fill_(2.0)
    run.save(20)
    assert values(three) == {"iter_0000010": 1.0, "iter_0000020": 2.0, "iter_0000030": 1.0}


def test_a_lower_tracker_goes_back_and_replaces_nothing(three):
    (three / TRACKER_NAME).write_text("10")
    run = Run(2.0, three, **PARTIAL)
    assert run.restored.iteration == 10
    assert any(line.startswith("WARNING: ") and "(iterations 20, 30)" in line for line in run.lines)
    run.weight.fill_(2.0)
    run.save(20)
    assert values(three) == {
        "iter_0000010": 1.0,
        "iter_0000020": 2.0,
        "iter_0000020.kept": 1.0,
        "iter_0000030": 1.0,
    }
    assert any(
        "iter_0000020 is a whole checkpoint that this run neither goes on from" in line for line in run.lines
    )
    run.weight.fill_(3.0)
    run.save(20)  # its own now
    assert values(three)["iter_0000020"] == 3.0
    assert len(list(three.glob("iter_0000020*"))) == 2


def test_the_same_checkpoint_again_leaves_no_copy(three):
    """A process killed between the rename and the tracker saves the same state once more."""
    saved = Run(1.0, three, **PARTIAL)
    saved.save(40)
    (three / TRACKER_NAME).write_text("30")
    Run(1.0, three, **PARTIAL).save(40)
    assert sorted(path.name for path in three.glob("iter_0000040*")) == ["iter_0000040"]


@pytest.mark.parametrize("told", [False, True])
def test_a_damaged_one_in_the_way_is_put_aside_under_a_name_that_says_so(three, told):
    (three / "iter_0000030" / "manifest.json").write_text("{")
    if not told:
        (three / TRACKER_NAME).unlink()
    run = Run(2.0, three, **PARTIAL, **({"ckpt_step": 20} if told else {}))
    assert run.restored.iteration == 20
    run.save(30)
    (aside,) = three.glob("iter_0000030.damaged-*")
    assert (aside / "manifest.json").read_text() == "{"
    assert any("iter_0000030 is damaged" in line and str(aside) in line for line in run.lines)
    run.save(40)
    assert aside.is_dir()


@pytest.mark.parametrize("load", [None, "elsewhere"])
def test_a_run_from_scratch_neither_replaces_nor_gives_up_anothers(three, tmp_path, load):
    run = Run(2.0, three, load=load and str(tmp_path / load), save_retain_interval=1000)
    assert any("(iterations 10, 20, 30)" in line for line in run.lines)
    run.save(5, 10, 15, 20, 25, 30, 35)
    assert values(three) == {
        "iter_0000010.kept": 1.0,
        "iter_0000020.kept": 1.0,
        "iter_0000030": 2.0,
        "iter_0000030.kept": 1.0,
        "iter_0000035": 2.0,
    }


def test_finetuning_into_the_same_folder_is_no_going_back(three):
    run = Run(2.0, three, finetune=True)
    assert run.restored.iteration == 0
    run.weight.fill_(2.0)
    run.save(10)
    assert values(three)["iter_0000010.kept"] == 1.0
