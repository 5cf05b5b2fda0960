"""Who may do what, read from the source (docs/architecture.md): import-linter holds the rest."""

import ast
import collections
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for pattern in ("megatron/**/*.py", "tools/*/*.py", "pretrain_gpt.py")
    for path in sorted(ROOT.glob(pattern))
}
COLLECTIVES = (
    "all_reduce all_gather all_gather_into_tensor all_gather_object reduce_scatter reduce_scatter_tensor "
    "broadcast "
    "broadcast_object_list all_to_all all_to_all_single monitored_barrier reduce gather scatter "
    "all_gather_single reduce_scatter_single send recv isend irecv send_object_list recv_object_list batch_isend_irecv"
).split()


def files_where(found):
    """Files with a syntax node for which `found` holds."""
    return {name for name, tree in SOURCES.items() if any(found(node) for node in ast.walk(tree))}


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def imports(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_only_launch_env_reads_the_environment():
    names = ("os.environ", "os.getenv", "os.putenv")
    assert files_where(lambda node: dotted(node) in names) == {"megatron/training/config/launch_env.py"}


def test_only_optional_probes_packages():
    found = files_where(lambda node: dotted(node) == "importlib.util.find_spec")
    assert found == {"megatron/core/optional.py"}


@pytest.mark.parametrize("prefix", ["dist", "torch.distributed"])
def test_only_collectives_calls_collectives_and_only_parallel_state_makes_groups(prefix):
    calls = {f"{prefix}.{name}" for name in COLLECTIVES}
    both = {"megatron/core/transport/collectives.py", "megatron/core/transport/point_to_point.py"}
    assert files_where(lambda node: dotted(node) in calls) <= both
    meeting = files_where(lambda node: dotted(node) == f"{prefix}.barrier")  # groups are closed together
    assert meeting <= {"megatron/core/transport/collectives.py", "megatron/core/transport/parallel_state.py"}
    groups = {f"{prefix}.{name}" for name in ("new_group", "init_process_group", "init_device_mesh")}
    assert files_where(lambda node: dotted(node) in groups) <= {"megatron/core/transport/parallel_state.py"}


def test_only_gloo_pairs_sends_over_a_process_group_by_itself():
    """`ProcessGroup.send(tensors, peer, tag)` takes three arguments; sockets, pipes and our own channels take fewer.
    `point_to_point.P2PRoute` keeps the method itself."""

    def sends(node):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        return called and node.func.attr in ("send", "recv", "recv_anysource") and len(node.args) == 3

    assert files_where(sends) == {"megatron/core/transport/gloo_pairs.py"}


def test_nothing_unpickles_evaluates_or_executes():
    pickles = files_where(
        lambda node: any(name.split(".")[0] in ("pickle", "dill", "marshal") for name in imports(node))
    )
    assert pickles == set()  # inert_pickle carries opcodes out by itself
    assert not files_where(
        lambda node: (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("eval", "exec")
        )
    )


def test_packages_import_nothing_eagerly():
    eager = {
        name
        for name, tree in SOURCES.items()
        if name.endswith("__init__.py")
        for node in tree.body
        if any(module.split(".")[0] in ("torch", "numpy", "megatron") for module in imports(node))
    }
    assert not eager


OPENING = {
    "open",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "from_file",
    "load",
    "save",
    "fromfile",
    "tofile",
}
OPENING_OF = {"tempfile", "shutil", "mmap"}
OPENERS = {
    "megatron/core/safe_files.py": "the helper itself",
    "megatron/core/machine.py": "figures of /proc, of this process too, and of the control group",
    "megatron/core/transport/shared_memory.py": "the memory of ranks in /proc, and whether they run",
    "megatron/training/guard/console.py": "a descriptor that leads nowhere",
    "megatron/training/guard/lease_holder.py": "a file without a name, for the file system's time; processes in /proc",
    "megatron/training/guard/startup_check.py": "the sources of this very program",
    "megatron/core/dist_checkpointing/files.py": "new files of this save, hashed on the way",
    "megatron/core/dist_checkpointing/commit.py": "the manifest that this save has written",
    "tools/cases/running.py": "a checkpoint of this repository, copied for a case",
    "tools/cases/launchers.py": "the log of a job of its own that has failed",
}


def opens_a_file(node):
    """Calls that open a file by its path: not those of the helper, nor methods of ours that share a name."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "open"
    name = dotted(node.func)
    base, _, last = name.rpartition(".")
    if isinstance(node.func, ast.Attribute) and not name:  # of an expression: Path(...).open()
        return node.func.attr in OPENING - {"load", "save"}
    ours = base.split(".")[0] in ("self", "safe_files") or base.endswith(("checkpoints", "checkpointer"))
    return (base in OPENING_OF and last not in ("rmtree", "which", "disk_usage")) or (
        last in OPENING and not ours
    )


def test_only_safe_files_opens_files():
    """[Note: planted files] in safe_files says why; who is left out reads what only this machine or program writes."""
    assert files_where(opens_a_file) == set(OPENERS)


MOST_FILES_A_FOLDER, MOST_LINES_A_FUNCTION, MOST_LINES_A_FILE = 20, 60, 360
MOST_LINES_AN_ARCHITECTURE = 80
PACKAGE = {name: tree for name, tree in SOURCES.items() if "/" in name}


def length(name):
    return (ROOT / name).read_text().count("\n")


def test_rooms_stay_small():
    """Files of more than five lines, by folder; functions; files."""
    folders = collections.Counter(Path(name).parent for name in PACKAGE if length(name) > 5)
    crowded = {str(folder): number for folder, number in folders.items() if number > MOST_FILES_A_FOLDER}
    functions = [
        (name, node.name, node.end_lineno - node.lineno + 1)
        for name, tree in PACKAGE.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert not crowded
    assert not [one for one in functions if one[2] > MOST_LINES_A_FUNCTION]
    assert not [name for name in PACKAGE if length(name) > MOST_LINES_A_FILE]
    architectures = [name for name in PACKAGE if name.startswith("megatron/interchange/architectures/")]
    assert len(architectures) > 5
    assert not [name for name in architectures if length(name) > MOST_LINES_AN_ARCHITECTURE]


def test_no_two_classes_have_one_name():
    homes = collections.defaultdict(list)
    for name, tree in PACKAGE.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    assert not {name: files for name, files in homes.items() if len(files) > 1}
