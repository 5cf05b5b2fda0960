"""`python pretrain_gpt.py` without flags is the best page of the project; no small launch line ends in a traceback."""

import contextlib
import random
import re
import shlex

import pytest

from megatron.training.config.flag_table import spellings
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import first_page, launch_config
from tests.harness.launch import ROOT, forked, run_forked
from tests.harness.launch_lines import SMALL

TRAINERS = ("pretrain_gpt.py", "examples/custom_trainer/pretrain_small_mlp_lm.py")


def commands(page):
    """The page's shell commands as words: indented, with continuations."""
    joined = re.sub(r" \\\n\s*", " ", page)
    return [
        shlex.split(line) for line in joined.splitlines() if re.match(r"  \S*(python|torchrun)\S* ", line)
    ]


@pytest.mark.parametrize("script", TRAINERS)
def test_without_flags_a_page_says_what_this_is_and_what_to_type_status_2(script, tmp_path):
    done = run_forked([], script=script, cwd=tmp_path)
    assert done.status == 2
    page = done.output.splitlines()
    assert page[0].startswith("Megatron-Zero pre-trains GPT models")
    assert "Traceback" not in done.output
    assert "[required" not in done.output
    for word in ("--help", "--check-config", "docs/quickstart.md", "make quickstart", "--save DIR"):
        assert word in done.output
    assert not list(tmp_path.iterdir())  # it was no run


def test_under_a_launcher_one_rank_tells():
    with forked([], ranks=2) as ranks:
        ranks.wait_for("docs/quickstart.md\n")  # a launcher ends the other one now
        assert ranks.output.count("Megatron-Zero pre-trains") == 1


def test_the_page_is_short_enough_to_be_read():
    page = first_page("python", "pretrain_gpt.py").splitlines()
    assert len(page) <= 35
    assert max(map(len, page)) <= 80


@pytest.mark.parametrize("script", TRAINERS)
def test_its_first_line_trains_when_it_is_pasted(script, tmp_path):
    page = run_forked([], script=script, cwd=tmp_path).output
    _python, program, *flags = commands(page)[0]
    assert program == str(ROOT / script)
    done = run_forked(flags, script=script, cwd=tmp_path)
    assert done.status == 0, done.output
    losses = [float(value.split()[0]) for value in done.losses().values()]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.grid
def test_its_other_lines_train_too(tmp_path):
    _mock, corpus, own, sharded, pipeline = commands(first_page("python", str(ROOT / "pretrain_gpt.py")))
    (tmp_path / "my.txt").write_text("what is it that we say here? " * 40)
    assert corpus[1].endswith("tools/preprocess_data.py")
    assert run_forked(corpus[2:], script="tools/preprocess_data.py", cwd=tmp_path).status == 0
    assert run_forked(own[2:], cwd=tmp_path).status == 0
    for words in (sharded, pipeline):
        at = words.index(str(ROOT / "pretrain_gpt.py"))
        assert words[1].endswith("tools/launch.py")
        assert words[at - 3 : at] == ["--nproc-per-node", "2", "--"]
        done = run_forked(words[at + 1 :], ranks=2, cwd=tmp_path)
        assert done.status == 0, done.output
        assert 20 in done.losses()


def test_help_stays_that_of_argparse(capsys):
    with pytest.raises(SystemExit) as ended:
        launch_config(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_a_trainer_that_needs_no_flags_gets_none_of_it():
    sizes = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "micro_batch_size",
        "train_iters",
    )
    config = launch_config([], args_defaults={**dict.fromkeys(sizes, 4), "lr": 1e-3, "mock_data": True})
    assert config.tokenizer.tokenizer_type == "ByteTokenizer"
    assert config.model.max_position_embeddings == 4


def some_line(rng):
    flags = sorted(spellings())
    words = [word for word in SMALL if rng.random() < 0.9]
    for _ in range(rng.randrange(5)):
        words.append(
            rng.choice([rng.choice(flags), "--save", "--load", "--use-checkpoint-args", "--nonsense"])
        )
        if rng.random() < 0.7:
            words.append(
                rng.choice(["2", "0", "-1", "x", "", "1e-3", "1,1", "no/such/folder", "/dev/null", "--"])
            )
    rng.shuffle(words)
    return words[: rng.randrange(len(words) + 1)] if rng.random() < 0.3 else words


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.full)])
def test_small_lines_give_a_configuration_or_a_status_and_never_a_traceback(
    count, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(count)
    environments = [
        {},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "1"},
        {"RANK": "3", "WORLD_SIZE": "2"},
    ]
    for _ in range(count):
        words, variables = some_line(rng), rng.choice([{}, {}, {}, *environments])
        monkeypatch.setattr(LaunchEnv, "read", classmethod(lambda cls, v=variables, read=READ: read(v)))
        ended = None
        try:
            with contextlib.redirect_stdout(None):
                launch_config(
                    words, args_defaults=rng.choice([None, {"lr": 1.0}, {"nonsense": 1}, {"lr": "x"}])
                )
        except SystemExit as leaving:
            ended = leaving.code
        except Exception as error:
            raise AssertionError(f"{words} {variables}") from error
        assert ended in (None, 0, 2, 3), (words, ended)


READ = LaunchEnv.read
