"""zbpp_light's reader of plans: files that this project writes, and hostile ones."""

import hashlib
import json
import random
import subprocess
import sys

import pytest
from zbpp_light import plan_file, schedules

from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, NAMES
from megatron.core.pipeline_parallel.plan.text import from_json
from tools import show_schedule


def saved(capsys, name, stages=3, microbatches=5, *words):
    """What `show_schedule --format plan` prints."""
    flags = [
        "--schedule",
        name,
        "--stages",
        str(stages),
        "--microbatches",
        str(microbatches),
        "--format",
        "plan",
        *words,
    ]
    assert show_schedule.main(flags) == 0
    return capsys.readouterr().out


def rehashed(content):
    """With the hash of what it has now: only the other checks are left."""
    placement = {"kind": content["placement"], "ranks": content["ranks"], "chunks": content["chunks"]}
    hashed = {"version": content["version"], "placement": placement, "ops": content["ops"]}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "hash": hashlib.sha256(text.encode()).hexdigest()})


@pytest.mark.parametrize("words", [(), ("--memory-limit", "4"), ("--time-b", "1.4", "--time-w", "0.6")])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p"])
def test_reads_what_show_schedule_writes(capsys, tmp_path, name, words):
    if words[:1] == ("--memory-limit",) and name in ("zb-h2",):
        words = ()
    text = saved(capsys, name, 3, 5, *words)
    path = tmp_path / "plan.json"
    path.write_text(text)
    read = plan_file.read(path)
    own = from_json(text)
    assert read.rows == tuple(
        tuple((NAMES[op[0]], op[2]) for op in row if IS_COMPUTE[op[0]]) for row in own.rows
    )
    assert (read.schedule, read.microbatches, read.ignored, read.path) == (name, 5, 0, str(path))
    assert read.problems(3, 5) == []
    assert read.problems(2, 8) == [
        f"{path} is a plan for 3 stages, this run has 2",
        f"{path} is a plan for 5 microbatches a step, this run has 8",
    ]


def test_gathers_are_counted_and_left_out(capsys):
    content = json.loads(saved(capsys, "zb-h1", 2, 3))
    for stage, row in enumerate(content["ops"]):
        row.insert(0, f"{stage}UNSHARD[0:2]")
        row += [f"{stage}REDUCE[0:2]", f"{stage}RESHARD[0:2]"]
    read = plan_file.parse(rehashed(content), "plan")
    assert read.rows == schedules.make(2, 3)
    assert read.ignored == 6


@pytest.mark.parametrize("name", ["zbv", "v-half", "interleaved", "dualpipe-v", "1f1b-v"])
def test_chunks_are_refused_by_name(capsys, name):
    with pytest.raises(
        ValueError, match=rf"{name} has 2 chunks on each rank, placed as .* one stage a rank, on a line"
    ):
        plan_file.parse(saved(capsys, name, 2, 4), "plan")


def test_a_change_is_seen_by_the_hash(capsys):
    content = json.loads(saved(capsys, "zb-h1"))
    row = content["ops"][2]
    at = row.index("2W0")
    row[at], row[at + 1] = row[at + 1], row[at]
    with pytest.raises(ValueError, match=r"its hash is [0-9a-f]{64}, not '[0-9a-f]{64}': it was changed"):
        plan_file.parse(json.dumps(content), "plan")


def swapped(row, one, other):
    first, second = row.index(one), row.index(other)
    row[first], row[second] = other, one


CHANGES = {
    "an operation twice": (
        lambda c: c["ops"][0].append("0W4"),
        r"W of microbatches \[0, 1, 2, 3, 4, 4\]: each of 5 stands once",
    ),
    "one is missing": (lambda c: c["ops"][0].remove("0W4"), r"W of microbatches \[0, 1, 2, 3\]: each of 5"),
    "W before its B": (lambda c: swapped(c["ops"][0], "0B1", "0W1"), "0: W1 would wait for ever"),
    "Ws out of order": (lambda c: swapped(c["ops"][0], "0W3", "0W4"), r"W of microbatches \[0, 1, 2, 4, 3\]"),
    "a receive is missing": (
        lambda c: c["ops"][1].remove(next(t for t in c["ops"][1] if "RECV_F0" in t)),
        "not in pairs",
    ),
    "a message to itself": (lambda c: c["ops"][0].__setitem__(1, "0SEND_F0@0#0"), "not in pairs"),
    "a message past the end": (
        lambda c: c["ops"][2].insert(9, "2SEND_F0@3#900"),
        r"not in pairs: \('F', 2, 3, 0, 900\)",
    ),
    "one pair id for two": (lambda c: c["ops"][0].__setitem__(1, "0SEND_F0@1#1"), "not in pairs"),
    "a send twice": (lambda c: c["ops"][0].insert(2, "0SEND_F0@1#77"), "not in pairs"),
    "a message twice": (
        lambda c: (c["ops"][0].insert(2, "0SEND_F0@1#77"), c["ops"][1].insert(0, "1RECV_F0@0#77")),
        "once, between neighbours",
    ),
    "a message without pair id": (
        lambda c: c["ops"][0].__setitem__(1, "0SEND_F0@1"),
        "no operation of stage 0, whole",
    ),
    "a computation with peer": (
        lambda c: c["ops"][0].__setitem__(0, "0F0@1"),
        "no operation of stage 0, whole",
    ),
    "another stage's": (lambda c: c["ops"][0].__setitem__(0, "1F0"), "no operation of stage 0, whole"),
    "a slice": (lambda c: c["ops"][0].__setitem__(0, "0F0.1"), "no operation of stage 0, whole"),
    "units": (lambda c: c["ops"][0].__setitem__(0, "0F0[0:1]"), "no operation of stage 0, whole"),
    "validated steps": (lambda c: c["ops"][0].append("0STEP"), "validated afterwards"),
    "overlapped": (lambda c: c["ops"][0].__setitem__(0, "(0F0;0BW1)"), "no operation"),
    "no text": (lambda c: c["ops"][0].__setitem__(0, 7), "one list of texts a rank"),
    "ops no list": (lambda c: c.__setitem__("ops", {}), "one list of texts a rank"),
    "a rank is missing": (lambda c: c["ops"].pop(), "operations of 2 ranks, its header says 3"),
    "microbatches": (
        lambda c: c.__setitem__("microbatches", 10**18),
        "each of 1000000000000000000 stands once",
    ),
    "microbatches true": (lambda c: c.__setitem__("microbatches", True), "microbatches is a number"),
    "ranks 0": (lambda c: c.__setitem__("ranks", 0), "ranks is a number"),
    "a newer version": (lambda c: c.__setitem__("version", 2), "version 2"),
    "an evaluation": (lambda c: c.__setitem__("forward_only", True), "plan of an evaluation"),
    "a name that is none": (lambda c: c.__setitem__("schedule", "\x1b[31m" * 99), "schedule is a name"),
    "a field more": (lambda c: c.__setitem__("__proto__", 1), "this is no plan"),
    "a field less": (lambda c: c.pop("chunks"), "this is no plan"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_hostile_plans(capsys, change):
    content = json.loads(saved(capsys, "zb-h1"))
    edit, words = CHANGES[change]
    edit(content)
    text = rehashed(content) if "chunks" in content else json.dumps(content)
    with pytest.raises(ValueError, match=words):
        plan_file.parse(text, "plan")


def test_deadlocks_are_refused(capsys):
    content = json.loads(saved(capsys, "1f1b", 2, 4))
    for row in content["ops"]:
        row[:] = [text for text in row if "_" not in text]
    assert plan_file.parse(rehashed(content), "plan").rows[1][0] == ("F", 0)  # messages may be left out
    content["ops"][1] = ["1F0", "1F1", "1F2", "1BW0", "1F3", "1BW1", "1BW2", "1BW3"]
    with pytest.raises(ValueError, match="would wait for ever"):
        plan_file.parse(rehashed(content), "plan")


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '"plan"', "{}", "[" * 200_000, '{"ops": NaN}'])
def test_json_that_is_no_plan(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json: this is no plan"):
        plan_file.read(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        plan_file.read(tmp_path / "none.json")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        plan_file.read(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"bytes\.json: .*decode"):
        plan_file.read(tmp_path / "bytes.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(plan_file.MAX_BYTES + 1)
    with pytest.raises(ValueError, match="more than 16 MiB"):
        plan_file.read(tmp_path / "large.json")


def test_no_change_of_a_byte_raises_anything_else(capsys):
    """A thousand files with a few bytes changed: each is refused with a ValueError, or says the same as before."""
    text = saved(capsys, "zb-1p", 2, 3)
    whole = plan_file.parse(text, "plan")
    source = random.Random(0)
    for _ in range(1000):
        letters = list(text)
        for _ in range(source.randint(1, 3)):
            letters[source.randrange(len(letters))] = source.choice('0129{}[]",:#@.-eFBWSR \x00é')
        try:
            read = plan_file.parse("".join(letters), "plan")
        except ValueError:
            continue
        assert read.rows == whole.rows


def test_pure_parts_need_neither_torch_nor_megatron():
    """Each pure module by its file, in a process that finds no torch and no megatron."""
    folder = str(plan_file.__file__).rpartition("/zbpp_light/")[0]
    code = (
        "import sys, types; sys.modules['torch'] = sys.modules['megatron'] = None;"
        "package = types.ModuleType('zbpp_light');"
        f"package.__path__ = [{folder + '/zbpp_light'!r}]; sys.modules['zbpp_light'] = package;"
        "import zbpp_light.schedules, zbpp_light.plan_file, zbpp_light.signatures"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
