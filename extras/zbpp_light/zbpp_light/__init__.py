"""Zero-bubble pipeline schedules in a megatron-core of your own: `zbpp_light.patch_megatron()` before the first step."""

from zbpp_light.patching import patch_megatron, unpatch_megatron

__all__ = ["patch_megatron", "unpatch_megatron"]
