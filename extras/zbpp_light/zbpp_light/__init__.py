"""Zero-bubble pipeline schedules in a megatron-core of your own.

    import zbpp_light

    zbpp_light.patch_megatron()

before or behind Megatron's imports, and before the first training step.
"""

from zbpp_light.patching import patch_megatron, unpatch_megatron

__all__ = ["patch_megatron", "unpatch_megatron"]
