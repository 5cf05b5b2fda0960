"""Our storage against the safetensors library and torch's own checkpoint entry points."""

import json
import struct

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing.catalog import choose
from megatron.core.dist_checkpointing.dcp_reader import SafeStorageReader
from megatron.core.dist_checkpointing.pieces import TORCH_DTYPES
from megatron.core.dist_checkpointing.safetensors_format import (
    ITEM_BYTES,
    StoredTensor,
    build_header,
    header_length,
)
from megatron.core.dist_checkpointing.saving import save
from megatron.core.dist_checkpointing.state import LocalPiece
from tests.harness.pieces import whole_tensors


def every_dtype():
    out = {}
    for name, dtype in TORCH_DTYPES.items():
        values = torch.arange(6).view(2, 3)
        out[name.lower()] = values.to(dtype)
    return out | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "transposed": torch.rand(3, 2).t()}


def test_any_safetensors_reader_opens_a_shard(tmp_path):
    tensors = every_dtype()
    directory = save(tmp_path, 1, whole_tensors(tensors), {}, {})
    read = safetensors.torch.load_file(directory / "shard_00000.safetensors")
    boxes = {"scalar": "[]", "empty": "[0:0,0:3]", "transposed": "[0:2,0:3]"}
    assert set(read) == {name + boxes.get(name, "[0:2,0:3]") for name in tensors}
    for key, value in read.items():
        mine = tensors[key.partition("[")[0]]
        assert value.dtype == mine.dtype
        assert (
            value.contiguous().view(-1).view(torch.uint8).equal(mine.contiguous().view(-1).view(torch.uint8))
        )


def test_every_tensor_is_aligned_to_its_element():
    entries = [
        StoredTensor("a", "U8", (3,)),
        StoredTensor("b", "F64", (1,)),
        StoredTensor("c", "BF16", (5,)),
        StoredTensor("d", "F32", ()),
    ]
    ordered = sorted(entries, key=lambda entry: entry.rank)
    header, (*begins, end) = build_header(ordered)
    assert end == len(header) + 8 + 4 + 10 + 3
    assert len(header) % 8 == 0
    assert [entry.key for entry in ordered] == ["b", "d", "c", "a"]
    assert all(begin % ITEM_BYTES[entry.dtype] == 0 for entry, begin in zip(ordered, begins, strict=True))
    assert json.loads(header[8:])["c"] == {"dtype": "BF16", "shape": [5], "data_offsets": [12, 22]}


def test_a_header_length_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="expected at most 92"):
        header_length(struct.pack("<Q", 1 << 40), file_bytes=100)


def test_torchs_own_load_reads_through_our_reader(tmp_path):
    """DCP's default planner, stock entry point: our manifest and files are a complete DCP storage."""
    whole = torch.arange(35.0).view(5, 7)
    rows = [LocalPiece("w", (5, 7), (0, 0), whole[:2]), LocalPiece("w", (5, 7), (2, 0), whole[2:])]
    directory = save(tmp_path, 3, [*rows, *whole_tensors({"s": torch.tensor(4)})], {}, {})
    state = {"w": torch.zeros(5, 7), "s": torch.tensor(0)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=SafeStorageReader(directory), no_dist=True)
    assert torch.equal(state["w"], whole)
    assert state["s"] == 4


def test_no_pickle_and_nothing_else_in_a_checkpoint(tmp_path):
    directory = save(tmp_path, 1, whole_tensors({"w": torch.zeros(2)}), {"config": {}}, {})
    assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", "shard_00000.safetensors"]
    assert choose(tmp_path).found.manifest.torch_version == torch.__version__
    for path in directory.iterdir():
        assert path.stat().st_mode & 0o007 == 0, f"{path} is open to everybody"


def test_a_rank_without_tensors_writes_no_file(tmp_path):
    directory = save(tmp_path, 1, [], {"note": "nothing"}, {})
    assert [path.name for path in directory.iterdir()] == ["manifest.json"]
    assert choose(tmp_path).found.manifest.common == {"note": "nothing"}
