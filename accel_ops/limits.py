"""What this process may use of the host: CPUs and memory, with the limits that containers set.

Control groups come in two versions, and a host may have both mounted at once. Every group on the way from
the process's own up to the root of the mount can hold a limit, and the tightest one counts. A file that
is missing, empty or not understood sets no limit: guessing low would cost speed for nothing.
"""

import os
import time
from collections.abc import Callable, Iterator

__all__ = ["available_cpus", "available_memory"]

# Reading the files takes hundreds of microseconds, too much for every call; quotas change rarely.
_QUOTA_LIFETIME_S = 1.0
# Where distributions mount the hierarchies, for hosts that hide /proc/self/mountinfo.
_USUAL_MOUNTS = {
    "": ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
    "cpu": ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"),
    "memory": ("/sys/fs/cgroup/memory",),
}

# One tuple each, (time it ends, value), replaced as a whole: no lock that a fork could find held.
_cached_cpu_quota: tuple[float, int | None] = (0.0, None)
_cached_memory_limit: tuple[float, int | None] = (0.0, None)


def available_cpus() -> int:
    """Return how many CPUs this process may use.

    Returns
    -------
    int
        The least of the CPU affinity and the control groups' CPU quota (rounded down), at least 1.

    Notes
    -----
    *Threads:* the affinity is that of the calling thread, read at every call; the quota may be one second
    old.

    Examples
    --------
    >>> from accel_ops.limits import available_cpus
    >>> available_cpus() >= 1
    True
    """
    global _cached_cpu_quota
    cpus = _affinity()
    expires, quota = _cached_cpu_quota
    if (now := time.monotonic()) >= expires:
        quota = _tightest(_cpu_quota_of_group_v1, _cpu_quota_of_group_v2, controller="cpu")
        _cached_cpu_quota = (now + _QUOTA_LIFETIME_S, quota)
    return cpus if quota is None or quota > cpus else quota


def available_memory() -> int:
    """Return how much memory, in bytes, this process may use.

    Returns
    -------
    int
        The least of the physical memory and the control groups' memory limits. What is in use already
        is not taken off.

    Notes
    -----
    *Threads:* the limits hold for the whole process and may be one second old.

    Examples
    --------
    >>> from accel_ops.limits import available_memory
    >>> available_memory() > 0
    True
    """
    global _cached_memory_limit
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    expires, limit = _cached_memory_limit
    if (now := time.monotonic()) >= expires:
        limit = _tightest(_memory_limit_of_group_v1, _memory_limit_of_group_v2, controller="memory")
        _cached_memory_limit = (now + _QUOTA_LIFETIME_S, limit)
    return physical if limit is None or limit > physical else limit


def _affinity() -> int:
    """Count the CPUs that the scheduler may give the calling thread."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    # Systems without affinity. The rule that bans os.cpu_count names this module as the cure.
    count: Callable[[], int | None] = getattr(os, "process_cpu_count", os.cpu_count)  # noqa: TID251 - see above
    return count() or 1


def _tightest(
    limit_v1: Callable[[str], int | None], limit_v2: Callable[[str], int | None], *, controller: str
) -> int | None:
    """Return the least limit of all groups that hold this process, or None where there is none."""
    groups = _own_groups()
    mounts = _mounts()
    found: list[int] = []
    for hierarchy, limit_of in ((controller, limit_v1), ("", limit_v2)):
        for directory in _directories(groups.get(hierarchy, "/"), mounts.get(hierarchy, [])):
            if (limit := limit_of(directory)) is not None:
                found.append(limit)
    return min(found, default=None)


def _own_groups() -> dict[str, str]:
    """Map each controller (version 2: the empty string) to the path of this process's group."""
    groups: dict[str, str] = {}
    for line in _read("/proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                groups[controller] = fields[2]
    return groups


def _mounts() -> dict[str, list[tuple[str, str]]]:
    """Map each controller (version 2: the empty string) to its mounts: (group mounted, mount point)."""
    mounts: dict[str, list[tuple[str, str]]] = {}
    for line in _read("/proc/self/mountinfo").splitlines():
        head, separator, tail = line.partition(" - ")
        place, kind = head.split(), tail.split()
        if not separator or len(place) < 5 or len(kind) < 1:
            continue
        mount = (_unescape(place[3]), _unescape(place[4]))
        if kind[0] == "cgroup2":
            mounts.setdefault("", []).append(mount)
        elif kind[0] == "cgroup":
            for controller in kind[-1].split(","):
                mounts.setdefault(controller, []).append(mount)
    if not mounts:
        return {name: [("/", point) for point in points] for name, points in _USUAL_MOUNTS.items()}
    return mounts


def _directories(group: str, mounts: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the directories of the group and of all groups above it, as far as they are mounted."""
    below = [(point, relative) for root, point in mounts if (relative := _below(group, root)) is not None]
    # In a container the group's path can lie outside of what is mounted. Then the mount's own root is
    # the nearest group that can be read.
    for point, relative in below or [(point, "") for _, point in mounts]:
        parts = [part for part in relative.split("/") if part]
        for length in range(len(parts), -1, -1):
            yield "/".join([point.rstrip("/"), *parts[:length]])


def _below(group: str, root: str) -> str | None:
    """Return the part of the group's path below the mounted root, or None if it lies elsewhere."""
    root = root.rstrip("/")
    if ".." in group.split("/") or not (group + "/").startswith(root + "/"):
        return None
    return group[len(root) :]


def _cpu_quota_of_group_v1(directory: str) -> int | None:
    return _whole_cpus(_read(f"{directory}/cpu.cfs_quota_us"), _read(f"{directory}/cpu.cfs_period_us"))


def _cpu_quota_of_group_v2(directory: str) -> int | None:
    quota, _, period = _read(f"{directory}/cpu.max").strip().partition(" ")
    return _whole_cpus(quota, period)


def _memory_limit_of_group_v1(directory: str) -> int | None:
    return _positive(_read(f"{directory}/memory.limit_in_bytes"))


def _memory_limit_of_group_v2(directory: str) -> int | None:
    return _positive(_read(f"{directory}/memory.max"))


def _whole_cpus(quota: str, period: str) -> int | None:
    quota_us, period_us = _positive(quota), _positive(period)
    if quota_us is None or period_us is None:
        return None
    return max(1, quota_us // period_us)


def _positive(text: str) -> int | None:
    """Return a positive decimal number, or None for "max", -1, 0, nothing and anything else."""
    text = text.strip()
    # The kernel writes at most 20 digits. Longer text is not from it, and int() refuses very long text.
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        return None
    return int(text) or None


def _read(path: str) -> str:
    """Return the file's text, or nothing where it cannot be read."""
    try:
        # The builtin, looked up at each call, so that a test can put false files in its place.
        with open(path, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123 - see above
            return file.read()
    except (OSError, ValueError, NameError):  # the last where the interpreter is ending and has no builtins left
        return ""


def _unescape(path: str) -> str:
    r"""Undo the octal escapes that mountinfo writes for blanks and backslashes."""
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(escape, character)
    return path
