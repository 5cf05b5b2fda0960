"""The loop: batch, length, evaluation, checkpoints, logs, reliability (floor 0)."""

import dataclasses
from typing import Annotated, Literal

from megatron.core.config_base import Batch, Bounds, Index, Ranks, Size, Threads, arg


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How much is trained, in which batches, and when to stop."""

    micro_batch_size: Batch = arg(
        None, "samples of one forward on one model replica", unit="samples", required=True
    )
    global_batch_size: Batch = arg(
        None, "samples of one optimizer step", unit="samples", derived="micro batch size x DP"
    )
    rampup_batch_size: tuple[Index, ...] | None = arg(
        None, "start, increment, and samples over which the batch grows to the global batch size", nargs=3
    )
    decrease_batch_size_if_needed: bool = arg(
        False, "round the global batch size down to a multiple of micro batch size x DP"
    )
    train_iters: Index | None = arg(None, "optimizer steps", unit="iterations")
    train_samples: Index | None = arg(None, "length of the run", unit="samples")
    seed: Annotated[int, Bounds(0, 2**32 - 2**20)] = arg(
        1234, "seed of initial weights, dropout and sample order"
    )
    exit_interval: int | None = arg(None, "save and exit when the iteration is a multiple", unit="iterations")
    exit_duration_in_mins: int | None = arg(None, "save and exit after this time", unit="min")
    iterations_to_skip: tuple[int, ...] = arg((), "iterations whose batch is drawn but not trained on")
    deterministic_mode: bool = arg(False, "only kernels that give the same bits every time")
    threads_per_rank: Threads | None = arg(
        None,
        "threads that one rank computes with; the same number gives the same bits",
        unit="threads",
        derived="OMP_NUM_THREADS, else cores of the machine // its ranks",
        ours=True,
    )
    manual_gc: bool = arg(False, "Python's garbage collection only at fixed steps")
    manual_gc_interval: Index = arg(
        0, "steps between collections with --manual-gc; 0 = never", unit="iterations"
    )
    manual_gc_eval: bool = arg(True, "no collection before and after evaluation")
    yaml_cfg: str | None = arg(None, "YAML file of settings; the command line wins")
    hf_config: str | None = arg(
        None,
        "config.json of a Hugging Face model, or its folder: the model's flags, where no other says them",
        ours=True,
    )
    check_config: bool = arg(
        False, "print the resolved configuration, the rank grid and parameters per rank, then exit", ours=True
    )
    rehearse: bool = arg(
        False,
        "run two steps on tensors without memory, by one rank of each pipeline stage in this process, and hold what "
        "each has behind every operation against what was planned, then exit",
        ours=True,
    )
    world_size: Ranks | None = arg(
        None,
        "ranks that --check-config and --rehearse assume",
        unit="ranks",
        derived="ranks of the launcher",
        ours=True,
    )
    device_profile: Literal["cpu", "a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "gb200"] | None = (
        arg(
            None,
            "device that --check-config and --rehearse assume, with its memory",
            derived="that of this machine",
            ours=True,
        )
    )
    fake_process_group: bool = arg(
        False,
        "run one rank by itself, RANK of WORLD_SIZE as the environment has them: it sends nothing and waits for no "
        "peer, so its memory and its computing are those of that rank, and losses and gradient norms mean nothing",
    )
    json: bool = arg(False, "--check-config prints one JSON object", ours=True)
    full: bool = arg(False, "--check-config prints every setting on a terminal too", ours=True)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Validation and test."""

    eval_interval: int | None = arg(None, "iterations between validations; unset = never", unit="iterations")
    eval_iters: Index = arg(100, "batches of one evaluation; 0 = no evaluation", unit="iterations")
    skip_train: bool = arg(False, "evaluate only")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved and loaded, where and when."""

    save: str | None = arg(None, "folder of checkpoints")
    save_interval: int | None = arg(
        None,
        "iterations between checkpoints",
        flags=("--save-interval", "--persistent-save-interval"),
        unit="iterations",
    )
    save_retain_interval: int | None = arg(
        None, "keep checkpoints at multiples of this, and the newest two", unit="iterations"
    )
    no_save_optim: bool = arg(False, "leave the optimizer's state out of checkpoints")
    no_save_rng: bool = arg(False, "leave the state of random generators out of checkpoints")
    load: str | None = arg(
        None,
        "folder to resume from: checkpoints of ours or of Megatron-LM; with --finetune a Hugging Face model too",
    )
    pretrained_checkpoint: str | None = arg(
        None,
        "folder like that of --load: what to begin with, as with --finetune, while --load has no checkpoint",
    )
    no_load_optim: bool = arg(False, "leave the optimizer's state as it is")
    no_load_rng: bool = arg(False, "leave the state of random generators as it is")
    finetune: bool = arg(False, "load weights only and start at iteration 0; nothing in --load is an error")
    ckpt_step: Index | None = arg(None, "load this iteration instead of the newest", unit="iterations")
    use_checkpoint_args: bool = arg(False, "take the model's shape from the checkpoint")
    exit_on_missing_checkpoint: bool = arg(False, "stop when --load holds no checkpoint")
    ckpt_format: Literal["torch_dist", "torch", "torch_dcp", "fsdp_dtensor", "zarr"] = arg(
        "torch_dist", "there is one format, ours, under the name torch_dist"
    )
    ckpt_convert_format: Literal["torch_dist"] | None = arg(
        None, "write what --load has as a checkpoint of this format (ours, under that name), then exit"
    )
    ckpt_convert_save: str | None = arg(
        None, "folder in which --ckpt-convert-format makes a folder of checkpoints, torch_dist"
    )
    async_save: bool = arg(False, "write checkpoints in the background")

    @property
    def needs_checkpoint(self) -> str | None:
        """The flag that says that there is something to load, so that nothing there is an error."""
        begins = self.load is not None and self.load == self.pretrained_checkpoint
        needs = {
            "--pretrained-checkpoint": begins,
            "--ckpt-convert-format": self.ckpt_convert_format is not None,
            "--finetune": self.finetune,
            "--exit-on-missing-checkpoint": self.exit_on_missing_checkpoint,
            "--ckpt-step": self.ckpt_step is not None,
        }
        return next((flag for flag, given in needs.items() if given), None)


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """What is printed and recorded."""

    log_interval: int = arg(100, "iterations between log lines", unit="iterations")
    log_throughput: bool = arg(False, "TFLOP/s per GPU in the log line")
    log_params_norm: bool = arg(False, "L2 norm of the parameters in the log line")
    log_num_zeros_in_grad: bool = arg(False, "zero entries of the gradient in the log line")
    log_progress: bool = arg(False, "append progress.txt in the folder of checkpoints")
    timing_log_level: Annotated[int, Bounds(0, 2)] = arg(
        0, "0: iterations only, 1: phases, 2: every operation"
    )
    timing_log_option: Literal["max", "minmax", "all"] = arg("minmax", "how timers are told over ranks")
    barrier_with_L1_time: bool = arg(  # noqa: N815 - Megatron's destination name
        True, "no barrier at level 1 timers", flags=("--no-barrier-with-level-1-timing",)
    )
    logging_level: Annotated[int, Bounds(0, 1000)] | None = arg(
        None, "level of Python's logging, as a number"
    )
    report_theoretical_memory: bool = arg(
        False, "print what each pipeline rank is planned to hold, before the first step"
    )
    tensorboard_dir: str | None = arg(None, "folder of TensorBoard files")
    tensorboard_log_interval: int = arg(1, "iterations between records", unit="iterations")
    tensorboard_queue_size: Size = arg(1000, "records held before a write")
    log_timers_to_tensorboard: bool = arg(False, "timers and iteration time")
    log_validation_ppl_to_tensorboard: bool = arg(False, "exp(loss) beside the validation loss")
    log_memory_to_tensorboard: bool = arg(False, "memory figures")
    log_world_size_to_tensorboard: bool = arg(False, "number of ranks")
    log_learning_rate_to_tensorboard: bool = arg(True, "no learning rate")
    log_loss_scale_to_tensorboard: bool = arg(True, "no loss scale")
    wandb_project: str | None = arg(None, "Weights & Biases project; turns it on")
    wandb_entity: str | None = arg(None, "Weights & Biases entity")
    wandb_exp_name: str | None = arg(None, "Weights & Biases run name")
    wandb_save_dir: str | None = arg(None, "folder of Weights & Biases files")
    mlflow_experiment: str | None = arg(None, "MLflow experiment; turns it on", ours=True)
    mlflow_run_name: str | None = arg(None, "MLflow run name", ours=True)
    mlflow_tracking_uri: str | None = arg(None, "where MLflow records", ours=True)
    metrics_file: str | None = arg(
        None,
        "JSONL file of metrics, always written",
        derived="metrics.jsonl in --save, else in runs/TIME-PID",
        ours=True,
    )
    log_pipeline_timeline: str | None = arg(
        None,
        "folder for the start and end of every operation of the pipeline, one JSONL file a rank; files of an earlier "
        "run are moved to old-1, old-2, ... in it",
        ours=True,
    )
    progress: Literal["auto", "off"] = arg(
        "auto", "progress with the time left; auto: when rank 0 writes to a terminal", ours=True
    )


@dataclasses.dataclass(frozen=True)
class ProfilingConfig:
    """What a run records of itself for a profiler, and what it says of memory."""

    profile: bool = arg(
        False,
        "profile a window of iterations; by itself for nsys: ranges of NVTX, and where its capture starts and stops",
    )
    profile_step_start: Index = arg(10, "iterations that are done when the window begins", unit="iterations")
    profile_step_end: Index = arg(12, "iterations that are done when it ends", unit="iterations")
    use_pytorch_profiler: bool = arg(
        False, "with --profile: torch.profiler, a trace for each rank in the folder of the run"
    )
    profile_ranks: tuple[Index, ...] = arg((0,), "ranks that are profiled")
    pytorch_profiler_collect_shapes: bool = arg(False, "shapes of inputs in the trace")
    pytorch_profiler_collect_callstack: bool = arg(False, "Python's call stacks in the trace")
    record_memory_history: bool = arg(
        False,
        "snapshots of the memory of a GPU, by the last rank at each log interval, and where it runs out",
    )
    memory_snapshot_path: str | None = arg(
        None, "file of these snapshots", derived="snapshot.pickle in the folder of the run"
    )
    log_memory_interval: Size | None = arg(
        None,
        "iterations between lines on the memory of each rank",
        unit="iterations",
        derived="one line in a run",
    )
    log_device_memory_used: bool = arg(
        False, "memory in use on the whole GPU, of all processes, in these lines"
    )


@dataclasses.dataclass(frozen=True)
class ReliabilityConfig:
    """What happens when something goes wrong."""

    nan_policy: Literal["abort", "skip", "rerun-once"] = arg(
        "abort", "what a non-finite loss or gradient does to the run", ours=True
    )
    nan_max_skips: int = arg(10, "skipped steps in a row before the run aborts", unit="iterations", ours=True)
    check_for_nan_in_loss_and_grad: bool = arg(
        True,
        "take steps whether loss and gradients are finite or not; weights that are not end the run all the same",
    )
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = arg(
        "disabled", "validate_results: compute a rejected step again, as --nan-policy rerun-once"
    )
    distributed_timeout_minutes: Annotated[int, Bounds(1, 365 * 24 * 60)] = arg(
        10, "longest wait in a collective", unit="min"
    )
    exit_signal_handler: bool = arg(False, "SIGTERM saves and exits (always so here)")
