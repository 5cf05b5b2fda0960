"""What follows from what: Megatron's derivations."""

import pytest

from megatron.training.config.config import Config
from megatron.training.config.resolve import Machine, resolve
from megatron.training.config.saved_config import CHECKPOINT_FIELDS, apply_checkpoint_args


def resolved(machine=None, **values):
    base = {"hidden_size": 768, "num_attention_heads": 12, "num_layers": 2, "micro_batch_size": 4}
    given = base | values
    return resolve(given, dict.fromkeys(given, "flag"), machine or Machine())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"ffn_hidden_size": 3072, "kv_channels": 64, "num_query_groups": 12}),
        ({"swiglu": True}, {"ffn_hidden_size": 2048}),
        ({"swiglu": True, "hidden_size": 1000}, {"ffn_hidden_size": 2624}),  # 2666 cut to a multiple of 64
        ({"swiglu": True, "ffn_hidden_size": 100}, {"ffn_hidden_size": 100}),
        ({"group_query_attention": True, "num_query_groups": 4}, {"num_query_groups": 4}),
        ({"kv_channels": 100}, {"kv_channels": 100}),
        ({"tensor_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}),
        ({"bf16": True}, {"accumulate_allreduce_grads_in_fp32": True}),
        ({"bf16": True, "grad_reduce_in_bf16": True}, {"accumulate_allreduce_grads_in_fp32": False}),
        ({"fp16": True}, {"check_for_nan_in_loss_and_grad": False}),
        ({"fp16": True, "loss_scale": 8.0}, {"check_for_nan_in_loss_and_grad": True}),
        ({"weight_decay": 0.2}, {"start_weight_decay": 0.2, "end_weight_decay": 0.2}),
        ({"train_iters": 7}, {"lr_decay_iters": 7, "lr_decay_samples": None}),
        ({"train_iters": 7, "lr_decay_iters": 5}, {"lr_decay_iters": 5}),
        ({"train_samples": 90}, {"lr_decay_samples": 90, "lr_decay_iters": None, "train_iters": None}),
        ({"sequence_parallel": True}, {"sequence_parallel": False}),
        ({"recompute_activations": True}, {"recompute_granularity": "selective"}),
        ({"use_flash_attn": True}, {"attention_backend": "flash"}),
        ({"use_rotary_position_embeddings": True}, {"position_embedding_type": "rope"}),
        ({"apply_query_key_layer_scaling": True}, {"attention_softmax_in_fp32": True}),
        ({"rerun_mode": "validate_results"}, {"nan_policy": "rerun-once"}),
        ({"rerun_mode": "validate_results", "nan_policy": "skip"}, {"nan_policy": "skip"}),
        ({"decoupled_lr": 1.0, "min_lr": 0.1}, {"decoupled_min_lr": 0.1}),
        (
            {"vocab_file": "v", "merge_file": "m"},
            {"tokenizer_type": "GPT2BPETokenizer", "padded_vocab_size": None},
        ),
        (
            {"mock_data": True, "vocab_size": 100},
            {"tokenizer_type": "NullTokenizer", "padded_vocab_size": 128},
        ),
        ({"tokenizer_type": "ByteTokenizer"}, {"padded_vocab_size": 384}),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 128}, {"padded_vocab_size": 256}),
        (
            {"tokenizer_type": "ByteTokenizer", "tensor_model_parallel_size": 4},
            {"padded_vocab_size": 512},
        ),
        ({"tokenizer_type": "ByteTokenizer", "padded_vocab_size": 300}, {"padded_vocab_size": 300}),
        ({"data_path": ("a",)}, {"split": "969,30,1", "dataloader_type": "single"}),
        ({"train_data_path": ("a",)}, {"split": None}),
        ({"ckpt_format": "torch"}, {"ckpt_format": "torch_dist"}),
        ({"save": "runs"}, {"metrics_file": "runs/metrics.jsonl"}),
        ({}, {"metrics_file": None, "distributed_backend": "gloo", "world_size": 1}),
        ({"distributed_backend": "nccl"}, {"distributed_backend": "gloo"}),
    ],
)
def test_derivations(values, expected):
    flat = resolved(**values).flat()
    assert {name: flat[name] for name in expected} == expected


def test_origins_tell_given_from_derived():
    config = resolved(train_iters=7, swiglu=True)
    origins = {
        n: config.origin[n] for n in ("train_iters", "lr_decay_iters", "ffn_hidden_size", "lr", "world_size")
    }
    assert origins == {
        "train_iters": "flag",
        "lr_decay_iters": "derived",
        "ffn_hidden_size": "derived",
        "lr": "default",
        "world_size": "default" if config.origin["world_size"] == "default" else "launcher",
    }
    assert config.given("train_iters")
    assert not config.given("lr_decay_iters")


def test_ranks_divide_into_replicas_and_give_the_global_batch():
    config = resolved(Machine(world_size=16), tensor_model_parallel_size=2, context_parallel_size=2)
    assert (config.data_parallel_size, config.training.global_batch_size) == (4, 16)
    assert config.grid().order == "tp-cp-ep-dp-pp"
    assert resolved(use_tp_pp_dp_mapping=True).grid().order == "tp-cp-ep-pp-dp"


def test_a_gpu_machine_takes_nccl():
    assert resolved(Machine(has_gpu=True)).parallel.distributed_backend == "nccl"


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"sequence_parallel": True}, "--sequence-parallel"),
        ({"ckpt_format": "torch_dcp"}, "torch_dcp"),
        ({"distributed_backend": "nccl"}, "gloo"),
        ({"num_query_groups": 4}, "--num-query-groups"),
        ({"hysteresis": 4}, "--hysteresis"),
        (
            {"train_iters": 10, "global_batch_size": 16, "rampup_batch_size": (8, 8, 32)},
            "160 samples, but the run trains on 128",
        ),
    ],
)
def test_what_changes_silently_elsewhere_is_a_warning_here(values, word):
    (warning,) = resolved(**values).warnings
    assert word in warning
    assert resolved().warnings == ()


@pytest.mark.parametrize(
    "values",
    [
        {"rampup_batch_size": (8, 8, 32)},  # counted in samples below
        {"train_iters": 10, "rampup_batch_size": (8, 8, 32), "lr_decay_style": "constant"},
        {"train_iters": 10, "rampup_batch_size": (8, 8, 32), "lr_decay_iters": 7},
        {"train_iters": 10, "rampup_batch_size": (8, 8, 32), "skip_train": True},
        {"train_iters": 10},
    ],
)
def test_a_schedule_that_ends_within_the_run_is_no_warning(values):
    length = {} if "train_iters" in values else {"train_samples": 500}
    assert resolved(global_batch_size=16, **values, **length).warnings == ()


def test_the_checkpoint_format_is_noted_only_where_it_is_given():
    assert "own format" in resolved(ckpt_format="torch_dist").notes[0]
    assert resolved().notes == resolved(ckpt_format="torch").notes == ()


def test_skipping_training_loads_weights_only():
    config = resolved(skip_train=True)
    assert (config.training.train_iters, config.optimizer.lr) == (0, 0.0)
    assert (config.checkpoint.no_load_optim, config.checkpoint.no_load_rng) == (True, True)
    kept = resolved(skip_train=True, train_samples=90, lr=0.5)
    assert (kept.training.train_iters, kept.training.train_samples, kept.optimizer.lr) == (None, 90, 0.5)


def test_dtypes():
    assert resolved().params_dtype == "float32"
    assert resolved(bf16=True).params_dtype == "bfloat16"
    assert resolved(fp16=True).params_dtype == "float16"
    assert resolved(fp64=True).params_dtype == "float64"


def test_total_iterations_of_samples_with_a_ramp():
    config = resolved(train_samples=1000, global_batch_size=40, rampup_batch_size=(20, 20, 200))
    assert config.total_iterations == 11 + (1000 - 220) // 40


def test_senseless_values_are_left_to_the_rules():
    config = resolved(num_attention_heads=0, tensor_model_parallel_size=0, micro_batch_size=0, hidden_size=-3)
    assert config.model.num_attention_heads == 0


def test_checkpoint_args_cover_the_shape_only():
    saved = resolved(hidden_size=96, bf16=True, position_embedding_type="rope", seq_length=64, lr=3.0).flat()
    saved["recompute_modules"] = ["core_attn"]
    values, origin, warnings = apply_checkpoint_args(
        {"hidden_size": 8, "seq_length": 32}, {"seq_length": "flag"}, saved
    )
    assert (values["hidden_size"], values["seq_length"], values["position_embedding_type"]) == (
        96,
        32,
        "rope",
    )
    assert origin["hidden_size"] == "checkpoint"
    assert origin["seq_length"] == "flag"
    assert "bf16" not in values
    assert "lr" not in values
    assert len(warnings) == 1
    assert set(CHECKPOINT_FIELDS) <= set(Config.from_flat({}).flat())
