"""The names of the package, and that importing it is free until one of them is used."""

import subprocess
import sys

import pytest

import dbo
import dbo.public


def test_every_name_is_there_and_sorted_by_eye():
    assert dbo.__all__ == dbo.public.__all__ == sorted(set(dbo.__all__))
    assert set(dbo.__all__) <= set(dir(dbo))
    assert all(getattr(dbo, name) is getattr(dbo.public, name) for name in dbo.__all__)


@pytest.mark.parametrize("name", ["Votes_", "_private", "__wrapped__"])
def test_a_name_that_is_not_there_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'dbo' has no attribute '{name}'"):
        getattr(dbo, name)


@pytest.mark.parametrize("use", ["dbo.Vote", "dbo.context", "from dbo import *"])
def test_the_first_use_loads_what_the_import_does_not(use):
    without = "import sys, dbo, dbo.errors, dbo.config\nassert 'torch' not in sys.modules"
    code = f"{without}\n{use}\nassert 'torch' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
