"""A pytest plugin: the fixture ``golden`` keeps digests of results beside the tests, and compares with them.

The digests of ``test_solver.py`` lie in ``test_solver.golden.json``. Each is kept with the version of the order of
operations (`accel_ops.orders.ORDER_VERSION`) that made it, because that is what a change of bits must be held against.

It is loaded where a conftest.py names it, ``pytest_plugins = ["accel_ops.pytest_plugin"]``, and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Golden", "golden", "pytest_addoption", "pytest_runtest_call"]

_passed = pytest.StashKey[bool]()


class _Entry(NamedTuple):
    digest: str
    order_version: int


_Entries = dict[str, dict[str, _Entry]]  # by test, then by label


class Golden:
    """What the fixture ``golden`` gives a test. It is made by the fixture only."""

    def __init__(self, file: Path, test: str, *, update: bool) -> None:
        self._file = file
        self._test = test
        self._update = update
        self._checked: dict[str, _Entry] = {}

    def check(self, label: str, array: ArrayLike) -> None:
        """Compare the digest of an array with the one that is kept for this test and label.

        Parameters
        ----------
        label : str
            Names the array within the test.
        array : array_like
            Any shape, and any dtype without Python objects.

        Raises
        ------
        AssertionError
            No digest is kept, another one is, or it was made by another version of the order of operations.
        ValueError
            The label has already been used in this test for an array with other bits, or the file is damaged.
        TypeError
            The label is not a string, or `accel_ops.testing.digest` does not take the array.

        Notes
        -----
        *Determinism:* see `accel_ops.testing.digest`. The name of the test includes its class and the id of its
        parameters. With ``--golden-update`` nothing is compared; when the test has passed, its digests are added to
        the file or replaced there, each with the version of the order that made it, and all else in the file stays.

        *Threads:* everything happens on the calling thread. Processes may update one file at the same time.

        Examples
        --------
        >>> import numpy as np
        >>> import accel_ops as ops
        >>> def test_product(golden):
        ...     golden.check("unit matrix", ops.matmul(np.eye(3), np.eye(3)))
        """
        __tracebackhide__ = True  # the report points at the test
        from accel_ops.orders import ORDER_VERSION
        from accel_ops.testing import digest

        if not isinstance(label, str):
            msg = f"`label` must be a string, got {label!r}; pass the label first and then the array"
            raise TypeError(msg)
        entry = _Entry(digest(array), ORDER_VERSION)
        if self._checked.setdefault(label, entry) != entry:
            msg = f"a label must name one array in a test, got {label!r} for a second one; give each its own label"
            raise ValueError(msg)
        if not self._update:
            _compare(entry, _read(self._file).get(self._test, {}).get(label), f"{label!r} of {self._test}", self._file)

    def _store(self) -> None:
        """Keep what was checked."""
        if self._update and self._checked:
            _merge(self._file, self._test, self._checked)


def _compare(actual: _Entry, expected: _Entry | None, subject: str, file: Path) -> None:
    __tracebackhide__ = True
    if expected is None:
        msg = (
            f"a golden digest must be kept before it can be compared, got none for {subject} in {file.name}; "
            f"run `pytest --golden-update` and commit the file"
        )
        raise AssertionError(msg)
    if actual.order_version != expected.order_version:
        bits = "the same" if actual.digest == expected.digest else "different"
        msg = (
            f"golden digests must come from order version {actual.order_version} of accel_ops, got one from version "
            f"{expected.order_version} for {subject} in {file.name} ({bits} bits here); results change with the "
            f"library's order: review its changelog under 'Changed results' and run `pytest --golden-update`"
        )
        raise AssertionError(msg)
    if actual.digest != expected.digest:
        msg = (
            f"{subject} must have the bits that {file.name} keeps, got digest {actual.digest}, expected "
            f"{expected.digest}; find what changed the result, or if the change is meant run `pytest --golden-update`"
        )
        raise AssertionError(msg)


def _read(file: Path) -> _Entries:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        return {
            test: {label: _Entry(str(entry["digest"]), int(entry["order_version"])) for label, entry in labels.items()}
            for test, labels in json.loads(text).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        msg = (
            f"{file} must hold JSON as `pytest --golden-update` writes it, got something else ({exc!r}); "
            f"restore it, or delete it and run that"
        )
        raise ValueError(msg) from exc


def _merge(file: Path, test: str, checked: dict[str, _Entry]) -> None:
    """Add a test's entries to a file, which readers find either as it was or complete."""
    with _writing(file):
        entries = _read(file)
        merged = entries | {test: entries.get(test, {}) | checked}
        if merged == entries:
            return
        plain = {test: {label: entry._asdict() for label, entry in labels.items()} for test, labels in merged.items()}
        new = file.with_name(f".{file.name}.new")
        new.write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n", encoding="utf-8", newline="\n")
        new.replace(file)


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Keep other processes, such as the workers of pytest-xdist, from writing a file."""
    import fcntl

    path = file.with_name(f".{file.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # The kernel gives the lock back when its holder dies, which the existence of a file would not do.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                try:
                    yield
                finally:
                    path.unlink()
                return
            # Its holder removed the file while we waited for it: others lock a new one.
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _name_of(item: pytest.Item) -> str:
    """Return the name of a test within its file. Unlike its node id nothing is appended to it by pytest-xdist."""
    names: list[str] = []
    for node in reversed(item.listchain()):
        if isinstance(node, pytest.File):
            break
        names.append(node.name)
    return "::".join(reversed(names))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--golden-update``."""
    parser.getgroup("accel_ops").addoption(
        "--golden-update",
        action="store_true",
        help="keep the digests of what tests give to golden.check, instead of comparing with those that are kept",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Note which tests pass: what a failing one computed is not kept."""
    item.stash[_passed] = False
    result = yield
    item.stash[_passed] = True
    return result


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    """Compare arrays bit for bit with what they were: ``golden.check("residual", array)``."""
    item = request.node
    update = bool(request.config.getoption("--golden-update"))
    result = Golden(request.path.with_suffix(".golden.json"), _name_of(item), update=update)
    yield result
    if item.stash.get(_passed, False):
        result._store()
