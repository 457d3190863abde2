"""Run code in a fresh interpreter and notice if it hangs, crashes, or leaves processes behind.

    output = run_child(\"\"\"
        import accel_ops as ops
        print(ops.get_num_threads())
    \"\"\", deadline_s=20, env={"ACCEL_OPS_NUM_THREADS": "3"})

Every process that the child starts, at any depth, carries a mark in its environment, so that it is found
even if it has left the child's session; none of them outlives the call.
"""

import inspect
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parent.parent
_MARK = "CHILD_PROCESSES_MARK"
_TAIL_CHARACTERS = 6000


def run_child(
    source: str | Callable[[], object],
    *,
    deadline_s: float,
    env: Mapping[str, str | None] | None = None,
    arguments: Sequence[str] = (),
    python_options: Sequence[str] = (),
    expected_status: int = 0,
    grace_s: float = 1.0,
) -> str:
    """Run `source` in a new interpreter and return what it printed.

    `source` is a program's text, indented as it comes, or a function without arguments whose own text is
    run, so it must import what it uses. `env` adds to this process's environment, from which all
    ``*_NUM_THREADS`` are taken out; None removes a variable. `arguments` are the program's ``sys.argv[1:]``.
    Processes that the child has started may take `grace_s` seconds to end after it.

    An AssertionError tells of a hang (with the stacks of all threads), of an exit status other than
    `expected_status` (-9 is SIGKILL) and of processes that outlived the child.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="child_process_") as directory:
        program = Path(directory, "child.py")
        program.write_text(_text_of(source), encoding="utf-8")
        # Files, not pipes: reading a pipe to its end would wait for every process that inherited it.
        with Path(directory, "stdout").open("w+b") as stdout, Path(directory, "stderr").open("w+b") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", *python_options, str(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=_environment(env or {}, mark),
                start_new_session=True,
            )
            problems: list[str] = []
            try:
                if not _ended_within(child, deadline_s):
                    problems.append(f"hang: the child was still running after {deadline_s} s")
                    # The fault handler answers SIGABRT with the stacks of all threads.
                    child.send_signal(signal.SIGABRT)
                    _ended_within(child, 2.0)
                else:
                    if child.returncode != expected_status:
                        problems.append(f"crash: the child ended with {_status_in_words(child.returncode)}")
                    if survivors := _survivors(child.pid, mark, grace_s):
                        problems.append(f"survivors: {', '.join(survivors)} outlived the child")
            finally:
                _kill_all(child, mark)
            printed, complaints = (_text_in(file) for file in (stdout, stderr))
    if problems:
        message = "\n".join([*problems, "--- stdout", printed, "--- stderr", complaints])
        raise AssertionError(message)
    return printed


def _text_of(source: str | Callable[[], object]) -> str:
    if isinstance(source, str):
        return textwrap.dedent(source)
    return f"{textwrap.dedent(inspect.getsource(source))}\n{source.__name__}()\n"


def _text_in(file) -> str:
    file.seek(0)
    text = file.read().decode(errors="replace")
    return text if len(text) <= _TAIL_CHARACTERS or file.name.endswith("stdout") else text[-_TAIL_CHARACTERS:]


def _environment(changes: Mapping[str, str | None], mark: str) -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if not name.endswith("_NUM_THREADS")}
    # The program lies elsewhere but shall find the package and the tests' helpers.
    paths = [str(_REPOSITORY), str(_REPOSITORY / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    for name, text in changes.items():
        if text is None:
            environment.pop(name, None)
        else:
            environment[name] = text
    environment[_MARK] = mark
    return environment


def _ended_within(child: "subprocess.Popen[bytes]", seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _status_in_words(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _survivors(session: int, mark: str, grace_s: float) -> list[str]:
    """Describe the processes that still run when the grace is over."""
    end = time.monotonic() + grace_s
    while (running := _running(session, mark)) and time.monotonic() < end:
        time.sleep(0.01)  # other processes' ends cannot be waited for, only looked at
    return [f"process {process} ({_command_of(process)})" for process in running]


def _kill_all(child: "subprocess.Popen[bytes]", mark: str) -> None:
    """Kill the child and everything that it started, and wait until they are gone."""
    end = time.monotonic() + 5.0
    while (running := _running(child.pid, mark)) and time.monotonic() < end:
        for process in running:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended in the meantime
        child.poll()
        time.sleep(0.01)
    child.wait()


def _running(session: int, mark: str) -> list[int]:
    """Return the processes of the session or with the mark, except those that only wait to be reaped."""
    wanted = f"{_MARK}={mark}".encode()
    found: list[int] = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            # The command's name, in parentheses, may itself hold blanks and parentheses.
            state, _, _, its_session = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
            marked = wanted in (directory / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended in the meantime, or belongs to someone else
        if state not in "ZX" and (marked or int(its_session) == session):
            found.append(int(directory.name))
    return found


def _command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended just now"
