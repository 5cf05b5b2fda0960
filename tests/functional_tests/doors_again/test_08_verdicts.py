"""Number 8: verdicts by one rule (docs/megatron_compat.md): what changes no result is accepted with a line that says
what is not done, what would is refused."""

import pytest

from megatron.training.config.flag_table import Arity, FlagState, flag_table, spellings
from megatron.training.config.problems import ConfigurationError
from megatron.training.run.arguments import parse_config
from tests.harness.launch_lines import SMALL

ACCEPTED = """
--defer-embedding-wgrad-compute --wgrad-deferral-limit --overlap-param-gather-with-optimizer-step --log-straggler
--straggler-ctrlr-port --use-nccl-ub --nccl-ub --disable-symmetric-registration --fsdp-manual-registration
--tp-comm-overlap --tp-comm-overlap-cfg --tp-comm-bulk-dgrad --tp-comm-split-ag --disable-tp-comm-overlap-rs
--tp-comm-bootstrap-backend --use-sharp --sharp-enabled-group --nccl-communicator-config-path --delay-wgrad-compute
--enable-cuda-graph --cuda-graph-impl --log-energy --enable-ft-package --trust-remote-code --legacy-tokenizer
--inference-max-seq-length --cp-comm-type --muon-momentum --dist-ckpt-save-pre-mcore-014 --no-initialization
--use-precision-aware-optimizer --exit-signal-handler --no-mmap-bin-files
""".split()
# Other numbers, other models, other cuts, less memory, other files, other ends of a run.
REFUSED = """
--fp8-format --moe-use-upcycling --window-size --softmax-type --multi-latent-attention --mtp-num-layers --use-mup --sft
--fim-data --step-batch-size-schedule --eval-global-batch-size --check-for-spiky-loss --error-injection-rate
--non-persistent-save-interval --optimizer-cpu-offload --cpu-offloading --num-seq-splits
--enable-vocab-parallel --use-torch-fsdp2 --distribute-saved-activations --fp16-lm-cross-entropy
--data-parallel-random-init --inprocess-restart --save-wgrads-interval --perform-rl-step --vision-pretraining
""".split()


def words_of(entry):
    return [entry.spelling, *([] if entry.arity is Arity.SWITCH else ["7"])]


@pytest.mark.parametrize("flag", ACCEPTED)
def test_what_changes_no_result_is_accepted_with_a_line(flag):
    entry = spellings()[flag]
    assert entry.state is FlagState.INERT
    assert entry.why


@pytest.mark.parametrize("flag", REFUSED)
def test_what_would_change_results_is_refused(flag):
    entry = spellings()[flag]
    assert entry.state is FlagState.UNSUPPORTED
    assert entry.fix


def test_everything_accepted_leaves_the_configuration_as_it_was_and_says_one_line_each():
    """All flags of that verdict on one line: every value is that of a launch without them."""
    inert = [entry for entry in flag_table().values() if entry.state is FlagState.INERT]
    switches = [entry for entry in inert if entry.field is None]
    words = [word for entry in switches for word in words_of(entry)]
    words += ["--exit-signal-handler", "--no-mmap-bin-files", "--use-precision-aware-optimizer"]
    words += [
        "--num-dataset-builder-threads",
        "3",
        "--position-embedding-type",
        "rope",
    ]  # for --no-position-embedding
    plain = parse_config([*SMALL, "--position-embedding-type", "rope"])
    asked = parse_config([*SMALL, *words])
    fields = {entry.name for entry in inert if entry.field is not None}
    changed = {name for name, value in asked.flat().items() if plain.flat()[name] != value}
    assert changed == fields
    said = [line.split(" has no effect here: ") for line in asked.warnings]
    assert sorted(flag for flag, _ in said) == sorted(entry.spelling for entry in inert)
    assert all(why for _, why in said)


def test_a_setting_stands_with_its_feature():
    """Its row names flags that are refused, or fields: beside one of them it is refused, without it has no effect."""
    table = spellings()
    settings = [entry for entry in flag_table().values() if entry.setting_of]
    assert settings
    for entry in settings:
        assert entry.state is FlagState.UNSUPPORTED, entry.spelling
        features = [table[flag] for flag in entry.setting_of]
        assert all(
            feature.state is FlagState.UNSUPPORTED or feature.field is not None for feature in features
        ), entry.spelling
    alone = parse_config([*SMALL, "--fp8-param-gather", "--moe-grouped-gemm"])
    assert [line.split(" ")[0] for line in alone.warnings] == ["--fp8-param-gather", "--moe-grouped-gemm"]
    with pytest.raises(ConfigurationError) as refused:
        parse_config([*SMALL, "--fp8-param-gather", "--fp8-format", "hybrid"])
    flags = {problem.flags[0] for problem in refused.value.problems}
    assert flags == {"--fp8-param-gather", "--fp8-format"}
    with pytest.raises(ConfigurationError, match="--moe-latent-size"):
        parse_config([*SMALL, "--num-experts", "4", "--moe-latent-size", "7"])
    (told,) = parse_config([*SMALL, "--moe-latent-size", "7"]).warnings
    assert told.startswith("--moe-latent-size has no effect here")
