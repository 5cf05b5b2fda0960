import json

import pytest

from tests.harness.scripts import run_script

CONFIGURATION = ("--hidden-size", 8192, "--seq-length", 8192)


def run(*words):
    return run_script("tools/fsdp_hiding.py", *words)


def output(*words):
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tables_have_the_published_digits():
    rows = [line.split() for line in output().splitlines()]
    for row in (
        "no_shard 120.000 1 AR",
        "optim 31.406 1 AR (= RS + AG)",
        "optim_grads 16.641 1 AG + GA RS",
        "optim_grads_params 1.875 2 GA AG + GA RS",
        "1 340 1764.71 2647.06",
        "2 170 3529.41 5294.12",
        "4 85 7058.82 10588.24",
        "8 42.5 14117.65 21176.47",
        "8 7059 10588",
        "16 3529 5294",
        "32 1765 2647",
        "64 882 1324",
        "128 441 662",
        "256 221 331",
        "fp32 none 1765 2647 7059 10588",
        "fp32 full 1765 1765 7059 7059",
        "bf16 none 1765 1765 7059 7059",
        "weights and gradients 2048 34.18 307.62",
        "CP2 + recompute 4096 0.43 0.43 0.750 427 64.62",
        "CP4 2048 0.86 1.29 0.837 379 79.05",
        "CP8 1024 1.72 2.59 0.435 226 79.05",
    ):
        assert row.split() in rows, row


def test_tables_follow_the_rates():
    tables = json.loads(output("--tflops", 300, "--bandwidth-gb-per-s", 150, "--json"))
    assert [row["forward_min_tokens"] for row in tables["dense"]] == pytest.approx([2000, 4000, 8000, 16000])
    assert sorted(tables) == ["case_study", "criteria", "dense", "intensity", "moe", "zero"]


def test_part_is_exposed():
    words = (*CONFIGURATION, "--context-parallel-size", 4)
    lines = output(*words).splitlines()
    assert lines[1].split()[:5] == ["layer", "forward", "1764.71", "2048", "0.86"]
    assert "hidden, 14% of the computing to spare" in lines[1]
    assert lines[2].split()[:5] == ["layer", "backward", "2647.06", "2048", "1.29"]
    assert "exposed: 23% of gather and reduce-scatter" in lines[2]
    assert lines[3] == (
        "Exposed: layer backward; 16.3% of a layer's time is waiting. 2648 tokens a rank would hide all of it."
    )
    assert lines[4].endswith(": 0.837")
    result = json.loads(output(*words, "--json"))
    assert [phase["hidden"] for phase in result["phases"]] == [True, False]
    assert result["exposed_fraction"] == pytest.approx(1 - result["useful_fraction"])
    backward = result["phases"][1]
    assert backward["exposed_s"] == pytest.approx(backward["communication_s"] - backward["compute_s"])


def test_all_is_hidden():
    text = output(*CONFIGURATION, "--context-parallel-size", 2, "--recompute")
    assert "All communication is hidden; 1765 tokens a rank would be enough." in text
    assert "0.750" in text
    assert "exposed:" not in text


def test_dtypes_parallelism_and_experts():
    words = ("--hidden-size", 1024, "--tokens-per-gpu", 4000, "--tensor-model-parallel-size", 2, "--json")
    result = json.loads(output(*words, "--param-dtype", "fp8", "--grad-dtype", "bf16"))
    need = [phase["need_tokens"] for phase in result["phases"]]
    assert need == pytest.approx([600e3 / 170 / 2, 600e3 / 170 * 3 / 4])
    assert result["bandwidth_bytes_per_s"] == 170e9
    experts = ("--num-experts", 256, "--moe-router-topk", 8, "--expert-model-parallel-size", 16)
    result = json.loads(output(*words, *experts))
    assert [phase["part"] for phase in result["phases"]] == ["attention"] * 2 + ["experts"] * 2
    assert result["phases"][3]["need_tokens"] == pytest.approx(5294.12 * 2, rel=1e-5)
    assert not json.loads(output(*words, "--num-experts", 4))["phases"][3]["hidden"]  # top-2 of 4, EP 1


def test_a_whole_model():
    words = (*CONFIGURATION, "--context-parallel-size", 4, "--num-layers", 80, "--num-microbatches", 2)
    text = output(*words)
    assert "64,424,509,440 parameters" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["optim_grads", "144.955", "80", "160", "0", "634.18"] in rows
    result = json.loads(output(*words, "--data-parallel-size", 8, "--json"))
    assert [row["persistent_gb"] for row in result["strategies"]] == pytest.approx(
        [64.42450944 * each for each in (18, 6 + 12 / 8, 2 + 16 / 8, 18 / 8)]
    )
    assert result["working_sets"][0]["gb"] == pytest.approx(2 * 2048 * 8192 * 80 / 1e9)
    assert [phase["hidden"] for phase in result["phases"]] == [True, False]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tflops", 0), "--tflops must be finite and more than 0, not 0"),
        (("--tflops", "nan"), "--tflops must be finite and more than 0, not nan"),
        (("--tflops", "much"), "--tflops: invalid float value: 'much'"),
        (("--bandwidth-gb-per-s", "inf"), "--bandwidth-gb-per-s must be finite"),
        (("--hidden-size", 64), "--tokens-per-gpu or --seq-length must be given"),
        (("--tokens-per-gpu", 64), "--hidden-size must be given"),
        (("--recompute",), "--hidden-size must be given"),
        (("--hidden-size", 0, "--seq-length", 8), "--hidden-size must be at least 1, not 0"),
        (("--hidden-size", 8, "--seq-length", 0), "--seq-length must be at least 1, not 0"),
        (("--hidden-size", 8, "--tokens-per-gpu", -1), "--tokens-per-gpu must be finite and more than 0"),
        (("--hidden-size", 8, "--tokens-per-gpu", 8, "--seq-length", 8), "--seq-length: not allowed with"),
        ((*CONFIGURATION, "--context-parallel-size", 3), "--context-parallel-size 3 does not divide"),
        ((*CONFIGURATION, "--context-parallel-size", 0), "--context-parallel-size must be at least 1"),
        ((*CONFIGURATION, "--micro-batch-size", 0), "--micro-batch-size must be at least 1"),
        (
            (*CONFIGURATION, "--tensor-model-parallel-size", 0),
            "--tensor-model-parallel-size must be at least 1",
        ),
        (
            ("--hidden-size", 8, "--tokens-per-gpu", 8, "--context-parallel-size", 2),
            "--context-parallel-size goes with --seq-length",
        ),
        ((*CONFIGURATION, "--moe-router-topk", 2), "--moe-router-topk goes with --num-experts"),
        ((*CONFIGURATION, "--num-experts", 0), "--num-experts must be at least 1, not 0"),
        ((*CONFIGURATION, "--num-experts", 1), "--moe-router-topk of 2 is more than the 1 experts"),
        (
            (*CONFIGURATION, "--num-experts", 8, "--expert-model-parallel-size", 3),
            "--expert-model-parallel-size of 3 does not divide 8 experts",
        ),
        ((*CONFIGURATION, "--grad-dtype", "fp8"), "--grad-dtype: invalid choice: 'fp8'"),
        ((*CONFIGURATION, "--num-microbatches", 2), "--num-microbatches goes with --num-layers"),
        ((*CONFIGURATION, "--num-layers", 0), "--num-layers must be at least 1, not 0"),
        (
            (*CONFIGURATION, "--num-layers", 1, "--data-parallel-size", 0),
            "--data-parallel-size must be at least 1",
        ),
        (
            ("--hidden-size", 8, "--tokens-per-gpu", 8, "--num-layers", 1),
            "--num-layers goes with --hidden-size and --seq-length",
        ),
        ((*CONFIGURATION, "--num-layers", 1, "--num-experts", 8), "leave --num-experts out"),
        (
            (*CONFIGURATION, "--num-layers", 1, "--tensor-model-parallel-size", 2),
            "leave --tensor-model-parallel-size out",
        ),
        (("--hidden", 8), "--hidden"),
        (("--tflops", 1e290, "--bandwidth-gb-per-s", 1e-290, "--json"), "times are out of range"),
        (("--hidden-size", 10**200, "--seq-length", 8), "times are out of range: check --tflops"),
        (("--hidden-size", 8, "--tokens-per-gpu", 1e300), "times are out of range: check --tflops"),
        ((*CONFIGURATION, "--bandwidth-gb-per-s", 1e-300), "times are out of range: check --tflops"),
    ],
)
def test_what_is_no_configuration_is_refused(words, message):
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
