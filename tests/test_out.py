"""`out=` of what waits: written by the kernel of what is read, or as torch does it."""

import ctypes
import warnings

import pytest
import torch

import autofuse
from autofuse.run.generated import declared
from support import NATIVE, assert_same, functions_called

W = autofuse.wrap
X = torch.linspace(-2.0, 2.0, 24).view(4, 6)
COLUMN = torch.linspace(0.5, 3.0, 4).view(4, 1)

# what is written to memory [4, 6], of `x`, that or its like, and `c` [4, 1], which is pending
PROGRAMS = {
    "torch.where of itself": lambda o, x, c: torch.where(c > 1.0, x * (5 / c), x, out=o),
    "by a column": lambda o, x, c: torch.mul(x, c, out=o),
    "a column of itself": lambda o, x, c: torch.mul(x, c * x[:, :1], out=o),
    "a mean of itself": lambda o, x, c: torch.sub(x, (x.sum(1, keepdim=True) * 0.5) * c, out=o),
    "with options": lambda o, x, c: torch.add(x * c, x, alpha=3, out=o),
    "options after it": lambda o, x, c: torch.add(x * c, x, out=o, alpha=3),
    "clamp": lambda o, x, c: torch.clamp(x * c, min=0.25, max=1.5, out=o),
    "clamp of a number": lambda o, x, c: torch.clamp(x * c, 0.25, out=o),
    "none": lambda o, x, c: torch.add(x * c, x, out=None),
    "lerp": lambda o, x, c: torch.lerp(x, x * c, 0.25, out=o),
    "another dtype": lambda o, x, c: torch.gt(x, c, out=o),
    "an integer's": lambda o, x, c: torch.add(x.long() * c.long(), 1, out=o),
    "too small": lambda o, x, c: torch.mul(x, c, out=o[:2]),
    "what overlaps": lambda o, x, c: torch.mul(x[:, 1:] * c, 2.0, out=o[:, :-1]),
    "what is transposed": lambda o, x, c: torch.mul((x * c)[:, :4].mT, 2.0, out=o[:, :4]),
    "of a view": lambda o, x, c: torch.mul(x[::2] * c[::2], 2.0, out=o[::2]),
    "a method": lambda o, x, c: (x * c).clamp(0.25, out=o),
    "no tensor": lambda o, x, c: torch.mul(x, c, out="o"),
    "a tuple": lambda o, x, c: torch.mul(x, c, out=(o,)),
}  # fmt: skip


def outcome(call, *operands):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            result = call(*operands)
        except Exception as error:
            return type(error), str(error), []
    return result, None, [str(warning.message).split("\n")[0] for warning in told]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("kind", ["wrapped", "plain", "parameter", "requires grad"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_written_is_eagers(name, kind, itself, grad, on):
    program = PROGRAMS[name]
    for _ in range(3):
        seen = []
        for wrap in (W, lambda x: x):
            o = X.clone()
            o = torch.nn.Parameter(o) if kind == "parameter" else o
            o.requires_grad_(kind in ("parameter", "requires grad"))
            out = wrap(o) if kind in ("wrapped", "requires grad") else o
            x = out if itself else wrap(X + 1.0)
            with torch.set_grad_enabled(grad):
                result, failed, told = outcome(program, out, x, wrap(COLUMN) * 1.0)
            if failed is None:
                told.append((result is out, o._version))
            seen.append((result, failed, told, autofuse.unwrap(autofuse.materialize(out)), o))
        (got, failed, *told, ours, memory), (want, *rest, theirs, _) = seen
        assert [failed, *told] == rest
        assert_same(ours.detach(), theirs.detach(), 1e-6)
        assert_same(memory.detach(), theirs.detach(), 1e-6)
        if failed is None and kind != "requires grad":  # of whose views autograd says nothing more
            assert_same(autofuse.unwrap(got).detach(), want.detach(), 1e-6)
            assert got.requires_grad is want.requires_grad


@pytest.mark.skipif(True not in NATIVE, reason="there is no machine code")
@pytest.mark.parametrize("kind", ["wrapped", "plain"])
@pytest.mark.parametrize(
    "name", ["torch.where of itself", "by a column", "with options", "clamp", "lerp"]
)
def test_what_is_written_as_before_runs_no_python_but_a_flush(name, kind, alone):
    autofuse.config.native = True
    c = W(COLUMN)
    out = W(X.clone()) if kind == "wrapped" else X.clone()
    x = out if kind == "wrapped" else W(X.clone())

    def program():
        PROGRAMS[name](out, x, c * 1.0)

    with torch.no_grad():
        for _ in range(5):
            program()
        called = functions_called(program)
    assert not {"torch_function", "spelled", "record_write", "record", "pending"} & {*called}


@pytest.mark.skipif(True not in NATIVE, reason="there is no machine code")
@pytest.mark.parametrize("grad", [False, True])
def test_a_number_by_a_tensor_runs_no_python(grad):
    autofuse.config.native = True
    w = W(COLUMN.clone().requires_grad_(grad)) * 1.0
    v = W(COLUMN.clone().requires_grad_(grad))
    made = []

    def program():
        made[:] = 5 / w, 1.0 / v, True / v

    for _ in range(8):
        program()
        autofuse.materialize(w * 1.0)
    assert functions_called(program) == []
    for got, number in zip(made, (5, 1.0, True), strict=True):
        assert_same(autofuse.unwrap(got).detach(), number / COLUMN, 1e-6)


def test_a_number_by_a_tensor_stays_plain_where_its_reciprocal_does(on, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    v = W(COLUMN.clone())
    for number in (5, 2.5, True):
        for x in (v, v * 2.0, v.long()):
            want = number / autofuse.unwrap(autofuse.materialize(x))
            assert_same(autofuse.unwrap(number / x), want, 1e-6)
    with pytest.raises(TypeError) as told:
        "a" / v
    with pytest.raises(TypeError) as eager:
        "a" / COLUMN
    assert str(told.value).replace("autofuse.Tensor", "Tensor") == str(eager.value)


def test_arguments_of_a_launch_are_made_without_a_frame_for_each():
    launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 8)(lambda *_: 0)
    made = []
    called = functions_called(lambda: made.extend(declared(launch, *range(8))))
    assert [x.value for x in made] == [*range(8)] and len(called) <= 2  # Python 3.11 has one
