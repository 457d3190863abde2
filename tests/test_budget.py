"""How many threads one call may use, and who decides."""

import asyncio
import contextvars
import functools
import itertools
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from child_processes import run_child

from accel_ops import budget, environment, limits
from accel_ops.budget import get_num_threads, set_num_threads, thread_info, threads
from accel_ops.errors import ThreadingWarning

NAMES = environment.VARIABLES
BAD = {
    "zero": 0,
    "negative": -1,
    "2**63": 2**63,
    "2**64": 2**64,
    "too long to print": 10**5000,
    "bool": True,
    "NumPy's bool": np.True_,
    "float": 2.0,
    "NumPy's float": np.float64(2),
    "word": "x",
    "digits": "2",
    "list": [2],
    "array": np.array([2]),
}


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch):
    """Numbers up to eight give no warning, on any host."""
    monkeypatch.setattr(limits, "available_cpus", lambda: 8)


def in_new_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


# --- precedence


def test_each_source_gives_way_to_the_next_higher_one(monkeypatch):
    """threads() > set_num_threads > the three variables in their order > available CPUs."""

    def decides():
        monkeypatch.setattr(budget, "_environment", None)
        info = thread_info()
        assert info.num_threads == get_num_threads()
        return info.num_threads, info.source

    assert decides() == (8, "available CPUs")
    for number, name in enumerate(reversed(NAMES), start=2):
        monkeypatch.setenv(name, str(number))
        assert decides() == (number, name)
    set_num_threads(5)
    assert decides() == (5, "set_num_threads()")
    with threads(6):
        assert decides() == (6, "threads()")
    set_num_threads(None)
    assert decides() == (4, "ACCEL_OPS_NUM_THREADS")


# --- what is a thread count


@pytest.mark.parametrize("number", [1, 3, np.int8(3), np.uint64(3), np.array(3)])
def test_integers_are_taken(number):
    """Python's and NumPy's integers are thread counts."""
    set_num_threads(number)
    assert get_num_threads() == int(number)
    assert type(get_num_threads()) is int
    with threads(number):
        assert get_num_threads() == int(number)


@pytest.mark.parametrize("number", [65_536, 2**63 - 1])
def test_large_numbers_are_capped(number):
    """What exceeds 65,535 counts as 65,535."""
    with threads(number):
        assert get_num_threads() == 65_535
    with pytest.warns(ThreadingWarning, match="65535"):
        set_num_threads(number)
    assert get_num_threads() == 65_535


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_anything_else_is_a_value_error(bad):
    """The message states rule, value and cure, and the budget stays."""
    set_num_threads(3)
    received = r"an integer of \d+ bits" if bad is BAD["too long to print"] else ""
    for function in (set_num_threads, threads):
        with pytest.raises(ValueError, match=rf"`n` must be an integer from 1 to .*, got {received}.*; give "):
            function(bad)
    assert get_num_threads() == 3


def test_none_is_no_number_for_a_block():
    """Only set_num_threads takes None."""
    with pytest.raises(ValueError, match="got None"):
        threads(None)


def test_a_value_that_fails_to_convert_keeps_its_own_error():
    """An error inside `__index__` is the caller's."""

    class Broken:
        def __index__(self):
            raise KeyError

    with pytest.raises(KeyError):
        threads(Broken())


# --- set_num_threads


def test_more_threads_than_cpus_warn_before_the_change():
    """As an error the warning leaves the budget as it was; it points at the caller."""
    set_num_threads(3)
    with pytest.raises(ThreadingWarning, match=r"set_num_threads\(9\) .* 8 CPUs"):  # filters make it an error
        set_num_threads(9)
    assert get_num_threads() == 3
    with pytest.warns(ThreadingWarning) as caught:
        set_num_threads(9)
    assert [warning.filename for warning in caught] == [__file__]
    assert get_num_threads() == 9


def test_set_num_threads_is_for_the_process():
    """Other threads see it."""
    set_num_threads(3)
    assert in_new_thread(get_num_threads) == 3


# --- threads()


def test_blocks_nest_and_restore():
    """Leaving a block, also by an exception, brings back what was in force at its start."""
    set_num_threads(4)
    with threads(3):
        with threads(2):
            with threads(100):  # above the CPUs, without a warning
                assert get_num_threads() == 100
            assert get_num_threads() == 2
        with pytest.raises(KeyError), threads(1):
            raise KeyError
        assert get_num_threads() == 3
        set_num_threads(5)
        assert get_num_threads() == 3
    assert get_num_threads() == 5


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_the_open_blocks_the_last_opened_decides(order):
    """In whatever order blocks close."""
    blocks = [threads(2), threads(3), threads(4)]
    for block in blocks:
        block.__enter__()
    still_open = [2, 3, 4]
    for index in order:
        blocks[index].__exit__(None, None, None)
        still_open.remove(index + 2)
        assert get_num_threads() == (still_open[-1] if still_open else 8)


def test_a_block_can_be_used_again_and_inside_itself():
    """The object holds no state."""
    block = threads(2)
    for _ in range(2):
        with block, threads(3):
            with block:
                assert get_num_threads() == 2
            assert get_num_threads() == 3
        assert get_num_threads() == 8


def test_a_generator_closed_early_closes_its_block():
    """A block inside a generator ends with it."""

    def generator():
        with threads(2):
            yield get_num_threads()

    running = generator()
    assert next(running) == 2
    running.close()
    assert get_num_threads() == 8


def test_closing_in_another_context_changes_nothing_there():
    """A block that is not open in a context cannot close anything in it."""
    block = threads(2)
    with threads(3):
        contextvars.Context().run(block.__exit__)
        block.__exit__()
        assert get_num_threads() == 3


def test_new_threads_start_outside_and_to_thread_inherits():
    """A block is local to the context."""

    async def main():
        with threads(2):
            return await asyncio.to_thread(get_num_threads), in_new_thread(get_num_threads)

    assert asyncio.run(main()) == (2, 8)


def test_concurrent_tasks_have_their_own_blocks():
    """Blocks of tasks that overlap in time do not see each other."""

    async def task(number, entered, others):
        with threads(number):
            entered.set()
            await others.wait()
            return get_num_threads()

    async def main():
        first, second = asyncio.Event(), asyncio.Event()
        found = await asyncio.gather(task(2, first, second), task(3, second, first))
        return found, get_num_threads()

    assert asyncio.run(main()) == ([2, 3], 8)


def test_it_decorates_functions():
    """The block is open during the call, also when the function calls itself; name and result are kept."""

    @threads(3)
    def countdown(n, *, to=0):
        """Documented."""
        return [get_num_threads()] + (countdown(n - 1, to=to) if n > to else [])

    assert countdown(2, to=1) == [3, 3]
    assert (countdown.__name__, countdown.__doc__) == ("countdown", "Documented.")
    with pytest.raises(TypeError, match="missing 1 required positional"):
        countdown()  # wrong arguments leave the budget alone
    assert get_num_threads() == 8


class Asynchronous:
    async def __call__(self, add):
        await asyncio.sleep(0)
        return get_num_threads() + add


async def asynchronous(add):
    await asyncio.sleep(0)
    return get_num_threads() + add


@pytest.mark.parametrize("function", [asynchronous, functools.partial(asynchronous), Asynchronous()])
def test_it_decorates_async_functions(function):
    """The block is open while the coroutine runs, not while it is made."""
    coroutine = functools.update_wrapper(threads(3), asynchronous)(function)(10)
    assert get_num_threads() == 8
    assert asyncio.run(coroutine) == 13


def test_it_refuses_generator_functions():
    """Their bodies run after the call, so the error says to use `with` inside."""

    def generator():
        yield

    async def async_generator():
        yield

    for function in (generator, async_generator, functools.partial(generator)):
        with pytest.raises(TypeError, match=r"write `with threads\(3\):` inside"):
            threads(3)(function)


@pytest.mark.parametrize("thing", [int, 3, None])
def test_it_refuses_what_is_no_function(thing):
    """A decorated class would no longer be one."""
    with pytest.raises(TypeError, match="decorates functions"):
        threads(3)(thing)


# --- environment variables


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "number"),
    [("3", 3), (" 3\n", 3), ("007", 7), ("1", 1), ("", 8), ("  ", 8), ("0", 8), ("00", 8), ("\t0 ", 8)],
)
def test_plain_numbers_count_and_zero_means_unset(monkeypatch, name, text, number):
    """Blanks around the number do not matter; nothing and zero leave the default, without a warning."""
    monkeypatch.setenv(name, text)
    assert get_num_threads() == number


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "two",
        "-1",
        "+2",
        "2.0",
        "1_0",
        "0x2",
        "1e3",
        "٣",
        "2 3",
        str(2**63),
        "9" * 20,
        pytest.param("9" * 5000, id="long"),
    ],
)
def test_what_is_no_number_is_skipped_with_one_warning(monkeypatch, name, text):
    """The warning names variable and value and points at the caller; the next source decides."""
    monkeypatch.setenv(name, text)
    with pytest.warns(ThreadingWarning) as caught:
        assert get_num_threads() == 8
    assert [warning.filename for warning in caught] == [__file__]
    assert str(caught[0].message).startswith(f"{name}={text!r} is skipped: not a whole number")
    assert get_num_threads() == 8  # and says nothing any more


@pytest.mark.parametrize(("text", "number"), [("4,3,2", 4), (" 4 ,x", 4), (",3", 8), ("0,3", 8)])
def test_the_first_entry_of_openmp_lists_counts(monkeypatch, text, number):
    """OMP_NUM_THREADS may hold one number for each level."""
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert get_num_threads() == number


def test_only_openmp_has_lists(monkeypatch):
    """A list in another variable is no number."""
    monkeypatch.setenv("ACCEL_OPS_NUM_THREADS", "4,3")
    with pytest.warns(ThreadingWarning, match="ACCEL_OPS_NUM_THREADS='4,3' is skipped"):
        get_num_threads()


@pytest.mark.parametrize(("text", "number"), [("9", 9), ("99999999", 65_535), (str(2**63 - 1), 65_535)])
def test_a_variable_above_the_cpus_is_used_with_a_warning(monkeypatch, text, number):
    """The warning says how many CPUs there are."""
    monkeypatch.setenv("NUMBA_NUM_THREADS", text)
    with pytest.warns(ThreadingWarning, match=f"NUMBA_NUM_THREADS='{text}' asks .* 8 CPUs"):
        assert get_num_threads() == number


def test_every_skipped_variable_warns_but_not_those_that_are_overruled(monkeypatch):
    """One warning for each variable that was to decide and could not."""
    for name, text in zip(NAMES, ("x", "3", "y"), strict=True):
        monkeypatch.setenv(name, text)
    with pytest.warns(ThreadingWarning) as caught:
        assert get_num_threads() == 3
    assert len(caught) == 1
    assert thread_info().environment == {
        "ACCEL_OPS_NUM_THREADS": ("x", "skipped: not a whole number in plain digits, at most 2**63-1"),
        "NUMBA_NUM_THREADS": ("3", "3 threads"),
        "OMP_NUM_THREADS": (
            "y",
            "skipped: not a whole number in plain digits, at most 2**63-1; NUMBA_NUM_THREADS comes first",
        ),
    }


def test_as_an_error_the_warning_comes_before_any_change(monkeypatch):
    """Nothing has been taken over, so the next call says it again."""
    monkeypatch.setenv("OMP_NUM_THREADS", "x")
    for _ in range(2):
        with pytest.raises(ThreadingWarning, match="OMP_NUM_THREADS='x'"):
            get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert get_num_threads() == 3


def test_variables_are_read_once_and_only_when_needed(monkeypatch):
    """A higher source spares reading; after reading, changes are not seen."""
    set_num_threads(2)
    with threads(3):
        get_num_threads()
    get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    set_num_threads(None)
    assert get_num_threads() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert get_num_threads() == 5


@pytest.mark.process
def test_importing_reads_and_says_nothing():
    """A bad variable is no matter until a number is needed, not even with warnings as errors."""
    source = """
        import sys, threading, warnings
        warnings.simplefilter("error")
        import accel_ops.budget as budget
        assert threading.active_count() == 1
        warnings.simplefilter("default")
        number = budget.get_num_threads()
        assert budget.get_num_threads() == number == budget.limits.available_cpus()
        info = budget.thread_info()
        assert (info.pool_size, threading.active_count()) == (0, 1)
        print(info.environment["ACCEL_OPS_NUM_THREADS"])
    """
    printed = run_child(source, deadline_s=30, env={"ACCEL_OPS_NUM_THREADS": "two"})
    assert printed == "('two', 'skipped: not a whole number in plain digits, at most 2**63-1')\n"


# --- thread_info


def test_thread_info_cannot_be_changed():
    """It is a record of one moment."""
    with pytest.raises(AttributeError):
        thread_info().num_threads = 3


def test_thread_info_reports_unset_variables():
    """Every variable is listed."""
    assert thread_info().environment == dict.fromkeys(NAMES, (None, "not set"))
    assert thread_info().available_cpus == 8


# --- ceilings


def test_a_ceiling_caps_every_source_and_leaves_it_recorded():
    """The smaller number counts; the source names threadpoolctl only while the ceiling bites."""
    set_num_threads(5)
    budget.place_ceiling(1, budget.Ceiling(3, None, 5))
    with ExitStack() as stack:
        for number, expected in (
            (None, (3, "threadpoolctl")),
            (7, (3, "threadpoolctl")),
            (2, (2, "threads()")),
        ):
            if number:
                stack.enter_context(threads(number))
            info = thread_info()
            assert (info.num_threads, info.source) == expected
            assert (get_num_threads(), info.ceiling) == (expected[0], 3)
    budget.remove_ceiling(1)
    assert (thread_info().num_threads, thread_info().source) == (5, "set_num_threads()")


# --- fork


@pytest.mark.process
def test_a_forked_child_starts_with_the_parents_budget_and_changes_only_its_own():
    """Settings and open blocks are copied by a fork, also by nested ones."""
    source = """
        import os
        from accel_ops.budget import get_num_threads, set_num_threads, threads

        def child(function):
            process = os.fork()
            if process == 0:
                status = 9
                try:
                    status = function()
                finally:
                    os._exit(status)
            return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

        def changes():
            if get_num_threads() != 2:
                return 1
            set_num_threads(1)
            with threads(5):
                if get_num_threads() != 5 or child(lambda: get_num_threads()) != 5:
                    return 2
            return 0 if get_num_threads() == 1 else 3

        set_num_threads(1)
        with threads(2):
            assert child(get_num_threads) == 2
            with threads(7):
                pass
            assert get_num_threads() == 2
        budget = get_num_threads()
        import warnings
        warnings.simplefilter("ignore")
        set_num_threads(2)
        assert child(changes) == 0
        assert (budget, get_num_threads()) == (1, 2)
    """
    run_child(source, deadline_s=30)
