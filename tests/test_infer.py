"""Inference against eager PyTorch: what an op makes of operands that nobody has recorded."""

import itertools

import pytest
import torch

from autofuse.chain.infer import Inferred, infer
from autofuse.chain.meta import make_meta, plain_meta, same_device
from autofuse.dtypes import Wide
from autofuse.ops.row import OPS
from autofuse.program.program import CONST
from support import DTYPES

CPU = same_device(torch.device("cpu"))
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "broadcast": lambda x: x[:1].expand_as(x),
    "sliced": lambda x: torch.stack([x, x], 2)[..., 1],
    "permuted": lambda x: x.reshape(1, *x.shape).permute(1, 0, 2),
    "row": lambda x: x[0],
}


def inferred(name, *operands, grad_mode=False, relaxed=False):
    metas = [x if isinstance(x, type) else plain_meta(x) for x in operands]
    return infer(OPS[name], metas, [], (), (), metas[0].device, grad_mode, relaxed)


@pytest.mark.parametrize("name", ["add", "mul", "lt", "where", "sigmoid", "atan2"])
def test_results_are_those_of_eager(name):
    """Dtypes, shapes and strides, of every pair of dtypes and of layouts."""
    arity, seen = len(OPS[name].names), 0
    first = [torch.zeros(3, 4) > 0] if name == "where" else []
    for dtypes in itertools.product(DTYPES, repeat=arity - len(first)):
        for layouts in itertools.product(LAYOUTS, repeat=arity - len(first)):
            if len({*dtypes}) > 1 and len({*layouts}) > 1:
                continue  # one or the other
            xs = [LAYOUTS[how](torch.ones(3, 4).to(dtype))
                  for how, dtype in zip(layouts, dtypes, strict=True)]  # fmt: skip
            found = inferred(name, *first, *xs)
            if isinstance(found, str):
                continue
            want, seen = OPS[name].eager(*first, *xs), seen + 1
            got = (found.meta.dtype, tuple(found.meta.shape), tuple(found.meta.stride))
            assert got == (want.dtype, tuple(want.shape), want.stride()), (layouts, dtypes)
    assert seen > 10


def test_operands_become_references():
    """New Inputs, known ones, one that comes twice, values and Consts; in the order of operands."""
    x = make_meta(torch.float32, (4,), (1,), CPU)
    y = make_meta(torch.float32, (1,), (1,), CPU)
    found = infer(OPS["addcmul"], (y, 0, ~1), [x], (x,), (int,), CPU, False, False)
    assert found.args == (~1, 0, ~1) and found.inputs == (x, y) and found.consts == (int,)
    assert found.meta is x and found.common == "f32"
    found = infer(OPS["mul"], (~0, float), [], (x,), (int,), CPU, False, False)
    assert found.args == (~0, CONST + 1) and found.consts == (int, float)


def test_reasons_to_stay_eager():
    x, i = torch.ones(4), torch.ones(4, dtype=torch.int32)
    cuda = make_meta(torch.float32, (4,), (1,), torch.device("cuda", 0))
    both = infer(OPS["add"], (plain_meta(x), cuda), [], (), (), CPU, False, False)
    assert both == "operands on several devices"
    assert inferred("add", x, torch.ones(3)) == "shapes that do not broadcast"
    assert inferred("bitwise_and", x, x) == "dtypes that are not fused"
    assert inferred("mul", x, Wide) == "an int that float64 would round first"
    assert inferred("remainder", i, i) == "integer division, which raises on the CPU"
    large = torch.ones(1 << 16, dtype=torch.float64)
    assert inferred("tanh", large) == "a large tensor on the CPU, where eager is faster"
    half = torch.ones(4, dtype=torch.float16)
    assert inferred("add", half, torch.tensor(1.0)) == (
        "a wider 0-d tensor, which the CPU does not round"
    )
    leaf = torch.ones(4, requires_grad=True)
    assert inferred("mul", leaf, x, grad_mode=True).meta.requires_grad
    assert not inferred("mul", leaf, x).meta.requires_grad
    with torch.inference_mode():
        other = torch.ones(4)
        reason = "an inference tensor, which autograd cannot save"
        assert inferred("mul", leaf, other, grad_mode=True) == reason


def test_consts_that_have_to_fit():
    found = inferred("nan_to_num", torch.ones(4), float, float, float)
    assert isinstance(found, Inferred)
    assert found.limits == (torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)
    assert inferred("mul", torch.ones(4), float).limits is None
    narrow = torch.ones(4, dtype=torch.uint8)
    assert inferred("lt", narrow, int).limits == (0, 255)
    assert inferred("lt", narrow, Wide).limits == (0, 255)
    assert inferred("lt", narrow, float).limits is None, "compared as float32"
    assert inferred("lt", torch.ones(4, dtype=torch.int64), int).limits is None
