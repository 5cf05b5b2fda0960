"""What experts cost: our training step against others of the same work, one process, one thread.

    python benchmarks/experts.py                       # the tables of docs/moe.md
    python benchmarks/experts.py --against plain --dtypes fp32 --rounds 3
    python benchmarks/experts.py --memory

`plain`: the same model in plain PyTorch, with torch's grouped product (plain_moe.py). `mixtral`: Hugging Face's, with
its grouped experts and torch's attention. `dense`: our model with an MLP as wide as the experts of a token. All start
from the same weights (dense: from its own), see the same tokens, and do forward, backward, clip and fused AdamW. Steps
are interleaved; ratios are medians over pairs, of CPU time, whole and of forward and backward alone: a dense model has
fewer weights to update.

bf16: theirs have fp32 weights and run under autocast, which torch's grouped product does not know: `plain` casts for it
and `mixtral` does not, so that its experts are fp32. `plain-main`, `mixtral-main`: with our precision, bf16 weights
that are rounded fp32 ones, and fp32 gradients.

`bare`: what the products of all layers' MLPs take by themselves, in this dtype. `expected` is the dense step with its
bare products replaced by those of experts that are equally busy.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine_load import live_bytes
from benchmarks.pipeline_memory import Work
from benchmarks.plain_gpt import PlainTrainer
from benchmarks.plain_moe import PlainMoeGPT
from benchmarks.single_process import DTYPES, Batches, OurTrainer
from megatron.core.device import Device, product
from megatron.core.models.gpt.stage_layers import StageSpec

SHAPE = {"layers": 4, "hidden": 512, "heads": 8, "seq": 512, "vocab": 1024}
MICRO_BATCH = 4
EXPERTS, WIDTH, TOPK = 8, 1024, 2
LLAMA = {
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
MOE = {
    "num_experts": EXPERTS,
    "moe_router_topk": TOPK,
    "moe_ffn_hidden_size": WIDTH,
    "moe_grouped_gemm": True,
}
FLAGS = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    f"--num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-ffn-hidden-size {WIDTH} --moe-grouped-gemm"
)
AGAINST = ("plain", "plain-main", "dense", "mixtral", "mixtral-main")


class Contestant(Protocol):
    def gradients(self, batches: Batches) -> float: ...
    def update(self) -> None: ...


def ours(dtype: torch.dtype, *, dense: bool = False) -> OurTrainer:
    return OurTrainer(SHAPE, dtype, **LLAMA, **({"ffn_hidden_size": TOPK * WIDTH} if dense else MOE))


def weights_of(trainer: OurTrainer) -> dict[str, Tensor]:
    """Our main weights, whole."""
    buffer = trainer.model.buffer
    return {name: buffer.main_weight(name) for name in trainer.gpt.param_meta}


class MainWeightsTrainer(PlainTrainer):
    """One microbatch, also under autocast, with weights of `dtype`, into which fp32 main weights are rounded, whose
    gradients are fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model, dtype)
        self.main, self.model = model, copy.deepcopy(model)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)

    def gradients(self, batches: Batches) -> float:
        assert len(batches) == 1, f"{len(batches)} microbatches"
        loss = super().gradients(batches)
        for main, narrow in zip(self.main.parameters(), self.model.parameters(), strict=True):
            assert narrow.grad is not None, "every parameter is used"
            main.grad, narrow.grad = narrow.grad.float(), None
        return loss

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.main.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for main, narrow in zip(self.main.parameters(), self.model.parameters(), strict=True):
                narrow.copy_(main)


def plain(weights: dict[str, Tensor]) -> nn.Module:
    model = PlainMoeGPT(SHAPE, experts=EXPERTS, width=WIDTH, topk=TOPK)
    model.load_state_dict(weights)
    return model


class Mixtral(nn.Module):
    """Hugging Face's: (tokens, labels) -> (logits, mean loss)."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.MixtralConfig(
            vocab_size=SHAPE["vocab"],
            hidden_size=SHAPE["hidden"],
            intermediate_size=WIDTH,
            num_hidden_layers=SHAPE["layers"],
            num_attention_heads=SHAPE["heads"],
            num_key_value_heads=SHAPE["heads"],
            num_local_experts=EXPERTS,
            num_experts_per_tok=TOPK,
            max_position_embeddings=SHAPE["seq"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            rms_norm_eps=1e-5,
            use_cache=False,
            attn_implementation="sdpa",
        )
        config._experts_implementation = "grouped_mm"
        self.model = transformers.MixtralForCausalLM(config)
        assert self.model.config._experts_implementation == "grouped_mm"

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(tokens).logits
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def copy(self, weights: dict[str, Tensor]) -> None:
        """Our weights under its names."""
        found = {
            "model.embed_tokens.weight": weights["embedding.word_embeddings.weight"],
            "model.norm.weight": weights["decoder.final_layernorm.weight"],
            "lm_head.weight": weights["output_layer.weight"],
        }
        for number in range(SHAPE["layers"]):
            of, to = f"decoder.layers.{number}.", f"model.layers.{number}."
            qkv = weights[of + "self_attention.linear_qkv.weight"]
            parts = qkv.view(SHAPE["heads"], 3, -1, SHAPE["hidden"]).unbind(1)
            for name, part in zip("qkv", parts, strict=True):
                found[f"{to}self_attn.{name}_proj.weight"] = part.flatten(0, 1)
            found[to + "self_attn.o_proj.weight"] = weights[of + "self_attention.linear_proj.weight"]
            found[to + "input_layernorm.weight"] = weights[of + "input_layernorm.weight"]
            found[to + "post_attention_layernorm.weight"] = weights[of + "pre_mlp_layernorm.weight"]
            found[to + "mlp.gate.weight"] = weights[of + "mlp.router.weight"]
            found[to + "mlp.experts.gate_up_proj"] = weights[of + "mlp.experts.linear_fc1.weight"]
            found[to + "mlp.experts.down_proj"] = weights[of + "mlp.experts.linear_fc2.weight"]
        self.model.load_state_dict(found)


def mixtral(weights: dict[str, Tensor]) -> nn.Module:
    model = Mixtral()
    model.copy(weights)
    return model


def opponent(name: str, dtype: torch.dtype, weights: dict[str, Tensor]) -> Contestant:
    if name == "dense":
        return ours(dtype, dense=True)
    kind, _, main = name.partition("-")
    model = plain(weights) if kind == "plain" else mixtral(weights)
    return MainWeightsTrainer(model, dtype) if main else PlainTrainer(model, dtype)


def make_batches() -> Batches:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(SHAPE["vocab"], (MICRO_BATCH, SHAPE["seq"] + 1), generator=generator)
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous())]


def timed(contestant: Contestant, batches: Batches) -> tuple[float, float, float]:
    """(loss, CPU seconds of forward and backward, of the whole step)."""
    begin = time.process_time()
    loss = contestant.gradients(batches)
    middle = time.process_time()
    contestant.update()
    return loss, middle - begin, time.process_time() - begin


def bare_products(dtype: torch.dtype, *, dense: bool) -> float:
    """CPU seconds of a layer's MLP's products alone: values, gradients of inputs and of weights."""
    tokens = MICRO_BATCH * SHAPE["seq"]
    number, rows, width = (1, tokens, TOPK * WIDTH) if dense else (EXPERTS, tokens * TOPK // EXPERTS, WIDTH)
    sizes = ((SHAPE["hidden"], 2 * width), (width, SHAPE["hidden"]))
    operands = [
        [(torch.randn(rows, i).to(dtype), torch.randn(o, i).to(dtype), torch.randn(rows, o).to(dtype))
         for _ in range(number)]
        for i, o in sizes
    ]  # fmt: skip
    begin = time.process_time()
    for of_projection in operands:
        for x, weight, dy in of_projection:
            product(x, weight.t())
            product(dy, weight)
            product(dy.t(), x)
    return time.process_time() - begin


def compare(name: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Interleaved steps of ours and of another; medians of the pairs."""
    batches, first = make_batches(), ours(DTYPES[dtype])
    second = opponent(name, DTYPES[dtype], weights_of(first))
    pair: dict[str, Contestant] = {"ours": first, name: second}
    losses = {key: timed(one, batches)[0] for key, one in pair.items()}  # warm-up
    if name != "dense":
        bound = 1e-4 if dtype == "fp32" else 3e-2
        assert abs(losses["ours"] - losses[name]) < bound, f"not the same work: {losses}"
    runs: dict[str, list[tuple[float, float]]] = {key: [] for key in pair}
    bare: dict[str, list[float]] = {"experts": [], "dense": []}
    for number in range(rounds):
        for key in pair if number % 2 else reversed(pair):
            runs[key].append(timed(pair[key], batches)[1:])
        if name == "dense":
            for key, values in bare.items():
                values.append(bare_products(DTYPES[dtype], dense=key == "dense"))
    result: dict[str, Any] = {"dtype": dtype, "against": name, "losses": losses}
    for place, part in enumerate(("gradients", "step")):
        mine, theirs = ([one[place] for one in runs[key]] for key in pair)
        result[f"{part}_s"] = statistics.median(mine), statistics.median(theirs)
        result[f"{part}_ratio"] = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    if name == "dense":
        experts, dense = (SHAPE["layers"] * statistics.median(values) for values in bare.values())
        result["bare_s"] = experts, dense
        own, other = result["gradients_s"]
        result["expected_ratio"] = own / (other - dense + experts)
    return result


def text_of(result: dict[str, Any]) -> str:
    line = f"{result['dtype']} against {result['against']:12}"
    for part in ("gradients", "step"):
        mine, theirs = result[f"{part}_s"]
        line += f" | {part} {mine:.3f} {theirs:.3f} s, {result[f'{part}_ratio']:.3f}"
    if "bare_s" in result:
        experts, dense = result["bare_s"]
        line += f" | bare {experts:.3f} {dense:.3f} s, {experts / dense:.3f}"
        line += f"; of expected {result['expected_ratio']:.3f}"
    return line


def memory(dtype: str) -> str:
    """Bytes that a forward keeps for its backward, planned and measured."""
    sizes = {name: SHAPE[name] for name in ("hidden", "heads", "seq", "vocab")}
    flags = (*FLAGS.split(), *(["--bf16"] if dtype == "bf16" else []))
    work = Work(1, SHAPE["layers"], 1, **sizes, micro_batch=MICRO_BATCH, flags=flags)
    costs = work.config("1f1b", 0).model_costs
    assert costs is not None, "the configuration is complete"
    whole = StageSpec(tuple(range(SHAPE["layers"])), embedding=True, loss=True)
    planned = costs.of_stages([whole]).activation[0] / 2**20
    trainer, (batch,) = ours(DTYPES[dtype]), make_batches()
    trainer.model.begin_step(1)
    kept: list[Tensor] = []
    for _ in range(2):  # the first is not measured
        kept.clear()
        gc.collect()
        before = live_bytes(Device("cpu"))
        kept.append(trainer.loss(*batch))
        measured = (live_bytes(Device("cpu")) - before) / 2**20
    return f"{dtype} held: planned {planned:.1f} MiB, measured {measured:.1f} MiB, {measured / planned:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", nargs="+", choices=AGAINST, default=list(AGAINST))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=7, help="timed pairs of steps")
    parser.add_argument("--memory", action="store_true", help="bytes held alone")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for dtype in args.dtypes:
        print(memory(dtype), flush=True)
        if args.memory:
            continue
        for name in args.against:
            if dtype == "fp32" and name.endswith("-main"):
                continue  # main weights are the model's
            results.append(compare(name, dtype, args.rounds))
            print(text_of(results[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
