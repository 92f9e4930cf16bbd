"""The coverage table: every overload of every op that torch tags as pointwise, fused or explained.

The calls are made from torch's own schemas, so that a new op or overload of torch shows up here.
"""

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse.ops.coverage import EAGER, EAGER_REDUCTIONS, LAST, OVER, coverage, look_up, pointwise
from autofuse.ops.reductions import REDUCTIONS, ROW_COMPOSITES
from support import DEVICES, assert_same, random_tensor

PLACES = (torch, torch.special, F, torch._C._nn, torch.Tensor)
INTEGERS = ("bitwise_", "__")  # ops on integers
UNFUSED = {  # overload -> why it runs eagerly while others of its name are fused
    "conj_physical.out": "a copy; the function itself hands back its argument",
    "conj_physical_.default": "nothing is to be done",
    "float_power.Scalar_out": "a cast and an op for torch, too",
    "float_power.Tensor_Scalar_out": "a cast and an op for torch, too",
    "float_power.Tensor_Tensor_out": "two casts and an op for torch, too",
}
TABLE = coverage()
OVERLOADS = [
    (name, overload)
    for name, overloads in pointwise().items()
    for overload in overloads
    if TABLE[name] == "fused" and not name.endswith("backward")
]
SAMPLED = [o for _, o in OVERLOADS if "out" in str(o._overloadname)][::6]
IDS = [f"{o.overloadpacket.__name__}.{o._overloadname}" for _, o in OVERLOADS]


def test_every_pointwise_op_is_fused_or_explained():
    table = coverage()
    fused = [name for name, state in table.items() if state == "fused"]
    assert len(fused) >= 130, len(fused)
    unknown = [name for name, state in table.items() if state == "new to autofuse"]
    assert not unknown
    assert {*EAGER} & {*fused} == set()


def test_reductions_are_looked_up():
    """Under their names; the reason of one that is eager is no longer there once it is recorded."""
    assert look_up("torch.softmax") == ("softmax", OVER)
    assert look_up("F.layer_norm") == ("layer_norm", LAST)
    assert look_up("torch.linalg.vector_norm") == ("linalg_vector_norm", OVER)
    assert look_up("F.normalize") == ("normalize", OVER)
    assert look_up("torch.var") == ("var", OVER)
    assert look_up("torch.prod") == ("prod", EAGER_REDUCTIONS["prod"])
    recorded = {*REDUCTIONS, *ROW_COMPOSITES}
    assert not recorded & {*EAGER_REDUCTIONS} and not recorded & {*coverage()}
    for name in EAGER_REDUCTIONS:
        assert function(name) is not None or hasattr(torch.linalg, name), name


def function(name):
    """What a user calls: the method of an operator or in-place op, else the first there is."""
    bare = name.removeprefix("special_")
    for place in PLACES:
        if hasattr(place, bare):
            return getattr(place, bare)
    return None


def operand(name, k, argument):
    """A value for an argument of a schema."""
    kind = str(argument.type)
    integers = name.startswith(INTEGERS)
    if "Tensor" in kind:
        if argument.name in ("condition", "mask"):
            return random_tensor((6, 5), torch.bool, seed=k)
        if name == "masked_fill" and argument.name == "value":
            return torch.tensor(0.5)
        if integers:
            return random_tensor((6, 5), torch.int32, seed=k) & 7
        dtype = torch.float64 if name == "float_power_" else torch.float32
        return random_tensor((6, 5), dtype, seed=k).abs() * 0.2 + (
            1.1 if name[:5] == "acosh" else 0.1
        )
    return 1 if integers or kind == "int" else 0.25


def call_of(overload):
    """(function, arguments, keywords, whether it takes out=), by what the schema demands."""
    name = overload.overloadpacket.__name__
    args, kwargs = [], {}
    for k, argument in enumerate(overload._schema.arguments):
        needless = argument.has_default_value() and not name.startswith(("clamp", "clip"))
        if argument.is_out and not name.endswith("_") or needless:
            continue
        value = operand(name, k, argument)
        if argument.kwarg_only:
            kwargs[argument.name] = "floor" if argument.name == "rounding_mode" else value
        else:
            args.append(value)
    return function(name), args, kwargs, "out" in str(overload._schema.overload_name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, overload", OVERLOADS, ids=IDS)
def test_overload_is_recorded(name, overload, device):
    """After `t + 0`, so that also a write has a chain to end; values are compared elsewhere."""
    func, args, kwargs, takes_out = call_of(overload)
    if func is None:
        pytest.skip("torch has no Python function of this name")
    identity = f"{overload.overloadpacket.__name__}.{overload._overloadname}"
    if takes_out and device == "cpu" and overload not in SAMPLED:
        pytest.skip("a kernel each: on the CPU every sixth")
    args = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]

    def run(args, **out):
        args = [a + 0 if isinstance(a, torch.Tensor) and a.dim() and a.dtype is not torch.bool
                else a for a in args]  # fmt: skip
        return func(*args, **kwargs, **out)

    try:
        want = run(args)
        if takes_out:
            run(args, out=torch.empty_like(want))
    except TypeError as error:
        pytest.skip(f"not callable from Python: {error}")
    wrapped = [autofuse.wrap(a.clone()) if isinstance(a, torch.Tensor) else a for a in args]
    autofuse.reset_stats()
    if takes_out:
        out = autofuse.wrap(torch.empty_like(want))
        assert run(wrapped, out=out) is out
    else:
        got = run(wrapped)
        assert autofuse.is_pending(got) or identity in UNFUSED
    ran = autofuse.stats().eager_ops
    assert bool(ran) == (identity in UNFUSED), f"ran eagerly: {ran}"
    if takes_out and identity not in UNFUSED:
        assert autofuse.stats().kernels_launched == 1
        assert_same(out, want, 1e-5)
