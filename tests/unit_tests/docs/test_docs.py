"""What the documents say is there: links, files, tests, flags, commands, roadmap names."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.training.config.flag_table import flag_table, spellings
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import ConfigurationError
from megatron.training.guard.exit_status import ExitStatus
from megatron.training.run.arguments import parse_config

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SCRIPTS = sorted([*(ROOT / "examples").rglob("*.sh"), *(ROOT / "examples").rglob("*.sbatch")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
SOURCE_PATH = re.compile(
    r"`((?:megatron|core|training|tools|tests|examples|benchmarks|docs)/[\w/{},.-]*\.(?:py|sh|md|sbatch))(?:::(\w+))?`"
)
MISSING_FILES_RULES = {"files"}

# Flags in the documents that belong to other programs.
OTHER_PROGRAMS = {
    "torchrun": "--standalone --nproc-per-node --nnodes --rdzv-id --rdzv-backend --rdzv-endpoint --max-restarts "
    "--shutdown-timeout --local-addr --no-python --signals-to-handle",
    "nsys": "--capture-range --capture-range-end",
    "slurm": "--signal --nodes --time --gpus-per-node --partition --wait --array",
    "apptainer": "--nv --bind",
    "docker": "--gpus --init --memory --shm-size --ulimit",
    "ruff": "--check",
    "examples/custom_trainer": "--context-tokens",
}
# Words in the documents that are no flags: slips that a reader might type, placeholders, and what an example adds.
NO_FLAGS = {"--hiden-size", "--weigth-decay", "--no-x", "--disable-x", "--relu"}


def name(path):
    return str(path.relative_to(ROOT))


def prose(path):
    """A document without its HTML comments."""
    return re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL)


def anchors(path):
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", re.sub(FENCE, "", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_relative_links_resolve(path):
    broken = []
    for target in LINK.findall(re.sub(FENCE, "", prose(path))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken, f"{name(path)} links to what is not there: {broken}"


def expanded(text):
    """The paths that a path with {a,b} stands for."""
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_files_and_tests_that_are_named_exist(path):
    missing = []
    for text, function in SOURCE_PATH.findall(prose(path)):
        for file in expanded(text):
            found = next((base / file for base in (ROOT, ROOT / "megatron") if (base / file).exists()), None)
            if found is None:
                missing.append(file)
            elif function and f"def {function}(" not in found.read_text():
                missing.append(f"{file}::{function}")
    assert not missing, f"{name(path)} names what is not there: {missing}"


def test_tour_and_readme_list_the_same_ten_files():
    first_links = [
        re.findall(r"^\d+\. +\[([^\]]+)\]", document.read_text(), re.MULTILINE)
        for document in (ROOT / "README.md", ROOT / "docs" / "tour.md")
    ]
    assert first_links[0] == first_links[1]
    assert len(first_links[0]) == 10
    assert all((ROOT / file).is_file() for file in first_links[0])


def flags_in(text):
    """Flags that a text names; --a-b/c-d stands for --a-b-d and --a-c-d."""
    both = re.sub(r"--((?:[a-z]+-)*)([a-z]+)/([a-z]+)(-[\w-]+)", r"--\1\2\4 --\1\3\4", text)
    return set(FLAG.findall(both))


def flags_of_our_programs():
    """Flags of tools, benchmarks and examples, from their sources."""
    sources = [
        path
        for folder in ("tools", "benchmarks", "examples", "extras")
        for path in (ROOT / folder).rglob("*.py")
    ]
    found = {flag for path in sources for flag in re.findall(r'"(--[\w-]+)[ "]', path.read_text())}
    # benchmarks/single_process makes some of its flags in a loop
    looped = "layers hidden heads seq vocab".split()
    return found | {"--" + word for word in looped}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_flags_are_known(path):
    known = set(spellings()) | flags_of_our_programs() | NO_FLAGS | {"--help", "--version"}
    known |= {flag for flags in OTHER_PROGRAMS.values() for flag in flags.split()}

    def is_known(flag):
        # "--lr-warmup-*" stands for all flags that begin so
        return any(one.startswith(flag) for one in known) if flag.endswith("-") else flag in known

    unknown = sorted({flag for flag in flags_in(prose(path)) if not is_known(flag)})
    assert not unknown, f"{name(path)} mentions flags that nothing knows: {unknown}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_blocks_compile(path):
    for language, code in FENCE.findall(path.read_text()):
        if language == "python":
            ast.parse(code)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_numbers_still_to_be_measured_are_comments(path):
    assert "FILL" not in prose(path)
    for comment in re.findall(r"<!-- FILL(.*?)-->", path.read_text(), re.DOTALL):
        assert comment.startswith(": "), f"{name(path)}: FILL without its command: {comment!r}"


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_example_scripts_are_shell(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert os.access(path, os.X_OK) or path.suffix == ".sbatch", f"{name(path)} is not executable"


def problems_of(words, ranks):
    """What is wrong with a launch line but for files that are not here."""
    try:
        parse_config(words, env=LaunchEnv(world_size=ranks, local_world_size=ranks))
    except ConfigurationError as error:
        return [str(problem) for problem in error.problems if problem.rule not in MISSING_FILES_RULES]
    return []


def words_after_trainer(arguments):
    """(words of pretrain_gpt.py, ranks) of a torchrun command's arguments."""
    trainer = arguments.index("train" if "train" in arguments else "pretrain_gpt.py")
    ranks = int(arguments[arguments.index("--nproc-per-node") + 1])
    nodes = int(arguments[arguments.index("--nnodes") + 1]) if "--nnodes" in arguments else 1
    return arguments[trainer + 1 :], ranks * nodes


@pytest.fixture
def stub_path(tmp_path):
    """A PATH on which torchrun and megatron-zero only say what they were called with; srun runs a node's launcher."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for command, script in {
        **dict.fromkeys(("torchrun", "megatron-zero"), 'printf "%s\\0" "$@"'),
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "scontrol": "echo node1",
    }.items():
        (bin_folder / command).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (bin_folder / command).chmod(0o755)
    return f"{bin_folder}{os.pathsep}{os.environ['PATH']}"


SMALL_MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type ByteTokenizer --save-interval 5"
).split()


@pytest.mark.parametrize(
    ("script", "arguments", "ranks"),
    [
        ("gpt3/train_gpt3_345m.sh", ["corpus", "ckpt", "8"], 8),
        ("llama3/train_llama3_1b.sh", ["corpus", "ckpt", "tokenizer", "16"], 16),
        ("slurm/train.sbatch", ["ckpt", *SMALL_MODEL], 16),
    ],
)
@pytest.mark.parametrize(
    "cut",
    [{}, {"TP": "2"}, {"PP": "4", "CHUNKS": "2"}, {"TP": "2", "PP": "2"}],
    ids=lambda cut: " ".join(cut) or "-",
)
def test_launch_lines_of_examples_are_accepted(script, arguments, ranks, cut, stub_path, tmp_path):
    variables = {
        **cut,
        "PATH": stub_path,
        "SLURM_JOB_ID": "1",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "8",
    }
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / script), *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **variables},
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    words, started = words_after_trainer(done.stdout.split("\0")[:-1])
    assert started == ranks
    assert not problems_of(words, ranks)
    if "slurm" not in script:  # whose words are the caller's
        for variable, flag in (
            ("TP", "--tensor-model-parallel-size"),
            ("PP", "--pipeline-model-parallel-size"),
        ):
            assert words[words.index(flag) + 1] == cut.get(variable, "1")
        assert ("--sequence-parallel" in words) == ("TP" in cut)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--data-parallel-sharding-strategy", "optim", "--bf16"),
        ("--num-distributed-optimizer-instances", "2"),
    ],
    ids=" ".join,
)
def test_sharded_launch_line_is_accepted_and_passes_flags_on(flags, stub_path, tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "custom_fsdp" / "pretrain.sh"), *flags],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": stub_path, "RANKS": "4"},
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    words, started = words_after_trainer(done.stdout.split("\0")[:-1])
    assert started == 4
    assert not problems_of(words, started)
    assert words[0] == "--use-custom-fsdp"
    assert words[len(words) - len(flags) :] == list(flags)


def test_quickstart_trains_sharded_in_a_zero_bubble_pipeline(tmp_path):
    (tmp_path / "python").write_text('#!/usr/bin/env bash\nprintf "%s " "$@"; echo\n')
    (tmp_path / "python").chmod(0o755)
    variables = {**os.environ, "PYTHON": str(tmp_path / "python"), "RUN_DIR": str(tmp_path / "run")}
    script = ROOT / "examples" / "quickstart" / "run.sh"
    told = subprocess.run([str(script)], capture_output=True, text=True, env=variables, timeout=30).stdout
    first, second = (
        words_after_trainer(line.split()) for line in told.splitlines() if "pretrain_gpt" in line
    )
    assert first == ([*second[0], "--exit-interval", "120"], 4)
    config = parse_config(second[0], env=LaunchEnv(world_size=4, local_world_size=4), needs_data=False)
    assert (config.parallel.pipeline_model_parallel_size, config.ddp.use_custom_fsdp) == (2, True)
    assert config.ddp.data_parallel_sharding_strategy == "optim_grads_params"
    assert {"--zero-bubble-v-schedule", "--enable-optimizer-post-validation"} <= set(second[0])
    assert told.count(f"timeline {tmp_path}/run/timeline") == 3, "written in both runs, and drawn"


def documented_launch_lines():
    """Every command in the documents that starts pretrain_gpt.py with a whole model."""
    for path in DOCUMENTS:
        for _, code in FENCE.findall(path.read_text()):
            for line in code.replace("\\\n", " ").splitlines():
                trainer = re.search(
                    r"(torchrun|distributed\.run) .*pretrain_gpt\.py |launch(\.py)? .*-- (train|pretrain_gpt\.py) ",
                    line,
                )
                if trainer and "--num-layers" in line:
                    yield pytest.param(line, id=f"{name(path)}: {line.split('--')[0]}")


@pytest.mark.parametrize("line", list(documented_launch_lines()))
def test_launch_lines_of_documents_are_accepted(line):
    words, ranks = words_after_trainer(shlex.split(line))
    assert not problems_of(words, ranks)


def test_quickstart_page_explains_the_flags_that_the_script_gives():
    script = (ROOT / "examples" / "quickstart" / "run.sh").read_text().split()
    table = [
        line
        for line in (ROOT / "docs" / "quickstart.md").read_text().splitlines()
        if line.startswith("| `--")
    ]
    explained = [span.split() for line in table for span in re.findall(r"`(--[^`]+)`", line)]
    assert len(explained) >= 6
    absent = [word for words in explained for word in words if word != "..." and word not in script]
    assert not absent, f"docs/quickstart.md explains what examples/quickstart/run.sh does not give: {absent}"


def test_roadmap_has_a_heading_for_every_name_that_a_refusal_tells():
    named = {
        why.removeprefix("roadmap: ")
        for entry in flag_table().values()
        for why in (entry.why, entry.elsewhere_why)
        if why.startswith("roadmap: ")
    }
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "roadmap.md").read_text(), re.MULTILINE)
    assert named, "no flag names the roadmap any more"
    assert named <= set(headings), f"not on the roadmap: {sorted(named - set(headings))}"


def test_readme_names_the_exit_statuses_by_their_numbers():
    text = " ".join((ROOT / "README.md").read_text().split())
    for status, words in {
        ExitStatus.DONE: "done",
        ExitStatus.CONFIGURATION: "configuration",
        ExitStatus.CHECKPOINT: "checkpoint",
        ExitStatus.DATA: "data",
        ExitStatus.NON_FINITE: "not finite",
        ExitStatus.PEER_LOST: "a lost rank",
        ExitStatus.STOPPED: "stopped by a signal",
    }.items():
        assert f"{int(status)} {words}" in text


def test_documents_say_nothing_of_any_one_machine():
    for path in [*DOCUMENTS, *SCRIPTS]:
        found = re.findall(r"/root/|/home/|/tmp/", path.read_text())
        assert not found, f"{name(path)}: {found}"
