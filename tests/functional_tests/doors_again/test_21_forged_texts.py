"""Number 21 (leases apart): text that somebody else wrote neither moves a terminal's cursor nor forges a log line, and
a manifest's count of optimizer steps is one that its other counters allow."""

import json

import pytest

from megatron.core.datasets.blend import parse_blend, read_blend_file
from megatron.core.datasets.errors import DataError
from megatron.core.dist_checkpointing.catalog import open_directory
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.words import printable, printable_json
from megatron.training.config.problems import ConfigurationError
from megatron.training.config.saved_config import saved_config
from megatron.training.run.arguments import launch_config, parse_config
from megatron.training.run.run_checkpoints import check_state
from tests.harness import forgery
from tests.harness.scripts import run_script

NEWEST = "iter_0000002"
ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"
LINE = "ck\n [2026-01-01 00:00:00.000000] iteration        7/       8 | consumed samples:          28 |"


def test_printable_keeps_words_of_all_languages():
    for text in ("a b/c-1.2_é", "文書\u3000データ", "a\u200db", "नमस्ते"):
        assert printable(text) == text
    assert printable(LINE + ESCAPE).isprintable()
    assert printable("a\nb\tc", keep="\n\t") == "a\nb\tc"
    assert printable("\x1b\x00\x85\u2028\u202e\ud800") == r"\x1b\x00\x85\u2028\u202e\ud800"
    assert printable_json({"\n": ["\r", {"a": "\x9b"}], "n": 1}) == {r"\n": [r"\r", {"a": r"\x9b"}], "n": 1}


@pytest.mark.grid
def test_texts_of_a_checkpoints_configuration_reach_no_terminal(tmp_path):
    root = forgery.copy_of(forgery.SAVED_BEFORE, tmp_path / "ck")

    def forged(fields):
        config = fields["common"]["config"]
        config.update(dict.fromkeys(("tokenizer_model", "wandb_exp_name", "data_path"), ESCAPE + LINE))
        config.update(normalization=ESCAPE, position_embedding_type=LINE, tokenizer_type=ESCAPE)
        config[ESCAPE] = fields["common"]["data"]["prefix"] = LINE

    forgery.forge(root / NEWEST, forged)
    seen = run_script("tools/checkpoint.py", "inspect", root)
    assert seen.returncode == 0, seen.stderr
    assert r"\x1b]0;owned\x07" in seen.stdout
    for words in (
        ["tools/checkpoint.py", "inspect", root, "--verify"],
        ["tools/generate.py", "--load", root, "--prompt", "1"],
    ):
        done = run_script(*words)
        assert done.returncode == 3
        seen.stdout += done.stdout + done.stderr
    assert all(line.isprintable() for line in seen.stdout.splitlines())
    assert not any(line.startswith(" [2026-01-01") for line in seen.stdout.splitlines())


def test_what_is_taken_of_it_is_printable_and_what_a_trainer_keeps_of_its_own_stays(tmp_path):
    root = forgery.copy_of(forgery.SAVED_BEFORE, tmp_path / "ck")

    def forged(fields):
        fields["common"]["config"].update(tokenizer_model=ESCAPE)
        fields["common"]["values"] = {"notes": "two\nlines"}

    forgery.forge(root / NEWEST, forged)
    assert saved_config(str(root))["tokenizer_model"] == printable(ESCAPE)
    assert open_directory(root / NEWEST, 2).manifest.common["values"] == {"notes": "two\nlines"}


def test_a_file_with_such_a_name_is_named_in_one_line(tmp_path):
    root = forgery.copy_of(forgery.SAVED_BEFORE, tmp_path / "ck")
    (root / NEWEST / (LINE.replace("/", "_") + ESCAPE)).touch()
    with pytest.raises(CheckpointError, match=r"not listed in manifest\.json") as refused:
        saved_config(str(root))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("flag", ["--save", "--wandb-exp-name", "--data-path", "--tensorboard-dir"])
@pytest.mark.parametrize("name", [LINE, "a" + ESCAPE, "a\rb", "a\u2028b"])
def test_names_that_a_user_gives_forge_no_line(capfd, flag, name):
    with pytest.raises(SystemExit) as ended:
        launch_config([*forgery.FLAGS, flag, name])
    told = capfd.readouterr()
    assert ended.value.code == 2
    assert f"{flag} expects a text without control characters" in told.err
    assert all(line.isprintable() for line in (told.out + told.err).splitlines())


def test_nor_do_those_of_files_of_settings_of_corpora_and_unknown_flags(tmp_path):
    settings = tmp_path / "settings.yaml"
    settings.write_text('save: "a\\e[2Jb"\n')
    corpora = tmp_path / "corpora.txt"
    corpora.write_text(f"first{ESCAPE} second")
    for words in (["--yaml-cfg", str(settings)], [f"--unknown{ESCAPE}{LINE}"]):
        with pytest.raises(ConfigurationError) as refused:
            parse_config([*forgery.FLAGS, *words])
        assert all(line.isprintable() for line in str(refused.value).split("\n"))
    with pytest.raises(DataError, match="names without control characters"):
        read_blend_file(str(corpora))
    assert parse_blend(["1", "文書"]).prefixes == ("文書",)


# Counters of a run of batches of 2 samples: (iterations, samples, drawn by --iterations-to-skip, in steps of the
# optimizer, steps that were not finite in a row), and what number of steps they allow.
COUNTERS = [
    ((2, 4, 0, 4, 0), {2}),
    ((10, 20, 0, 20, 0), {10}),
    ((10, 20, 2, 18, 0), {8, 9}),  # an iteration of two samples was left out, or two of one
    (
        (10, 20, 0, 18, 0),
        set(range(1, 10)),
    ),  # a step was not finite, or the optimizer is younger than the run
    ((10, 20, 0, 14, 3), set(range(1, 8))),
    ((10, 20, 4, 10, 2), set(range(1, 8))),
    ((10, 20, 0, 4, 0), set(range(1, 5))),  # of at most the samples that there were
    ((10, 20, 0, 0, 0), {0}),
    ((10, 20, 20, 0, 0), {0}),
]


@pytest.fixture(scope="module")
def loader():
    return forgery.Loader(forgery.FLAGS)


@pytest.mark.parametrize(("counters", "allowed"), COUNTERS)
def test_steps_of_the_optimizer_are_as_many_as_skipped_ones_allow(tmp_path, counters, allowed):
    iteration, samples, left_out, trained, in_a_row = counters
    passed, refused = set(), set()
    for steps in range(iteration + 2):
        root = forgery.copy_of(forgery.SAVED_BEFORE, tmp_path / "ck")

        def forged(fields, steps=steps):
            common = fields["common"]
            for holder in (fields, common, common["train_state"]):
                holder.update(iteration=iteration, consumed_train_samples=samples)
            common["train_state"]["skipped_train_samples"] = left_out
            common["scheduler"]["samples"] = trained
            common["nan_policy"]["consecutive_skips"] = in_a_row
            common["optimizer"]["num_steps"] = steps

        forgery.forge(root / NEWEST, forged)
        found = open_directory(root / NEWEST, iteration)
        try:
            check_state(found, True)
            passed.add(steps)
        except CheckpointError as error:
            refused.add(str(error).partition("'")[2].partition("'")[0])
        check_state(found, False)  # an optimizer that is left out is nobody's business
    assert (passed, refused) == (allowed, {"common.optimizer.num_steps"})


def test_a_forged_number_of_steps_is_refused_at_loading(loader, tmp_path):
    """Adam's first moments are divided by 1 - beta ** steps: with 1 in the place of 2 the next step is another."""
    root = forgery.copy_of(forgery.SAVED_BEFORE, tmp_path / "ck")
    forgery.forge(root / NEWEST, lambda fields: fields["common"]["optimizer"].update(num_steps=1))
    with pytest.raises(
        CheckpointError, match=r"common\.optimizer\.num_steps': expected an integer from 2 to 2"
    ):
        loader.load(root)
    manifest = json.loads((forgery.SAVED_BEFORE / NEWEST / "manifest.json").read_text())
    assert manifest["common"]["optimizer"]["num_steps"] == 2
    loader.load(forgery.SAVED_BEFORE)
