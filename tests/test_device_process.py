"""Which calls reach CUDA's driver: a library that stands in for it writes down each one. CuPy is the real one."""

import subprocess

import pytest
from child_processes import run_child

pytestmark = pytest.mark.process

# What CUDA's runtime asks of the driver before anything else. Each call is written down, and says: no device.
STAND_IN = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char *name) {
    int file = open(getenv("STAND_IN_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(file, name, strlen(name)) < 0 || write(file, "\n", 1) < 0) abort();
    close(file);
}
int cuInit(unsigned flags) { note("cuInit"); return 100; }
int cuDriverGetVersion(int *version) { note("cuDriverGetVersion"); *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { note("cuDeviceGetCount"); *count = 0; return 100; }
int cuGetExportTable(const void **table, const void *id) { note("cuGetExportTable"); *table = 0; return 100; }
static int any(void) { note("another function"); return 100; }
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, void *status) {
    note("cuGetProcAddress_v2");
    if (!strcmp(name, "cuInit")) *function = (void *)cuInit;
    else if (!strcmp(name, "cuDriverGetVersion")) *function = (void *)cuDriverGetVersion;
    else if (!strcmp(name, "cuDeviceGetCount")) *function = (void *)cuDeviceGetCount;
    else *function = (void *)any;
    return 0;
}
int cuGetProcAddress(const char *name, void **function, int version, unsigned long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}
"""

PRELUDE = """
import os, sys
import numpy as np
import accel_ops as ops

def calls():
    path = os.environ["STAND_IN_LOG"]
    return open(path).read().split() if os.path.exists(path) else []
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """The folder with the library."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(STAND_IN)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(folder / "libcuda.so.1"), str(folder / "cuda.c")]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def run(stand_in, tmp_path):
    def run(source):
        env = {"LD_LIBRARY_PATH": str(stand_in), "STAND_IN_LOG": str(tmp_path / "log")}
        assert run_child(PRELUDE + source, deadline_s=60, env=env) == "done\n"

    return run


def test_the_stand_in_sees_what_is_called(run):
    """The control for the other tests: the first use of a device calls it, and finds none."""
    run("""
import cupy
assert calls() == []
try:
    ops.stage([np.zeros(3)], accelerator=0)
except ops.BackendUnavailableError as exc:
    assert "cuda:0 is not there" in str(exc), exc
else:
    raise AssertionError("a device was found")
assert "cuInit" in calls(), calls()
print("done")
""")


def test_import_and_detection_make_no_call(run):
    """Nor does any use of the host, with CuPy imported."""
    run("""
import cupy
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on a host with a GPU too
ops.accelerators(), ops.default_accelerator(), ops.Device(0), ops.is_pinned(np.zeros(3))
batch = ops.stage([np.zeros(3)], accelerator=ops.default_accelerator())
list(ops.prefetch([batch], accelerator=None))
ops.concatenate([batch], accelerator="cpu"), ops.matmul(np.eye(3), np.eye(3))
assert calls() == [], calls()
print("done")
""")


def test_a_forked_child_gets_its_error_without_a_call(run):
    """The parent has used a device, here one that is not even asked."""
    run("""
from accel_ops.gpu import driver
driver._drivers[0] = object()
process = os.fork()
if process == 0:
    status = 1
    try:
        for use in (
            lambda: ops.stage([np.zeros(3)], accelerator=0),
            lambda: ops.concatenate([np.zeros(3)], accelerator="cuda:0"),
            lambda: ops.batch([(3,)], float, accelerator="cuda:1"),
            lambda: ops.empty_pinned(3, accelerator=0),
            lambda: ops.prefetch([], accelerator=0),
            lambda: ops.ParallelArrayOps(accelerator=0),
        ):
            try:
                use()
            except ops.ForkedDeviceError as exc:
                assert "'spawn' or 'forkserver'" in str(exc)
            else:
                raise AssertionError("a device was used")
        assert not ops.is_pinned(np.zeros(3))
        assert ops.concatenate([np.zeros(3)]).shape == (3,)
        status = 0
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
assert calls() == [], calls()
print("done")
""")
