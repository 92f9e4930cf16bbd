"""PyTorch's own test data (OpInfo): the pointwise entries, their samples, layouts and calls."""

from __future__ import annotations

import functools
import operator
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

import autofuse
from autofuse.dispatch.protocol import HANDLERS
from autofuse.dtypes import kind
from autofuse.ops import operators
from autofuse.ops import row as op
from support import DTYPES, FLOATS, assert_same, outcome, random_tensor

FULL = os.environ.get("AUTOFUSE_TEST_FULL") == "1"
SEED = int(os.environ.get("AUTOFUSE_TEST_SEED", "20261121"))
# pointwise, or fresh memory, but without torch's tag for it
UNTAGGED = set(
    "_to_copy copy fill zero lift_fresh arange scalar_tensor empty empty_like empty_strided "
    "zeros zeros_like ones ones_like full full_like new_empty new_empty_strided new_zeros new_ones "
    "new_full floor_divide hardswish glu _prelu_kernel log_sigmoid_forward complex polar mse_loss "
    "smooth_l1_loss huber_loss binary_cross_entropy".split()
)
FRESH = set("lift_fresh arange scalar_tensor".split())  # and what begins like these
FRESH_PREFIXES = ("empty", "zeros", "ones", "full", "new_")


# --- entries --------------------------------------------------------------------------------------


@functools.cache
def entries() -> dict[str, Any]:
    """Every OpInfo by its formatted name. The import takes 5 s, so it waits until it is needed."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {entry.formatted_name: entry for entry in op_db}


class _Trace(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(func)
        return func(*args, **(kwargs or {}))


def _packet(func: Any) -> str:
    return func._schema.name.partition("::")[2].rstrip("_")


def _is_pointwise(entry: Any) -> bool:
    """Whether `entry` is tagged so, is in the table, or runs pointwise aten ops and no others."""
    if "reduction" in entry.variant_test_name:  # of max and min, whose binary overload is tagged
        return False
    packet = getattr(torch.ops.aten, entry.aten_name, None)
    if packet is not None and any(
        torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads()
    ):
        return True
    if in_table(entry):
        return True
    dtypes = entry.supported_dtypes("cpu")
    if not dtypes:
        return False
    dtype = torch.float32 if torch.float32 in dtypes else min(dtypes, key=str)
    sample = next(iter(entry.sample_inputs("cpu", dtype)), None)
    if sample is None:
        return False
    arguments = (sample.input, *sample.args)
    with _Trace() as trace:
        _, error = outcome(functools.partial(entry.op, **sample.kwargs), arguments)
    if error is not None:  # jiterator wants CUDA
        return False
    counted = [func for func in trace.ran if not func.is_view]
    pointwise = [f for f in counted if torch.Tag.pointwise in f.tags or _packet(f) in UNTAGGED]
    fresh = [f for f in pointwise if _packet(f) in FRESH or _packet(f).startswith(FRESH_PREFIXES)]
    return len(pointwise) == len(counted) > len(fresh)


def pointwise_names() -> list[str]:
    """The names of the entries that are tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated functions, of which none is pointwise
        return sorted(name for name, entry in entries().items() if _is_pointwise(entry))


def spelled() -> set[str]:
    """Every name by which the table knows a torch function or method."""
    tables = (
        op.PLAIN, op.SPELLINGS, op.COMPOSITES, operators.CAST_METHODS, operators.BINARY_OPERATORS,
        operators.REFLECTED_OPERATORS, operators.UNARY_OPERATORS, operators.SPELLED_OPERATORS,
    )  # fmt: skip
    return {"__rpow__"}.union(*tables)


def in_table(entry: Any) -> bool:
    """Whether calls of `entry` are to be recorded."""
    func = entry.op
    if getattr(func, "__name__", "") == "<lambda>":  # around a method or a function of the name
        func = entry.method_variant or getattr(torch, entry.name, None)
    return func in HANDLERS and entry.name.rpartition(".")[2] in spelled()


# --- layouts: what becomes of the input and of every other tensor ---------------------------------


def _given(t: torch.Tensor) -> torch.Tensor:
    return t


def _transposed(t: torch.Tensor) -> torch.Tensor:
    """The same shape, strides ascending."""
    axes = tuple(reversed(range(t.ndim)))
    return t.permute(axes).contiguous().permute(axes)


def _gapped(t: torch.Tensor) -> torch.Tensor:
    """Every second element of memory, from the second on."""
    if not t.ndim:
        return t
    base = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1] + 1)
    return base[..., 1::2].copy_(t)


def _expanded(t: torch.Tensor) -> torch.Tensor:
    """The first row everywhere, stride 0."""
    return t[:1].clone().expand(t.shape) if t.ndim and t.numel() else t


def _scalar(t: torch.Tensor) -> torch.Tensor:
    return t.flatten()[0].clone() if t.numel() else t


def _empty(t: torch.Tensor) -> torch.Tensor:
    return t[..., :0].clone() if t.ndim and t.shape[-1] != 1 else t


LAYOUTS = {
    "as given": (_given, _given),
    "transposed": (_transposed, _transposed),
    "input transposed": (_transposed, _given),
    "others transposed": (_given, _transposed),
    "gaps": (_gapped, _gapped),
    "expanded": (_expanded, _given),
    "others expanded": (_given, _expanded),
    "0-d": (_scalar, _scalar),
    "input 0-d": (_scalar, _given),
    "others 0-d": (_given, _scalar),
    "empty": (_empty, _empty),
}


def laid_out(values: Any, layout: str) -> Any:
    """(input, args, kwargs) with its tensors in another layout."""
    for_input, for_others = LAYOUTS[layout]

    def changed(change: Callable[..., torch.Tensor], t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        with torch.no_grad():
            return change(t.detach()).requires_grad_(t.requires_grad)

    first, *others = values
    return (
        tree_map(functools.partial(changed, for_input), first),
        *tree_map(functools.partial(changed, for_others), others),
    )


def tensors(values: Any) -> list[torch.Tensor]:
    """Every tensor in a container."""
    return [t for t in tree_iter(values) if isinstance(t, torch.Tensor)]


def copied(values: Any) -> Any:
    """An independent copy; strides, offsets, memory and objects that are shared stay so."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, torch.Tensor] = {}

    def copy(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        if id(t) not in copies:
            storage = t.untyped_storage()
            key = storage.data_ptr() or -id(t)  # empty ones have no address
            if key not in storages:
                storages[key] = storage.clone()
            new = torch.empty(0, dtype=t.dtype, device=t.device)
            new.set_(storages[key], t.storage_offset(), t.shape, t.stride())
            copies[id(t)] = new.requires_grad_(t.requires_grad)
        return copies[id(t)]

    return tree_map(copy, values)


# --- calls ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One call: `call(input, *args, **kwargs)` over values = (input, args, kwargs)."""

    entry: str
    dtype: torch.dtype
    variant: str
    layout: str
    wraps: str  # which tensors are wrapped: "all", "input" or "others"
    call: Callable[..., Any]
    values: tuple[Any, tuple[Any, ...], dict[str, Any]]
    recorded: bool = False  # whether every op of it has to be recorded

    def __str__(self) -> str:
        return (
            f"{self.entry}, {str(self.dtype)[6:]}, {self.variant}, {self.layout}, wrapped: "
            f"{self.wraps}, {described(self.values)}"
        )

    def wrapped(self, values: Any) -> Any:
        """`values` with the tensors that `wraps` names wrapped; one handle for one tensor."""
        handles: dict[int, torch.Tensor] = {}

        def wrap(t: Any) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            return handles.setdefault(id(t), autofuse.wrap(t))

        first, *others = values
        first = tree_map(wrap, first) if self.wraps != "others" else first
        return first, *(tree_map(wrap, others) if self.wraps != "input" else others)


def described(values: Any) -> str:
    """The call's arguments; of tensors the dtype, shape and strides."""

    def describe(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            grad = ", requires grad" if value.requires_grad else ""
            return f"<{str(value.dtype)[6:]} {tuple(value.shape)} / {value.stride()}{grad}>"
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(describe, value))}]"
        return repr(value)

    first, args, kwargs = values
    named = (f"{key}={describe(value)}" for key, value in kwargs.items())
    return f"({', '.join((*map(describe, (first, *args)), *named))})"


REFLECTED = {
    f"__r{name}__": getattr(operator, f"__{name}__")
    for name in ("add", "sub", "mul", "truediv", "mod", "pow", "and", "or", "xor")
} | {"__rdiv__": operator.truediv}


def _bound(method: Callable[..., Any]) -> Callable[..., Any]:
    """`x.method(...)`, as users write it."""
    name = getattr(method, "__name__", "")  # a partial of torch.nn.functional's has none
    if getattr(torch.Tensor, name, None) is not method:
        return method
    return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)


def _on_pending(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: call(_clone(x), *args, **kwargs)


def _with_pending(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: call(x, *map(_clone, args), **kwargs)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def variants(entry: Any, values: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, call) of every spelling that takes `values`; `out=` is in `outs`."""
    if entry.name in REFLECTED:  # Python calls it: with a tensor on the left for a subclass only
        yield "operator", lambda x, other: REFLECTED[entry.name](other, x)
        return
    yield "function", entry.op
    first, args, kwargs = values
    if not isinstance(first, torch.Tensor):
        return
    if entry.method_variant is not None:
        yield "method", _bound(entry.method_variant)
        if entry.method_variant is not entry.op:
            yield "unbound method", entry.method_variant
    if entry.operator_variant is not None and not kwargs:
        yield "operator", entry.operator_variant
    for name, call in (
        ("in-place method", entry.inplace_variant and _bound(entry.inplace_variant)),
        ("in-place operator", None if kwargs else entry.inplace_operator_variant),
    ):
        if call is not None:
            yield name, call
            yield f"{name} on a pending value", _on_pending(call)
            if tensors(args):
                yield f"{name} with a pending operand", _with_pending(call)


def outs(entry: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """(name, values with an `out=`)."""
    first, args, kwargs = copied(values)
    result, error = outcome(functools.partial(entry.op, **kwargs), (first, *args))
    if not entry.supports_out or error is not None or not tensors(result):
        return
    first, args, kwargs = values
    for name, change in (
        ("out", torch.ones_like),
        ("out transposed", lambda t: _transposed(torch.ones_like(t))),
        ("out empty", lambda t: t.new_empty(0)),
    ):
        out = tree_map(change, result if isinstance(result, torch.Tensor) else tuple(result))
        yield name, (first, args, {**kwargs, "out": out})


# --- cases ----------------------------------------------------------------------------------------

RECORDED = ("function", "method", "unbound method", "operator")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def draw(entry: Any, device: str, rng: random.Random, grad: bool) -> list[Any]:
    """(dtype, layout, whether for every sample); in a sampled run two, of gradients one."""
    supported = (entry.supported_backward_dtypes if grad else entry.supported_dtypes)(device)
    found = [dtype for dtype in DTYPES if dtype in supported]
    given, *others = LAYOUTS
    if not FULL:
        first = rng.choice([dtype for dtype in found if dtype in FLOATS] or found or [None])
        second = rng.choice([dtype for dtype in found if dtype is not first] or [first])
        few = [(first, given, False), (second, rng.choice(others), False)]
        return [] if first is None else [(first, *rng.choice(few)[1:])] if grad else few
    count = {torch.float32: len(others)}  # of layouts; a new one may be a new kernel
    return [
        (dtype, layout, layout is given)
        for dtype in found
        for layout in (given, *rng.sample(others, count.get(dtype, 3)))
    ]


def cases(entry: Any, device: str, rng: random.Random, grad: bool = False) -> Iterator[Case]:
    """The calls to compare, over every spelling; with `grad` their inputs require grad."""
    for dtype, layout, every in draw(entry, device, rng, grad):
        torch.manual_seed(rng.randrange(2**31))
        samples = _samples(entry, device, dtype, grad, more=every)
        for sample in samples if every else [rng.choice(samples)]:
            values = laid_out((sample.input, sample.args, sample.kwargs), layout)
            wraps = "all" if every else rng.choice(("all", "input", "others"))
            if not tensors(values[1:]):
                wraps = "all"
            elif not tensors(values[0]):
                wraps = "others"
            case = Case(entry.formatted_name, dtype, "", layout, wraps, entry.op, values)
            spellings = list(_spellings(entry, case, grad))
            if not FULL:  # on a pending value they are other kernels
                longer = [case for case in spellings if "pending" in case.variant]
                kept = rng.sample(longer, min(len(longer), 1))
                spellings = [case for case in spellings if case not in longer or case in kept]
            yield from spellings


def _samples(entry: Any, device: str, dtype: torch.dtype, grad: bool, more: bool) -> list[Any]:
    """torch's samples; with `more` also those with other dtypes, scalars, large and extreme values.

    They are drawn anew: torch would seed each with the same number.
    """
    source = entry.reference_inputs if more else entry.sample_inputs
    found = source(device, dtype, requires_grad=grad, set_seed=False)

    def largest(sample: Any) -> int:
        found = tensors((sample.input, sample.args, sample.kwargs))
        return max((t.numel() for t in found), default=-1)

    return [sample for sample in found if 0 <= largest(sample) <= 10_000]


def _spellings(entry: Any, case: Case, grad: bool) -> Iterator[Case]:
    table = in_table(entry)
    for variant, call in variants(entry, case.values):
        if variant == "operator" and case.wraps == "others" and entry.name in COMPARISONS:
            continue  # `plain < wrapped` is asked as `wrapped > plain`, for the layout too
        pending = "on a pending" in variant and case.wraps != "others" and not grad
        recorded = table and (variant in RECORDED or pending)
        yield replace(case, variant=variant, call=call, recorded=recorded)
    for variant, values in () if grad else outs(entry, case.values):
        yield replace(case, variant=variant, values=values)
        on_pending = _on_pending(entry.op)
        yield replace(case, variant=f"{variant}, pending input", call=on_pending, values=values)


# --- why a call of the table may run eagerly all the same -----------------------------------------


def _scalars(values: Any) -> list[Any]:
    return [value for value in tree_iter(values) if type(value) in (bool, int, float)]


def _is_recorded_padding(x: torch.Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    pad, *others = args
    mode = options.get("mode", "constant")
    if others and type(others[0]) is str:
        mode, *others = others
    if mode != "constant" or not any(n > 0 for n in pad) or 0 in x.shape:
        return False
    value = options.get("value", others[0] if others else None)
    value = 0 if value is None else value
    if not (x.is_floating_point() and type(value) in (int, float)) and type(value) is not int:
        return False
    ends = enumerate(zip(pad[::2], pad[1::2], strict=True))
    return all(x.shape[-1 - k] + sum(both) > 1 for k, both in ends if both != (0, 0))


def _is_complex(case: Case, eager: set[tuple[str, str]]) -> bool:
    found = [t.dtype.is_complex for t in tensors(case.values)]
    return any(found) or any(type(value) is complex for value in tree_iter(case.values))


def _is_declined(case: Case, eager: set[tuple[str, str]]) -> bool:
    kinds = {kind(t.dtype) for t in tensors(case.values) if not t.dtype.is_complex}
    floats = any(type(value) is float for value in _scalars(case.values))
    for name, reason in eager:
        if reason == "dtypes that are not fused":
            row = op.OPS[name]
            parameters = {"opmath", "common"} & {*row.roles}
            promoted = "f" if "f" in kinds or floats and not parameters else max(kinds)  # i > b
            if promoted not in row.accepts or (promoted != "f" and floats):
                return True
    return False


def _says(*reasons: str) -> Callable[[Case, set[tuple[str, str]]], bool]:
    return lambda case, eager: any(reason in reasons for _, reason in eager)


ASIDE = {"grad", "narrow", "reshape"}  # what is no pointwise op: backward, and views of operands
EXPLAINED: dict[str, Callable[[Case, set[tuple[str, str]]], bool]] = {
    "complex numbers run eagerly": _is_complex,
    "the row's `accepts` leaves the promoted dtype out, or a parameter is no integer": _is_declined,
    "autofuse gives a reason that is enough": _says(
        "no derivative rule",
        "a scalar that does not fit",
        "a wider 0-d tensor, which the CPU does not round",
        "integer division, which raises on the CPU",
        "other bits than eager's; config.relaxed fuses it",
    ),
    "a cast that also chooses a memory format": lambda case, eager: (
        "memory_format" in case.values[2]
    ),
    "0 ** x and 1 ** x, x ** 0 and x ** 1 are fills and copies": lambda case, eager: (
        "pow" in case.entry and any(value in (0, 1) for value in _scalars(case.values[:2]))
    ),
    "masked_fill with a tensor, or of bool": lambda case, eager: (
        case.entry == "masked_fill"
        and (bool(tensors(case.values[1][1])) or case.values[0].dtype is torch.bool)
    ),
    "two dtypes": lambda case, eager: (
        case.entry in ("addcdiv", "addcmul", "isclose", "ldexp", "nn_functional_huber_loss")
        and len({t.dtype for t in tensors(case.values)}) > 1
    ),
    "these keep the dtype of integers": lambda case, eager: (
        case.entry in ("nn_functional_hardtanh", "nn_functional_relu6", "nan_to_num", "isclose")
        and not case.values[0].is_floating_point()
    ),
    "polygamma sums a series": lambda case, eager: (
        case.entry.startswith(("polygamma", "special_polygamma"))
        and any(n > 1 for n in _scalars(case.values))
    ),
    "a loss that is also reduced": lambda case, eager: (
        case.entry.endswith("_loss") and case.values[2].get("reduction", "mean") != "none"
    ),
    "a loss that is recorded where it is reduced, of operands alike, without weights": (
        lambda case, eager: case.entry == "nn_functional_binary_cross_entropy_with_logits"
    ),
    "recorded in evaluation, on CUDA, without a gradient: tests/test_channels.py": (
        lambda case, eager: case.entry.startswith("nn_functional_batch_norm")
    ),
    "their backward treats two operands at once": lambda case, eager: (
        case.entry in ("nn_functional_glu", "ldexp", "float_power")
        and any(t.requires_grad for t in tensors(case.values))
    ),
    "in place on a real tensor it does nothing": lambda case, eager: case.entry == "conj_physical",
    "a roll of what is not contiguous, or empty": lambda case, eager: (
        case.entry == "roll" and not (case.values[0].is_contiguous() and case.values[0].numel())
    ),
    "padding by no number, to what is hardly anything, or of nothing": lambda case, eager: (
        (case.entry == "constant_pad_nd" or case.entry.startswith("nn_functional_pad_"))
        and not _is_recorded_padding(*case.values)
    ),
    "a copy into another layout": lambda case, eager: case.entry == "contiguous",
    "an empty pending value whose strides TensorIterator would not give": lambda case, eager: (
        "pending" in case.variant and not case.values[0].numel()
    ),
}  # reason -> whether it holds of a call and (op, reason) of what ran eagerly


def is_explained(case: Case, eager: set[tuple[str, str]]) -> bool:
    return any(holds(case, eager) for holds in EXPLAINED.values())


# --- comparison -----------------------------------------------------------------------------------


def check(case: Case, rtol: dict[torch.dtype, float]) -> None:
    """Raise AssertionError unless wrapped tensors do what plain ones do: results, errors, writes.

    rtol: by dtype, on the CPU; on CUDA every bit counts.
    """
    plain, mirror = copied(case.values), copied(case.values)
    wrapped = case.wrapped(mirror)
    want, error = outcome(lambda: case.call(plain[0], *plain[1], **plain[2]), ())
    autofuse.reset_stats()
    got, failure = outcome(lambda: case.call(wrapped[0], *wrapped[1], **wrapped[2]), ())
    ran = autofuse.stats()
    assert type(failure) is type(error), f"raised {failure!r}, not {error!r}"
    assert str(failure) == str(error), f"said {failure}, not {error}"
    same(got, want, rtol, "result")
    for ours, handle, theirs in zip(*map(tensors, (mirror, wrapped, plain)), strict=True):
        same(handle, theirs, rtol, "argument")
        if "out empty" not in case.variant:  # a change of shape is the handle's own
            same(ours, theirs, rtol, "what was wrapped")
        assert ours._version == theirs._version, f"{ours._version=}, not {theirs._version}"
    shared = (sharing(got, wrapped), sharing(want, plain))
    assert shared[0] == shared[1], f"results that are arguments, share their memory: {shared}"
    assert not ran.replays, "the kernel failed"
    if case.recorded and error is None and "argument" not in shared[1]:
        eager = {(name, reason) for name, reason in ran.eager_ops if name not in ASIDE}
        assert ran.ops_recorded and not eager or is_explained(case, eager), f"ran eagerly: {eager}"


def sharing(results: Any, arguments: Any) -> list[str]:
    """Of every pair of a result and an argument: "argument" if the same object, "memory", ""."""
    return [
        "argument" if a is b else "memory" if _address(a) == _address(b) != 0 else ""
        for a in tensors(results)
        for b in tensors(arguments)
    ]


def _address(t: torch.Tensor) -> int:
    t = autofuse.unwrap(t)
    return 0 if t._is_zerotensor() else t.untyped_storage().data_ptr()


def same(got: Any, want: Any, rtol: dict[torch.dtype, float], what: str) -> None:
    """`assert_same` with the tolerance of each tensor's dtype."""
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want), what
        for a, b in zip(got, want, strict=True):
            same(a, b, rtol, what)
    elif isinstance(want, torch.Tensor):
        if want.is_complex() and isinstance(got, torch.Tensor) and got.is_complex():
            got, want = (torch.view_as_real(t.resolve_conj()) for t in (got, want))
        assert_same(got, want, None if want.is_cuda else rtol.get(want.dtype), what)
    else:
        assert got == want, f"{what}: {got!r} is not {want!r}"


def with_gradients(call: Callable[..., Any], dense: bool) -> Callable[..., Any]:
    """`call`, returning (result, gradients of its arguments) for a fixed gradient of the result."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        outputs = [t for t in tensors(result) if t.requires_grad]
        inputs = [t for t in tensors((args, kwargs)) if t.requires_grad]
        if not outputs:
            return result, ()
        seeds = [
            random_tensor(t.shape, t.dtype, t.device.type)
            if dense
            else torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape)
            for t in outputs
        ]
        return result, torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)

    return run
