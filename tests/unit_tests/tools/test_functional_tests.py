"""Cases and golden values: what is read, what is refused, what is judged how."""

import json
from typing import get_args

import pytest

from megatron.training.config.flag_table import flag_table
from megatron.training.report.metrics_file import MetricsFile
from tools import functional_tests
from tools.cases.case import CASES, ROOT, CaseError, read_case

PLAN = {"estimated_bubble": 0.25, "persistent_bytes_per_rank": [100, 200]}
IMAGE = {"torch": "2", "processor": "some", "threads": 1, "device": "cpu"}
CASE = "MODEL_ARGS:\n  --num-layers: 2\n  --train-iters: 4\n"


def logs(folder, image=IMAGE, **changed):
    """A run's folder, its losses 4, 3, 2, 1 but for what is changed."""
    file = MetricsFile(folder / "metrics.jsonl")
    file.event("start", 0, plan=PLAN, image=image)
    for step in range(1, 5):
        row = {"lm loss": 5.0 - step, "num-zeros": 10.0, "learning-rate": 0.1, "iteration-time": 1.0}
        row |= {"mem-allocated-bytes": 100, "measured-bubble": step * 0.1}
        file.record({**row, **(changed if step == 3 else {})}, step)
    file.close()
    return folder


@pytest.fixture
def case(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(CASE)
    return path


@pytest.fixture
def golden(case, tmp_path):
    """Written of `logs`, and its path."""
    from tools.cases.golden import RunFigures, digest, read_logs, write_golden
    from tools.cases.judge import judged

    read = read_case(case)
    figures = RunFigures(*read_logs(logs(tmp_path / "first")), "", digest(read))
    write_golden(read.golden, figures, judged(figures, None))
    return read.golden


def compare(case, folder, capsys, *more):
    """(status, what is said)."""
    status = functional_tests.main(["compare", str(case), "--logs", str(folder), *more])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_the_file_is_megatrons_with_the_image(golden):
    table = json.loads(golden.read_text())
    values = {"1": 4.0, "2": 3.0, "3": 2.0, "4": 1.0}
    assert table["lm loss"] == {"start_step": 1, "end_step": 4, "step_interval": 1, "values": values}
    assert table["image"] == IMAGE
    assert table["persistent-bytes"]["values"] == {"0": 200.0}
    assert "measured-bubble" not in table
    assert "mem-allocated-bytes" not in table


def test_a_changed_bit_is_found_in_the_run_and_in_the_file(case, golden, tmp_path, capsys):
    assert compare(case, tmp_path / "first", capsys)[0] == 0
    status, said = compare(case, logs(tmp_path / "other", **{"lm loss": 2.0000000000000004}), capsys)
    assert status == 1
    assert "FAIL lm loss: 1 value of 4 differ, first step 3: 2.0 expected, 2.0000000000000004 found" in said
    golden.write_text(golden.read_text().replace('"3": 2.0', '"3": 1.9999999999999998'))
    status, said = compare(case, tmp_path / "first", capsys)
    assert status == 1
    assert "step 3: 1.9999999999999998 expected, 2.0 found" in said


@pytest.mark.parametrize(
    ("changed", "passes"),
    [
        ({"lm loss": 2.09, "num-zeros": 11.9}, True),
        ({"lm loss": 2.2}, True),  # one step is forgiven
        ({"learning-rate": 0.1001}, False),  # which follows from the flags
    ],
)
def test_of_another_image_values_are_near(case, golden, tmp_path, capsys, changed, passes):
    folder = logs(tmp_path / "other", image={**IMAGE, "processor": "another"}, **changed)
    status, said = compare(case, folder, capsys)
    assert "golden values of another image" in said
    assert (status == 0) is passes, said


@pytest.mark.parametrize(("zeros", "passes"), [(2.0, True), (1.0, False)])
def test_of_another_image_few_zeros_may_scatter(case, golden, tmp_path, capsys, zeros, passes):
    """The run has 10, where a toy model has some by rounding alone."""
    table = json.loads(golden.read_text())
    table["num-zeros"]["values"] = dict.fromkeys("1234", zeros)
    golden.write_text(json.dumps(table))
    folder = logs(tmp_path / "other", image={**IMAGE, "processor": "another"})
    status, said = compare(case, folder, capsys)
    assert (status == 0) is passes, said


def test_two_losses_of_four_that_are_far_are_not_forgiven(case, golden, tmp_path, capsys):
    table = json.loads(golden.read_text())
    table["lm loss"]["values"] |= {"1": 4.3, "2": 3.3}
    golden.write_text(json.dumps({"lm loss": table["lm loss"]}))  # as Megatron's: without an image
    status, said = compare(case, tmp_path / "first", capsys)
    assert status == 1
    assert "2 of 4 values within 5.0%, first not: step 1: 4.3 expected, 4.0 found" in said


def test_time_is_shown_and_judged_where_that_is_asked_for(case, golden, tmp_path, capsys):
    folder = logs(tmp_path / "other", **{"iteration-time": 9.0})
    status, said = compare(case, folder, capsys)
    assert status == 0
    assert "iteration-time: 5 x the golden 1" in said
    assert compare(case, folder, capsys, "--judge-time")[0] == 1


def test_memory_that_the_case_names_is_a_ratio(case, tmp_path, capsys):
    case.write_text(CASE + "METRICS: [lm loss, mem-allocated-bytes]\n")
    table = {"lm loss": {"values": {"3": 2.0}}, "mem-allocated-bytes": {"values": {"3": 90, "4": 90}}}
    case.with_suffix(".golden.json").write_text(json.dumps(table))
    status, said = compare(case, logs(tmp_path / "logs"), capsys)
    assert status == 1
    assert "FAIL mem-allocated-bytes: 1.111 x the golden 90" in said


def test_tensorboards_files_are_read(case, golden, tmp_path, capsys):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path / "tb")
    for step in range(1, 5):
        for tag, value in {"lm loss": 5.0 - step, "num-zeros": 10, "learning-rate": 0.1}.items():
            writer.add_scalar(tag, value, step)
    writer.close()
    table = json.loads(golden.read_text())
    kept = {name: table[name] for name in ("image", "lm loss", "num-zeros", "learning-rate")}
    golden.write_text(json.dumps(kept))
    assert compare(case, tmp_path / "tb", capsys)[0] == 0
    assert compare(case, tmp_path / "nothing", capsys) == (
        2,
        f"functional_tests.py: {tmp_path}/nothing: neither metrics.jsonl nor TensorBoard's files\n",
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("MODEL_ARG:\n  --num-layers: 2\n", "line 1: no key 'MODEL_ARG' of a case: did you mean MODEL_ARGS?"),
        ("MODEL_ARGS:\n  --num-layer: 2\n", "line 2: no flag --num-layer: did you mean --num-layers?"),
        ("MODEL_ARGS:\n  --num-layers: 2\n  --num-layers: 3\n", "line 3: --num-layers stands there twice"),
        (
            CASE + "TEST_TYPE: ckpt-resum\n",
            "line 4: TEST_TYPE: no test type 'ckpt-resum': did you mean ckpt-resume",
        ),
        (CASE + "TEST_TYPE: frozen-start\n", "line 4: TEST_TYPE: frozen-start is not built; regular, "),
        (CASE + "BEFORE_SCRIPT: rm -r /\n", "line 4: BEFORE_SCRIPT is not run"),
        (CASE + "RANKS: two\n", "line 4: RANKS: expected a number of ranks, found 'two'"),
        (CASE + "EXTENDS: other.yaml\n", "line 4: EXTENDS: "),
        (CASE + "EXTENDS: mine.yaml\n", "extends itself"),
        (CASE + "MODEL_ARGS_3:\n  --num-layers: 3\n", "runs behind the first are 2, 3 ... without a gap"),
        ("TEST_TYPE: regular\n", "no MODEL_ARGS"),
        ("- a\n", "line 1: expected names with values"),
        ("MODEL_ARGS: [\n", "while parsing"),
    ],
)
def test_what_is_wrong_with_a_case_is_named_with_its_line(case, text, says):
    case.write_text(text)
    with pytest.raises(CaseError) as error:
        read_case(case)
    assert says in str(error.value)
    assert str(case) in str(error.value)


def test_a_variable_without_a_value(case):
    case.write_text(CASE + "  --data-path: ${DATA_PTH}/text\n")
    with pytest.raises(CaseError, match=r"line 4: \$\{DATA_PTH\} has no value: did you mean DATA_PATH"):
        read_case(case).runs[0].words({"DATA_PATH": "/data"})


def test_values_are_words_as_they_are_written(case):
    case.write_text(
        "MODEL_ARGS:\n  --lr: 1e-2\n  --split: 949,50,1\n  --bf16: true\n  --fp16: false\n"
        "  --recompute-modules: [core_attn mlp]\n  --save: ${HERE}/a b\n"
    )
    words = read_case(case).runs[0].words({"HERE": "/x"})
    assert words == [
        *("--lr", "1e-2", "--split", "949,50,1", "--bf16"),
        *("--recompute-modules", "core_attn", "mlp", "--save", "/x/a b"),
    ]


def test_a_case_lays_its_flags_over_those_it_extends(tmp_path):
    (tmp_path / "base.yaml").write_text(CASE + "  --bf16: true\nENV_VARS:\n  A: 1\n")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# What it is.\nEXTENDS: base.yaml\nMODEL_ARGS:\n  --bf16: false\n"
        "  --pipeline-model-parallel-size: 2\nMODEL_ARGS_2:\n  --tensor-model-parallel-size: 2\nRANKS_2: 8\n"
    )
    read = read_case(path)
    assert (read.about, read.type, [run.ranks for run in read.runs]) == ("What it is.", "regular", [2, 8])
    assert read.runs[0].words({}) == [
        *("--num-layers", "2", "--train-iters", "4", "--pipeline-model-parallel-size", "2")
    ]
    assert read.runs[1].words({})[-2:] == ["--tensor-model-parallel-size", "2"]
    assert [*read.env] == ["A"]


def test_golden_values_of_another_case_or_none_and_metrics_that_are_not_there(case, golden, tmp_path, capsys):
    case.write_text(CASE.replace("4", "5"))
    status, said = compare(case, tmp_path / "first", capsys)
    assert (status, "the golden values of another case" in said) == (2, True)
    case.write_text(CASE + "METRICS: [lm loss, mtp_1 loss]\n")
    status, said = compare(case, tmp_path / "first", capsys, "--golden", str(golden))
    assert status == 2
    golden.unlink()
    status, said = compare(case, tmp_path / "first", capsys)
    assert (status, "no golden values" in said) == (2, True)
    golden.write_text('{"lm loss": {"values": {"1": 4.0}}}')
    status, said = compare(case, tmp_path / "first", capsys)
    assert (status, "METRICS: the run has no mtp_1 loss; it has " in said) == (2, True)
    golden.write_text('{"lm loss": 3}')
    status, said = compare(case, tmp_path / "first", capsys)
    assert (status, "'lm loss' has no values by steps" in said) == (2, True)


def test_golden_values_are_read_before_a_case_is_run(case, golden, tmp_path, capsys):
    case.write_text(CASE.replace("4", "5"))
    assert functional_tests.main(["run", str(case), "--out", str(tmp_path / "out")]) == 2
    assert "the golden values of another case" in capsys.readouterr().err
    golden.unlink()
    assert functional_tests.main(["run", str(case), "--out", str(tmp_path / "out")]) == 2
    assert "no golden values" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_keys_without_a_meaning_are_listed_once(case, golden, tmp_path, capsys):
    case.write_text("MODE: pretraining\nN_REPEAT: 5\n" + CASE)
    assert "without a meaning here: MODE, N_REPEAT\n" in compare(case, tmp_path / "first", capsys)[1]


def test_a_launcher_that_is_not_there_and_a_case_that_is_not(case, golden, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert functional_tests.main(["run", str(case), "--launcher", "slurm"]) == 2
    assert "--launcher slurm: there is no sbatch on this machine" in capsys.readouterr().err
    assert functional_tests.main(["run", "schedule_zbw"]) == 2
    assert "did you mean schedule_zbv?" in capsys.readouterr().err


def test_a_run_that_fails_under_slurm_shows_what_its_job_has_said(case, tmp_path, capsys, monkeypatch):
    """And not the end of the script that was submitted."""
    programs, text = (
        tmp_path / "programs",
        "#!/bin/sh\ncat > /dev/null\necho out of memory > zero-7.log\necho no >&2\nexit 5\n",
    )
    programs.mkdir()
    (programs / "sbatch").write_text(text)
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    case.write_text("EXTENDS: toy\nMODEL_ARGS:\n  --train-iters: 4\n")
    assert functional_tests.main(["record", str(case), "--dirty", "--launcher", "slurm"]) == 1
    said = capsys.readouterr().err
    assert "run 1 has ended with status 5" in said
    assert said.rstrip().endswith("status 5:\nno\nout of memory")


def test_every_case_here_says_what_it_is_and_has_golden_values():
    paths = sorted(CASES.glob("*.yaml"))
    assert len(paths) >= 20
    for case in map(read_case, paths):
        assert case.about.endswith("."), f"{case.path}: the first line is a comment that says what it is"
        assert case.golden.is_file(), f"{case.path}: record it"
        assert case.type != "frozen-resume" or case.frozen.is_dir()


def test_every_example_schedule_and_strategy_has_a_case():
    cases = [read_case(path) for path in CASES.glob("*.yaml")]
    abouts = " ".join(case.about for case in cases)
    examples = [str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.sh")]
    assert [example for example in examples if example not in abouts] == []
    names = {"pipeline_schedule": "schedule", "data_parallel_sharding_strategy": "sharding"}
    for flag, name in names.items():
        field = flag_table()[flag].field
        expected = {
            f"{name}_{value.replace('-', '_')}" for value in {*get_args(field.type)} - {"auto", field.default}
        }
        assert expected <= {case.name for case in cases}
