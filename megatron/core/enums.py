"""Names that user code passes around."""

import enum


class ModelType(enum.Enum):
    """What `pretrain` is given; every model of this framework is a decoder."""

    encoder_or_decoder = 1  # Megatron's spelling
