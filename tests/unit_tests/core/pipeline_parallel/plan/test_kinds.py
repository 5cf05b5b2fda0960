from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Kind, W


def names(table):
    return {Kind(kind).name for kind, holds in enumerate(table) if holds}


def test_lanes_partition_the_kinds():
    lanes = [
        {"F", "B", "W", "BW"},
        {"SEND_F", "RECV_F", "SEND_B", "RECV_B"},
        {"UNSHARD", "RESHARD", "REDUCE", "HSDP_ALL_REDUCE"},
        {"SEND_STATE", "RECV_STATE", "VALIDATE", "STEP"},
    ]
    tables = (ir.IS_COMPUTE, ir.IS_TRANSFER, ir.IS_BESIDE, ir.IS_VALIDATION)
    assert [names(table) for table in tables] == lanes
    assert set.union(*lanes) == set(Kind.__members__)
    assert names(ir.HAS_MICROBATCH) == lanes[0] | lanes[1]


def test_what_a_kind_does():
    assert [ir.READS_WEIGHTS[kind] for kind in (F, B, W, BW)] == [True, True, False, True]
    assert [ir.WRITES_GRADS[kind] for kind in (F, B, W, BW)] == [False, False, True, True]
    assert {Kind(kind).name for kind, info in ir.KINDS.items() if info.repeated} == {
        "F",
        "SEND_F",
        "RECV_F",
        "UNSHARD",
        "RESHARD",
    }


def test_the_numbers_are_those_of_saved_plans():
    """Rows of plans, profiles and figures on disk hold kinds by number and name."""
    assert tuple(kind.name for kind in Kind) == ir.NAMES
    assert [(kind.name, int(kind)) for kind in (Kind.F, Kind.RECV_B, Kind.REDUCE, Kind.STEP)] == [
        ("F", 0),
        ("RECV_B", 7),
        ("REDUCE", 10),
        ("STEP", 14),
    ]
