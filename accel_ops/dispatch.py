"""Which backend does the work: what an ``accelerator=`` argument names, and whether it is there."""

from typing import Any

from accel_ops.errors import BackendUnavailableError

__all__ = ["require_host"]


def require_host(accelerator: object) -> None:
    """Check an ``accelerator=`` argument; return where it means plain host memory.

    Raises
    ------
    BackendUnavailableError
        It names a device: none can be used by this version.
    TypeError
        It names nothing that could be a device.
    """
    if accelerator is None:
        return
    name = _device_name(accelerator)
    if name == "cpu":
        return
    msg = (
        f"accelerator={accelerator!r} names the device {name}, which is not there: this version of accel_ops "
        f"has no GPU backend yet, nor does installing cupy-cuda12x or cupy-cuda13x add one; "
        f"pass accelerator=None to use plain host memory"
    )
    raise BackendUnavailableError(msg)


def _device_name(accelerator: object) -> str:
    """Return "cpu" or "cuda:<index>" for every form of device that is understood."""
    if isinstance(accelerator, str):
        kind, colon, index = accelerator.partition(":")
        if kind == "cpu" and not index:
            return "cpu"
        if kind == "cuda" and (not colon or (index.isascii() and index.isdecimal())):
            return f"cuda:{index or 0}"
    elif isinstance(accelerator, int) and not isinstance(accelerator, bool) and accelerator >= 0:
        return f"cuda:{accelerator}"
    elif type(accelerator).__module__.partition(".")[0] in ("torch", "cupy"):
        device: Any = accelerator
        if hasattr(device, "type"):  # torch.device, whose index may be None
            return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"
        if hasattr(device, "id"):  # cupy.cuda.Device
            return f"cuda:{device.id}"
    msg = (
        f"accelerator must be None, 'cpu', 'cuda', 'cuda:<index>', an index of 0 or more, a torch.device or a "
        f"cupy.cuda.Device, got {accelerator!r}; pass None for plain host memory"
    )
    raise TypeError(msg)
