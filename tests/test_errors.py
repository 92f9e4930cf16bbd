"""Errors appear at the line that made them, with eager's type and text."""

import gc
import time
import weakref
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse.dispatch.protocol import HANDLERS, OPTIONS
from autofuse.inside import in_another_thread
from autofuse.record.modes import forget_all
from support import (
    DEVICES,
    assert_same_as_eager,
    is_called_on,
    write_unseen,
)

pytestmark = pytest.mark.parametrize("device", DEVICES)

WRONG = {
    "shapes": lambda t: t + torch.ones(3, device=t.device),
    "shapes_of_pending": lambda t: (t * 2) + (t.new_ones(3) * 2),
    "neg_bool": lambda t: -(t > 0),
    "sub_bool": lambda t: (t > 0) - (t > 0),
    "not_a_tensor": lambda t: t + "text",
    "none": lambda t: t * None,
    "list": lambda t: t * [1],
    "inverted_float": lambda t: ~t,
    "and_float": lambda t: t & t,
    "gelu_int": lambda t: F.gelu(t.int()),
    "gelu_word": lambda t: F.gelu(t, approximate="maybe"),
    "rounding_mode": lambda t: torch.div(t, 2.0, rounding_mode="up"),
    "alpha_of_int": lambda t: torch.add(t.int(), t.int(), alpha=0.5),
    "clamp_nothing": lambda t: torch.clamp(t),
    "too_many": lambda t: torch.tanh(t, t),
    "keyword": lambda t: torch.add(t, t, beta=2),
    "surplus_of_method": lambda t: t.sigmoid(1),
    "surplus_of_binary": lambda t: t.mul(1, 2),
    "missing": lambda t: torch.mul(t),
    "lerp_dtypes": lambda t: torch.lerp(t, t.double(), 0.5),
    "where_cond": lambda t: torch.where(t, t, t),
    "huge_int": lambda t: t.int() + 2**70,
    "mask_dtype": lambda t: t.masked_fill(t.int(), 1.0),
    "mask_overflow": lambda t: t.half().masked_fill(t > 0, 1e9),
    "int_mask_float": lambda t: t.int().masked_fill(t > 0, 1.5),
    "negative_int_power": lambda t: t.int() ** -1,
    "bool_of_many": lambda t: bool(t * 2),
    "item_of_many": lambda t: (t * 2).item(),
    "view_shape": lambda t: (t * 2).view(3, 5),
    "unknown_attribute": lambda t: (t * 2).nonsense,
    "matmul": lambda t: (t * 2) @ t.new_ones(7, 7),
    "inplace_dtype": lambda t: (t.int() * 2).add_(0.5),
    "inplace_shape": lambda t: (t[0] * 2).add_(t),
    "out_dtype": lambda t: torch.add(t, t, out=torch.empty(4, 4, dtype=torch.int, device=t.device)),
}


@pytest.mark.parametrize("name", WRONG)
def test_same_error_as_eager(name, device):
    assert_same_as_eager(WRONG[name], torch.randn(4, 4, device=device))


def told(function, *args, **kwargs):
    """What a call gives, as far as arguments decide it."""
    try:
        result = function(*args, **kwargs)
    except Exception as error:  # compared with eager's
        # which class C names depends on how Python has compiled the call
        return type(error), str(error).replace("TensorBase.", "Tensor.")
    if isinstance(result, torch.Tensor):
        return torch.Tensor, result.dtype, result.shape
    return type(result)


WRONG_ARGUMENTS = {
    "none": lambda t: ((), {}),
    "one": lambda t: ((1,), {}),
    "two": lambda t: ((1, 2), {}),
    "three": lambda t: ((1, 2, 3), {}),
    "tensors": lambda t: ((t, t, t, t), {}),
    "unknown": lambda t: ((), {"a": 1}),
    "unknown_after_one": lambda t: ((1,), {"a": 1}),
    "out": lambda t: ((), {"out": t}),
    "out_after_one": lambda t: ((t,), {"out": t.clone()}),
    "inplace": lambda t: ((), {"inplace": True}),
    "inplace_after_one": lambda t: ((t,), {"inplace": True}),
    "other": lambda t: ((), {"other": t}),
    "input": lambda t: ((), {"input": t}),
    "nothing": lambda t: ((None,), {}),
    "text": lambda t: (("text",), {}),
    "list": lambda t: (([1],), {}),
}
NOT_CALLED = {  # change the tensor that others share, or crash in torch itself
    "resize_", "resize_as_", "resize_as_sparse_", "set_", "apply_", "map_", "map2_",
    "share_memory_", "__setstate__", "__setattr__", "__torch_function__", "__torch_dispatch__",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS)
def test_wrong_arguments_of_every_method_and_function(arguments, device):
    x = torch.tensor([[0.5, 0.25], [0.75, 0.125]], device=device)
    args, options = WRONG_ARGUMENTS[arguments](x)
    methods = [
        name for name in vars(autofuse.Tensor)
        if name not in NOT_CALLED and type(getattr(torch.Tensor, name, None)).__name__ in
        ("function", "method_descriptor", "wrapper_descriptor") and name != "__hash__"
    ]  # fmt: skip
    functions = [
        getattr(place, name)
        for place in (torch, F, torch._C._nn, torch.special)
        for name in dir(place)
        if getattr(place, name).__hash__ is not None
        and (getattr(place, name) in HANDLERS or getattr(place, name) in OPTIONS)
        # which say what `out` held before, or end the process themselves (torch 2.9)
        and name not in ("histc", "histogram", "gru_cell", "lstm_cell")
        and is_called_on(device, getattr(place, name))
    ]
    assert len(methods) > 500 and len(functions) > (300 if device == "cpu" else 100)
    calls = [lambda t, *args, name=name, **kw: getattr(t, name)(*args, **kw) for name in methods]
    for name, call in zip([*methods, *functions], [*calls, *functions], strict=True):
        want = told(call, x.clone(), *args, **options)
        assert told(call, autofuse.wrap(x.clone()), *args, **options) == want, name
        assert told(call, autofuse.wrap(x) * 1, *args, **options) == want, name


def test_numbers_in_place_of_arguments_of_operators(device):
    w = autofuse.wrap(torch.ones(3, device=device))
    for name in ("__add__", "__rsub__", "__iadd__", "__pow__", "__rpow__", "__and__", "__eq__"):
        assert getattr(w, name)() is NotImplemented
        assert getattr(w * 1, name)() is NotImplemented
    for call in (lambda t: None / t, lambda t: t**None, lambda t: None**t, lambda t: t // "a"):
        assert_same_as_eager(call, torch.ones(3, device=device))


def test_the_error_is_raised_at_the_line(device):
    w = autofuse.wrap(torch.randn(4, device=device))
    with pytest.raises(RuntimeError, match="size of tensor a"):
        w + torch.ones(3, device=device)
    y = w * 2
    assert autofuse.is_pending(y)


def test_valid_odd_calls_do_what_eager_does(device):
    x = torch.randn(4, 4, device=device)
    for call in (
        lambda t: t.to(torch.int) == -1,
        lambda t: t.abs().to(torch.uint8) == -1,
        lambda t: t.abs().to(torch.uint8) + 300,
        lambda t: torch.where(t > 0, 1.0, 2.0),
        lambda t: torch.where(t > 0, t, 2),
        lambda t: t.int() // 2,
        lambda t: t.int() % 3,
        lambda t: torch.add(input=t, other=t),
        lambda t: torch.add(t, t, alpha=2),
        lambda t: t.float(),
        lambda t: t.to(t.device),
        lambda t: t.to("cpu"),
        lambda t: t.to(torch.float64, copy=True),
        lambda t: t.bool() + t.bool(),
        lambda t: t.bool() * t.bool(),
        lambda t: t**0,
        lambda t: t**1,
        lambda t: 2**t,
        lambda t: t.int() ** 2,
        lambda t: t.half() + 1,
        lambda t: t == None,  # noqa: E711 - torch gives False
        lambda t: t + t[0, 0],
        lambda t: t.int() + t.double()[0, 0],
        lambda t: t.half() * t[0, 0],
        lambda t: t + torch.tensor(2.5),
        lambda t: t.int() * torch.tensor(2.5),
        lambda t: t.new_ones(0, 4) * 2,
        lambda t: (t[0, 0] * 2) + 1,
        lambda t: torch.round(t, decimals=1),
        lambda t: +t,
        lambda t: t.logical_not(),
        lambda t: t.bool() & t.bool() | ~t.bool() ^ t.bool(),
        lambda t: torch.maximum(t, t.double()),
        lambda t: t.clamp(0, 1.5).type(torch.float16).type_as(t),
        lambda t: torch.clamp(t.int(), 0.5, 1.5),
        lambda t: t.expand(3, 4, 4) * 2,
        lambda t: torch.complex(t, t) * t,
    ):
        assert_same_as_eager(call, x, rtol=1e-6)


# --- what errors hold ----------------------------------------------------------------------------


class Raised(Exception):
    """What functions of a program raise here."""


def _raise(*_):
    raise Raised


def _stale(t):
    y = autofuse.wrap(t) * 2
    write_unseen(autofuse.unwrap(t)[0])
    autofuse.materialize(y)


def _twice_stale(t):
    y = autofuse.wrap(t) * 2
    write_unseen(autofuse.unwrap(t)[0])
    with suppress(autofuse.StaleInputError):
        autofuse.materialize(y)
    print(y)


def _hooked(t):
    with torch.autograd.graph.saved_tensors_hooks(_raise, _raise):
        autofuse.materialize(t.requires_grad_().tanh() * t)


def _in_backward(t):
    y = t.requires_grad_().tanh() * t
    y.register_hook(_raise)
    (y * 2).sum().backward()


def _full(t):
    forget_all("test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autofuse.record.failures, "run_ops", _raise)
        patch.setattr(autofuse.record.flush, "runner_for", _raise)
        autofuse.materialize(t * 3)


ENDINGS = {
    **WRONG,
    "stale": _stale,
    "lost": _twice_stale,
    "hook of saved tensors": _hooked,
    "hook in backward": _in_backward,
    "flush": _full,
    "fused function": lambda t: autofuse.fuse(_raise)(t),
    "in another thread": lambda t: in_another_thread(_raise),
}


class Local:
    """Something that a frame holds."""


@pytest.mark.parametrize("name", ENDINGS)
def test_errors_hold_no_frame_once_they_are_gone(name, device):
    """Else tensors of these frames, after an error of memory too, wait for the collector."""

    def program():
        local = Local()
        seen.append(weakref.ref(local))
        ENDINGS[name](autofuse.wrap(torch.randn(4, 4, device=device)))

    seen: list[weakref.ref[Local]] = []
    collects = gc.isenabled()
    for _ in range(3):
        try:
            gc.disable()
            try:
                program()
            except Exception:
                error = True
            else:
                error = False
            assert error or name in WRONG  # of which eager raises what it does on this device
            local = seen.pop()
            deadline = time.monotonic() + 2.0  # threads of torch's engine let go a moment later
            while local() is not None and device == "cuda" and time.monotonic() < deadline:
                time.sleep(0.001)
            assert local() is None
        finally:
            if collects:
                gc.enable()
