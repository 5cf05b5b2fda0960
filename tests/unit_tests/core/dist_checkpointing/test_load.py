"""Nothing damaged, forged or foreign is ever applied: the corruption matrix."""

import hashlib
import json
import os
import resource
import shutil
import stat
import struct
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.loading import find, load_pieces
from megatron.core.dist_checkpointing.manifest import parse_manifest, sign
from megatron.core.dist_checkpointing.saving import save
from tests.harness.pieces import FlatShard, flat_shards, whole_tensors
from tests.harness.ranks import rank_outcomes, run_ranks

SHAPES = {"model.a": (40, 50), "model.b": (16,), "optimizer.a.exp_avg": (40, 50)}
SHARDS = ("shard_00000.safetensors", "shard_00001.safetensors")
NEWEST = "iter_0000008"


def save_two(ctx, root):
    """Iterations 4 and 8 on two ranks, each tensor cut in halves of its flat elements."""
    for iteration in (4, 8):
        shards = []
        for name, shape in SHAPES.items():
            whole = torch.arange(float(torch.Size(shape).numel())) * iteration + 1
            half = whole.numel() // 2
            start, end = (0, half) if ctx.rank == 0 else (half, whole.numel())
            shards.append(FlatShard(name, shape, start, end, whole[start:end]))
        save(root, iteration, flat_shards(shards), {"config": {"hidden_size": 50}}, {}, ctx.ps)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    run_ranks(save_two, 2, root)
    return root


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def targets():
    return {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}


def load_all(root, ps=None, **kwargs):
    """Load every tensor; a refusal must have touched none of them."""
    tensors = targets()
    try:
        found = find(root, ps, **kwargs).found
        load_pieces(found, whole_tensors(tensors), ps)
    except CheckpointError:
        assert all(tensor.eq(-1).all() for tensor in tensors.values()), "refused, but values were applied"
        raise
    assert torch.equal(tensors["model.b"], torch.arange(16.0) * found.iteration + 1)
    return found


def refusal(root, **kwargs):
    with pytest.raises(CheckpointError) as error:
        load_all(root, **kwargs)
    return str(error.value)


def test_the_undamaged_checkpoint_loads(copy):
    assert load_all(copy).iteration == 8
    assert load_all(copy, ckpt_step=4).iteration == 4


@st.composite
def damages(draw):
    """A file and what happens to its bytes."""
    name = draw(st.sampled_from((*SHARDS, "manifest.json")))
    kind = draw(st.sampled_from(["flip", "truncate", "zero page", "append", "delete", "empty"]))
    return name, kind, draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 7))


def damage(path, kind, place, bit):
    """Do it; False when the bytes stayed as they were."""
    data = bytearray(path.read_bytes())
    position = int(place * len(data))
    before = bytes(data)
    if kind == "flip":
        data[position] ^= 1 << bit
    elif kind == "truncate":
        del data[position:]
    elif kind == "zero page":
        page = position // 4096 * 4096
        data[page : page + 4096] = bytes(len(data[page : page + 4096]))
    elif kind == "append":
        data += bytes([bit])
    elif kind == "empty":
        data.clear()
    path.unlink()
    if kind != "delete":
        path.write_bytes(data)
    return kind == "delete" or bytes(data) != before


def check_damage(saved, directory, case):
    """One damage to a fresh copy: refused, naming the file, nothing applied."""
    copy = Path(shutil.copytree(saved, directory / "copy"))
    try:
        name, kind, place, bit = case
        if not damage(copy / NEWEST / name, kind, place, bit):
            return
        if name == "manifest.json" and kind == "append" and bytes([bit]).isspace():
            return  # trailing blanks mean nothing in JSON
        message = refusal(copy)
        assert f"{NEWEST}/{name}" in message, message
        if kind in ("truncate", "append", "empty") and name in SHARDS:
            assert "bytes, expected" in message
        elif kind in ("flip", "zero page") and name in SHARDS:
            assert "SHA-256 is" in message
            assert ", expected" in message
        assert "--ckpt-step 4" in message or "SHA-256" in message
        assert load_all(copy, ckpt_step=4).iteration == 4
    finally:
        shutil.rmtree(copy)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=damages())
def test_damage_is_refused_naming_the_file(saved, tmp_path, case):
    check_damage(saved, tmp_path, case)


@pytest.mark.full
@pytest.mark.timeout(1200)
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=damages())
def test_damage_is_refused_naming_the_file_full(saved, tmp_path, case):
    check_damage(saved, tmp_path, case)


def test_every_bit_flip_of_a_small_manifest_is_refused_or_means_the_same(tmp_path):
    directory = save(tmp_path, 1, whole_tensors({"w": torch.ones(2)}), {"lr": 0.5}, {})
    raw = (directory / "manifest.json").read_bytes()
    good = parse_manifest(raw, Path("m"))
    for position in range(0, len(raw), 3):
        changed = bytearray(raw)
        changed[position] ^= 1 << (position % 8)
        try:
            assert parse_manifest(bytes(changed), Path("m")) == good
        except CheckpointError as error:
            assert str(error).startswith("m: ")  # noqa: PT017 - either is right


def test_swapped_shards(copy):
    first, second = (copy / NEWEST / name for name in SHARDS)
    first.rename(copy / "x")
    second.rename(first)
    (copy / "x").rename(second)
    assert SHARDS[0] in refusal(copy)


def test_a_shard_of_another_step(copy):
    shutil.copy(copy / "iter_0000004" / SHARDS[1], copy / NEWEST / SHARDS[1])
    message = refusal(copy)
    assert f"{NEWEST}/{SHARDS[1]}: SHA-256 is" in message


def test_the_whole_directory_of_another_step(copy):
    shutil.rmtree(copy / NEWEST)
    shutil.copytree(copy / "iter_0000004", copy / NEWEST)
    assert "field 'iteration': expected 8" in refusal(copy)


def test_a_file_that_is_not_listed(copy):
    (copy / NEWEST / "extra.pt").write_bytes(b"x")
    assert f"{NEWEST}/extra.pt: not listed in manifest.json" in refusal(copy)
    (copy / NEWEST / "extra.pt").rename(copy / NEWEST / ".nfs0001")
    assert load_all(copy).iteration == 8


def test_damage_on_several_ranks_is_refused_by_all(copy):
    damage(copy / NEWEST / SHARDS[1], "flip", 0.5, 3)

    def load_on_ranks(ctx):
        return refusal(copy, ps=ctx.ps)

    messages = run_ranks(load_on_ranks, 2)
    assert messages[0] == messages[1]
    assert f"{NEWEST}/{SHARDS[1]}: SHA-256 is" in messages[0]


def test_ranks_that_see_different_folders(copy, tmp_path):
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    shutil.rmtree(other / NEWEST)
    save(other, 8, whole_tensors({"model.b": torch.zeros(16)}), {}, {})

    def load_on_ranks(ctx):
        return refusal(copy if ctx.rank == 0 else other, ps=ctx.ps)

    (first, second) = run_ranks(load_on_ranks, 2)
    assert first == second
    assert "rank 1: " in first
    assert "one folder that all ranks see" in first


# Forged manifests: correctly signed, so that the digest does not help.


def forge(root, change):
    path = root / NEWEST / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["digest"]
    change(fields)
    path.write_bytes(sign(fields))


def chunk_of(fields, index=0):
    return fields["tensors"]["model.a"]["chunks"][index]


FORGERIES = {
    "dtype": (lambda f: f["tensors"]["model.b"].update(dtype="F64"), "expected dtype F32, found F64"),
    "dtype of the same width": (lambda f: f["tensors"]["model.b"].update(dtype="I32"), "model.b"),
    "unknown dtype": (lambda f: f["tensors"]["model.b"].update(dtype="O"), "model.b.dtype"),
    "shape": (lambda f: f["tensors"]["model.b"].update(shape=[17]), "model.b.chunks"),
    "negative shape": (lambda f: f["tensors"]["model.b"].update(shape=[-16]), "model.b.shape"),
    "transposed shape": (lambda f: f["tensors"]["model.a"].update(shape=[50, 40]), "model.a"),
    "overflowing shape": (lambda f: f["tensors"]["model.b"].update(shape=[1 << 40] * 8), "model.b.shape"),
    "hundred dims": (lambda f: f["tensors"]["model.b"].update(shape=[1] * 100), "at most 16 dims"),
    "float in shape": (lambda f: f["tensors"]["model.b"].update(shape=[16.0]), "model.b.shape[0]"),
    "bool as iteration": (lambda f: f.update(iteration=True), "iteration"),
    "begin beyond the file": (lambda f: chunk_of(f).update(begin=1 << 30), "chunks[0].begin"),
    "begin inside the header": (lambda f: chunk_of(f).update(begin=8), SHARDS[0]),
    "begin moved": (lambda f: chunk_of(f).update(begin=chunk_of(f)["begin"] + 4), SHARDS[0]),
    "another chunk's key": (lambda f: chunk_of(f).update(key="model.b[0:8]"), SHARDS[0]),
    "chunks overlap": (lambda f: chunk_of(f, 1).update(offset=[0, 0]), "overlap"),
    "chunk missing": (lambda f: f["tensors"]["model.a"]["chunks"].pop(), "model.a.chunks"),
    "chunk in no file": (lambda f: chunk_of(f).update(file="shard_00009.safetensors"), "chunks[0].file"),
    "unknown field": (lambda f: f.update(extra=1), "unknown ['extra']"),
    "missing field": (lambda f: f.pop("topology"), "missing ['topology']"),
    "another format": (lambda f: f.update(format="zip"), "format"),
    "a later version": (lambda f: f.update(format_version=2), "version 1"),
    "per_rank too short": (lambda f: f["per_rank"].pop(), "per_rank"),
    "file too short": (lambda f: f["files"][SHARDS[0]].update(bytes=0), "bytes"),
    "digest no digest": (lambda f: f["files"][SHARDS[0]].update(sha256="x"), "sha256"),
    "common no object": (lambda f: f.update(common=[]), "common"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_manifests_are_refused(copy, name):
    change, field = FORGERIES[name]
    forge(copy, change)
    message = refusal(copy)
    assert NEWEST in message
    assert field in message


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[]", "expected a JSON object"),
        (b"\xff\xfe{}", "not UTF-8 at byte 0"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 100_000, "too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"null", "expected a JSON object"),
    ],
)
def test_manifests_that_are_no_manifest(copy, raw, what):
    (copy / NEWEST / "manifest.json").write_bytes(raw)
    message = refusal(copy)
    assert f"{NEWEST}/manifest.json" in message
    assert what in message


# S2: nothing outside the directory is read.

PATHS = [
    "../iter_0000004/shard_00000.safetensors",
    "/etc/passwd",
    "..",
    "a/b.safetensors",
    "",
    ".safetensors",
    "shard\n.safetensors",
    "shard_00000.safetensors\x00",
    "C:\\x.safetensors",
]


@pytest.mark.parametrize("name", PATHS)
def test_file_names_cannot_leave_the_directory(copy, name):
    def change(fields):
        fields["files"][name] = fields["files"].pop(SHARDS[0])
        for tensor in fields["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk["file"] = name if chunk["file"] == SHARDS[0] else chunk["file"]

    forge(copy, change)
    assert "a plain file name" in refusal(copy)


@pytest.mark.parametrize("name", [*SHARDS, "manifest.json"])
@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "directory", "device link"])
def test_only_regular_files_are_opened(copy, name, kind):
    path = copy / NEWEST / name
    original = path.rename(copy / "original")
    if kind == "symlink":
        path.symlink_to(original)
    elif kind == "dangling":
        path.symlink_to(copy / "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    message = refusal(copy)
    assert f"{NEWEST}/{name}" in message


def test_a_directory_that_is_a_link_is_refused(copy):
    (copy / NEWEST).rename(copy / "elsewhere")
    (copy / NEWEST).symlink_to(copy / "elsewhere")
    assert "links are refused" in refusal(copy)


def test_an_unreadable_file_is_told(copy, monkeypatch):
    real = os.preadv

    def failing(fd, buffers, offset):
        if stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_size > 5000:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    message = refusal(copy)
    assert f"{NEWEST}/{SHARDS[0]}: cannot be read: Input/output error" in message


# S3: small files that mean large work.


def many_tensors():
    tensor = {"dtype": "F32", "shape": [0], "chunks": []}
    return (
        b'{"tensors":{'
        + b",".join(b'"%d":%s' % (i, json.dumps(tensor).encode()) for i in range(10**6))
        + b"}}"
    )


BOMBS = {
    "a million tensors": many_tensors,
    "one list of 60 MB": lambda: b"[" + b"0," * (30 << 20) + b"0]",
    "a sparse file of 1 TiB": None,
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.grid) if n == "a million tensors" else n for n in BOMBS]
)
def test_bombs_are_refused_without_work(copy, name):
    path = copy / NEWEST / "manifest.json"
    if BOMBS[name] is None:
        os.truncate(path, 1 << 40)
    else:
        path.write_bytes(BOMBS[name]())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = refusal(copy)
    assert "bytes, expected at most" in message
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 100 << 20, f"{grown} bytes"


@pytest.mark.grid
def test_the_largest_manifest_that_is_parsed_costs_little(copy):
    """8 MB of whatever JSON: refused, within the bounds of the fault matrix (200 MB)."""
    raw = b"[" + b"[]," * ((8 << 20) // 3 - 10) + b"[]]"
    (copy / NEWEST / "manifest.json").write_bytes(raw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "expected a JSON object" in refusal(copy)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 200 << 20, f"{grown} bytes"


def test_a_shard_header_of_a_terabyte(copy):
    path = copy / NEWEST / SHARDS[0]
    data = struct.pack("<Q", 1 << 40) + path.read_bytes()[8:]
    path.write_bytes(data)
    forge(copy, lambda f: f["files"][SHARDS[0]].update(sha256=hashlib.sha256(data).hexdigest()))
    message = refusal(copy)
    assert f"{NEWEST}/{SHARDS[0]}: header length is {1 << 40}" in message


@pytest.mark.grid
def test_refusing_takes_no_time(copy):
    """All refusals above run in well under a second; this one bounds the worst kind with room for a slow machine."""
    chunk = {"begin": 400, "file": SHARDS[0], "key": "k", "offset": [0], "shape": [1]}
    forge(
        copy,
        lambda f: f["tensors"].update(
            {"model.b": {"dtype": "F32", "shape": [50000], "chunks": [chunk] * 50000}}
        ),
    )
    started = time.process_time()
    assert "overlap" in refusal(copy)
    assert time.process_time() - started < 10


# Names, shapes, dtypes of this run.


def test_tensors_this_run_lacks(copy):
    found = find(copy).found
    with pytest.raises(CheckpointError, match=r"does not have: model\.b"):
        load_pieces(found, whole_tensors({"model.a": torch.zeros(40, 50)}), prefixes=("model.",))
    load_pieces(
        found,
        whole_tensors({k: v for k, v in targets().items() if k.startswith("model")}),
        prefixes=("model.",),
    )


def test_tensors_the_checkpoint_lacks(copy):
    tensors = targets() | {f"model.extra{i}": torch.zeros(1) for i in range(12)}
    with pytest.raises(CheckpointError, match=r"manifest\.json: .*missing: .*model\.extra0.* and 4 more"):
        load_pieces(find(copy).found, whole_tensors(tensors))
    assert all(tensors[name].eq(-1).all() for name in SHAPES)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.zeros(15), r"expected shape \(15,\), found \(16,\)"),
        (torch.zeros(16, dtype=torch.bfloat16), "expected dtype BF16, found F32"),
    ],
)
def test_another_shape_or_dtype(copy, tensor, what):
    with pytest.raises(CheckpointError, match=r"manifest\.json: tensor model\.b: " + what):
        load_pieces(find(copy).found, whole_tensors(targets() | {"model.b": tensor}))


def test_one_ranks_missing_tensor_stops_all(copy):
    def load_on_ranks(ctx):
        tensors = targets() | ({"model.new": torch.zeros(1)} if ctx.rank == 1 else {})
        load_pieces(find(copy, ctx.ps).found, whole_tensors(tensors), ctx.ps)

    outcomes = rank_outcomes(load_on_ranks, 2)
    for outcome in outcomes:
        assert "rank 1: " in outcome.error
        assert "model.new" in outcome.error


def test_weights_of_another_precision_load_only_where_conversion_is_asked_for(tmp_path):
    weight = torch.tensor([1.0, 1.0 + 2**-12, -3.0])
    save(tmp_path, 1, whole_tensors({"model.w": weight}), {}, {})
    found = find(tmp_path).found
    target = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="expected dtype BF16, found F32"):
        load_pieces(found, whole_tensors({"model.w": target}))
    assert not target.any()
    load_pieces(found, whole_tensors({"model.w": target}), convert=True)
    assert target.tolist() == [1.0, 1.0, -3.0]
    with pytest.raises(CheckpointError, match="expected dtype I64, found F32"):
        load_pieces(found, whole_tensors({"model.w": torch.zeros(3, dtype=torch.int64)}), convert=True)
