"""The prose of docs/data.md on sample order a second time: plain lists and loops, and nothing of ours."""

import math
import re
import struct

import numpy as np

CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def read_corpus(prefix):
    """Sequences as lists of ints, read field by field."""
    with open(prefix + ".idx", "rb") as file:
        idx = file.read()
    with open(prefix + ".bin", "rb") as file:
        data = file.read()
    assert idx[:9] == bytes.fromhex("4D 4D 49 44 49 44 58 00 00")
    assert struct.unpack_from("<Q", idx, 9)[0] == 1
    dtype = np.dtype(CODES[idx[17]])
    count = struct.unpack_from("<Q", idx, 18)[0]
    boundaries = struct.unpack_from("<Q", idx, 26)[0]
    assert len(idx) == 34 + 12 * count + 8 * boundaries
    lengths = struct.unpack_from(f"<{count}i", idx, 34)
    pointers = struct.unpack_from(f"<{count}q", idx, 34 + 4 * count)
    return [
        [int(v) for v in np.frombuffer(data, dtype, n, at)] if n else []
        for n, at in zip(lengths, pointers, strict=True)
    ]


def split_ranges(split, count):
    """[start, stop) of train, valid, test in sequences; None for a zero weight."""
    weights = [float(word) for word in re.findall(r"[0-9.]+", split)]
    while len(weights) < 3:
        weights.append(0.0)
    total = weights[0] + weights[1] + weights[2]
    bounds, running = [0.0], 0.0
    for weight in weights:
        running = running + weight / total
        bounds.append(running)
    return [
        None if weights[i] == 0 else (round(bounds[i] * count), round(bounds[i + 1] * count))
        for i in range(3)
    ]


def gpt_order(sequences, ids, length, x, requested, seed, keep_partial):
    """Samples in the order they are read, each a list of (sequence, offset) of its tokens."""
    tokens = sum(len(sequences[i]) for i in ids)
    epochs = 1
    if requested is not None:
        while epochs * tokens < requested * length + x:
            epochs += 1
    apart, before = False, 0
    if requested is not None and epochs > 1:
        before = ((epochs - 1) * tokens - x) // length
        apart = requested - before < int(0.80 * ((tokens - x) // length))
    rng = np.random.RandomState(seed)
    if apart:
        documents = list(ids) * (epochs - 1)
        documents = shuffled(rng, documents, np.int32) + shuffled(rng, list(ids), np.int32)
    else:
        documents = shuffled(rng, list(ids) * epochs, np.int32)
    stream = [(document, offset) for document in documents for offset in range(len(sequences[document]))]
    if keep_partial:
        count = int(np.ceil(np.float32(epochs * tokens - x) / np.float32(length)))
    else:
        count = (epochs * tokens - x) // length
    samples = [stream[k * length : k * length + length + x] for k in range(count)]
    if apart:
        order = shuffled(rng, list(range(before)), np.uint32)
        order += shuffled(rng, list(range(before, count)), np.uint32)
    else:
        order = shuffled(rng, list(range(count)), np.uint32)
    return [samples[k] for k in order]


def shuffled(rng, values, dtype):
    array = np.array(values, dtype=dtype)
    rng.shuffle(array)
    return [int(v) for v in array]


def gpt_item(sequences, places, length, x, pad, eod, reset_positions, reset_attention, eod_mask):
    """tokens, labels, loss mask, position ids, attention mask (list of rows), documents."""
    text = [sequences[s][o] for s, o in places]
    text += [pad] * (length + x - len(text))
    tokens = text[:length]
    labels = text[1 : length + 1] if x else text[1:] + [pad]
    mask, positions, starts, start = [], [], [], 0
    for i in range(length):
        starts.append(start)
        positions.append(i - start if reset_positions else i)
        mask.append(0.0 if eod_mask and tokens[i] == eod else 1.0)
        if tokens[i] == eod:
            start = i + 1
    attention = [
        [not (j <= i and (not reset_attention or j >= starts[i])) for j in range(length)]
        for i in range(length)
    ]
    for i in range(length):
        if labels[i] == pad:
            labels[i], mask[i] = 0, 0.0
        if tokens[i] == pad:
            tokens[i] = 0
    documents = []
    previous = None
    for s, o in places:
        if previous is None or s != previous[0] or o != previous[1] + 1:
            documents.append(s)
        previous = (s, o)
    return tokens, labels, mask, positions, attention, documents


def blend_order(weights, size):
    """(member, its sample) for each turn."""
    taken = [0] * len(weights)
    turns = []
    for i in range(size):
        best, best_error = 0, None
        for j, weight in enumerate(weights):
            error = weight * float(max(i, 1)) - float(taken[j])
            if best_error is None or error > best_error:
                best, best_error = j, error
        turns.append((best, taken[best]))
        taken[best] += 1
    return turns


def exhaustive_order(sizes):
    total = sum(sizes)
    taken = [0] * len(sizes)
    turns = []
    for i in range(total):
        racing = [j for j in range(len(sizes)) if taken[j] < sizes[j]]
        best = max(racing, key=lambda j: (sizes[j] / total * float(max(i, 1)) - float(taken[j]), -j))
        turns.append((best, taken[best]))
        taken[best] += 1
    return turns


def normalized(weights):
    total = float(np.sum(np.array(weights, dtype=np.float64)))
    return [weight / total for weight in weights]


def weighted_requests(weights, size, surplus=0.005):
    """Samples asked of each member, and the size of the blend."""
    turns = [math.ceil(size * weight) for weight in normalized(weights)]
    return [math.ceil(t * (1 + surplus)) for t in turns], sum(turns)
