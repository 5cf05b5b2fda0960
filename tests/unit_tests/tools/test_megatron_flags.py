"""Flags of Megatron's releases: how they are found, and that each has a verdict."""

import importlib.metadata
import sys
import zipfile
from pathlib import Path

import pytest

from megatron.training.config.flag_table import Arity, FlagState, spellings
from megatron.training.run.arguments import ConfigurationError, parse_config
from tests.harness.launch_lines import SMALL

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from megatron_flags import flags_of, main, without_verdict  # noqa: E402

SOURCE = '''
"""Give --num-layers, --brand-new-switch or --moe-* (but not --half- or a--b)."""

@dataclass
class TransformerConfig(ModelParallelConfig):
    num_layers: int = 0
    brand_new_size: Optional[int] = None
    masked_softmax_fusion: bool = True
    activation_func: Callable = F.gelu
    _hidden: int = 1

@dataclass
class SomethingElseConfig:
    not_a_flag: int = 1
'''
# Names of releases to come, and of those that a wheel of the core alone does not show.
NAMED = """
step-batch-size-schedule megatron-fsdp-version gtp-weight-remat-size moe-paged-stash
use-layer-wise-distributed-optimizer
"""


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "megatron_core-9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("megatron/core/config.py", SOURCE)
        file.writestr("megatron_core-9.9.dist-info/METADATA", "--not-python")
    return path


def test_names_are_those_of_strings_and_of_plain_fields(wheel):
    named = {"--num-layers", "--brand-new-switch", "--brand-new-size", "--masked-softmax-fusion"}
    assert set(flags_of(wheel)) == named


def test_what_has_no_verdict_is_told(wheel, monkeypatch, capsys):
    assert without_verdict(wheel) == ["--brand-new-size", "--brand-new-switch"]
    monkeypatch.setattr(sys, "argv", ["megatron_flags.py", str(wheel)])
    assert main() == 1
    assert "4 names, 2 without a verdict\n  --brand-new-size\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMED.split())
def test_named_flags_are_refused_with_what_to_use_and_never_guessed_at(name):
    entry = spellings()[f"--{name}"]
    assert entry.state is FlagState.UNSUPPORTED
    words = [f"--{name}", *(["2"] if entry.arity is Arity.ONE else [])]
    feature = [entry.setting_of[0], "8"] if entry.setting_of else []  # without it, it has no effect
    with pytest.raises(ConfigurationError) as caught:
        parse_config([*SMALL, *feature, *words])
    told = {problem.message: problem for problem in caught.value.problems}
    assert {problem.rule for problem in told.values()} == {"not-supported"}
    assert told[f"{' '.join(words)} is not supported"].fix == entry.fix


def test_every_flag_of_the_release_that_is_installed_has_a_verdict():
    try:
        found = importlib.metadata.distribution("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("no release of megatron-core is installed")
    assert without_verdict(Path(str(found.locate_file("megatron")))) == []
