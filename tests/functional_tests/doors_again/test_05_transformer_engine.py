"""Number 5: `--transformer-impl transformer_engine` is accepted with one line; what changes results stays refused."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.training.config.problems import ConfigurationError
from megatron.training.run.arguments import parse_config
from tests.harness.launch_lines import SMALL

ROOT = Path(__file__).resolve().parents[3]
TE = "--transformer-impl transformer_engine"


def refused(words):
    with pytest.raises(ConfigurationError) as caught:
        parse_config([*SMALL, *words.split()])
    return {flag for problem in caught.value.problems for flag in problem.flags}


def test_upstreams_default_is_accepted_with_one_line_and_runs_what_local_runs():
    asked, plain = parse_config([*SMALL, *TE.split()]), parse_config(SMALL)
    (line,) = asked.warnings
    assert line.startswith(f"{TE}: ")
    assert "Transformer Engine is not used" in line
    assert asked.flat() == plain.flat()
    assert asked.model.transformer_impl == "local"


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--fp8-format hybrid", {"--fp8-format"}),
        ("--fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather",
         {"--fp8-format", "--fp8-recipe", "--fp8-param-gather"}),
        ("--fp4-format e2m1", {"--fp4-format"}),
    ],
)  # fmt: skip
def test_what_changes_results_is_refused_under_its_own_flags(words, flags):
    assert refused(f"{TE} {words}") == flags


def test_other_layers_stay_refused():
    assert refused("--transformer-impl inference_optimized") == {"--transformer-impl"}


def test_the_forms_that_differ_have_a_row_each_and_are_true():
    """docs/megatron_compat.md: GELU is the exact one and --openai-gelu the tanh form; gamma less one."""
    text = (ROOT / "docs" / "megatron_compat.md").read_text()
    section = text.split("### Where Transformer Engine's layers differ\n")[1]
    rows = re.findall(r"^\| (LayerNorm|zero-centred gamma|a norm and|GELU)", section, re.MULTILINE)
    assert rows == ["LayerNorm", "zero-centred gamma", "a norm and", "GELU"]

    from megatron.core.transformer.activations import BY_FLAG, GELU

    x = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    assert torch.equal(GELU.forward(x), F.gelu(x))
    assert torch.equal(BY_FLAG["openai_gelu"].forward(x), F.gelu(x, approximate="tanh"))
    assert float((F.gelu(x) - F.gelu(x, approximate="tanh")).abs().max()) <= 5e-4
