"""--load of what is no checkpoint of ours: told what it is, refused with 3 (2 under --check-config) before torch."""

import os
import shutil
import subprocess
import sys

import pytest

from megatron.core.dist_checkpointing import foreign
from megatron.core.dist_checkpointing.catalog import TRACKER_NAME, check_loadable, choose
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.training.run.arguments import launch_config
from tests.harness import forgery, launch
from tests.harness.launch_lines import SMALL
from tools import checkpoint

ITER, COMMIT = "iter_0000100", "0123456789abcdef" * 2 + "01234567"
TRACKED = {TRACKER_NAME: "100"}


def files(*names, **contents):
    return dict.fromkeys(names, "x") | contents


# What is there -> what is said. Contents are nonsense: nothing is opened.
FOLDERS = {
    "hf": (files("config.json", "model.safetensors", "tokenizer.json"), "a Hugging Face model (config.json"),
    "hf shards": (
        files("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"),
        "a Hugging Face model (",
    ),
    "hf bin": (files("config.json", "pytorch_model.bin"), "a Hugging Face model (pytorch_model.bin)"),
    "hf bin shards": (files("pytorch_model.bin.index.json"), "a Hugging Face model ("),
    "hf cache": (
        files(
            f"snapshots/{COMMIT}/config.json",
            f"snapshots/{COMMIT}/model.safetensors",
            "blobs/aa",
            "refs/main",
        ),
        f"a Hugging Face model (snapshots/{COMMIT}/config.json",
    ),
    "hf snapshots": (files(f"{COMMIT}/config.json", f"{COMMIT}/model.safetensors"), "a Hugging Face model ("),
    "hf trainer": (
        files("checkpoint-500/trainer_state.json", "checkpoint-500/model.safetensors"),
        "a training checkpoint of Hugging Face's Trainer",
    ),
    "peft": (files("adapter_config.json", "adapter_model.safetensors"), "an adapter of Hugging Face's PEFT"),
    "hf without weights": (
        files("config.json", "tokenizer_config.json"),
        "a Hugging Face model without its weights",
    ),
    "megatron torch": (
        files(f"{ITER}/mp_rank_00/model_optim_rng.pt", **TRACKED),
        f"a Megatron checkpoint (--ckpt-format torch) ({ITER}/mp_rank_00/model_optim_rng.pt)",
    ),
    "megatron torch with stages": (
        files(
            f"{ITER}/mp_rank_01_003/model_optim_rng.pt", f"{ITER}/mp_rank_01_003/distrib_optim.pt", **TRACKED
        ),
        "a Megatron checkpoint (--ckpt-format torch)",
    ),
    "megatron release": (
        files("release/mp_rank_00/model_optim_rng.pt", **{TRACKER_NAME: "release"}),
        "a Megatron checkpoint (--ckpt-format torch) (release/mp_rank_00",
    ),
    "megatron iteration itself": (
        files("mp_rank_00/model_optim_rng.pt"),
        "a Megatron checkpoint (--ckpt-format torch) (mp_rank_00/model_optim_rng.pt)",
    ),
    "torch_dist": (
        files(
            f"{ITER}/.metadata",
            f"{ITER}/common.pt",
            f"{ITER}/metadata.json",
            f"{ITER}/__0_0.distcp",
            **TRACKED,
        ),
        f"a Megatron checkpoint (--ckpt-format torch_dist) ({ITER}/common.pt, {ITER}/.metadata)",
    ),
    "zarr": (
        files(f"{ITER}/common.pt", f"{ITER}/metadata.json", f"{ITER}/decoder.weight/.zarray", **TRACKED),
        "a Megatron checkpoint (--ckpt-format zarr)",
    ),
    "fsdp_dtensor": (
        files(f"{ITER}/.metadata", f"{ITER}/__0_0.distcp", **TRACKED),
        "a Megatron checkpoint (--ckpt-format fsdp_dtensor or torch_dcp)",
    ),
    "bridge": (
        files(f"{ITER}/run_config.yaml", f"{ITER}/.metadata", **TRACKED),
        "a Megatron Bridge checkpoint",
    ),
    "dcp": (
        files(".metadata", "__0_0.distcp", "__1_0.distcp"),
        "a checkpoint of torch.distributed.checkpoint (.met",
    ),
    "dcp cut short": (files("__0_0.distcp"), "torch.distributed.checkpoint that lacks its .metadata"),
    "deepspeed": (
        files("latest", "global_step100/mp_rank_00_model_states.pt", "zero_to_fp32.py"),
        "a DeepSpeed checkpoint (global_step100/mp_rank_00_model_states.pt)",
    ),
    "deepspeed zero": (
        files("global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        "a DeepSpeed checkpoint",
    ),
    "nemo": (files("model.nemo"), "a NeMo archive"),
    "nemo 2": (files("weights/.metadata", "context/model.yaml"), "a NeMo checkpoint"),
    "nemo unpacked": (files("model_weights/common.pt", "model_config.yaml"), "a NeMo checkpoint"),
    "torchtitan": (
        files("step-100/.metadata", "step-100/__0_0.distcp"),
        "a torchtitan checkpoint (step-100/.metadata",
    ),
    "llama": (
        files("params.json", "consolidated.00.pth", "tokenizer.model"),
        "a model in the format of Meta",
    ),
    "safetensors": (files("weights.safetensors"), "a folder of safetensors files"),
    "pytorch": (files("model.pt"), "a folder of PyTorch files (model.pt)"),
    "gguf": (files("model-q4.gguf"), "a GGUF model"),
    "lightning": (files("epoch=1-step=100.ckpt"), "a Lightning checkpoint"),
}

# What a run's --load reads; here it is told of by who reads checkpoints of ours alone.
READ = (
    "a Hugging Face model (",
    "a training checkpoint of Hugging Face",
    "a Megatron checkpoint (--ckpt-format torch)",
    "a Megatron checkpoint (--ckpt-format torch_dist)",
)


def make(root, names):
    for name, content in names.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.fixture(params=FOLDERS)
def folder(request, tmp_path):
    names, told = FOLDERS[request.param]
    return make(tmp_path / "model", names), told


def refusal(load, **kwargs):
    with pytest.raises(CheckpointError) as error:
        check_loadable(str(load), **kwargs)
    return str(error.value)


def test_each_format_is_named_with_what_shows_it_and_where_conversion_stands(folder):
    root, told = folder
    message = refusal(root)
    assert str(root) in message
    assert told in message
    read = told.startswith(READ)
    assert ("planned, see docs/roadmap.md, 'checkpoint conversion'" in message) == (not read)
    assert ("a run's --load reads it, and tools/checkpoint.py import --" in message) == read
    with pytest.raises(CheckpointError) as error:
        choose(root)
    assert str(error.value) == message


def test_no_file_is_opened(folder, monkeypatch):
    root, _ = folder
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *a, **k: pytest.fail(f"opened {path}") or real(path, *a, **k)
    )
    refusal(root)


def test_the_roadmap_has_the_section_that_messages_name():
    assert "## checkpoint conversion" in (launch.ROOT / "docs" / "roadmap.md").read_text()


@pytest.mark.parametrize("name", ["hf", "torch_dist"])
def test_the_tools_say_the_same(name, tmp_path, capsys):
    root = make(tmp_path / "model", FOLDERS[name][0])
    message = refusal(root)
    assert checkpoint.main(["inspect", str(root)]) == 3
    assert message in capsys.readouterr().err


def test_generate_says_the_same(tmp_path, capsys, monkeypatch):
    from tools import generate

    root = make(tmp_path / "model", FOLDERS["nemo 2"][0])
    monkeypatch.setattr(sys, "argv", ["generate.py", "--load", str(root), "--prompt", "x"])
    with pytest.raises(SystemExit) as ended:
        generate.main()
    assert ended.value.code == 3
    assert refusal(root) in capsys.readouterr().err


# Launch lines.


def launched(*words):
    with pytest.raises(SystemExit) as ended:
        launch_config([*SMALL, *map(str, words)])
    return ended.value.code


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("zarr", FOLDERS["zarr"][1]),
        ("torch_dist", ".metadata"),  # of formats that are read, contents that are none
        ("hf", "config.json: not JSON"),
    ],
)
def test_a_launch_ends_with_3_before_torch_and_leaves_exit_json(name, told, tmp_path):
    root = make(tmp_path / "model", FOLDERS[name][0])
    (tmp_path / "ck").mkdir()
    words = [*SMALL, "--load", str(root), "--save", "ck", "--save-interval", "2"]
    script = (
        "import sys; from megatron.training.run.arguments import launch_config\n"
        "try: launch_config(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(launch.ROOT)},
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (3, "False\n")
    assert run.stderr.count("\n") == 1, run.stderr
    assert told in run.stderr
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["requeue"]) == (3, False)
    assert record["reason"] in run.stderr


def test_a_mistake_in_the_flags_is_told_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = make(tmp_path / "model", FOLDERS["hf"][0])
    assert launched("--load", root, "--num-layers", "0") == 2


@pytest.mark.parametrize("more", [[], ["--use-checkpoint-args"], ["--finetune"]])
def test_check_config_tells_the_same_with_2(more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = make(tmp_path / "model", FOLDERS["zarr"][0])
    assert launched("--load", root, "--check-config", *more) == 2
    printed = capsys.readouterr()
    assert refusal(root) in printed.err
    assert "--load" in printed.err
    assert not (tmp_path / "exit.json").exists()
    assert launched("--load", root, "--save", "ck", "--save-interval", "2", *more) == 3
    assert refusal(root) in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--finetune"], ["--ckpt-step", "5"], ["--exit-on-missing-checkpoint"]])
@pytest.mark.parametrize("there", ["missing", "empty", "of something"])
def test_nothing_to_load_is_refused_where_a_flag_needs_a_checkpoint(
    more, there, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if there != "missing":
        make(tmp_path / "model", {} if there == "empty" else {"notes.txt": "x"}).mkdir(exist_ok=True)
    if there == "missing":  # --check-config: it may be elsewhere
        assert launched("--load", "model", *more, "--check-config") == 0
        assert "not found: --load model" in capsys.readouterr().out
    for last, status in ((["--check-config"], 2), ([], 3))[there == "missing" :]:
        assert launched("--load", "model", *more, *last) == status
        told = capsys.readouterr().err
        assert "no checkpoint in model" in told
        assert f"{more[0]} needs one: give --load the folder that a run has saved to, or leave" in told
        assert ("there is no such folder" in told) == (there == "missing")
        assert ("'notes.txt'" in told) == (there == "of something")


@pytest.mark.parametrize("there", ["missing", "empty", "logs", "something", "unfinished save"])
def test_a_run_may_start_from_scratch_in_the_folder_that_it_saves_to(there, tmp_path):
    root = tmp_path / "ck"
    names = {
        "logs": files("metrics.jsonl", "exit.json", "tensorboard/events.out.1", "progress.txt", "runs/a/b"),
        "something": files("README.md", "config.json"),
        "unfinished save": files("iter_0000002.tmp-0a/shard_00000.safetensors"),
    }
    if there != "missing":
        make(root, names.get(there, {})).mkdir(exist_ok=True)
    check_loadable(str(root))
    (note,) = choose(root).notes
    seen = "there is no such folder" if there == "missing" else f"no {TRACKER_NAME}, no iter_*"
    assert note.startswith(f"no checkpoint in {root}: {seen}")
    for name in names.get(there, {}):
        assert name.partition("/")[0] in note


@pytest.mark.grid
def test_the_first_start_of_a_restart_loop_says_what_it_saw(tmp_path):
    make(tmp_path / "ck", files("notes.txt"))
    words = [*forgery.FLAGS, "--save", "ck", "--load", "ck", "--train-iters", "1"]
    run = launch.ok(launch.run_forked(words, cwd=tmp_path))
    assert "; it holds 'notes.txt'; starting from scratch" in run.output, "of its own lease nothing is said"


# Our own, but not as --load wants it.


def test_an_iteration_instead_of_its_folder(tmp_path):
    root = forgery.copy_of(forgery.SAVED_BEFORE, tmp_path / "ck")
    message = refusal(root / "iter_0000002")
    assert f"--load {root} --ckpt-step 2 loads it" in message
    shutil.move(root / "iter_0000002", tmp_path / "best")
    assert "move it to DIR/iter_NNNNNNN" in refusal(tmp_path / "best")


def test_ours_goes_before_what_else_is_in_the_folder(tmp_path):
    root = forgery.copy_of(forgery.SAVED_BEFORE, tmp_path / "ck")
    make(root, FOLDERS["hf"][0] | {"iter_0000001/common.pt": "x", "iter_0000001/.metadata": "x"})
    check_loadable(str(root))
    assert choose(root).found.iteration == 2


# No folder at all.


def test_what_is_no_folder_is_told_for_what_it_is(tmp_path):
    make(tmp_path, files("model.safetensors", "pytorch_model.bin", "a.nemo", "notes.txt"))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    told = {
        "model.safetensors": "not a directory but a safetensors file, as Hugging Face models are made of; converting",
        "pytorch_model.bin": "not a directory but a file of PyTorch weights",
        "a.nemo": "not a directory but a NeMo archive",
        "notes.txt": "not a directory but a file",
        "fifo": "not a directory but a pipe",
        "dangling": f"a link to {tmp_path / 'gone'}, which is missing",
        "loop": "cannot be read: Too many levels of symbolic links",
        "notes.txt/below": "cannot be read: Not a directory",
        "x" * 300: "cannot be read: File name too long",
        "nul\0": "names no folder: embedded null byte",
    }
    for name, words in told.items():
        assert words in refusal(tmp_path / name), name
    assert "not a directory but a device" in refusal("/dev/null")


@pytest.mark.parametrize("call", ["listdir", "stat", "scandir"])
def test_a_folder_that_may_not_be_read(call, tmp_path, monkeypatch):
    make(tmp_path / "model", files("notes.txt"))
    real = getattr(os, call)

    def denied(path=".", *args, **kwargs):
        if str(path).endswith("model"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, call, denied)
    assert f"{tmp_path / 'model'}: cannot be read: Permission denied" in refusal(tmp_path / "model")


def test_a_link_to_a_folder_is_that_folder(tmp_path):
    make(tmp_path / "real", FOLDERS["hf"][0])
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "a Hugging Face model" in refusal(tmp_path / "link")


def test_every_row_has_an_example():
    found = {form.name for form in foreign.FORMATS if form.name}
    shown = [told for _, told in FOLDERS.values()]
    assert not {name for name in found if not any(name[:20] in told for told in shown)}
