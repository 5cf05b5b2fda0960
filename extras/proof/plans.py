"""Plans for the proof, as `tools/show_schedule.py` of this project writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BY_THE_PACKAGE = ("zb-h1",)  # which needs no file for it


def arguments(schedule: str, stages: int, microbatches: int, folder: Path, *options: str) -> dict[str, str]:
    """What `zbpp_light.patch_megatron` is called with; a plan's file is written into the folder."""
    if schedule in BY_THE_PACKAGE:
        return {"schedule": schedule}
    path = folder / f"{'-'.join([schedule, str(stages), str(microbatches), *options])}.json"
    if not path.exists():
        path.write_text(_said(schedule, stages, microbatches, "plan", *options))
    return {"plan": str(path)}


def simulated(schedule: str, stages: int, microbatches: int, *options: str) -> dict[str, Any]:
    """bubble_rate, peak_activation by stage, ... at F = B = W."""
    result: dict[str, Any] = json.loads(_said(schedule, stages, microbatches, "json", *options))
    return result


def _said(schedule: str, stages: int, microbatches: int, form: str, *options: str) -> str:
    words = [
        sys.executable,
        str(ROOT / "tools" / "show_schedule.py"),
        "--schedule",
        schedule,
        "--stages",
        str(stages),
    ]
    words += ["--microbatches", str(microbatches), "--format", form, *options]
    result = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
