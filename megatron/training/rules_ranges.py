"""Rules on single settings: required ones, and ranges (floor 0)."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import arg_info
from megatron.core.models.gpt.stage_layers import MAX_LAYERS, MAX_STAGES
from megatron.training.config import FIELDS, GROUPS
from megatron.training.rule_table import RuleTable, Situation, spelled

RULES = RuleTable()
rule = RULES.rule


def _required(name: str) -> None:
    unless_skipping = name == "lr"

    def missing(s: Situation) -> str | None:
        if s.value(name) is not None or (unless_skipping and s.value("skip_train")):
            return None
        return f"{spelled(name)} is required"

    info = arg_info(FIELDS[name][1])
    assert info is not None
    rule(f"required-{name.replace('_', '-')}", spelled(name), f"give {spelled(name)}: {info.help}")(missing)


def _at_least(name: str, least: float) -> None:
    def too_small(s: Situation) -> str | None:
        value = s.value(name)
        values = value if isinstance(value, tuple) else (value,)
        if any(v is not None and v < least for v in values):
            return f"{spelled(name)} {value}: must be at least {least}"
        return None

    rule(f"range-{name.replace('_', '-')}", spelled(name), f"give {least} or more")(too_small)


def _at_most(name: str, most: float) -> None:
    def too_large(s: Situation) -> str | None:
        value = s.value(name)
        # Not `value > most`, which would let NaN pass.
        return None if value is None or value <= most else f"{spelled(name)} {value}: must be at most {most}"

    rule(f"limit-{name.replace('_', '-')}", spelled(name), f"give {most} or less")(too_large)


def _share(name: str) -> None:
    """Values in [0, 1)."""

    def outside(s: Situation) -> str | None:
        value = s.value(name)
        if value is not None and not 0 <= value < 1:
            return f"{spelled(name)} {value}: must be at least 0 and below 1"
        return None

    rule(f"range-{name.replace('_', '-')}", spelled(name), "give a value in [0, 1)")(outside)


for _group in GROUPS.values():
    for _field in dataclasses.fields(_group):
        _info = arg_info(_field)
        if _info is not None and _info.required and _field.name != "tokenizer_type":
            _required(_field.name)
_FROM_ONE = (
    "num_layers hidden_size num_attention_heads seq_length max_position_embeddings ffn_hidden_size "
    "kv_channels "
    "num_query_groups make_vocab_size_divisible_by padded_vocab_size vocab_size rotary_base "
    "rotary_seq_len_interpolation_factor recompute_num_layers "
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size "
    "expert_tensor_parallel_size world_size micro_batch_size global_batch_size ddp_bucket_size "
    "ddp_num_buckets "
    "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers microbatch_group_size_per_vp_stage "
    "save_interval save_retain_interval log_interval eval_interval exit_interval exit_duration_in_mins "
    "tensorboard_log_interval tensorboard_queue_size num_dataset_builder_threads distributed_timeout_minutes "
    "nan_max_skips hysteresis loss_scale_window iterations_to_skip "
    "pipeline_memory_limit zero_bubble_max_pending_backward zero_bubble_adaptive_memory_limit_percentile "
    "zero_bubble_pipeline_timers_start_iter zero_bubble_pipeline_timers_end_iter "
    "threads_per_rank num_distributed_optimizer_instances check_weight_hash_across_dp_replicas_interval"
)
for _name in _FROM_ONE.split():
    _at_least(_name, 1)
_FROM_ZERO = (
    "train_iters train_samples eval_iters lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples "
    "lr_warmup_init lr_wsd_decay_iters lr_wsd_decay_samples lr min_lr decoupled_lr decoupled_min_lr "
    "weight_decay "
    "clip_grad seed num_workers manual_gc_interval ckpt_step mid_level_dataset_surplus "
    "tiktoken_num_special_tokens "
    "norm_epsilon init_method_std suggested_communication_unit_size fsdp_memory_budget interleave_group_size "
    "post_validation_after"
)
for _name in _FROM_ZERO.split():
    _at_least(_name, 0)
_SHARES = "attention_dropout hidden_dropout lr_warmup_fraction adam_beta1 adam_beta2 sgd_momentum"
for _name in _SHARES.split():
    _share(_name)
_MOST_COUNT = 2**40  # samples, iterations, tokens: beyond any run, and far from the end of 64 bits
for _name in "train_iters train_samples lr_decay_iters lr_decay_samples eval_iters seq_length".split():
    _at_most(_name, _MOST_COUNT)
_at_most("num_layers", MAX_LAYERS)
_at_most("pipeline_model_parallel_size", MAX_STAGES)
_at_most("threads_per_rank", 1024)  # far more than cores end the process where the system refuses a thread
_at_most("seed", 2**32 - 2**20)  # NumPy's generators take 32 bits; stages add to the seed
_at_most("zero_bubble_adaptive_memory_limit_percentile", 100)
_at_most("mid_level_dataset_surplus", 1)
