"""A checkpoint's whole model in this process."""

from pathlib import Path

from megatron.core.device import Device
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.transport.parallel_state import single_process
from megatron.training.config.config import Config
from tools.inference import filled_model, open_checkpoint


def load_model(directory: Path | str) -> tuple[GPTModel, Config]:
    """Its newest checkpoint's."""
    config, load = open_checkpoint(str(directory), None)
    return filled_model(config, load, single_process(Device("cpu"))), config
