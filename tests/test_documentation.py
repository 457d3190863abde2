"""What the documentation shows is run."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import accel_ops
from accel_ops import errors

_REPOSITORY = Path(__file__).resolve().parent.parent
_MODULES = [module.name for module in pkgutil.walk_packages(accel_ops.__path__, "accel_ops.")]
_PAGES = sorted([*(_REPOSITORY / "docs").glob("*.md"), _REPOSITORY / "README.md"])


@pytest.mark.parametrize("name", _MODULES)
def test_the_examples_of_docstrings_are_right(name):
    """Each example prints what it says."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_are_right(page):
    """Sessions print what they say, and Python blocks run from top to bottom."""
    assert doctest.testfile(str(page), module_relative=False).failed == 0
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(page), "exec"), namespace)


def test_every_public_name_is_exported_and_documented():
    """The package's names are those of __all__, each with a docstring, and functions with a runnable example."""
    public = {name for name in dir(accel_ops) if not name.startswith("_")}
    modules = {name for name in public if type(getattr(accel_ops, name)).__name__ == "module"}
    assert public - modules == set(accel_ops.__all__)
    assert list(accel_ops.__all__) == sorted(accel_ops.__all__)
    for name in accel_ops.__all__:
        value = getattr(accel_ops, name)
        assert value.__doc__, name
        if not isinstance(value, type):
            assert ">>>" in value.__doc__, name
            assert "Notes" in value.__doc__, name


def test_every_error_is_in_the_tree_of_its_module():
    """The module's docstring draws every class, and each error is a builtin that a caller would catch."""
    for name in errors.__all__:
        value = getattr(accel_ops.errors, name)
        if isinstance(value, type):
            assert name in errors.__doc__
            assert issubclass(value, Warning) or value is accel_ops.AccelOpsError or len(value.__mro__) > 4
