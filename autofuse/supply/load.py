"""Loading: from a binary to something that can be launched, and back when nothing can launch it.

A Kernel owns what the driver or LLVM has loaded. A CUDA module is unloaded some time after its
kernel has gone, when another one is loaded: after a synchronize, because launches may still be
running, and never once a CUDA graph was captured, because a graph may hold it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import torch

from ..errors import BuildError, KernelError
from ..kernel.source import Parameters, Source

if torch.cuda.is_available():  # 28 ms, which a first iteration would feel
    with suppress(ImportError):
        import cuda.bindings.driver  # noqa: F401


def target_of(device: torch.device) -> str:
    """What kernels are compiled for: sm_90, or cpu."""
    return _capability(device) if device.type == "cuda" else "cpu"


@cache
def _capability(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def processors_of(device: torch.device) -> tuple[int, int]:
    """How many processors a GPU has, and how many threads each of them runs at a time."""
    if device.type != "cuda":
        return (1, 1)
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.max_threads_per_multi_processor


_retired: list[tuple[Any, torch.device]] = []


class Kernel:
    """A compiled Source, which is loaded on one device as long as this is held.

    entry: a CUfunction on CUDA, the address of a C function on the CPU. launch: the address of what
    launches that there (`kernel.emit_cpu`).
    """

    launch = 0
    device = torch.device("cpu")  # where an interrupt has come before it was told

    def __init__(self, source: Source, entry: Any, handle: Any, device: torch.device) -> None:
        self.entry, self.handle, self.device = entry, handle, device
        self.source, self.parameters = source, Parameters.of(source)

    def __del__(self, retired: list[tuple[Any, torch.device]] = _retired) -> None:
        if self.device.type == "cuda":
            retired.append((self.handle, self.device))  # any thread, any moment: not now


_captured = False  # a CUDA graph was captured: modules stay


def keep_modules() -> None:
    """From now on no module is unloaded: a CUDA graph may hold its kernels."""
    global _captured
    _captured = True


def load(binary: bytes, source: Source, device: torch.device) -> Kernel:
    """The kernel of `source`, ready to be launched on `device`."""
    return _load_cpu(binary, source) if device.type == "cpu" else _load_cuda(binary, source, device)


def enter_context(device: torch.device) -> None:
    """Make the device's primary context current in this thread, as a first torch op would."""
    if device.type != "cuda":
        return
    from cuda.bindings import driver

    error, context = driver.cuCtxGetCurrent()
    if not error and int(context):
        return
    torch.cuda.init()
    error, handle = driver.cuDeviceGet(device.index)
    if not error:
        error, context = driver.cuDevicePrimaryCtxRetain(handle)  # torch never releases its own
    if not error:
        (error,) = driver.cuCtxSetCurrent(context)
    if error:
        raise KernelError(f"no CUDA context on {device}: {error}")


def _load_cuda(binary: bytes, source: Source, device: torch.device) -> Kernel:
    from cuda.bindings import driver

    # another thread may be capturing a graph, which forbids the others what is not relaxed
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with torch.cuda.device(device):
        enter_context(device)
        _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
        try:
            _unload_retired(driver)
            function = None
            error, module = driver.cuModuleLoadData(binary)
            if not error:
                error, function = driver.cuModuleGetFunction(module, source.name.encode())
        finally:
            driver.cuThreadExchangeStreamCaptureMode(before)
    if error:
        raise KernelError(f"cannot load {source.name}: {error}")
    return Kernel(source, function, module, device)


def _unload_retired(driver: Any) -> None:
    if _captured or not _retired:
        return
    modules = []
    with suppress(IndexError):  # another thread takes some
        while True:
            modules.append(_retired.pop())
    for device in {device for _, device in modules}:
        with torch.cuda.device(device):
            driver.cuCtxSynchronize()  # torch's would flush: this is in the middle of that
    for module, device in modules:
        with torch.cuda.device(device):
            driver.cuModuleUnload(module)


def _load_cpu(binary: bytes, source: Source) -> Kernel:
    from ..kernel.llvm import link

    try:
        (entry, launch), linked = link(binary, [source.name, "launch"])
    except BuildError as error:
        raise KernelError(f"cannot load {source.name}: {error}") from None
    kernel = Kernel(source, entry, linked, torch.device("cpu"))
    kernel.launch = launch
    return kernel
