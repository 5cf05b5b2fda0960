"""Text to a tokenized corpus: `<output prefix>_<json key>_document.bin` and `.idx`, which `--data-path` reads, and
their checksums, which `--verify-data` compares.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/web --tokenizer-type
    ByteTokenizer \
        --append-eod --workers 8
    python tools/preprocess_data.py --input src/ --suffix .py --output-prefix data/code --tokenizer-type
    ByteTokenizer

Inputs are JSON lines (one object a line), plain text (a file or a line is a document) or source trees (each
file is one). An interrupted run goes on where it stopped when the same command is given again. The output is
the same for any number of workers. Exit status: 0 done, 2 wrong arguments, 4 bad input data, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.core.datasets.errors import DataError
from megatron.core.optional import MissingPackageError, available, require
from megatron.core.tokenizers.build import build_from_config
from megatron.core.tokenizers.tokenizer import TokenizerError
from megatron.core.words import counted, plural, share_text, size_text, time_text
from tools.flags import add_flags, check_bounds, script_parser, too_small
from tools.preprocessing.job import Job, Statistics, run_job
from tools.preprocessing.sources import FORMATS, find_sources
from tools.tokenizer_flags import FIELDS, add_tokenizer_flags, tokenizer_config

EXIT_CONFIGURATION, EXIT_DATA, EXIT_INTERRUPTED = 2, 4, 130


def make_parser() -> argparse.ArgumentParser:
    parser = script_parser(__file__, "Make a tokenized corpus from text.", epilog="Guide: docs/data.md")
    source = parser.add_argument_group("input")
    add_flags(source, {"--input FILE...": "files, glob patterns or folders"}, required=True)
    add_flags(source, {"--format NAME=auto": "auto goes by the file's name"}, choices=FORMATS, metavar=None)
    add_flags(source, {"--json-keys KEY...": "of the objects; one corpus each"}, default=["text"])
    add_flags(source, {"--suffix END...": "files of a folder to take, e.g. .py"}, default=[])
    left_out: dict[str, Any] = {"action": "append", "default": []}
    add_flags(source, {"--exclude NAME": "name or pattern of what to leave out"}, **left_out)
    add_flags(source, {"--split-sentences": "not supported: GPT needs no sentences"})
    output = parser.add_argument_group("output")
    add_flags(output, {"--output-prefix PREFIX": "path, without _text_document.bin"}, required=True)
    more = {
        "--append-eod": "end each document with its own token",
        "--workers N=1": "processes",
        "--log-interval N": "print a line every so many documents",
    }
    add_flags(output, more)
    add_tokenizer_flags(parser, required=["tokenizer_type"])
    return parser


def make_job(args: argparse.Namespace) -> Job:
    """What the arguments ask for; raises ValueError (a subclass) for what they get wrong."""
    sources = find_sources(args.input, args.format, args.suffix, args.exclude)
    return Job(
        sources=tuple(sources),
        output_prefix=args.output_prefix,
        build_tokenizer=functools.partial(build_from_config, tokenizer_config(args)),
        keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        workers=args.workers,
    )


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Arguments that are wrong in themselves end the program with status 2."""
    if args.split_sentences:
        parser.error("--split-sentences is for BERT-like models and is not supported: leave it out for GPT")
    if wrong := too_small(args, {"workers": 1}):
        parser.error(*wrong)
    check_bounds(parser, args, FIELDS)
    if len(set(args.json_keys)) != len(args.json_keys):
        parser.error(f"--json-keys: a key occurs twice in {' '.join(args.json_keys)}")
    if any("/" in key for key in args.json_keys):
        parser.error("--json-keys: a key with / cannot be part of a file's name")


def check_output(job: Job) -> None:
    """Raises OSError, before any work, for an output prefix that cannot be written to."""
    folder = Path(job.output_prefix).parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    endings = (".bin", ".idx", ".sha256.json")
    for path in (f"{job.corpus_prefix(key)}{ending}" for key in job.keys for ending in endings):
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def os_error_text(error: OSError, output_prefix: str) -> str:
    """What to print; an error that names no file is one of writing, such as a full disk."""
    path = os.fspath(error.filename) if isinstance(error.filename, str) else output_prefix
    is_output = path.startswith(output_prefix) or Path(path) in Path(output_prefix).parents
    return f"{'--output-prefix ' if is_output else ''}{path}: {error.strerror or error}"


class Progress:
    """How far it is: a bar on a terminal (rich's where it is installed), else lines where asked for.

    A context manager; `update` is the callback of `run_job`.

    log_interval: print a line to stderr whenever so many more documents are done; None for no lines.
    """

    def __init__(self, title: str, log_interval: int | None) -> None:
        self.title = title
        self.log_interval = log_interval
        self._start = time.monotonic()
        self._first_bytes: int | None = None
        self._logged = 0
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._terminal and available("rich"):
            rich = require("rich.progress", "cli")
            console = require("rich.console", "cli").Console(stderr=True)
            self._bar = rich.Progress(
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.DownloadColumn(),
                rich.TransferSpeedColumn(),
                rich.TimeRemainingColumn(),
                console=console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=None)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._terminal:
            print(file=sys.stderr)

    def update(self, done: Statistics, total_bytes: int) -> None:
        if self._first_bytes is None:
            self._first_bytes = done.bytes  # what an earlier run did says nothing of this one's speed
        if self._bar is not None:
            self._bar.update(self._task, completed=done.bytes, total=total_bytes)
        elif self._terminal:
            print("\r" + self._line(done, total_bytes).ljust(78), end="", file=sys.stderr, flush=True)
        if self.log_interval and done.documents - self._logged >= self.log_interval:
            self._logged = done.documents
            if not self._terminal:
                print(self._line(done, total_bytes), file=sys.stderr, flush=True)

    def _line(self, done: Statistics, total_bytes: int) -> str:
        fresh = done.bytes - (self._first_bytes or 0)
        speed = fresh / max(time.monotonic() - self._start, 1e-9)
        left = f", {time_text((total_bytes - done.bytes) / speed)} left" if speed > 0 else ""
        share, documents = done.bytes / max(total_bytes, 1), counted(done.documents, "document")
        return f"{self.title}: {share_text(share, 0)}, {documents}, {size_text(speed)}/s{left}"


def report(job: Job, done: Statistics, seconds: float) -> None:
    for key in job.keys:
        print(f"{job.corpus_prefix(key)}.bin, .idx, .sha256.json")
    print(
        f"{counted(done.documents, 'document')}, {counted(done.tokens, 'token')} from {size_text(done.bytes)} in "
        f"{time_text(seconds)}\n"
        f"to train on them: --data-path {' or '.join(job.corpus_prefix(key) for key in job.keys)}"
    )
    if empty := done.empty_documents:
        print(f"{counted(empty, 'document')} {plural(empty, 'is')} empty: counted, but without tokens")
    if invalid := done.not_utf8:
        print(f"{counted(invalid, 'text')} {plural(invalid, 'is')} not UTF-8: invalid bytes became U+FFFD")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check(parser, args)
    start = time.monotonic()
    try:
        job = make_job(args)
        if len(job.keys) > 1 and any(source.format != "jsonl" for source in job.sources):
            parser.error("--json-keys: several keys need JSON lines; text has none")
        check_output(job)
        with Progress("tokenizing", args.log_interval) as progress:
            done = run_job(job, progress.update)
    except (TokenizerError, MissingPackageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_DATA
    except OSError as error:
        print(f"error: {os_error_text(error, args.output_prefix)}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED
    report(job, done, time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
