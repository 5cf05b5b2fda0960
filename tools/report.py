"""Write one self-contained HTML page about a run from its metrics.jsonl.

python tools/report.py RUN_DIR_OR_METRICS_FILE [--out report.html] [--title TEXT] [--timeline DIR]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import program
from megatron.training.report.metrics_file import read_metrics
from megatron.training.report.report import write_report
from tools.commands import as_called


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 2 when there is nothing to report on, or what there is is damaged."""
    parser = argparse.ArgumentParser(
        prog=program(__file__), description=as_called(__doc__), allow_abbrev=False
    )
    run_help = "the folder given as --save, runs/TIME-PID of a run without, or a metrics.jsonl"
    parser.add_argument("run", type=Path, help=run_help)
    parser.add_argument("--out", type=Path, help="default: report.html beside the metrics")
    parser.add_argument("--title", default=None, help="heading; default: the run's folder")
    timeline_help = "of --log-pipeline-timeline: its last step beside the plan, and what that holds"
    parser.add_argument("--timeline", type=Path, help=timeline_help)
    args = parser.parse_args(argv)
    metrics = args.run / "metrics.jsonl" if args.run.is_dir() else args.run
    if not metrics.exists():
        print(
            f"{parser.prog}: {metrics} does not exist: give the folder of --save or in runs/, or a metrics.jsonl",
            file=sys.stderr,
        )
        return 2
    title = args.title or f"Training report: {metrics.resolve().parent.name}"
    target = args.out or metrics.with_name("report.html")
    try:
        if next(read_metrics(metrics), None) is None:
            raise ValueError(f"{metrics} holds no record: nothing to report on")
        if target.is_dir():
            raise ValueError(f"--out {target}: is a directory: give a file")
        out = write_report(metrics, target, title=title, timeline=args.timeline)
    except OSError as error:
        print(f"{parser.prog}: {error.filename or target}: {error.strerror or error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"{out} ({out.stat().st_size / 1024:.0f} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
