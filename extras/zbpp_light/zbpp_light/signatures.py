"""Megatron's functions by the parameters that they have, never by their version. Pure."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
_STEP = (
    "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size decoder_seq_length "
    "forward_only collect_non_loss_data first_val_step adjust_tensor_shapes_fn? p2p_communicator? grad_finalize_pgs? "
    "pg_collection? force_all_reduce?"
)
# By function: parameters, those that only some releases have with a question mark.
KNOWN = {
    "forward_backward_pipelining_without_interleaving": _STEP,
    "forward_backward_pipelining_with_interleaving": _STEP,
    "forward_step": "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config "
    "collect_non_loss_data checkpoint_activations_microbatch is_first_microbatch current_microbatch "
    "encoder_decoder_xattn? vp_stage? cp_group_size? is_last_stage?",
    "backward_step": "input_tensor output_tensor output_tensor_grad config model_type? pipeline_model_parallel_size?",
    "get_tensor_shapes": "seq_length micro_batch_size decoder_seq_length config rank? model_type? "
    "encoder_decoder_xattn? tp_group? cp_group?",
    "deallocate_output_tensor": "out deallocate_pipeline_outputs",
    f"{LINEAR}.forward": "ctx input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel "
    "grad_output_buffer wgrad_deferral_limit tp_group? gtp_remat_size?",
    f"{LINEAR}.backward": "ctx grad_output",
}


def parameters(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Those of a function of `KNOWN`. Raises ValueError naming each that is missing, or that we do not know."""
    known = KNOWN[name].split()
    there = tuple(inspect.signature(function).parameters)
    problems = [f"has no parameter {word}" for word in known if not word.endswith("?") and word not in there]
    problems += [f"has a parameter {word} that is not known" for word in there if not {word, f"{word}?"} & {*known}]
    if problems:
        raise ValueError(f"megatron-core's {name} {', '.join(problems)}: this megatron-core is not supported")
    return there


def call(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Calls it with those of the values that it has parameters for."""
    return function(**{name: values[name] for name in inspect.signature(function).parameters if name in values})
