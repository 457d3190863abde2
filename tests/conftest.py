"""State that every test finds, and must leave, as it is in a fresh process."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_ops import budget, limits

_ROOT = Path(__file__).parents[1]


def _kernel_cache() -> Path:
    """Return a folder for compiled kernels that is named after all that they are made of.

    Numba looks at the file of the kernel alone, and would take kernels made of an older tile.
    """
    sources = hashlib.sha256()
    for source in sorted((_ROOT / "accel_ops").rglob("*.py")):
        sources.update(source.read_bytes())
    return _ROOT / ".kernel_cache" / sources.hexdigest()[:16]


os.environ.setdefault("NUMBA_CACHE_DIR", str(_kernel_cache()))  # Numba reads it when it is imported


def _reset() -> None:
    budget.set_num_threads(None)
    for serial, _ in budget.placed_ceilings():
        budget.remove_ceiling(serial)
    # The variables are read once in a process; this makes the next time the first.
    budget._environment = None
    budget._environment_claim.clear()


def _state() -> tuple[object, ...]:
    _reset()
    state = budget.get_num_threads(), budget.current_ceiling(), budget._open_blocks.get(), limits._affinity()
    _reset()
    return state


@pytest.fixture(autouse=True)
def fresh_thread_settings() -> Iterator[None]:
    """Start every test without thread settings, and show that none outlives it.

    A test may call `set_num_threads` or limit through threadpoolctl without taking it back. What it
    patches is undone before the comparison, because this fixture is set up first.
    """
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.endswith("_NUM_THREADS")]:
            environment.delenv(name)
        before = _state()
        yield
        after = _state()
    assert after == before, "the test left a threads() block open, or changed the affinity"
