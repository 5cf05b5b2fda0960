"""Shown 2: twenty launch lines as they are published. Dense ones, and Mixtral, are accepted; every refusal of the
others names a capability that is on the roadmap."""

import re
import shlex
from pathlib import Path

import pytest

from megatron.training.config.problems import ConfigurationError
from megatron.training.run.arguments import parse_config

ROOT = Path(__file__).resolve().parents[3]
HEADING = re.compile(r"^\[(\S+)\] (\d+):(.*)$")
ON_ROADMAP = re.compile(r"docs/roadmap\.md, '([^']+)'")


def read_lines():
    """name -> (ranks, what it is refused for, words)."""
    found, name = {}, None
    for line in (Path(__file__).parent / "data" / "launch_lines.txt").read_text().splitlines():
        if heading := HEADING.match(line):
            name, why = heading[1], {word.strip() for word in heading[3].split(",")} - {""}
            found[name] = (heading[2], why, [])
        elif line and not line.startswith("#"):
            found[name][2].extend(shlex.split(line))
    return found


LINES = read_lines()


def problems_of(name):
    ranks, _, words = LINES[name]
    try:
        parse_config([*words, "--check-config", "--world-size", ranks])
    except ConfigurationError as error:
        return error.problems
    return ()


def test_they_are_twenty_and_thirteen_of_them_are_dense_or_have_experts_alone():
    assert len(LINES) == 20
    assert sum(not why for _, why, _ in LINES.values()) == 13


@pytest.mark.parametrize("name", [name for name, (_, why, _) in LINES.items() if not why])
def test_a_line_of_what_is_here_is_accepted(name):
    assert [str(problem) for problem in problems_of(name)] == []


@pytest.mark.parametrize("name", [name for name, (_, why, _) in LINES.items() if why])
def test_each_refusal_names_what_the_roadmap_has(name):
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "roadmap.md").read_text(), re.MULTILINE)
    problems = problems_of(name)
    told = [ON_ROADMAP.search(f"{problem.message}; {problem.fix}") for problem in problems]
    assert all(told), [str(problem) for problem, found in zip(problems, told, strict=True) if not found]
    named = {found[1] for found in told}
    assert named == LINES[name][1]
    assert named <= set(headings)
