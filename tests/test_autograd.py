"""What autograd lets a user observe: every scenario runs on plain and on wrapped tensors.

A scenario takes `wrap` (the identity, or `autofuse.wrap`) and a device; what it returns, or the
error it raises, must be the same both times.
"""

import gc
import sys
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse.chain.state import this_thread
from autofuse.dispatch.nested import mapped
from autofuse.grad import rules
from autofuse.grad.straight import eager_of
from autofuse.torch_private import NoModes
from support import DEVICES, assert_same, needs_cuda, random_tensor

SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)


def leaf(device, seed=0, shape=(4, 6), dtype=torch.float32, grad=True):
    return random_tensor(shape, dtype, device, seed).requires_grad_(grad)


def outcome(function, wrap, device):
    try:
        result = function(wrap, device)
        autofuse.materialize(result)
        return result
    except Exception as error:
        return error


def plain(tensor):
    return tensor


# --- gradients ------------------------------------------------------------------------------------


@scenario
def several_inputs_some_without_grad(wrap, device):
    x, w = wrap(leaf(device)), leaf(device, 1)
    b = leaf(device, 2, grad=False)
    y = torch.tanh(x * w + b) * b
    y.sum().backward()
    return x.grad, w.grad, b.grad, y


@scenario
def same_input_twice(wrap, device):
    x = wrap(leaf(device))
    y = x * x + torch.sigmoid(x) * x
    return torch.autograd.grad(y, x, torch.ones_like(y))


@scenario
def gradients_add_up_in_eagers_order(wrap, device):
    x = wrap(leaf(device, shape=(50, 50)))
    w = leaf(device, 1, (50, 50))
    a = torch.sin(x) * 3.7
    m = x @ w
    b = a + torch.cos(x) * m * x
    y = b + (x @ w.t()) * x
    return torch.autograd.grad(y, (x, w), torch.ones_like(y))


@scenario
def interleaved_uses(wrap, device):
    x = wrap(leaf(device, shape=(300,)))
    t = x * 1.1
    u = torch.sin(x)
    v = t * 3.3 + x * 0.7
    y = (u * 1.7).exp() * v + u
    return [*torch.autograd.grad(y, x, torch.ones_like(y)), u, v]


@scenario
def several_live_outputs(wrap, device):
    x = wrap(leaf(device))
    a = torch.exp(x * 0.1)
    b = torch.sin(a) + a
    c = b * a
    first = torch.autograd.grad(b, x, torch.ones_like(b), retain_graph=True)
    return [*first, *torch.autograd.grad(c, (x, a, b), torch.ones_like(c)), a, b, c]


@scenario
def unused_and_disconnected(wrap, device):
    x, z = wrap(leaf(device)), wrap(leaf(device, 1))
    a = torch.exp(x)
    b = torch.exp(z)
    grads = torch.autograd.grad(a, (x, z, b), torch.ones_like(a), allow_unused=True)
    return [g is None for g in grads], grads[0]


@scenario
def a_dead_value_that_two_live_ones_share(wrap, device):
    x = wrap(leaf(device, shape=(100,)))
    shared = torch.tanh(x * 1.3)
    a = shared * 3.1
    b = torch.sin(shared) * 0.3
    del shared
    return torch.autograd.grad([a, b], x, [torch.ones_like(a), torch.ones_like(b)])


@scenario
def broadcasting(wrap, device):
    x, row = wrap(leaf(device, shape=(5, 1, 7))), wrap(leaf(device, 1, (7,)))
    column, number = leaf(device, 2, (3, 1)), leaf(device, 3, ())
    y = torch.sigmoid((x * row) * (row * 2.0).sin() + column * number) * row
    y.sum().backward()
    return x.grad, row.grad, column.grad, number.grad, y


@scenario
def mixed_dtypes(wrap, device):
    x = wrap(leaf(device, dtype=torch.float32))
    h = leaf(device, 1, dtype=torch.float16)
    d = leaf(device, 2, dtype=torch.float64)
    y = (x * h).half() + h
    z = (y.double() * d).float() + x.bfloat16() * 0.5
    return [*torch.autograd.grad(z, (x, h, d), torch.ones_like(z)), y]


@scenario
def integers_and_masks_inside(wrap, device):
    x = wrap(leaf(device))
    counts = torch.arange(24, device=device).view(4, 6)
    mask = x > 0.1
    y = torch.where(mask, x * counts, x.floor() + counts.bool())
    y = y.masked_fill(counts % 2 == 0, 1.5) * (x.int() + 1)
    return [*torch.autograd.grad(y, x, torch.ones_like(y)), mask.requires_grad, y.requires_grad]


@scenario
def layouts(wrap, device):
    x = wrap(leaf(device, shape=(6, 4)).t())
    w = leaf(device, 1, (4, 12))[:, ::2]
    y = torch.tanh(x * w)
    gx, gw = torch.autograd.grad(y, (x, w), torch.ones(1, device=device).expand(4, 6))
    return y, gx, gw


@scenario
def channels_last(wrap, device):
    x = leaf(device, shape=(2, 3, 4, 5)).detach().to(memory_format=torch.channels_last)
    x = wrap(x.requires_grad_())
    y = torch.sigmoid(x * leaf(device, 1, (3, 1, 1)))
    y.sum().backward()
    return x.grad, y


@scenario
def zero_gradients_are_not_none(wrap, device):
    x = wrap(leaf(device))
    y = torch.round(x * 2.0)
    return torch.autograd.grad(y, x, torch.ones_like(y)), y.requires_grad, (x > 0).requires_grad


@scenario
def empty(wrap, device):
    x = wrap(leaf(device, shape=(0, 3)))
    y = torch.tanh(x * 2.0)
    y.sum().backward()
    return x.grad


# --- modes ----------------------------------------------------------------------------------------


@scenario
def recorded_without_grad_flushed_with_it(wrap, device):
    x = wrap(leaf(device))
    with torch.no_grad():
        a = x * 2.0
    b = a + x
    return a.requires_grad, b.requires_grad, *torch.autograd.grad(b, x, torch.ones_like(b))


@scenario
def recorded_with_grad_flushed_without_it(wrap, device):
    x = wrap(leaf(device))
    a = torch.sin(x)
    with torch.no_grad():
        b = a * 2.0
        values = torch.tensor(a.tolist())
    return a.requires_grad, b.requires_grad, values, *torch.autograd.grad(a.sum(), x)


@scenario
def modes_that_come_and_go(wrap, device):
    x = wrap(leaf(device))
    a = x * 2.0
    torch.set_grad_enabled(False)
    b = a + 1.0
    with torch.enable_grad():
        c = torch.tanh(a) * b
    d = c + 1.0
    torch.set_grad_enabled(True)
    e = c + d
    flags = [t.requires_grad for t in (a, b, c, d, e)]
    return flags, *torch.autograd.grad(e.sum(), x)


@scenario
def modes_that_are_set_in_c(wrap, device):
    """Past every function that is told of it, in the middle of a chain, pending or just begun."""
    x, told = wrap(leaf(device)), []
    for _ in range(3):
        a = x * 2.0
        torch._C._set_grad_enabled(False)
        b = torch.tanh(a + x).mul(3.0)
        told.append((a.requires_grad, b.requires_grad, (x * 2.0).requires_grad))
        torch._C._set_grad_enabled(True)
        c = b * x - a
        told.append((c.requires_grad, *torch.autograd.grad(c.sum(), x)))
    return [flag for flags in told for flag in flags]


@scenario
def inference_mode(wrap, device):
    x = wrap(leaf(device))
    a = torch.sin(x)
    with torch.inference_mode():
        b = a * 2.0
    return b.requires_grad, b.is_inference(), *torch.autograd.grad(a.sum(), x)


@scenario
def saving_an_inference_tensor(wrap, device):
    x = wrap(leaf(device))
    with torch.inference_mode():
        b = torch.ones(4, 6, device=device) * 2.0
    y = x * b
    return y.sum()


# --- leaf-ness, detaching -------------------------------------------------------------------------


@scenario
def properties(wrap, device):
    x = wrap(leaf(device))
    y = torch.sin(x) * 2.0
    z = wrap(leaf(device, grad=False)) * 2.0
    return (x.is_leaf, x.requires_grad, y.is_leaf, y.requires_grad, y.grad_fn is None,
            z.is_leaf, z.requires_grad, z.grad_fn, y.output_nr, y._version)  # fmt: skip


@scenario
def detach(wrap, device):
    x = wrap(leaf(device))
    y = torch.sin(x)
    z = y.detach() * x
    d = y.data * 2.0
    return z, d.requires_grad, *torch.autograd.grad(z.sum(), x)


@scenario
def requires_grad_on_a_pending_constant(wrap, device):
    x = wrap(leaf(device, grad=False))
    y = (x * 2.0).requires_grad_()
    z = torch.sin(y) * y
    z.sum().backward()
    return y.grad, y.is_leaf


@scenario
def requires_grad_off_on_a_pending_value(wrap, device):
    y = wrap(leaf(device)) * 2.0
    y.requires_grad_(False)


@scenario
def accumulating_into_grad(wrap, device):
    x = wrap(leaf(device))
    for scale in (1.0, 2.0, 3.0):
        (torch.sin(x * scale) * x).sum().backward()
    return x.grad, x.grad.is_contiguous()


# --- graph structure ------------------------------------------------------------------------------


@scenario
def retain_grad(wrap, device):
    x = wrap(leaf(device))
    y = torch.sin(x)
    y.retain_grad()
    z = y * y
    z.sum().backward()
    return y.grad, x.grad, y.is_leaf


@scenario
def tensor_hooks(wrap, device):
    x = wrap(leaf(device))
    seen = []
    y = torch.sin(x) * 2.0
    y.register_hook(lambda g: seen.append(g) or g * 3.0)
    x.register_hook(lambda g: seen.append(g))
    (y * x).sum().backward()
    return seen, x.grad


@scenario
def hook_that_uses_wrapped_tensors(wrap, device):
    x = wrap(leaf(device))
    y = torch.sin(x) * 2.0
    y.register_hook(lambda g: wrap(g.detach()) * 3.0 + 1.0)
    torch.cos(y).sum().backward()
    return x.grad


@scenario
def hook_result_that_cpp_holds(wrap, device):
    x = wrap(leaf(device))
    y = torch.sin(x) * x
    y.register_hook(lambda g: wrap(g.detach()) * 2.0)
    y.retain_grad()
    torch.exp(y * 0.1).sum().backward()
    return x.grad, y.grad


@scenario
def values_recorded_in_a_hook_and_used_after(wrap, device):
    x = wrap(leaf(device))
    with torch.no_grad():
        a = x * 2.0
        z = a * x
        autofuse.materialize(z)
    box = []
    handle = x.register_hook(lambda g: box.append(x * 2.0) or None)
    (x * 3.0).sum().backward()
    handle.remove()
    z = box[0] * x
    return z.requires_grad, z, *torch.autograd.grad(z.sum(), x)


@scenario
def post_accumulate_hook(wrap, device):
    p = nn.Parameter(leaf(device).detach())
    seen = []
    p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad.clone()))
    x = wrap(leaf(device, 1, grad=False))
    (torch.sin(x * p) * p).sum().backward()
    return seen


@scenario
def module_hooks(wrap, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device)
    seen = []
    for module in model:
        module.register_full_backward_hook(lambda m, gi, go: seen.append((gi, go)))
        module.register_forward_hook(lambda m, args, out: out * 1.5)
    x = wrap(leaf(device))
    model(x * 2.0).sum().backward()
    return seen, x.grad


@scenario
def backward_inputs(wrap, device):
    x, w = wrap(leaf(device)), leaf(device, 1)
    y = torch.sin(x * w)
    z = y * w
    z.sum().backward(inputs=[y, w])
    return x.grad, w.grad, y.grad


@scenario
def grad_through_a_live_intermediate(wrap, device):
    x = wrap(leaf(device))
    y = torch.sin(x)
    z = torch.cos(y) * y
    (gy,) = torch.autograd.grad(z, y, torch.ones_like(z), retain_graph=True)
    (gx,) = torch.autograd.grad(z, x, torch.ones_like(z))
    return gy, gx


@scenario
def gradient_edges(wrap, device):
    from torch.autograd.graph import get_gradient_edge

    x = wrap(leaf(device))
    y = torch.sin(x) * 2.0
    z = torch.cos(y)
    return torch.autograd.grad(z.sum(), get_gradient_edge(y))


# --- saving ---------------------------------------------------------------------------------------

SAVING = {
    "sin": torch.sin, "exp": torch.exp, "tanh": torch.tanh, "neg": torch.neg,
    "add": lambda x: x + x, "mul scalar": lambda x: x * 2.0, "add scalar": lambda x: x + 2.0,
    "square": torch.square, "relu": torch.relu, "clone": torch.clone, "abs": torch.abs,
    "exp and neg": lambda x: -torch.exp(x), "tanh of neg": lambda x: torch.tanh(-x),
    "sin of double": lambda x: torch.sin(x + x), "round": torch.round,
    "casts": lambda x: x.double().float(), "chain": lambda x: torch.sigmoid(x + 1.0) * 3.0,
}  # fmt: skip


def _kind(error):
    """An error's type and the part of its text that names no graph node."""
    return type(error).__name__, str(error).split(":")[0][:90]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("when", ["input", "output", "twice"])
@pytest.mark.parametrize("name", SAVING)
def test_what_is_saved_is_what_eager_saves(name, when, device):
    """Writing what eager saved is an error at backward, writing anything else is none."""
    results = []
    for wrap in (plain, autofuse.wrap):
        x = leaf(device)
        base = x * 1.0
        y = SAVING[name](wrap(base))
        autofuse.materialize(y)
        try:
            if when == "input":
                with torch.no_grad():
                    base.add_(1.0)
            elif when == "output":
                with torch.no_grad():
                    y.add_(1.0)
            else:
                torch.autograd.grad(y.sum(), base, retain_graph=False)
            torch.autograd.grad(y, base, torch.ones_like(y))
            results.append(None)
        except RuntimeError as error:
            results.append(_kind(error))
    assert results[0] == results[1]


PAIRS = {
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div floor scalar": lambda x, y: torch.div(x, 0.3, rounding_mode="floor"),
    "div": torch.div, "mul": torch.mul, "add": torch.add, "maximum": torch.maximum,
    "atan2": torch.atan2, "copysign": torch.copysign, "fmod": torch.fmod,
    "pow": lambda x, y: torch.pow(x.abs(), y), "rpow": lambda x, y: 2.0**x,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3), "lerp of weight": lambda x, y: torch.lerp(y, y, x),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y),
    "addcdiv of y": lambda x, y: torch.addcdiv(y, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, y), "where": lambda x, y: torch.where(y > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 0.5), "clamp": lambda x, y: x.clamp(min=y),
    "hypot": torch.hypot, "sub alpha": lambda x, y: torch.sub(x, y, alpha=0.4),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grads", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_what_two_operands_save(name, grads, device):
    """Every operand and the result written before backward, and backward twice."""
    for written in ("x", "y", "result", "nothing"):
        results = []
        for wrap in (plain, autofuse.wrap):
            leaves = [leaf(device, k, grad=grad) for k, grad in enumerate(grads)]
            operands = [t * 1.0 if t.requires_grad else t.clone() for t in leaves]
            result = PAIRS[name](*map(wrap, operands))
            autofuse.materialize(result)
            if not result.requires_grad:
                return
            targets = [t for t in operands if t.requires_grad]
            try:
                with torch.no_grad():
                    if written == "result":
                        result.add_(1.0)
                    elif written != "nothing":
                        operands["xy".index(written)].add_(1.0)
                for _ in range(2 if written == "nothing" else 1):
                    torch.autograd.grad(result, targets, torch.ones_like(result), allow_unused=True)
                results.append(None)
            except RuntimeError as error:
                results.append(_kind(error))
        assert results[0] == results[1], written


def eager_bytes(function, *args):
    """Bytes of the distinct tensors that eager saves."""
    saved = {}

    def pack(t):
        saved[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with autofuse.disabled(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function(*args)
    del result
    return sum(saved.values())


def lstm(f, i, g, o, c):
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "function, count, bound",
    [
        (lambda x, w: torch.tanh(x * w) * w, 2, 1.0),
        (lambda x, w: x + w * 2.0, 2, 1.0),
        (lambda x, w: torch.nn.functional.silu(x) * w, 2, 0.7),
        (lambda x, w: torch.sin(torch.cos(torch.exp(x * 0.1))) * w, 2, 0.8),
        (lstm, 5, 1.0),
    ],
)
def test_bytes_saved(function, count, bound, device):
    """Never more than eager keeps, and less where a value follows from another one kept."""
    operands = [leaf(device, k) for k in range(count)]
    most = eager_bytes(function, *operands)
    autofuse.reset_stats()
    result = function(*map(autofuse.wrap, operands))
    autofuse.materialize(result)
    assert autofuse.stats().bytes_saved_for_backward <= bound * most


@pytest.mark.parametrize("device", DEVICES)
def test_recompute_from_the_inputs(device, monkeypatch):
    """Nothing but the Inputs is kept; the gradients are the same bits."""
    monkeypatch.setattr(autofuse.config, "recompute", "inputs")
    x, w = leaf(device, shape=(32, 3)), leaf(device, 1, shape=(32, 3))

    def chain(x, w):
        return torch.sigmoid(torch.tanh(x * w + 1.0) * torch.exp(x))

    autofuse.reset_stats()
    y = chain(autofuse.wrap(x), w)
    got = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert autofuse.stats().bytes_saved_for_backward == 2 * x.nbytes
    with autofuse.disabled():
        y = chain(x.detach().requires_grad_(), w)
        want = torch.autograd.grad(chain(x, w), (x, w), torch.ones_like(y))
    assert_same(got, want, 1e-5 if device == "cpu" else None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["broadcasting", "same_input_twice", "several_live_outputs"])
def test_recompute_from_the_inputs_as_eager(name, device, monkeypatch):
    want = outcome(SCENARIOS[name], plain, device)
    monkeypatch.setattr(autofuse.config, "recompute", "inputs")
    got = outcome(SCENARIOS[name], autofuse.wrap, device)
    assert_same(mapped(got, autofuse.unwrap), want, 2e-5 if device == "cpu" else 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_without_the_values_are_refused(device, monkeypatch):
    monkeypatch.setattr(autofuse.config, "recompute", "inputs")
    x = autofuse.wrap(leaf(device))
    a = torch.sin(x * 2.0)
    b = torch.exp(a) * a
    with pytest.raises(RuntimeError, match="recompute = 'inputs'"):
        torch.autograd.grad(b.sum(), a, create_graph=True)
    del b
    c = torch.exp(x * 2.0) * x
    (g,) = torch.autograd.grad(c.sum(), x, create_graph=True)
    assert torch.autograd.grad(g.sum(), x)[0].shape == x.shape


# --- higher derivatives ---------------------------------------------------------------------------


@scenario
def second_derivatives(wrap, device):
    x = wrap(leaf(device, dtype=torch.float64))
    w = leaf(device, 1, dtype=torch.float64)
    y = torch.tanh(torch.sin(x * w) * torch.sigmoid(x)) * w
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad((g * g).sum(), x, create_graph=True)
    return g, h, *torch.autograd.grad((h * h).sum(), (x, w))


@scenario
def gradient_penalty(wrap, device):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, device=device), nn.Linear(8, 1, device=device)]
    x = wrap(leaf(device))
    out = layers[1](torch.nn.functional.softplus(layers[0](x * 1.5)) * 2.0)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    penalty = ((g.square().sum(1) + 1e-6).sqrt() - 1.0).square().mean()
    penalty.backward()
    return penalty, [p.grad for layer in layers for p in layer.parameters()]


@scenario
def dead_intermediates_in_second_derivatives(wrap, device):
    f, i, g, o, c = (wrap(leaf(device, k, dtype=torch.float64)) for k in range(5))
    h, c2 = lstm(f, i, g, o, c)
    first = torch.autograd.grad((h * c2).sum(), (f, i, g, o, c), create_graph=True)
    total = sum((a * a).sum() for a in first)
    return [*first, *torch.autograd.grad(total, (f, i, g, o, c))]


def curved(x, w):
    """Its rules compute a value again and read numbers; for `x`, `w` and a value that is seen."""
    a = torch.sin(x * w)
    return torch.erf(a * 0.5) * torch.sigmoid(a) + x**2, a * 2.0


def differentiate(x, w, both=True, first=True):
    """First and second derivatives, for both results of `curved` or for one of them."""
    outs = [y for y, wanted in zip(curved(x, w), (first, both), strict=True) if wanted]
    found = torch.autograd.grad([y.sum() for y in outs], (x, w), create_graph=True)
    return *found, *torch.autograd.grad((found[0] * found[1]).sum(), (x, w))


@pytest.mark.parametrize("device", DEVICES)
def test_rules_are_read_once_for_many_backwards(device):
    """Under `create_graph` a node's later ones enter what was written and no rules."""
    x, w = autofuse.wrap(leaf(device)), leaf(device, 1)
    entered = []

    def profile(frame, event, argument):
        if event == "call":
            entered.append((frame.f_globals.get("__name__"), frame.f_code.co_name))

    def step():
        entered.clear()
        sys.setprofile(profile)
        try:
            differentiate(x, w)
        finally:
            sys.setprofile(None)
        return [place for place in entered if str(place[0]).startswith("autofuse.grad.")], entered

    before, _ = map(set, step())
    assert ("autofuse.grad.rules", "sweep") in before
    for _ in range(15):
        after, every = step()
    modules = {module for module, _ in after}  # of a sum that is recorded, torch makes the node
    assert modules - {"autofuse.grad.nodes"} == {"autofuse.grad.backward"}
    assert (None, "straight") in every


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_written_is_for_the_gradients_that_came(device):
    """By turns those of one result, of the other and of both: each once more as at first."""
    dtype = torch.float64
    x, w = leaf(device, dtype=dtype), leaf(device, 1, dtype=dtype)
    wrapped = autofuse.wrap(leaf(device, dtype=dtype))
    for both, first in ((True, True), (False, True), (True, False)) * 2:
        want = differentiate(x, w, both, first)
        got = differentiate(wrapped, w, both, first)
        assert_same(mapped(got, autofuse.unwrap), want, 1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_written_is_for_autocast_or_without(device):
    """What a rule reads is computed again with the chain's own casts, inside and outside."""
    x, w = leaf(device), leaf(device, 1)
    wrapped = autofuse.wrap(leaf(device))
    for on in (False, True) * 2:
        found = []
        for one in (x, wrapped):
            outs = curved(one, w)
            total = sum(y.sum() for y in outs)
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=on):
                found.append(torch.autograd.grad(total, (one, w), create_graph=True))
        want, got = found
        assert_same(mapped(got, autofuse.unwrap), want, 2e-2 if on else 2e-5)


def test_values_go_as_soon_as_no_rule_reads_them():
    """A backward by torch's ops that keeps no graph holds few of its values at once."""
    alive, most = [], []

    def watching(op):
        def call(*operands):
            result = eager_of(op)(*operands)
            alive.append(weakref.ref(result))
            most.append(sum(ref() is not None for ref in alive))
            return result

        return call

    x = autofuse.wrap(leaf("cpu"))
    y = x
    for _ in range(12):
        y = torch.sin(y)
    autofuse.materialize(y)
    backward, consts = y.grad_fn.work
    straight = rules.written(backward.segment, (False, False), watching)
    with torch.no_grad(), NoModes():
        straight((torch.ones(4, 6),), y.grad_fn.saved_tensors, consts)
    values = 11  # that rules read and nobody has seen, in one tensor or computed again
    assert len(most) >= 24 and max(most) <= values + 3, most


def test_what_was_written_goes_with_what_holds_it():
    """A function whose rules cast is in no cycle: check mode's hold tensors."""

    class Caller:
        def __call__(self, op):
            return eager_of(op)

    x, z = autofuse.wrap(leaf("cpu")), autofuse.wrap(leaf("cpu", 1))
    y = autofuse.materialize(torch.pow(torch.exp(x), torch.sin(z)) * 2)
    backward, consts = y.grad_fn.work
    call, others = Caller(), len(backward.segment.outs) - 1
    straight = rules.written(backward.segment, (False, False, *[True] * others), call)
    assert "cast" in straight.__globals__
    with torch.no_grad(), NoModes():
        straight((torch.ones(4, 6), *[None] * others), y.grad_fn.saved_tensors, consts)
    gone = weakref.ref(call)
    gc.collect()
    gc.disable()
    try:
        del straight, call
        assert gone() is None
    finally:
        gc.enable()


# --- machinery that is left to eager --------------------------------------------------------------


@scenario
def anomaly_mode(wrap, device):
    x = wrap(leaf(device))
    with torch.autograd.detect_anomaly(check_nan=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = torch.where(x > 100.0, torch.sqrt(x * 0.0 - 1.0), x)
        y.sum().backward()


@scenario
def saved_tensors_hooks(wrap, device):
    x, packed, unpacked = wrap(leaf(device)), [], []
    before = torch.sin(x)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(tuple(t.shape)) or t, lambda t: unpacked.append(t.shape) or t
    ):
        y = torch.exp(torch.sin(before) * x) * 2.0
    (y * torch.cos(x)).sum().backward()
    return len(packed), len(unpacked), x.grad


@scenario
def save_on_cpu(wrap, device):
    x = wrap(leaf(device))
    with torch.autograd.graph.save_on_cpu():
        y = torch.exp(torch.sin(x) * x)
    y.sum().backward()
    return x.grad


def _checkpointed(wrap, device, reentrant):
    x, w = wrap(leaf(device)), leaf(device, 1)

    def block(x):
        return torch.tanh(torch.sin(x * w) * x) + w

    y = checkpoint(block, x * 2.0, use_reentrant=reentrant)
    torch.exp(y * 0.1).sum().backward()
    return x.grad, w.grad


@scenario
def checkpoint_reentrant(wrap, device):
    return _checkpointed(wrap, device, True)


@scenario
def checkpoint_not_reentrant(wrap, device):
    return _checkpointed(wrap, device, False)


@scenario
def forward_mode(wrap, device):
    x, t = leaf(device), leaf(device, 1, grad=False)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(wrap(x.detach()), t)
        return forward_ad.unpack_dual(torch.sin(dual * 2.0) * dual).tangent


@scenario
def batched_gradients(wrap, device):
    x = wrap(leaf(device, shape=(5,)))
    y = torch.sin(x) * 2.0 + x
    eye = torch.eye(5, device=device)
    return torch.autograd.grad(y, x, eye, is_grads_batched=True)


@scenario
def tangent_of_a_wrapped_dual(wrap, device):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf(device, grad=False), leaf(device, 1, grad=False))
        return forward_ad.unpack_dual(torch.sin(wrap(dual))).tangent


@scenario
def functional_transforms(wrap, device):
    x = leaf(device, shape=(5,), grad=False)
    w = wrap(leaf(device, 1, (5,), grad=False)) * 2.0

    def loss(x):
        return (torch.sin(x * w) * x).sum()

    return (torch.func.grad(loss)(wrap(x) + 1.0), torch.func.jacrev(lambda x: x.sin() * w)(wrap(x)),
            torch.func.vmap(lambda a: a * 2.0 + w[0])(wrap(x)))  # fmt: skip


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3.0 * x * x


@scenario
def user_function(wrap, device):
    x = wrap(leaf(device))
    y = Cube.apply(torch.sin(x) * 2.0)
    z = torch.cos(y) * y
    z.sum().backward()
    return x.grad, y


@scenario
def jit_function(wrap, device):
    x = wrap(leaf(device))
    traced = torch.jit.trace(lambda t: t * 2.0 + 1.0, torch.ones(4, 6, device=device))
    y = torch.sin(traced(torch.cos(x)))
    y.sum().backward()
    return x.grad


# --- in place ------------------------------------------------------------------------------------


@scenario
def inplace_on_a_pending_value(wrap, device):
    x, w = wrap(leaf(device)), leaf(device, 1)
    y = x * 2.0
    y.add_(w)
    y *= w
    z = torch.sin(y)
    z.sum().backward()
    return x.grad, w.grad, y._version


@scenario
def inplace_on_a_constant_that_is_saved_then(wrap, device):
    x, w = wrap(leaf(device)), wrap(leaf(device, 1, grad=False))
    c = w * 2.0
    c.add_(1.0)
    y = c * x
    y.sum().backward()
    return x.grad, c._version


@scenario
def inplace_on_a_saved_result(wrap, device):
    x = wrap(leaf(device))
    y = torch.exp(x)
    y.add_(1.0)
    y.sum().backward()


@scenario
def inplace_on_a_leaf(wrap, device):
    x = wrap(leaf(device))
    x.add_(1.0)


@scenario
def inplace_on_a_view_of_a_leaf(wrap, device):
    x = wrap(leaf(device))
    x[0].mul_(2.0)


@scenario
def inplace_on_a_view(wrap, device):
    x, w = wrap(leaf(device)), leaf(device, 1, (6,))
    y = torch.sin(x) * 2.0
    y[0] = w * 3.0
    y[1].mul_(w)
    z = y * y
    z.sum().backward()
    return x.grad, w.grad


@scenario
def inplace_makes_a_buffer_require_grad(wrap, device):
    x = wrap(leaf(device))
    buffer = wrap(torch.zeros(4, 6, device=device))
    buffer.add_(torch.sin(x) * 2.0)
    buffer.mul_(x)
    (buffer * 2.0).sum().backward()
    return x.grad, buffer.requires_grad


@scenario
def input_written_before_backward(wrap, device):
    x, w = wrap(leaf(device)), wrap(leaf(device, 1, grad=False))
    y = torch.sin(x * w) * 2.0
    w.add_(1.0)
    y.sum().backward()


@scenario
def unsaved_input_written_before_backward(wrap, device):
    x, w = wrap(leaf(device)), wrap(leaf(device, 1, grad=False))
    y = torch.sin(x + w) * 2.0
    w.add_(1.0)
    y.sum().backward()
    return x.grad


@scenario
def parameter_stepped_while_pending(wrap, device):
    p = nn.Parameter(leaf(device).detach())
    optimizer = torch.optim.SGD([p], lr=0.1)
    x = wrap(leaf(device, 1, grad=False))
    p.grad = torch.ones_like(p)
    with torch.no_grad():
        y = x * p + 1.0
    z = x + p
    optimizer.step()
    return y, z, *torch.autograd.grad(z.sum(), p)


# --- bad input ------------------------------------------------------------------------------------


@scenario
def backward_of_a_freed_graph(wrap, device):
    x = wrap(leaf(device))
    y = (torch.sin(x) * x).sum()
    y.backward()
    y.backward()


@scenario
def gradient_of_another_shape(wrap, device):
    y = torch.sin(wrap(leaf(device))) * 2.0
    y.backward(torch.ones(3, device=device))


@scenario
def gradient_of_another_dtype(wrap, device):
    x = wrap(leaf(device))
    y = torch.sin(x) * 2.0
    y.backward(torch.ones(4, 6, device=device, dtype=torch.float64))
    return x.grad


@scenario
def backward_of_a_constant(wrap, device):
    (wrap(leaf(device, grad=False)) * 2.0).sum().backward()


@scenario
def implicit_gradient_of_a_matrix(wrap, device):
    (wrap(leaf(device)) * 2.0).backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_as_eager(name, device):
    want = outcome(SCENARIOS[name], plain, device)
    # a graph of derivatives has other nodes than eager's, which add in another order
    second = "second" in name or "penalty" in name
    for _ in range(3):  # from the second time on the trie is known
        got = outcome(SCENARIOS[name], autofuse.wrap, device)
        if isinstance(want, Exception):
            assert isinstance(got, Exception), f"no {want!r}"
            assert type(got) is type(want), f"{got!r} is not {want!r}"
            assert str(got).split(":")[0][:60] == str(want).split(":")[0][:60]
            continue
        if isinstance(got, Exception):
            raise got
        got = mapped(got, autofuse.unwrap)
        assert_same(got, want, 2e-5 if device == "cpu" else 1e-6 if second else None, name)


# --- parameters, fused functions, other threads ---------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_wrapping_a_parameter_under_no_grad(device):
    p = nn.Parameter(torch.ones(3, device=device))
    with torch.no_grad():
        wrapped = autofuse.wrap(p)
    (torch.sin(wrapped) * 2.0).sum().backward()
    assert_same(p.grad, torch.ones(3, device=device).cos() * 2.0, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_fused_function_does_to_its_arguments(device):
    @autofuse.fuse
    def step(buffer, x):
        buffer.add_(x * 2.0)
        x.note = 1
        return buffer

    @autofuse.fuse
    def loss(x):
        x.requires_grad_()
        return (torch.sin(x) * 2.0).sum()

    x, buffer = leaf(device), torch.zeros(4, 6, device=device)
    result = step(buffer, x)
    assert result is buffer and buffer.requires_grad and x.note == 1
    assert type(buffer) is type(x) is torch.Tensor
    t = torch.ones(3, device=device)
    loss(t).backward()
    assert t.requires_grad and type(t) is torch.Tensor
    assert_same(t.grad, torch.ones(3, device=device).cos() * 2.0, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_arguments_are_plain_again_after_an_error(device):
    @autofuse.fuse
    def fails(x, w):
        raise ValueError(f"after {x * w}")

    x, w = leaf(device), leaf(device, 1, grad=False)
    with pytest.raises(ValueError, match="after tensor"):
        fails(x, w)
    assert type(x) is type(w) is torch.Tensor


@pytest.mark.parametrize("device", DEVICES)
def test_threads_that_share_an_argument_get_plain_results(device):
    x = leaf(device)
    kinds = set()

    @autofuse.fuse
    def f(x):
        return torch.sin(x * 2.0) * x

    def work():
        for _ in range(50):
            kinds.add(type(f(x)))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kinds == {torch.Tensor} and type(x) is torch.Tensor


def beside(function):
    """What `function` returns in another thread."""
    box = []

    def work():
        box.append(outcome(lambda *_: function(), None, None))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


@pytest.mark.parametrize("device", DEVICES)
def test_modes_of_a_thread_that_reads_anothers_value(device):
    x, packed = autofuse.wrap(leaf(device)), []
    y, z = torch.sin(x) * 2.0, None

    def read_in_inference_mode():
        with torch.inference_mode():
            return y.tolist()

    beside(read_in_inference_mode)
    assert not y.is_inference() and y.grad_fn is not None
    z = torch.sin(x) * 3.0

    def read_under_hooks():
        pack, unpack = lambda t: packed.append(t) or t, lambda t: t
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return z.tolist()

    beside(read_under_hooks)
    assert not packed
    (y * z).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("device", DEVICES)
def test_another_threads_inference_mode_leaves_this_one_alone(device):
    x = autofuse.wrap(leaf(device))
    y = torch.sin(x) * 2.0

    def infer():
        with torch.inference_mode():
            return torch.ones(3).sum().item()

    beside(infer)
    assert autofuse.is_pending(y)
    (y * y).sum().backward()
    assert not y.is_inference() and x.grad is not None


@pytest.mark.parametrize("device", DEVICES)
def test_an_optimizer_steps_in_another_thread(device):
    p = nn.Parameter(leaf(device).detach())
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    y = autofuse.wrap(leaf(device, 1, grad=False)) * 0.0 + p
    beside(torch.optim.SGD([p], lr=0.1).step)
    assert_same(autofuse.unwrap(y.detach()), before, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", ("enter", "exit"))
def test_dual_levels_that_fail(wrong, device, on):
    """One that cannot begin leaves the one around it, one that cannot end goes on."""
    x, t = leaf(device, grad=False), leaf(device, 1, grad=False)
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError):
            if wrong == "enter":
                forward_ad.enter_dual_level()
            else:
                forward_ad.exit_dual_level(level=3)
        assert this_thread.closed == 1
        dual = forward_ad.make_dual(autofuse.wrap(x), t)
        assert_same(forward_ad.unpack_dual(dual * 2.0 + 1.0).tangent, t * 2.0, None)
    assert this_thread.closed == 0 and autofuse.is_pending(autofuse.wrap(x) * 2.0)


# ops of which torch has several nodes of a name, or one of another name, and others
NAMED = {
    "add": lambda x, y: x + y,
    "2 - x": lambda x, y: 2 - x,
    "rsub": lambda x, y: torch.rsub(x, y),
    "x / 2": lambda x, y: x / 2,
    "div, floor": lambda x, y: torch.div(x, 2, rounding_mode="floor"),
    "div, trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "x % 2": lambda x, y: x % 2,
    "x % y": lambda x, y: x % y,
    "fmod, 2": lambda x, y: torch.fmod(x, 2),
    "fmod": lambda x, y: torch.fmod(x, y),
    "clamp": lambda x, y: x.clamp(0, 1),
    "clamp_min": lambda x, y: x.clamp_min(0.25),
    "lerp, 0.25": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp": lambda x, y: torch.lerp(x, y, x),
    "xlogy": lambda x, y: torch.xlogy(x, y),
    "xlogy, 2": lambda x, y: torch.xlogy(x, 2.0),
    "xlog1py": lambda x, y: torch.special.xlog1py(x, y),
    "copysign": lambda x, y: torch.copysign(x, y),
    "copysign, -1": lambda x, y: torch.copysign(x, -1.0),
    "round": lambda x, y: x.round(),
    "round, 2": lambda x, y: x.round(decimals=2),
    "round, -2": lambda x, y: x.round(decimals=-2),
    "deg2rad": lambda x, y: x.deg2rad(),
    "log1p": lambda x, y: x.log1p(),
    "i0e": lambda x, y: torch.special.i0e(x),
    "2 ** x": lambda x, y: 2**x,
    "x ** 2": lambda x, y: x**2,
    "x ** 2.2": lambda x, y: x**2.2,
    "x ** y": lambda x, y: x**y,
    "square": lambda x, y: x.square(),
    "double": lambda x, y: x.double(),
    "where": lambda x, y: torch.where(x > 0.5, x, y),
    "masked_fill": lambda x, y: x.masked_fill(x > 0.5, 0.0),
    "gelu": lambda x, y: F.gelu(x),
    "softplus": lambda x, y: F.softplus(x),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none"),
}

# on every device, with every torch that is promised
NOT_RECORDED = {"clamp", "clamp_min", "i0e", "xlogy, 2"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMED)
def test_nodes_are_called_as_eagers(name, device, on):
    """As errors and pictures of a graph have it."""
    x, y = leaf(device), leaf(device, 1)
    want = NAMED[name](x, y)
    for before in (1.0, None):
        a = autofuse.wrap(x) if before is None else autofuse.wrap(x) * before
        got = NAMED[name](a, autofuse.wrap(y))
        assert autofuse.is_pending(got) or name in NOT_RECORDED
        assert got.grad_fn.name() == want.grad_fn.name()


# --- fusion, counted -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_one_kernel_forward_and_one_backward(device):
    x, w = leaf(device), leaf(device, 1)
    autofuse.reset_stats()
    y = torch.tanh(torch.sin(autofuse.wrap(x) * w) + w) * 2.0
    autofuse.materialize(y)
    assert autofuse.stats().kernels_launched == 1
    assert len(y.grad_fn.next_functions) == 3 and y.grad_fn.name() == "MulBackward0"
    torch.autograd.grad(y, (x, w), torch.ones_like(y))
    stats = autofuse.stats()
    assert stats.kernels_launched == 2 and stats.ops_recorded == 5


@pytest.mark.parametrize("device", DEVICES)
def test_short_chains_under_grad_end_up_eager(device, monkeypatch):
    """One op costs more as a fused one: after some runs it is not even recorded."""
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    x, w = autofuse.wrap(leaf(device)), leaf(device, 1)
    for _ in range(8):
        y = x + w
        autofuse.materialize(y)
        assert y.requires_grad and y.grad_fn.name() == "AddBackward0"
    assert not autofuse.is_pending(x + w)
    autofuse.reset_stats()
    long = torch.sin(x * w) * torch.cos(w * x) * torch.tanh(x * x)
    autofuse.materialize(long)
    assert autofuse.stats().kernels_launched == 1


@pytest.mark.parametrize("device", DEVICES)
def test_no_leak(device):
    """1,000 steps leave no object and no memory behind."""
    w = nn.Parameter(leaf(device).detach())
    x = autofuse.wrap(leaf(device, 1, grad=False))

    def step():
        h = torch.tanh(x * w)
        y = torch.sigmoid(h * w) * h
        (g,) = torch.autograd.grad((y * h).sum(), w, create_graph=True)
        (g * g).sum().backward()
        w.grad = None

    def count():
        gc.collect()
        memory = torch.cuda.memory_allocated() if device == "cuda" else 0
        return len(gc.get_objects()), memory

    for _ in range(20):
        step()
    before = count()
    gc.disable()
    try:
        for _ in range(1000):
            step()
        cyclic = len(gc.get_objects())
    finally:
        gc.enable()
    after = count()
    assert after[0] - before[0] < 50 and after[1] <= before[1]
    assert cyclic - after[0] < 200, "cycles that only the collector frees"


# --- whole loops ----------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        h = self.a(x)
        h = torch.tanh(h) * self.scale + torch.sigmoid(h * 0.5) * h
        return self.b(h - 0.1 * h * h)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam for-loop": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}


def trained(fused, optimizer, device, steps=200, scaled=False):
    torch.manual_seed(0)
    model = Model().to(device)
    if fused:
        model = autofuse.fuse(model)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = torch.amp.GradScaler(device, enabled=scaled)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(8, 6, generator=generator).to(device)
        target = torch.randn(8, 3, generator=generator).to(device)
        with torch.autocast(device, dtype=torch.float16, enabled=scaled):
            loss = (model(x) - target).square().mean()
        scaler.scale(loss).backward()
        if step % 2:  # gradients of two steps add up
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training(optimizer, device):
    """200 steps give the same parameters; on CUDA the same bits."""
    want, got = trained(False, optimizer, device), trained(True, optimizer, device)
    assert_same(got, want, 5e-3 if device == "cpu" else None)


@needs_cuda
@pytest.mark.cuda
def test_training_with_a_grad_scaler():
    assert_same(trained(True, "adam foreach", "cuda", scaled=True),
                trained(False, "adam foreach", "cuda", scaled=True), None)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_batched_gradients_ask_for_no_kernel(device, capfd, monkeypatch):
    """Of one op, of several, and of parts: the batches of autograd have no memory to be read."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    monkeypatch.setattr(autofuse.errors, "_said", set())
    leaf = torch.ones(4, 4, device=device, dtype=torch.float64).requires_grad_()
    x = autofuse.wrap(leaf)
    a, b = (x * 3.0).chunk(2)
    for y in (x * 2.0, (x * 2.0).relu() * x, a * b):
        autofuse.materialize(y)
        for _ in range(3):
            torch.autograd.grad(y, leaf, torch.ones_like(y), retain_graph=True)
        ones = torch.ones(2, *y.shape, device=device, dtype=torch.float64)
        for _ in range(3):  # what was found for a batch is no batch's either
            one, batched = (
                torch.autograd.grad(y, leaf, g, retain_graph=True, is_grads_batched=g is ones)[0]
                for g in (ones[0], ones)
            )
            assert torch.equal(batched, torch.stack([one, one]))
        alone = autofuse.materialize((x * 4.0).sigmoid() * x)  # nothing but batches
        ones = torch.ones(2, *alone.shape, device=device, dtype=torch.float64)
        for _ in range(3):
            torch.autograd.grad(alone, leaf, ones, retain_graph=True, is_grads_batched=True)
    assert "failed" not in capfd.readouterr().err
