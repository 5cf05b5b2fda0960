"""Which errors blame a peer, and how the loss is told."""

import pytest
import torch.distributed as dist

from megatron.core.transport.peer_loss import PeerLostError, peer_loss_named


def loss(error, **options):
    with pytest.raises(PeerLostError) as caught, peer_loss_named("receive", "pp", (1, 3), 3, **options):
        raise error
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Connection closed by peer [127.0.0.1]:1"),
        RuntimeError("Timed out waiting 1000ms for recv operation to complete"),
        dist.DistNetworkError("anything"),
        dist.DistStoreError("wait timeout after 4000ms"),
    ],
)
def test_a_lost_peer_is_named_with_status_6(error):
    found = loss(error, peer=1)
    assert (found.status, found.op, found.purpose, found.rank, found.peer) == (6, "receive", "pp", 3, 1)
    assert found.__cause__ is error
    assert "rank 3: lost rank 1 in receive over group 'pp' (ranks [1, 3]) after 0.0 s: " in str(found)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Invalid scalar type"),
        ValueError("connection"),
        dist.DistNetworkError("The server socket has failed to bind to [::]:29500 (errno: 98, EADDRINUSE)"),
    ],
)
def test_our_own_mistakes_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, peer_loss_named("receive", "pp", (1, 3), 3):
        raise error
    assert caught.value is error


def test_a_loss_is_told_once_and_keeps_its_innermost_name():
    inner = loss(RuntimeError("aborted"))
    with pytest.raises(PeerLostError) as caught, peer_loss_named("outer", "world", (0, 1), 0):
        raise inner
    assert caught.value is inner


def test_at_says_where_and_keeps_everything_else():
    error = loss(RuntimeError("[a/b.cc:12] failed with [c/d.cc:5] Broken pipe"))
    assert str(error).endswith(": failed with Broken pipe")
    placed = error.at("stage 1, 1RECV_F5").at("iteration 3")
    assert str(placed).startswith(
        "rank 3: iteration 3: stage 1, 1RECV_F5: lost a peer in receive over group 'pp'"
    )
    kept = ("status", "op", "purpose", "ranks", "rank", "peer", "elapsed_s", "detail")
    assert [getattr(placed, name) for name in kept] == [getattr(error, name) for name in kept]
    assert isinstance(placed, PeerLostError)


def test_long_lists_of_ranks_are_abridged():
    with pytest.raises(PeerLostError) as caught, peer_loss_named("barrier", "world", tuple(range(100)), 5):
        raise RuntimeError("Socket closed")
    assert "(ranks [0, 1, 2, 3, 4, 5, 6, 7, ... 99], 100 in all)" in str(caught.value)
