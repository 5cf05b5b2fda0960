"""What the user said -> a complete configuration: every derived size, the same way Megatron derives it (floor 0).

Pure but for the facts passed in (`Machine`): nothing here reads files, environment or devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os.path
from collections.abc import Mapping
from typing import Any

from megatron.core.distributed.sharding import main_grads_dtype
from megatron.core.model_parallel_config import asked_schedules
from megatron.core.models.gpt.parameter_count import padded_vocabulary
from megatron.core.models.gpt.stage_layers import StageLayersError
from megatron.core.models.gpt.stage_schedule import stages_of
from megatron.core.optimizer.schedule_lengths import schedule_lengths
from megatron.core.pipeline_parallel.plan.schedules import AUTO
from megatron.core.sharding_table import grads_are_sharded, weights_are_sharded
from megatron.core.transport.rank_grid import RankGridError, check_instances
from megatron.training.config import no_effect
from megatron.training.config.config import DEFAULT_ORIGIN, FIELDS, Config, is_given
from megatron.training.config.rule_table import differs, spelled
from megatron.training.config.state_bytes import SPEEDS

BYTE_VOCABULARY = 257  # of the built-in byte tokenizer: 256 bytes and the end of a document
# Each names text that a tokenizer has written. Mock data and a provider of the user's own only have ids.
CORPORA = (
    *("data_path", "data_args_path", "per_split_data_args_path"),
    *("train_data_path", "valid_data_path", "test_data_path"),
)
_STRATEGY, _OUTER = "data_parallel_sharding_strategy", "outer_dp_sharding_strategy"
_INSTANCES = "num_distributed_optimizer_instances"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Facts about where the run is: ranks of the launcher, a GPU or not, memory for a rank where they share the
    machine's."""

    world_size: int = 1
    has_gpu: bool = False
    rank_memory_bytes: int | None = None


def resolve(
    values: Mapping[str, Any],
    origin: Mapping[str, str],
    machine: Machine,
    *,
    extra: Mapping[str, Any] | None = None,
    warnings: tuple[str, ...] = (),
) -> Config:
    """Fill everything that follows from other values. Never fails: what makes no sense is left for the rules."""
    r = _Resolver(values, origin, machine, warnings)
    return Config.from_flat(
        r.values, extra=extra, origin=r.origin, warnings=tuple(r.warnings), notes=tuple(r.notes)
    )


class _Resolver:
    """Values by destination name with their origins, and what is told; each method looks at one subject."""

    def __init__(
        self,
        values: Mapping[str, Any],
        origin: Mapping[str, str],
        machine: Machine,
        warnings: tuple[str, ...],
    ) -> None:
        defaults: dict[str, Any] = {name: field.default for name, (_, field) in FIELDS.items()}
        self.values = defaults | dict(values)
        self.origin = dict.fromkeys(FIELDS, DEFAULT_ORIGIN) | dict(origin)
        self.machine = machine
        self.warnings = list(warnings)
        self.notes: list[str] = []
        for subject in (self.ranks, self.memory, self.model, self.pipeline, self.precision):
            subject()
        for subject in (self.strategy, self.instances, self.overlap, self.dtypes, self.fsdp_without_effect):
            subject()
        for subject in (
            self.length,
            self.rate_schedules,
            self.ramp,
            self.tokenizer_and_data,
            self.files_and_logs,
        ):
            subject()
        self.without_effect()

    def given(self, name: str) -> bool:
        return is_given(self.origin[name])

    def derive(self, name: str, value: Any, origin: str = "derived") -> None:
        if self.values[name] != value:
            self.values[name], self.origin[name] = value, origin

    def fill(self, name: str, value: Any, origin: str = "derived") -> None:
        """Derive a value that was left unset."""
        if self.values[name] is None and value is not None:
            self.derive(name, value, origin)

    def told(self, name: str) -> str:
        return f"{spelled(name)} {self.values[name]}"

    def ranks(self) -> None:
        v = self.values
        self.fill("world_size", self.machine.world_size, "launcher")
        self.fill("expert_tensor_parallel_size", v["tensor_model_parallel_size"])
        if v["distributed_backend"] == "nccl" and not self.machine.has_gpu:
            self.warnings.append("--distributed-backend nccl: this machine shows no GPU, gloo is used")
            self.derive("distributed_backend", "gloo")
        self.fill("distributed_backend", "nccl" if self.machine.has_gpu else "gloo")

    def memory(self) -> None:
        """What --rank-memory-limit needs beside it. On GPUs `auto` is known once there is a device."""
        v, memory = self.values, self.machine.rank_memory_bytes
        if v["rank_memory_limit"] is None:
            return
        if v["rank_memory_limit"] == "auto" and v["distributed_backend"] != "nccl" and memory is not None:
            self.derive("rank_memory_limit", memory)
        tflops, gb_per_s = SPEEDS[v["distributed_backend"]]
        self.fill("achieved_tflops", tflops)
        self.fill("dp_bandwidth_gb_per_s", gb_per_s)

    def model(self) -> None:
        v = self.values
        self.fill("max_position_embeddings", v["seq_length"])
        if v["use_rotary_position_embeddings"] and not self.given("position_embedding_type"):
            self.derive("position_embedding_type", "rope")
        if v["use_flash_attn"] and not self.given("attention_backend"):
            self.derive("attention_backend", "flash")
        if v["recompute_activations"]:
            self.fill("recompute_granularity", "selective")
        if v["apply_query_key_layer_scaling"]:
            self.derive("attention_softmax_in_fp32", True)
        if not v["group_query_attention"] and v["num_query_groups"] not in (1, v["num_attention_heads"]):
            self.warnings.append("--num-query-groups has no effect without --group-query-attention")
        with contextlib.suppress(ValueError, ZeroDivisionError, TypeError):  # rules tell
            resolved = Config.from_flat(v).model.resolved()
            for name in ("ffn_hidden_size", "kv_channels", "num_query_groups"):
                self.derive(name, getattr(resolved, name))

    def pipeline(self) -> None:
        """The schedule follows from its flags or the number of chunks, the size of microbatch groups from both."""
        v = self.values
        if v["zero_bubble_v_schedule"]:
            self.derive("enable_zero_bubble", True)
        if v["num_layers"] is None or v["pipeline_schedule_file"] is not None:
            return  # a rule tells; the plan has a schedule and stages of its own
        asked = list(asked_schedules(Config.from_flat(v).parallel).values())
        if asked or v["rank_memory_limit"] is not None:
            self.fill("pipeline_schedule", asked[0] if asked else AUTO)
        parallel = Config.from_flat(v).parallel
        with contextlib.suppress(StageLayersError):  # a rule tells
            stages = stages_of(parallel, v["num_layers"], v["pipeline_schedule"])
            interleaved = len(stages) > parallel.pipeline_model_parallel_size
            self.fill("pipeline_schedule", "interleaved" if interleaved else "1f1b")
            if interleaved and v["pipeline_schedule"] == "interleaved":
                self.fill("microbatch_group_size_per_vp_stage", parallel.pipeline_model_parallel_size)

    def precision(self) -> None:
        v = self.values
        if v["bf16"] and not v["grad_reduce_in_bf16"]:
            self.derive("accumulate_allreduce_grads_in_fp32", True)
        if v["fp16"] and v["loss_scale"] is None:
            # A dynamic loss scale finds its ceiling by overflowing: non-finite steps are its business.
            self.derive("check_for_nan_in_loss_and_grad", False)
        if v["rerun_mode"] == "validate_results" and not self.given("nan_policy"):
            self.derive("nan_policy", "rerun-once")

    def strategy(self) -> None:
        """The row of the sharding table; rules tell where it stands alone."""
        v = self.values
        if not self.given(_STRATEGY) and (v["use_custom_fsdp"] or v["use_distributed_optimizer"]):
            self.derive(_STRATEGY, "optim_grads_params" if v["use_custom_fsdp"] else "optim")
        if v["enable_full_sharding_in_hsdp"] and not self.given(_OUTER):
            self.derive(_OUTER, "optim")
        if v[_OUTER] != "no_shard" and v[_INSTANCES] == 1 and weights_are_sharded(v[_STRATEGY]):
            flag = f"{spelled(_OUTER)} optim" if self.given(_OUTER) else "--enable-full-sharding-in-hsdp"
            self.warnings.append(f"{flag} has no effect at --num-distributed-optimizer-instances 1")
            self.derive(_OUTER, "no_shard")

    def instances(self) -> None:
        """Without anything sharded there is one instance: all ranks hold all."""
        v = self.values
        if v[_INSTANCES] <= 1 or v[_STRATEGY] != "no_shard" or v["use_custom_fsdp"]:
            return
        with contextlib.suppress(RankGridError):  # a rule tells
            check_instances(Config.from_flat(v).grid(), v[_INSTANCES])
            self.warnings.append(
                f"{self.told(_INSTANCES)} has no effect without --use-distributed-optimizer or --use-custom-fsdp: no "
                "optimizer state is sharded"
            )
            self.derive(_INSTANCES, 1)

    def overlap(self) -> None:
        v = self.values
        if grads_are_sharded(v[_STRATEGY]):
            for name in ("overlap_grad_reduce", "overlap_param_gather"):
                if self.given(name) and not v[name]:
                    self.warnings.append(f"{spelled(name)} is always on with {self.told(_STRATEGY)}")
                self.derive(name, True)
        elif v["overlap_param_gather"] and v[_STRATEGY] == "no_shard":
            self.warnings.append(
                "--overlap-param-gather has no effect without a sharded optimizer: every rank updates all weights"
            )
            self.derive("overlap_param_gather", False)

    def dtypes(self) -> None:
        """A unit that reduces once a step accumulates what has not travelled yet, in the dtype of the wire."""
        v = self.values
        if v["fp64"] and not self.given("megatron_fsdp_main_params_dtype"):
            self.derive("megatron_fsdp_main_params_dtype", "auto")
        wire, policy = v["megatron_fsdp_grad_comm_dtype"], v["fsdp_reshard_policy"]
        if (
            wire not in ("bf16", "fp16")
            or policy not in ("step", "budget")
            or not grads_are_sharded(v[_STRATEGY])
        ):
            return
        config = Config.from_flat(v)
        accumulated = main_grads_dtype(config.params_flag, config.ddp)
        if wire != accumulated:
            self.warnings.append(
                f"{self.told('megatron_fsdp_grad_comm_dtype')} with --fsdp-reshard-policy {policy}: units that reduce "
                f"once a step add their microbatches in {wire}, not in {accumulated}"
            )

    def fsdp_without_effect(self) -> None:
        """What has no effect, but for the flags of gathers and reductions: these are refused by rules."""
        v = self.values
        if not v["use_custom_fsdp"]:
            rows = [("fsdp_unit_modules fsdp_debug", "without --use-custom-fsdp")]
        else:
            rows = [("ddp_bucket_size ddp_num_buckets", "with --use-custom-fsdp: each unit is a bucket")]
            if not grads_are_sharded(v[_STRATEGY]):
                rows.append(("fsdp_debug", f"with {self.told(_STRATEGY)}: weights and gradients stay whole"))
        for names, why in rows:
            idle = (name for name in names.split() if differs(name, v[name]))
            self.warnings += [f"{spelled(name)} has no effect {why}" for name in idle]

    def length(self) -> None:
        """--skip-train needs neither a length nor a rate, and of a checkpoint only the weights."""
        v = self.values
        with contextlib.suppress(RankGridError):  # a rule tells
            if v["micro_batch_size"] is not None:
                self.fill("global_batch_size", v["micro_batch_size"] * Config.from_flat(v).data_parallel_size)
        if v["skip_train"]:
            if v["train_samples"] is None:
                self.fill("train_iters", 0)
            self.fill("lr", 0.0)
            self.derive("no_load_optim", True)
            self.derive("no_load_rng", True)

    def rate_schedules(self) -> None:
        v = self.values
        if v["train_samples"] is not None:
            self.fill("lr_decay_samples", v["train_samples"])
        elif v["train_iters"] is not None:
            self.fill("lr_decay_iters", v["train_iters"])
        self.fill("start_weight_decay", v["weight_decay"])
        self.fill("end_weight_decay", v["weight_decay"])
        if v["decoupled_lr"] is not None:
            self.fill("decoupled_min_lr", v["min_lr"])

    def ramp(self) -> None:
        """Say so when a ramp keeps a run that is counted in iterations from the end of its schedule."""
        v = self.values
        flat = v["lr_decay_style"] == "constant" and v["weight_decay_incr_style"] == "constant"
        if v["rampup_batch_size"] is None or v["train_samples"] is not None or v["skip_train"] or flat:
            return
        if not v["train_iters"] or (v["lr_decay_iters"] or 0) > v["train_iters"]:
            return
        config = Config.from_flat(v)
        batches = config.batch_schedule_or_none()
        if batches is None:
            return  # a rule tells
        run, batch = batches.samples_of(v["train_iters"]), v["global_batch_size"]
        lengths = schedule_lengths(
            config.optimizer, train_iters=v["train_iters"], train_samples=None, global_batch_size=batch
        )
        constant = v["weight_decay_incr_style"] == "constant"
        schedule = lengths.decay_samples if constant else max(lengths.decay_samples, lengths.total_samples)
        if run < schedule:
            self.warnings.append(
                "--train-iters with --rampup-batch-size: the schedules count every iteration as a full batch, "
                f"{schedule} samples, but the run trains on {run}: they do not reach their end; give --train-samples "
                "and --lr-decay-samples, or a smaller --lr-decay-iters"
            )

    def tokenizer_and_data(self) -> None:
        v = self.values
        if v["vocab_file"] is not None and v["merge_file"] is not None:
            self.fill("tokenizer_type", "GPT2BPETokenizer")
        elif v["vocab_size"] is not None and not any(v[name] for name in CORPORA):
            self.fill("tokenizer_type", "NullTokenizer")
        elif v["mock_data"] and not (v["tokenizer_model"] or v["vocab_file"] or v["merge_file"]):
            self.fill("tokenizer_type", "ByteTokenizer")
        vocabulary = known_vocabulary(v["tokenizer_type"], v["vocab_size"])
        multiple, tensor_ranks = v["make_vocab_size_divisible_by"], v["tensor_model_parallel_size"]
        if vocabulary is not None and multiple > 0 and tensor_ranks > 0:
            self.fill("padded_vocab_size", padded_vocabulary(vocabulary, multiple, tensor_ranks))
        if v["data_path"] is not None or v["data_args_path"] is not None:
            self.fill("split", "969,30,1")
        self.fill("dataloader_type", "single")

    def files_and_logs(self) -> None:
        v = self.values
        if v["ckpt_format"] == "torch_dist" and self.given("ckpt_format"):
            self.notes.append(
                "--ckpt-format torch_dist: checkpoints are written in this project's own format, under that name"
            )
        if v["ckpt_format"] in ("torch", "torch_dcp", "fsdp_dtensor"):
            told = f"{self.told('ckpt_format')}: there is one format, ours, under the name torch_dist"
            self.warnings.append(told)
            self.derive("ckpt_format", "torch_dist")
        if v["save"] is not None:  # else in the run's own folder, which has no name yet
            self.fill("metrics_file", os.path.join(v["save"], "metrics.jsonl"))

    def without_effect(self) -> None:
        """Say what was given and does nothing."""
        for name, why in list(no_effect.without_effect(self.values)):
            if self.given(name) and differs(name, self.values[name]):
                self.warnings.append(no_effect.told(name, self.values[name], why))
                if name in no_effect.DROPPED:
                    self.derive(name, FIELDS[name][1].default)
        self.warnings += no_effect.partly(self.values)


def known_vocabulary(tokenizer_type: str | None, vocab_size: int | None) -> int | None:
    """Ids of a tokenizer whose files need not be read; None for others.

    NullTokenizer adds the end of a document to `--vocab-size` (as Megatron did up to 0.16).
    """
    if tokenizer_type == "ByteTokenizer":
        return BYTE_VOCABULARY
    if tokenizer_type == "NullTokenizer" and vocab_size is not None:
        return vocab_size + 1
    return None
