"""How tokens come to their experts, and what these make of them back to the tokens.

Three ways, with one face (`Dispatch`), each made for one microbatch of what its tokens have chosen:

- `Gathered`: experts lie as the layer does. All tensor parallel ranks know all tokens' choices; each has a part of
  every expert, and under sequence parallel gathers the tokens.
- `Gathered` over the peers of a grid of experts (`--moe-token-dispatcher-type allgather`): all tokens and choices of
  the peers are gathered; each rank computes the rows of its own experts.
- `Exchanged` (`alltoall`): each token goes to the ranks that have its experts, and nowhere else. Each expert's ranks of
  `etp` have a part of it, so each gets the token; whoever has sent it adds up what comes back, in rank order.

Rows of an expert lie in the order of the ranks that they come from, and of each by its tokens. So an expert computes,
bit for bit, what it would for the tokens of all these ranks in one batch.

[Note: the host waits once] How many rows each rank gets is known where the counts of all peers are: they travel
together, before anything else, and the host waits for them, as it does without peers for its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.core.protocols import Operand
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.expert_ranks import ExpertRanks
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transformer.experts import routing
from megatron.core.transformer.experts.routing import Choices, Routes
from megatron.core.transport import collectives
from megatron.core.transport.gloo_pairs import add_in_rank_order
from megatron.core.transport.pending import Pending


class Dispatch(Protocol):
    """The way of one microbatch's tokens. Rows are those of this rank's experts, ordered by expert.

    weights: what each row counts, or each of the rows that this rank sends: with autograd. ends: where each expert's
    rows end.
    """

    weights: Tensor
    ends: tuple[int, ...]

    def rows(self, x: Tensor) -> Tensor:
        """This rank's tokens [n, h] -> [rows, h]."""

    def rows_and_kept(self, x: Tensor, keeps_gathered: bool) -> tuple[Tensor, Tensor]:
        """`rows`, and what is kept for `rows_again`."""

    def rows_again(self, kept: Tensor) -> Tensor | Operand:
        """[rows, h], for a weight gradient."""

    def start_sums(self, rows: Tensor) -> Callable[[], Tensor]:
        """[rows, h] -> begins to add up each token's; what returns them, [n, h]."""

    def start_grads(self, rows: Tensor) -> Callable[[Tensor, torch.Size], tuple[Tensor, Tensor]]:
        """Gradients [rows, h] -> begins to bring them to where the experts' input came from; what, given the gradients
        of the rows' weights and a shape for those of tokens, returns the gradients of both inputs."""

    def row_weights(self, weights: Tensor) -> Tensor:
        """`weights` -> [rows]."""

    def weight_grads(self, grads: Tensor) -> Tensor:
        """Gradients of the rows' weights, of which each rank of `etp` has a part -> those of `weights`."""


class Gathered:
    """`Dispatch` by tokens that every rank of `ranks` has. sums_weights: each of them has a part of every row's
    weight's gradient. Communicates over `ranks`."""

    def __init__(self, routes: Routes, ranks: TensorParallel, *, sums_weights: bool) -> None:
        self.tokens, self.weights, self.ends, self._by_token, self._begins = routes
        self._ranks, self._sums_weights = ranks, sums_weights

    def rows(self, x: Tensor) -> Tensor:
        return mappings.gather_sequence(x, self._ranks).index_select(0, self.tokens)

    def rows_and_kept(self, x: Tensor, keeps_gathered: bool) -> tuple[Tensor, Tensor]:
        whole = mappings.gather_sequence(x, self._ranks)
        return whole.index_select(0, self.tokens), whole if keeps_gathered else x

    def rows_again(self, kept: Tensor) -> _Rows:
        in_parts = len(kept) < len(self._begins)
        return _Rows(mappings.SequenceShard(kept, self._ranks) if in_parts else kept, self.tokens)

    def start_sums(self, rows: Tensor) -> Callable[[], Tensor]:
        sums = F.embedding_bag(self._by_token, rows, self._begins, mode="sum")
        total, pending = mappings.start_sum(sums, self._ranks)

        def finish() -> Tensor:
            if pending is not None:
                pending.wait()
            return total

        return finish

    def start_grads(self, rows: Tensor) -> Callable[[Tensor, torch.Size], tuple[Tensor, Tensor]]:
        return _grads_of(self, rows)

    def row_weights(self, weights: Tensor) -> Tensor:
        return weights

    def weight_grads(self, grads: Tensor) -> Tensor:
        return mappings.sum_ranks(grads, TensorParallel(self._ranks.group)) if self._sums_weights else grads


class Exchanged:
    """`Dispatch` by exchanges: own: the routes of this rank's tokens to all experts; by_rank: tokens of each expert, by
    the rank that has them. Communicates over the peers."""

    def __init__(self, own: Routes, by_rank: list[list[int]], ranks: ExpertRanks) -> None:
        self.weights, self._own, self._ranks = own.weights, own, ranks
        mine, parts, device = ranks.own(len(own.ends)), ranks.etp.size, own.tokens.device
        starts = (0, *own.ends)
        firsts = range(0, len(own.ends), len(mine))  # of each rank of `ep`
        segments = [(starts[first], starts[first + len(mine)]) for first in firsts]
        self._sent = [end - start for start, end in segments for _ in range(parts)]
        counts = [rows[mine.start : mine.stop] for rows in by_rank]
        # Rows of any rank for any other.
        self._most = max(sum(rows[first : first + len(mine)]) for rows in by_rank for first in firsts)
        self._received = [sum(one) for one in counts]
        self.ends = tuple(itertools.accumulate(map(sum, zip(*counts, strict=True))))
        # Where each row comes from: of what is sent, the own rows, where some go to several ranks; of what arrives by
        # (rank, expert), by (expert, rank).
        self._out = None
        if parts > 1:
            self._out = _places([segment for segment in segments for _ in range(parts)], device)
        flat = [0, *itertools.accumulate(itertools.chain(*counts))]
        blocks = [
            (flat[rank * len(mine) + expert], flat[rank * len(mine) + expert + 1])
            for expert in range(len(mine))
            for rank in range(len(counts))
        ]
        self._by_expert = _places(blocks, device)
        self._by_rank = torch.empty_like(self._by_expert)
        self._by_rank[self._by_expert] = torch.arange(len(self._by_expert), device=device)

    def rows(self, x: Tensor) -> Tensor:
        return self._to_experts(x.index_select(0, self._own.tokens))

    def rows_and_kept(self, x: Tensor, keeps_gathered: bool) -> tuple[Tensor, Tensor]:
        return (rows := self.rows(x)), rows

    def rows_again(self, kept: Tensor) -> Tensor:
        return kept

    def start_sums(self, rows: Tensor) -> Callable[[], Tensor]:
        finish = self._start_back(rows)

        def sums() -> Tensor:
            return F.embedding_bag(self._own.by_token, finish(), self._own.begins, mode="sum")

        return sums

    def start_grads(self, rows: Tensor) -> Callable[[Tensor, torch.Size], tuple[Tensor, Tensor]]:
        return _grads_of(self, rows)

    def row_weights(self, weights: Tensor) -> Tensor:
        return self._to_experts(weights)

    def weight_grads(self, grads: Tensor) -> Tensor:
        return self._start_back(grads)()

    def start(self, x: Tensor, weights: Tensor) -> tuple[Begun, Tensor, Tensor]:
        """This rank's tokens [n, h], and `weights`, on their way; what they arrive in."""
        arrived, pending = self._start_out(x.index_select(0, self._own.tokens))
        of_rows, of_weights = self._start_out(weights)
        return Begun(self, (pending, of_weights)), arrived, of_rows

    def by_expert(self, arrived: Tensor) -> Tensor:
        """Rows by the rank that they came from -> by expert."""
        return arrived.index_select(0, self._by_expert)

    def _to_experts(self, own: Tensor) -> Tensor:
        """[own rows, ...] -> [rows, ...]."""
        arrived, pending = self._start_out(own)
        pending.wait()
        return self.by_expert(arrived)

    def _start_out(self, own: Tensor) -> tuple[Tensor, Pending]:
        """[own rows, ...] -> begins to send them; what they arrive in, by rank."""
        sent = own if self._out is None else own.index_select(0, self._out)
        arrived = own.new_empty(sum(self._received), *own.shape[1:])
        counts, peers = (self._received, self._sent), self._ranks.peers
        return arrived, collectives.all_to_all(arrived, sent, *counts, peers, most=self._most, async_op=True)

    def _start_back(self, rows: Tensor) -> Callable[[], Tensor]:
        """[rows, ...] -> begins to send them back; what returns [own rows, ...], added up over `etp`."""
        back = rows.new_empty(sum(self._sent), *rows.shape[1:])
        ordered = rows.index_select(0, self._by_rank)
        peers, parts, counts = self._ranks.peers, self._ranks.etp.size, (self._sent, self._received)
        pending = collectives.all_to_all(back, ordered, *counts, peers, most=self._most, async_op=True)

        def finish() -> Tensor:
            pending.wait()
            if parts == 1:
                return back
            pieces = back.split(self._sent)
            own = rows.new_empty(sum(self._sent[::parts]), *rows.shape[1:])
            for first, segment in enumerate(own.split(self._sent[::parts])):
                add_in_rank_order(
                    [piece.view(-1) for piece in pieces[first * parts : (first + 1) * parts]],
                    segment.view(-1),
                )
            return own

        return finish


class Begun:
    """`Dispatch` of what was sent before: what stands for this rank's tokens, and for `weights`, is what they arrive
    in. The way of their gradients back is begun too where the experts' backward is through with them, and waited for by
    whoever has sent the tokens (`grads`). It keeps no tensor whose graph keeps it.

    pending: of tokens and of weights. differentiated: somebody wants their gradients.
    """

    def __init__(self, way: Exchanged, pending: tuple[Pending, Pending]) -> None:
        self._way, self._pending, self.ends, self.differentiated = way, list(pending), way.ends, True
        self.weights, self.rows, self.rows_again = way.weights, way.rows, way.rows_again
        self.start_sums, self.weight_grads = way.start_sums, way.weight_grads
        self._sums: Callable[[], Tensor] | None = None

    def rows_and_kept(self, x: Tensor, keeps_gathered: bool) -> tuple[Tensor, Tensor]:
        return (rows := self.row_weights(x)), rows

    def row_weights(self, weights: Tensor) -> Tensor:
        self._pending.pop(0).wait()
        return self._way.by_expert(weights)

    def start_grads(self, rows: Tensor) -> Callable[[Tensor, torch.Size], tuple[Tensor, Tensor]]:
        if self.differentiated:
            self._sums = self.start_sums(rows)
        return lambda of_weights, _: (rows, of_weights)

    def grads(self, of_weights: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Of the tokens and of what their rows count, once they are back."""
        assert self._sums is not None, "gradients of tokens before the experts' backward"
        sums, self._sums = self._sums, None
        return sums().view(shape), self.weight_grads(of_weights)


def _grads_of(
    way: Gathered | Exchanged, rows: Tensor
) -> Callable[[Tensor, torch.Size], tuple[Tensor, Tensor]]:
    sums = way.start_sums(rows)
    return lambda of_weights, shape: (sums().view(shape), way.weight_grads(of_weights))


def dispatched(choices: Choices, tp: TensorParallel, ranks: ExpertRanks | None) -> Dispatch:
    """The way of a microbatch whose tokens are on the ranks of tp, under sequence parallel each with its part of them.
    Communicates over the peers of a grid of experts."""
    if ranks is None:
        return Gathered(_routes(choices), tp, sums_weights=True)
    peers = ranks.peers
    num_experts = len(choices.of_experts)
    experts, weights, kept, _, even_rows = own_choices = _own_choices(choices, tp)
    if ranks.gathers:
        flat = experts if kept is None else experts.masked_fill(~kept, num_experts)
        everyone = TensorParallel(peers, sequence_parallel=True)
        weights = mappings.moved(weights, everyone, mappings.gathered, mappings.own_part_of_sum, 0)
        own, flat = ranks.own(num_experts), mappings.gather_sequence(flat, everyone)
        here = (flat >= own.start) & (flat < own.stop)
        of_own = routing.tokens_by_expert(flat - own.start, here, len(own))
        rows = even_rows * peers.size // ranks.ep_size
        return Gathered(
            _routes(Choices(flat - own.start, weights, here, of_own, rows)), everyone, sums_weights=False
        )
    if experts.is_meta:
        by_rank = [routing.balanced_counts(even_rows, num_experts)] * peers.size
    else:
        mine = own_choices.of_experts
        every = mine.new_empty(peers.size * num_experts)
        collectives.all_gather(every, mine, peers)
        by_rank = every.view(peers.size, num_experts).tolist()  # sync: see [Note: the host waits once]
    return Exchanged(routing.routes_of(experts, weights, kept, by_rank[peers.rank]), by_rank, ranks)


def _routes(choices: Choices) -> Routes:
    """To all experts that are counted."""
    experts, weights, kept, of_experts, even_rows = choices
    if experts.is_meta:
        return routing.routes_of(experts, weights, None, routing.balanced_counts(even_rows, len(of_experts)))
    counts = of_experts.tolist()  # sync: how many rows each product has
    return routing.routes_of(experts, weights, kept, counts)


def _own_choices(choices: Choices, tp: TensorParallel) -> Choices:
    """Of this rank's tokens."""
    if not tp.sequence_parallel:
        return choices
    count = len(choices.experts) // tp.size
    part = slice(tp.rank * count, (tp.rank + 1) * count)
    experts, weights = choices.experts[part], choices.weights[part]
    kept = None if choices.kept is None else choices.kept[part]
    counts = routing.tokens_by_expert(experts, kept, len(choices.of_experts))
    return Choices(experts, weights, kept, counts, choices.even_rows // tp.size)


class _Rows:
    """An `Operand`: the experts' input, made again of the tokens' when it is wanted."""

    def __init__(self, x: Tensor | mappings.SequenceShard, tokens: Tensor) -> None:
        # What waits for W keeps nothing of the graph.
        self._x, self._tokens = x.detach() if isinstance(x, Tensor) else x, tokens

    def start(self) -> None:
        if not isinstance(self._x, Tensor):
            self._x.start()

    def whole(self) -> Tensor:
        x = self._x if isinstance(self._x, Tensor) else self._x.whole()
        return x.index_select(0, self._tokens)


def _places(blocks: list[tuple[int, int]], device: torch.device) -> Tensor:
    """The numbers of all blocks [start, end), one block behind the other."""
    if device.type == "meta":
        rows = sum(end - start for start, end in blocks)
        return torch.empty(rows, dtype=torch.int64, device=device)
    return torch.from_numpy(np.concatenate([np.arange(*block) for block in blocks])).to(device)
