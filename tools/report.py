"""Write one self-contained HTML page about a run from its metrics.jsonl, or about several side by side.

python tools/report.py RUN [--out report.html] [--title TEXT] [--timeline DIR]
python tools/report.py RUN_A RUN_B [--out comparison.html]
python tools/report.py RUN --loss-svg loss.svg

A RUN is the folder given as --save, runs/TIME-PID of a run without, or a metrics.jsonl.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import html
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.words import plain, size_text
from megatron.training.report.metrics_file import read_metrics
from tools.drawing.charts import Series, line_chart
from tools.drawing.page import COLOURS, Picture, element, fold, table
from tools.flags import add_flags, script_parser
from tools.reports import page
from tools.reports.charts import loss_chart, marks_of, smoothed, smoothing_window, words_of
from tools.reports.pipeline import measured_step, planned_step
from tools.reports.run_record import RunRecord, read_run

MOST_DIFFERENT = 12  # settings of a comparison that are not folded


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 2 when there is nothing to report on, or what there is is damaged."""
    parser = script_parser(__file__, __doc__)
    parser.add_argument("run", type=Path, nargs="+", help="several: compared on one page")
    files = {
        "--out FILE": "default: report.html, or comparison.html, beside the first metrics",
        "--timeline DIR": "of --log-pipeline-timeline: its last step beside the plan, and what that holds",
        "--loss-svg FILE": "write the loss curve alone, for a document",
    }
    add_flags(parser, files, type=Path)
    add_flags(parser, {"--title TEXT": "heading; default: the run's folder"})
    args = parser.parse_args(argv)
    target = args.run[0]
    try:
        metrics = [run / "metrics.jsonl" if run.is_dir() else run for run in args.run]
        name = "report.html" if len(metrics) == 1 else "comparison.html"
        target = args.loss_svg or args.out or metrics[0].with_name(name)
        out = made(args, metrics, target)
    except OSError as error:
        print(f"{parser.prog}: {error.filename or target}: {error.strerror or error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"{out} ({size_text(out.stat().st_size, digits=3)})")
    return 0


def made(args: argparse.Namespace, metrics: Sequence[Path], target: Path) -> Path:
    """Write what is asked for. Raises ValueError, OSError."""
    for path in metrics:
        if not path.exists():
            raise ValueError(
                f"{path} does not exist: give the folder of --save or in runs/, or a metrics.jsonl"
            )
        if next(read_metrics(path), None) is None:
            raise ValueError(f"{path} holds no record: nothing to report on")
    if target.is_dir():
        raise ValueError(
            f"{'--loss-svg' if args.loss_svg else '--out'} {target}: is a directory: give a file"
        )
    if args.loss_svg and args.out:
        raise ValueError("--loss-svg with --out: each writes one file: give one of them")
    if len(metrics) > 1:
        if args.timeline or args.loss_svg:
            raise ValueError("--timeline and --loss-svg are of one run: give one")
        if len(metrics) > COLOURS:
            raise ValueError(f"{len(metrics)} runs: at most {COLOURS} can be told apart on one page")
        names = names_of(metrics)
        return comparison(names, target, args.title or f"Runs compared: {', '.join(names)}")
    name = folder_of(metrics[0]).name
    if args.loss_svg:
        return page.written(
            target,
            loss_chart([("", read_run(metrics[0]))], hover=False, title=args.title or f"Loss: {name}").svg(),
        )
    pipeline = measured_step(args.timeline) if args.timeline else planned_step(read_run(metrics[0]))
    return page.write_report(
        metrics[0], target, title=args.title or f"Training report: {name}", pipeline=pipeline
    )


def comparison(runs: Mapping[str, Path], out: Path, title: str) -> Path:
    """Write one page about several runs, by name their metrics: first what they were told and what came out, where they
    differ. Raises ValueError, OSError."""
    read = {name: read_run(path) for name, path in runs.items()}
    figures = [{name: (value, note) for name, value, note in page.totals(run)} for run in read.values()]
    results = [
        (name, *(" · ".join(filter(None, one.get(name, ("", "")))) for one in figures))
        for name in dict.fromkeys(itertools.chain(*figures))
    ]
    ends = {run.last_iteration for run in read.values()}
    if len(ends) > 1 and all(run.losses for run in read.values()):
        means = (plain(run.last_mean(run.losses[0], min(ends))[0]) for run in read.values())
        results.insert(1, (f"training loss at iteration {min(ends):,}", *means))
    names = dict.fromkeys([*page.SUMMARY_SETTINGS, *itertools.chain(*(run.config for run in read.values()))])
    settings = [("layout", *(run.layouts for run in read.values()))]
    settings += [
        (name, *(page.setting_text(run.config.get(name)) for run in read.values())) for name in names
    ]
    differ = [row for row in settings if len({*row[1:]}) > 1]
    differ.sort(key=lambda row: any("/" in value for value in row[1:]))  # paths tell the least
    head, over = ("", *read), [losses_over(what, read) for what in ("millions of tokens", "minutes of steps")]
    first, rest = differ[:MOST_DIFFERENT], differ[MOST_DIFFERENT:]
    told = table(first, head) if first else element("p", "none")
    parts = [
        element("header", element("h1", html.escape(title))),
        fold(f"Settings that differ ({len(differ)})", told, is_open=True),
        fold(f"{len(rest)} more settings that differ", table(rest, head)) if rest else "",
        fold("Results side by side", table(results, head), is_open=True),
        page.charts([*read.items()], more=over),
        page.curve_names([*read.items()]),
    ]
    return page.publish(out, title, parts)


def losses_over(what: str, runs: Mapping[str, RunRecord]) -> Picture:
    """Training losses of several runs over what they consumed or how long they took: batches and speeds may differ."""
    series, marks = [], []
    for number, (name, run) in enumerate(runs.items()):
        length = run.config.get("seq_length")
        if what == "minutes of steps":
            amounts: dict[float, float] = {at: seconds / 60 for at, seconds in run.seconds()}
        else:
            amounts = {at: count * length / 1e6 for at, count in run.samples} if type(length) is int else {}
        for tag in run.losses:
            curve = run.curves[tag]
            means = smoothed(curve, smoothing_window(len(curve)) or 1)
            points = [(amounts[x], y) for x, y in means if x in amounts]
            series.append(Series(f"{name}: {words_of(tag)}", points, colour=number))
        iterations = [*amounts]
        for mark in marks_of([(name, run)]):  # a resume is where the last record before it is
            if known := bisect.bisect_right(iterations, mark.at):
                marks.append(dataclasses.replace(mark, at=amounts[iterations[known - 1]], colour=number))
    return line_chart(f"Smoothed loss over {what}", series, marks=marks, x_name=what)


def folder_of(metrics: Path) -> Path:
    """Of a run: the one that has a name."""
    folder = metrics.resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


def names_of(metrics: Sequence[Path]) -> dict[str, Path]:
    """Runs by the shortest ends of their folders that tell them apart. Raises ValueError for a run given twice."""
    folders = [folder_of(path).parts for path in metrics]
    if len({path.resolve() for path in metrics}) < len(metrics):
        raise ValueError("a run is given twice: name different ones")
    for length in range(1, max(map(len, folders)) + 1):
        names = ["/".join(parts[-length:]) for parts in folders]
        if len(set(names)) == len(names):
            return dict(zip(names, metrics, strict=True))
    return {str(path): path for path in metrics}  # several files of one folder


if __name__ == "__main__":
    sys.exit(main())
