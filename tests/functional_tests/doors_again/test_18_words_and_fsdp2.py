"""Number 18: a page for who comes from FSDP2, whose example runs; the words people search for lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.harness.ranks import run_ranks
from tests.harness.sharded_training import Net, seeded, tokens

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGE = (DOCS / "from_fsdp2.md").read_text()
WORDS = ("gradient checkpointing", "gradient accumulation", "flash attention", "torch.compile", "docker")
WORDS += ("streaming", "lm-eval")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def module(code, path):
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def both_loops(folder):
    """FSDP2's as the page prints it, and ours: its diffs applied."""
    theirs = re.search(r"```python\n(# train\.py\n.*?)```", PAGE, re.DOTALL)[1]
    ours = theirs
    diffs = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert diffs
    for diff in diffs:
        lines = diff.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        assert ours.count(old) == 1, old
        ours = ours.replace(old, new)
    return module(theirs, folder / "fsdp2_loop.py"), module(ours, folder / "our_loop.py")


def trained_both_ways(ctx, loops):
    steps = [[tokens(100 * step + 10 * index + ctx.rank) for index in range(2)] for step in range(3)]
    return [loop.train(seeded(Net, 0), steps) for loop in loops]


def test_the_ported_loop_trains_as_fsdp2_does(tmp_path):
    for rank, (theirs, ours) in enumerate(run_ranks(trained_both_ways, 2, both_loops(tmp_path))):
        for name, expected, found in zip(("losses", "norms"), theirs, ours, strict=True):
            assert found == pytest.approx(expected, rel=1e-5), f"rank {rank}: {name}"
        losses, norms = ours
        assert losses[0] != losses[1]
        assert max(norms) > 0.5, f"nothing was clipped: {norms}"


def anchors(path):
    headings = re.findall(r"^#+ +(.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_is_searched_for_leads_somewhere(word):
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", (DOCS / "README.md").read_text(), re.MULTILINE)
    entries = [row for row in rows if word in row[0].lower()]
    assert len(entries) == 1, f"{word} has no entry of its own"
    links = LINK.findall(entries[0][1])
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        assert (DOCS / file).is_file(), link
        assert not anchor or anchor in anchors(DOCS / file), link


def test_the_front_pages_lead_to_it():
    assert "(docs/from_fsdp2.md)" in (ROOT / "README.md").read_text()
    assert "(from_fsdp2.md)" in (DOCS / "README.md").read_text()


def test_megatron_compat_lists_what_is_not_there():
    """Every heading that a refused flag names."""
    from megatron.training.config.flag_table import FlagState, flag_table

    section = (DOCS / "megatron_compat.md").read_text().split("\n## What is not here\n")[1].split("\n## ")[0]
    named = {
        entry.why.removeprefix("roadmap: ")
        for entry in flag_table().values()
        if entry.state is FlagState.UNSUPPORTED and entry.why.startswith("roadmap: ")
    }
    listed = {link.partition("#")[2] for link in LINK.findall(section)}
    missing = {name for name in named if name.lower().replace(" ", "-") not in listed}
    assert not missing, f"docs/megatron_compat.md does not list {sorted(missing)}"
