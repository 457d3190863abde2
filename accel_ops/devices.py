"""Which accelerators there are: asked of the operating system, for a process that has made a CUDA call must not fork.

NVIDIA's driver shows each GPU as a file ``/dev/nvidia<minor>``, where this process may use it, and describes it under
``/proc/driver/nvidia/gpus``. Where drivers show GPUs otherwise (WSL 2, Jetson) none is found: name the device there.
"""

import operator
import os
import re
import sys
from typing import Any

import numpy as np

from accel_ops.errors import BackendUnavailableError

__all__ = ["Device", "accelerators", "default_accelerator", "device_index"]

_DEVICE_FILES = "/dev"
_DESCRIPTIONS = "/proc/driver/nvidia/gpus"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Device:
    """One accelerator. Immutable, hashable, and accepted wherever an ``accelerator=`` is.

    Parameters
    ----------
    device : Device or str or int or cupy.cuda.Device or torch.device
        ``"cuda:0"``, or ``"cuda"`` for the first; its index; or another library's object for it.

    Attributes
    ----------
    index : int
        CUDA's number for the device in this process.

    Raises
    ------
    TypeError
        It names no CUDA device.

    Notes
    -----
    *Threads:* making one looks for nothing and makes no CUDA call; whether it is there shows when it is used.

    Examples
    --------
    >>> import accel_ops as ops
    >>> ops.Device(1)
    Device('cuda:1')
    >>> ops.Device("cuda") == ops.Device("cuda:0")
    True
    """

    __slots__ = ("index",)

    index: int

    def __init__(self, device: object) -> None:
        index = device_index(device)
        if index is None:
            msg = f"a Device is a CUDA device, got {device!r}; pass None where plain host memory is meant"
            raise TypeError(msg)
        object.__setattr__(self, "index", index)

    def __setattr__(self, name: str, value: object) -> None:
        msg = f"a Device cannot be changed, got {name}={value!r}; make another one"
        raise AttributeError(msg)

    def __str__(self) -> str:
        return f"cuda:{self.index}"

    def __repr__(self) -> str:
        return f"Device('cuda:{self.index}')"

    def __eq__(self, other: object) -> bool:
        return self.index == other.index if isinstance(other, Device) else NotImplemented

    def __hash__(self) -> int:
        return hash((Device, self.index))

    def __reduce__(self) -> tuple[type["Device"], tuple[str]]:
        return Device, (str(self),)


def accelerators() -> tuple[Device, ...]:
    """Return the accelerators that this process may use.

    Returns
    -------
    tuple of Device
        In CUDA's numbering; empty on a host without one. A device counts even where CuPy is missing: using it is then
        an error that says what to install.

    Notes
    -----
    *Threads:* reads the device files anew at each call, and makes no CUDA call: the process may fork afterwards.

    Examples
    --------
    >>> import accel_ops as ops
    >>> isinstance(ops.accelerators(), tuple)
    True
    """
    return tuple(Device(index) for index in range(_n_visible()))


def default_accelerator() -> Device | None:
    """Return the first accelerator, or None on a host without one: what code that runs on both passes.

    Returns
    -------
    Device or None
        The first of `accelerators`.

    Notes
    -----
    *Threads:* as for `accelerators`.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> batch = ops.concatenate([np.zeros(3)], accelerator=ops.default_accelerator())
    """
    return next(iter(accelerators()), None)


def device_index(accelerator: object) -> int | None:
    """Return the index of the device that an ``accelerator=`` names, or None for plain host memory.

    Raises
    ------
    TypeError
        It names nothing that could be a device.
    BackendUnavailableError
        It is another kind of device than CUDA's.
    """
    if accelerator is None or (isinstance(accelerator, str) and accelerator == "cpu"):
        return None
    if isinstance(accelerator, Device):
        return accelerator.index
    if isinstance(accelerator, str):
        kind, colon, index = accelerator.partition(":")
        if kind == "cuda" and (not colon or (index.isascii() and index.isdecimal())):
            return int(index or 0)
    elif _is_instance(accelerator, "torch", "device"):
        torch_device: Any = accelerator
        if torch_device.type in ("cpu", "cuda"):
            return None if torch_device.type == "cpu" else torch_device.index or 0
        msg = f"only CUDA devices can be used, got {accelerator!r}; pass None for plain host memory"
        raise BackendUnavailableError(msg)
    elif _is_instance(accelerator, "cupy.cuda", "Device"):
        cupy_device: Any = accelerator
        return int(cupy_device.id)
    elif isinstance(accelerator, (int, np.integer)) and not isinstance(accelerator, bool):
        number = operator.index(accelerator)
        if number >= 0:
            return number
    msg = (
        f"accelerator must be None, 'cpu', 'cuda', 'cuda:<index>', an index of 0 or more, a Device, a torch.device or "
        f"a cupy.cuda.Device, got {accelerator!r}; pass None for plain host memory"
    )
    raise TypeError(msg)


def _is_instance(value: object, module: str, name: str) -> bool:
    """Return whether a value is of a class of a library, which then has been imported already."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _n_visible() -> int:
    """Return how many of the devices CUDA will show this process."""
    minors = _minors()
    wanted = os.environ.get(_VISIBLE)
    if wanted is None or not minors:
        return len(minors)
    entries = [entry.strip() for entry in wanted.split(",")]
    if entries[0].startswith(("GPU-", "MIG-")):
        return _n_named(entries, _identifiers(minors))
    # The number that an entry begins with counts. The first entry that names no device ends the list, which CUDA
    # documents; that one which names a device again empties it is what PyTorch, which parses it too, expects.
    numbers: list[int] = []
    for entry in entries:
        match = re.match(r"\+?(\d+)", entry, re.ASCII)
        if match is None or int(match[1]) >= len(minors):
            break
        if int(match[1]) in numbers:
            return 0
        numbers.append(int(match[1]))
    return len(numbers)


def _n_named(entries: list[str], identifiers: list[str]) -> int:
    """Count devices that are named by the beginnings of their identifiers, up to the first that names none or many."""
    found: list[str] = []
    for entry in entries:
        # The parts of a divided GPU are not listed where the operating system can be asked; CUDA shows one of them.
        matches = [entry] if entry.startswith("MIG-") else [each for each in identifiers if each.startswith(entry)]
        if len(matches) != 1 or not entry.startswith(("GPU-", "MIG-")):
            break
        if matches[0] in found:
            return 0
        found += matches
        if entry.startswith("MIG-"):
            break
    return len(found)


def _minors() -> list[int]:
    """Return the numbers of the GPUs whose device files this process may open."""
    from pathlib import Path  # 2 ms, which importing accel_ops does without

    minors = []
    for path in Path(_DEVICE_FILES).glob("nvidia*"):
        number = path.name.removeprefix("nvidia")
        if number.isascii() and number.isdecimal() and os.access(path, os.R_OK | os.W_OK):
            minors.append(int(number))
    return sorted(minors)


def _identifiers(minors: list[int]) -> list[str]:
    """Return the identifiers of these GPUs, as far as the driver tells them."""
    from pathlib import Path

    found = []
    for path in sorted(Path(_DESCRIPTIONS).glob("*/information")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        if fields.get("Device Minor", "").isdecimal() and int(fields["Device Minor"]) in minors:
            found.append(fields.get("GPU UUID", ""))
    return found
