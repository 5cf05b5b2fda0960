"""Issue I, line 7: the wheel's command `megatron-zero`, its version, and a warning beside megatron-core."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import warnings
from pathlib import Path

import pytest

import megatron
import megatron.core
from megatron import command
from megatron.training.run.arguments import first_page
from tools import commands

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("megatron", "tools", "pretrain_gpt.py", "setup.py", "pyproject.toml", "README.md", "LICENSE")
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 --lr 1e-2 "
    "--train-iters 2 --log-interval 2 --eval-iters 1 --num-workers 0 --tokenizer-type ByteTokenizer"
).split()


class Installed:
    """The wheel in an environment of its own, which has torch and the like from this one; used from an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "cwd", folder / "env" / "bin"
        self.folder.mkdir()
        source = folder / "source"
        source.mkdir()
        words = ["git", "ls-files", "-co", "--exclude-standard", *SOURCES]
        listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        self.files = [name for name in listed.stdout.split() if (ROOT / name).exists()]
        for name in self.files:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        offline = ["--no-index", "--no-deps"]
        self.run(*pip, "wheel", "--no-build-isolation", *offline, "-w", str(folder), str(source))
        venv.create(folder / "env", with_pip=False, symlinks=True)
        asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.packages = Path(self.run("python", "-c", asked).strip())
        (wheel,) = folder.glob("*.whl")
        self.run(*pip, "--python", str(self.bin / "python"), "install", "--no-compile", *offline, str(wheel))
        (self.packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.no_torch = folder / "no_torch"
        self.no_torch.mkdir()
        (self.no_torch / "torch.py").write_text("raise SystemExit('torch was imported')")

    def environment(self, **more: str) -> dict[str, str]:
        unwanted = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        kept = {name: value for name, value in os.environ.items() if name not in unwanted}
        return {**kept, "PATH": f"{self.bin}:{kept['PATH']}", "OMP_NUM_THREADS": "1", **more}

    def run(self, *words: str, status: int = 0, torch: bool = True, path: Path | None = None) -> str:
        """What it prints. torch: whether it may be imported. path: where else modules are."""
        path = path if torch else self.no_torch
        env = self.environment() if path is None else self.environment(PYTHONPATH=str(path))
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    return Installed(tmp_path_factory.mktemp("wheel"))


@pytest.mark.grid
def test_nothing_but_the_package_is_put_among_the_packages(installed):
    there = {path.name for path in installed.packages.iterdir() if path.name != "others.pth"}
    assert there == {"megatron", f"megatron_zero-{megatron.__version__}.dist-info"}
    scripts = installed.packages / "megatron" / "scripts"
    for name in installed.files:
        if name.startswith("megatron/"):
            assert (installed.packages / name).exists(), name
        elif name.startswith(("tools/", "pretrain_gpt")):
            assert (scripts / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.grid
def test_help_lists_the_commands_without_torch(installed):
    page = installed.run("megatron-zero", "--help", torch=False)
    for name in (
        "train",
        "launch",
        "slurm",
        "check",
        "schedule",
        "data preprocess",
        "data inspect",
        "checkpoint",
        "report",
        "generate",
    ):
        assert f"  megatron-zero {name} " in page
    assert "megatron-zero launch --nproc-per-node 2 -- train" in page
    assert "torchrun --standalone --nproc-per-node 2 --no-python megatron-zero train" in page
    assert installed.run("megatron-zero", status=2, torch=False) == page
    assert installed.run("python", "-m", "megatron", "--help", torch=False) == page
    version = installed.run("megatron-zero", "--version", torch=False)
    assert version == f"megatron-zero {megatron.__version__}, megatron.core {megatron.core.__version__}\n"
    for name in commands.COMMANDS:
        told = installed.run("megatron-zero", *name.split(), "--help", torch=False)
        assert told.startswith(f"usage: megatron-zero {name} ")
        assert "python tools/" not in told


@pytest.mark.grid
def test_a_wrong_line_is_refused_before_torch_is_imported(installed):
    told = installed.run("megatron-zero", "train", "--num-layer", "2", status=2, torch=False)
    assert "unknown flag --num-layer\n     fix: did you mean --num-layers?" in told
    assert "required: --hidden-size (width h of the model), " in told
    page = installed.run("megatron-zero", "train", status=2, torch=False)
    assert "\n  megatron-zero train --mock-data " in page
    assert "\n  megatron-zero launch --nproc-per-node 2 -- train --use-custom-fsdp" in page
    assert "megatron-zero data preprocess --input my.txt" in page
    installed.run("megatron-zero", "check", "--world-size", "2", *TINY, status=2, torch=False)  # no data
    # A right line's parameters and bytes are those of the model itself, which torch builds.
    told = installed.run("megatron-zero", "check", "--mock-data", "--world-size", "2", *TINY)
    assert "num_layers" in told


@pytest.mark.grid
def test_each_command_works_from_an_empty_folder(installed):
    zero = "megatron-zero"
    shown = installed.run(
        zero, "schedule", "--schedule", "zbv", "--stages", "2", "--microbatches", "4", torch=False
    )
    assert shown.startswith("zbv: 2 ranks x 2 chunks")
    (installed.folder / "my.txt").write_text("what is it that we say here? " * 60)
    made = "data preprocess --input my.txt --output-prefix my --append-eod --tokenizer-type ByteTokenizer"
    assert "1 document, " in installed.run(zero, *made.split(), torch=False)
    own = [*TINY, "--data-path", "my_text_document", "--split", "1", "--save", "ck", "--save-interval", "2"]
    launcher = [zero, *"launch --nproc-per-node 2 -- train --pipeline-model-parallel-size 2".split()]
    trained = installed.run(*launcher, *own)
    assert re.search(r"iteration +2/ +2 .* lm loss: ", trained)
    assert "2 ranks: PP 2" in installed.run(zero, "checkpoint", "inspect", "ck", torch=False)
    assert "    | " in installed.run(zero, "data", "inspect", "--load", "ck", torch=False)
    assert "report.html" in installed.run(zero, "report", "ck")


@pytest.mark.grid
def test_exit_statuses_pass_through(installed):
    assert "nowhere does not exist" in installed.run("megatron-zero", "report", "nowhere", status=2)
    assert "no checkpoint in nowhere" in installed.run(
        "megatron-zero", "checkpoint", "inspect", "nowhere", status=3
    )
    words = "data inspect --data-path nowhere --seq-length 8".split()
    assert "nowhere" in installed.run("megatron-zero", *words, status=4)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("trian", "train"),
        ("schedul", "schedule"),
        ("preprocess", "data preprocess"),
        ("data inspct --load ck", "data inspect"),
        ("show_schedule --stages 4", "schedule"),
        ("pretrain_gpt", "train"),
        ("inspect_checkpoint", "checkpoint"),
    ],
)
def test_an_unknown_command_is_told_the_nearest(monkeypatch, capsys, words, meant):
    monkeypatch.setattr(sys, "argv", ["megatron-zero", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        commands.main()
    assert f"did you mean  megatron-zero {meant}  ?" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "status"), [("data", 2), ("data --help", 0)])
def test_a_group_of_commands_lists_its_own(monkeypatch, capsys, words, status):
    monkeypatch.setattr(sys, "argv", ["megatron-zero", *words.split()])
    with pytest.raises(SystemExit, match=str(status)):
        commands.main()
    told = "".join(capsys.readouterr())
    assert "data preprocess" in told
    assert "megatron-zero train" not in told


def test_a_checkout_has_its_scripts_beside_the_package():
    assert command.SCRIPTS == ROOT
    for each in commands.COMMANDS.values():
        assert (ROOT / each.script).is_file()
    page = first_page("python", "pretrain_gpt.py")
    assert "python pretrain_gpt.py --mock-data" in page
    by_module = first_page("/env/bin/python", "/env/bin/python -m megatron train")
    assert "\n  /env/bin/python -m megatron train --mock-data" in by_module


def test_versions_come_from_one_place(installed):
    assert re.fullmatch(r"0\.16\.1\+zero\." + re.escape(megatron.__version__), megatron.core.__version__)
    asked = "import importlib.metadata as m; print(m.version('megatron-zero'))"
    assert installed.run("python", "-c", asked) == f"{megatron.__version__}\n"


def test_an_import_beside_megatron_core_warns_once(installed, tmp_path):
    (tmp_path / "megatron_core-0.16.1.dist-info").mkdir()
    code = "import sys, megatron.core, megatron.training; print('importlib.metadata' in sys.modules)"
    told = installed.run("python", "-c", code, path=tmp_path)
    assert told.startswith("False\n")  # it costs 25 ms
    assert told.count("megatron-core 0.16.1 (") == 1
    assert f"and megatron-zero {megatron.__version__} both have a package" in told
    assert "pip uninstall megatron-core megatron-zero" in told


def test_an_import_without_it_says_nothing(monkeypatch, tmp_path):
    (tmp_path / "megatron_zero-0.1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "gone"), str(tmp_path / "some.zip")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        megatron._warn_beside_megatron_core()
