"""The helper that is meant to catch hangs, crashes and survivors, shown catching one of each."""

import os
import time
from pathlib import Path

import pytest
from child_processes import run_child

pytestmark = pytest.mark.process


def _has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_what_the_child_printed_is_returned():
    """The text on standard output comes back whole, without that on standard error."""
    source = """
        import sys
        print("x" * 100_000)
        print("not this", file=sys.stderr)
    """
    assert run_child(source, deadline_s=20) == "x" * 100_000 + "\n"


def test_a_function_can_be_the_program():
    """A function is run by its text, in another process."""

    def program():
        import os

        print(os.getpid())

    assert int(run_child(program, deadline_s=20)) != os.getpid()


def test_the_environment_is_the_callers_without_thread_variables(monkeypatch):
    """Thread variables reach the child only through `env`, where None removes a variable."""
    for name in ("OMP_NUM_THREADS", "KEPT", "REMOVED"):
        monkeypatch.setenv(name, "7")
    source = """
        import os
        print(*(os.environ.get(name) for name in ("OMP_NUM_THREADS", "KEPT", "REMOVED", "ADDED")))
    """
    assert run_child(source, deadline_s=20, env={"REMOVED": None, "ADDED": "8"}) == "None 7 None 8\n"


def test_a_hang_is_caught_with_its_stacks():
    """A child that does not end within the deadline is an AssertionError that shows where it hangs."""
    source = """
        import threading
        def waits_for_nothing():
            threading.Event().wait()
        waits_for_nothing()
    """
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)^hang: .* after 1\.0 s.*in waits_for_nothing"):
        run_child(source, deadline_s=1.0)
    assert time.monotonic() - start < 15


def test_a_hang_that_ignores_signals_is_caught():
    """A child that cannot be ended politely is killed."""
    source = """
        import faulthandler, signal, threading
        faulthandler.disable()
        for number in (signal.SIGABRT, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        threading.Event().wait()
    """
    with pytest.raises(AssertionError, match=r"^hang: "):
        run_child(source, deadline_s=0.5)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("1 / 0", "exit status 1(?s:.*)ZeroDivisionError"),
        ("import ctypes; ctypes.string_at(0)", "signal SIGSEGV"),
        ("import os; os.abort()", "signal SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
    ],
)
def test_a_crash_is_caught(source, words):
    """Any exit status but 0, and any signal, is an AssertionError with what the child said about it."""
    with pytest.raises(AssertionError, match=f"^crash: the child ended with {words}"):
        run_child(source, deadline_s=20)


def test_an_expected_status_is_no_crash():
    """A status that the caller expects passes, and then 0 does not."""
    assert run_child("raise SystemExit(3)", deadline_s=20, expected_status=3) == ""
    with pytest.raises(AssertionError, match=r"^crash: the child ended with exit status 0"):
        run_child("", deadline_s=20, expected_status=3)


@pytest.mark.parametrize("leaves", ["", "os.setsid()", "os.environ.clear()"])
def test_a_surviving_grandchild_is_caught_and_killed(leaves):
    """A forked grandchild that outlives the child is found, also outside of the session, and ended."""
    source = f"""
        import os, time
        reading, writing = os.pipe()
        grandchild = os.fork()
        if grandchild == 0:
            {leaves}
            os.write(writing, b"x")
            time.sleep(600)
            os._exit(0)
        os.read(reading, 1)
        print("grandchild", grandchild)
    """
    with pytest.raises(AssertionError, match=r"^survivors: process .* outlived the child") as caught:
        run_child(source, deadline_s=20, grace_s=0.2)
    grandchild = int(str(caught.value).partition("grandchild ")[2].split()[0])
    assert _has_ended(grandchild)


def test_a_grandchild_of_a_hanging_child_is_killed(tmp_path):
    """A hang leaves no process behind either."""
    source = """
        import os, pathlib, sys, time
        grandchild = os.fork()
        if grandchild:
            pathlib.Path(sys.argv[1]).write_text(str(grandchild))
        time.sleep(600)
    """
    file = tmp_path / "grandchild"
    with pytest.raises(AssertionError, match=r"^hang: "):
        run_child(source, deadline_s=1.0, arguments=[str(file)])
    assert _has_ended(int(file.read_text()))


def test_a_grandchild_that_ends_by_itself_is_no_survivor():
    """A process that needs a moment to end after the child is given it."""
    source = """
        import os, time
        if os.fork() == 0:
            time.sleep(0.3)
            os._exit(0)
    """
    run_child(source, deadline_s=20, grace_s=10.0)
