"""megatron-core on CPU, for scripts that save its checkpoints. Import it first: `import megatron_core_shims`.

The shims are those of extras/zbpp_light's example.
"""

import queue

import cpu_shims

cpu_shims.install()

from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402

# Its own is a process more, which outlives the ranks.
filesystem_async._results_queue = queue.SimpleQueue()
