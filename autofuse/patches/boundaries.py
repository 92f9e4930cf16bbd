"""Boundaries: the places outside autofuse where something must be flushed first.

Most of PyTorch reaches a wrapped tensor through `__torch_function__`. This module covers the rest:
code that takes tensors without asking (user autograd Functions, jit, torch.func), writes to plain
memory that a pending op still has to read, changes of stream or of a thread's modes, and forks.
Each patch is one test of an empty list where nothing is pending (0.1 us).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from types import ClassMethodDescriptorType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..chain.shell import Tensor
from ..dispatch.tensor import HANDLERS, OPTIONS, SIMPLE, ask_overrides, run_default, run_eager
from ..dispatch.unrecorded import EXPORTS
from ..errors import warn_once
from ..record import chain as _chain
from ..record.chain import (
    annotate,
    close_thread,
    closed,
    flush_all,
    flush_readers,
    flush_tensor,
    flush_thread,
    regrade,
    reopen,
    reopen_all,
    reopen_thread,
    writing,
)
from ..run import launch as _launch
from ..settings.config import config, watch
from ..supply import kernels as _compile
from ..supply.load import keep_modules

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_torch_function_enabled = torch._C._is_torch_function_enabled
_function_modes = torch._C._len_torch_function_stack
_installed = False


def install() -> None:
    """Patch PyTorch's boundaries; a second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    _patch_inplace()
    _patch_attributes()
    _patch_calls()
    _patch_modes()
    _patch_compile()
    _patch_distributed()
    _patch_cuda()
    _patch_profiler()
    register_optimizer_step_pre_hook(lambda *args: flush_all("optimizer"))
    os.register_at_fork(
        before=lambda: flush_all("fork"),
        after_in_child=lambda: [module.forget_threads() for module in (_chain, _launch, _compile)],
    )


def _flush_first(
    owner: Any, name: str, reason: str, flush: Callable[[str], None], anyway: bool = False
) -> None:
    """Replace `owner.name` by a function that flushes and then calls it.

    anyway: also if the flush fails, for what ends something.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            flush(reason)
        except BaseException:
            if anyway:
                original(*args, **kwargs)
            raise
        return original(*args, **kwargs)

    _replace(owner, name, call)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Set `owner.name`; torch.jit, which knows its builtins by identity, learns the new one."""
    symbol = torch.jit._builtins._find_builtin(getattr(owner, name))
    setattr(owner, name, function)
    if symbol is not None:
        torch.jit._builtins._register_builtin(function, symbol)


# --- memory of plain tensors ----------------------------------------------------------------------


_KEEP = {"share_memory_", "retain_grad_", "rename_"}  # change nothing that a pending op reads
_OPERATORS = {"add", "sub", "mul", "truediv", "div", "mod", "floordiv", "pow", "and", "or", "xor",
              "lshift", "rshift", "matmul"}  # fmt: skip


def _patch_inplace() -> None:
    """In-place functions of plain tensors, and exports through which others may write.

    What a pending op still has to read is read first.
    """
    for name in dir(torch._C.TensorBase):
        inplace = name.endswith("_") and not name.startswith("_") and name not in _KEEP
        operator = name.startswith("__i") and name[3:-2] in _OPERATORS
        if inplace or operator or name == "__setitem__" or name in EXPORTS:
            setattr(torch.Tensor, name, _reads_first(getattr(torch.Tensor, name), name))
    for module in (torch, torch._C._nn, torch.nn.functional):
        for name in dir(module):
            function = getattr(module, name)
            if name.endswith("_") and not name.startswith("__") and callable(function):
                _replace(module, name, _reads_first(function, name))
    for name in dir(torch._C._VariableFunctions):  # by which torch.nn.functional has some of them
        if name.endswith("_") and not name.startswith("_"):
            setattr(torch._VF, name, getattr(torch, name))
    _flush_first(torch.utils, "swap_tensors", "swap_tensors", flush_all)
    for name in ("batch_norm", "instance_norm", "native_batch_norm"):  # write running statistics
        _flush_first(torch, name, name, flush_thread)


def _reads_first(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    recorders = _chain._all_recorders.refs
    handler = OPTIONS.get(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorders:
            return original(*args, **kwargs)
        if handler is not None and args and args[0].__class__ in _PLAIN:
            for known in recorders[:]:
                recorder = known()
                if recorder is not None and recorder.chain:
                    if _asks_us(args, kwargs):
                        return handler(*args, **kwargs)  # torch would take 4 us to find it
                    break
        ident = get_ident()
        nested = ident in writing
        try:
            writing[ident] = True  # as `announced`, in 0.2 us less
            if _pending():
                _flush_readers_of(args, kwargs, name)
            return original(*args, **kwargs)
        finally:
            if not nested:
                writing.pop(ident, None)

    for table in (HANDLERS, OPTIONS):  # __torch_function__ is told of the new one
        if original in table:
            table[call] = table[original]
    return call


def _asks_us(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch would do no more with these than ask our handler."""
    wrapped = False
    for x in (*args, *kwargs.values()) if kwargs else args:
        if x.__class__ is Tensor:
            wrapped = True
        elif x.__class__ not in SIMPLE:
            return False
    return wrapped and _is_torch_function_enabled() and not _function_modes()


def _flush_readers_of(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
    target = args[0] if args else kwargs.get("input")
    if isinstance(target, (list, tuple)) and target:  # torch._foreach_*_
        flush_all(name)
    elif target.__class__ is Tensor and _asks_us(args, kwargs):
        return
    elif isinstance(target, torch.Tensor):
        flush_readers(target, name)


class _Attribute(property):
    """A property that says of itself what a C getter says; torch._dynamo asks."""

    __objclass__ = torch._C.TensorBase


_ATTRIBUTES = ("data", "grad", "requires_grad")


def _patch_attributes() -> None:
    """`t.data = s` and `t.grad = s` hand a tensor to C++ without asking it."""
    for name in _ATTRIBUTES:
        base = getattr(torch.Tensor, name)

        def get(self: Any, base: Any = base) -> Any:
            return base.__get__(self)

        def set_(self: Any, value: Any, base: Any = base, name: str = name) -> None:
            if isinstance(value, Tensor):
                flush_tensor(value, name)
            if _pending():
                flush_readers(self, name)
            base.__set__(self, value)

        def delete(self: Any, base: Any = base) -> None:
            base.__delete__(self)

        attribute = _Attribute(get, set_, delete)
        attribute.__name__ = name  # type: ignore[attr-defined]
        setattr(torch.Tensor, name, attribute)


def _pending() -> bool:
    for known in _chain._all_recorders.refs[:]:
        recorder = known()
        if recorder is not None and (recorder.chain or recorder.reading or not recorder.ident):
            return True
    return False


# --- code that takes tensors without asking -------------------------------------------------------


def _patch_calls() -> None:
    import torch._functorch.utils as functorch_utils
    from torch.autograd import forward_ad, function, graph

    _closed_during(function.Function, "apply")
    _closed_during(function.BackwardCFunction, "apply")
    for name in ("__init__", "__enter__", "__exit__"):
        _regraded_after(torch.set_grad_enabled, name)  # which no_grad calls
    for name in ("__enter__", "__exit__"):
        _regraded_after(torch.enable_grad, name)
    _flushed_at_end(torch.no_grad)
    _closed_between(forward_ad, "enter_dual_level", "exit_dual_level")
    # every autograd.Function.apply passes its arguments through this module attribute
    for owner, name in (
        (functorch_utils, "unwrap_dead_wrappers"),
        (torch._C.ScriptFunction, "__call__"),
        (torch._C.ScriptMethod, "__call__"),
        (torch.nn.parallel.DistributedDataParallel, "_post_forward"),
    ):
        _flush_first(owner, name, name, flush_thread)
    for name in ("UndefinedGrad", "DelayedError"):  # which gradcheck calls
        _flushed_when_called(torch._C._functions, name)  # type: ignore[attr-defined]
    for name in ("trace", "trace_module"):
        setattr(torch.jit, name, _unwrapping(getattr(torch.jit, name), "jit"))
    for owner in (torch, torch.utils.dlpack):
        owner.to_dlpack = _unwrapping(owner.to_dlpack, "to_dlpack")
    for owner in (graph, torch.autograd):  # hooks run in grad modes that the engine sets
        _reopened_after(owner, "_engine_run_backward", "backward", lambda reason: regrade(),
                        flush=flush_thread)  # fmt: skip

    default = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]

    @functools.wraps(default)
    def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Tensor in types:
            return run_default(default, cls, func, types, args, kwargs)
        return default(cls, func, types, args, kwargs)

    torch.Tensor.__torch_function__ = classmethod(torch_function)  # type: ignore[assignment]
    for module in (torch.nn.functional, torch.functional, torch._tensor, torch.autograd):
        module.handle_torch_function = ask_overrides  # type: ignore[attr-defined]

    make = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, Tensor):
            data = _plain(data)
        return make(cls, data, *args, **kwargs)

    torch.nn.Parameter.__new__ = staticmethod(new)  # type: ignore[assignment]
    variable = torch.autograd.Variable.__new__  # C, which makes a plain tensor of any

    def new_variable(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            return variable(cls, *args, **kwargs)
        return run_eager(variable, (cls, *args), kwargs)

    torch.autograd.Variable.__new__ = staticmethod(new_variable)  # type: ignore[assignment]


def _flushed_when_called(owner: Any, name: str) -> None:
    """Flush before what `owner.name` makes, a function of tensors in C++, is called."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def make(*args: Any) -> Callable[..., Any]:
        function = original(*args)

        def call(*tensors: Any) -> Any:
            flush_thread(name)
            return function(*tensors)

        return call

    setattr(owner, name, make)


def _regraded_after(owner: Any, name: str) -> None:
    """Grad mode may be another one after `owner.name`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        was = torch.is_grad_enabled()
        result = original(*args, **kwargs)
        if was is not torch.is_grad_enabled():
            try:
                regrade()
            except BaseException:
                if name != "__exit__":  # the block is not entered
                    torch._C._set_grad_enabled(was)
                raise
        return result

    setattr(owner, name, call)


def _flushed_at_end(owner: Any) -> None:
    """Flush where a block ends with another grad mode; it ends also if that fails."""
    original = owner.__exit__

    @functools.wraps(original)
    def leave(self: Any, *args: Any) -> None:
        try:
            if self.prev is not torch.is_grad_enabled():
                flush_thread("grad mode")
        except BaseException:
            torch._C._set_grad_enabled(self.prev)
            raise
        original(self, *args)

    owner.__exit__ = leave


def _closed_during(owner: Any, name: str) -> None:
    """Record nothing while the class or instance method `owner.name` runs."""
    original = owner.__dict__[name]
    of_class = isinstance(original, (classmethod, ClassMethodDescriptorType))  # C's, torch 2.14

    @functools.wraps(getattr(original, "__func__", original))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with closed(name):
            bound = original.__get__(None, self) if of_class else original.__get__(self)
            return bound(*args, **kwargs)

    setattr(owner, name, classmethod(call) if of_class else call)


def _plain(tensor: Tensor) -> torch.Tensor:
    from ..api import unwrap

    return unwrap(tensor).detach()


def _patch_compile() -> None:
    """A compiled function gets plain tensors: torch._dynamo would trace the shell itself."""
    original = torch.compile

    @functools.wraps(original)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        if model is None:
            return lambda model: compile(model, **kwargs)
        compiled = original(model, **kwargs)
        _skip_tracing()
        if isinstance(compiled, torch.nn.Module):
            cls = type(compiled)
            if "__call__" not in cls.__dict__ or not hasattr(cls.__call__, "_autofuse"):
                cls.__call__ = _unwrapping(cls.__call__, "compile")  # type: ignore[method-assign]
            return compiled
        return _unwrapping(compiled, "compile")

    torch.compile = compile  # type: ignore[assignment]


@functools.cache
def _skip_tracing() -> None:
    """A wrapped tensor that a compiled function closes over breaks its graph.

    The ops on it run as torch's own, for torch._dynamo does not trace what records them. `api`
    stays open, so that a fused function is compiled as if it were not fused.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.eval_frame import skip_code

    for name in _ATTRIBUTES:  # frames where torch has none
        attribute = getattr(torch.Tensor, name)
        for accessor in (attribute.fget, attribute.fset, attribute.fdel):
            skip_code(accessor.__code__)
    package = Path(__file__).parents[1]
    for path in package.rglob("*.py"):
        if path.parts[len(package.parts)] not in ("api.py", "patches"):
            trace_rules.SKIP_DIRS.append(path.as_posix())
    trace_rules.SKIP_DIRS.append("<autofuse")
    trace_rules._recompile_re()


def _unwrapping(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """`function` of plain tensors, with nothing recorded while it runs."""
    from ..api import plain_arguments

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        args, kwargs = plain_arguments((args, kwargs))
        with closed(reason):
            return function(*args, **kwargs)

    call._autofuse = True  # type: ignore[attr-defined]
    return call


# --- a thread's modes -------------------------------------------------------------------------


def _patch_modes() -> None:
    """Inside these nothing is recorded: they see, or change, every single op."""
    from torch._functorch import eager_transforms, vmap
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode

    for owner in (
        TorchFunctionMode,
        TorchDispatchMode,
        torch.autocast,
        torch.autograd.graph.saved_tensors_hooks,
    ):
        _closed_inside(owner, keep=DeviceContext)
    for name in ("__enter__", "__exit__"):
        _reopened_after(torch.inference_mode, name, "inference mode", reopen, flush=flush_thread)
    _reopened_after(torch, "set_default_dtype", "default dtype", reopen_all)
    _reopened_after(torch, "set_anomaly_enabled", "anomaly mode", reopen_all)
    for module in (eager_transforms, vmap):  # a level of torch.func owns every new tensor
        for kind in ("grad", "jvp", "vmap", "func"):
            _closed_between(module, f"_{kind}_increment_nesting", f"_{kind}_decrement_nesting")


def _reopened_after(
    owner: Any,
    name: str,
    reason: str,
    reopen: Callable[[str], None],
    flush: Callable[[str], None] = flush_all,
) -> None:
    """Flush before `owner.name`, and start new chains under the modes it leaves."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        flush(reason)
        try:
            return original(*args, **kwargs)
        finally:
            reopen(reason)

    setattr(owner, name, call)


def _closed_between(module: Any, start: str, end: str) -> None:
    begin, finish = getattr(module, start, None), getattr(module, end, None)
    if begin is None or finish is None:
        return

    @functools.wraps(begin)
    def begun(*args: Any, **kwargs: Any) -> Any:
        close_thread("torch.func")
        return begin(*args, **kwargs)

    @functools.wraps(finish)
    def finished(*args: Any, **kwargs: Any) -> Any:
        try:
            return finish(*args, **kwargs)
        finally:
            reopen_thread()

    setattr(module, start, begun)
    setattr(module, end, finished)


def _closed_inside(owner: Any, keep: type) -> None:
    enter, leave = owner.__enter__, owner.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        if not isinstance(self, keep):
            close_thread("mode")
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *args: Any) -> Any:
        try:
            return leave(self, *args)
        finally:
            if not isinstance(self, keep):
                reopen_thread()

    owner.__enter__, owner.__exit__ = entered, left


# --- collectives ---------------------------------------------------------------------------------


_COLLECTIVES = (
    "broadcast allreduce allreduce_coalesced reduce allgather _allgather_base allgather_coalesced "
    "allgather_into_tensor_coalesced all_gather_single all_gather_single_coalesced gather scatter "
    "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced reduce_scatter_single "
    "reduce_scatter_single_coalesced alltoall alltoall_base all_to_all_single recv recv_anysource"
).split()


def _patch_distributed() -> None:
    """Collectives write to memory and do not count it as a write."""
    if torch.distributed.is_available():
        for name in _COLLECTIVES:
            _flush_first(torch.distributed.ProcessGroup, name, "collective", flush_thread)


# --- streams, events, graphs ---------------------------------------------------------------------


def _patch_cuda() -> None:
    """Work that is pending when a stream, an event or a graph is used belongs before it."""
    cuda = torch.cuda
    for owner, names in (
        (cuda, ("set_stream", "synchronize")),
        (cuda.StreamContext, ("__enter__",)),
        (cuda.Event, ("record", "wait", "synchronize", "query", "elapsed_time")),
        (cuda.Stream, ("wait_event", "wait_stream", "record_event", "synchronize", "query")),
        (cuda.CUDAGraph, ("capture_begin", "replay")),
        (cuda, ("set_device",)),
    ):
        for name in names:
            _flush_first(owner, name, "stream", flush_thread)
    for owner, name in (
        (cuda.StreamContext, "__exit__"),
        (cuda.CUDAGraph, "capture_end"),
        (cuda.graph, "__exit__"),
    ):
        _flush_first(owner, name, "stream", flush_thread, anyway=True)
    _flush_first(cuda.CUDAGraph, "capture_begin", "capture", _begin_capture)


def _begin_capture(reason: str) -> None:
    """A graph holds its kernels; a chain that still waits for one asks again, to say so."""
    keep_modules()
    _compile._stir()


# --- profilers -----------------------------------------------------------------------------------


def _patch_profiler() -> None:
    """While a profiler runs, every flush is a range of its own; NVTX's if that is set."""
    from torch.autograd import profiler

    for name, on in (("_run_on_profiler_start", True), ("_run_on_profiler_stop", False)):
        _flush_first(
            profiler, name, "profiler", lambda reason, on=on: annotate(profiler.record_function, on)
        )
    watch(_follow_nvtx)
    _follow_nvtx()


def _follow_nvtx(*reason: object) -> None:
    if config.nvtx and not hasattr(torch._C, "_nvtx"):
        warn_once(
            f"autofuse: config.nvtx has no effect: torch {torch.__version__} is built without "
            "CUDA, and NVTX is not there; torch.profiler shows the same ranges"
        )
        return
    annotate(torch.cuda.nvtx.range, config.nvtx)
