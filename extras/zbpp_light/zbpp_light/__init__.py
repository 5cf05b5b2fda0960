"""Zero-bubble pipeline schedules for a megatron-core of your own: `zbpp_light.patch_megatron()`."""

from zbpp_light.patching import patch_megatron, unpatch_megatron

__all__ = ["patch_megatron", "unpatch_megatron"]
