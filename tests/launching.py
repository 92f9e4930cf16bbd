"""CUDA's runner over CPU kernels: what hands over pointers and launches, where there is no GPU.

`install()` lets chains on the CPU run by CudaRunner, in Python and as machine code, with a driver
whose cuLaunchKernel runs the CPU kernel.
"""

import ctypes
import functools

import torch

from autofuse import api, boundaries, chain, launch, rules, tensor
from autofuse.load import _CTYPES
from autofuse.shell import NoTorchFunction

_kernels = []  # (kernel, rows) by the number that stands for a CUfunction
launches = []  # names of kernels, in order
refusals = []  # what the next launches give instead of running


def _launch(function, *rest):
    """cuLaunchKernel: grid, block, shared memory, stream, parameters and extra follow."""
    if refusals:
        return refusals.pop()
    kernel, rows = _kernels[function]
    codes = kernel.parameters.codes
    slots = (ctypes.c_void_p * len(codes)).from_address(rest[-2])
    values = [_CTYPES[code].from_address(slot) for code, slot in zip(codes, slots, strict=True)]
    kernel.entry(0, rows, *values)
    launches.append(kernel.source.name)
    return 0


_entry = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 11)(_launch)


def _empty_strided(shape, stride, dtype):
    with NoTorchFunction():
        return torch.empty_strided(shape, stride, dtype=dtype)


class Called(functools.partial):
    """A function that is called from C: Python 3.11 runs the bodies of others by itself."""

    @property
    def __code__(self):
        return self.func.__code__


class LaunchingRunner(launch.CudaRunner):
    """CudaRunner without a driver."""

    def __init__(self, *args):
        launch.Runner.__init__(self, *args)
        self._launch = lambda function, *rest: (_launch(function, *rest),)
        self._entry = ctypes.cast(_entry, ctypes.c_void_p).value
        self._scalar, self._orders = {}, {}
        self._parts = []
        for kernel, piece in zip(self.kernels, self.pieces, strict=True):
            rank = piece.plan.rank
            columns = piece.numbers[rank - 2] if rank > 1 else 1
            self._parts.append((len(_kernels), launch._Slots(piece, kernel.parameters)))
            _kernels.append((kernel, piece.numel // columns))


def install():
    """From now on chains of new programs run so, by machine code also where Python is too old."""
    for module in (chain, tensor, api, boundaries):
        for name in ("flush", "record"):
            if hasattr(module, name) and not isinstance(getattr(module, name), Called):
                setattr(module, name, Called(getattr(module, name)))
    launch._empty_strided = _empty_strided
    launch._streams[0] = 0
    for module in (chain, rules):
        module.runner_class = lambda device: LaunchingRunner
