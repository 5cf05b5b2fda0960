"""How the model and the batch are spread over ranks (floor 0)."""

import dataclasses
from typing import Annotated, Literal

from megatron.core.config_base import Bounds, Bytes, Index, Layers, Ranks, Stages, arg
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES

V_BY_MEMORY = {"zb": "zbv", "half": "v-half", "min": "v-min"}  # --zero-bubble-v-schedule-mem-setup
_SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def bytes_of(word: str) -> int:
    """`512M` -> bytes; suffixes K, M, G and T are powers of 1024. Raises ValueError."""
    digits = word[:-1] if word[-1:].upper() in _SUFFIXES else word
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"expects bytes, as in 500000000, 512M or 4G, got {word!r}")
    return int(digits) * _SUFFIXES.get(word[-1].upper(), 1)


def bytes_or_auto(word: str) -> int | str:
    """`auto` as it is, else `bytes_of`."""
    return word if word == "auto" else bytes_of(word)


def count_or_auto(word: str) -> int | None:
    """`auto` -> None, else a whole number. Raises ValueError."""
    if word == "auto":
        return None
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"expects a whole number or auto, got {word!r}") from None


@dataclasses.dataclass(frozen=True)
class ModelParallelConfig:
    """Degrees of every kind of parallelism, the order of ranks, and the process groups' backend."""

    tensor_model_parallel_size: Ranks = arg(1, "tensor parallel degree (TP)", unit="ranks")
    pipeline_model_parallel_size: Stages = arg(1, "pipeline stages (PP)", unit="ranks")
    context_parallel_size: Ranks = arg(1, "context parallel degree (CP)", unit="ranks")
    expert_model_parallel_size: Ranks = arg(1, "expert parallel degree (EP)", unit="ranks")
    expert_tensor_parallel_size: Ranks = arg(
        None, "tensor parallel degree inside experts (ETP)", unit="ranks", derived="TP"
    )
    sequence_parallel: bool = arg(
        False, "split activations of norms and dropout along the sequence over TP; no effect at TP = 1"
    )
    use_tp_pp_dp_mapping: bool = arg(False, "order of ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp")
    num_layers_per_virtual_pipeline_stage: Layers | None = arg(
        None, "layers of one model chunk; turns on interleaving", unit="layers"
    )
    num_virtual_stages_per_pipeline_rank: Stages | None = arg(
        None, "model chunks a rank; turns on interleaving", unit="chunks"
    )
    pipeline_model_parallel_layout: str | None = arg(
        None,
        "what each stage holds, as in Et*2|(tt|)*5t|tL: E embedding, t layer, L loss; stages may be empty",
    )
    decoder_first_pipeline_num_layers: Layers | None = arg(
        None, "layers of the first pipeline rank, all its chunks together", unit="layers"
    )
    decoder_last_pipeline_num_layers: Layers | None = arg(
        None, "layers of the last pipeline rank, all its chunks together", unit="layers"
    )
    account_for_embedding_in_pipeline_split: bool = arg(
        False, "the embedding counts as a layer: the first stage holds one layer less"
    )
    account_for_loss_in_pipeline_split: bool = arg(
        False, "the loss counts as a layer: the last stage holds one layer less"
    )
    allow_padding_num_layers: bool = arg(
        False,
        "stages as of the next number of layers that they divide; the missing layers are taken from the last stage, "
        "then from stages 0, 1, ..., one each",
        ours=True,
    )
    microbatch_group_size_per_vp_stage: int | None = arg(
        None,
        "microbatches that a chunk takes in turn before the next chunk, with interleaving",
        flags=("--microbatch-group-size-per-virtual-pipeline-stage", "--microbatch-group-size-per-vp-stage"),
        unit="microbatches",
        derived="PP, with interleaving",
    )
    pipeline_schedule: Literal[(*SCHEDULES, AUTO)] = arg(  # type: ignore[valid-type]
        None,
        "order of the pipeline's forwards and backwards; auto: the fastest that fits the memory limit",
        derived="what the flags of schedules ask for; else interleaved with more than one chunk a rank, else 1f1b",
        ours=True,
    )
    pipeline_schedule_file: str | None = arg(
        None, "run a saved plan (JSON) instead of a schedule by name", ours=True
    )
    pipeline_memory_limit: Bytes | None = arg(
        None, "what a rank may hold of activations, as in 512M or 4G", unit="bytes", parse=bytes_of, ours=True
    )
    rank_memory_limit: Bytes | Literal["auto"] | None = arg(
        None,
        "what a rank may hold in all, as in 75G: schedule, chunks, groups, sharding and what stays gathered are chosen "
        "together by it, but for what other flags name; auto: the memory of the machine, or of the job's control "
        "group, over the ranks of the host",
        unit="bytes",
        parse=bytes_or_auto,
        ours=True,
    )
    achieved_tflops: Annotated[float, Bounds(1e-6, 1e6)] | None = arg(
        None,
        "what a rank computes, for plans before anything is measured",
        unit="TFLOP/s",
        derived="with --rank-memory-limit: 450 on GPUs, 0.05 on CPU",
        ours=True,
    )
    dp_bandwidth_gb_per_s: Annotated[float, Bounds(1e-6, 1e6)] | None = arg(
        None,
        "what a rank moves to its data parallel peers, for plans before anything is measured",
        unit="GB/s",
        derived="with --rank-memory-limit: 45 on GPUs, 1 on CPU",
        ours=True,
    )
    enable_zero_bubble: bool = arg(
        False, "split backwards into B and W and fill bubbles with W: schedule zb-1p, or as the limit says"
    )
    zero_bubble_max_pending_backward: int | None = arg(
        None,
        "memory limit of a zero-bubble schedule: so many whole-stage activations on a rank (p: as much as 1F1B, 2p: no "
        "bubble), or auto",
        unit="microbatches",
        parse=count_or_auto,
        derived="auto: a share of the device's memory on CUDA, p on CPU",
    )
    zero_bubble_adaptive_memory_limit_percentile: Annotated[int, Bounds(1, 100)] = arg(
        85,
        "with --zero-bubble-max-pending-backward auto on CUDA: so much of the device's memory may be in use, weights "
        "and optimizer state included",
        unit="%",
    )
    zero_bubble_v_schedule: bool = arg(
        False,
        "two chunks a rank on a V, first and last stage on the first rank; implies --enable-zero-bubble",
    )
    zero_bubble_v_schedule_mem_setup: Literal["min", "half", "zb"] = arg(
        "zb", "memory of the V schedule: v-min, v-half, or zbv (as much as 1F1B)"
    )
    zero_bubble_pipeline_timers_start_iter: int = arg(
        100,
        "iteration from which computations, messages and memory of the pipeline are measured; with more than one rank",
        unit="iterations",
    )
    zero_bubble_pipeline_timers_end_iter: int = arg(
        110,
        "iteration before which measuring ends: schedules that are searched are then solved again for what was "
        "measured",
        unit="iterations",
    )
    enable_1f1b_v: bool = arg(False, "1F1B on the V: about two thirds of 1F1B's activations")
    interleave_group_size: Index = arg(
        0,
        "interleave in groups of so many microbatches, half as many as ranks to as many, with B and W apart: schedule "
        "gis; 0: do not",
        unit="microbatches",
    )
    enable_optimizer_post_validation: bool = arg(
        False,
        "pipeline ranks step on what they know, without waiting for all others' gradients, and take a step back that "
        "proves wrong (clipped, or not finite)",
    )
    post_validation_rollback: Literal["snapshot", "inverse"] = arg(
        "snapshot",
        "how a step is taken back: copies of main weights and moments, exact; or inverse arithmetic, approximate, "
        "without copies",
        ours=True,
    )
    post_validation_after: Index = arg(
        10,
        "clean iterations in a row before ranks step on what they know; until then they wait for all; 0: never wait",
        unit="iterations",
        ours=True,
    )
    distributed_backend: Literal["nccl", "gloo"] = arg(
        None, "backend of the process groups", derived="nccl with a GPU, else gloo"
    )

    @property
    def keeps_copies(self) -> bool:
        """Whether a step is taken back by copies of what it changes."""
        return self.enable_optimizer_post_validation and self.post_validation_rollback == "snapshot"

    @property
    def timers_window(self) -> tuple[int, int]:
        """Iterations of the pipeline that are measured: the first, and the first one behind them."""
        return self.zero_bubble_pipeline_timers_start_iter, self.zero_bubble_pipeline_timers_end_iter

    def measured_window(self, first_iteration: int) -> tuple[int, int]:
        """The first iteration that is measured, and how many are. A run that is resumed behind the start of the window
        measures as many, from its second iteration on: the first one warms up."""
        start, end = self.timers_window
        return start if first_iteration <= start else first_iteration + 1, end - start


def asked_schedules(parallel: ModelParallelConfig) -> dict[str, str]:
    """Flags that name a schedule in other words than --pipeline-schedule -> its name."""
    asked = {}
    if parallel.zero_bubble_v_schedule:
        asked["--zero-bubble-v-schedule"] = V_BY_MEMORY[parallel.zero_bubble_v_schedule_mem_setup]
    elif parallel.enable_zero_bubble:
        pending = parallel.zero_bubble_max_pending_backward
        twice = pending is not None and pending >= 2 * parallel.pipeline_model_parallel_size
        asked["--enable-zero-bubble"] = "zb-2p" if twice else "zb-1p"
    if parallel.enable_1f1b_v:
        asked["--enable-1f1b-v"] = "1f1b-v"
    if parallel.interleave_group_size > 0:
        asked["--interleave-group-size"] = "gis"
    return asked


def describe_schedule(parallel: ModelParallelConfig, runs: str | None = None) -> str:
    """The flag that asks for the schedule. runs: what is run, for flags that leave that to a choice or to a file."""
    name = parallel.pipeline_schedule
    if parallel.pipeline_schedule_file is not None:
        told = f"--pipeline-schedule-file {parallel.pipeline_schedule_file}"
        return told if runs is None else f"{told} (schedule {runs})"
    for flag, asked in asked_schedules(parallel).items():
        if asked == name:
            return f"{flag} (schedule {name})"
    told = f"--pipeline-schedule {name}"
    return f"{told} (which has chosen {runs})" if name == AUTO and runs is not None else told
