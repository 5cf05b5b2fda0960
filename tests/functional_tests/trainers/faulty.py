#!/usr/bin/env python3
"""pretrain_gpt.py in which something goes wrong on command: a user's trainer with flags of its own.

--inject-nan-iteration K makes the loss or a gradient of one rank non-finite in iteration K (and, with --inject-lasts N,
in the N - 1 next ones); --kill-iteration and --sleep-iteration end or hold up a rank there; --record-samples notes
which samples are trained on. LR_OF_RANK_1 in the environment starts rank 1 with another learning rate.
"""

import hashlib
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pretrain_gpt

EVALUATIONS = {}  # iteration -> how often its first microbatch was evaluated


def add_arguments(parser):
    group = parser.add_argument_group("faults")
    group.add_argument("--inject-nan-iteration", type=int, default=0)
    group.add_argument("--inject-lasts", type=int, default=1)
    group.add_argument("--inject-nan-rank", type=int, default=0)
    group.add_argument("--inject-microbatch", type=int, default=0)
    group.add_argument("--inject-where", choices=["loss", "grad"], default="loss")
    group.add_argument("--inject-how", choices=["once", "same", "different"], default="same")
    group.add_argument("--kill-iteration", type=int, default=0)
    group.add_argument("--sleep-iteration", type=int, default=0)
    group.add_argument("--fault-rank", type=int, default=1)
    group.add_argument("--fault-microbatch", type=int, default=1)
    group.add_argument("--slow-s", type=float, default=0.0)
    group.add_argument("--record-samples", default="")
    group.add_argument("--tag-lines", action="store_true", help="each line begins with the rank that says it")
    group.add_argument(
        "--short-data", type=int, default=0, help="samples of a training set that is too short"
    )
    group.add_argument(
        "--timeout-s", type=float, default=0.0, help="--distributed-timeout-minutes in seconds"
    )
    group.add_argument(
        "--exit-duration-s", type=float, default=0.0, help="--exit-duration-in-mins in seconds"
    )
    return parser


def forward_step(data_iterator, model):
    from megatron.training import get_args

    args = get_args()
    losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
    if not model.training:
        return losses, loss_func
    iteration, microbatch = args.curr_iteration + 1, model.context.grads.microbatch
    if microbatch == 0:
        EVALUATIONS[iteration] = EVALUATIONS.get(iteration, 0) + 1
    if args.slow_s:
        time.sleep(args.slow_s)
    if args.rank == args.fault_rank and microbatch == args.fault_microbatch:
        fail(args, iteration)
    if wrong(args, iteration, microbatch):
        value = (
            float("inf") if args.inject_how == "different" and EVALUATIONS[iteration] > 1 else float("nan")
        )
        if args.inject_where == "grad":
            losses.register_hook(lambda grad: grad * value)
        else:
            return losses, partial(non_finite, loss_func, value)
    return losses, loss_func


def non_finite(loss_func, value, output):
    loss, num_tokens, report = loss_func(output)
    return loss * value, num_tokens, {name: (total * value, count) for name, (total, count) in report.items()}


def fail(args, iteration):
    # A restarted attempt goes on: the fault is over.
    if iteration == args.kill_iteration and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if iteration == args.sleep_iteration:
        print(f"rank {args.rank} sleeps", flush=True)
        time.sleep(600)


def wrong(args, iteration, microbatch):
    first = args.inject_nan_iteration
    if not first or not first <= iteration < first + args.inject_lasts:
        return False
    if args.rank != args.inject_nan_rank or microbatch != args.inject_microbatch:
        return False
    return args.inject_how != "once" or EVALUATIONS[iteration] == 1


class Tagged:
    """A stream whose lines begin with the rank, for runs whose ranks share one output."""

    def __init__(self, stream, rank):
        self.stream = stream
        self.rank = rank
        self.begun = ""

    def write(self, text):
        *lines, self.begun = (self.begun + text).split("\n")
        self.stream.write("".join(f"{self.rank}: {line}\n" for line in lines))

    def flush(self):
        self.stream.flush()

    def isatty(self):
        return False


class Recorded:
    """A data set that notes what it is asked for, as a digest of the tokens."""

    def __init__(self, dataset, path):
        self.dataset = dataset
        self.path = path

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        sample = self.dataset[i]
        digest = hashlib.sha256(bytes(memoryview(sample["tokens"]))).hexdigest()
        line = json.dumps({"index": int(i), "tokens": digest}) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line.encode())
        os.close(fd)
        return sample


def datasets_provider(num_samples):
    from megatron.training import get_args

    train, valid, test = pretrain_gpt.train_valid_test_datasets_provider(num_samples)
    path, short = get_args().record_samples, get_args().short_data
    if short:
        train = [train[i] for i in range(short)]
    return (Recorded(train, path) if path else train), valid, test


if __name__ == "__main__":
    from megatron.training.run.arguments import launch_config

    other = os.environ.get("LR_OF_RANK_1") if os.environ.get("RANK") == "1" else None
    config = launch_config(
        extra_args_provider=add_arguments, args_defaults={"min_lr": float(other)} if other else None
    )
    if config.extra["tag_lines"]:
        sys.stdout = Tagged(sys.stdout, os.environ["RANK"])
    for in_seconds, in_minutes in (
        ("timeout_s", "distributed_timeout_minutes"), ("exit_duration_s", "exit_duration_in_mins"),
    ):  # fmt: skip
        if config.extra[in_seconds]:
            config = config.replace(**{in_minutes: config.extra[in_seconds] / 60.0})

    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    pretrain(
        datasets_provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        config=config,
    )
