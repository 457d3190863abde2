"""What the process may use of the host, with false control group files in place of the real ones."""

import builtins
import io
import os

import pytest

from accel_ops import limits

GROUPS = "/sys/fs/cgroup"
V2 = f"30 23 0:26 / {GROUPS} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    f"32 31 0:29 / {GROUPS}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    f"35 31 0:32 / {GROUPS}/memory rw - cgroup cgroup rw,memory\n"
)
HYBRID = V1 + f"41 31 0:38 / {GROUPS}/unified rw - cgroup2 cgroup2 rw\n"
CPUS = 64
GIB = 2**30


@pytest.fixture
def host(monkeypatch):
    """Put a host with 64 CPUs, 64 GiB and the given files in place of the real one."""

    def install(files):
        real_open = builtins.open

        def false_open(path, *args, **kwargs):
            if not str(path).startswith(("/proc/self/", GROUPS)):
                return real_open(path, *args, **kwargs)
            if path not in files:
                raise FileNotFoundError(2, "no such file", path)
            return io.StringIO(files[path])

        monkeypatch.setattr(builtins, "open", false_open)
        monkeypatch.setattr(limits, "_affinity", lambda: CPUS)
        monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}.get)
        monkeypatch.setattr(limits, "_cached_cpu_quota", (0.0, None))
        monkeypatch.setattr(limits, "_cached_memory_limit", (0.0, None))

    return install


def v2(group, **levels):
    """Files of version 2, with the text of cpu.max for each level below the mount."""
    return {"/proc/self/mountinfo": V2, "/proc/self/cgroup": f"0::{group}\n"} | {
        f"{GROUPS}{level}/cpu.max": text for level, text in levels.items()
    }


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("50000 100000\n", 1),
        ("100000 100000\n", 1),
        ("150000 100000\n", 1),
        ("250000 100000\n", 2),
        ("1200000 100000\n", 12),
        ("1 1000000\n", 1),
        ("9900000 100000\n", CPUS),
    ],
)
def test_a_quota_is_rounded_down_but_not_to_zero(host, text, cpus):
    """Whole CPUs of the quota count, at least one, and never more than the affinity."""
    host(v2("/", **{"": text}))
    assert limits.available_cpus() == cpus


@pytest.mark.parametrize(
    "text",
    ["", "\n", "max 100000\n", "garbage\n", "0 0\n", "0 100000\n", "100000 0\n", "-1 100000\n", "max",
     "100000\n", "1e5 100000\n", "1_0 1\n", "٣ 1\n", pytest.param("9" * 5000 + " 1", id="long")],
)  # fmt: skip
def test_what_is_not_a_quota_sets_no_limit(host, text):
    """Unlimited, empty, zero, negative or senseless text leaves the affinity."""
    host(v2("/", **{"": text}))
    assert limits.available_cpus() == CPUS


@pytest.mark.parametrize(
    ("levels", "cpus"),
    [
        ({"/job/step": "200000 100000", "/job": "max 100000", "": "max 100000"}, 2),
        ({"/job/step": "max 100000", "/job": "300000 100000"}, 3),
        ({"/job/step": "500000 100000", "/job": "300000 100000"}, 3),
        ({"/job/step": "200000 100000", "/job": "300000 100000"}, 2),
        ({"": "400000 100000"}, 4),
        ({"/other": "100000 100000", "/job/step/below": "100000 100000"}, CPUS),
    ],
)
def test_the_tightest_quota_on_the_path_counts(host, levels, cpus):
    """Every group from the process's own up to the mount counts, and no other."""
    host(v2("/job/step", **levels))
    assert limits.available_cpus() == cpus


@pytest.mark.parametrize("mounts", [V1, HYBRID, V1 + V2])
@pytest.mark.parametrize(("quota", "cpus"), [("250000", 2), ("50000", 1), ("-1", CPUS), ("0", CPUS), ("", CPUS)])
def test_version_1_quotas_count_on_plain_and_hybrid_hosts(host, mounts, quota, cpus):
    """The first version's two files are read from where its cpu hierarchy is mounted."""
    host(
        {
            "/proc/self/mountinfo": mounts,
            "/proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box/inner\n0::/elsewhere\n",
            f"{GROUPS}/cpu,cpuacct/box/cpu.cfs_quota_us": f"{quota}\n",
            f"{GROUPS}/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            f"{GROUPS}/cpu,cpuacct/box/inner/cpu.cfs_quota_us": "-1\n",
            f"{GROUPS}/cpu,cpuacct/box/inner/cpu.cfs_period_us": "100000\n",
        }
    )
    assert limits.available_cpus() == cpus


@pytest.mark.parametrize(
    ("root", "group", "directory"),
    [
        ("/docker/abc", "/docker/abc", ""),  # the host's path is shown, the group itself is mounted
        ("/docker/abc", "/docker/abc/inner", "/inner"),
        ("/docker/abc", "/docker/abcdef", ""),  # a sibling whose name begins alike
        ("/docker/abc", "/", ""),
        ("/", "/../../outside", ""),  # the process was moved out of its namespace
        ("/../..", "/", ""),
        ("/", "/kubepods/gone", ""),  # the host's path, which does not exist below the mount
    ],
)
def test_in_a_container_the_mounted_group_counts(host, root, group, directory):
    """Where the group's path is not that of what is mounted, the mount's root is read."""
    files = v2(group, **{directory: "300000 100000"})
    files["/proc/self/mountinfo"] = V2.replace("0:26 /", f"0:26 {root}")
    host(files)
    assert limits.available_cpus() == 3


def test_a_mount_point_with_blanks_is_found(host):
    """The escapes of mountinfo are undone."""
    files = v2("/", **{"/with blank": "300000 100000"})
    files["/proc/self/mountinfo"] = V2.replace(GROUPS, GROUPS + r"/with\040blank")
    host(files)
    assert limits.available_cpus() == 3


@pytest.mark.parametrize("mountinfo", [None, "", "garbage\n - \n1 2 3 - cgroup2\n"])
@pytest.mark.parametrize("path", ["/cpu.max", "/unified/cpu.max"])
def test_without_mountinfo_the_usual_places_are_read(host, mountinfo, path):
    """A hidden or senseless list of mounts does not hide a quota, and does no harm."""
    files = {GROUPS + path: "300000 100000"}
    host(files if mountinfo is None else files | {"/proc/self/mountinfo": mountinfo})
    assert limits.available_cpus() == 3


@pytest.mark.parametrize("files", [{}, {"/proc/self/mountinfo": V2}, {"/proc/self/cgroup": "x\n:\n0::/\n"}])
def test_without_files_there_is_no_limit(host, files):
    """A host without control groups has its CPUs and its memory."""
    host(files)
    assert (limits.available_cpus(), limits.available_memory()) == (CPUS, 64 * GIB)


@pytest.mark.parametrize(
    ("text", "gib"),
    [(f"{2 * GIB}\n", 2), ("max\n", 64), ("9223372036854771712\n", 64), ("0\n", 64), ("", 64), ("-1\n", 64)],
)
def test_memory_is_limited_by_both_versions(host, text, gib):
    """The memory limit is the least of the host's memory and the limits on the path."""
    host(v2("/job/step") | {f"{GROUPS}/job/memory.max": text})
    assert limits.available_memory() == gib * GIB
    host(
        {
            "/proc/self/mountinfo": V1,
            "/proc/self/cgroup": "4:memory:/job/step\n",
            f"{GROUPS}/memory/job/memory.limit_in_bytes": text,
        }
    )
    assert limits.available_memory() == gib * GIB


def test_a_changed_quota_is_seen_when_the_cache_ends(host, monkeypatch):
    """The files are not read at every call, but again after about a second."""
    files = v2("/", **{"": "200000 100000"})
    host(files)
    now = 1000.0
    monkeypatch.setattr(limits.time, "monotonic", lambda: now)
    assert limits.available_cpus() == 2
    files[f"{GROUPS}/cpu.max"] = "300000 100000"
    assert limits.available_cpus() == 2
    now += 1.1
    assert limits.available_cpus() == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_the_affinity_is_read_at_every_call():
    """A change of the CPU affinity counts at once."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert limits.available_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_system_without_affinity_counts_its_cpus(monkeypatch):
    """Where there is no affinity the CPUs of the host are counted, at least one."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for name, count, expected in (("process_cpu_count", 3, 3), ("process_cpu_count", None, 1)):
        monkeypatch.setattr(os, name, lambda count=count: count, raising=False)
        assert limits._affinity() == expected
