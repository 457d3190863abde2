"""State that every test finds, and must leave, as it is in a fresh process."""

import os
from collections.abc import Iterator

import pytest

from accel_ops import budget, limits


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
