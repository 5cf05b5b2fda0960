"""What zbpp_light knows of Megatron's functions, against small functions with each release's parameters."""

import pytest
from zbpp_light import signatures

STEP = "*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None"  # noqa: E501
FORWARD = (
    "forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config"
)
CURRENT = "checkpoint_activations_microbatch=None, is_first_microbatch=False, current_microbatch=None"
LINEAR = "ctx, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, grad_output_buffer, wgrad_deferral_limit"  # noqa: E501
SHAPES = "seq_length, micro_batch_size, decoder_seq_length, config"
BACKWARD = "input_tensor, output_tensor, output_tensor_grad"
LINE = "forward_backward_pipelining_without_interleaving"
OLD_FORWARD = f"{FORWARD}, collect_non_loss_data=False, {CURRENT}, encoder_decoder_xattn=False"
NEW_FORWARD = (
    f"{FORWARD}, cp_group_size, collect_non_loss_data=False, {CURRENT}, vp_stage=None, is_last_stage=True"
)
GROUPS = f"{STEP}, adjust_tensor_shapes_fn=None, p2p_communicator=None"
# Read from the wheels.
RELEASES = {
    "0.12.3": {
        LINE: STEP,
        "forward_step": OLD_FORWARD,
        "backward_step": f"{BACKWARD}, model_type, config",
        "get_tensor_shapes": f"*, rank, model_type, {SHAPES}, encoder_decoder_xattn",
        f"{signatures.LINEAR}.forward": LINEAR,
    },
    "0.13.1": {
        LINE: f"{STEP}, adjust_tensor_shapes_fn=None",
        "forward_step": f"{OLD_FORWARD}, vp_stage=None",
        "backward_step": f"{BACKWARD}, model_type, config",
        "get_tensor_shapes": f"*, rank, model_type, {SHAPES}, encoder_decoder_xattn",
        f"{signatures.LINEAR}.forward": f"{LINEAR}, tp_group",
    },
    "0.14.0": {
        LINE: f"{GROUPS}, grad_finalize_pgs=None",
        "forward_step": NEW_FORWARD,
        "backward_step": f"{BACKWARD}, model_type, config, pipeline_model_parallel_size=1",
        "get_tensor_shapes": f"*, {SHAPES}, tp_group, cp_group",
        f"{signatures.LINEAR}.forward": f"{LINEAR}, tp_group",
    },
    "0.15.3": {
        LINE: f"{GROUPS}, pg_collection=None",
        "forward_step": NEW_FORWARD,
        "backward_step": f"{BACKWARD}, model_type, config",
        "get_tensor_shapes": f"*, {SHAPES}, tp_group, cp_group",
        f"{signatures.LINEAR}.forward": f"{LINEAR}, tp_group",
    },
    "0.17.1": {
        LINE: f"{GROUPS}, pg_collection=None, force_all_reduce=False",
        "forward_step": NEW_FORWARD,
        "backward_step": f"{BACKWARD}, config",
        "get_tensor_shapes": f"*, {SHAPES}, tp_group=None, cp_group=None",
        f"{signatures.LINEAR}.forward": f"{LINEAR}, tp_group",
    },
    "0.19.2": {
        LINE: f"{GROUPS}, pg_collection=None, force_all_reduce=False",
        "forward_step": NEW_FORWARD,
        "backward_step": f"{BACKWARD}, config",
        "get_tensor_shapes": f"*, {SHAPES}, tp_group=None, cp_group=None",
        f"{signatures.LINEAR}.forward": f"{LINEAR}, tp_group, gtp_remat_size",
    },
}


def function_of(parameters):
    """One that returns what it was given."""
    space = {}
    exec(f"def function({parameters}): return dict(locals())", space)
    return space["function"]


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_is_known(release):
    for name, text in RELEASES[release].items():
        assert signatures.parameters(function_of(text), name)


@pytest.mark.parametrize("release", RELEASES)
def test_arguments_go_where_the_release_has_them(release):
    values = {
        word: f"value of {word}"
        for word in signatures.KNOWN["forward_step"].replace("?", "").split()
        if word not in ("encoder_decoder_xattn", "vp_stage")
    }
    function = function_of(RELEASES[release]["forward_step"])
    given = signatures.call(function, values)
    for name, value in given.items():
        assert value == values.get(name, value), name
    assert given["config"] == "value of config"
    assert ("cp_group_size" in given) == (release not in ("0.12.3", "0.13.1"))


def test_a_new_parameter_is_refused_by_name():
    function = function_of(RELEASES["0.19.2"]["backward_step"] + ", unheard_of=None")
    with pytest.raises(ValueError, match="backward_step has a parameter unheard_of that is not known"):
        signatures.parameters(function, "backward_step")


def test_a_missing_parameter_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"forward_step has no parameter config, has a parameter settings that is"
    ):
        signatures.parameters(function_of(NEW_FORWARD.replace(" config,", " settings,")), "forward_step")
