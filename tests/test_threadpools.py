"""The budget as threadpoolctl shows and limits it."""

import copy
import json
import pickle
import threading

import pytest
from threadpoolctl import ThreadpoolController, threadpool_info, threadpool_limits

from accel_ops import budget, limits, threadpools
from accel_ops.budget import get_num_threads, set_num_threads, thread_info, threads

API = "accel_ops"


@pytest.fixture(autouse=True)
def registered_with_four_threads(monkeypatch):
    """Start from a budget of four that was set by a call."""
    monkeypatch.setattr(limits, "available_cpus", lambda: 8)
    threadpools.register()
    set_num_threads(4)


def entries():
    return [entry for entry in threadpool_info() if entry["user_api"] == API]


def number_and_source():
    info = thread_info()
    assert info.num_threads == get_num_threads()
    return info.num_threads, info.source


FREE = (4, "set_num_threads()")


def test_the_budget_is_listed_once():
    """One entry, with this package's version, however often it was registered."""
    threadpools.register()
    (entry,) = entries()
    assert (entry["internal_api"], entry["num_threads"]) == (API, 4)
    assert isinstance(entry["version"], str)
    with threads(2):
        assert entries()[0]["num_threads"] == 2


@pytest.mark.parametrize("apis", [API, None])
def test_a_limit_is_a_ceiling_until_it_is_left(apis):
    """With the own name and for all libraries; the recorded source comes back."""
    with threadpool_limits(2, user_api=apis):
        assert number_and_source() == (2, "threadpoolctl")
        assert entries()[0]["num_threads"] == 2
    assert number_and_source() == FREE
    assert thread_info().ceiling is None


def test_limits_nest():
    """Each restores what was in force before it, and the inner one may be larger."""
    with threadpool_limits(2, user_api=API):
        for inner in (1, 2, 3, 4, 6):
            with threadpool_limits(inner, user_api=API):
                assert get_num_threads() == min(inner, 4)
            assert number_and_source() == (2, "threadpoolctl")
    assert number_and_source() == FREE


def test_an_exception_ends_a_limit():
    """A limit left by an exception is over."""
    with pytest.raises(KeyError), threadpool_limits(2, user_api=API):
        raise KeyError
    assert number_and_source() == FREE


def test_a_limit_inside_a_block_outlasts_nothing():
    """Opened where a block had made the budget smaller, it leaves no ceiling behind."""
    with threads(2):
        with threadpool_limits(1, user_api=API):
            assert get_num_threads() == 1
        assert number_and_source() == (2, "threads()")
    assert number_and_source() == FREE


def test_an_inner_limit_under_a_smaller_block_restores_the_outer_limit():
    """The number reported inside the block is not mistaken for the outer ceiling."""
    with threadpool_limits(3, user_api=API):
        with threads(2), threadpool_limits(1, user_api=API):
            assert get_num_threads() == 1
        assert (get_num_threads(), thread_info().ceiling) == (3, 3)
    assert thread_info().ceiling is None


def test_a_block_inside_a_limit_is_capped():
    """The ceiling is on top of every source."""
    with threadpool_limits(2, user_api=API):
        with threads(7):
            assert number_and_source() == (2, "threadpoolctl")
        with threads(1):
            assert number_and_source() == (1, "threads()")


@pytest.mark.parametrize("apis", [API, None, "blas"])
@pytest.mark.parametrize("number", [1, 6])
def test_leaving_a_limit_does_not_undo_set_num_threads(apis, number):
    """What was set inside a limit, of whichever library, is in force after it."""
    with threadpool_limits(2, user_api=apis):
        set_num_threads(number)
        assert get_num_threads() == (number if apis == "blas" else min(number, 2))
    assert number_and_source() == (number, "set_num_threads()")
    assert thread_info().ceiling is None


def test_limits_of_other_libraries_are_no_concern():
    """A limit of BLAS neither places nor removes a ceiling."""
    with threadpool_limits(1, user_api="blas"):
        assert number_and_source() == FREE
    with threadpool_limits(2, user_api=API):
        with threadpool_limits(1, user_api="blas"):
            assert get_num_threads() == 2
        assert get_num_threads() == 2
    assert number_and_source() == FREE


def test_limits_that_overlap_in_two_threads_end_independently():
    """The first to leave removes its own limit only, and the last leaves none behind."""
    placed, leave = threading.Event(), threading.Event()

    def other():
        with threadpool_limits(1, user_api=API):
            placed.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    with threadpool_limits(3, user_api=API):
        thread.start()
        assert placed.wait(20)
    assert get_num_threads() == 1
    leave.set()
    thread.join()
    assert number_and_source() == FREE


def test_a_limit_without_a_block_stays_and_can_be_taken_back():
    """By the object, by the information from before, or by the number from before."""
    before = threadpool_info()
    threadpool_limits(2, user_api=API).restore_original_limits()
    assert number_and_source() == FREE
    threadpool_limits(2, user_api=API)
    assert number_and_source() == (2, "threadpoolctl")
    threadpool_limits(before)
    assert number_and_source() == FREE
    threadpool_limits(2, user_api=API)
    threadpool_limits(4, user_api=API)
    assert (number_and_source(), thread_info().ceiling) == (FREE, None)


def test_limiting_before_every_task_does_not_pile_up():
    """The same limit again and again is one ceiling."""
    for _ in range(5):
        threadpool_limits(2, user_api=API)
    assert len(budget.placed_ceilings()) == 1


@pytest.mark.parametrize(("limit", "number"), [(0, 1), (-3, 1), (10**9, 65_535)])
def test_odd_limits_do_not_fail(limit, number):
    """Code that limits every library must not fail because this one is loaded."""
    with threadpool_limits(limit, user_api=API):
        assert thread_info().ceiling == number


def test_a_ceiling_from_a_thread_that_cannot_take_it_back_is_taken_back():
    """Whoever sets the earlier number back removes it."""
    (controller,) = ThreadpoolController().select(user_api=API).lib_controllers
    before = controller.get_num_threads()
    thread = threading.Thread(target=controller.set_num_threads, args=(1,))
    thread.start()
    thread.join()
    assert get_num_threads() == 1
    controller.set_num_threads(before)
    assert number_and_source() == FREE


def test_the_decorator_and_the_controller_work():
    """Every way of threadpoolctl to set a limit restores the budget."""
    controller = ThreadpoolController()

    @threadpool_limits.wrap(limits=2, user_api=API)
    def decorated():
        return get_num_threads()

    assert [decorated(), decorated()] == [2, 2]
    with controller.limit(limits={API: 3}):
        assert get_num_threads() == 3
    limited = threadpool_limits(1)
    assert limited.get_original_num_threads()[API] == 4
    limited.restore_original_limits()
    assert number_and_source() == FREE


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(copy.deepcopy, id="copy"),
        pytest.param(lambda number: pickle.loads(pickle.dumps(number)), id="pickle"),
        pytest.param(lambda number: json.loads(json.dumps(number)), id="json"),
    ],
)
def test_a_copy_of_the_reported_number_is_a_plain_integer(copied):
    """It can be stored and sent like any other number."""
    number = copied(entries()[0]["num_threads"])
    assert (type(number), number) == (int, 4)


@pytest.mark.parametrize(
    ("file", "matches"),
    [
        ("libc.so.6", 1),
        ("libc-2.31.so", 1),
        ("ld-musl-x86_64.so.1", 1),
        ("libsystem.b.dylib", 1),
        ("ld-linux-x86-64.so.2", 0),
        ("libcrypto.so.3", 0),
        ("libc10.so", 0),
    ],
)
def test_only_the_c_library_is_matched(file, matches):
    """Each system's C library has one prefix, and libraries with similar names have none."""
    prefixes = threadpools.BudgetController.filename_prefixes
    assert sum(file.startswith(prefix) for prefix in prefixes) == matches
