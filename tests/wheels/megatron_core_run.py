"""A few iterations of megatron-core's GPT on CPU ranks, from and to its own checkpoints: `JOBS.json`, a list of jobs.

A job: model (fields of its TransformerConfig), gpt (arguments of its GPTModel), optimizer (fields of its
OptimizerConfig), args (what a launch of Megatron-LM would keep in a checkpoint), tp, pp, vp, data (file of torch.save:
tokens, labels [iterations, microbatches, micro batch size, sequence]), first and last iteration (counted from 0);
load, load_optimizer; save, save_before (an iteration), format (torch_dist, torch); losses: file for the losses, a JSON
list.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import megatron_core_shims  # noqa: F401
import ranks
import torch
import torch._dynamo  # optimizers import it at their first step: once, before ranks are forked
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}


class Trained:
    """The model chunks of a rank, their optimizer and schedule."""

    def __init__(self, job):
        self.job, self.vp = job, job.get("vp")
        parallel_state.initialize_model_parallel(
            job["tp"], job["pp"], virtual_pipeline_model_parallel_size=self.vp
        )
        tensor_parallel.random.get_cuda_rng_tracker()
        torch.manual_seed(job.get("seed", 1))
        fields = dict(job["model"])
        fields["activation_func"] = ACTIVATIONS[fields.pop("activation", "gelu")]
        self.dtype = torch.bfloat16 if fields.get("bf16") else torch.float32
        self.config = TransformerConfig(
            **fields, tensor_model_parallel_size=job["tp"], pipeline_model_parallel_size=job["pp"],
            virtual_pipeline_model_parallel_size=self.vp, use_cpu_initialization=True, pipeline_dtype=self.dtype,
            params_dtype=self.dtype, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
            bias_dropout_fusion=False, bias_activation_fusion=False, attention_dropout=0.0, hidden_dropout=0.0,
        )  # fmt: skip
        spec = get_gpt_layer_local_spec(
            qk_layernorm=fields.get("qk_layernorm", False), normalization=fields["normalization"]
        )
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.bare = []
        for stage in range(self.vp or 1):
            ends = {"ignore_virtual": False, "vp_stage": stage if self.vp else None}
            self.bare.append(
                GPTModel(
                    self.config, spec, pre_process=parallel_state.is_pipeline_first_stage(**ends),
                    post_process=parallel_state.is_pipeline_last_stage(**ends), vp_stage=ends["vp_stage"],
                    **job["gpt"],
                )
            )  # fmt: skip
        if self.dtype != torch.float32:
            self.bare = [model.to(self.dtype) for model in self.bare]
        self.model = [DistributedDataParallel(self.config, ddp, model) for model in self.bare]
        self.config.finalize_model_grads_func = finalize_model_grads
        settings = OptimizerConfig(
            **job["optimizer"], bf16=self.dtype == torch.bfloat16, params_dtype=self.dtype
        )
        self.optimizer = get_megatron_optimizer(settings, self.model)
        decay = settings.weight_decay
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=settings.lr, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=1000,
            lr_decay_style="constant", start_wd=decay, end_wd=decay, wd_incr_steps=1000, wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
        )  # fmt: skip

    def iteration(self, tokens, labels):
        """tokens, labels: [microbatches, micro batch size, sequence]. The mean loss, on the last stage."""
        number, size, length = tokens.shape
        positions = torch.arange(length).expand(size, length)
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]

        def forward_step(data, model):
            at = next(data)

            def loss(output):
                mean = output.float().mean()
                return mean, {"loss": mean.detach().clone()}  # it is divided in place

            return model(tokens[at], positions, mask, labels=labels[at]), loss

        for model in self.model:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        data = [iter(range(number)) for _ in self.model]
        told = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data if self.vp else data[0],
            model=self.model if self.vp else self.model[0], num_microbatches=number, seq_length=length,
            micro_batch_size=size, forward_only=False,
        )  # fmt: skip
        self.optimizer.step()
        self.scheduler.step(number * size)
        return float(sum(one["loss"] for one in told) / number) if told else None

    def _state(self, iteration, sharded, is_loading=False):
        """What Megatron-LM saves, with tensors whole or as shards that know their place."""
        keys = ["model"] if not self.vp else [f"model{n}" for n in range(self.vp)]
        state = {
            "args": argparse.Namespace(**self.job["args"]),
            "checkpoint_version": 3.0,
            "iteration": iteration,
        }
        for key, model in zip(keys, self.bare, strict=True):
            state[key] = model.sharded_state_dict() if sharded else model.state_dict_for_save_checkpoint()
        if not (is_loading and not self.job.get("load_optimizer", True)):
            models = {key: state[key] for key in keys}
            state["optimizer"] = (
                self.optimizer.sharded_state_dict(
                    models if self.vp else models["model"], is_loading=is_loading
                )
                if sharded
                else self.optimizer.state_dict()
            )
            state["opt_param_scheduler"] = self.scheduler.state_dict()
        return state

    def save(self, root, iteration):
        name = f"iter_{iteration:07d}"
        if self.job["format"] == "torch_dist":
            (root / name).mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(self._state(iteration, True), str(root / name))
        else:
            tp, pp = (
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_pipeline_model_parallel_rank(),
            )
            rank = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.job["pp"] > 1 else "")
            (root / name / rank).mkdir(parents=True, exist_ok=True)
            state = self._state(iteration, False)
            state["rng_state"] = [
                {"random_rng_state": random.getstate(), "torch_rng_state": torch.get_rng_state()}
            ]
            torch.save(state, root / name / rank / "model_optim_rng.pt")
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))

    def load(self, root):
        iteration = (root / "latest_checkpointed_iteration.txt").read_text().strip()
        folder = root / (iteration if iteration == "release" else f"iter_{int(iteration):07d}")
        state = dist_checkpointing.load(self._state(0, True, is_loading=True), str(folder))
        for key, model in zip(
            sorted(key for key in state if key.startswith("model")), self.bare, strict=True
        ):
            model.load_state_dict(state[key])
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["opt_param_scheduler"])
        elif self.dtype != torch.float32:
            self.optimizer.reload_model_params()
        return state


def run(ctx, job):
    trained = Trained(job)
    data = torch.load(job["data"])
    if job.get("load"):
        trained.load(Path(job["load"]))
    losses = []
    for number in range(job["first"], job["last"]):
        if number == job.get("save_before"):
            trained.save(Path(job["save"]), number)
        losses.append(trained.iteration(data["tokens"][number], data["labels"][number]))
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in json.loads(Path(sys.argv[1]).read_text()):
        told = ranks.run_ranks(run, each["tp"] * each["pp"], each, timeout=60)
        Path(each["losses"]).write_text(json.dumps(next(losses for losses in told if None not in losses)))
