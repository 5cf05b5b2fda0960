import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training import global_vars

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _clean():
    global_vars.unset_global_variables()
    yield
    global_vars.unset_global_variables()


def test_args_are_megatrons_namespace():
    global_vars.publish({"hidden_size": 64, "my_flag": "x"}, rank=1, world_size=2)
    args = global_vars.get_args()
    assert (args.hidden_size, args.my_flag, args.rank, args.world_size) == (64, "x", 1, 2)
    assert "hidden_size" in vars(args)
    with pytest.raises(AssertionError, match="already set"):
        global_vars.publish({}, rank=0, world_size=1)


@pytest.mark.parametrize(
    "name",
    [
        *("args", "timers", "tokenizer", "tensorboard_writer", "wandb_writer", "num_microbatches"),
        "current_global_batch_size",
    ],
)
def test_too_early_is_explained(name):
    with pytest.raises(
        global_vars.NotInitializedError, match=r"before initialize_megatron\(\) or pretrain\(\)"
    ):
        getattr(global_vars, f"get_{name}")()


def test_parts_as_they_come():
    batch = [4]
    global_vars.provide(timers="T", tensorboard_writer=None)
    global_vars.provide(
        tokenizer="K", num_microbatches=lambda: batch[0], global_batch_size=lambda: 8 * batch[0]
    )
    assert global_vars.get_timers() == "T"
    assert global_vars.get_tokenizer() == "K"
    assert global_vars.get_tensorboard_writer() is None
    assert (global_vars.get_num_microbatches(), global_vars.get_current_global_batch_size()) == (4, 32)
    batch[0] = 5
    assert global_vars.get_num_microbatches() == 5
    with pytest.raises(AssertionError, match="unknown global 'speed'"):
        global_vars.provide(speed=1)


@pytest.mark.parametrize(("rank", "shown"), [(0, "first\n"), (1, ""), (2, "last\n")])
def test_printing_ranks(rank, shown, capsys):
    global_vars.publish({}, rank=rank, world_size=3)
    global_vars.print_rank_0("first")
    global_vars.print_rank_last("last")
    assert capsys.readouterr().out == shown
    assert global_vars.is_last_rank() == (rank == 2)


def test_before_the_start_everyone_prints(capsys):
    global_vars.print_rank_0("a")
    global_vars.print_rank_last("b")
    assert capsys.readouterr().out == "a\nb\n"


def test_does_not_import_torch():
    code = "import sys, megatron.training.global_vars; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 0
