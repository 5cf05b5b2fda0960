"""From the command line to a checked, frozen configuration, before torch is imported (floor 0).

    parse -> (checkpoint's shape) -> resolve -> rules

What is wrong is printed all at once and ends the process with status 2; under a launcher only local rank 0 prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron import command
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.estimate.device_profiles import DEVICE_PROFILES
from megatron.training.config import saved_config
from megatron.training.config.command_line import (
    CommandLine,
    ExtraArgsProvider,
    last_value,
    read_command_line,
)
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv, LaunchEnvError
from megatron.training.config.problems import (
    ConfigurationError,
    Problem,
    render_problems,
    worth_telling,
)
from megatron.training.config.resolve import Machine, resolve
from megatron.training.config.rule_table import RuleContext
from megatron.training.config.rules import broken_rules, inert_flags
from megatron.training.config.training_config import CheckpointConfig
from megatron.training.guard.console import guard_console, on_terminal, terminal_width
from megatron.training.guard.exit_status import (
    ExitStatus,
    leave_exit_json,
    stopped_status,
    tell_launcher,
)
from megatron.training.guard.run_folder import is_held
from megatron.training.guard.signals import StopRequested, end_at_once
from megatron.training.run import load_flags

__all__ = ["ConfigurationError", "Problem", "launch_config", "parse_config"]

# A launcher stops every rank once one has ended, so the others give local rank 0 this time to say why.
SPEAKER_GRACE_S = 3.0
_INDENT = 2  # with which torchrun prints a rank's last words
# Of the first page.
_WIDTH = 80
_SHAPE = (
    *(
        "--num-layers 2",
        "--hidden-size 64",
        "--num-attention-heads 4",
        "--seq-length 64",
        "--micro-batch-size 4",
    ),
    *("--lr 1e-2", "--train-iters 20", "--log-interval 5", "--eval-iters 2"),
)
_FSDP = ("--use-custom-fsdp", "--data-parallel-sharding-strategy optim_grads_params")
_ZERO_BUBBLE = ("--pipeline-model-parallel-size 2", "--enable-zero-bubble", "--global-batch-size 32")


def launch_config(
    argv: Sequence[str] | None = None,
    *,
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    needs_data: bool = True,
    more_rules: Callable[[Config], list[Problem]] = lambda config: [],
) -> Config:
    """The configuration of this launch, or the end of the process.

    argv: words after the program's name, by default the process's. extra_args_provider, args_defaults: as Megatron's
    `pretrain` takes them. needs_data: False when the caller's own provider makes the data whatever the flags say.
    more_rules: problems with what the caller cannot do. Raises SystemExit: 2 with every problem printed, or the first
    page where the line is empty; under --check-config 0 or 2 after the report; 3 when --load names what cannot be
    loaded, as far as can be told without reading tensors.
    """
    guard_console()
    words, env = list(sys.argv[1:] if argv is None else argv), LaunchEnv()
    try:
        env = LaunchEnv.read()
        if gone := command.lost_folder():
            why, fix = gone.split(": ", 1)
            raise ConfigurationError([Problem("launcher", (), why, fix)])
        line = read_command_line(words, extra_args_provider, args_defaults)
        if line.values.get("fake_process_group"):
            env = env.alone()
        if not (line.values.get("check_config") or line.values.get("rehearse")):
            end_at_once(functools.partial(last_words, env, line.values.get("save")))
        config, problems = _resolved(line, env, needs_data=needs_data)
        problems += more_rules(config)
        check_only = config.training.check_config
        if not problems and not check_only and not config.training.rehearse:
            load_flags.check_start(config.checkpoint, config.flat())
            env.check_meeting_place()
    except LaunchEnvError as error:
        # Every rank says it: what its variables say of its place cannot be trusted.
        fix = "set the variable to such a value, or unset it; torchrun sets those that ranks need by itself"
        raise _refuse([Problem("launcher", (), str(error), fix)], LaunchEnv(), words) from None
    except ConfigurationError as error:
        raise _refuse(error.problems, env, words) from None
    except CheckpointError as error:
        raise _refuse_checkpoint(error, env, words, line.values.get("save")) from None
    if check_only:
        problems = _report(config, problems, env)
        raise SystemExit(int(ExitStatus.CONFIGURATION) if problems else 0)
    if problems and not words and not line.problems:
        # With the flag with which the page's lines overrule a trainer's own tokenizer, which may need more flags.
        own = ("--tokenizer-type ByteTokenizer",) if "tokenizer_type" in (args_defaults or {}) else ()
        _speak(first_page(sys.orig_argv[0], sys.argv[0], own), env, ExitStatus.CONFIGURATION)
        raise SystemExit(int(ExitStatus.CONFIGURATION))
    if problems:
        raise _refuse(problems, env, words, config.checkpoint.save)
    if env.rank == 0:
        for warning in config.warnings:
            print(f"WARNING: {warning}", file=sys.stderr, flush=True)
        for note in config.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
    return config


def parse_config(
    argv: Sequence[str],
    *,
    env: LaunchEnv | None = None,
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    needs_data: bool = True,
) -> Config:
    """Like `launch_config` for callers that are no launch (tools, tests): raises ConfigurationError, prints nothing.

    Without data no tokenizer is needed either.
    """
    line = read_command_line(argv, extra_args_provider, args_defaults)
    config, problems = _resolved(line, env or LaunchEnv(), needs_data=needs_data, needs_tokenizer=needs_data)
    if problems:
        raise ConfigurationError(problems)
    return config


def _refuse(
    problems: Sequence[Problem], env: LaunchEnv, words: Sequence[str], save: str | None = None
) -> SystemExit:
    """The exception that ends the process, after local rank 0 has told why."""
    width = _columns(2)
    if width is not None and env.error_file is not None:
        width -= _INDENT
    _speak(render_problems(problems, width), env, ExitStatus.CONFIGURATION)
    _record_refusal(ExitStatus.CONFIGURATION, render_problems(problems), env, save, words)
    return SystemExit(int(ExitStatus.CONFIGURATION))


def _columns(fd: int) -> int | None:
    """Of the terminal on which standard output (1) or error (2) is read; None: elsewhere lines may be long."""
    return terminal_width() if on_terminal(fd) else None


def _speak(text: str, env: LaunchEnv, status: ExitStatus) -> None:
    """Tell for the ranks of this machine, once: torchrun prints what is left for it. One that is not the first speaks
    only if it is still there after the grace: then it alone was refused."""
    if env.local_rank != 0:
        time.sleep(SPEAKER_GRACE_S)
    if not tell_launcher(env.error_file, status, text):
        print(text, file=sys.stderr, flush=True)


def _refuse_checkpoint(
    error: CheckpointError, env: LaunchEnv, words: Sequence[str], save: str | None
) -> SystemExit:
    """The exception that ends the process when --load names what cannot be loaded. Local rank 0 says it."""
    status = ExitStatus.CHECKPOINT
    if env.local_rank != 0:
        time.sleep(SPEAKER_GRACE_S)
    else:
        _speak(f"error (checkpoint, exit status {int(status)}): {error}", env, status)
        _record_refusal(status, str(error), env, save, words)
    return SystemExit(int(status))


def _record_refusal(
    status: ExitStatus, reason: str, env: LaunchEnv, save: str | None, words: Sequence[str]
) -> None:
    """Write exit.json into --save, so that no former run's record asks to be started again, if that folder exists and
    no run holds it: nothing is made for a run that is none. Ranks of the first machine do.
    """
    if "--check-config" in words:
        return
    save = save or last_value(words, "--save")
    writes = (
        env.local_rank == env.rank and save is not None and os.path.isdir(save) and not is_held(Path(save))
    )
    folder = save if writes else None
    leave_exit_json(status, reason, folder, rank=env.rank, launcher=env.record_of_attempt)


def last_words(env: LaunchEnv, save: str | None, stop: StopRequested) -> int:
    """Of a process that a signal stops before the run's own handlers are there, while torch is imported: a line, and
    exit.json. Its exit status."""
    status = stopped_status(save)
    if env.local_rank == 0:
        with contextlib.suppress(OSError):
            os.write(2, f"[rank {env.place[0]}] stopped (exit status {int(status)}): {stop}\n".encode())
        folder = None if env.rank or save is None or is_held(Path(save)) else save
        leave_exit_json(status, str(stop), folder, rank=env.rank, launcher=env.record_of_attempt)
    return int(status)


def _resolved(
    line: CommandLine, env: LaunchEnv, *, needs_data: bool, needs_tokenizer: bool = True
) -> tuple[Config, list[Problem]]:
    """The configuration, and all that is wrong with it. Raises CheckpointError."""
    values, origin, warnings = dict(line.values), dict(line.origin), inert_flags(line.used, line.values)
    notes = load_flags.with_pretrained(values, origin) + load_flags.with_hf_config(values, origin)
    check_only = bool(values.get("check_config") or values.get("rehearse"))  # nothing is read or written
    load = values.get("load")
    elsewhere = check_only and saved_config.is_elsewhere(load)  # what a launch there finds is not known
    found, unloadable = (
        load_flags.to_load(values) if check_only and line.complete and not elsewhere else (None, [])
    )
    takes_args = bool(values.get("use_checkpoint_args"))
    if takes_args and load is not None and not unloadable and not elsewhere:
        saved = saved_config.saved_config(load, values.get("ckpt_step"), values)
        if saved is None:
            warnings.append(f"--use-checkpoint-args: no checkpoint in {load}, the flags count")
        else:
            try:
                values, origin, told = saved_config.apply_checkpoint_args(values, origin, saved)
            except ValueError as error:
                raise CheckpointError(f"{load}: its configuration's {error}") from None
            warnings += told
    if check_only and values.get("padded_vocab_size") is None:
        # A launch asks one rank once all are there: see session.
        saved_size = saved_config.saved_padded_vocabulary(values)
        if saved_size is not None:
            values["padded_vocab_size"], origin["padded_vocab_size"] = saved_size, saved_config.CHECKPOINT
    profile, memory_bytes = DEVICE_PROFILES.get(values.get("device_profile") or ""), env.memory_bytes()
    has_gpu = env.gpu_present() if profile is None else profile.kind == "cuda"
    ranks_here = env.ranks_here(values.get("world_size") if check_only else None)
    machine = Machine(env.place[1], has_gpu, memory_bytes, max(1, ranks_here))
    config = resolve(values, origin, machine, extra=line.extra, warnings=tuple(warnings))
    config = dataclasses.replace(config, notes=(*notes, *config.notes))
    if not line.complete:
        return config, line.problems
    context = RuleContext(
        config, env, tuple(line.used), has_gpu, check_only, needs_data, needs_tokenizer, memory_bytes
    )
    broken = [problem for problem in broken_rules(context) if worth_telling(problem, line.problems)]
    if found is not None and not config.checkpoint.finetune:
        unloadable += load_flags.model_problems(found, config)
    if elsewhere and (takes_args or config.checkpoint.needs_checkpoint):
        config = dataclasses.replace(config, notes=(*config.notes, _elsewhere(config.checkpoint)))
        if takes_args:
            broken = [
                problem
                for problem in broken
                if problem.rule == "not-supported" or not saved_config.may_be_overruled(problem.flags, values)
            ]
    return config, line.problems + unloadable + broken


def _elsewhere(checkpoint: CheckpointConfig) -> str:
    """Under --check-config: what cannot be known before the checkpoint is there."""
    unknown = "whether it can be loaded and its padded vocabulary are"
    if checkpoint.use_checkpoint_args:
        unknown = (
            "whether it can be loaded, and the model's shape and tokenizer, which --use-checkpoint-args takes from it "
            "whatever the flags say, are"
        )
    return f"--load {checkpoint.load}: not on this machine: {unknown} not known"


def _report(config: Config, problems: list[Problem], env: LaunchEnv) -> list[Problem]:
    """Print what --check-config is for, from local rank 0: on a terminal what one wants first, unless --full. Returns
    the problems, with those that a plan has."""
    if env.local_rank != 0:
        return problems
    # parsing flags imports no search, and a report draws plans
    from megatron.training.config.check_config import render_json, render_text
    from megatron.training.config.config_page import render_page
    from megatron.training.run.rehearse.checked import checked

    report, problems = checked(config, problems, env)
    width, full = _columns(1), config.training.full
    if config.training.json:
        told = render_json(report)
    else:
        told = render_text(report) if full or width is None else render_page(report, width)
    encoding = sys.stdout.encoding or "utf-8"  # may be one that a path's letters are not in
    sys.stdout.write(told.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
    if problems and not config.training.json:
        print(render_problems(problems, _columns(2)), file=sys.stderr, flush=True)
    return problems


def first_page(python: str, program: str, more: Sequence[str] = ()) -> str:
    """The page. python, program: as typed. more: flags that this program needs beside the others."""
    run, script, started = shlex.quote(python), shlex.quote(program), shlex.quote(program)
    tool, launch = (
        shlex.quote(os.path.relpath(command.SCRIPTS / "tools" / name))
        for name in ("preprocess_data.py", "launch.py")
    )
    if typed := command.called_as(program):
        run, script, tool, launch = "", program, f"{typed} data preprocess", f"{typed} launch"
        started = program.removeprefix(f"{typed} ")
    byte = "--tokenizer-type ByteTokenizer"
    mock, own = ("--mock-data", *_SHAPE, *more), ("--data-path my_text_document", "--split 1", byte, *_SHAPE)
    both = (run, launch, "--nproc-per-node 2 --", started)
    corpus = (run, tool, "--input my.txt", "--output-prefix my", "--append-eod", byte)
    return f"""\
Megatron-Zero pre-trains GPT models by Megatron-LM's command line, with fully
sharded data parallelism and zero-bubble pipelines (GPUs: not tested yet).

Train now, with nothing prepared:
{_command(run, script, *mock)}
On your own text, my.txt:
{_command(*corpus)}
{_command(run, script, *own)}
On 2 ranks, each with half of the weights, gradients and optimizer state:
{_command(*both, *_FSDP, *mock)}
On 2 ranks, each with half of the layers:
{_command(*both, *_ZERO_BUBBLE, *mock)}
Most often added next:
  --save DIR --save-interval N --load DIR   checkpoints; the same line resumes
  --global-batch-size N                     samples of one optimizer step
  --bf16                                    16-bit weights, 32-bit main weights
Where to look:
  --help            every flag, also in docs/flags.md
  --check-config    what a line means: checked, told, not run
  make quickstart   from a corpus to a sample in minutes; docs/quickstart.md
"""


def _command(*parts: str) -> str:
    """A shell command over as many lines as it needs; a part stays in one piece."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) + 5 > _WIDTH:
            lines.append("  ")
        lines[-1] += f" {part}" if lines[-1].strip() else part
    return "\n".join("  " + line for line in " \\\n".join(lines).split("\n"))
