"""extras/zbpp_light's example under torchrun, whose last rank stays in a forward step (`sleep`) or raises (`raise`).

Each rank prints its number and pid, and the last one `in a step`: the first has sent it an activation by then. A line
is one write, so that two ranks' lines do not mix where Python buffers nothing.
"""

import os
import sys
import time

import tiny_gpt
import torch.distributed as dist
import zbpp_light

from megatron.core import parallel_state


def main(what):
    dist.init_process_group("gloo")
    os.write(1, f"rank {dist.get_rank()} {os.getpid()}\n".encode())
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    plain, calls = tiny_gpt.forward_step, []

    def forward_step(data, model):
        calls.append(model)
        if dist.get_rank() == dist.get_world_size() - 1 and len(calls) == 2:
            os.write(1, b"in a step\n")
            if what == "raise":
                raise ArithmeticError("planted in forward_step")
            time.sleep(600)
        return plain(data, model)

    tiny_gpt.forward_step = forward_step
    zbpp_light.patch_megatron()
    tiny_gpt.train()


if __name__ == "__main__":
    main(sys.argv[1])
