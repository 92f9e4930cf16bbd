"""The public functions."""

import collections
import copy
import dataclasses
import gc
import os
import pickle
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autofuse
from support import DEVICES, assert_same

device_param = pytest.mark.parametrize("device", DEVICES)


@device_param
def test_wrap_shares_memory_and_version(device):
    x = torch.randn(4, device=device)
    w = autofuse.wrap(x)
    assert isinstance(w, torch.Tensor) and isinstance(w, autofuse.Tensor)
    assert w.data_ptr() == x.data_ptr()
    w.add_(1)
    assert x._version == w._version == 1
    assert autofuse.wrap(w) is w
    assert type(autofuse.unwrap(w)) is torch.Tensor
    assert autofuse.unwrap(w).data_ptr() == x.data_ptr()
    assert autofuse.unwrap(x) is x


@pytest.mark.parametrize(
    "bad",
    [
        3.0,
        "text",
        None,
        [1.0],
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.empty(2, device="meta"),
    ],
    ids=str,
)
def test_wrap_refuses_what_it_cannot_wrap(bad):
    with pytest.raises(TypeError, match="autofuse.wrap takes"):
        autofuse.wrap(bad)


class Bare(torch.Tensor):
    """One with torch's own behaviour."""


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


REFUSED = {
    "sparse": lambda t: t.to_sparse(),
    "compressed": lambda t: t.to_sparse_csr(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "of a subclass": lambda t: t.as_subclass(Bare),
    "nested": lambda t: nested(torch.strided),
    "jagged": lambda t: nested(torch.jagged),
    "without values": lambda t: t.to("meta"),
    "fake": lambda t: FakeTensorMode().from_tensor(t),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_wrap_refuses_can_be_wrapped_as_it_says(kind):
    bad = REFUSED[kind](torch.ones(2, 3))
    with pytest.raises(TypeError, match="autofuse.wrap takes dense tensors") as refused:
        autofuse.wrap(bad)
    advice = re.search(r"wrap its (.*)$", str(refused.value))
    if advice:
        assert autofuse.unwrap(autofuse.wrap(eval(f"bad.{advice.group(1)}"))).shape == (2, 3)
    elif "to_padded_tensor" in str(refused.value):
        assert autofuse.wrap(torch.nested.to_padded_tensor(bad, 0.0)).shape == (2, 3)
    else:
        words = {"without values": "no values", "fake": "FakeTensor"}
        assert words[kind] in str(refused.value)


def test_complex_tensors_run_eagerly():
    w = autofuse.wrap(torch.ones(2, dtype=torch.complex64))
    y = w * 2
    assert not autofuse.is_pending(y)
    assert_same(y, torch.ones(2, dtype=torch.complex64) * 2, None)


def test_wrap_keeps_the_graph():
    x = torch.randn(3, requires_grad=True)
    w = autofuse.wrap(x)
    (w * 2).sum().backward()
    assert_same(x.grad, torch.full((3,), 2.0), None)


@device_param
def test_materialize_is_one_flush(device):
    x = autofuse.wrap(torch.randn(4, device=device))
    a, b = x * 2, x + 1
    assert autofuse.is_pending(a) and autofuse.is_pending(b)
    got = autofuse.materialize(a, [b, {"k": b}])
    assert got[0] is a and not autofuse.is_pending(a) and not autofuse.is_pending(b)
    assert sum(autofuse.stats().flushes.values()) == 1
    assert autofuse.materialize(a) is a
    assert not autofuse.is_pending(3)


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Box:
    value: torch.Tensor
    name: str = "box"


@device_param
def test_fuse_wraps_what_is_nested(device):
    @autofuse.fuse
    def f(x, items, *, box, table):
        assert all(isinstance(t, autofuse.Tensor) for t in (x, *items, box.value, table["t"]))
        return {
            "pair": Pair(x * 2, items[0] + 1),
            "box": Box(box.value * 3),
            "list": [table["t"] - 1, "text"],
            "same": x,
        }

    x = torch.randn(4, device=device)
    out = f(x, (x, x), box=Box(x), table={"t": x})
    tensors = [out["pair"].left, out["pair"].right, out["box"].value, out["list"][0]]
    wants = [x * 2, x + 1, x * 3, x - 1]
    assert isinstance(out["pair"], Pair) and out["box"].name == "box"
    for got, want in zip(tensors, wants, strict=True):
        assert type(got) is torch.Tensor
        assert_same(got, want, None)
    assert out["same"] is x
    assert autofuse.stats().kernels_launched == 1


def test_fuse_forms_and_names():
    @autofuse.fuse()
    def one(x):
        """Doc."""
        return x * 2

    class Model(nn.Module):
        @autofuse.fuse
        def forward(self, x):
            return x * 2

    x = torch.randn(3)
    assert one.__name__ == "one" and one.__doc__ == "Doc."
    assert_same(one(x), x * 2, None)
    assert_same(Model()(x), x * 2, None)
    with pytest.raises(TypeError, match="callable or an nn.Module"):
        autofuse.fuse(3)


@pytest.mark.parametrize("fused_first", [True, False])
def test_parametrizations_go_again(fused_first):
    """torch takes the properties of a parametrized module's class away, and the class."""
    layer, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    x, calls = torch.randn(3, 4), []
    plain = torch.nn.Linear.forward
    layer.__class__ = type("Layer", (torch.nn.Linear,), {
        "forward": lambda self, x: calls.append(isinstance(x, autofuse.Tensor)) or plain(self, x)
    })  # fmt: skip
    if fused_first:
        autofuse.fuse(layer)
    torch.nn.utils.parametrizations.weight_norm(layer)
    assert autofuse.fuse(layer) is layer and type(other) is torch.nn.Linear
    assert_same(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias), None)
    assert calls == [True]
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert_same(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias), None)
    assert calls == [True, fused_first] and isinstance(layer.weight, torch.nn.Parameter)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_what_torchscript_runs_is_not_taken():
    """Its ops do not come by Python; a scripted module could not be called at all."""
    script = torch.jit.script(torch.nn.ReLU())
    for target in (script, torch.jit.trace(torch.sigmoid, torch.ones(2))):
        with pytest.raises(TypeError, match="fuse what was scripted or traced instead"):
            autofuse.fuse(target)
    assert script(torch.ones(2)).tolist() == [1.0, 1.0]


def test_fused_functions_nest():
    @autofuse.fuse
    def inner(x):
        return x * 2

    @autofuse.fuse
    def outer(x):
        y = inner(x)
        assert autofuse.is_pending(y)
        return y + 1

    x = torch.randn(3)
    out = outer(x)
    assert type(out) is torch.Tensor
    assert autofuse.stats().kernels_launched == 1
    assert autofuse.is_pending(inner(autofuse.wrap(x)))


def test_fuse_leaves_nothing_pending_behind():
    class Model(nn.Module):
        def forward(self, x):
            self.state = x * 2
            return x + 1

    model = autofuse.fuse(Model())
    model(torch.ones(3))
    assert not autofuse.is_pending(model.state)
    assert model.state.tolist() == [2.0] * 3


def test_an_exception_in_a_fused_function_leaves_things_in_order():
    @autofuse.fuse
    def f(x):
        y = x * 2
        raise ValueError(float(y[0]))

    with pytest.raises(ValueError, match="2.0"):
        f(torch.ones(3))
    assert autofuse.chain.state.this_thread.depth == 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return torch.tanh(self.drop(self.linear(x)) * 2 + 1)


def test_fuse_of_a_module_changes_nothing_else():
    plain = Net().eval()
    model = autofuse.fuse(copy.deepcopy(plain))
    assert isinstance(model, Net) and isinstance(model, nn.Module)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert type(model).__name__ == "Net" and repr(model) == repr(plain)
    assert not model.training and model.train().training
    model.eval()
    assert autofuse.fuse(model) is model
    x = torch.randn(2, 4)
    with torch.no_grad():
        want = plain(x)
        for version in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            out = version(x)
            assert type(out) is torch.Tensor
            assert_same(out, want, 1e-6)
    assert autofuse.stats().kernels_launched == 3


def test_fused_module_trains():
    torch.manual_seed(0)
    plain = Net().eval()
    model = autofuse.fuse(copy.deepcopy(plain))
    x = torch.randn(2, 4)
    for module in (plain, model):
        module(x).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(a.grad, b.grad, 1e-5)


def test_disabled_as_context_and_decorator():
    x = torch.randn(3)
    w = autofuse.wrap(x)

    @autofuse.disabled()
    def plain(t):
        return t * 2

    @autofuse.fuse
    def fused(t):
        return t * 2

    y = w + 1
    with autofuse.disabled():
        assert not autofuse.is_pending(y)
        assert not autofuse.is_pending(w * 2)
        with autofuse.disabled():
            pass
        assert not autofuse.is_pending(w * 2)
        assert type(fused(x)) is torch.Tensor
    assert not autofuse.is_pending(plain(w))
    assert autofuse.is_pending(w * 2)


def test_enabled_may_be_assigned_at_any_time(monkeypatch):
    w = autofuse.wrap(torch.ones(2))
    y = w * 2
    monkeypatch.setattr(autofuse.config, "enabled", False)
    assert not autofuse.is_pending(y) and not autofuse.is_pending(w * 2)
    seen = []
    autofuse.fuse(lambda x: seen.append(type(x)))(torch.ones(2))
    assert seen == [torch.Tensor]
    with autofuse.disabled():
        pass
    assert not autofuse.is_pending(w * 2)
    autofuse.config.enabled = True
    assert autofuse.is_pending(w * 2)


@pytest.mark.parametrize("locked", [True, False])
def test_a_python_without_its_lock_is_refused(locked):
    code = f"import sys, torch\nsys._is_gil_enabled = lambda: {locked}\nimport autofuse"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode == 0) is locked
    assert ("ImportError: autofuse needs Python's global lock" in done.stderr) is not locked


@pytest.mark.parametrize(("value", "works"), [("0", True), ("1", True), ("no", False)])
def test_environment(value, works):
    code = (
        "import torch, autofuse\n"
        "w = autofuse.wrap(torch.ones(2))\n"
        "print(autofuse.is_pending(w * 2), type(autofuse.fuse(lambda x: x * 2)(torch.ones(2))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "AUTOFUSE": value}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert (done.returncode == 0) is works
    if works:
        assert done.stdout.split() == [str(value == "1"), "<class", "'torch.Tensor'>"]
    else:
        assert "AUTOFUSE='no' is not valid; use 0 or 1 (default: 1)" in done.stderr


def test_stats_reset():
    x = autofuse.wrap(torch.ones(3))
    autofuse.materialize(x * 2)
    (x @ x).item()
    stats = autofuse.stats()
    assert stats.ops_recorded == 1 and stats.ops_eager >= 2 and stats.flushes == {"materialize": 1}
    autofuse.reset_stats()
    stats = autofuse.stats()
    assert stats.ops_recorded == stats.ops_eager == stats.kernels_launched == 0
    assert stats.flushes == {}


def test_fork_and_spawned_children_work():
    x = autofuse.wrap(torch.ones(3))
    y = x * 2
    pid = os.fork()
    if pid == 0:
        ok = (y + 1).tolist() == [3.0] * 3 and (x * 5).tolist() == [5.0] * 3
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert y.tolist() == [2.0] * 3


def test_arguments_are_plain_after_an_error_on_the_way_in():
    class Bad(dict):
        def items(self):
            raise RuntimeError("no items")

    @autofuse.fuse
    def f(x, d=None):
        return x * 2

    x = torch.ones(4)
    with pytest.raises(RuntimeError, match="no items"):
        f(x, Bad())
    assert type(x) is torch.Tensor and type(f(x)) is torch.Tensor and type(x) is torch.Tensor


def test_wrapped_tensors_in_containers_stay_wrapped():
    @autofuse.fuse
    def f(values):
        return values[0] * 2 + 1

    w = autofuse.wrap(torch.ones(4)) * 2
    result = f([w])
    assert isinstance(w, autofuse.Tensor) and isinstance(result, autofuse.Tensor)
    assert_same(result, torch.full((4,), 5.0), None)


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_in_which_nothing_fuses_is_soon_left_alone(device, monkeypatch):
    """By the real clock: being asked about every op costs more than a third of three views.

    Beside others on the same GPU the clock may say otherwise for a while.
    """
    monkeypatch.setattr(autofuse.config, "measure", True)
    recorded = []

    @autofuse.fuse
    def f(x):
        recorded.append(isinstance(x, autofuse.Tensor))
        return x.t().t().t()

    x = torch.ones(4, 4, device=device)
    while any(recorded[-50:]) or len(recorded) < 50:
        assert len(recorded) < (2000 if device == "cuda" else 200), "it is never left alone"
        f(x)
        if device == "cuda":
            torch.cuda.synchronize()
    assert recorded[0]


def test_a_fused_call_without_tensors_leaves_fused_calls_inside_outermost():
    @autofuse.fuse
    def step(x):
        return torch.sigmoid(x * 2) + 1

    @autofuse.fuse
    def loop(steps):
        x = torch.ones(4)
        for _ in range(steps):
            x = step(x)
            assert type(x) is torch.Tensor
        return x

    loop(3)
    assert autofuse.stats().ops_recorded == 9 and autofuse.stats().kernels_launched == 3


def test_a_fused_call_knows_inference_tensors_after_calls_in_inference_mode():
    """What a check that was made in one mode says holds in that mode only."""

    def f(x, y):
        x.add_(y * 2.0)
        return x

    fused = autofuse.fuse(f)
    with torch.inference_mode():
        inference = torch.zeros(8)
    x, y = torch.zeros(8), torch.ones(8)
    with torch.inference_mode():
        for _ in range(4):
            fused(x, y)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            fused(inference, y)
        for _ in range(4):
            fused(x, y)
    with torch.inference_mode():
        assert torch.equal(fused(inference, y), torch.full((8,), 4.0))  # torch raises afterwards
    assert torch.equal(x, torch.full((8,), 16.0))


@dataclasses.dataclass
class Late:
    """One whose fields may be missing."""

    value: torch.Tensor = dataclasses.field(init=False)
    items: list = dataclasses.field(default_factory=list)


def late(**items):
    made = Late()
    for name, item in items.items():
        setattr(made, name, item)
    return made


X, Y = torch.arange(8.0), torch.arange(8.0) + 2
WITH_GRAD = torch.arange(8.0).requires_grad_()
with torch.inference_mode():
    INFERENCE = torch.arange(8.0)
ARGUMENTS = {
    "nothing": lambda: ((), {}),
    "none": lambda: ((None, X, None), {}),
    "two": lambda: ((X, Y), {}),
    "twice": lambda: ((X, X), {}),
    "keywords": lambda: ((X,), {"y": Y, "k": 2}),
    "atoms": lambda: ((X, 2, "text", 1.5, True, None, b"b", 1j, torch.float32), {}),
    "in a list too": lambda: ((X, [X, Y, X]), {}),
    "tuples": lambda: (((X, (Y, ())), Pair(X, [Y])), {}),
    "dict": lambda: (({"x": X, "more": {"y": Y, 3: None}},), {}),
    "longer dict": lambda: (({"x": X, "more": {"y": Y, "z": X}, "k": [Y]},), {}),
    "list": lambda: (([X, None, [Y, 2]],), {}),
    "longer list": lambda: (([X, Y, X, Y],), {}),
    "empty list": lambda: (([],), {}),
    "box": lambda: ((Box(X), Box(Y, "other")), {}),
    "a field that is missing": lambda: ((late(items=[X]), Y), {}),
    "a field that is there": lambda: ((late(value=X, items=[Y, X]),), {}),
    "a subclass": lambda: ((X.as_subclass(Bare), [Y.as_subclass(Bare)], X), {}),
    "a parameter": lambda: ((nn.Parameter(X.clone()), [nn.Parameter(Y.clone())], X), {}),
    "a module": lambda: ((nn.Linear(2, 2), X, [nn.Identity(), Y]), {}),
    "grad": lambda: ((WITH_GRAD, [WITH_GRAD, X]), {}),
    "inference": lambda: ((INFERENCE, [INFERENCE, Y]), {}),
    "other dtypes": lambda: ((X.double(), X.long(), [X.bool(), X.to(torch.complex64)]), {}),
    "not dense": lambda: ((X.to_sparse(), [X.to_sparse()], X), {}),
    "ordered": lambda: ((collections.OrderedDict(a=X, b=[Y]), collections.UserDict()), {}),
}


def tensors_in(value):
    """Those in lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from tensors_in(list(vars(value).values()))


def every_other(kinds):
    """Each between two others."""
    return [kind for k, first in enumerate(kinds) for kind in (first, kinds[k - 3], first)]


def test_arguments_of_every_shape_by_one_call():
    """What a call has met says nothing wrong of the next one, whose arguments are others."""
    seen = []

    def compute(*args, **kwargs):
        found = list(tensors_in([args, kwargs]))
        seen.append([x.__class__ for x in found])
        results = [x * 2 + 1 for x in found if x.is_floating_point() and not x.is_sparse]
        return {"list": results, "tuple": tuple(results[:1]), "args": args}

    fused = autofuse.fuse(compute)
    for kind in every_other(list(ARGUMENTS)):
        args, kwargs = ARGUMENTS[kind]()
        before = list(tensors_in([args, kwargs]))
        classes = [x.__class__ for x in before]
        want = compute(*args, **kwargs)
        seen.clear()
        got = fused(*args, **kwargs)
        wrapped = [
            autofuse.Tensor if cls is torch.Tensor and x.layout is torch.strided else cls
            for x, cls in zip(before, classes, strict=True)
        ]
        assert seen == [wrapped], kind
        after = list(tensors_in([args, kwargs]))
        assert all(a is b for a, b in zip(after, before, strict=True)), kind
        assert [x.__class__ for x in after] == classes, kind
        assert not any("_af" in vars(x) for x in after), kind
        assert all(a is b for a, b in zip(got["args"], args, strict=True)), kind
        assert not [x for x in tensors_in(got) if isinstance(x, autofuse.Tensor)], kind
        assert_same(got["list"], want["list"], None, kind)
        assert_same(got["tuple"], want["tuple"], None, kind)
    assert not autofuse.lending.loans


def test_what_a_function_leaves_in_containers_is_plain():
    class Holder(dict):
        """A dict of its own class."""

    @autofuse.fuse
    def f(x, items, table, box, holder, fixed):
        items[0] = x * 2
        items.append([x + 1])
        table["new"] = (x * 3, "text")
        box.value = x * 4
        holder["x"] = {"y": x * 5}
        return items, fixed

    x = torch.arange(4.0)
    for _ in range(3):
        items, table, box, holder, fixed = [x, x], {"x": x}, Box(x), Holder(x=x), (x, (x, 1))
        out, same = f(x, items, table, box, holder, fixed)
        assert out is items and same is fixed and items[1] is x
        made = [items[0], items[2][0], table["new"][0], box.value, holder["x"]["y"]]
        assert {type(t) for t in made} == {torch.Tensor}
        assert_same(made, [x * 2, x + 1, x * 3, x * 4, x * 5], None)


def test_containers_that_contain_themselves():
    @autofuse.fuse
    def f(items):
        return {"x": items[0] * 2, "items": items}

    items = [torch.ones(4)]
    items.append(items)
    items.append({"again": (items,)})
    for _ in range(3):
        out = f(items)
        assert type(items[0]) is type(out["x"]) is torch.Tensor and out["items"] is items


def test_a_wrapped_argument_at_any_place_lets_results_stay_wrapped():
    x, w = torch.ones(4), autofuse.wrap(torch.ones(4))
    f = autofuse.fuse(lambda *args, **kwargs: (type(x), x * 2, w * 2))
    for args, kwargs in (((w, x), {}), ((x, w), {}), ((x, [x, (w,)]), {}), ((x,), {"w": Box(w)})):
        inside, first, second = f(*args, **kwargs)
        assert inside is torch.Tensor and type(x) is torch.Tensor
        assert type(first) is torch.Tensor and autofuse.is_pending(second)
        assert type(w) is autofuse.Tensor and not autofuse.lending.loans


def test_a_fused_function_that_calls_itself():
    depths = []

    @autofuse.fuse
    def f(x, n, items):
        depths.append(type(x))
        return f(x * 2 + 1, n - 1, [x]) + items[0] if n else x

    x = torch.ones(4)
    for _ in range(3):
        got = f(x, 3, [x])  # 15, and what the lists of 3 calls have
        assert type(got) is type(x) is torch.Tensor
        assert got.tolist() == [15.0 + 3.0 + 1.0 + 1.0] * 4
    assert set(depths) == {autofuse.Tensor} and not autofuse.lending.loans


def test_a_class_that_becomes_a_dataclass_and_goes():
    """Fields are remembered by class, and forgotten with it."""
    from autofuse.dispatch import nested

    before = set(nested._names)

    def use():
        @dataclasses.dataclass
        class Own:
            x: torch.Tensor

        f = autofuse.fuse(lambda own: Own(own.x * 2))
        own = Own(torch.ones(4))
        assert type(f(own).x) is type(own.x) is torch.Tensor
        assert id(Own) in nested._names

    for _ in range(3):
        use()
    gc.collect()
    assert set(nested._names) <= before


AT_EXIT = """
import sys
import torch
wrap = fuse = lambda x: x
if "plain" not in sys.argv:
    from autofuse import fuse, wrap

class Late:
    def __init__(self, name, torch=torch):
        self.name, self.w, self.step = name, wrap(torch.ones(2)), fuse(lambda t: t * 3 + 1)
        self.torch, self.late = torch, sys.is_finalizing

    def __del__(self):
        w = self.w
        a = (w * 2.0 + 1.0) - 3.5
        b = (a.abs() * w).clamp(0, 1)
        b += 1
        with self.torch.no_grad():
            w.add_(b)
        print(self.name, self.late(), a.tolist(), (a * b).tolist(), w.sum().item(),
              self.step(w).tolist())

if "warm" in sys.argv:
    Late("")
late = Late("a global")
held = sys.modules["held"] = type(sys)("held")
held.late = Late("of a module")
pending = late.w * 3 - 1
"""


def test_finalizers_that_run_when_python_ends(tmp_path):
    """There is nothing left to make a kernel with: chains run as eager ops, and nobody is told."""

    def told(how, compile="now"):
        settings = {
            "AUTOFUSE_COMPILE": compile,
            "AUTOFUSE_CACHE_DIR": str(tmp_path),
            "AUTOFUSE_NATIVE": "0",
        }  # fmt: skip - whose trial would take a while
        command = [sys.executable, "-c", AT_EXIT, how]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **settings}, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        return [line for line in done.stdout.splitlines() if "True [" in line]

    want = told("plain")
    assert len(want) == 2
    assert told("cold") == told("warm") == told("cold", "background") == want


def test_a_wrapped_view_is_one():
    """What is written to it under grad its base has, where others have that, and what eager forbids
    is forbidden."""

    def outcome(make):
        try:
            return make()
        except RuntimeError as error:
            return str(error)

    def values(wrap, w):
        cache, other, leaf = torch.zeros(3, 4), torch.ones(3, 4), w.detach()
        row = wrap(cache[1])
        row.add_(w * 3.0)
        row.mul_(w)
        yield cache.sum().item(), cache.requires_grad, row._version
        (gradient,) = torch.autograd.grad(cache.sum() + autofuse.unwrap(row).sum(), w)
        yield gradient.tolist(), row._is_view(), row._base is cache, wrap(other)._is_view()
        yield outcome(lambda: wrap(other[0]).detach_())
        yield outcome(lambda: wrap(leaf[:2]).requires_grad_().mul_(2.0))
        with torch.no_grad():
            view, wrapped = other[0], wrap(other[0])
        yield outcome(lambda: wrap(view).mul_(w)), outcome(lambda: wrapped.mul_(w))
        yield outcome(lambda: wrap(other.chunk(3)[0]).mul_(w))
        with torch.inference_mode():
            made = torch.ones(3, 3)
            part = wrap(made[0])
            part.mul_(2.0)
        yield made.sum().item(), part.is_inference()
        with torch.no_grad():
            wrap(other.t()[1]).mul_(5.0).add_(1.0)
        yield other.tolist(), other._version

    got, want = (
        list(values(wrap, torch.arange(1.0, 5.0).requires_grad_()))
        for wrap in (autofuse.wrap, lambda x: x)
    )
    assert got == want
