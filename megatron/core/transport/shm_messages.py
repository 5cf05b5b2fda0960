"""Messages from one rank to another of the same host, through memory that both see: a ring of slots, one a message.

Where a message goes through sockets, its sender takes 200 us in cold caches and threads of gloo as much again; through
memory a copy at each end. The sender puts message n once the receiver has taken n - slots, and waits for that: where
messages go by gloo as many sends are under way at most (`most_sends`). The receiver takes messages when it waits for
one, oldest first. So a ring waits for less than messages would that each block until they are received, and a plan
whose messages may all block cannot deadlock in it. A send is complete once it is in the ring.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import os
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron.core.transport.peer_loss import blame
from megatron.core.transport.pending import Pending
from megatron.core.transport.point_to_point import P2PRoute, described
from megatron.core.transport.shared_memory import (
    COUNTER_BYTES,
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

RING_BYTES = 16 << 20  # routes whose slots take more go by gloo
_PUT, _TAKEN = 0, 8  # counters: of the sender, of the receiver
_ASLEEP = {"send": 9, "receive": 1}  # whether that end sleeps; beside the counter that it waits for
_LONGEST_S = 0.05  # of a sleep
_TAG = 1  # of what ends say of their memory


class SharedRing(NamedTuple):
    """Memory of a route as one end maps it. process: number of the other end's."""

    memory: Memory
    slot_bytes: int
    num_slots: int
    process: int


class SharedRoute:
    """`P2PRoute` through memory. Every message has the same size, that of the ring's slots or less."""

    def __init__(self, op: str, place: int, group: Group, ring: SharedRing) -> None:
        self._described = described(op, place, group)
        self._op, self._peer, self._group, self._ring = op, group.ranks[place], group, ring
        self._counters, self._address = counters(ring.memory), ctypes.addressof(ring.memory)
        first = self._address + COUNTER_BYTES
        self._slots = [first + slot * ring.slot_bytes for slot in range(ring.num_slots)]
        self._waiter = Waiter(
            self._counters,
            _ASLEEP[op],
            {self._peer: ring.process},
            group.timeout.total_seconds(),
            spin_s=0.0,
            longest_s=_LONGEST_S,
        )
        self._number = 0  # of messages that this end has put or taken
        self._posted: collections.deque[Tensor] = collections.deque()  # to be received

    def start(self, tensor: Tensor) -> Pending:
        """Send it, or receive into it; contiguous. Waits where the ring is full. Raises PeerLostError, which names the
        other end."""
        assert tensor.nbytes <= self._ring.slot_bytes, f"{tensor.nbytes} bytes in {self._ring.slot_bytes}"
        if self._group.observer is not None:
            self._group.observer(*self._described)
        pending = Pending(self._op, self._group, None, (tensor,), peer=self._peer)
        try:
            if self._op == "send":
                self._put(tensor)
            else:
                if len(self._posted) == self._ring.num_slots:
                    self._group.traffic.wait_for(functools.partial(self.receive, self._number + 1))
                self._posted.append(tensor)
                pending.work = Arriving(self, self._number + len(self._posted))
        except RuntimeError as error:
            blame(error, self._op, self._group, pending.started, self._peer)
        return pending

    def is_there(self, number: int) -> bool:
        """Whether message `number` was put, which it is once and for all."""
        return self._counters[_PUT] >= number

    def receive(self, number: int) -> None:
        """Return once messages up to `number` are where they were to be received. Raises RuntimeError."""
        while self._number < number:
            wanted = self._number + 1
            if self._counters[_PUT] < wanted:
                self._wait(_PUT, wanted)
            tensor = self._posted.popleft()
            ctypes.memmove(tensor.data_ptr(), self._slots[self._number % len(self._slots)], tensor.nbytes)
            self._write(_TAKEN, wanted, "send")

    def _put(self, tensor: Tensor) -> None:
        free = self._number - self._ring.num_slots + 1  # so many are taken when there is room
        if self._counters[_TAKEN] < free:
            self._group.traffic.wait_for(functools.partial(self._wait, _TAKEN, free))
        ctypes.memmove(self._slots[self._number % len(self._slots)], tensor.data_ptr(), tensor.nbytes)
        self._write(_PUT, self._number + 1, "receive")

    def _write(self, counter: int, value: int, other: str) -> None:
        self._number = self._counters[counter] = value
        if self._counters[_ASLEEP[other]]:
            wake(self._address + 8 * counter)

    def _wait(self, counter: int, needed: int) -> None:
        def late() -> list[Late]:
            value = self._counters[counter]
            return [Late(self._peer, self._address + 8 * counter, value)] if value < needed else []

        self._waiter.wait(lambda: self._counters[counter] >= needed, late)


class Arriving(NamedTuple):
    """A message to be received: a work, as backends have them."""

    route: SharedRoute
    number: int

    def is_completed(self) -> bool:
        return self.route.is_there(self.number)

    def wait(self) -> None:
        self.route.receive(self.number)


def open_route(
    op: str, place: int, group: Group, message_bytes: int, most_under_way: int
) -> P2PRoute | SharedRoute:
    """The shortest way of messages of one size from this rank ("send") to another of a gloo group, or from it
    ("receive"): memory where both are on one host, which has it, and as many as may be under way fit. Both ends call
    it, and wait for each other. Raises PeerLostError, which names the other end."""
    by_messages = P2PRoute(op, place, group)
    slot_bytes, num_slots = message_bytes + -message_bytes % 64, most_under_way + 1
    if group.peers is not None or group.device.kind != "cpu" or slot_bytes * num_slots > RING_BYTES:
        return by_messages
    num_bytes = COUNTER_BYTES + slot_bytes * num_slots
    here = torch.tensor([os.getpid(), -1, new_token(), num_bytes])
    there = torch.empty_like(here)
    towards, back = P2PRoute("send", place, group, _TAG), P2PRoute("receive", place, group, _TAG)
    if op == "receive":
        back.start(there).wait()
        process, file, token, theirs = there.tolist()
        assert theirs == num_bytes, f"a ring of {num_bytes} bytes here, {theirs} at its sender"
        memory = map_file(process, file, token, num_bytes)
        here[1] = 0 if memory is not None else -1
        towards.start(here).wait()
    else:
        process, _, token, _ = here.tolist()
        here[1] = file = new_file(num_bytes, token)
        try:
            memory = map_file(process, file, token, num_bytes)
            if memory is None:
                here[1] = -1
            towards.start(here).wait()
            back.start(there).wait()  # and then has mapped it
        finally:
            if file >= 0:
                os.close(file)
        if there[1] < 0:
            memory = None
    if memory is None:
        return by_messages
    return SharedRoute(op, place, group, SharedRing(memory, slot_bytes, num_slots, int(there[0])))
