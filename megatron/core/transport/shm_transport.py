"""All-gathers, reduce-scatters and exchanges of ranks of one host, through memory that all of them see.

Every rank has two slots, used in turns, and two counters: the operations that it has put into its slots, and those
that it has taken from all slots. A rank puts operation n once all others have taken n - 2, and takes it once all have
put n. Starting an operation never blocks: what cannot be put yet is put by a later call, and `wait` advances every
operation until its own is done. Any number may be under way; two of them advance without a wait.

A rank uses at most NUM_BYTES a group; pages that no operation has touched are not allocated (`shared_memory`).

[Note: several groups] Where hooks decide, ranks may wait for two groups in different orders. So a wait on one transport
also advances the others of its parallel state: a peer may need data that this rank has not put there yet.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.transport import collectives
from megatron.core.transport.gloo_pairs import Pairs, add_in_rank_order
from megatron.core.transport.shared_memory import (
    COUNTER_BYTES,
    TOKEN,
    Late,
    Memory,
    Waiter,
    counters,
    map_file,
    new_file,
    new_token,
    wake,
)

if TYPE_CHECKING:
    from megatron.core.transport.parallel_state import Group

SLOT_BYTES = 16 << 20  # bounds memory alone: at every size messages take more CPU time
NUM_BYTES = COUNTER_BYTES + 2 * SLOT_BYTES
# Places of counters. Marks: the size and kind of what a slot holds. Asleep: whether this rank waits to be woken.
_PUT, _TAKEN, _MARKS, _ASLEEP = 0, 8, 16, TOKEN + 8
_ALIGNMENT = 64
_SMALL = 1 << 20  # bytes
# A waiting rank polls for _SPIN_S, since peers are mostly ready; then it sleeps until the first that is late has
# written, and not longer than _LONGEST_S, as others may want what it has not put yet.
_SPIN_S, _LONGEST_S = 1e-4, 1e-3


class ShmTransport:
    """memory: NUM_BYTES of each rank of the group, in its order. processes: their numbers. together: the transports of
    this parallel state; this one joins them."""

    def __init__(
        self, group: Group, memory: list[Memory], processes: list[int], together: list[ShmTransport]
    ) -> None:
        self._rank = group.rank
        everybody = [
            (rank, counters(its), ctypes.addressof(its))
            for rank, its in zip(group.ranks, memory, strict=True)
        ]
        _, self._own, self._address = everybody.pop(group.rank)
        self._whose = everybody  # of the peers: rank, counters, their address
        self._peers = [peer for _, peer, _ in everybody]
        self._waiter = Waiter(
            self._own,
            _ASLEEP,
            dict(zip(group.ranks, processes, strict=True)),
            group.timeout.total_seconds(),
            spin_s=_SPIN_S,
            longest_s=_LONGEST_S,
        )
        slots = [torch.frombuffer(its, dtype=torch.uint8, offset=COUNTER_BYTES) for its in memory]
        self._slots = list(zip(*(its.split(SLOT_BYTES) for its in slots), strict=True))
        self._to_put: collections.deque[Operation] = collections.deque()
        self._to_take: collections.deque[Operation] = collections.deque()
        self._num_put = self._num_taken = 0
        self._together = together
        together.append(self)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether they go into one slot."""
        return _places(tensors)[-1] <= SLOT_BYTES

    def has_room(self, most_bytes: int) -> bool:
        """Whether every rank can send each other one so much."""
        return _aligned(most_bytes) * len(self._peers) <= SLOT_BYTES

    def all_gather(self, pairs: Pairs) -> Callable[[], Operation]:
        """What starts it, as often as it is called: of each (output [size, n], input [n]), every rank's input into its
        row; an input may be that row. The inputs fit."""
        *places, end = _places([input for _, input in pairs])
        me, laid = self._rank, list(zip(pairs, places, strict=True))
        puts = [
            [(_piece(slots[me], place, input), input) for (_, input), place in laid] for slots in self._slots
        ]
        takes = [
            [
                (output[rank], input if rank == me else _piece(slot, place, input))
                for (output, input), place in laid
                for rank, slot in enumerate(slots)
                if rank != me or output[me].data_ptr() != input.data_ptr()
            ]
            for slots in self._slots
        ]
        return functools.partial(self._start, puts, takes, _copy, 2 * end)

    def reduce_scatter(self, parts: Pairs, accumulate: bool) -> Callable[[], Operation]:
        """What starts it, as often as it is called: of each (shard [n], full [size, n]), the sum over ranks, in their
        order, of this rank's row replaces the shard, or is added to it. All rows but one fit."""
        *places, end = _places([full[1:] for _, full in parts])
        me, laid = self._rank, list(zip(parts, places, strict=True))

        def put_in(slot: Tensor) -> Pairs:
            rows = [(_piece(slot, place, full[1:]), full) for (_, full), place in laid]
            both = [[(sent[:me], full[:me]), (sent[me:], full[me + 1 :])] for sent, full in rows]
            return [one for halves in both for one in halves if one[0].numel()]

        def in_order(slots: Sequence[Tensor], full: Tensor, place: int) -> list[Tensor]:
            return [
                full[me] if rank == me else _piece(slot, place, full[1:])[me - (me > rank)]
                for rank, slot in enumerate(slots)
            ]

        puts = [put_in(slots[me]) for slots in self._slots]
        takes = [
            [(in_order(slots, full, place), shard) for (shard, full), place in laid] for slots in self._slots
        ]
        add = functools.partial(add_in_rank_order, accumulate=accumulate)
        return functools.partial(self._start, puts, takes, add, 2 * end + 1)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], most_bytes: int) -> Operation:
        """Starts it: inputs[r] to rank r, what rank r sends here into outputs[r]. most_bytes: that any rank sends to
        another, the same number on all of them, so that each knows where its part begins in every slot."""
        me, room = self._rank, _aligned(most_bytes)

        def piece(slots: Sequence[Tensor], source: int, target: int, like: Tensor) -> Tensor:
            return _piece(slots[source], room * (target - (target > source)), like)

        ranks = [rank for rank in range(len(inputs)) if rank != me]
        puts, takes = [], []
        for slots in self._slots:
            sent = [(rank, inputs[rank]) for rank in ranks if inputs[rank].numel()]
            puts.append([(piece(slots, me, rank, part), part) for rank, part in sent])
            arriving = [(rank, outputs[rank]) for rank in ranks if outputs[rank].numel()]
            takes.append(
                [
                    (outputs[me], inputs[me]),
                    *((part, piece(slots, rank, me, part)) for rank, part in arriving),
                ]
            )
        return self._start(puts, takes, _copy, -room)

    def _start(
        self, puts: Sequence[Pairs], takes: Sequence[Sequence[Any]], take: Callable[..., None], mark: int
    ) -> Operation:
        operation = Operation(self, self._num_put + len(self._to_put) + 1, puts, takes, take, mark)
        self._to_put.append(operation)
        self._go_on()
        return operation

    def is_done(self, number: int) -> bool:
        """Go on with what can be done, here and in the state's other transports; whether operation `number` is."""
        for transport in self._together:
            transport._go_on()
        return self._num_taken >= number

    def wait(self, number: int) -> None:
        """Return once operation `number` is done. Raises RuntimeError, as backends do, where a peer is lost."""
        self._waiter.wait(functools.partial(self.is_done, number), functools.partial(self._late, number))

    def _go_on(self) -> None:
        while self._to_put and all(peer[_TAKEN] >= self._num_put - 1 for peer in self._peers):
            operation, turn = self._to_put.popleft(), self._num_put % 2
            for piece, source in operation.puts[turn]:
                _copy(piece, source)
            self._own[_MARKS + turn] = operation.mark
            self._num_put += 1
            self._write(_PUT, self._num_put)
            self._to_take.append(operation)
        while self._to_take and all(peer[_PUT] > self._num_taken for peer in self._peers):
            operation, turn = self._to_take.popleft(), self._num_taken % 2
            marks = {peer[_MARKS + turn] for peer in self._peers}
            assert marks == {operation.mark}, (
                f"2 x bytes (+ 1: sums; < 0: exchanges): here {operation.mark}, others {marks}"
            )
            for sent in operation.takes[turn]:
                operation.take(*sent)
            self._num_taken += 1
            self._write(_TAKEN, self._num_taken)

    def _write(self, counter: int, value: int) -> None:
        self._own[counter] = value
        for peer in self._peers:
            if peer[_ASLEEP]:
                wake(self._address + 8 * counter)
                return

    def _late(self, number: int) -> list[Late]:
        """What operation `number` waits for: ranks that are to put theirs, or to make room for this one's."""
        needs = ((_PUT, number), (_TAKEN, min(number, self._num_put + 1) - 2))
        return [
            Late(rank, address + 8 * counter, value)
            for rank, peer, address in self._whose
            for counter, needed in needs
            if (value := peer[counter]) < needed
        ]


class Operation(NamedTuple):
    """One under way: a work, as backends have them. puts, takes: by turn, what is written into this rank's slot, and
    what `take` is called with to read every rank's. mark: a number that is the same on all ranks."""

    transport: ShmTransport
    number: int
    puts: Sequence[Pairs]
    takes: Sequence[Sequence[Any]]
    take: Callable[..., None]
    mark: int

    def is_completed(self) -> bool:
        return self.transport.is_done(self.number)

    def wait(self) -> None:
        self.transport.wait(self.number)


def open_shm_transport(group: Group, together: list[ShmTransport]) -> ShmTransport | None:
    """A transport for the group; None, on all its ranks alike, where they are on several hosts or devices, or where the
    system lets one of them not share memory. Communicates over the group. Raises PeerLostError."""
    if group.size == 1 or group.backend != "gloo" or group.device.kind != "cpu":
        return None
    token = new_token()
    own = new_file(NUM_BYTES, token)
    try:
        told = torch.empty(group.size, 3, dtype=torch.int64)
        collectives.all_gather(told, torch.tensor([os.getpid(), own, token]), group)
        memory = _map_all(told.tolist())
        can = torch.tensor(memory is not None, dtype=torch.int32)
        collectives.all_reduce(can, group, "min")  # and nobody closes his file before all have mapped it
    finally:
        if own >= 0:
            os.close(own)
    return ShmTransport(group, memory, told[:, 0].tolist(), together) if memory and can else None


def _copy(into: Tensor, source: Tensor) -> None:
    """Of one dtype and shape. Small ones by hand: where nothing is in the caches, the way of `copy_` to its kernel
    takes 20 to 30 us more."""
    if source.nbytes <= _SMALL and source.is_contiguous() and into.is_contiguous():
        ctypes.memmove(into.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        into.copy_(source)


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Where they begin in a slot, one behind the other, and where the last one ends."""
    return [0, *itertools.accumulate(_aligned(tensor.nbytes) for tensor in tensors)]


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _ALIGNMENT


def _piece(slot: Tensor, place: int, like: Tensor) -> Tensor:
    """The tensor in a slot that begins at a place."""
    piece = slot[place : place + like.nbytes].view(like.dtype)
    return piece if like.dim() == 1 else piece.view(like.shape)


def _map_all(told: list[list[int]]) -> list[Memory] | None:
    """Every rank's memory; None where one cannot be had. told: (process, file, token) of each rank."""
    memory: list[Memory] = []
    for process, file, token in told:
        its = map_file(process, file, token, NUM_BYTES)
        if its is None:
            return None
        memory.append(its)
    return memory
