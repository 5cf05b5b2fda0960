"""Show what a run trains on: lengths of the splits, and text or digests of their first samples; or check a corpus.

    python tools/inspect_data.py --load runs/quickstart/checkpoints
    python tools/inspect_data.py --data-path data/web_text_document --seq-length 1024 --tokenizer-type ByteTokenizer
    python tools/inspect_data.py --data-path data/web_text_document --seq-length 1024 --samples 4
    python tools/inspect_data.py --data-path 0.7 data/a 0.3 data/b --seq-length 1024 --sizes 1000,100,10 --json
    python tools/inspect_data.py --data-path data/web_text_document --verify
    python tools/inspect_data.py --write-checksums data/web_text_document

With --load, tokenizer, corpora, split, sizes, seed and sequence length are those of the run that has saved there,
where no flag says otherwise. Without a tokenizer, from a run or from flags, there are digests in the place of text.

Samples come from the code that training reads them with. Digests are SHA-256 over little-endian int64 (tokens, labels,
position ids) and float32 (loss mask), so two machines or two versions can be compared. Nothing is written unless
--data-cache-path or --write-checksums is given. Exit status: 0 done, 2 wrong arguments, 3 no checkpoint in --load,
4 what is named as data (corpora, blends, splits).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

import numpy as np

from megatron.core.datasets.blend import DEFAULT_SPLIT, SPLIT_NAMES, parse_split
from megatron.core.datasets.builder import (
    Dataset,
    Datasets,
    build_train_valid_test_datasets,
    prefixes_of,
    spec_of,
)
from megatron.core.datasets.checksums import checksums_path, write_checksums
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.gpt_dataset_config import DataConfig
from megatron.core.datasets.gpt_samples import NO_PAD
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.optional import MissingPackageError
from megatron.core.tokenizers.tokenizer import Tokenizer, TokenizerError
from megatron.core.words import counted, plural
from megatron.training.config.config import FIELDS
from megatron.training.guard.console import guard_console
from tools.conversion.contents import config_in, newest
from tools.corpus_report import CorpusReport, verify_corpus
from tools.flags import add_flags, add_settings, check_bounds, script_parser, too_small
from tools.run_data import HOW, WHERE, defaults_of_run, texts, tokenizer_of, told
from tools.tokenizer_flags import FIELDS as TOKENIZER
from tools.tokenizer_flags import add_tokenizer_flags

EXIT_CONFIGURATION, EXIT_CHECKPOINT, EXIT_DATA = 2, 3, 4
THREADS = min(8, len(os.sched_getaffinity(0)))
SETTINGS = [FIELDS[name][1] for name in (*WHERE, *HOW, "data_cache_path")]
DIGESTED = {"tokens": "<i8", "labels": "<i8", "loss_mask": "<f4", "position_ids": "<i8"}


def make_parser() -> argparse.ArgumentParser:
    parser = script_parser(
        __file__,
        __doc__,
        usage="%(prog)s (--load DIR | --data-path WORDS --seq-length N | --data-path WORDS --verify) [flags]",
        epilog="Guide: docs/data.md",
    )
    run = {
        "--load DIR": "show the samples of this run, with its tokenizer",
        "--ckpt-step N": "its settings at this iteration; default the newest",
    }
    add_flags(parser.add_argument_group("a run that has saved a checkpoint"), run)
    data = parser.add_argument_group("data and samples, as in training; one epoch, and no cached indices")
    add_settings(data, SETTINGS)
    good = "read these corpora, which are known to be good, and write the checksums that --verify compares"
    add_flags(data, {"--write-checksums PREFIX...": good})
    asked = {"--sizes N,N,N": "samples asked of train, valid, test; by default one epoch"}
    add_flags(data, asked, type=sizes, default=(None, None, None))
    more = {
        "--eod N": "id of the end-of-document token",
        "--pad N": "id of padding, -1 for none",
        "--no-extra-token": "samples share no token with the next",
    }
    add_flags(data, more)
    output = {
        "--samples N=4": "how many of each split to show",
        "--text N=400": "characters of each sample to show",
        "--verify": "read and check every corpus whole",
        "--json": "one JSON object on stdout, with whole texts",
    }
    add_flags(parser.add_argument_group("output"), output)
    ids = "ids from --vocab-size on, which --mock-data needs, are refused"
    add_tokenizer_flags(parser, f"for text in the place of digests; {ids}")
    parser.set_defaults(**{name: FIELDS[name][1].default for name in ("seed", "mid_level_dataset_surplus")})
    return parser


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Tokenizer | None]:
    """The line over what --load says, and the tokenizer. Raises CheckpointError, and ValueError for a tokenizer that
    cannot be built."""
    parser, config, defaults = make_parser(), None, dict[str, Any]()
    args = parser.parse_args(argv)
    if args.ckpt_step is not None and args.load is None:
        parser.error("--ckpt-step chooses a checkpoint of --load, which is not given")
    if args.load is not None:
        config = config_in(newest(Path(args.load), args.ckpt_step))
        defaults = defaults_of_run(config, args)
        parser.set_defaults(**defaults)
        args = parser.parse_args(argv)
    args.data_of_run = "data_path" in defaults
    check_bounds(parser, args, [*SETTINGS, *TOKENIZER])
    tokenizer = None if args.write_checksums else tokenizer_of(args, config)
    args.pad = NO_PAD if args.pad is None else args.pad
    check(parser, args)
    return args, tokenizer


def sizes(text: str) -> tuple[int | None, int | None, int | None]:
    """`n_train,n_valid,n_test`; an empty place or "none" is one epoch."""
    words = [word.strip().lower() for word in text.split(",")]
    if len(words) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}: three numbers are needed, as in 1000,100,10")
    try:
        train, valid, test = (None if word in ("", "none") else int(word) for word in words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if any(number is not None and number < 0 for number in (train, valid, test)):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of samples are not negative")
    return train, valid, test


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Arguments that are wrong in themselves end the program with status 2."""
    ways = {
        "--data-path": args.data_path,
        "--train/valid/test-data-path": args.train_data_path or args.valid_data_path or args.test_data_path,
        "--data-args-path": args.data_args_path,
        "--per-split-data-args-path": args.per_split_data_args_path,
        "--mock-data": args.mock_data,
        "--write-checksums": args.write_checksums,
    }
    if sum(bool(given) for given in ways.values()) != 1:
        parser.error(f"give exactly one of {', '.join(ways)}, or --load DIR of a run")
    if args.write_checksums and (args.verify or args.seq_length is not None):
        parser.error("--write-checksums makes checksums, and nothing else: give it alone")
    if args.seq_length is None and not args.verify and not args.write_checksums:
        parser.error("--seq-length is needed to cut samples (or give --load of a run, or --verify alone)")
    if (args.reset_position_ids or args.reset_attention_mask or args.eod_mask_loss) and args.eod is None:
        parser.error("--reset-position-ids, --reset-attention-mask and --eod-mask-loss need --eod ID")
    if args.mock_data and (args.eod is None or args.vocab_size is None):
        parser.error("--mock-data needs --eod ID and --vocab-size N")
    if args.split is not None and (ways["--train/valid/test-data-path"] or args.per_split_data_args_path):
        parser.error("--split divides the corpora of --data-path; with per-split paths leave it out")
    if wrong := too_small(args, {"samples": 0, "text": 0}):
        parser.error("; ".join(wrong))
    most = 2**40  # no corpus is as large
    for flag, value in (("--eod", args.eod), *(("--sizes", size) for size in args.sizes)):
        if value is not None and not 0 <= value <= most:
            parser.error(f"{flag} {value}: must be from 0 to {most}")


def data_of(args: argparse.Namespace) -> DataConfig:
    """The trainer's flags of data."""
    names = {field.name for field in dataclasses.fields(DataConfig)}
    return DataConfig(**{name: value for name, value in vars(args).items() if name in names})


def write(prefixes: list[str]) -> int:
    """Write the checksums of corpora whose index is right. Raises DataError."""
    for prefix in prefixes:
        verify_corpus(prefix)
        print(write_checksums(prefix, THREADS))
    return 0


def build(args: argparse.Namespace) -> Datasets:
    names = {"sequence_length": "seq_length", "eod": "eod", "pad": "pad", "vocab_size": "vocab_size"}
    sample = {ours: getattr(args, name) for ours, name in names.items()}
    sample["extra_token"] = not args.no_extra_token
    spec = spec_of(data_of(args), sample, seed=args.seed, cache=args.data_cache_path is not None)
    return build_train_valid_test_datasets(spec, args.sizes, allow_empty=True, skip_empty=True)


def named_splits(args: argparse.Namespace, datasets: Datasets) -> Iterator[tuple[str, Dataset | None]]:
    """Each dataset with its name, separate validation sets as valid0, valid1, ...; None: asked for, without sequences.
    Raises DataError where all that were asked for are."""
    shares = parse_split(args.split or DEFAULT_SPLIT) if args.data_path or args.data_args_path else ()
    wanted = [size != 0 and share is not None for size, share in zip(args.sizes, shares, strict=False)]
    empty = [data is None for data, is_wanted in zip(datasets, wanted, strict=False) if is_wanted]
    if empty and all(empty):
        names = (name for name, is_wanted in zip(SPLIT_NAMES, wanted, strict=True) if is_wanted)
        raise DataError(f"--split {args.split or DEFAULT_SPLIT}: {' and '.join(map(repr, names))} are empty")
    for which, (name, entry) in enumerate(zip(SPLIT_NAMES, datasets, strict=True)):
        if isinstance(entry, list):
            yield from ((f"{name}{i}", dataset) for i, dataset in enumerate(entry))
        elif entry is not None or (wanted and wanted[which]):
            yield name, entry


def describe(
    dataset: Dataset, i: int, tokenizer: Tokenizer | None = None, pad: int = NO_PAD
) -> dict[str, Any]:
    """Digests of sample i, the sequences that it has tokens of, and with a tokenizer its text."""
    sample = dataset[i]
    row: dict[str, Any] = {
        name: hashlib.sha256(np.ascontiguousarray(sample[name], dtype=dtype).tobytes()).hexdigest()
        for name, dtype in DIGESTED.items()
    }
    row["documents"] = dataset.documents(i)
    if tokenizer is not None:
        row["text"] = texts(tokenizer, sample["tokens"].tolist(), pad)
        row["counted"] = int((sample["loss_mask"] > 0).sum())
    return row


def inspect(args: argparse.Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if args.verify and not args.mock_data:
        result["corpora"] = [
            verify_corpus(prefix, args.eod, args.vocab_size, threads=THREADS)
            for prefix in prefixes_of(data_of(args))
        ]
    if args.seq_length is not None:
        result["splits"] = {}
        for name, dataset in named_splits(args, build(args)):
            result["splits"][name] = {"len": 0, "samples": []}
            if dataset is None:
                print(
                    f"note: split {name!r} is empty: --split {args.split or DEFAULT_SPLIT} gives it none of the "
                    "sequences; training on it needs a larger corpus, a larger weight for it, or weight 0 for no such "
                    "data",
                    file=sys.stderr,
                )
                continue
            if not len(dataset):
                print(f"note: split {name!r} is too short for one sample", file=sys.stderr)
            shown = range(min(args.samples, len(dataset)))
            rows = [describe(dataset, i, tokenizer, args.pad) for i in shown]
            result["splits"][name] = {"len": len(dataset), "samples": rows}
    return result


def print_table(result: dict[str, Any], args: argparse.Namespace) -> None:
    for report in result.get("corpora", []):
        print_corpus(report)
    if args.data_of_run and "splits" in result:
        where = " ".join(args.data_path or ()) or "its data"
        print(f"{where}, split {args.split}, sequences of {args.seq_length} tokens, seed {args.seed}")
    for name, split in result.get("splits", {}).items():
        print(f"{name}: {counted(split['len'], 'sample')}")
        with_text = any("text" in row for row in split["samples"])
        if split["samples"] and not with_text:
            print(f"  {'':>6}  {'tokens':12}  {'labels':12}  {'loss mask':12}  {'positions':12}  documents")
        for i, row in enumerate(split["samples"]):
            digests = "  ".join(row[key][:12] for key in DIGESTED)
            more = " ..." if len(row["documents"]) > 8 else ""
            documents = " ".join(map(str, row["documents"][:8])) + more
            if with_text:
                of = plural(len(row["documents"]), "document")
                tokens = f"{counted(args.seq_length, 'token')}, {row['counted']} with a loss"
                print(
                    f"  sample {i}: {tokens}; of {of} {documents}",
                    *told(row["text"], args.text),
                    sep="\n",
                )
            else:
                print(f"  {i:>6}  {digests}  {documents}")


def print_corpus(report: CorpusReport) -> None:
    print(f"{report['prefix']}: good")
    if report["checksums"] == "absent":
        print(
            f"  {checksums_path(report['prefix'])}: no such file: a changed byte that is still a token was not seen "
            f"(--write-checksums {report['prefix']})"
        )
    for name, value in report.items():
        if name != "prefix" and value is not None:
            print(f"  {name.replace('_', ' '):16} {value}")


def main(argv: list[str] | None = None) -> int:
    guard_console()  # a corpus has letters that a terminal lacks, and `| head` closes the pipe
    try:
        args, tokenizer = parse(argv)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CHECKPOINT
    except (TokenizerError, MissingPackageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    try:
        if args.write_checksums:
            return write(args.write_checksums)
        result = inspect(args, tokenizer)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        if args.data_of_run:
            told = f"the run in {args.load} has named its data from the folder that it was started in"
            print(f"note: {told}: go there, or give --data-path", file=sys.stderr)
        return EXIT_DATA
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
