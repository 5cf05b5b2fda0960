"""A launch whose configuration is refused or told: status, streams, exit.json, nothing heavy imported."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import megatron.core
from megatron.training.run.arguments import launch_config
from tests.harness.launch_lines import SMALL

ROOT = Path(__file__).resolve().parents[3]


def add_factor(parser):
    parser.add_argument("--my-factor", type=float)
    return parser


def run(words, timeout=None, cwd=None, **environ):
    """In a folder of its own unless told."""
    with tempfile.TemporaryDirectory() as fresh:
        return run_in(cwd or fresh, words, timeout, environ)


def run_in(cwd, words, timeout, environ):
    script = (
        "import sys; from megatron.training.run.arguments import launch_config; launch_config(sys.argv[1:])"
    )
    script += "; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        env=env,
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_good_line_imports_neither_torch_nor_numpy():
    done = run(SMALL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_bad_line_ends_with_status_2_and_no_traceback():
    done = run(["--num-layer", "3"])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "did you mean --num-layers" in done.stderr
    assert "5 flags are required: --hidden-size (width h of the model), " in done.stderr


def test_under_a_launcher_only_local_rank_0_tells():
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    with pytest.raises(subprocess.TimeoutExpired) as quiet:  # a launcher ends it meanwhile
        run(["--lr", "x"], timeout=1.5, LOCAL_RANK="1", **torchrun)
    assert not quiet.value.stderr
    told = run(["--lr", "x"], LOCAL_RANK="0", **torchrun)
    assert told.returncode == 2
    assert "--lr expects a number" in told.stderr


def test_a_rank_that_alone_is_refused_speaks_after_a_while():
    done = run(["--lr", "x"], RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert done.returncode == 2
    assert "--lr expects a number" in done.stderr


def test_a_refusal_replaces_a_former_runs_record(tmp_path):
    (tmp_path / "ck").mkdir()
    words = [*SMALL, "--save", "ck"]  # without --save-interval
    done = run(words, cwd=tmp_path)
    assert done.returncode == 2
    record = json.loads((tmp_path / "ck" / "exit.json").read_text())
    assert (record["status"], record["requeue"]) == (2, False)
    assert "--save needs --save-interval" in record["reason"]
    assert not (tmp_path / "exit.json").exists()


def refusal(folder):
    record = json.loads((folder / "exit.json").read_text())
    assert (record["status"], record["requeue"], record["iteration"]) == (2, False, None)
    return record["reason"]


def test_a_refusal_writes_nothing_where_there_is_no_folder_to_save_to(tmp_path):
    for words in (["--lr", "x"], [*SMALL, "--save", "new"]):
        assert run(words, cwd=tmp_path).returncode == 2
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("save", [["--save", "ck"], ["--save=ck"]])
def test_refusals_before_there_is_a_configuration_are_recorded_too(tmp_path, save, monkeypatch, capsys):
    (tmp_path / "ck").mkdir()
    assert run([*SMALL, *save], cwd=tmp_path, RANK="x", WORLD_SIZE="2").returncode == 2
    assert "RANK='x'" in refusal(tmp_path / "ck")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        launch_config([*SMALL, *save, "--my-factor", "x"], extra_args_provider=add_factor)
    assert "invalid float value" in refusal(tmp_path / "ck")
    assert not (tmp_path / "exit.json").exists()


def test_a_check_leaves_no_record_and_an_unwritable_place_hides_no_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (["--lr", "x", "--check-config"], ["--my-factor", "x", "--check-config"]):
        with pytest.raises(SystemExit):
            launch_config(words, extra_args_provider=add_factor)
        assert not list(tmp_path.iterdir())
    (tmp_path / "ck" / "exit.json").mkdir(parents=True)  # cannot be replaced by a file
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        launch_config(["--lr", "x", "--save", "ck"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "--lr expects a number" in told
    assert "exit.json could not be written" in told


def test_warnings_are_told_once_by_rank_0():
    words = [*SMALL, "--sequence-parallel", "--use-mcore-models"]
    assert run(words).stderr.count("WARNING") == 2
    launched = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": "29500",
    }
    assert run(words, **launched).stderr == ""


def test_the_checkpoint_format_named_as_megatrons_is_noted_once():
    told = run([*SMALL, "--ckpt-format", "torch_dist"]).stderr
    assert told.splitlines() == [
        "note: --ckpt-format torch_dist: checkpoints are written in this project's own format, under that name"
    ]


def test_a_senseless_launcher_is_status_2():
    done = run(SMALL, RANK="x", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "RANK='x'" in done.stderr


def test_flags_are_parsed_and_refused_without_a_search():
    """Whatever chooses and searches is there only once a model is described."""
    sought = "build candidate auto budget_search activation_share search passes".split()
    folder = Path(megatron.core.__file__).parent / "pipeline_parallel" / "plan"
    assert set(sought) <= {path.stem for path in folder.iterdir()}
    code = (
        "import sys; from megatron.training.run.arguments import ConfigurationError, parse_config\n"
        f"sought, plan = {sought!r}, 'megatron.core.pipeline_parallel.plan.'\n"
        "def told(*more):\n"
        "    try: parse_config([*sys.argv[1:], *more]); said = 'sound'\n"
        "    except ConfigurationError: said = 'refused'\n"
        "    print(said, *(one for one in sought if plan + one in sys.modules))\n"
        "told(); told('--pipeline-schedule', 'zbv'); told('--pipeline-schedule', 'auto')\n"
    )
    said = subprocess.run([sys.executable, "-c", code, *SMALL], capture_output=True, text=True, check=True)
    plain, refused, chosen = said.stdout.splitlines()
    assert (plain, refused) == ("sound", "refused")
    assert chosen == "sound"
