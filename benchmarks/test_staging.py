"""Every row under pytest-benchmark: ``python -m pytest benchmarks``. Each test asserts what it timed.

NumPy and accel_ops share a process here, which is good for watching our own code from commit to commit.
Ratios that are quoted come from ``benchmarks.compare``, where each library has a process to itself.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from .cases import STAGING, Row
from .contestants import LIBRARIES, same_bytes


@pytest.fixture(scope="module", params=STAGING, ids=lambda row: row.name)
def row_and_arrays(request: pytest.FixtureRequest) -> Iterator[tuple[Row, list[np.ndarray], np.ndarray]]:
    """The inputs of one row, made once and shared by its tests, and NumPy's answer."""
    row = request.param
    arrays = row.make()
    yield row, arrays, row.expected(arrays)
    LIBRARIES["accel_ops"].forget()


@pytest.mark.parametrize("mode", ["fresh", "out="])
@pytest.mark.parametrize("library", ["NumPy", "accel_ops"])
def test_join(benchmark: Any, row_and_arrays: Any, library: str, mode: str) -> None:
    """The timed call gives NumPy's bytes."""
    row, arrays, expected = row_and_arrays
    call = LIBRARIES[library].calls(row, arrays)[mode]
    benchmark.group = row.name
    benchmark.extra_info["output_bytes"] = expected.nbytes
    # A fresh result dies before the next call; only the last one is returned.
    result = benchmark(call.run)
    assert same_bytes(call.view(result), expected)
