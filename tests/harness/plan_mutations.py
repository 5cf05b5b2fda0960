"""Plans with one thing wrong: an operation dropped, doubled or moved, microbatches or units mistaken for others."""

import dataclasses

from megatron.core.pipeline_parallel.plan.ir import (
    IS_BESIDE,
    IS_COMPUTE,
    IS_TRANSFER,
    REDUCE,
    UNSHARD,
    op_text,
)

KINDS = (
    "dropped",
    "doubled",
    "early",
    "swapped microbatches",
    "wrong unit",
    "missing gather",
    "early reduction",
    "lost message",
)


def mutated(plan, kind, rng):
    """(what was done, the plan with it), or None where the plan has nothing of the kind. rng: `random.Random`."""
    rank = rng.randrange(len(plan.rows))
    row = list(plan.rows[rank])
    found = _MUTATIONS[kind](row, rng)
    if found is None or tuple(row) == plan.rows[rank]:
        return None
    rows = (*plan.rows[:rank], tuple(row), *plan.rows[rank + 1 :])
    return f"{kind}: rank {rank}, {found}", dataclasses.replace(plan, rows=rows)


def _places(row, wanted):
    return [place for place, op in enumerate(row) if wanted(op)]


def _of_some_kind(row, rng):
    """A place: each kind of operation is as likely, however many there are of it."""
    kind = rng.choice(sorted({op[0] for op in row}))
    return rng.choice(_places(row, lambda op: op[0] == kind))


def _dropped(row, rng):
    return op_text(row.pop(_of_some_kind(row, rng)))


def _doubled(row, rng):
    place = _of_some_kind(row, rng)
    row.insert(rng.randrange(place + 1, len(row) + 1), row[place])
    return op_text(row[place])


def _early(row, rng):
    """Ahead of one to eight computations more than it was."""
    return _ahead(row, rng, _of_some_kind(row, rng))


def _ahead(row, rng, place):
    computed = _places(row[:place], lambda op: IS_COMPUTE[op[0]])
    if not computed:
        return None
    target = computed[-rng.randint(1, min(8, len(computed)))]
    op = row.pop(place)
    row.insert(target, op)
    return f"{op_text(op)} from {place} to {target}"


def _swapped(row, rng):
    place = rng.choice(_places(row, lambda op: IS_COMPUTE[op[0]]))
    others = _places(row, lambda op: op[:2] == row[place][:2] and op[4:6] == row[place][4:6])
    other = rng.choice(others)
    texts = f"{op_text(row[place])} and {op_text(row[other])}"
    row[place], row[other] = row[other], row[place]
    return texts


def _wrong_unit(row, rng):
    places = _places(row, lambda op: IS_BESIDE[op[0]])
    if not places:
        return None
    place = rng.choice(places)
    units = sorted({op[4] for op in row if op[1] == row[place][1] and op[4] >= 0 and IS_BESIDE[op[0]]})
    unit = rng.choice(units)
    text = op_text(row[place])
    row[place] = (*row[place][:4], unit, unit + 1, *row[place][6:])
    return f"{text} of unit {unit}"


def _missing_gather(row, rng):
    places = _places(row, lambda op: op[0] == UNSHARD)
    return op_text(row.pop(rng.choice(places))) if places else None


def _early_reduction(row, rng):
    places = _places(row, lambda op: op[0] == REDUCE)
    return _ahead(row, rng, rng.choice(places)) if places else None


def _lost_message(row, rng):
    places = _places(row, lambda op: IS_TRANSFER[op[0]])
    return op_text(row.pop(rng.choice(places))) if places else None


_MUTATIONS = dict(
    zip(
        KINDS,
        (
            _dropped,
            _doubled,
            _early,
            _swapped,
            _wrong_unit,
            _missing_gather,
            _early_reduction,
            _lost_message,
        ),
        strict=True,
    )
)
