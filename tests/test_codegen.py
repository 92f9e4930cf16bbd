"""The generated source and, without a GPU, the PTX of every op's CUDA kernel."""

import re
from dataclasses import replace

import pytest
import torch

import autofuse
from autofuse import layout
from autofuse.dtypes import CODES
from autofuse.grad.reduced import PLACE
from autofuse.kernel.cuda import assemble, compile_ptx
from autofuse.kernel.plan import make_pieces, unvectorised
from autofuse.kernel.rows import launch_of
from autofuse.kernel.text import render, source_of
from autofuse.ops.arithmetic import CASTS, OPS
from autofuse.program.program import CONST, WRITE, Output, Pointwise, Program, Spec
from support import assert_same, needs_cuda, pieces_of

TARGET = "sm_90"
STAND_INS = {name for name in OPS if name.endswith("_by_scalar")}
# libdevice computes these float32 functions partly in float64
DOUBLE_INSIDE = {"digamma"}
SLOW_PATH = set("sin cos tan sinc trigamma bessel_j0 bessel_j1 bessel_y0 bessel_y1".split())


def view(code, *shape, stride=None):
    shape = shape or (1024, 256)
    return Spec(code, shape, stride or layout.contiguous(shape))


def single(op, dtype):
    """A program of one op over new Inputs of `dtype`; scalars where the op wants them."""
    operands = []
    for role in op.roles:
        bool_ = role == "bool"
        scalar = role in ("opmath", "common")
        operands.append((float if scalar else torch.bool if bool_ else dtype, 0 if scalar else 2))
    resolved = op.resolve(tuple(operands))
    if resolved is None:
        return None
    args, inputs, consts = [], [], []
    for kind, _ in operands:
        if isinstance(kind, type):
            args.append(CONST + len(consts))
            consts.append(kind)
        else:
            args.append(~len(inputs))
            inputs.append(view(CODES[kind]))
    common, result = resolved
    step = Pointwise(op, tuple(args), CODES[common], view(CODES[result]))
    return Program((step,), tuple(inputs), tuple(consts))


def ptx_of(program, live=(0,), target="sm_90"):
    pieces = pieces_of(program, "cuda", *live)
    sources = [source_of(piece.plan, target) for piece in pieces]
    return [compile_ptx(source, target) for source in sources]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted(set(OPS) - STAND_INS))
def test_ptx_of_every_op(name, dtype):
    """Compiles for CUDA; no float64 in it, and 16-byte accesses."""
    if dtype.itemsize == 2 and (len(name) % 2 == 0) == (dtype is torch.float16):
        pytest.skip("of the two 16-bit types one for each op")
    program = single(OPS[name], dtype)
    if program is None:
        pytest.skip(f"{name} takes no {dtype}")
    (ptx,) = ptx_of(program)
    assert f".entry {pieces_of(program, 'cuda', 0)[0].plan.name}(" in ptx
    if name not in ("to_f64", *DOUBLE_INSIDE):
        arithmetic = re.findall(r"\b(?:add|sub|mul|fma|div|cvt)\S*\.f64\S*", ptx)
        slow_path = name in SLOW_PATH  # Payne-Hanek reduction of huge arguments
        assert not arithmetic or slow_path, f"float64 in a float32 kernel: {set(arithmetic)}"
    loads = re.findall(r"ld\.global\.(\S+)", ptx)
    assert name == "zeros" or any(load.startswith(("v4", "v2")) for load in loads), loads
    assert not re.search(r"\bmul\.f32\b", ptx), "a product that ptxas may contract"


@pytest.mark.parametrize(
    "shape, stride, stores",
    [
        ((64, 256), (512, 1), "v4"),  # rows of a wider matrix
        ((64, 254), (257, 1), "f32"),  # no 16 bytes of which are aligned
        ((64, 256), (1, 64), "v4"),  # a transposed matrix
        ((64,), (257,), "f32"),  # a column
    ],
    ids=str,
)
def test_ptx_of_a_write_into_a_view(shape, stride, stores):
    """One kernel computes what it casts and stores by the strides of the memory."""
    value = Pointwise(OPS["mul"], (~0, ~1), "f64", view("f64", *shape[-1:]))
    write = Pointwise(CASTS[torch.float32], (0,), "f64", view("f32", *shape, stride=stride))
    row = view("f64", *shape[-1:])
    program = Program((value, write), (row, row), (), (Output(1, WRITE),))
    (piece,) = make_pieces(program, "cuda")
    (ptx,) = [compile_ptx(source_of(piece.plan, TARGET), TARGET)]
    found = re.findall(r"st\.global\.(\S+)", ptx)
    assert found and all(store.startswith(stores) for store in found), found
    assert piece.stores == (1,) and piece.offsets == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["add", "mul", "eq", "where", "maximum", "bitwise_and", "to_f32"])
def test_ptx_of_integer_ops(name, dtype):
    program = single(OPS[name], dtype)
    if program is None:
        pytest.skip(f"{name} takes no {dtype}")
    (ptx,) = ptx_of(program)
    assert ".f64" not in ptx


def chain_of(*names, code="f32"):
    steps, k = [], 0
    for name in names:
        op = OPS[name]
        args = (k - 1 if k else ~0, *([~1] if len(op.names) > 1 else []))
        steps.append(Pointwise(op, args, code, view(code)))
        k += 1
    return Program(tuple(steps), (view(code), view(code)), ())


def test_no_contraction_between_ops():
    """x * y + z would be one fma in plain CUDA C; eager rounds twice."""
    (ptx,) = ptx_of(chain_of("mul", "add"), (1,))
    assert "fma" not in ptx
    assert ptx.count("mul.rn.f32") == 4 and ptx.count("add.rn.f32") == 4  # 4 lanes


def test_contraction_inside_an_op():
    """exp ends in a product that eager's sigmoid contracts with the sum that follows."""
    (alone,) = ptx_of(chain_of("exp"), (0,))
    (inside,) = ptx_of(chain_of("sigmoid"), (0,))
    assert inside.count("fma.rn.f32") == alone.count("fma.rn.f32") + 4


@pytest.mark.parametrize("code", ["bf16", "f16"])
def test_16_bit_arithmetic_is_done_on_pairs(code):
    """One instruction for two lanes: nothing is converted, and products stay apart from sums."""
    (ptx,) = ptx_of(chain_of("mul", "add", "neg", "sub", "square", code=code), (4,))
    assert ptx.count(f"fma.rn.{code}x2") == 5 * 4  # 8 lanes
    assert "cvt.rn" not in ptx and "cvt.f32" not in ptx
    (ptx,) = ptx_of(chain_of("tanh_backward", code=code), (0,))  # rounds on the way
    assert ptx.count(f"fma.rn.{code}x2") == 3 * 4 and "cvt.rn" not in ptx
    (ptx,) = ptx_of(chain_of("exp", "mul", code=code), (1,))  # two results in one rounding
    assert ptx.count(f"cvt.rn.{code}x2.f32") == 4


SHORT = [(n, code) for n, op in OPS.items() for code in ("f16", "bf16") if getattr(op, code)]
APPROXIMATE = re.compile(r"(?:ex2|rcp|sqrt|lg2)\.approx|div\.full")


def text_of(program, target="sm_90", device="cuda"):
    (piece,) = pieces_of(program, device, len(program.steps) - 1)
    return source_of(piece.plan, target).text


@pytest.mark.parametrize(("name", "code"), SHORT)
def test_short_expressions_of_16_bit_ops(name, code):
    """They stand where they were proven, and only there."""
    program = chain_of(name, code=code)
    assert text_of(program) != text_of(program, "")
    for target, device in (("sm_80", "cuda"), ("sm_100", "cuda"), ("cpu", "cpu")):
        assert text_of(program, target, device) == text_of(program, "", device)
    for other in (replace(program, relaxed=True), chain_of(name)):
        assert text_of(other) == text_of(other, "")
    (ptx,) = ptx_of(program)
    assert len(APPROXIMATE.findall(ptx)) in (8, 16)
    assert not re.search(r"(?:div|rcp|sqrt)\.rn", ptx)


def test_pairs_of_lanes_need_no_proof():
    """Their arithmetic is IEEE's, where the exact expressions stand too."""
    (ptx,) = ptx_of(chain_of("sigmoid", "mul", code="bf16"), (1,), "sm_80")
    assert "fma.rn.bf16x2" in ptx and "rcp.rn.f32" in ptx and "rcp.approx" not in ptx
    (ptx,) = ptx_of(chain_of("sigmoid", "mul", code="bf16"), (1,), "sm_75")
    assert "fma.rn.bf16x2" not in ptx


@pytest.mark.parametrize("code", ["bf16", "f16"])
def test_a_scalar_is_more_than_16_bits(code):
    """It stays float32, of which there are too many to have walked all pairs."""
    x = view(code)
    for args in ((~0, CONST), (CONST, ~0)):
        program = Program((Pointwise(OPS["div"], args, code, x),), (x,), (float,))
        assert text_of(program) == text_of(program, "")


def test_scalars_are_not_rounded_to_16_bits():
    """A Python scalar stays float32, and with it the product."""
    x = view("bf16")
    program = Program((Pointwise(OPS["mul"], (~0, CONST), "bf16", x),), (x,), (float,))
    (ptx,) = ptx_of(program)
    assert "bf16x2 " not in ptx.replace("cvt.rn.bf16x2.f32 ", "")
    assert ptx.count("mul.rn.f32") == 8


def test_a_relaxed_16_bit_chain_rounds_at_the_end():
    program = replace(chain_of("sigmoid", "mul", code="bf16"), relaxed=True)
    (ptx,) = ptx_of(program, (1,))
    assert "fma.rn.bf16x2" not in ptx and ptx.count("cvt.rn.bf16x2.f32") == 4


def test_literals_of_16_bits():
    from autofuse.kernel.lower import _half

    assert _half(1, "bf16") == 0x3F80 and _half(-2.0, "f16") == 0xC000
    assert _half(0.1, "bf16") is _half(0.1, "f16") is None
    assert _half(257, "bf16") is None and _half(257, "f16") is not None
    assert _half(1e9, "f16") is _half(1e300, "bf16") is None


def test_contiguous_path_has_wide_stores_too():
    for code, kind in (("f32", "v4.f32"), ("bf16", "v4.u32"), ("f16", "v4.u32"), ("u8", "v2.u32")):
        (ptx,) = ptx_of(chain_of("add", code=code), (0,))
        assert f"st.global.{kind}" in ptx, code
        assert f"ld.global.{kind}" in ptx, code


def test_a_row_broadcast_keeps_wide_accesses():
    program = Program(
        (Pointwise(OPS["add"], (~0, ~1), "f32", view("f32")),), (view("f32"), view("f32", 256)), ()
    )
    (piece,) = pieces_of(program, "cuda", 0)
    assert piece.plan.lanes == 4 and piece.plan.rank == 2
    assert compile_ptx(source_of(piece.plan), TARGET).count("ld.global.v4.f32") == 2


def test_neighbours_that_are_near_are_read_by_one_thread():
    """Every second element: as many loads in flight as lanes, and wide stores."""
    out = view("f32", 64, 128)
    for step, lanes in ((2, 4), (8, 4), (9, 1)):
        gapped = view("f32", 64, 128, stride=(128 * step, step))
        program = Program((Pointwise(OPS["add"], (~0, ~1), "f32", out),), (gapped, out), ())
        (piece,) = pieces_of(program, "cuda", 0)
        assert piece.plan.lanes == lanes
        ptx = compile_ptx(source_of(piece.plan), TARGET)
        assert ("st.global.v4.f32" in ptx) == ("ld.global.v4.f32" in ptx) == (lanes == 4)


@pytest.mark.parametrize("code, columns, lanes", [
    ("f32", 511, 4), ("f32", 513, 4), ("f32", 255, 4), ("f32", 150, 2), ("f32", 49, 2),
    ("f32", 33, 1), ("bf16", 50257, 8), ("bf16", 513, 4), ("f64", 1023, 2), ("u8", 777, 8),
])  # fmt: skip
def test_rows_that_are_no_vectors(code, columns, lanes):
    """A thread takes elements that lie as far apart as a warp is wide; each is taken once."""
    x, row = view(code, 5, columns), view(code, columns)
    program = Program((Pointwise(OPS["add"], (~0, ~1), code, x),), (x, row), ())
    (piece,) = pieces_of(program, "cuda", 0)
    assert (piece.plan.lanes, piece.plan.spaced) == (lanes, lanes > 1)
    assert not any(piece.plan.vectors)
    ptx = compile_ptx(source_of(piece.plan), TARGET)
    assert ptx.count("st.global") == lanes and ".v4" not in ptx and ".v2" not in ptx
    if lanes == 1:
        return
    count, blocks, threads = launch_of(piece)
    groups, size = piece.numbers[:2]
    assert (size, groups % 32, count) == (columns, 0, 5 * groups) and blocks * threads >= count
    taken = [
        (thread // groups, column)
        for thread in range(count)
        for k in range(lanes)
        if (column := _first(thread % groups, lanes) + 32 * k) < columns
    ]
    assert sorted(taken) == [(r, c) for r in range(5) for c in range(columns)]


def _first(group, lanes):
    """As the kernel computes it."""
    return group + (group & -32) * (lanes - 1)


def test_rows_that_are_vectors_are_moved_as_such():
    x, row = view("f32", 5, 516), view("f32", 516)
    program = Program((Pointwise(OPS["add"], (~0, ~1), "f32", x),), (x, row), ())
    (piece,) = pieces_of(program, "cuda", 0)
    assert piece.plan.lanes == 4 and not piece.plan.spaced


@pytest.mark.parametrize("columns", [511, 512])
def test_a_place_is_not_read(columns):
    """Which element of its row an operand is: what a loss of classes compares with its class."""
    row, out = view("f32", 5, columns, stride=(0, 1)), view("i64", 5, columns)
    program = Program((Pointwise(PLACE, (~0,), "f32", out),), (row,), ())
    (piece,) = pieces_of(program, "cuda", 0)
    ptx = compile_ptx(source_of(piece.plan), TARGET)
    assert "ld.global" not in ptx and "st.global" in ptx


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_odd_rows_on_cuda(always, monkeypatch, dtype):
    """Beside one row and one column, where they lie as they like; each element and no other."""
    monkeypatch.setattr(autofuse.config, "compile", "now")
    flat = (torch.randn(4099, device="cuda") * 5).to(dtype)
    for x, y in ((flat[1:], flat[:-1]), (flat[3:4099], flat[:4096]), (flat[1:40], flat[2:41])):
        assert_same(autofuse.materialize(autofuse.wrap(x) * y + x), x * y + x, None)
    for shape in ((3, 511), (5, 513), (2, 3, 1025), (4, 50257), (300, 49), (2, 193)):
        room = (torch.randn((*shape[:-1], shape[-1] + 3), device="cuda") * 5).to(dtype)
        row, column = room[..., :1, : shape[-1]].clone(), room[..., :1].clone()
        for x in (room[..., : shape[-1]], room[..., : shape[-1]].contiguous()):
            for call in (lambda x: (x + row) * column, lambda x: (x * column, x > row)):
                got, want = call(autofuse.wrap(x)), call(x)
                got, want = (y if isinstance(y, tuple) else (y,) for y in (got, want))
                assert_same(autofuse.materialize(list(got)), list(want), None)
        before = room.clone()
        autofuse.wrap(room)[..., : shape[-1]].mul_(autofuse.wrap(row) + column)
        before[..., : shape[-1]].mul_(row + column)
        assert_same(room, before, None)


def test_64_bit_indices_where_they_are_needed():
    big = view("f32", 1 << 16, 1 << 16)
    program = Program((Pointwise(OPS["neg"], (~0,), "f32", big),), (big,), ())
    (piece,) = pieces_of(program, "cuda", 0)
    assert piece.plan.wide
    small = pieces_of(chain_of("neg"), "cuda", 0)[0]
    assert not small.plan.wide


def test_source_is_deterministic_and_readable():
    (piece,) = pieces_of(chain_of("mul", "tanh"), "cuda", 1)
    assert render(piece.plan) == render(piece.plan)
    assert render(piece.plan) == (
        "def af_mul_tanh(x0: f32, x1: f32):  # cuda, 4 lanes, 32-bit index\n"
        "    v0: f32 = x0 * x1  # mul\n"
        "    v1: f32 = tanh(v0)  # tanh\n"
        "    return v1\n"
    )


def test_the_scalar_variant_is_the_same_kernel_with_other_accesses():
    (piece,) = pieces_of(chain_of("mul"), "cuda", 0)
    scalar = unvectorised(piece)
    assert scalar.plan.lines == piece.plan.lines and not any(scalar.plan.vectors)
    assert (scalar.plan.lanes, scalar.plan.spaced) == (4, True)
    assert "v4" not in compile_ptx(source_of(scalar.plan), TARGET)
    few = view("f32", 3, 11)
    program = Program((Pointwise(OPS["mul"], (~0, ~0), "f32", few),), (few,), ())
    small = unvectorised(pieces_of(program, "cuda", 0)[0])
    assert (small.plan.lanes, small.plan.spaced, small.numbers) == (1, False, ())


@pytest.mark.parametrize(
    "shape, stride", [((5, 516), None), ((1024, 256), None), ((5, 516), (0, 1))]
)
def test_the_scalar_variant_takes_each_element_once(shape, stride):
    x = view("f32", *shape)
    program = Program((Pointwise(OPS["add"], (~0, ~1), "f32", x),),
                      (x, view("f32", *shape, stride=stride)), ())  # fmt: skip
    piece = unvectorised(pieces_of(program, "cuda", 0)[0])
    rank, lanes = piece.plan.rank, piece.plan.lanes
    count, _, _ = launch_of(piece)
    columns = piece.numbers[rank - 1]
    groups = piece.numbers[rank - 2] if rank > 1 else count
    assert count == piece.numel // columns * groups and lanes == 4
    taken = [
        thread // groups * columns + column
        for thread in range(count)
        for k in range(lanes)
        if (column := _first(thread % groups, lanes) + 32 * k) < columns
    ]
    assert sorted(taken) == list(range(piece.numel))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_cubins_for_other_architectures(arch):
    (piece,) = pieces_of(chain_of("mul", "sigmoid", code="bf16"), "cuda", 1)
    cubin = assemble(compile_ptx(source_of(piece.plan), arch), arch)
    assert cubin[:4] == b"\x7fELF"


def test_every_row_of_the_table_is_complete():
    for name, op in OPS.items():
        assert op.name == name and op.names
        assert op.eager is not None or name in STAND_INS
    assert len(CASTS) == len(CODES)
