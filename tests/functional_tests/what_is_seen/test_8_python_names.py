"""Line 8: the table of Megatron's Python names: each is there, or says what to use; asking raises nothing."""

import importlib
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import megatron.core.distributed
import megatron.core.tensor_parallel.random
from megatron.compat.names import paths, rows_of
from tools import generate_names

ROOT = Path(__file__).resolve().parents[3]


def rows_at(path):
    """(name, home, what to use instead), those of the path that it stands for too."""
    for row in (row for row in rows_of("names.csv") if row["path"] == path):
        if row["home"] in paths():
            yield from rows_at(row["home"])
        else:
            names = importlib.import_module(row["home"]).__all__ if row["name"] == "*" else [row["name"]]
            yield from ((name, row["home"], row["instead"]) for name in names)


@pytest.mark.parametrize("path", sorted(paths()))
def test_each_row_is_a_name_or_says_what_to_use(path):
    module = importlib.import_module(path)
    for name, home, instead in rows_at(path):
        if instead:
            for statement in (f"from {path} import {name}", f"import {path}.{name}.anything"):
                with pytest.raises(ImportError, match="is not here") as error:
                    exec(statement)
                assert instead in str(error.value)
            with pytest.raises(AttributeError) as error:  # so that hasattr and a default of getattr work
                getattr(module, name)
            assert instead in str(error.value) or "__getattr__" not in vars(module)
            continue
        expected, found = getattr(importlib.import_module(home), name), getattr(module, name)
        if isinstance(
            found, types.ModuleType
        ):  # imported, a path takes the place of its function, which it calls
            found = getattr(found, name)
        assert found is expected  # one meaning: no module of ours has another thing of this name


def test_every_module_of_ours_at_a_path_of_megatrons_passes_unknown_names_on():
    for path in {row["path"] for row in rows_of("names.csv") if row["home"]}:
        assert "__getattr__" in vars(importlib.import_module(path)), path


def test_names_that_no_row_knows():
    import megatron.core.optimizer

    assert not hasattr(megatron.core.optimizer, "get_nothing")
    with pytest.raises(ImportError, match=r"get_nothing is not here: docs/megatron_compat\.md"):
        from megatron.core.optimizer import get_nothing  # noqa: F401


def test_function_and_module_of_one_name():
    from megatron.core.distributed import finalize_model_grads

    with pytest.raises(ValueError, match="wrap the model"):
        finalize_model_grads([torch.nn.Linear(1, 1)])
    importlib.import_module("megatron.core.distributed.finalize_model_grads")
    with pytest.raises(ValueError, match="wrap the model"):
        megatron.core.distributed.finalize_model_grads([torch.nn.Linear(1, 1)])


def test_paths_below_a_module_are_names_of_it():
    assert megatron.core.mpu.get_data_parallel_rank is megatron.core.parallel_state.get_data_parallel_rank
    assert not hasattr(megatron.core, "extensions")


def test_asking_whether_a_name_is_there_raises_nothing():
    assert not hasattr(megatron.core.distributed, "FullyShardedDataParallel")
    assert getattr(megatron.core.tensor_parallel.random, "get_cuda_rng_tracker", None) is None
    for path in ("megatron.core.extensions", "megatron.core.transformer.moe", "megatron.core.nothing"):
        assert importlib.util.find_spec(path) is None
    assert importlib.util.find_spec("megatron.core.parallel_state") is not None
    assert sys.meta_path[-1].find_spec("megatron.core.extensions") is None  # as a search of one's own asks it
    with pytest.raises(AttributeError, match=r"torch\.distributed"):
        megatron.core.parallel_state.get_data_parallel_group_gloo()


def test_the_documentation_has_the_table():
    text = generate_names.DOCS.read_text()
    assert generate_names.with_table(text) == text, "run python tools/generate_names.py"


MODELOPT = """
import importlib, sys, types
def guarded(*names):  # as modelopt's plugins: a module that is missing turns a plugin off
    for name in names:
        try:
            importlib.import_module(name)
            print(name, "on")
        except ModuleNotFoundError:
            print(name, "off")
guarded("megatron.core.extensions.transformer_engine", "megatron.core.transformer.moe.experts")
"""


def test_guarded_imports_of_plugins_find_them_off():
    found = subprocess.run(
        [sys.executable, "-c", MODELOPT], capture_output=True, text=True, cwd=ROOT, check=True
    )
    states = dict(line.split() for line in found.stdout.splitlines())
    assert states["megatron.core.extensions.transformer_engine"] == "off"
    assert states["megatron.core.transformer.moe.experts"] == "off"
