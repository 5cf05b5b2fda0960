"""megatron-core's own checkpoints and ours, each gone on from by the other: what one trains, the other would have.

The model, its weights, its optimizer and the data are the same on both sides, so the losses are. Runs in
`make test-wheels`, in the environment `megatron-core-0.16.1` (environments.py).
"""

import json

import pytest
import torch

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from tests.harness import launch
from tools.checkpoint import main as checkpoint

VOCAB, LENGTH, SAVED, LAST = (
    64,
    16,
    3,
    6,
)  # iterations: of the checkpoint, and those that each side goes on to
SAMPLE = torch.randint(VOCAB - 1, (LENGTH,), generator=torch.Generator().manual_seed(2))
SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 56}
TOYS = {
    "llama": {
        "model": {"num_query_groups": 2, "gated_linear_unit": True, "activation": "silu", "add_bias_linear": False,
                  "normalization": "RMSNorm"},
        "gpt": {"position_embedding_type": "rope", "rotary_base": 5000, "share_embeddings_and_output_weights": False},
        "args": {"group_query_attention": True, "num_query_groups": 2, "swiglu": True, "add_bias_linear": False,
                 "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_base": 5000,
                 "untie_embeddings_and_output_weights": True},
    },
    "gpt2": {
        "model": {"normalization": "LayerNorm", "add_bias_linear": True},
        "gpt": {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True},
        "args": {"normalization": "LayerNorm", "add_bias_linear": True, "position_embedding_type": "learned_absolute",
                 "untie_embeddings_and_output_weights": False},
    },
}  # fmt: skip
OPTIMIZER = {"optimizer": "adam", "lr": 3e-3, "min_lr": 0.0, "weight_decay": 0.1, "adam_beta1": 0.9,
             "adam_beta2": 0.95, "adam_eps": 1e-8, "clip_grad": 1.0}  # fmt: skip
# What a run of ours says by itself.
RUN = (
    f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size 4 --train-iters {LAST} --lr 3e-3 --min-lr 0 "
    "--lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --num-workers 0 --log-interval 1 --eval-iters 0 "
    "--split 1 --attention-dropout 0 --hidden-dropout 0 --data-path corpus --use-checkpoint-opt_param-scheduler"
).split()
LAYOUTS = {"whole": (1, 1, None), "tp 2": (2, 1, None), "pp 2": (1, 2, None), "vp 2": (1, 2, 2)}


def job(toy, folder, name, layout="whole", form="torch_dist", dtype="fp32", **more):
    tp, pp, vp = LAYOUTS[layout]
    model = {**SHAPE, **TOYS[toy]["model"], "layernorm_epsilon": 1e-5, "bf16": dtype == "bf16"}
    gpt = {**TOYS[toy]["gpt"], "vocab_size": VOCAB, "max_sequence_length": LENGTH}
    args = {**SHAPE, **TOYS[toy]["args"], "seq_length": LENGTH, "max_position_embeddings": LENGTH,
            "padded_vocab_size": VOCAB, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
            "global_batch_size": 4, "consumed_train_samples": 4 * SAVED, "bf16": dtype == "bf16", "norm_epsilon": 1e-5,
            **OPTIMIZER}  # fmt: skip
    return {"model": model, "gpt": gpt, "args": args, "optimizer": OPTIMIZER, "tp": tp, "pp": pp, "vp": vp,
            "data": str(folder / "data.pt"), "losses": str(folder / f"{name}.json"), "format": form, "last": LAST,
            **more}  # fmt: skip


# Checkpoints of theirs: toy, layout, format, dtype.
THEIRS = {
    "llama whole": ("llama", "whole", "torch_dist", "fp32"),
    "llama tp 2": ("llama", "tp 2", "torch_dist", "fp32"),
    "llama pp 2": ("llama", "pp 2", "torch_dist", "fp32"),
    "gpt2 tp 2": ("gpt2", "tp 2", "torch_dist", "fp32"),
    "gpt2 pp 2": ("gpt2", "pp 2", "torch_dist", "fp32"),
    "llama tp 2 of ranks": ("llama", "tp 2", "torch", "fp32"),
    "llama vp 2 of ranks": ("llama", "vp 2", "torch", "fp32"),
    "gpt2 whole of ranks": ("gpt2", "whole", "torch", "fp32"),
    "gpt2 pp 2 of ranks": ("gpt2", "pp 2", "torch", "fp32"),
    "llama tp 2 bf16": ("llama", "tp 2", "torch_dist", "bf16"),
    "gpt2 pp 2 bf16 of ranks": ("gpt2", "pp 2", "torch", "bf16"),
}


def write_data(folder):
    """A corpus of which every sample is SAMPLE and its first token, and the same for them."""
    with IndexedDatasetWriter(str(folder / "corpus"), dtype="uint16") as writer:
        writer.add_document(SAMPLE.tolist() * 40)
    tokens = SAMPLE.expand(LAST, 2, 2, LENGTH).contiguous()
    torch.save({"tokens": tokens, "labels": tokens.roll(-1, -1)}, folder / "data.pt")


def run_jobs(wheels, folder, jobs):
    (folder / "jobs.json").write_text(json.dumps(jobs))
    wheels("megatron-core-0.16.1").run("megatron_core_run.py", folder / "jobs.json", timeout_s=150)


@pytest.fixture(scope="module")
def theirs(wheels, tmp_path_factory):
    """What megatron-core has trained: a folder with a folder of checkpoints and a file of losses for each."""
    folder = tmp_path_factory.mktemp("theirs")
    write_data(folder)
    jobs = [
        job(*what, first=0, save=str(folder / name), save_before=SAVED)
        for name, (toy, *rest) in THEIRS.items()
        for what in [(toy, folder, name, *rest)]
    ]
    run_jobs(wheels, folder, jobs)
    return folder


def near(name):
    """Of losses. In 16 bits the sides round at other places."""
    return 2e-3 if "bf16" in name else 1e-5


def losses_of(run):
    return {number: float(line.split()[0]) for number, line in launch.ok(run).losses().items()}


@pytest.mark.parametrize("name", THEIRS)
def test_we_go_on_from_theirs(name, theirs, tmp_path):
    """By a run's --load, and by an import; with its optimizer."""
    expected = json.loads((theirs / f"{name}.json").read_text())
    assert expected[-1] < expected[0]
    assert checkpoint(["import", "--megatron", str(theirs / name), "--save", str(tmp_path / "ours")]) == 0
    losses = []
    for load in (theirs / name, tmp_path / "ours"):
        line = [*RUN, "--load", str(load), "--use-checkpoint-args", *(["--bf16"] if "bf16" in name else [])]
        found = losses_of(launch.run_forked(line, cwd=theirs))
        assert list(found) == list(range(SAVED + 1, LAST + 1))
        losses.append(list(found.values()))
    assert losses[0] == pytest.approx(expected[SAVED:], rel=near(name))
    assert losses[1] == losses[0]


# Of ours: the model's flags, and under which layouts of theirs its export is loaded.
MODEL = (
    f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 56 --max-position-embeddings {LENGTH} "
    f"--padded-vocab-size {VOCAB} --save ck --save-interval {SAVED} --seed 5 "
).split()
OURS = {
    "llama": "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --rotary-base 5000 --untie-embeddings-and-output-weights",
    "gpt2": "--position-embedding-type learned_absolute",
}
OURS["llama bf16"] = OURS["llama"] + " --bf16"
READ_AS = {"llama": ("whole", "tp 2", "pp 2"), "gpt2": ("tp 2", "pp 2"), "llama bf16": ("tp 2",)}


@pytest.fixture(scope="module")
def exported(wheels, tmp_path_factory):
    """Losses of our runs, all six, and of theirs from our exports behind the third, with the optimizer and without."""
    folder = tmp_path_factory.mktemp("ours")
    write_data(folder)
    losses, jobs = {}, []
    for toy, flags in OURS.items():
        (kind, _, dtype), here = toy.partition(" "), folder / toy
        here.mkdir()
        line = [*RUN, *MODEL, *flags.split()]
        line[line.index("corpus")] = str(folder / "corpus")
        losses[toy] = list(losses_of(launch.run_forked(line, cwd=here)).values())
        out = ["export", "--load", str(here / "ck"), "--ckpt-step", str(SAVED), "--max-shard-size", "20KB"]
        assert checkpoint([*out, "--megatron", str(here / "out")]) == 0
        assert checkpoint([*out, "--megatron", str(here / "weights"), "--no-load-optim"]) == 0
        for layout in READ_AS[toy]:
            more = {"first": SAVED, "load": str(here / "out")}
            jobs.append(job(kind, folder, f"{toy} {layout}", layout, dtype=dtype or "fp32", **more))
        more = {"first": SAVED, "load": str(here / "weights"), "load_optimizer": False}
        jobs.append(job(kind, folder, f"{toy} weights", dtype=dtype or "fp32", **more))
    run_jobs(wheels, folder, jobs)
    return folder, losses


@pytest.mark.parametrize(("toy", "layout"), [(toy, layout) for toy in READ_AS for layout in READ_AS[toy]])
def test_they_go_on_from_ours(toy, layout, exported):
    folder, losses = exported
    found = json.loads((folder / f"{toy} {layout}.json").read_text())
    assert found == pytest.approx(losses[toy][SAVED:], rel=near(toy))


@pytest.mark.parametrize("toy", OURS)
def test_weights_alone_are_read_without_an_optimizer(toy, exported):
    """The first loss is that of the weights; then another optimizer begins."""
    folder, losses = exported
    found = json.loads((folder / f"{toy} weights.json").read_text())
    assert found[0] == pytest.approx(losses[toy][SAVED], rel=near(toy))
    assert found[2] != pytest.approx(losses[toy][SAVED + 2], rel=3 * near(toy))
