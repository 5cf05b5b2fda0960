"""README opens with pictures of its own, and the recipes of docs/recipes.md run as they are printed."""

import json
import math
import re
import shlex
import shutil
from xml.etree import ElementTree

import pytest

from tests.harness import corpus
from tests.harness.launch import ROOT, metrics_lines, run_forked
from tools.commands import COMMANDS

README = (ROOT / "README.md").read_text()
RECIPES = (ROOT / "docs" / "recipes.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ASKED_FOR = (
    "Own data, end to end",
    "Choose a layout",
    "Fine-tune",
    "Perplexity of a model on your text",
    "Continue under another layout",
    "Out of memory",
    "See where the time goes",
    "Custom data sets",
    "Move a Megatron trainer's Python",
    "Questions",
)
# Commands that the rest of the suite runs in another form, or that take more than a second or two each.
LONG = ("generate.py", "show_schedule.py", "--check-config", "--log-pipeline-timeline", "--timeline")


def section(text, heading):
    return text.split(f"## {heading}\n")[1].split("\n## ")[0]


def commands():
    """(words, status that the text promises) of each command line, in order. Arrays of the shell are put in."""
    arrays, found = {}, []
    for language, code in FENCE.findall(RECIPES):
        if language != "bash":
            continue
        for name, words in re.findall(r"^(\w+)=\((.*?)\)\n", code, re.MULTILINE | re.DOTALL):
            arrays[name] = words.replace("\n", " ")
        code = re.sub(r"^\w+=\(.*?\)\n", "", code, flags=re.MULTILINE | re.DOTALL)
        for line in code.replace("\\\n", " ").splitlines():
            line = re.sub(r'"\$\{(\w+)\[@\]\}"', lambda match: arrays[match[1]], line)
            promised = re.search(r"# ends with status (\d)", line)
            found.append((shlex.split(line, comments=True), int(promised[1]) if promised else 0))
    return found


def run_command(words, cwd):
    """One command as a shell would run it, without starting Python anew."""
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
    if "tools/launch.py" in words:
        words = words[words.index("--") + 1 :]
    at = next(index for index, word in enumerate(words) if word.endswith(".py"))
    script = words[at] if (ROOT / words[at]).exists() else str(cwd / words[at])
    flags, _, out = " ".join(map(shlex.quote, words[at + 1 :])).partition(" '>' ")
    done = run_forked(shlex.split(flags), script=script, ranks=ranks, cwd=cwd, env={"PYTHONPATH": str(ROOT)})
    if out:
        (cwd / out).write_text(done.output)
    return done


@pytest.mark.grid
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_recipes_run_in_order_in_an_empty_folder(whole, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    corpus.write(tmp_path / "docs")
    (tmp_path / "runs" / "recipes").mkdir(parents=True)
    for language, code in FENCE.findall(RECIPES):
        if language == "python" and code.startswith("# runs/"):
            (tmp_path / code.split("\n")[0].removeprefix("# ")).write_text(code)
    outputs = {}
    for words, status in commands():
        if whole or not any(part in word for part in LONG for word in words):
            done = run_command(words, tmp_path)
            assert done.status == status, f"{shlex.join(words)}\n{done.output}"
            outputs[shlex.join(words)] = done.output
    assert len(outputs) >= 10

    losses = {
        line["iteration"]: line["lm loss"]
        for line in metrics_lines(tmp_path / "runs/recipes/own")
        if "lm loss" in line
    }
    assert losses[1] > 5.9
    assert losses[80] < 2.0, "words are learned: by their frequencies alone bytes have 2.9 nats"
    assert abs(losses[81] - losses[80]) < 0.3, "the loss goes on where it was, under tensor parallel ranks"
    assert abs(losses[86] - losses[85]) < 0.3, "and as a pipeline"
    counting = next(output for line, output in outputs.items() if "train_counting" in line)
    assert [float(loss) < 0.3 for loss in re.findall(r"40/.*?lm loss: (\S+)", counting)] == [True]
    figures = next(output for line, output in outputs.items() if "evaluate.py" in line).splitlines()[-1]
    bits = losses[80] / math.log(2)
    assert abs(json.loads(figures)["bits_per_byte"] - bits) < 0.3, "a byte is a token"
    loop = next(output for line, output in outputs.items() if "train_loop" in line)
    assert [float(loss) < 2.5 for loss in re.findall(r"step 20: lm loss (\S+)", loop)] == [True]
    assert any("loading checkpoint from runs/recipes/own at iteration 80" in one for one in outputs.values())
    assert any("   gathered  " in output for output in outputs.values()), "the table of --log-fsdp-ledger"


def test_every_recipe_that_was_asked_for_is_there_and_listed():
    contents = re.findall(r"^\d+\. \[(.+?)\]", RECIPES, re.MULTILINE)
    assert contents == re.findall(r"^## (.+)$", re.sub(FENCE, "", RECIPES), re.MULTILINE)
    assert set(ASKED_FOR) <= set(contents)


def test_the_quickstart_ends_with_its_report():
    assert (
        section(README, "First run in five minutes").rstrip().endswith("**open runs/quickstart/report.html**")
    )
    script = (ROOT / "examples/quickstart/run.sh").read_text().splitlines()
    assert script[-1] == 'echo "== done: open $RUN_DIR/report.html"'


PICTURES = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*\bsrc=\"([^\"]+)\"", README)


def test_pictures_are_its_own_and_ask_nobody_for_anything():
    files = [one or other for one, other in PICTURES]
    assert len(files) >= 2
    assert README.index(files[0]) < README.index("\n## "), "a picture opens the page"
    for file in files:
        assert file.startswith("docs/"), f"{file}: a badge or a picture from elsewhere"
        text = (ROOT / file).read_text()
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        asked = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
        assert not re.search(r"https?:|//\w|url\((?!#)|<script|<image|<foreignObject|@import", asked), file


def test_readme_says_what_it_cannot_live_beside():
    plain = " ".join(README.split())
    assert "does not live beside the `megatron-core` wheel" in plain


def test_readme_lists_the_commands_and_their_scripts():
    rows = re.findall(r"^\| (`[^|]+`) \| (`[^|]+`) \|", section(README, "Install"), re.MULTILINE)
    listed = {
        name: script
        for names, scripts in rows
        for name, script in zip(re.findall("`(.+?)`", names), re.findall("`(.+?)`", scripts), strict=True)
    }
    assert listed == {name: " ".join([one.script, *one.flags]) for name, one in COMMANDS.items()}
