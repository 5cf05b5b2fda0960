"""What is built passes; any change that alters a sample's tokens does not."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import index_builders
from megatron.core.datasets.held_arrays import layout_bytes
from megatron.core.datasets.index_builders import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    index_fault,
    index_layouts,
    plan_epochs,
)


def built(lengths, length, requested, extra_token, seed=1):
    sequences = range(1, len(lengths))
    tokens = int(lengths[1:].sum())
    plan = plan_epochs(tokens, length, requested, extra_token=extra_token, drop_last_partial=False)
    rng = np.random.RandomState(seed)
    documents = build_document_index(sequences, plan, rng)
    arrays = {
        "document_index": documents,
        "sample_index": np.concatenate(list(build_sample_index(lengths, documents, plan))),
        "shuffle_index": build_shuffle_index(plan, rng),
    }
    return sequences, plan, arrays


def stretches(lengths, documents, rows, x):
    """The (document, offset) of every token of each sample, by walking the stream."""
    stream = [(int(d), k) for d in documents for k in range(lengths[d])]
    starts = np.concatenate([[0], np.cumsum(lengths[documents])])
    begins = [int(starts[p]) + int(o) for p, o in rows]
    return [stream[a : b + x] for a, b in itertools.pairwise(begins)]


CASES = st.tuples(
    st.lists(st.integers(0, 9), min_size=2, max_size=12),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 40)),
    st.booleans(),
    st.sampled_from([1, 2, 5, 1 << 22]),
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(CASES, st.data())
def test_a_change_is_refused_or_changes_no_sample(case, data):
    lengths, length, requested, extra_token, block = case
    lengths = np.array([*lengths, 3], dtype=np.int32)
    sequences, plan, arrays = built(lengths, length, requested, extra_token)
    layouts = index_layouts(lengths, sequences, plan)
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == layouts
    assert sum(map(layout_bytes, layouts.values())) == sum(array.nbytes for array in arrays.values())

    def fault():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(index_builders, "DOCUMENTS_PER_BLOCK", block)
            patch.setattr(index_builders, "_ROWS_AT_A_TIME", block)
            return index_fault(arrays, lengths, sequences, plan)

    assert fault() is None
    rows = arrays["sample_index"]
    right = stretches(lengths, arrays["document_index"], rows, int(extra_token))
    place = (data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, 1)))
    rows[place] = data.draw(st.integers(-2, 15))
    if fault() is None:
        assert stretches(lengths, arrays["document_index"], rows, int(extra_token)) == right


def test_no_samples_at_all():
    lengths = np.array([3, 2, 2], dtype=np.int32)
    sequences, plan, arrays = built(lengths, 50, None, True)
    arrays["shuffle_index"] = arrays["shuffle_index"][:0]
    plan = plan_epochs(4, 50, None)
    (arrays["sample_index"],) = build_sample_index(lengths, arrays["document_index"], plan)
    assert index_fault(arrays, lengths, sequences, plan) is None
