"""Closed forms of a transformer's memory and of what feeding it takes, as the ZeRO-Infinity paper has them.

Source: "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning" (Rajbhandari et al., 2021,
arXiv 2104.07857). Its words: nl layers, hd hidden size, bsz batch, seq sequence length, ci layers between activation
checkpoints, ait arithmetic intensity (FLOP a byte moved), bw bandwidth. 16-bit training.
"""

from __future__ import annotations

from megatron.planner.quantities import CommunicationError, require_count, require_positive


def param_grad_intensity(seq_length: float, batch_size: float) -> float:
    """FLOP a byte of weights and gradients moved: seq * bsz."""
    require_positive(seq_length=seq_length, batch_size=batch_size)
    return seq_length * batch_size


def optimizer_intensity(seq_length: float, batch_size: float) -> float:
    """FLOP a byte of optimizer states moved: seq * bsz / 4."""
    return param_grad_intensity(seq_length, batch_size) / 4


def checkpoint_intensity(hidden_size: float, checkpoint_interval: float = 1) -> float:
    """FLOP a byte of activation checkpoints moved: 24 * hd * ci."""
    require_positive(hidden_size=hidden_size, checkpoint_interval=checkpoint_interval)
    return 24 * hidden_size * checkpoint_interval


def efficiency(flop_per_byte: float, bandwidth_bytes_per_s: float, peak_flop_per_s: float) -> float:
    """ait*bw / (ait*bw + peak), nothing overlapped."""
    require_positive(
        flop_per_byte=flop_per_byte,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        peak_flop_per_s=peak_flop_per_s,
    )
    fed = flop_per_byte * bandwidth_bytes_per_s
    return fed / (fed + peak_flop_per_s)


def bandwidth_for(wanted_efficiency: float, flop_per_byte: float, peak_flop_per_s: float) -> float:
    """Bytes/s at which `efficiency` is `wanted_efficiency`, between 0 and 1."""
    require_positive(flop_per_byte=flop_per_byte, peak_flop_per_s=peak_flop_per_s)
    if not 0 < wanted_efficiency < 1:
        raise CommunicationError("wanted_efficiency", f"must be between 0 and 1, not {wanted_efficiency:g}")
    return peak_flop_per_s / flop_per_byte * wanted_efficiency / (1 - wanted_efficiency)


def transformer_params(num_layers: int, hidden_size: int) -> int:
    """12 * nl * hd^2."""
    require_count(num_layers=num_layers, hidden_size=hidden_size)
    return 12 * num_layers * hidden_size**2


def checkpoint_bytes(
    num_layers: int, hidden_size: int, seq_length: int, batch_size: int, checkpoint_interval: int = 1
) -> float:
    """2 * bsz * seq * hd * nl / ci: a 2-byte checkpoint every ci layers."""
    require_count(num_layers=num_layers, hidden_size=hidden_size, seq_length=seq_length)
    require_count(batch_size=batch_size, checkpoint_interval=checkpoint_interval)
    return 2 * batch_size * seq_length * hidden_size * num_layers / checkpoint_interval


def working_state_bytes(hidden_size: int) -> int:
    """4 * hd * 4hd: 2-byte weights and gradients of the largest linear layer."""
    require_count(hidden_size=hidden_size)
    return 4 * hidden_size * 4 * hidden_size


def working_activation_bytes(
    hidden_size: int, num_heads: int, seq_length: int, batch_size: int, checkpoint_interval: int = 1
) -> int:
    """bsz * seq * ci * (16*hd + 2*heads*seq), between two checkpoints."""
    require_count(hidden_size=hidden_size, num_heads=num_heads, seq_length=seq_length)
    require_count(batch_size=batch_size, checkpoint_interval=checkpoint_interval)
    return batch_size * seq_length * checkpoint_interval * (16 * hidden_size + 2 * num_heads * seq_length)
