"""A checkpoint's padded vocabulary holds under any tensor parallel size."""

import json

import pytest
import torch

from megatron.core.dist_checkpointing.saving import save
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.tokenizers.tokenizer import ByteTokenizer
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.saved_config import check_holds_tokenizer, saved_padded_vocabulary
from megatron.training.run import session
from megatron.training.run.arguments import ConfigurationError, launch_config, parse_config
from tests.harness.launch_lines import SMALL
from tests.harness.ranks import run_ranks


def save_with(root, padded_vocab_size):
    config = parse_config(SMALL).replace(padded_vocab_size=padded_vocab_size).flat()
    weight = LocalPiece("model.w", (2,), (0,), torch.zeros(2))
    save(root, 10, [weight], {"config": config, "consumed_train_samples": 0}, {})


def config_at(tp, root, *words):
    env = LaunchEnv(world_size=tp, local_world_size=tp)
    return parse_config(
        [*SMALL, "--tensor-model-parallel-size", str(tp), "--load", str(root), *words], env=env
    )


def completed(ctx, config):
    torch.set_num_threads(1)
    done = session.with_vocabulary(config, ByteTokenizer(), ctx.ps)
    return done.model.padded_vocab_size


def test_a_run_takes_it_on_every_rank_and_the_log_says_so(tmp_path, capfd):
    save_with(tmp_path, 384)  # 257 padded to 128 at one rank; two would make it 512
    config = config_at(2, tmp_path)
    assert config.model.padded_vocab_size == 512
    assert run_ranks(completed, 2, config, timeout=60) == [384, 384]
    assert capfd.readouterr().out.count(f"> padded vocab of the checkpoint in {tmp_path}: 384") == 1


def test_a_given_size_counts(tmp_path):
    save_with(tmp_path, 384)
    assert run_ranks(completed, 1, config_at(1, tmp_path, "--padded-vocab-size", "640")) == [640]


def test_without_a_checkpoint_it_follows_the_ranks(tmp_path):
    assert saved_padded_vocabulary({"load": str(tmp_path), "ckpt_step": None}) is None
    assert run_ranks(completed, 1, config_at(1, tmp_path)) == [384]


def test_a_size_that_the_ranks_do_not_divide_gets_no_further_rows(tmp_path):
    save_with(tmp_path, 258)
    assert run_ranks(completed, 2, config_at(4, tmp_path)) == [258, 258]


def test_a_check_shows_it(tmp_path, capsys):
    save_with(tmp_path, 384)
    words = [*SMALL, "--load", str(tmp_path), "--tensor-model-parallel-size"]
    with pytest.raises(SystemExit) as ended:
        launch_config([*words, "2", "--world-size", "2", "--check-config", "--json"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["padded_vocab_size"] == 384
    assert report["origin"]["padded_vocab_size"] == "checkpoint"


def test_a_damaged_checkpoint_is_left_to_its_loading(tmp_path):
    save_with(tmp_path, 384)
    manifest = tmp_path / "iter_0000010" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-10])
    assert saved_padded_vocabulary({"load": str(tmp_path), "ckpt_step": None}) is None


@pytest.mark.parametrize("by_rules", [False, True])
def test_a_checkpoint_of_a_smaller_tokenizer_is_refused_by_name(tmp_path, by_rules):
    save_with(tmp_path, 256)  # the tokenizer has 257

    def refused(ctx, config):
        torch.set_num_threads(1)
        with pytest.raises(ConfigurationError) as caught:
            session.with_vocabulary(config, ByteTokenizer(), ctx.ps)
        return str(caught.value)

    config = config_at(1, tmp_path)
    if by_rules:  # as --use-checkpoint-args leaves it
        config = config.replace(padded_vocab_size=256, origin="checkpoint")
    (told,) = run_ranks(refused, 1, config)
    assert f"the padded vocabulary of 256 of the checkpoint in {tmp_path} is smaller than" in told
    assert "use the tokenizer of that run" in told
    assert "leave it unset" not in told


def test_a_given_size_below_the_tokenizers_is_told_as_given(tmp_path):
    config = config_at(1, tmp_path).replace(padded_vocab_size=256, origin="flag")
    with pytest.raises(ConfigurationError, match=r"--padded-vocab-size 256 is smaller than .* of 257"):
        check_holds_tokenizer(config, 257)
    check_holds_tokenizer(config, 256)
