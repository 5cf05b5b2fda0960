"""Files of torch.save and torch.distributed.checkpoint, read without torch's unpickler."""

import argparse
import collections
import contextlib
import os
import pickle
import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.interchange.inert_pickle import Inert, plain, read_pickle
from megatron.interchange.megatron_folder import open_torch_dist
from megatron.interchange.megatron_ranks import open_torch
from megatron.interchange.torch_archive import Archive
from tests.harness.stored_values import stored_values


@contextlib.contextmanager
def archive_of(path, value):
    torch.save(value, path)
    with open(path, "rb") as file:
        yield Archive(file.fileno(), path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_tensors_lie_where_the_archive_says(tmp_path, dtype):
    whole = torch.arange(60).view(5, 12).to(dtype)
    values = {"whole": whole, "rows": whole[2:4], "scalar": whole[1, 1], "parameter": torch.nn.Parameter(whole[4:])
              if dtype.is_floating_point else whole[4:]}  # fmt: skip
    if dtype.is_floating_point:
        values["marked parameter"] = torch.nn.Parameter(whole[1:3])
    values["marked"] = whole[3:]
    for name in values.keys() & {"marked", "marked parameter"}:
        values[name].tensor_model_parallel = True  # as Megatron does
    path = tmp_path / "values.pt"
    with archive_of(path, values) as archive:
        for name, value in values.items():
            found = archive.tensor(archive.value[name])
            assert found.shape == tuple(value.shape)
            raw = path.read_bytes()[found.begin : found.begin + value.numel() * value.element_size()]
            assert raw == value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    with (
        archive_of(path, {"t": whole.t()}) as archive,
        pytest.raises(CheckpointError, match="not row-major"),
    ):
        archive.tensor(archive.value["t"])


def test_settings_come_out_as_json(tmp_path):
    args = argparse.Namespace(num_layers=3, names=["a", None], params_dtype=torch.bfloat16, rate=0.5)
    with archive_of(tmp_path / "common.pt", {"args": args}) as archive:
        value = archive.value["args"]
    assert plain(value.state) == {
        "num_layers": 3,
        "names": ["a", None],
        "params_dtype": "torch.bfloat16",
        "rate": 0.5,
    }


class Shell:
    """Runs a command when a real unpickler loads it."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_nothing_in_a_pickle_runs(tmp_path):
    touched = tmp_path / "touched"
    for data in (
        pickle.dumps({"args": Shell(f"touch {touched}")}),
        pickle.dumps([Shell(f"touch {touched}")], protocol=0),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\n__import__\n(S'os'\ntR.",
        b"cmegatron.core..os\nsystem\n(S'ls'\ntR.",
        b"cnumpy.__class__\nx\n.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"",
        b"garbage",
    ):
        with pytest.raises(CheckpointError):
            read_pickle(data, tmp_path / "x")
    assert not touched.exists()
    # What is allowed is an empty class that keeps its arguments.
    made = read_pickle(b"cmegatron.core.enums\nModelType\n(I1\ntR.", tmp_path / "x")
    assert isinstance(made, Inert)
    assert (made.path, made.args) == ("megatron.core.enums.ModelType", (1,))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x80\x02}(" + b")" + b"2\x86" * 60 + b"Nu.", "opcode DUP"),
        # t = (t, t), sixty times over, as a key: hashing it would take 2**60 steps.
        (
            b"\x80\x04}(" + b")\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60)) + b"Nu.",
            "in one another",
        ),
        (b"\x8f()\x85\x90.", "in one another"),  # of a set
        (b"\x8b\x00\x00\x01\x00" + b"\x01" * 65536 + b".", "bits"),
        (b"Pgarbage\n.", "opcode PERSID"),
        (b"\x80\x04ctorch\nSize\n](" + b"N" * 2000 + b"e\x85R.", "2000 values"),
        (b"\x80\x04}(" + b"N" * 2000 + b"tNs.", "a long one"),
        (b"\x80\x04)\x8c\x01x\x93.", "expected str"),
        (b"N(I1\ntb.", "a state of what has none"),
        (b"ctorch\nSize\n(N(I1\nttR.", "makes none"),
    ],
)
def test_pickles_beyond_the_bounds_are_refused(tmp_path, data, why):
    with pytest.raises(CheckpointError, match=why):
        read_pickle(data, tmp_path / "x")


@pytest.mark.parametrize("protocol", range(1, 6))
def test_values_of_every_protocol_are_pythons_own(tmp_path, protocol):
    value = {
        "numbers": [0, 1, -1, 255, 256, 65536, 2**40, -(2**70), 1.5, float("inf")],
        "texts": ["", "a", "\u00e9" * 300, b"", b"b", bytearray(b"c" * 300)][: 3 if protocol < 3 else 6],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), tuple(range(9)), {(0, 1): None}],
        "sets": [set(), {1, 2}, {(1, "a")}] if protocol > 3 else [],
        "ordered": collections.OrderedDict(a=1, b=[True, False, None]),
    }
    value["again"] = value["tuples"]
    read = read_pickle(pickle.dumps(value, protocol), tmp_path / "x")
    if 2 < protocol < 5:
        assert [type(text) for text in read["texts"]] != []  # a bytearray is a call before protocol 5
        del read["texts"], value["texts"]
    assert read == value
    assert read["again"] is read["tuples"]


@pytest.mark.parametrize("trick", ["compressed", "twice", "outside", "truncated", "two roots", "big endian"])
def test_archives_with_tricks_are_refused(tmp_path, trick):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(100.0)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(members)).partition("/")[0]
    kind = zipfile.ZIP_DEFLATED if trick == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in members.items():
            if trick == "big endian" and name.endswith("byteorder"):
                data = b"big"
            archive.writestr("other/x" if trick == "two roots" and name.endswith("version") else name, data)
        if trick == "twice":
            archive.writestr(f"{root}/data.pkl", members[f"{root}/data.pkl"])
    if trick == "truncated":
        path.write_bytes(path.read_bytes()[:-60])
    if trick == "outside":
        data = path.read_bytes()
        size = (400).to_bytes(4, "little")
        path.write_bytes(data.replace(size, (1 << 20).to_bytes(4, "little")))
    with open(path, "rb") as file, pytest.raises(CheckpointError):
        opened(file, path)


def opened(file, path):
    archive = Archive(file.fileno(), path)
    return archive.tensor(archive.value["w"])


# As megatron-core 0.16.1 leaves them (tests/wheels reads its own).
OPTIMIZER = {
    "state": {"common_step": torch.tensor(7.0)},
    "param_groups": [{"wd_mult": 1.0, "lr_mult": 1.0}, {"wd_mult": 0.0, "lr_mult": 1.0}],
}
SCHEDULER = {
    "max_lr": 0.01, "lr_warmup_steps": 8, "num_steps": 56, "lr_decay_style": "cosine", "lr_decay_steps": 80,
    "min_lr": 0.001, "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 80,
}  # fmt: skip


def save_torch_dist(folder, tensors, common):
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    torch.save(common, folder / "common.pt")


def test_torch_dist_by_both_spellings_and_fused_norms(tmp_path):
    """The layer as first dim, or in the name; a norm inside the linear layer behind it."""
    qkv, norm = torch.randn(3, 8, 4), torch.randn(3, 4)
    common = {"args": argparse.Namespace(num_layers=3), "iteration": 7, "optimizer": OPTIMIZER,
              "opt_param_scheduler": SCHEDULER}  # fmt: skip
    homogeneous = {
        "decoder.layers.self_attention.linear_qkv.weight": qkv,
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": norm,
        "decoder.final_layernorm.weight": norm[0],
        "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight": qkv * 2,
    }
    by_layer = {f"decoder.layers.{n}.self_attention.linear_qkv.weight": qkv[n] for n in range(3)}
    by_layer |= {f"decoder.layers.{n}.input_layernorm.weight": norm[n] for n in range(3)}
    by_layer["decoder.final_layernorm.weight"] = norm[0]
    for number, tensors in enumerate((homogeneous, by_layer)):
        folder = tmp_path / str(number)
        save_torch_dist(folder, {name: value.clone() for name, value in tensors.items()}, common)
        source = open_torch_dist(folder)
        assert (source.iteration, source.args) == (7, {"num_layers": 3})
        assert source.tensors.keys() == {"model." + name for name in by_layer}
        stored = stored_values(source)
        for name, value in by_layer.items():
            assert torch.equal(stored["model." + name], value), name
    states = open_torch_dist(tmp_path / "0", optimizer=True)
    stored = stored_values(states)
    for n in range(3):
        name = f"optimizer.exp_avg.decoder.layers.{n}.self_attention.linear_qkv.weight"
        assert torch.equal(stored[name], qkv[n] * 2)
    assert states.state["optimizer"] == {"optimizer": "adam", "num_steps": 7}
    assert states.state["scheduler"]["samples"] == 56
    assert states.state["scheduler"]["schedule"]["warmup_samples"] == 8
    assert states.state["scaler"] == {"scale": 1.0}


def test_torch_dist_refuses_flat_buckets_and_strange_paths(tmp_path):
    flat = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.param": torch.zeros(4)}
    save_torch_dist(tmp_path / "flat", flat | {"decoder.final_layernorm.weight": torch.ones(4)}, {})
    assert list(open_torch_dist(tmp_path / "flat").tensors) == ["model.decoder.final_layernorm.weight"]
    with pytest.raises(CheckpointError, match="flat bucket"):
        open_torch_dist(tmp_path / "flat", optimizer=True)
    metadata = tmp_path / "flat" / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"../../x.dist"))
    with pytest.raises(CheckpointError, match="no plain name"):
        open_torch_dist(tmp_path / "flat")


@pytest.mark.parametrize(("tp", "pp", "chunks"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (4, 2, 2)])
def test_ranks_files_make_whole_tensors(tmp_path, tp, pp, chunks):
    """`mp_rank_*`: cut over tensor parallel ranks, layers numbered from 0 in each stage."""
    layers, hidden, ffn = pp * chunks, 8, 16
    args = argparse.Namespace(swiglu=True)
    whole = {
        "embedding.word_embeddings.weight": torch.randn(16, hidden),
        "output_layer.weight": torch.randn(16, hidden),
    }
    for n in range(layers):
        at = f"decoder.layers.{n}."
        whole |= {
            f"{at}input_layernorm.weight": torch.randn(hidden),
            f"{at}self_attention.linear_qkv.weight": torch.randn(32, hidden),
            f"{at}self_attention.linear_proj.weight": torch.randn(hidden, hidden),
            f"{at}mlp.linear_fc1.weight": torch.randn(2 * ffn, hidden),
            f"{at}mlp.linear_fc2.weight": torch.randn(hidden, ffn),
        }

    def local(name, value, rank):
        if "layernorm" in name:
            return value
        if "linear_fc1" in name:
            return torch.cat([half.chunk(tp)[rank] for half in value.chunk(2)])
        return value.chunk(tp, dim=1 if "proj" in name or "fc2" in name else 0)[rank].contiguous()

    for rank in range(tp):
        for stage in range(pp):
            models = []
            for chunk in range(chunks):
                number = chunk * pp + stage
                held = {"decoder.layers.0." + name.split(".", 3)[3]: local(name, value, rank)
                        for name, value in whole.items() if name.startswith(f"decoder.layers.{number}.")}  # fmt: skip
                ends = {0: "embedding.word_embeddings.weight", layers - 1: "output_layer.weight"}
                held |= {name: local(name, whole[name], rank) for at, name in ends.items() if at == number}
                held["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
                models.append(held)
            if layers == 1:
                models[0]["embedding.word_embeddings.weight"] = local(
                    "x", whole["embedding.word_embeddings.weight"], rank
                )
            keys = ["model"] if chunks == 1 else [f"model{number}" for number in range(chunks)]
            folder = tmp_path / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            folder.mkdir()
            torch.save(
                {"args": args, "iteration": 5, **dict(zip(keys, models, strict=True))},
                folder / "model_optim_rng.pt",
            )
    source = open_torch(tmp_path)
    assert source.tensors.keys() == {"model." + name for name in whole}
    stored = stored_values(source)
    for name, value in whole.items():
        assert torch.equal(stored["model." + name], value), name


SCHEDULE = dict.fromkeys(
    "max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps wd_incr_style "
    "num_steps".split(),
    1,
)  # fmt: skip
EXPERTS, WIDTH = 8, 6


def test_torch_dist_with_an_optimizer_of_experts(tmp_path):
    """Each optimizer has its number in front of names, and in what belongs to both."""
    name = "decoder.final_layernorm.weight"
    values = {"model": torch.randn(4), "moment": torch.randn(4)}
    theirs = {name: values["model"], f"chained_0.optimizer.state.exp_avg.{name}": values["moment"]}
    dcp.save(theirs, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    each = {"optimizer": {"state": {"common_step": 3}, "param_groups": []}}
    common = {"args": argparse.Namespace(), "iteration": 5, "optimizer": {0: each, 1: each}}
    torch.save(common | {"opt_param_scheduler": SCHEDULE}, tmp_path / "common.pt")
    source = open_torch_dist(tmp_path, optimizer=True)
    stored = stored_values(source)
    assert torch.equal(stored[f"model.{name}"], values["model"])
    assert torch.equal(stored[f"optimizer.exp_avg.{name}"], values["moment"])
    assert source.state["optimizer"]["num_steps"] == 3


def whole_experts(layers):
    """Of a model whose second layer has no experts: weights by our names, and moments beside them."""
    weights = {"embedding.word_embeddings.weight": torch.randn(16, 4)}
    for n in range(layers):
        at = f"decoder.layers.{n}."
        weights |= {
            f"{at}input_layernorm.weight": torch.randn(4),
            f"{at}self_attention.linear_proj.weight": torch.randn(4, 4),
        }
        if n == 1:
            weights[f"{at}mlp.linear_fc1.weight"] = torch.randn(2 * WIDTH * 2, 4)
            continue
        weights |= {
            f"{at}mlp.router.weight": torch.randn(EXPERTS, 4),
            f"{at}mlp.experts.linear_fc1.weight": torch.randn(EXPERTS, 2 * WIDTH * 2, 4),
            f"{at}mlp.experts.linear_fc2.weight": torch.randn(EXPERTS, 4, 2 * WIDTH),
        }
    return weights


def held_of(name, value, tp, etp, ep, grouped):
    """(their local name, values) of what a rank has. tp, etp, ep: rank and size."""
    gated = "linear_fc1" in name
    if ".experts." not in name:
        parts = [value]
        if "layernorm" not in name and "router" not in name:
            dim = 1 if "proj" in name else 0
            halves = value.chunk(2) if gated else [value]
            parts = [torch.cat([half.chunk(tp[1], dim)[tp[0]] for half in halves], dim)]
        yield name, parts[0].contiguous()
        return
    each = EXPERTS // ep[1]
    for number in range(each):
        one = value[ep[0] * each + number]
        halves, dim = (one.chunk(2), 0) if gated else ([one], 1)
        part = torch.cat([half.chunk(etp[1], dim)[etp[0]] for half in halves], dim).contiguous()
        module, _, rest = name.partition(".experts.")
        theirs = f"{rest}{number}" if grouped else f"local_experts.{number}.{rest}"
        yield f"{module}.experts.{theirs}", part


def optimizer_of(names, local):
    """State of one, with weights that decay in its first group."""
    decay = [name for name in names if "layernorm" not in name]
    others = [name for name in names if name not in decay]
    states = [
        {kind: local(kind, name) for kind in ("exp_avg", "exp_avg_sq")} | {"step": 3}
        for name in decay + others
    ]
    ids = list(range(len(names)))
    groups = [{"params": ids[: len(decay)], "wd_mult": 1.0}, {"params": ids[len(decay) :], "wd_mult": 0.0}]
    return {"state": dict(enumerate(states)), "param_groups": groups[: 2 if others else 1]}


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    ("tp", "etp", "ep", "pp"), [(1, 1, 2, 1), (1, 1, 4, 2), (2, 2, 2, 1), (2, 1, 4, 2), (4, 2, 4, 1)]
)
def test_files_of_expert_parallel_ranks(tmp_path, tp, etp, ep, pp, grouped):
    """`mp_rank_*_EEE`, with an optimizer of experts; where ETP is below TP not each pair of ranks has a file."""
    layers = 2 * pp
    kinds = {kind: whole_experts(layers) for kind in ("weight", "exp_avg", "exp_avg_sq")}
    args = argparse.Namespace(
        swiglu=True, num_experts=EXPERTS, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        untie_embeddings_and_output_weights=False,
    )  # fmt: skip
    for stage in range(pp):
        for rank in range(max(tp, etp * ep)):
            at = (rank % tp, tp), (rank % etp, etp), (rank // etp % ep, ep)
            state = {}
            for kind, whole in kinds.items():
                for name, value in whole.items():
                    number = int(name.split(".")[2]) if "layers" in name else 0
                    if number // 2 == stage:
                        local = name.replace(f"layers.{number}.", f"layers.{number % 2}.")
                        for theirs, part in held_of(local, value, *at, grouped):
                            state.setdefault(kind, {})[theirs] = part
            of_experts = [name for name in state["weight"] if ".experts." in name]
            dense = [name for name in state["weight"] if name not in of_experts]
            local = lambda kind, name, state=state: state[kind][name]  # noqa: E731
            folder = f"mp_rank_{at[0][0]:02d}" + (f"_{stage:03d}" if pp > 1 else "") + f"_{at[2][0]:03d}"
            (tmp_path / folder).mkdir(exist_ok=True)
            saved = {
                "args": args, "iteration": 5, "model": state["weight"], "opt_param_scheduler": SCHEDULE,
                "optimizer": [optimizer_of(names, local) for names in (dense, of_experts)],
            }  # fmt: skip
            torch.save(saved, tmp_path / folder / "model_optim_rng.pt")
    source = open_torch(tmp_path, optimizer=True)
    stored = stored_values(source)
    prefixes = {"weight": "model.", "exp_avg": "optimizer.exp_avg.", "exp_avg_sq": "optimizer.exp_avg_sq."}
    assert len(stored) == sum(map(len, kinds.values()))
    for kind, whole in kinds.items():
        for name, value in whole.items():
            assert torch.equal(stored[prefixes[kind] + name], value), name
    assert source.state["optimizer"]["num_steps"] == 3
    shutil.rmtree(next(tmp_path.glob(f"*_{ep - 1:03d}")))
    with pytest.raises(CheckpointError, match=r"it is not whole|files of"):
        open_torch(tmp_path)
