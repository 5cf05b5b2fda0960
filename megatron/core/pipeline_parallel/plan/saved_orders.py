"""Searched orders kept on disk, so that one rank of a host searches, and restarts do not.

`<sha256>-plan-<schedule>.json` in the folder of dataset indices: `key`, the request and a digest of the sources under
plan/, and `plan` as text.to_json writes it. A file is used only if its key is what this process would write and
its plan has the hash that is beside it; else it is made again. Searching happens under a lock file and a
file appears by rename, so that any number of ranks and jobs may start at once (core/safe_files.py).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from megatron.core import safe_files
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.text import MAX_BYTES, from_json, to_json

logger = logging.getLogger(__name__)


def saved_or_made(schedule: str, request: Request, make: Callable[[Request], Plan], folder: str) -> Plan:
    """The plan of the request, from the folder where it is there and right, else made and written.

    Raises PlanError as `make` does.
    """
    key = {"schedule": schedule, **dataclasses.asdict(request), "sources": _sources()}
    key = json.loads(json.dumps(key))  # as it is read: with lists
    path = os.path.join(
        folder, f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}-plan-{schedule}.json"
    )
    plan = _read(path, key)
    if plan is not None:
        return plan
    try:
        os.makedirs(folder, exist_ok=True)
        patience_s = safe_files.CACHE_PATIENCE_S
        with safe_files.locked(f"{path}.lock", patience_s=patience_s, say=logger.warning):
            plan = _read(path, key)  # another process may have made it while we waited
            if plan is None:
                plan = make(request)
                safe_files.remove_leftovers(path)
                text = json.dumps({"key": key, "plan": to_json(plan)}) + "\n"
                safe_files.publish_text(path, text, mode=safe_files.SHARED_MODE)
    except OSError as error:
        logger.warning(
            "pipeline plans cannot be kept in %s (%s): every rank and every start searches for its own; give "
            "--data-cache-path a folder that is writable and that nobody locks",
            folder,
            error,
        )
    return make(request) if plan is None else plan


def _read(path: str, key: object) -> Plan | None:
    """None where the file is not there, or not what was written: the plan has its hash."""
    try:
        content = safe_files.read_json(path, max_bytes=2 * MAX_BYTES)
        if (
            not isinstance(content, dict)
            or content.get("key") != key
            or not isinstance(content.get("plan"), str)
        ):
            raise ValueError("it has another key")
        return from_json(content["plan"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("pipeline plan %s is not used: %s", path, error)
        return None


@functools.cache
def _sources() -> str:
    """A digest of everything that decides on an order: the sources under plan/."""
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        text = safe_files.read_bytes(file, max_bytes=MAX_BYTES, follow=True)
        digest.update(f"{file.relative_to(folder)}\0".encode() + text)
    return digest.hexdigest()
