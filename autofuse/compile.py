"""Compilation: from a Plan to something that can be launched, remembered per process.

numba is the compiler and nothing more: its dispatcher (126 us a launch on three torch tensors)
is never on the launch path. On CUDA the PTX goes through nvJitLink to a cubin, because a driver
refuses PTX newer than itself but takes any cubin of its CUDA major version.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .codegen import render
from .emit import Parameters, emit_cpu, emit_cuda
from .errors import KernelError
from .plan import Plan

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled Plan. `entry` is a CUfunction address on CUDA, a callable on the CPU."""

    plan: Plan
    parameters: Parameters
    source: str
    entry: Any
    ptx: str  # empty on the CPU


_kernels: dict[tuple[Plan, object], Kernel] = {}
_lock = threading.RLock()


def kernel_for(plan: Plan, where: object, build: Callable[[Plan], Kernel]) -> tuple[Kernel, bool]:
    """The kernel of `plan` on device `where` and whether it was there already."""
    key = (plan, where)
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel, True
    with _lock:
        kernel = _kernels.get(key)
        if kernel is not None:
            return kernel, True
        kernel = _kernels[key] = build(plan)
        return kernel, False


def clear_kernels() -> None:
    """Forget every kernel; loaded modules stay loaded, because a chain may still hold them."""
    with _lock:
        _kernels.clear()


def kernels() -> list[Kernel]:
    """Every kernel compiled in this process so far."""
    return list(_kernels.values())


def compile_ptx(plan: Plan, capability: Capability) -> str:
    """PTX of `plan`'s kernel, with the kernel named `plan.name`. Needs no GPU."""
    from numba import cuda

    parameters = Parameters.of(plan)
    kernel, signature = _numba_kernel(plan, parameters, capability)
    with _lock:
        ptx, _ = cuda.compile_ptx(kernel, signature, cc=capability)
    found = re.search(r"\.visible \.entry (\S+?)\(", ptx)
    if found is None:
        raise KernelError(f"numba produced no kernel for {plan.name}")
    ptx = ptx.replace(found.group(1), plan.name)
    ptx = re.sub(r"\.common \.global .*NumbaEnv.*\n", "", ptx)
    if plan.relaxed:
        return ptx
    # ptxas may contract a plain mul with an add across ops; NVVM has contracted what it should
    return re.sub(r"\bmul\.f(32|64)\b", r"mul.rn.f\1", ptx)


def assemble(ptx: str, capability: Capability) -> bytes:
    """A cubin from PTX. Needs no GPU."""
    from cuda.bindings import nvjitlink

    options = [f"-arch=sm_{capability[0]}{capability[1]}"]
    handle = nvjitlink.create(len(options), options)
    data = ptx.encode()
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, data, len(data), "autofuse")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin)


def compile_cpu(plan: Plan) -> Kernel:
    """A function (start, stop, *parameters) over rows, or over columns where there is one row."""
    from numba import njit

    parameters = Parameters.of(plan)
    kernel, signature = _numba_kernel(plan, parameters, None)
    with _lock:
        entry = njit(signature, nogil=True, error_model="numpy")(kernel)
    return Kernel(plan, parameters, render(plan), entry, "")


def _numba_kernel(
    plan: Plan, parameters: Parameters, capability: Capability | None
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The few lines of Python that numba sees: one call of the body, in a loop on the CPU."""
    from numba import types
    from numba.core.extending import intrinsic

    numba_types = {
        "u64": types.uint64,
        "i64": types.int64,
        "i32": types.int32,
        "f32": types.float32,
        "f64": types.float64,
    }
    signature = tuple(numba_types[code] for code in parameters.codes)
    names = ", ".join(f"p{k}" for k in range(len(signature)))
    on_cuda = capability is not None

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if capability is not None:
            emit_cuda(plan, builder, capability, list(args))
        else:
            emit_cpu(plan, builder, args[0], args[1], list(args[2:]))
        return context.get_dummy_value()

    arguments = names if on_cuda else f"row, column, {names}"
    space: dict[str, Any] = {"generate": generate, "void": types.void}
    exec(
        f"def body(typing, {arguments}):\n    return void({arguments}), generate\n",
        space,
    )
    space["body"] = intrinsic(space["body"])
    if on_cuda:
        exec(f"def kernel({names}):\n    body({names})\n", space)
        return space["kernel"], signature
    # start and stop count columns where there is one axis, rows where there are more
    if plan.rank == 1:
        loops = f"    for column in range(start, stop):\n        body(0, column, {names})\n"
    else:
        pointers = parameters.loads + parameters.stores + parameters.consts
        columns = f"p{pointers + plan.rank - 1}"
        loops = (
            f"    for row in range(start, stop):\n        for column in range({columns}):\n"
            f"            body(row, column, {names})\n"
        )
    exec(f"def kernel(start, stop, {names}):\n{loops}", space)
    return space["kernel"], (types.int64, types.int64, *signature)
