"""From flags to iterators of microbatches: data sets, built by one rank of each machine first, then their loaders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.datasets import held_arrays
from megatron.core.datasets.blended_samples import BlendedDataset
from megatron.core.datasets.builder import build_train_valid_test_datasets, prefixes_of, spec_of
from megatron.core.datasets.checksums import check_corpus, require_checksums
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.gpt_dataset_config import requested_sizes
from megatron.core.datasets.gpt_samples import GPTDataset, pad_id
from megatron.core.datasets.mock_dataset import MOCK_INDEX_BYTES, MockDataset
from megatron.core.datasets.samplers import build_data_loader
from megatron.core.machine import available_cores
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.words import counted, size_text
from megatron.training.config.config import Config
from megatron.training.guard.lease_holder import this_machine
from megatron.training.guard.signals import StopRequested
from megatron.training.report import metrics
from megatron.training.report.session import Session
from megatron.training.state import TrainState

DatasetsProvider = Callable[[Sequence[int | None]], tuple[Any, Any, Any]]


class StepBatches:
    """An iterator's batches, taken a step at a time and kept for the step.

    A pipeline asks for a microbatch on the stage that embeds it and again where its loss is; `--nan-policy` runs a
    whole step again, with post-validation when the next one has begun.

    fetch: draws from `source`; there to be timed and watched. reads: whether this rank's stages need data at all;
    without it nothing is drawn, and every microbatch is empty.
    """

    def __init__(
        self, source: Iterator[Any], *, fetch: Callable[[Iterator[Any]], Any] = next, reads: bool = True
    ) -> None:
        self._source = source
        self._fetch = fetch
        self._reads = reads
        self._before: list[Any] = []  # of the step before, where it may come again
        self._kept: list[Any] = []
        self._ahead: list[Any] = []  # drawn already for the step after this one

    def begin_step(self, *, keep_last: bool = False) -> None:
        """The next step's batches. keep_last: `step_back` may be called; otherwise those of the last are forgotten."""
        self._before = self._kept if keep_last else []
        self._kept, self._ahead = self._ahead, []

    def step_back(self) -> None:
        """The step before is the one under way again; this one's batches are the next's."""
        self._ahead, self._kept, self._before = self._kept, self._before, []

    def microbatch(self, index: int) -> Any:
        """Microbatch `index` of the step; drawn, with those before it, at the first request."""
        if not self._reads:
            return {}
        while len(self._kept) <= index:
            self._kept.append(self._fetch(self._source))
        return self._kept[index]


@dataclasses.dataclass
class EvaluationSet:
    """One held-out data set.

    name: "" when it is the only one. batches: an iterator that goes on where the last evaluation stopped, or, with
    `whole`, a loader that each evaluation reads from the start.
    """

    name: str
    batches: Any
    whole: bool = False


@dataclasses.dataclass
class DataIterators:
    """Microbatches of this data-parallel rank."""

    train: StepBatches
    valid: list[EvaluationSet]
    test: list[EvaluationSet]
    description: Any = None  # of the training set, where it is one of ours: what decides its samples


def build_gpt_datasets(
    config: Config, tokenizer: Tokenizer, num_samples: Sequence[int | None]
) -> tuple[Any, Any, Any]:
    """The data sets that the flags name. num_samples: at least so many of train, validation, test; None = one epoch."""
    data = config.data
    sample = {
        "sequence_length": config.model.seq_length,
        "eod": tokenizer.eod,
        "pad": pad_id(tokenizer.pad, tokenizer.special_ids),
        "vocab_size": tokenizer.vocab_size,
        # A mask that is only causal says nothing that attention does not do by itself, and faster.
        "create_attention_mask": data.create_attention_mask_in_dataloader and data.reset_attention_mask,
    }
    spec = spec_of(data, sample, seed=config.training.seed, tokenizer_identity=tokenizer.identity())
    train, valid, test = num_samples
    return build_train_valid_test_datasets(spec, (train, valid, test))


def build_data_iterators(
    session: Session, provider: DatasetsProvider, state: TrainState, *, reads: bool
) -> DataIterators:
    """Build data sets and loaders, positioned after what the run has consumed.

    reads: this rank's pipeline stages need data; else its loaders are never started.

    The first rank of each machine builds (and fills the index cache) while the others wait. Communicates over the
    world. Raises DataError.
    """
    config, evaluation = session.config, session.config.evaluation
    if config.data.verify_data:
        _verify_data(session)
    sizes = requested_sizes(
        train_samples=state.train_samples,
        train_iters=state.train_iters,
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
        global_batch_size=config.training.global_batch_size,
    )
    named = dict(zip(("train", "validation", "test"), sizes, strict=True))
    brief = f" > data: asked for {', '.join(f'{size:,} {split}' for split, size in named.items())} samples"
    session.print_rank_0(*metrics.dataset_lines("GPT", named), brief=brief)
    train, valid, test = _built_in_turn(session, lambda: provider(sizes))
    session.print_rank_0(metrics.DATASETS_DONE.format(name="GPT"), brief="")
    for split, dataset in zip(named, (train, valid, test), strict=True):
        if isinstance(dataset, MockDataset) and dataset.by_formula:
            session.print_rank_0(
                f" > mock data, {split}: the order of {len(dataset):,} samples is computed by a formula of --seed, not "
                f"kept, as its index would take more than {size_text(MOCK_INDEX_BYTES)}"
            )
    trained_on = 0 if evaluation.skip_train else sizes.train
    training = _Split("training", trained_on, "--train-iters x --global-batch-size, or --train-samples")
    asked_by = "--eval-iters x --global-batch-size, for each evaluation"
    validation = _Split("validation", sizes.valid, asked_by, whole=config.data.full_validation)

    def held_out(datasets: Any, split: _Split, consumed_samples: int) -> list[EvaluationSet]:
        """One set, or several with `--multiple-validation-sets`; none where no evaluation is asked for."""
        sets = enumerate(datasets) if isinstance(datasets, list) else [("", datasets)]
        return [
            EvaluationSet(str(name), _loader(session, dataset, split, consumed_samples), split.whole)
            for name, dataset in sets
            if dataset is not None and evaluation.eval_iters > 0
        ]

    batches = _loader(session, train, training, state.consumed_train_samples)
    return DataIterators(
        train=StepBatches(batches, fetch=functools.partial(_fetch, session), reads=reads),
        valid=held_out(valid, validation, state.consumed_valid_samples),
        test=held_out(test, _Split("test", sizes.test, asked_by), 0),
        description=train.description() if isinstance(train, GPTDataset | BlendedDataset) else None,
    )


@dataclasses.dataclass(frozen=True)
class _Split:
    """What the run asks of one split. whole: it is read to its end instead, whatever its length."""

    name: str
    num_samples: int
    asked_by: str
    whole: bool = False


def _loader(session: Session, dataset: Any, split: _Split, consumed_samples: int) -> Any:
    """Microbatches from position `consumed_samples` on. Raises DataError naming the split."""
    data, ps = session.config.data, session.ps
    order = "single" if split.whole else data.dataloader_type or "single"
    if order == "single" and not split.whole and dataset is not None and len(dataset) < split.num_samples:
        # Told now, not when the run has come to its end.
        raise DataError(
            f"the {split.name} data has {len(dataset)} samples, the run asks for {split.num_samples} "
            f"({split.asked_by}): ask for fewer, or give a blend weights (--data-path 1 A 1 B repeats its corpora, "
            "--data-path A B takes each once)"
        )
    try:
        loader = build_data_loader(
            dataset,
            consumed_samples=0 if split.whole else consumed_samples,
            micro_batch_size=session.config.training.micro_batch_size,
            dp_rank=ps.dp_rank,
            dp_size=ps.dp_size,
            dataloader_type=order,
            data_sharding=data.data_sharding,
            num_workers=data.num_workers,
            pin_memory=session.device.kind == "cuda",
        )
    except DataError as error:
        raise DataError(f"{split.name} data: {error}") from None
    return loader if split.whole else _guarded(loader, split)


def _guarded(loader: Any, split: _Split) -> Iterator[Any]:
    """A loader's batches; running out of them is an error that says so."""
    if loader is None:
        return
    try:
        yield from loader
    except DataError as error:
        # From a loader's process torch brings the message wrapped in that process's traceback.
        _, _, message = str(error).rpartition(f"{DataError.__module__}.{DataError.__qualname__}: ")
        raise DataError(message.strip()) from None
    raise DataError(
        f"the {split.name} data ended before the run, which asks for {split.num_samples} samples ({split.asked_by}): "
        "a datasets provider must return at least the number of samples it is asked for"
    )


def _fetch(session: Session, source: Iterator[Any]) -> Any:
    """The time in which this rank waits for data, under its own name for the watchdog and the timers."""
    with session.watchdog.phase("data"), session.timers("batch-generator", log_level=2):
        return next(source)


def _built_in_turn(session: Session, build: Callable[[], Any]) -> Any:
    """`build()` on the first rank of each machine, then on the others, which open what that one holds, or find the
    cache.

    On all at once where nothing is kept on disk.
    """
    data = session.config.data
    first = session.env.local_rank == 0 or (data.mock_data and data.data_cache_path is None)
    built, machine = None, this_machine()
    with held_arrays.shared() as sharing:
        for turn in (True, False):
            failure: BaseException | None = None
            if first is turn:
                try:
                    built = build()
                # Told to all ranks below, so that nobody waits for a lost peer.
                except (ValueError, OSError, StopRequested) as error:
                    failure = error
            offer = sharing.publish() if turn and first and failure is None else None
            others = session.gather([machine, offer, _told(failure)])
            _raise_alike(failure, [told for _, _, told in others])
            for where, path, _ in others:
                if path is not None and where == machine != "" and not first:
                    sharing.adopt(path)
    return built


def _told(failure: BaseException | None) -> list[str | None] | None:
    if failure is None:
        return None
    return [failure.name if isinstance(failure, StopRequested) else None, str(failure)]


def _raise_alike(failure: BaseException | None, by_rank: Sequence[Any]) -> None:
    """What keeps one rank from going on ends them all. by_rank: what each has `_told`."""
    if failure is not None:
        raise failure
    for rank, told in enumerate(by_rank):
        if told is not None and told[0] is not None:
            raise StopRequested(told[0])
        if told is not None:
            raise DataError(f"rank {rank} could not build the data sets: {told[1]}")


def _verify_data(session: Session) -> None:
    """--verify-data: corpora are compared with their checksums before anything is trained on them. The ranks of a
    machine share the blocks, since machines may have own disks.

    Communicates over the world. Raises DataError on every rank, with all that was found.
    """
    rank, size = session.env.local_rank, session.env.local_world_size
    told = session.gather([rank, size])
    numbered = [[k, size] for k in range(size) for _ in range(len(told) // size)]
    # Where the launcher does not number the ranks of each machine, each reads all of it.
    part, parts = (rank, size) if sorted(told) == numbered else (0, 1)
    threads = max(1, available_cores() // size)
    count, failure = 0, None
    try:
        for prefix in prefixes_of(session.config.data):
            check_corpus(prefix, require_checksums(prefix), part=part, parts=parts, threads=threads)
            count += 1
    except DataError as error:
        failure = str(error)
    seen_by: dict[str, int] = {}
    for rank, reason in enumerate(session.gather(failure)):
        if reason is not None:
            seen_by.setdefault(reason, rank)
    if seen_by:
        raise DataError("; ".join(f"{reason} (seen by rank {rank})" for reason, rank in seen_by.items()))
    session.print_rank_0(f"data: the checksums of {counted(count, 'corpus')} are right")


def first_difference(saved: Any, here: Any, name: str = "") -> str | None:
    """Where two JSON values differ first, as `name: saved ..., now ...`; None where they do not."""
    if isinstance(saved, dict) and isinstance(here, dict) and saved.keys() == here.keys():
        pairs = [(f"{name}.{key}".lstrip("."), saved[key], here[key]) for key in saved]
    elif isinstance(saved, list) and isinstance(here, list) and len(saved) == len(here):
        pairs = [(f"{name}[{index}]", *pair) for index, pair in enumerate(zip(saved, here, strict=True))]
    else:
        return None if saved == here else f"{name}: saved {saved!r:.100}, now {here!r:.100}"
    return next((found for key, a, b in pairs if (found := first_difference(a, b, key)) is not None), None)
