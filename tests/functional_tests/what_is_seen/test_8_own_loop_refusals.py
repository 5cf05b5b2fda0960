"""Line 8: what a loop of one's own cannot have is refused, by the names that the trainer has written."""

import re
import sys

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.training import initialize_megatron


def test_fields_that_a_loop_cannot_have_are_refused_or_warned_of():
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    module = torch.nn.Linear(2, 2)
    for fields, told in (
        ({"use_custom_fsdp": True, "fsdp_double_buffer": True}, "use_custom_fsdp, fsdp_double_buffer"),
        ({"data_parallel_sharding_strategy": "optim_grads_params"}, "data_parallel_sharding_strategy"),
        ({"num_distributed_optimizer_instances": 2}, "num_distributed_optimizer_instances=2"),
    ):
        with pytest.raises(ValueError, match=told):
            DistributedDataParallel(None, DistributedDataParallelConfig(**fields), module)
    with pytest.warns(UserWarning, match="overlap_grad_reduce"):
        DistributedDataParallel(None, DistributedDataParallelConfig(overlap_grad_reduce=True), module)


FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 2 --vocab-size 63 --distributed-backend gloo"
    " --hidden-dropout 0.3 --attention-dropout 0 --save-interval 1"
)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (
            "--pipeline-model-parallel-size 2 --num-layers 4 --zero-bubble-v-schedule",
            "--zero-bubble-v-schedule",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank",
        ),
        (
            "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params",
            "--use-custom-fsdp, --data-parallel-sharding-strategy",
        ),
    ],
)
def test_flags_that_a_loop_cannot_have_end_the_process_as_every_refusal(flags, refused, monkeypatch, capsys):
    """Together with what else is wrong, once, with status 2."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(sys, "argv", ["trainer", *FLAGS.split(), *flags.split(), "--nonsense"])
    with pytest.raises(SystemExit) as ended:
        initialize_megatron(args_defaults={"tokenizer_type": "NullTokenizer"})
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert "configuration: 2 problems" in told
    assert "unknown flag --nonsense" in told
    assert re.search(f"{refused}: a loop of one's own.*\n     fix: use pretrain", told)


def test_fields_have_the_verdict_of_the_flags():
    with pytest.raises(ValueError, match=r"num_moe_experts=8.*roadmap"):
        TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, num_moe_experts=8)
    with pytest.raises(TypeError, match="did you mean num_layers"):
        TransformerConfig(num_layer=2)
    with pytest.warns(UserWarning, match="use_cpu_initialization"):
        TransformerConfig(use_cpu_initialization=True, gradient_accumulation_fusion=False)
