"""Where the training data is, how samples are cut from it, and how many a run asks for (floor 0)."""

import dataclasses
import os
from typing import Annotated, Literal, NamedTuple

from megatron.core.config_base import Bounds, Share, Threads, arg

# [Note: size of an index] A sample has a row of two numbers and a place in a shuffled order, 12 bytes in files that the
# processes of a machine share; while it is made, its first process holds the order. Making takes a quarter of a
# microsecond. So this many samples are 48 GiB and 18 minutes; 15 trillion tokens in sequences of 4096 are fewer.
MAX_SAMPLES = 2**32
BYTES_PER_SAMPLE = 12
MAKING_BYTES_PER_SAMPLE = 4
S_PER_SAMPLE = 2.5e-7
MOCK_LONGEST_DOCUMENT = 4096  # on average they are half as long


def indices_folder(prefix: str) -> str:
    """Where what is built of a corpus is kept unless --data-cache-path says so."""
    return os.path.join(prefix, "cache", "GPTDataset_indices")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Corpora, splits, and what a sample looks like."""

    data_path: tuple[str, ...] | None = arg(None, "one prefix, several prefixes, or weight prefix pairs")
    split: str | None = arg(
        None, "weights of train, valid, test for --data-path", derived="969,30,1 with --data-path"
    )
    train_data_path: tuple[str, ...] | None = arg(None, "like --data-path, training only")
    valid_data_path: tuple[str, ...] | None = arg(None, "like --data-path, validation only")
    test_data_path: tuple[str, ...] | None = arg(None, "like --data-path, test only")
    data_args_path: str | None = arg(None, "file that holds the words of --data-path")
    per_split_data_args_path: str | None = arg(None, "JSON file {train, valid, test: words of --data-path}")
    verify_data: bool = arg(
        False, "compare all corpora with their checksums before training starts", ours=True
    )
    data_cache_path: str | None = arg(None, "folder for cached indices", derived="beside the corpus")
    mock_data: bool = arg(False, "counting sequences instead of a corpus")
    full_validation: bool = arg(False, "each evaluation runs over the whole validation set")
    multiple_validation_sets: bool = arg(False, "evaluate each validation corpus on its own")
    mmap_bin_files: bool = arg(True, "read .bin with file reads")
    num_dataset_builder_threads: Threads = arg(1, "threads that build datasets on each rank")
    mid_level_dataset_surplus: Share = arg(0.005, "extra share of samples asked of each member of a blend")
    reset_position_ids: bool = arg(False, "positions start again after an end-of-document token")
    reset_attention_mask: bool = arg(False, "attention stops at an end-of-document token")
    eod_mask_loss: bool = arg(False, "no loss on end-of-document tokens")
    create_attention_mask_in_dataloader: bool = arg(True, "no s x s masks from the loader")
    dataloader_type: Literal["single", "cyclic", "external"] | None = arg(
        None,
        "order of samples: as indexed, reshuffled each epoch, or the user's own loader",
        derived="single",
    )
    data_sharding: bool = arg(True, "cyclic: each rank draws from all samples, not from its own bucket")
    num_workers: Annotated[int, Bounds(0, 1024)] = arg(
        2, "loader threads on each rank; 0 = load in the training thread"
    )


class RequestedSizes(NamedTuple):
    """Samples that a run asks of each split."""

    train: int
    valid: int
    test: int


def requested_sizes(
    *,
    train_samples: int | None,
    train_iters: int,
    eval_interval: int | None,
    eval_iters: int,
    global_batch_size: int,
) -> RequestedSizes:
    """Samples asked for: all training, all evaluations on the way and the one at the end, one test.

    train_iters: also given for sample-based runs, where it is derived.  eval_interval None: only the final
    evaluation.
    """
    train = train_samples if train_samples is not None else train_iters * global_batch_size
    evaluations = (train_iters // eval_interval if eval_interval else 0) + 1
    return RequestedSizes(train, evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size)
