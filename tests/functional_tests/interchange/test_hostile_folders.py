"""Folders that somebody has made to harm: each is refused with a reason, nothing in it runs, and nothing is left."""

import argparse
import json
import os
import pickle
import shutil
import struct
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.harness.hugging_face import saved_toy
from tools.checkpoint import main

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of each kind that is in order."""
    root = tmp_path_factory.mktemp("whole")
    saved_toy("llama2", root / "single")
    saved_toy("llama2", root / "sharded", max_shard_size="20KB")
    saved_toy("llama3.2", root / "tied")
    tensors = {
        "decoder.final_layernorm.weight": torch.ones(4),
        "embedding.word_embeddings.weight": torch.ones(8, 4),
    }
    sizes = {"num_layers": 0, "hidden_size": 4, "num_attention_heads": 1, "max_position_embeddings": 8}
    saved = {"args": argparse.Namespace(**sizes), "iteration": 1}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(root / "dist"), no_dist=True)
    torch.save(saved, root / "dist" / "common.pt")
    (root / "ranks" / "mp_rank_00").mkdir(parents=True)
    torch.save({**saved, "model": tensors}, root / "ranks" / "mp_rank_00" / "model_optim_rng.pt")
    return root


class Shell:
    """Runs a command where a real unpickler loads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def edit_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_header(path, change, length=None):
    """change: what becomes of the header, a dict, in place."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", length or len(text)) + text + data[8 + size :])


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def replace_member(path, ending, content=None, *, kind=zipfile.ZIP_STORED, twice=False):
    """Write a zip archive again, with other content in the members of that ending."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in members.items():
            archive.writestr(name, content if content is not None and name.endswith(ending) else data)
        if twice:
            with pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr(name, data)


def lying_pickle(folder, canary):
    """Tensors of the sizes that config.json says, in a format that runs what it says."""
    (folder / SINGLE).unlink()
    torch.save({"x": Shell(canary)}, folder / "pytorch_model.bin")


def with_code(folder, canary):
    (folder / "modeling_x.py").write_text(f"import os; os.system('touch {canary}')")
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.Other"})


def moved_tensor(entries, name="model.norm.weight", **fields):
    entries[name] |= fields


def untied(path):
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)


def into_pipe(path):
    path.unlink()
    os.mkfifo(path)


def overlapping(header):
    names = [name for name in header if name != "__metadata__"]
    alike = [n for n in names if header[n]["shape"] == header[names[0]]["shape"]]
    header[alike[1]]["data_offsets"] = header[alike[0]]["data_offsets"]


def doubled(path):
    shutil.copy(path, path.with_name("copy.safetensors"))
    edit_index(path.parent, lambda weights: weights.update({"more": "copy.safetensors"}))


# By name: which folder, what becomes of it, what is said of it.
HF = {
    "traversal": ("sharded", lambda d: edit_index(d, lambda w: w.update(x="../" + SINGLE)), "no plain name"),
    "absolute path": ("sharded", lambda d: edit_index(d, lambda w: w.update({"x": "/etc/passwd"})), "no plain name"),
    "a pickle in the index": ("sharded", lambda d: edit_index(d, lambda w: w.update({"x": "a.bin"})), "no plain name"),
    "index of nothing": ("sharded", lambda d: edit_index(d, lambda w: w.clear()), "'weight_map'"),
    "missing shard": ("sharded", lambda d: next(iter(d.glob("model-*"))).unlink(), "missing"),
    "a tensor twice": ("sharded", lambda d: doubled(next(iter(d.glob("model-*")))), "is in"),
    "a pipe": ("single", lambda d: into_pipe(d / SINGLE), "not a regular file"),
    "a folder": ("single", lambda d: ((d / SINGLE).unlink(), (d / SINGLE).mkdir()), "not a regular file"),
    "header of 2^40": ("single", lambda d: edit_header(d / SINGLE, lambda h: None, 1 << 40), "header length is"),
    "header of garbage": ("single", lambda d: (d / SINGLE).write_bytes(b"\4" + bytes(7) + b"{{{{"), SINGLE),
    "header nested deeply": (
        "single",
        lambda d: (d / SINGLE).write_bytes(struct.pack("<Q", 10**5) + b"[" * 10**5),
        SINGLE,
    ),
    "overlapping offsets": ("single", lambda d: edit_header(d / SINGLE, overlapping), "begins at byte"),
    "offsets beyond the file": (
        "single",
        lambda d: edit_header(d / SINGLE, lambda h: moved_tensor(h, data_offsets=[1 << 50, (1 << 50) + 128])),
        "begins at byte",
    ),
    "sizes of 2^60": (
        "single",
        lambda d: edit_header(d / SINGLE, lambda h: moved_tensor(h, shape=[1 << 60, 1 << 60])),
        "expected a list of sizes",
    ),
    "unknown dtype": ("single", lambda d: edit_header(d / SINGLE, lambda h: moved_tensor(h, dtype="O")), "dtype 'O'"),
    "cut file": ("single", lambda d: os.truncate(d / SINGLE, 9000), SINGLE),
    "wrong shapes": ("single", lambda d: edit_json(d / "config.json", intermediate_size=57), "expected (57, 32)"),
    "fewer layers": ("single", lambda d: edit_json(d / "config.json", num_hidden_layers=1), "has no place"),
    "a billion layers": ("single", lambda d: edit_json(d / "config.json", num_hidden_layers=10**9), "heads of"),
    "a billion heads": (
        "single",
        lambda d: edit_json(d / "config.json", num_attention_heads=10**9, num_key_value_heads=10**9),
        "config.json",
    ),
    "no numbers": ("single", lambda d: edit_json(d / "config.json", hidden_size={"a": 1}), "hidden_size"),
    "config of another kind": ("single", lambda d: (d / "config.json").write_text("[1]"), "expected a JSON object"),
    "config nested deeply": ("single", lambda d: (d / "config.json").write_text("[" * 10**5), "not JSON"),
    "config without end": ("single", lambda d: os.truncate(d / "config.json", 1 << 32), "at most"),
    "an unknown field": ("single", lambda d: edit_json(d / "config.json", custom_norm=True), "custom_norm: not known"),
    "an unknown architecture": ("single", lambda d: edit_json(d / "config.json", model_type="x" * 999), "not known"),
    "a tied layer that differs": ("tied", lambda d: untied(d / SINGLE), "differs from model.embed_tokens.weight"),
    "tokenizer without end": ("single", lambda d: open_end(d / "tokenizer.json"), "at most"),
}  # fmt: skip


def open_end(path):
    path.touch()
    os.truncate(path, 1 << 40)


def refused(source, folder, tmp_path, capsys, message):
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    assert main(["import", source, str(folder), "--save", str(tmp_path / "ours")]) == 3
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", HF)
def test_hugging_face_folders(name, whole, tmp_path, capsys):
    kind, harm, message = HF[name]
    shutil.copytree(whole / kind, tmp_path / "theirs")
    harm(tmp_path / "theirs")
    refused("--hf", tmp_path / "theirs", tmp_path, capsys, message)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lying_pickle, "save_pretrained(folder, safe_serialization=True)"),
        (with_code, "none is run here"),
    ],
)
def test_what_would_run_does_not(harm, message, whole, tmp_path, capsys):
    shutil.copytree(whole / "single", tmp_path / "theirs")
    harm(tmp_path / "theirs", tmp_path / "canary")
    refused("--hf", tmp_path / "theirs", tmp_path, capsys, message)
    assert not (tmp_path / "canary").exists()


def metadata_that_calls(folder, canary):
    (folder / ".metadata").write_bytes(pickle.dumps(Shell(canary)))


def common_that_calls(folder, canary):
    replace_member(folder / "common.pt", "data.pkl", pickle.dumps({"args": Shell(canary)}, protocol=2))


def outside(folder, canary):
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../../x.dist"))


def nested_settings(folder, canary):
    value = [1]
    for _ in range(40):
        value = [value, value]  # 2^40 values once they are written out
    replace_member(
        folder / "common.pt", "data.pkl", pickle.dumps({"args": argparse.Namespace(x=value)}, protocol=2)
    )


def nested_keys(folder, canary):
    """A key in so many tuples that hashing it would go beyond the usual stack."""
    (folder / ".metadata").write_bytes(b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.")


def doubled_keys(folder, canary):
    """t = (t, t) forty times over, as a key: hashing it would take 2**40 steps."""
    twice = b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(40))
    (folder / ".metadata").write_bytes(b"\x80\x04}()\x94" + twice + b"K\x01u.")


DIST = {
    "metadata that calls a shell": (metadata_that_calls, "which is not read"),
    "settings that call a shell": (common_that_calls, "which is not read"),
    "a path outside": (outside, "no plain name"),
    "a compressed archive": (
        lambda d, c: replace_member(d / "common.pt", "", kind=zipfile.ZIP_DEFLATED),
        "compressed or encrypted",
    ),
    "a member twice": (lambda d, c: replace_member(d / "common.pt", "", twice=True), "members"),
    "no archive": (lambda d, c: (d / "common.pt").write_bytes(b"PK"), "no archive of torch.save"),
    "a cut part": (lambda d, c: os.truncate(d / "__0_0.distcp", 700), "__0_0.distcp"),
    "a part that is a link": (
        lambda d, c: ((d / "__0_0.distcp").rename(d / "x"), (d / "__0_0.distcp").symlink_to("x")),
        "__0_0.distcp",
    ),
    "settings without end": (nested_settings, "values"),
    "keys doubled over and over": (doubled_keys, "a key of containers in one another"),
    "keys nested deeply": (nested_keys, "a key of containers in one another"),
    "metadata of a terabyte": (lambda d, c: os.truncate(d / ".metadata", 1 << 40), "at most"),
    "no metadata": (lambda d, c: (d / ".metadata").write_bytes(b""), "not a pickle that is read here"),
}


@pytest.mark.parametrize("name", DIST)
def test_torch_dist_folders(name, whole, tmp_path, capsys):
    harm, message = DIST[name]
    shutil.copytree(whole / "dist", tmp_path / "theirs")
    harm(tmp_path / "theirs", tmp_path / "canary")
    refused("--megatron", tmp_path / "theirs", tmp_path, capsys, message)


def weights_that_call(path, canary):
    torch.save({"model": {"x": Shell(canary)}}, path)


def missing_rank(path, canary):
    path.parent.rename(path.parents[1] / "mp_rank_03")


RANKS = {
    "weights that call a shell": (weights_that_call, "which is not read"),
    "a missing rank": (missing_rank, "expected those of 4 tensor x 1 pipeline"),
    "a storage cut short": (lambda p, c: replace_member(p, "/data/0", b"\0"), "in a storage of 1 bytes"),
    "an older file": (lambda p, c: p.write_bytes(pickle.dumps({"model": 1})), "no archive of torch.save"),
}


@pytest.mark.parametrize("name", RANKS)
def test_folders_of_ranks(name, whole, tmp_path, capsys):
    harm, message = RANKS[name]
    shutil.copytree(whole / "ranks", tmp_path / "theirs")
    harm(tmp_path / "theirs" / "mp_rank_00" / "model_optim_rng.pt", tmp_path / "canary")
    refused("--megatron", tmp_path / "theirs", tmp_path, capsys, message)


def test_published_folders_that_name_transformers_own_class_are_read(whole, tmp_path):
    """Phi-3's config.json has `auto_map` with the names of the classes that transformers has itself."""
    saved_toy("phi3", tmp_path / "theirs")
    names = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    edit_json(tmp_path / "theirs" / "config.json", auto_map=names)
    assert main(["import", "--hf", str(tmp_path / "theirs"), "--save", str(tmp_path / "ours")]) == 0
    assert main(["export", "--load", str(tmp_path / "ours"), "--hf", str(tmp_path / "back")]) == 0
    assert "auto_map" not in json.loads((tmp_path / "back" / "config.json").read_text())
