"""PyTorch's private parts: the names of torch._C that the stages call, under names of their own.

What is patched, and what is listed by its place in PyTorch, stands where that is done. A name that
a version of PyTorch does not have is missed here, at import.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch.utils._device import DeviceContext

_F = TypeVar("_F", bound=Callable[..., Any])

# --- torch functions and modes -------------------------------------------------------------------

NoTorchFunction = torch._C.DisableTorchFunctionSubclass
# modes see nothing either: what autofuse does on its own, eager does not do; nor does it cost the
# 2 us each that a default device takes
NoModes = torch._C.DisableTorchFunction
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # how many
has_torch_function: Callable[[Any], bool] = torch._C._has_torch_function
torch_functions_are_on: Callable[[], bool] = torch._C._is_torch_function_enabled
function_modes: Callable[[], int] = torch._C._len_torch_function_stack  # how many
function_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at
_modes_are_told: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
InferenceMode = torch._C._InferenceMode
# told to modes of torch functions; no patch sees it
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# whether backward of this thread may run in others; the public class does it in 2 us
is_multithreading_enabled: Callable[[], bool] = torch._C._is_multithreading_enabled
set_multithreading_enabled: Callable[[bool], None] = torch._C._set_multithreading_enabled
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
# whether it stands for a batch, as the gradients that `is_grads_batched` of autograd hands on
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
key_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
ExcludedKey = torch._C._SetExcludeDispatchKeyGuard
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
AUTOGRAD_OF_VIEWS = torch._C.DispatchKey.ADInplaceOrView
AUTOCASTS = torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA
KINDS = {"cpu": 0, "cuda": 1}  # the devices that are recorded on, as c10::DeviceType numbers them


Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # of saved tensors: pack and unpack
# those that are told of every tensor that autograd saves, or None
top_hooks: Callable[[], Hooks | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


def is_differentiating() -> bool:
    """Whether this thread is inside a backward."""
    return _graph_task() != -1


def _set_grad_enabled(mode: bool) -> None:
    with NoModes():
        set_grad_enabled(mode)


def grad_setter() -> Callable[[bool], None]:
    """`set_grad_enabled` for now, of which no mode of torch functions is told.

    To be asked for before what it undoes: without modes it is C's, in the middle of which no signal
    handler runs.
    """
    return _set_grad_enabled if function_modes() else set_grad_enabled


def usual_keys(backend: str) -> int:
    """The dispatch keys of a tensor that is nothing but memory; backend: CPU or CUDA."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for name in (backend, f"Autograd{backend}", f"Autocast{backend}"):
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return cast(int, keys.raw_repr())


def above_autograd(function: _F) -> _F:
    """`function`, whose ops are what they are outside also in the middle of an op of autograd's.

    That is in a `__torch_dispatch__` of another class, where neither graphs nor views come of ops.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not key_is_excluded(_AUTOGRAD) or torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with ExcludedKey(_AUTOGRAD, False), ExcludedKey(AUTOGRAD_OF_VIEWS, False):
            return function(*args, **kwargs)

    return cast(_F, call)


def without_autocast(function: _F) -> _F:
    """`function`, whose ops autocast casts nothing for."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not autocast_is_on() or all(map(key_is_excluded, AUTOCASTS)):
            return function(*args, **kwargs)
        with ExcludedKey(AUTOCASTS[0], True), ExcludedKey(AUTOCASTS[1], True):
            return function(*args, **kwargs)

    return cast(_F, call)


def looked_on() -> bool:
    """Whether a mode of this thread is told of torch functions.

    A default device is none: it is asked about functions that make tensors of nothing, alone.
    """
    if not _modes_are_told():
        return False
    return any(function_mode_at(k).__class__ is not DeviceContext for k in range(function_modes()))


def functions_off() -> Any:
    """What switches torch functions off around an op that is not recorded.

    For a default device too, which takes 2 us to say nothing; but where hooks or dispatch modes run
    in the middle of the op, for these may enter another one.
    """
    if not function_modes() or looked_on() or dispatch_modes() or top_hooks() is not None:
        return NoTorchFunction()
    return NoModes()


def changes_results() -> bool:
    """Whether a mode of this thread could reach what ops on plain tensors give or save."""
    told = top_hooks() is not None
    return bool(told or autocast_is_on() or dispatch_modes() or function_modes())


def has_kernel(name: str, key: str) -> bool:
    """Whether torch's op `name` has a kernel of its own for the dispatch key of this name."""
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
    except RuntimeError:  # a version without it
        return False


push_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
pop_mode: Callable[[None], Any] = torch._C._pop_torch_dispatch_stack

# --- tensors -------------------------------------------------------------------------------------

TensorBase = torch._C.TensorBase
swap = torch._C._swap_tensor_impl
TensorGuards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
use_count = torch.Tensor._use_count  # type: ignore[attr-defined]
address_of = TensorBase.data_ptr  # type: ignore[attr-defined] - unpatched
copy_to = TensorBase.copy_  # type: ignore[attr-defined] - (into, value)
item_of = TensorBase.item  # type: ignore[attr-defined] - unpatched
get_item = TensorBase.__getitem__  # unpatched
keys_of = torch._C._dispatch_keys  # what decides which kernels an op on it runs
# that of tensors whose memory is laid out by strides; others of those have another
DENSE: int = torch._C.DispatchKeySet(torch._C.DispatchKey.Dense).raw_repr()
is_shell = TensorBase._python_dispatch.__get__  # type: ignore[attr-defined]
requires_grad_of = torch.Tensor.requires_grad.__get__
raw_version_of = torch.Tensor._version.__get__  # type: ignore[attr-defined]
count_write: Callable[[Iterable[torch.Tensor]], None] = torch._C._increment_version  # in C
# functions hold what they are given; a method would see what another thread exchanges it for
detach, permute = torch._C._VariableFunctions.detach, torch._C._VariableFunctions.permute


def version_of(tensor: torch.Tensor) -> int:
    """The version counter; -1 for an inference tensor, which has none."""
    try:
        return raw_version_of(tensor)
    except RuntimeError:
        return -1


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """C's `apply` of a Function, without the Python around it."""
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, function)


# --- the numbers of autograd's nodes -------------------------------------------------------------
# what they are for stands in `record.numbers`

_Node = torch._C._functions.DelayedError  # type: ignore[attr-defined]
peek: Callable[[], int] = torch._C._autograd._get_sequence_nr  # the number that comes next


def c_function(*names: str, takes: str = "v") -> int:
    """Where C++ has the function of these nested names; 0 if it is not found.

    takes: its parameters, as symbols spell them.
    """
    return c_symbol(f"_ZN{''.join(f'{len(name)}{name}' for name in names)}E{takes}")


def c_symbol(symbol: str) -> int:
    """Where C++ has the function of this symbol; 0 if it is not found."""
    try:
        function = ctypes.PyDLL(torch._C.__file__)[symbol]
    except (OSError, AttributeError):  # a build that names or hides them another way
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def taker() -> Callable[[], int]:
    """A function that uses up a number and returns it: C++'s, or 0.3 us more for a node."""
    address = c_function("at", "sequence_number", "get_and_increment")
    if address:
        return ctypes.PYFUNCTYPE(ctypes.c_uint64)(address)
    return lambda: _Node("", 0)._sequence_nr()


take = taker()


# --- CUDA ----------------------------------------------------------------------------------------

_has_context: Callable[[int], bool] = (
    torch._C._cuda_hasPrimaryContext if torch.backends.cuda.is_built() else lambda index: False
)


def gpus_in_use() -> int:
    """How many GPUs this process has a context of, as it has wherever it has a tensor.

    One that is there stays, and torch's engine asks for each of them in every backward, too.
    """
    if not torch.cuda.is_initialized():  # nor is it in a fork, where asking would be an error
        return 0
    return sum(map(_has_context, range(torch.cuda.device_count())))


def to_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """Make the stream of this raw handle the current one; gives the one that was.

    Without what `patches.streams` does about it.
    """
    before = torch.cuda.current_stream(device)
    there = (
        torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
    )
    back_to_stream(there)
    return before


def back_to_stream(stream: torch.cuda.Stream) -> None:
    """Make `stream` the current one."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


# by which inductor allocates: (shape, stride, dtype)
EMPTY_STRIDED: dict[str, Callable[..., torch.Tensor] | None] = {
    kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    for kind in ("cpu", "cuda")
}


def stream_reader(device: torch.device) -> Callable[[], int]:
    """A function that gives the raw handle of the current stream; 0 on the CPU."""
    if device.type != "cuda":
        return int
    return partial(torch._C._cuda_getCurrentRawStream, device.index)
