"""Plans as files: JSON with version and hash, one of them to be run (--pipeline-schedule-file), and the CSV that
torch.distributed.pipelining reads; sizes in words."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core import safe_files
from megatron.core.config_base import STAGES
from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.ir import Kind, Plan, PlanError, Row
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import PlannedResidency
from megatron.core.pipeline_parallel.plan.verify import verify

MAX_BYTES = 1 << 24  # 64 ranks with 1024 microbatches on a V
_NUMBERS, _FLAGS = ("ranks", "chunks", "microbatches"), ("bitwise", "forward_only")
_FIELDS = ("version", "schedule", "placement", *_NUMBERS, *_FLAGS, "hash")
_RESIDENCY = "residency"  # a field of plans with operations of data parallelism
_LIST = re.compile(r"(?<![A-Z0-9])\[")  # in JSON; not the one of an operation's units
# Torch's letters, by kind; "" where torch has none.
_TORCH = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B", Kind.REDUCE: "REDUCE_GRAD"} | {
    kind: kind.name
    for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.UNSHARD, Kind.RESHARD)
}
_TORCH_NAMES = tuple(_TORCH.get(kind, "") for kind in Kind)


def to_json(plan: Plan) -> str:
    """The header's fields and `ops`, one list of texts a rank."""
    place = plan.placement
    values = ir.VERSION, plan.schedule, place.kind, place.num_ranks, place.num_chunks, plan.num_microbatches
    content: dict[str, Any] = dict(
        zip(_FIELDS, (*values, plan.bitwise, plan.forward_only, ir.plan_hash(plan)), strict=True)
    )
    if plan.residency is not None:
        content[_RESIDENCY] = plan.residency.as_json()
    return json.dumps({**content, "ops": [ir.row_texts(row) for row in plan.rows]}) + "\n"


def from_json(text: str) -> Plan:
    """The plan that `to_json` wrote. Raises PlanError for another version, another hash, or what is no plan."""
    # A list a rank's operations, a stage's units and their groups.
    if len(_LIST.findall(text)) > 3 * STAGES.most + 3:
        raise PlanError(f"no plan: it has more lists than the {STAGES.most} stages that a pipeline may have")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"no plan: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("ops"), list):
        raise PlanError("no plan: the JSON has no list of operations, `ops`")
    rows = []
    for row in content.pop("ops"):
        if not isinstance(row, list) or not all(isinstance(op, str) for op in row):
            raise PlanError(f"`ops` is one list of texts a rank, not {row!r:.80}")
        rows.append(ir.parse_row(row))
    plan = _plan(content, tuple(rows))
    if ir.plan_hash(plan) != content["hash"]:
        raise PlanError(
            f"the plan's hash is {ir.plan_hash(plan)}, its header says {content['hash']}: it was changed"
        )
    stages = plan.placement.num_stages
    if plan.num_ops < stages * plan.num_microbatches:  # before anybody makes a list of that length
        raise PlanError(
            f"the plan has {plan.num_ops} operations, the forwards of {plan.num_microbatches} microbatches on "
            f"{stages} stages are more"
        )
    return plan


def _plan(header: Mapping[str, Any], rows: tuple[Row, ...]) -> Plan:
    """What a file says, its hash not checked."""
    if set(header) - {_RESIDENCY} != set(_FIELDS):
        raise PlanError(f"a plan's header has {', '.join(_FIELDS)}, not {', '.join(map(str, header)):.200}")
    if str(header["version"]) != str(ir.VERSION):
        raise PlanError(f"the plan has version {header['version']}, this program reads version {ir.VERSION}")
    for flag in _FLAGS:
        if str(header[flag]) not in ("True", "False"):
            raise PlanError(f"{flag} is True or False, not {header[flag]!r}")
    try:
        # by way of text, so that JSON's 2.5, true and [2] are as wrong as they look
        ranks, chunks, microbatches = (int(str(header[name])) for name in _NUMBERS)
        placement = Placement(str(header["placement"]), ranks, chunks)
        residency = None
        if _RESIDENCY in header:
            residency = PlannedResidency.from_json(header[_RESIDENCY], sum(map(len, rows)))
    except ValueError as error:
        raise PlanError(f"the plan's header is wrong: {error}") from None
    bitwise, forward_only = (str(header[flag]) == "True" for flag in _FLAGS)
    return Plan(str(header["schedule"]), placement, microbatches, rows, bitwise, forward_only, residency)


@dataclass(frozen=True)
class PlanFile:
    """A plan, and where it was read."""

    path: str
    plan: Plan = dataclasses.field(hash=False)  # plans may be large

    @property
    def steps(self) -> bool:
        """Whether it has the operations of post-validation."""
        return any(op[0] == Kind.STEP for row in self.plan.rows for op in row)

    def order(self, num_microbatches: int) -> Plan:
        """Its computations. Raises PlanError for another number of microbatches."""
        if self.plan.num_microbatches != num_microbatches:
            raise PlanError(
                f"--pipeline-schedule-file {self.path} is a plan for {self.plan.num_microbatches} microbatches a step, "
                f"this one has {num_microbatches}: change --global-batch-size, or save a plan for it"
            )
        rows = tuple(tuple(op for op in row if ir.IS_COMPUTE[op[0]]) for row in self.plan.rows)
        return dataclasses.replace(self.plan, rows=rows, residency=None)


def load_plan(path: str, num_ranks: int, *, post_validation: bool) -> PlanFile:
    """A saved plan in JSON, for a pipeline of these ranks. post_validation: the run validates steps afterwards.

    Raises PlanError naming the file.
    """
    flag = f"--pipeline-schedule-file {path}"
    try:
        plan = from_json(safe_files.read_text(path, max_bytes=MAX_BYTES, follow=True))
        verify(plan)
    except OSError as error:
        raise PlanError(f"{flag} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"{flag}: {error}") from None
    file, ranks = PlanFile(path, plan), plan.placement.num_ranks
    if plan.forward_only:
        raise PlanError(f"{flag} is the plan of an evaluation: save one for training")
    if ranks != num_ranks:
        raise PlanError(
            f"{flag} is a plan for {ranks} pipeline ranks, --pipeline-model-parallel-size is {num_ranks}"
        )
    if file.steps and not post_validation:
        raise PlanError(
            f"{flag} makes and validates the optimizer's steps: give --enable-optimizer-post-validation"
        )
    return file


def to_torch_csv(plan: Plan, *, transfers: bool = False) -> str:
    """One line a rank in torch's letters (B is I there, BW is B), for torch's `_load_csv`.

    transfers: torch's format `compute_comms`; without, `compute_only`. Raises PlanError for what torch cannot say.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in plan.rows:
        kept = [op for op in row if transfers or ir.IS_COMPUTE[op[0]]]
        for op in kept:
            if not _TORCH_NAMES[op[0]] or op[3] or op[4] >= 0:
                raise PlanError(f"{ir.op_text(op)} cannot be said in torch's CSV")
        # torch names neither peers nor messages: both follow from stage and microbatch
        bare = [(*op[:6], -1, op[7] if ir.IS_COMPUTE[op[0]] else -1) for op in kept]
        texts = ir.row_texts(bare, _TORCH_NAMES)
        writer.writerow(f"{text}OVERLAP_F_B" if text.startswith("(") else text for text in texts)
    return out.getvalue()


_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size_text(size: float, unit: str = "bytes") -> str:
    """Bytes in GB of 1e9, what is small in less; anything else as it is."""
    if unit != "bytes":
        return f"{size:.4g}"
    factor, name = next((one for one in _UNITS if size >= 0.1 * one[0]), (1.0, "bytes"))
    return f"{size / factor:.4g} {name}"


def mib_text(size: float) -> str:
    """Bytes in MiB, what is smaller than a hundredth of one in KiB."""
    mib = size / 2**20
    return f"{mib:.2f} MiB" if mib >= 0.01 or not size else f"{size / 2**10:.2f} KiB"
