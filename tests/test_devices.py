"""Devices: which there are, by files and a variable that stand in for a driver, and every way to name one."""

import copy
import pickle
import sys
import types

import numpy as np
import pytest
from child_processes import run_child

import accel_ops as ops
from accel_ops import devices


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host whose driver shows GPUs with these identifiers; as many others have no device file here."""
    monkeypatch.setattr(devices, "_DEVICE_FILES", str(tmp_path / "dev"))
    monkeypatch.setattr(devices, "_DESCRIPTIONS", str(tmp_path / "gpus"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()

    def make(*identifiers, hidden=()):
        for minor, identifier in enumerate([*identifiers, *hidden]):
            folder = tmp_path / "gpus" / f"0000:{minor:02x}:00.0"
            folder.mkdir(parents=True)
            text = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\nGPU UUID: \t {identifier}\nDevice Minor: \t {minor}\n"
            (folder / "information").write_text(text)
            if identifier not in hidden:
                (tmp_path / "dev" / f"nvidia{minor}").touch()
        for other in ("nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidia9x"):
            (tmp_path / "dev" / other).touch()

    return make


def test_a_host_without_a_driver_has_none(host):
    host()
    assert ops.accelerators() == ()
    assert ops.default_accelerator() is None


@pytest.mark.parametrize(
    ("visible", "n"),
    [
        (None, 3),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        (" 1 , 2 ", 2),
        ("0,7,1", 1),
        ("0,-1,1", 1),
        ("1,1", 0),
        ("1gpu,2", 2),
        ("nonsense", 0),
        ("GPU-bb", 1),
        ("GPU-bb,GPU-aa", 2),
        ("GPU-bb,GPU-bb", 0),
        ("GPU-", 0),
        ("GPU-zz,GPU-aa", 0),
        ("GPU-bb,1", 1),
        ("GPU-hidden", 0),
        ("MIG-aa-1-2", 1),
        ("MIG-aa-1-2,MIG-aa-1-3", 1),
    ],
)
def test_the_variable_chooses_devices(host, monkeypatch, visible, n):
    host("GPU-aa", "GPU-bb", "GPU-bc", hidden=["GPU-hidden"])
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ops.accelerators() == tuple(ops.Device(index) for index in range(n))


def test_the_first_device_is_the_default(host):
    host("GPU-aa", "GPU-bb")
    assert ops.default_accelerator() == ops.Device("cuda:0")


def test_a_device_is_a_value():
    """Equal by index, hashable, unchangeable; it survives copying and pickling."""
    device = ops.Device("cuda:1")
    assert (device.index, str(device), repr(device)) == (1, "cuda:1", "Device('cuda:1')")
    assert device == ops.Device(1) == ops.Device(np.int64(1)) == ops.Device(device)
    assert device not in (ops.Device(0), 1, "cuda:1")
    assert len({device, ops.Device(1), ops.Device(0)}) == 2
    assert copy.deepcopy(device) == pickle.loads(pickle.dumps(device)) == device
    with pytest.raises(AttributeError, match="cannot be changed"):
        device.index = 2


def fake(module, name, **attributes):
    """An instance of a class of another library, which need not be there."""
    kind = type(name, (), attributes)
    return kind, {module: types.SimpleNamespace(**{name: kind})}


@pytest.mark.parametrize(
    ("module", "name", "attributes", "index"),
    [
        ("torch", "device", {"type": "cuda", "index": 2}, 2),
        ("torch", "device", {"type": "cuda", "index": None}, 0),
        ("torch", "device", {"type": "cpu", "index": None}, None),
        ("cupy.cuda", "Device", {"id": 3}, 3),
    ],
)
def test_devices_of_other_libraries_are_understood(monkeypatch, module, name, attributes, index):
    kind, modules = fake(module, name, **attributes)
    monkeypatch.setitem(sys.modules, module, modules[module])
    assert devices.device_index(kind()) == index


def test_another_kind_of_accelerator_is_an_error(monkeypatch):
    kind, modules = fake("torch", "device", type="mps", index=None)
    monkeypatch.setitem(sys.modules, "torch", modules["torch"])
    with pytest.raises(ops.BackendUnavailableError, match="only CUDA devices"):
        devices.device_index(kind())


@pytest.mark.parametrize("accelerator", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", -1, True, 1.0, object(), [0]])
def test_what_names_no_device_is_a_type_error(accelerator):
    with pytest.raises(TypeError, match="accelerator must be None, 'cpu', 'cuda'"):
        devices.device_index(accelerator)
    with pytest.raises(TypeError):
        ops.Device(accelerator)


@pytest.mark.parametrize("accelerator", [None, "cpu"])
def test_plain_host_memory_is_no_device(accelerator):
    assert devices.device_index(accelerator) is None
    with pytest.raises(TypeError, match="a Device is a CUDA device"):
        ops.Device(accelerator)


@pytest.mark.process
def test_looking_for_devices_loads_no_cuda():
    """Neither CuPy nor a library of CUDA, and the process may fork afterwards."""
    source = """
        import os, sys
        import accel_ops as ops
        ops.accelerators(), ops.default_accelerator(), ops.Device(0)
        import numpy as np
        assert not ops.is_pinned(np.zeros(3))
        assert "cupy" not in sys.modules and "accel_ops.gpu" not in sys.modules
        maps = open("/proc/self/maps").read()
        assert "libcuda" not in maps and "libnvidia" not in maps
        process = os.fork()
        if process == 0:
            os._exit(0 if ops.accelerators() == () or ops.default_accelerator() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        print("done")
    """
    assert run_child(source, deadline_s=20) == "done\n"


def test_without_cupy_a_device_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for use in (ops.concatenate, ops.stage):
        with pytest.raises(ops.BackendUnavailableError, match=r"cuda:3 is not there.*install accel_ops\[cuda12\]"):
            use([np.zeros(3)], accelerator="cuda:3")
