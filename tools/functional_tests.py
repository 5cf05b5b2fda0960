"""Functional cases: run the trainer as a YAML file says, and compare its figures with golden values.

    python tools/functional_tests.py run CASE...          run, and compare with the golden values
    python tools/functional_tests.py record CASE...       run, and write the golden values
    python tools/functional_tests.py compare CASE --logs DIR   compare what a run has left, wherever it ran

A CASE is a YAML file in Megatron-LM's shape, a folder with a model_config.yaml, or the name of one in
tests/functional_tests/cases; docs/functional_tests.md has the rest. Exit status: 0, 1 where a figure differs or a run
has failed, 2 for a wrong flag or case, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.core.optional import MissingPackageError
from tools.cases.case import ROOT, Case, CaseError, RunFailedError, find, read_case
from tools.cases.golden import RunFigures, digest, read_golden, read_logs, write_golden
from tools.cases.judge import Judgement, judged, verdicts
from tools.cases.launchers import NAMES
from tools.cases.running import Runner
from tools.flags import add_flags, script_parser


def parser() -> argparse.ArgumentParser:
    made = script_parser(__file__, __doc__)
    commands = made.add_subparsers(dest="command", required=True, metavar="run|record|compare")
    abouts = {"run": "run, and compare", "record": "run, and write golden values", "compare": "compare logs"}
    for name, about in abouts.items():
        command = commands.add_parser(name, help=about, allow_abbrev=False)
        command.add_argument("cases", nargs="+", metavar="CASE", help="a file, a folder, or a name")
        add_flags(command, {"--golden FILE": "golden values; default: beside the case"}, type=Path)
        if name == "compare":
            logs = "a run's folder or its metrics.jsonl, or a folder of TensorBoard"
            add_flags(command, {"--logs DIR": logs}, required=True, type=Path)
        else:
            kinds = {"--launcher NAME=forked": "how ranks are started"}
            add_flags(command, kinds, choices=NAMES, metavar=None)
            add_flags(command, {"--nodes N=1": "over which slurm spreads the ranks"})
            add_flags(command, {"--out DIR": "keep every case's folder there"}, type=Path)
        if name == "record":
            add_flags(command, {"--dirty": "also of a working tree with changes"})
        else:
            add_flags(command, {"--judge-time": "a step's time counts: within 5% of the golden one"})
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    line = parser()
    args = line.parse_args(argv)
    try:
        if args.golden and len(args.cases) > 1:
            raise CaseError("--golden is of one case")
        if args.command == "record" and not args.dirty:
            _refuse_changes()
        cases = [read_case(find(word)) for word in args.cases]
        if ignored := sorted({key for case in cases for key in case.ignored}):
            print(f"without a meaning here: {', '.join(ignored)}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="cases-", ignore_cleanup_errors=True) as folder:
            out = Path(folder) if getattr(args, "out", None) is None else args.out.resolve()
            return max(_one(case, args, out) for case in cases)
    except (CaseError, MissingPackageError) as error:
        print(f"{line.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{line.prog}: interrupted; the run is stopped", file=sys.stderr)
        return 128 + signal.SIGINT


def _one(case: Case, args: argparse.Namespace, out: Path) -> int:
    """Run or compare a case and say what came of it; its exit status."""
    path = args.golden or case.golden
    golden = None if args.command == "record" else _golden_of(case, path, args.command == "compare")
    made: list[Judgement] = []
    if args.command == "compare":
        found = RunFigures(*read_logs(args.logs))
    else:
        folder = out / case.name
        if folder.exists():
            raise CaseError(f"--out: {folder} is there already")
        folder.mkdir(parents=True)
        try:
            more: dict[str, Any] = {"environ": os.environ, "nodes": args.nodes, "say": say}
            found, made = Runner(case, folder, args.launcher, **more).run()
        except RunFailedError as error:
            print(error, file=sys.stderr)
            return 1
    if args.command == "record":
        if failed := [verdict.metric for verdict in made if verdict.passed is False]:
            print(f"{case.name}: nothing is recorded: {', '.join(failed)} differ", file=sys.stderr)
            return 1
        write_golden(path, found, judged(found, case.metrics))
        say(f"{case.name}: wrote {path}")
        return 0
    if golden is not None:
        made += _beside(case, golden, found, args.judge_time)
    for verdict in made:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[verdict.passed]
        say(f"  {mark} {verdict.metric}: {verdict.text}")
    passed = all(verdict.passed is not False for verdict in made)
    say(f"{case.name}: {'passed' if passed else 'failed'}")
    return int(not passed)


def _golden_of(case: Case, path: Path, needed: bool) -> RunFigures | None:
    """Golden values of this case; None where there are none, and it compares runs of its own. Raises CaseError."""
    if not needed and case.compares_its_runs and not path.exists():
        return None
    golden = read_golden(path)
    if golden.case and golden.case != digest(case):
        raise CaseError(
            f"{path}: these are the golden values of another case, or of this one before it was changed"
        )
    return golden


def _beside(case: Case, golden: RunFigures, found: RunFigures, judge_time: bool) -> list[Judgement]:
    """What golden values say of figures."""
    judged(found, case.metrics)  # names of the case that the run lacks
    if golden.image is None or golden.image != found.image:
        known = [f"{name} {value}" for name, value in (golden.image or {"of": "an unknown image"}).items()]
        say(f"  golden values of another image ({', '.join(known)}): compared within tolerances")
    return verdicts(golden, found, judge_time=judge_time)


def _refuse_changes() -> None:
    words = ["git", "status", "--porcelain", "--untracked-files=no"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    changed = [row for row in listed.stdout.splitlines() if not row.endswith((".golden.json", ".yaml"))]
    if changed or listed.returncode:
        why = f"the tree has changes ({changed[0][3:]})" if changed else "this is no repository"
        raise CaseError(f"golden values are of a commit, and {why}: commit first, or --dirty")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
