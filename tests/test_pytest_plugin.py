"""The fixture `golden` keeps digests beside the tests, and fails where results no longer have them."""

import json
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from child_processes import run_child

from accel_ops import orders
from accel_ops.errors import UnsupportedDTypeError
from accel_ops.orders import ORDER_VERSION
from accel_ops.pytest_plugin import Golden
from accel_ops.testing import digest

_PAGE = Path(__file__).resolve().parent.parent / "docs" / "testing.md"
_PYTEST = """
    import sys
    import pytest
    sys.exit(pytest.main(["-W", "error", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
SOLVER = """
    import numpy as np
    import pytest

    def test_residual(golden):
        golden.check("x", np.arange(3.0))
        golden.check("y", np.arange(4.0))

    @pytest.mark.parametrize("dtype", ["f4", "f8"])
    def test_dtypes(golden, dtype):
        golden.check("x", np.ones(2, dtype))

    class TestOfAClass:
        def test_residual(self, golden):
            golden.check("x", np.zeros(2))
"""


def _run_pytest(directory: Path, *arguments: str, status: int = 0) -> str:
    """Run the tests of a directory with the plugin, and without those that happen to be installed."""
    return run_child(
        _PYTEST,
        deadline_s=60,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": None},
        arguments=["-p", "accel_ops.pytest_plugin", "-c", str(_settings(directory)), *arguments, str(directory)],
        expected_status=status,
    )


def _settings(directory: Path) -> Path:
    path = directory / "pytest.ini"
    path.write_text("[pytest]\n")
    return path


def _write(directory: Path, text: str, name: str = "test_solver.py") -> None:
    directory.joinpath(name).write_text(textwrap.dedent(text))


def _read(directory: Path, name: str = "test_solver.golden.json") -> dict:
    return json.loads(directory.joinpath(name).read_text())


def _entry(array: np.ndarray, order_version: int = ORDER_VERSION) -> dict:
    return {"digest": digest(array), "order_version": order_version}


@pytest.fixture
def kept(tmp_path) -> Path:
    """Return a file with digests of two labels of the test "test_residual"."""
    entries = {"x": _entry(np.arange(3.0)), "old": _entry(np.arange(3.0), ORDER_VERSION - 1)}
    path = tmp_path / "test_solver.golden.json"
    path.write_text(json.dumps({"test_residual": entries}))
    return path


@pytest.mark.process
def test_digests_are_kept_and_then_compared_with(tmp_path):
    """A run with --golden-update writes one sorted entry for each test and label, with which the next run agrees."""
    _write(tmp_path, SOLVER)
    assert "4 failed" in _run_pytest(tmp_path, status=1)
    assert not (tmp_path / "test_solver.golden.json").exists()
    assert "4 passed" in _run_pytest(tmp_path, "--golden-update")
    expected = {
        "TestOfAClass::test_residual": {"x": _entry(np.zeros(2))},
        "test_dtypes[f4]": {"x": _entry(np.ones(2, "f4"))},
        "test_dtypes[f8]": {"x": _entry(np.ones(2))},
        "test_residual": {"x": _entry(np.arange(3.0)), "y": _entry(np.arange(4.0))},
    }
    text = (tmp_path / "test_solver.golden.json").read_text()
    assert text == json.dumps(expected, indent=2, sort_keys=True) + "\n"
    assert "4 passed" in _run_pytest(tmp_path)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.process
def test_an_update_leaves_all_else_alone(tmp_path):
    """Entries of tests that did not run or did not pass, and of other labels, stay as they are."""
    _write(tmp_path, SOLVER)
    others = {
        "test_residual": {"x": _entry(np.zeros(1), 0), "other label": _entry(np.zeros(1), 0)},
        "test_dtypes[f4]": {"x": _entry(np.zeros(1), 0)},
        "test_of_another_branch": {"x": _entry(np.zeros(1), 0)},
    }
    (tmp_path / "test_solver.golden.json").write_text(json.dumps(others))
    _run_pytest(tmp_path, "--golden-update", "-k", "test_residual and not TestOfAClass")
    others["test_residual"] |= {"x": _entry(np.arange(3.0)), "y": _entry(np.arange(4.0))}
    assert _read(tmp_path) == others


@pytest.mark.process
def test_what_a_failing_test_computed_is_not_kept(tmp_path):
    """Nor what a skipped one did; a fixture that checks at its end is part of its test."""
    _write(
        tmp_path,
        """
        import numpy as np
        import pytest

        @pytest.fixture
        def late(golden):
            yield
            golden.check("late", np.zeros(1))

        def test_failing(late, golden):
            golden.check("x", np.zeros(1))
            assert False

        def test_skipped(golden):
            golden.check("x", np.zeros(1))
            pytest.skip()

        def test_expected_to_fail(golden, request):
            request.applymarker(pytest.mark.xfail)
            golden.check("x", np.zeros(1))
            assert False

        def test_passing(late):
            pass
        """,
    )
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed" in _run_pytest(tmp_path, "--golden-update", status=1)
    assert _read(tmp_path) == {"test_passing": {"late": _entry(np.zeros(1))}}


@pytest.mark.process
def test_the_report_shows_the_test(tmp_path, kept):
    """And none of the plugin's own lines."""
    _write(tmp_path, SOLVER)
    kept.write_text(json.dumps({"test_residual": {"x": _entry(np.zeros(1))}}))
    report = _run_pytest(tmp_path, "-k", "test_residual and not TestOfAClass", status=1)
    assert '>       golden.check("x", np.arange(3.0))' in report
    assert "AssertionError: 'x' of test_residual must have the bits" in report
    assert "pytest_plugin.py" not in report


@pytest.mark.process
def test_naming_the_plugin_besides_its_entry_point_is_no_error(tmp_path):
    """Where the package is installed pytest finds it by itself, and may be told of it as well."""
    _write(tmp_path, SOLVER)
    arguments = ["-p", "accel_ops.pytest_plugin"] * 2 + [
        "-c",
        str(_settings(tmp_path)),
        "--golden-update",
        str(tmp_path),
    ]
    output = run_child(_PYTEST, deadline_s=60, env={"PYTEST_ADDOPTS": None}, arguments=arguments)
    assert "4 passed" in output


def test_a_missing_digest_fails(kept):
    """Whether the file, the test or the label is missing; the message has the cure."""
    cases = [(kept, "test_residual"), (kept, "test_other"), (kept.with_name("other.golden.json"), "test_residual")]
    for file, test in cases:
        expected = f"got none for 'y' of {test} in {file.name}; run `pytest --golden-update` and commit the file"
        with pytest.raises(AssertionError, match=re.escape(expected)):
            Golden(file, test, update=False).check("y", np.zeros(1))


def test_the_same_bits_pass(kept):
    """Also more than once, and in another layout."""
    golden = Golden(kept, "test_residual", update=False)
    golden.check("x", np.arange(3.0))
    golden.check("x", np.arange(0.0, 6.0, 1.0)[:3])


def test_other_bits_fail(kept):
    """With the label, both digests and the cure."""
    golden = Golden(kept, "test_residual", update=False)
    x = np.arange(3.0) + 1
    expected = (
        f"'x' of test_residual must have the bits that {kept.name} keeps, got digest {digest(x)}, "
        f"expected {digest(np.arange(3.0))}; "
    )
    with pytest.raises(AssertionError, match=re.escape(expected) + ".*run `pytest --golden-update`"):
        golden.check("x", x)


@pytest.mark.parametrize(("x", "bits"), [(np.arange(3.0), "the same"), (np.zeros(3), "different")], ids=str)
def test_digests_of_another_order_fail(kept, x, bits):
    """Whatever the bits are, which the message tells; only that label is concerned."""
    golden = Golden(kept, "test_residual", update=False)
    golden.check("x", np.arange(3.0))
    expected = (
        f"must come from order version {ORDER_VERSION} of accel_ops, got one from version {ORDER_VERSION - 1} "
        f"for 'old' of test_residual in {kept.name} ({bits} bits here); results change with the library's order: review"
    )
    with pytest.raises(AssertionError, match=re.escape(expected) + ".*changelog.*run `pytest --golden-update`"):
        golden.check("old", x)


def test_a_new_order_concerns_every_digest(kept, monkeypatch):
    """The version is the library's at the time of the check."""
    monkeypatch.setattr(orders, "ORDER_VERSION", ORDER_VERSION + 1)
    with pytest.raises(AssertionError, match=f"must come from order version {ORDER_VERSION + 1}"):
        Golden(kept, "test_residual", update=False).check("x", np.arange(3.0))


@pytest.mark.parametrize("update", [False, True])
def test_a_label_names_one_array(kept, update):
    """A second array with other bits is an error in any mode."""
    golden = Golden(kept, "test_residual", update=update)
    golden.check("x", np.arange(3.0))
    with pytest.raises(ValueError, match="a label must name one array in a test, got 'x' for a second one; give each"):
        golden.check("x", np.zeros(3))


def test_what_is_no_label_or_no_array_is_an_error(kept):
    """Rule, value received and cure."""
    golden = Golden(kept, "test_residual", update=False)
    with pytest.raises(TypeError, match=r"`label` must be a string, got array\(\[0.\]\); pass the label first"):
        golden.check(np.zeros(1), "x")
    with pytest.raises(UnsupportedDTypeError, match="whose elements are bits"):
        golden.check("x", np.array([None]))


@pytest.mark.parametrize(
    "text", ["", "<<<<<<< HEAD\n{}", "[]", '{"test": []}', '{"test": {"x": {}}}', '{"t": {"x": 1}}']
)
def test_a_damaged_file_is_an_error(tmp_path, text):
    """A conflict of merged branches, say."""
    file = tmp_path / "test_solver.golden.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="must hold JSON as `pytest --golden-update` writes it, got something else"):
        Golden(file, "test", update=False).check("x", np.zeros(1))


@pytest.mark.process
def test_an_update_does_not_overwrite_a_damaged_file(tmp_path, kept):
    """It would lose the entries of other tests."""
    _write(tmp_path, SOLVER)
    kept.write_text("<<<<<<< HEAD")
    assert "restore it, or delete it and run that" in _run_pytest(tmp_path, "--golden-update", status=1)
    assert kept.read_text() == "<<<<<<< HEAD"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.process
def test_processes_that_update_at_the_same_time_lose_nothing(tmp_path):
    """As the workers of pytest-xdist do; a reader finds a complete file at any moment."""
    source = """
        import json, os, sys
        from pathlib import Path
        from accel_ops.pytest_plugin import Golden
        file = Path(sys.argv[1])
        workers = []
        for worker in range(4):
            process = os.fork()
            if not process:
                for k in range(40):
                    golden = Golden(file, f"test_{worker}[{k}]", update=True)
                    golden.check("x", float(k))
                    golden._store()
                    json.loads(file.read_text())
                os._exit(0)
            workers.append(process)
        assert [os.waitpid(process, 0)[1] for process in workers] == [0] * 4
        print("done")
    """
    file = tmp_path / "test_solver.golden.json"
    assert run_child(source, deadline_s=60, arguments=[str(file)]) == "done\n"
    expected = {f"test_{worker}[{k}]": {"x": _entry(np.float64(k))} for worker in range(4) for k in range(40)}
    assert _read(tmp_path) == expected
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.process
def test_the_example_of_the_page_works(tmp_path):
    """What docs/testing.md shows passes once its digest is kept."""
    (block,) = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    _write(tmp_path, block, "test_model.py")
    _run_pytest(tmp_path, "--golden-update")
    assert list(_read(tmp_path, "test_model.golden.json")) == ["test_projection"]
    assert "1 passed" in _run_pytest(tmp_path)


@pytest.mark.process
def test_loading_the_plugin_loads_nothing_else(tmp_path):
    """Where the package is installed, every run of pytest loads it."""
    source = """
        import sys
        import accel_ops, pytest
        before = set(sys.modules)
        import accel_ops.pytest_plugin
        new = set(sys.modules) - before - set(sys.stdlib_module_names)
        assert new == {"accel_ops.pytest_plugin"}, new
        print("done")
    """
    assert run_child(source, deadline_s=30) == "done\n"
