import json

import pytest

from megatron.core.optional import MissingPackageError, available, require


def test_present_package_is_imported():
    assert available("json")
    assert require("json", "cli") is json


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.sub", "json.no_such_module"])
def test_missing_package_names_the_pip_line(module):
    assert not available(module)
    with pytest.raises(MissingPackageError, match=r"pip install 'megatron-zero\[hf\]'") as error:
        require(module, "hf")
    assert module in str(error.value)
    assert isinstance(error.value, ValueError)
