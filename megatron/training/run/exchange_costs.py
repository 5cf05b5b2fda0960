"""What exchanges between tokens and experts on other ranks cost here, measured before the first plan is made."""

from __future__ import annotations

import functools

import torch

from megatron.core.device import product
from megatron.core.distributed.plan_inputs import median_seconds
from megatron.core.transport import collectives, host_data
from megatron.core.transport.parallel_state import ParallelState
from megatron.estimate.description import EXCHANGE
from megatron.estimate.exchange_wire import ExchangeWire
from megatron.training.config.config import Config
from megatron.training.run.build import params_dtype

_LARGEST = 1 << 24  # bytes of an exchange
_MOST_TOKENS = 1024  # of a product


def measured_exchange_wire(config: Config, ps: ParallelState) -> ExchangeWire | None:
    """By the dispatcher's own collective, and a product of a layer's tokens with a matrix [hidden, hidden]; None where
    experts have no ranks of their own. Communicates over `ep_etp`, and over the world."""
    if ps.experts is None or config.description is None:
        return None
    exchanged = (
        sum(size for key, size in piece.collectives.items() if key[:2] == ("F", EXCHANGE))
        for piece in config.description.kinds.values()
    )
    group, device = ps.ep_etp_group, ps.device.torch_device
    # A forward exchanges twice. Of rows of one byte, as many for each rank.
    rows = max(1, min(max(exchanged) // 2, _LARGEST) // group.size)
    one, every = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (rows, rows * group.size))
    if config.model.moe_token_dispatcher_type == "allgather":
        exchange, moved = functools.partial(collectives.all_gather, every, one, group), len(every)
    else:
        counts, into = (rows,) * group.size, torch.empty_like(every)
        exchange = functools.partial(collectives.all_to_all, into, every, counts, counts, group)
        moved = len(every) - rows
    width, length = config.model.hidden_size, config.model.seq_length
    assert width is not None and length is not None, "a model without a shape"  # noqa: PT018
    tokens, dtype = min(_MOST_TOKENS, length * config.training.micro_batch_size), params_dtype(config)
    x, weight = (torch.ones(count, width, dtype=dtype, device=device) for count in (tokens, width))
    compute = functools.partial(product, x, weight, torch.empty_like(x))
    mine = median_seconds(exchange, ps.device), median_seconds(compute, ps.device)
    exchange_s, compute_s = map(max, zip(*host_data.all_gather_json(mine, ps.control_group), strict=True))
    return ExchangeWire(exchange_s / moved, 2 * tokens * width * width / compute_s)
