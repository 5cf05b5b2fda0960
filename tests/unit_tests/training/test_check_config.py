"""--check-config: any number of ranks, nothing built."""

import json

import pytest
import yaml

from megatron.core import optional
from megatron.training.run.arguments import launch_config
from tests.harness.launch_lines import GPT3_175B, LLAMA3_8B, LLAMA3_405B, MIXTRAL_8X7B, SMALL


def check(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        launch_config([*words, "--check-config"])
    return ended.value.code, capsys.readouterr()


def check_json(capsys, *words):
    status, printed = check(capsys, *words, "--json")
    assert printed.out.count("\n") == 1
    return status, json.loads(printed.out)


def test_a_good_line(capsys):
    status, report = check_json(capsys, *SMALL, "--world-size", "8", "--train-iters", "20")
    assert status == 0
    assert report["problems"] == []
    assert report["not_found"] == []
    assert report["config"]["global_batch_size"] == 16
    assert report["origin"]["global_batch_size"] == "derived"
    assert report["origin"]["train_iters"] == "flag"
    assert report["origin"]["seed"] == "default"
    assert report["grid"]["sizes"] == {"tp": 1, "cp": 1, "ep": 1, "dp": 8, "pp": 1}
    assert report["grid"]["groups"] == {"dp": [list(range(8))]}
    assert report["parameters"]["per_rank"] == [report["parameters"]["total"]] * 8


def test_the_text_is_yaml_with_origins(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("\n\nadam_beta2: 0.95\n")
    status, printed = check(capsys, *SMALL, "--yaml-cfg", str(file))
    assert status == 0
    loaded = yaml.safe_load(printed.out)
    assert loaded["model"]["num_layers"] == 2
    assert loaded["optimizer"]["adam_beta2"] == 0.95
    assert loaded["optimizer"]["adam_eps"] == 1e-8
    lines = [line.strip() for line in printed.out.splitlines()]
    assert f"adam_beta2: 0.95  # {file}:3" in lines
    assert "num_layers: 2  # flag" in lines
    assert "adam_beta1: 0.9  # default" in lines
    assert any(line.startswith("# rank grid: 1 rank,") for line in lines)
    assert any(line.startswith("# parameters: ") for line in lines)


def test_175b_has_the_published_size_on_1024_ranks(capsys):
    status, report = check_json(capsys, *GPT3_175B, "--world-size", "1024", "--vocab-size", "50257")
    assert status == 0
    assert report["problems"] == []
    assert report["pipeline"]["schedule"] == "1f1b"
    assert report["pipeline"]["microbatches"] == 1536 // 8
    assert report["pipeline"]["bubble_rate"] == pytest.approx(15 / (192 + 15))
    assert report["grid"]["sizes"] == {"tp": 8, "cp": 1, "ep": 1, "dp": 8, "pp": 16}
    assert report["config"]["padded_vocab_size"] == 51200
    h, layers, vocab, positions = 12288, 96, 51200, 2048
    layer = 12 * h * h + 13 * h  # four and eight h^2 matrices, biases, two norms
    assert report["parameters"]["total"] == layers * layer + (vocab + positions) * h + 2 * h
    per_rank = report["parameters"]["per_rank"]
    assert len(per_rank) == 1024
    split_layer = 12 * h * h // 8 + (3 * h + 4 * h) // 8 + 6 * h
    assert per_rank[0] == 6 * split_layer + vocab // 8 * h + positions * h
    assert per_rank[500] == 6 * split_layer
    assert per_rank[1023] == 6 * split_layer + vocab // 8 * h + 2 * h
    assert report["not_found"][:2] == ["--vocab-file vocab.json", "--merge-file merges.txt"]
    assert "--data-path /data/corpus_text_document.bin" in report["not_found"]


def test_of_a_line_that_is_not_valid_nobody_builds_the_model(capsys):
    status, report = check_json(capsys, *LLAMA3_8B, "--world-size", "16")
    assert status == 2
    assert report["parameters"]["total"] is None
    assert "see the problems" in report["parameters"]["why"]
    told = [problem["message"] for problem in report["problems"]]
    assert "--fp8-format hybrid is not supported" in told, "what a launch says too"


def test_what_is_not_supported_is_refused_with_all_reasons_and_no_invented_count(capsys):
    status, report = check_json(
        capsys, *MIXTRAL_8X7B, *"--world-size 32 --multi-latent-attention --vocab-size 32000".split()
    )
    assert status == 2
    flags = [problem["flags"][0] for problem in report["problems"]]
    assert "--multi-latent-attention" in flags
    assert report["parameters"]["total"] is None
    assert "--multi-latent-attention" in report["parameters"]["why"]
    assert set(report["problems"][0]) == {"rule", "flags", "message", "fix"}
    assert report["grid"]["expert"]["sizes"]["ep"] == 8


@pytest.mark.grid
def test_experts_are_counted(capsys):
    """Mixtral-8x7B without its ranks of experts; 32000 ids are padded to 32000."""
    words = [
        *MIXTRAL_8X7B,
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "31999",
        "--world-size",
        "32",
    ]
    status, report = check_json(capsys, *words, "--expert-model-parallel-size", "1")
    assert status == 0, report["problems"]
    assert report["problems"] == []
    assert "--data-path /data/c_text_document.bin" in report["not_found"], "which is no problem of the line"
    counts = report["parameters"]
    assert (counts["total"], counts["experts"], counts["active"]) == (46702792704, 45097156608, 12879925248)
    assert sum(counts["per_rank"][::8]) == counts["total"], "4 pipeline ranks of 8"


def test_experts_on_ranks_of_their_own_are_counted_and_no_memory_is_made_up(capsys):
    """Mixtral-8x7B on 32 ranks: 4 pipeline stages of 8 layers, each expert on a rank of its own."""
    words = [*MIXTRAL_8X7B, *"--tokenizer-type NullTokenizer --vocab-size 31999 --world-size 32".split()]
    status, report = check_json(capsys, *words)
    assert (status, report["problems"]) == (0, [])
    counts = report["parameters"]
    assert (counts["total"], counts["experts"]) == (46702792704, 45097156608)
    experts, dense = 45097156608 // 4 // 8, (46702792704 - 45097156608) // 4
    assert sum(counts["per_rank"][::8]) == 4 * (experts + dense)


def test_an_unknown_vocabulary_is_said(capsys, tmp_path):
    words = [w for w in SMALL if w != "ByteTokenizer"]
    words += ["GPT2BPETokenizer", "--merge-file", "m", "--vocab-file"]
    status, report = check_json(capsys, *words, "v.json")
    assert status == 0
    assert "the tokenizer's files are not here" in report["parameters"]["why"]
    vocabulary = tmp_path / "v.json"
    vocabulary.write_text(json.dumps({str(i): i for i in range(300)}))
    _, report = check_json(capsys, *words, str(vocabulary))
    assert report["config"]["padded_vocab_size"] == 384
    assert report["parameters"]["total"] is not None


def test_ranks_that_do_not_divide_are_a_problem_with_no_grid(capsys):
    status, report = check_json(capsys, *SMALL, "--world-size", "6", "--tensor-model-parallel-size", "4")
    assert status == 2
    assert report["grid"] is None
    assert report["parameters"]["total"] is None
    assert "world-size" in [problem["rule"] for problem in report["problems"]]


def test_16384_ranks(capsys):
    status, report = check_json(capsys, *SMALL, "--world-size", "16384")
    assert status == 0
    assert len(report["parameters"]["per_rank"]) == 16384


@pytest.mark.parametrize(
    ("words", "per_stage"),
    [
        ("--num-layers 8", [4, 4]),
        ("--num-layers 8 --decoder-first-pipeline-num-layers 3", [3, 5]),
        ("--num-layers 7 --account-for-embedding-in-pipeline-split", [3, 4]),
        ("--num-layers 6 --pipeline-model-parallel-layout Et|tt|t|ttL", [2, 4]),
        ("--num-layers 8 --num-layers-per-virtual-pipeline-stage 2", [4, 4]),
    ],
)
def test_layers_of_each_stage_show_in_the_parameters(capsys, words, per_stage):
    _, report = check_json(
        capsys,
        *SMALL,
        "--pipeline-model-parallel-size",
        "2",
        "--world-size",
        "2",
        "--global-batch-size",
        "8",
        *words.split(),
    )
    first, last = report["parameters"]["per_rank"]
    h, layer = 64, 12 * 64 * 64 + 13 * 64
    assert [first - 384 * h - 32 * h, last - 384 * h - 2 * h] == [layers * layer for layers in per_stage]


@pytest.mark.parametrize(
    "words",
    [
        "--num-layers 7",
        "--num-layers 8 --num-layers-per-virtual-pipeline-stage 3",
        "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2",
        "--num-layers 7 --pipeline-model-parallel-layout Et|tt|t|ttL",
        "--num-layers 6 --pipeline-model-parallel-layout E(t|tt|t|ttL",
        "--num-layers 5 --pipeline-model-parallel-layout Et|tt|ttL",
    ],
)
def test_layers_that_do_not_divide_are_told(capsys, words):
    _, report = check_json(
        capsys, *SMALL, "--pipeline-model-parallel-size", "2", "--world-size", "2", *words.split()
    )
    assert "pipeline-layers" in [problem["rule"] for problem in report["problems"]]


@pytest.mark.grid
def test_405b_over_eight_chunks(capsys):
    status, report = check_json(capsys, *LLAMA3_405B, "--world-size", "64")
    assert status == 0, report["problems"]
    pipeline = report["pipeline"]
    assert (pipeline["schedule"], pipeline["ranks"], pipeline["chunks"]) == ("interleaved", 8, 8)
    assert [len(stage["layers"]) for stage in pipeline["stages"]] == [1] + [2] * 62 + [1]
    assert [stage["rank"] for stage in pipeline["stages"]] == list(range(8)) * 8
    assert pipeline["stages"][0]["embedding"]
    assert pipeline["stages"][63]["loss"]
    assert pipeline["bubble_rate"] == pytest.approx((7 / 8) / (256 + 7 / 8))
    # The published 405,853,388,800 with 128256 ids, padded to 1024s; two norms a layer and one at the end.
    padded = 129024
    assert report["config"]["padded_vocab_size"] == padded
    assert report["parameters"]["total"] == 405853388800 + 2 * (padded - 128256) * 16384
    per_rank = report["parameters"]["per_rank"]
    assert len(set(per_rank[:8])) == 1
    # Every tensor rank holds the norms; all else is divided.
    norms = 7 * (2 * 126 + 1) * 16384
    assert sum(per_rank) == report["parameters"]["total"] + norms


def test_the_text_shows_the_pipeline(capsys):
    words = "--num-layers 3 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t||ttL --world-size 2"
    status, printed = check(capsys, *SMALL, *words.split(), "--global-batch-size", "8")
    assert status == 0
    lines = printed.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("# pipeline:"))
    assert lines[at : at + 5] == [
        "# pipeline: interleaved, 2 ranks x 2 chunks, 4 microbatches a step in groups of 2, bubble 11.1% with equal "
        "stages and F = B = W",
        "#   stage 0 on pipeline rank 0: embedding, no layers",
        "#   stage 1 on pipeline rank 1: layer 0",
        "#   stage 2 on pipeline rank 0: no layers",
        "#   stage 3 on pipeline rank 1: layers 1-2, loss",
    ]


@pytest.mark.grid
def test_a_long_run_of_the_simulator_is_left_out(capsys):
    words = "--num-layers 64 --pipeline-model-parallel-size 64 --global-batch-size 1600 --world-size 64"
    _, report = check_json(capsys, *SMALL, *words.split())
    assert report["pipeline"]["microbatches"] == 800
    assert report["pipeline"]["bubble_rate"] is None
    _, report = check_json(capsys, *SMALL, *words.split(), "--global-batch-size", "160")
    assert report["pipeline"]["bubble_rate"] == pytest.approx(63 / (80 + 63))


def test_the_batch_after_the_ramp_counts(capsys):
    ramp = (
        "--global-batch-size 16 --rampup-batch-size 4 4 100 --pipeline-model-parallel-size 2 --world-size 2"
    )
    _, report = check_json(capsys, *SMALL, *ramp.split())
    assert report["pipeline"]["microbatches"] == 8


def test_a_model_that_does_not_divide_over_tensor_ranks_has_no_count_per_rank(capsys):
    words = "--num-attention-heads 4 --tensor-model-parallel-size 8 --world-size 8"
    status, report = check_json(capsys, *SMALL, *words.split())
    assert status == 2
    assert report["parameters"]["per_rank"] is None
    assert "see the problems" in report["parameters"]["why"]


def test_without_torch_all_is_said_but_what_a_model_takes(capsys, monkeypatch):
    """And what is chosen by that."""
    monkeypatch.setattr(optional, "available", lambda name: name != "torch")
    status, report = check_json(capsys, *SMALL, "--world-size", "8")
    assert (status, report["pipeline"]["schedule"]) == (0, "1f1b")
    assert report["parameters"]["total"] is None
    assert report["parameters"]["why"] == "torch is not installed here, with which a model is looked at"
    words = "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule auto --world-size 2".split()
    status, report = check_json(capsys, *SMALL, *words)
    assert (status, report["pipeline"]) == (0, None)


def test_what_is_wrong_with_a_plan_is_told_once_the_model_is_described(capsys):
    words = "--num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size 8 --pipeline-memory-limit 1K"
    status, report = check_json(capsys, *SMALL, *words.split(), "--world-size", "2")
    assert status == 2
    assert [problem["rule"] for problem in report["problems"]] == ["pipeline-plan"]


def test_the_sharding_is_told_by_what_a_rank_holds(capsys):
    words = [*SMALL, "--world-size", "8", "--use-custom-fsdp", "--num-distributed-optimizer-instances", "2"]
    words.append("--enable-full-sharding-in-hsdp")
    _, report = check_json(capsys, *words)
    assert report["sharding"] == {
        "strategy": "optim_grads_params",
        "instances": 2,
        "ways": {"weights": 4, "gradients": 4, "the optimizer's state": 8},
        "expert_ways": None,
    }
    _, printed = check(capsys, *words)
    told = "# sharding: optim_grads_params: a rank holds 1/4 of weights, 1/4 of gradients, 1/8 of the optimizer's state"
    assert told in printed.out.splitlines()
    _, report = check_json(capsys, *SMALL, "--world-size", "8", "--tensor-model-parallel-size", "3")
    assert report["sharding"] is None  # the ranks do not divide


def test_exchanges_of_a_step_are_counted_at_even_load(capsys):
    """Of 64 tokens with 2 experts each, half of the rows leave a rank and come back, twice: 64 hidden numbers each, and
    once a weight or its gradient."""
    words = (
        "--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall --padded-vocab-size 386"
    )
    line = [*SMALL, *words.split(), "--world-size", "2", "--global-batch-size", "12"]
    status, report = check_json(capsys, *line, "--expert-model-parallel-size", "2")
    assert status == 0
    assert report["exchanges"] == {"bytes_per_step": [3 * 2 * 64 * 4 * (4 * 64 + 2)]}
    assert report["parameters"]["experts_per_rank"] == [report["parameters"]["experts"] // 2] * 2
    assert report["sharding"]["expert_ways"] == dict.fromkeys(
        ("weights", "gradients", "the optimizer's state"), 1
    )
    _, report = check_json(capsys, *line)
    assert report["exchanges"] is None
