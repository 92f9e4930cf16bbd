"""Row kernels: the order in which they add, without a GPU, against numpy; what becomes one."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import row_oracle
import torch
from simt import F32, module_of, run, size_of

from autofuse import layout
from autofuse.chain import rowwise
from autofuse.kernel.cuda import assemble, compile_ptx
from autofuse.kernel.division import scheme_of
from autofuse.kernel.rows import RowPlan, launch_of, make_pieces, source_of, unvectorised
from autofuse.kernel.source import Source, Walk
from autofuse.ops import norms, reductions
from autofuse.ops.arithmetic import OPS
from autofuse.program.program import (
    CONST,
    LEFT,
    Output,
    Pointwise,
    Program,
    Reduced,
    Spec,
    Statistic,
)

H200 = (132, 2048)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
RAW = {"f32": torch.float32, "bf16": torch.int16, "f16": torch.int16}


def view(code, *shape):
    return Spec(code, shape, layout.contiguous(shape))


def reduction(name, affine=False, keepdim=True):
    """The op that is recorded for `name`."""
    over = reductions.Over(keepdim=keepdim)
    if name in ("softmax", "log_softmax"):
        return reductions.soft_row(name)
    if name == "vector_norm":
        return reductions._length(over)
    if name in ("var", "std"):
        return reductions._moment(name, over)
    if name.endswith("_norm"):
        weights = {"layer_norm": "w b ", "rms_norm": "w "}[name] if affine else ""
        return norms.normed_row(name, f"x {weights}eps:opmath")
    return reductions.number_a_row(name, over)


def reduced_by(name, x, shape, code):
    """The step of `name` over `x`; a variance has a correction, the first Const."""
    own = (x, CONST) if name in ("var", "std") else (x,)
    return reduction(name), own, shape, code


def program_of(inputs, steps, *live, consts=0):
    """steps: (op, operands, shape, code)."""
    made = []
    for op, args, shape, code in steps:
        kind = Reduced if isinstance(op, reductions.Reduction) else Pointwise
        made.append(kind(op, args, code, view(code, *shape)))
    return Program(tuple(made), tuple(inputs), (float,) * consts, tuple(map(Output, live)))


def execute(program, tensors, consts=(), unaligned=False):
    """The outputs of a program of row kernels, by running their threads.

    tensors: views of memory that begins at a multiple of 16, at their storage_offset.
    """
    outs = {}
    for piece in make_pieces(program, "cuda", H200):
        piece = unvectorised(piece) if unaligned else piece
        source = source_of(piece.plan, "sm_90")
        assert Source.from_json(source.to_json()) == source
        count, blocks, threads = launch_of(piece)
        assert threads == source.rows.block
        left = torch.full((len(piece.stores) * piece.left,), float("nan"))  # as a runner has it
        for k, step in enumerate(piece.stores):
            if piece.left:
                outs[step] = left[k * piece.left : (k + 1) * piece.left]
                continue
            spec = program.steps[step].out
            outs[step] = torch.full(spec.shape, float("nan"), dtype=DTYPES[spec.code])
        buffers, pointers = {}, []
        for ref in (*piece.loads, *piece.stores):
            tensor = outs[ref] if ref >= 0 else tensors[~ref]
            base = (ref + 1 if ref >= 0 else LEFT // 2 + ~ref) << 32
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            raw = whole.view(torch.int16) if tensor.dtype != torch.float32 else whole
            buffers[base] = raw.numpy().view(np.uint8)
            pointers.append(base + tensor.storage_offset() * tensor.element_size())
        for pointer, wide in zip(pointers, piece.plan.vectors, strict=True):
            assert unaligned or not wide or pointer % 16 == 0
        numbers = [F32(consts[k]) for k in piece.consts]
        run(source, blocks, [*pointers, *numbers, count, *piece.numbers], buffers)
    return {step: out for step, out in outs.items() if step < LEFT}


def random(code, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DTYPES[code])


def floats(tensor):
    return tensor.float().numpy()


def assert_bits(got, want, code):
    want = torch.from_numpy(np.asarray(want, F32)).to(DTYPES[code]).reshape(got.shape)
    same = (got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())
    assert same.all(), f"{int((~same).sum())} of {same.numel()} differ"


# rows and columns: short, one vector more or less, two rows a warp, misaligned, several warps...
SHAPES = [(3, 2), (5, 7), (9, 33), (6, 127), (20, 128), (20, 131), (5, 257), (20, 1024), (2, 1500),
          (1, 999), (3, 2051)]  # fmt: skip


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "vector_norm", "var", "std"])
def test_reduce_kernel_in_torchs_order(name, code):
    for m, n in SHAPES:
        x = random(code, m, n)
        program = program_of([view(code, m, n)], [reduced_by(name, ~0, (m, 1), code)], 0, consts=1)
        (got,) = execute(program, [x], [1.0]).values()
        scheme = scheme_of(name, m, n, x.element_size(), H200)
        want = [
            row_oracle.reduced(name, row, k * n, m, scheme.across, scheme.vec)
            for k, row in enumerate(floats(x))
        ]
        assert_bits(got, want, code)


# one row and several, whole vectors and not, and one that two kernels index otherwise
@pytest.mark.parametrize(("m", "n"), [(1, 131072), (1, 131072 + 7), (3, 131072 + 2)])
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "vector_norm", "std"])
def test_rows_that_several_blocks_share(name, m, n):
    code = "bf16" if n % 8 == 0 else "f32"
    x = random(code, m, n)
    op, own, shape, _ = reduced_by(name, ~0, (m, 1), code)
    steps = [(OPS["neg"], (~0,), (m, n), code), (op, (0, *own[1:]), shape, code),
             (OPS["abs"], (1,), shape, code)]  # fmt: skip
    program = program_of([view(code, m, n)], steps, 1, 2, consts=1)
    got = execute(program, [x], [1.0])
    scheme = scheme_of(name, m, n, x.element_size(), H200)
    assert scheme.blocks > 1
    want = [
        row_oracle.reduced(name, row, k * n, m, scheme.across, scheme.vec, 1, scheme.blocks)
        for k, row in enumerate(-floats(x))
    ]
    assert_bits(got[1], want, code)
    assert_bits(got[2], np.abs(want), code)


@pytest.mark.parametrize("correction", [0.0, 1.0, 2.5, 6.0])
def test_corrections(correction):
    """What is subtracted from the number of elements, of which some are left."""
    m, n = 5, 7
    x = random("f32", m, n)
    program = program_of([view("f32", m, n)], [reduced_by("var", ~0, (m, 1), "f32")], 0, consts=1)
    (got,) = execute(program, [x], [correction]).values()
    across = scheme_of("var", m, n, 4, H200).across
    want = [
        row_oracle.reduced("var", row, k * n, m, across, 1, correction)
        for k, row in enumerate(floats(x))
    ]
    assert_bits(got, want, "f32")


@pytest.mark.parametrize("name", ["sum", "std"])
@pytest.mark.parametrize("n", [100, 127])
def test_short_rows_of_so_many_operands_that_a_thread_keeps_none(name, n):
    """Elements go to one slot after another whether their thread keeps them or not."""
    m, many = 20, 20
    xs = [random("f32", m, n, seed=k) for k in range(many)]
    steps = [(OPS["add"], (~0, ~1), (m, n), "f32")]
    steps += [(OPS["add"], (k - 2, ~k), (m, n), "f32") for k in range(2, many)]
    program = program_of(
        [view("f32", m, n)] * many,
        [*steps, reduced_by(name, many - 2, (m, 1), "f32")], many - 1, consts=1,
    )  # fmt: skip
    (piece,) = make_pieces(program, "cuda", H200)
    assert piece.plan.rows.stages[0].walk.held == 0
    (got,) = execute(program, xs, [1.0]).values()
    across = scheme_of(name, m, n, 4, H200).across
    rows = floats(sum(xs[2:], xs[0] + xs[1]))
    want = [row_oracle.reduced(name, row, k * n, m, across, 1) for k, row in enumerate(rows)]
    assert_bits(got, want, "f32")


@pytest.mark.parametrize("count", [1, rowwise.MOST])
def test_variances_of_a_few_long_rows(count):
    """Threads x and threads y meet in shared memory, of which a block has 48 kB."""
    m, n = 3, 9000
    x, steps = random("f32", m, n), []
    for k in range(count):
        steps += [
            reduced_by("var", 2 * k - 1 if k else ~0, (m, 1), "f32"),
            (OPS["mul"], (~0, 2 * k), (m, n), "f32"),
        ]
    program = program_of([view("f32", m, n)], steps, len(steps) - 1, consts=1)
    (piece,) = make_pieces(program, "cuda", H200)
    source = source_of(piece.plan, "sm_90")
    across = source.rows.stages[-1].across
    assert min(across[0] // 32, across[1]) > 1
    values = module_of(source).module.global_values
    shared = [one.value_type for one in values if getattr(one, "addrspace", 0) == 3]
    assert 0 < sum(kind.count * size_of(kind.element) for kind in shared) <= 48 << 10
    if count == 1:
        (got,) = execute(program, [x], [1.0]).values()
        rows = floats(x)
        want = [row * row_oracle.reduced("var", row, 0, m, across, 2) for row in rows]
        assert_bits(got, want, "f32")


@pytest.mark.parametrize("n", [7, 32, 100, 128, 2051])
def test_shares_so_small_that_their_remainders_are_subnormal(n):
    """One remainder of a quotient is exact for values that are not; others are divided."""
    spread = torch.linspace(0.0, 110.0, n)  # exponentials down to 2^-149, and 0
    rows = [-spread, -spread.flip(0), -spread * 0.5, torch.full((n,), -5.0), -spread.sqrt() * 30.0]
    rows += [-spread.clamp(max=66.0), -spread.clamp(max=67.0)]  # next to 2^-96
    x = torch.stack(rows)
    program = program_of(
        [view("f32", *x.shape)], [(reduction("softmax"), (~0,), tuple(x.shape), "f32")], 0
    )
    (got,) = execute(program, [x]).values()
    assert_bits(got, [row_oracle.softmax(row) for row in floats(x)], "f32")


def layouts(code, m, n):
    """What is read beside [m, n] in all ways in which rows and vectors can lie to each other."""
    return {
        "rows": random(code, m, n, seed=7),
        "one row": random(code, n, seed=7),
        "one row, in two dims": random(code, 1, n, seed=7),
        "padded rows": random(code, m, n + 3, seed=7)[:, :n],
        "padded to vectors": random(code, m, n + -n % 8, seed=7)[:, :n],
        "padded by vectors": random(code, m, n + 8, seed=7)[:, :n],
        "columns": random(code, n, m, seed=7).t(),
        "a number a row": random(code, m, 1, seed=7),
        "rows from elsewhere": random(code, m * n + 1, seed=7)[1:].view(m, n),
        "a row from elsewhere": random(code, n + 3, seed=7)[3:],
    }


UNEVEN = [(6, 131), (3, 257), (5, 132), (2, 1030)]  # of four, of eight, or of both


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("name", ["mean", "amax", "vector_norm", "std"])
@pytest.mark.parametrize("layout", layouts("f32", 2, 128))
def test_rows_that_are_no_whole_number_of_vectors(name, code, layout):
    """Beside operands of all layouts, before the reduction and after it."""
    for m, n in UNEVEN:
        x, y = random(code, m, n), layouts(code, m, n)[layout]
        elsewhere = "elsewhere" in layout
        program = program_of(
            [view(code, m, n), Spec(code, tuple(y.shape), y.stride())],
            [
                (OPS["add"], (~0, ~1), (m, n), code),
                reduced_by(name, 0, (m, 1), code),
                (OPS["mul"], (0, 1), (m, n), code),
            ],
            1, 2, consts=1,
        )  # fmt: skip
        got = execute(program, [x, y], [1.0], unaligned=elsewhere)
        scheme = scheme_of(name, m, n, x.element_size(), H200)
        rows = floats(x + y)  # in memory of its own, wherever what it is made of begins
        want = [
            row_oracle.reduced(name, row, k * n, m, scheme.across, scheme.vec)
            for k, row in enumerate(rows)
        ]
        assert_bits(got[1], want, code)
        assert_bits(got[2], floats((x + y) * got[1]), code)


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("name", ["sum", "amin"])
def test_uneven_rows_of_three_dimensions(name, code):
    """With rows that repeat along one of them, and padded along another."""
    a, b, n = 2, 3, 131
    x, mask = random(code, a, b, n), random(code, a, 1, n, seed=1)
    padded = random(code, a, b + 1, n, seed=2)[:, :b]
    shape = (a, b, n)
    program = program_of(
        [view(code, *shape), view(code, a, 1, n), Spec(code, shape, padded.stride())],
        [
            (OPS["add"], (~0, ~1), shape, code),
            (OPS["mul"], (0, ~2), shape, code),
            (reduction(name), (1,), (a, b, 1), code),
            (OPS["sub"], (1, 2), shape, code),
        ],
        3,
    )
    (got,) = execute(program, [x, mask, padded]).values()
    scheme = scheme_of(name, a * b, n, x.element_size(), H200)
    rows = (x + mask) * padded
    want = [
        row_oracle.reduced(name, row, k * n, a * b, scheme.across, scheme.vec)
        for k, row in enumerate(floats(rows).reshape(-1, n))
    ]
    found = torch.from_numpy(np.asarray(want, F32)).to(DTYPES[code]).view(a, b, 1)
    assert_bits(got, floats(rows - found), code)


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "vector_norm", "var"])
def test_uneven_rows_in_memory_begin_where_it_does(name, code):
    """Torch's threads go by addresses."""
    m, n = 3, 131
    for shift in range(16 // torch.empty(0, dtype=DTYPES[code]).element_size()):
        x = random(code, m * n + shift)[shift:].view(m, n)
        program = program_of([view(code, m, n)], [
            reduced_by(name, ~0, (m, 1), code), (OPS["neg"], (0,), (m, 1), code),
        ], 1, consts=1)  # fmt: skip
        (got,) = execute(program, [x], [1.0], unaligned=shift > 0).values()
        scheme = scheme_of(name, m, n, x.element_size(), H200)
        want = [
            row_oracle.reduced(name, row, shift + k * n, m, scheme.across, scheme.vec)
            for k, row in enumerate(floats(x))
        ]
        assert_bits(got, -np.asarray(want), code)


def test_where_even_rows_have_to_begin():
    """At vectors that torch loads, if they are reduced as they are."""
    m, n = 4, 256

    def anchored(name, *steps):
        reduced = (m, n) if "norm" in name or "softmax" in name else (m, 1)
        weights = (~1, ~2, CONST) if name == "layer_norm" else ()
        program = program_of(
            [view("f32", m, n), view("f32", n), view("f32", n)],
            [*steps, (reduction(name, name == "layer_norm"),
                      (~0 if not steps else 0, *weights), reduced, "f32")],
            len(steps), consts=1,
        )  # fmt: skip
        (piece,) = make_pieces(program, "cuda", H200)
        return dict(zip(piece.loads, piece.plan.anchored, strict=True))

    add = (OPS["add"], (~0, ~1), (m, n), "f32")
    assert anchored("sum") == {~0: True}
    assert anchored("sum", add) == {~0: False, ~1: False}
    assert anchored("softmax") == {~0: False}
    assert anchored("layer_norm") == {~0: True, ~1: True, ~2: True}
    assert anchored("layer_norm", add) == {~0: False, ~1: True, ~2: True}


def test_rows_of_a_whole_block():
    """From 256 elements a thread on all threads of a block share a row."""
    m, n = 40, 8200
    x = random("bf16", m, n)[:1].repeat(m, 1)
    x[0, 3] = 7
    program = program_of([view("bf16", m, n)], [(reduction("sum"), (~0,), (m, 1), "bf16")], 0)
    (piece,) = make_pieces(program, "cuda", H200)
    assert piece.plan.rows.stages[0].across == (32, 16) and piece.plan.rows.together == 1
    small = program_of([view("bf16", m, n)], [(reduction("sum"), (~0,), (m, 1), "bf16")], 0)
    (got,) = execute(small, [x]).values()
    for k in (0, 1, 39):
        want = row_oracle.reduced("sum", floats(x)[k], k * n, m, (32, 16), 8)
        assert_bits(got[k], [want], "bf16")


@pytest.mark.parametrize("vec", [1, 2, 4, 8])
@pytest.mark.parametrize("threads", [1, 32, 128, 512])
def test_which_groups_every_thread_has(vec, threads):
    """Of rows that are held: no thread asks there whether they have an end."""
    for columns in range(vec, 40 * vec * threads, max(1, vec * threads // 3)):
        whole, groups = columns // vec, -(-columns // (vec * threads))
        full = columns == Walk.rounded(groups) * vec * threads
        walk = Walk(vec, Walk.rounded(groups), full)
        assert groups <= walk.held and walk.sure * threads <= whole
        assert walk.held - walk.sure <= (0 if full else 1 if groups <= 8 else 4)


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("log", [False, True])
def test_softmax_in_torchs_order(code, log):
    """Of a scaled and masked score, with what follows."""
    name = "log_softmax" if log else "softmax"
    shapes = [(5, 2), (3, 5), (9, 33), (5, 64), (3, 192), (5, 200), (2, 640), (1, 999), (2, 1024),
              (4, 2049), (1, 2048), (1, 9000)]  # fmt: skip
    for m, n in shapes[: None if code == "f32" else 10]:
        x, mask = random(code, m, n), random(code, m, n, seed=1)
        mask[0, 1] = -torch.inf
        shape = (m, n)
        program = program_of(
            [view(code, m, n)] * 2,
            [
                (OPS["mul"], (~0, CONST), shape, code),
                (OPS["add"], (0, ~1), shape, code),
                (reduction(name), (1,), shape, code),
                (OPS["abs"], (2,), shape, code),
            ],
            3, consts=1,
        )  # fmt: skip
        (got,) = execute(program, [x, mask], [0.25]).values()
        scores = floats(x * 0.25 + mask)
        assert_bits(got, np.abs([row_oracle.softmax(row, log) for row in scores]), code)


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm_in_torchs_order(code, affine):
    """With a pointwise op before it, and two after it."""
    for m, n in [(3, 3), (2, 4), (3, 100), (2, 513), (2, 1024), (1, 2500)]:
        x, res = random(code, m, n), random(code, m, n, seed=1)
        w, b = random(code, n, seed=2), random(code, n, seed=3)
        affine_args = (~2, ~3) if affine else ()
        shape = (m, n)
        program = program_of(
            [view(code, m, n), view(code, m, n), view(code, n), view(code, n)],
            [
                (OPS["add"], (~0, ~1), shape, code),
                (reduction("layer_norm", affine), (0, *affine_args, CONST), shape, code),
                (OPS["relu"], (1,), shape, code),
                (OPS["add"], (2, ~1), shape, code),
            ],
            0, 3, consts=1,
        )  # fmt: skip
        got = execute(program, [x, res, w, b], [1e-5])
        h = x + res
        assert_bits(got[0], floats(h), code)
        wb = (floats(w), floats(b)) if affine else (None, None)
        normed = np.array([row_oracle.layer_norm(row, *wb, F32(1e-5)) for row in floats(h)])
        normed = torch.from_numpy(normed).to(DTYPES[code])
        assert_bits(got[3], floats(torch.relu(normed) + res), code)


@pytest.mark.parametrize("code", DTYPES)
def test_rms_norm_in_torchs_order(code):
    for m, n in [(2, 5), (2, 64), (3, 1028), (1, 515)]:
        x, w = random(code, m, n), random(code, n, seed=1)
        program = program_of(
            [view(code, m, n), view(code, n)],
            [(reduction("rms_norm", True), (~0, ~1, CONST), (m, n), code)],
            0, consts=1,
        )  # fmt: skip
        (got,) = execute(program, [x, w], [1e-6]).values()
        rows = [row_oracle.rms_norm(row, floats(w), F32(1e-6)) for row in floats(x)]
        assert_bits(got, rows, code)


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_statistics_are_stored_beside_the_rows(name, affine, code):
    """In float32, whatever the rows are, of one reduction or of the second of two."""
    weights = ((), (~1,), (~1, ~2))[affine * (1 + (name == "layer_norm"))]
    for m, n, several in [(2, 3, 0), (5, 64, 0), (3, 515, 1), (3, 1028, 1)]:
        x, w, b = random(code, m, n), random(code, n, seed=1), random(code, n, seed=2)
        op = reduction(name, affine)
        first = [(reduction("layer_norm"), (~0, CONST), (m, n), code)] * several
        steps = [*first, (OPS["mul"], (several - 1, ~0), (m, n), code)]
        at = len(steps)
        steps += [(op, (at - 1, *weights, CONST), (m, n), code), (OPS["neg"], (at,), (m, n), code)]
        inputs = [view(code, m, n), view(code, n), view(code, n)]
        program = program_of(inputs, steps, consts=1)
        found = [
            Statistic(one, steps[at][1], code, view("f32", m, 1), at, which)
            for which, one in enumerate(op.statistics)
        ]
        live = tuple(Output(at + 1 + k) for k in range(1 + len(found)))
        program = replace(program, steps=(*program.steps, *found), outputs=live)
        got = execute(program, [x, w, b], [1e-5])
        rows = x
        if several:
            normed = [row_oracle.layer_norm(r, None, None, F32(1e-5)) for r in floats(x)]
            rows = torch.from_numpy(np.array(normed)).to(DTYPES[code])
        rows = floats(rows * x)
        own = getattr(row_oracle, f"{name}_statistics")
        for which, want in enumerate(zip(*(own(r, F32(1e-5)) for r in rows), strict=True)):
            assert_bits(got[at + 2 + which], want, "f32")


@pytest.mark.parametrize("keepdim", [False, True])
def test_numbers_of_rows_and_what_follows_from_them(keepdim):
    """RMSNorm as people write it, and the mean's square kept; numbers go back to their rows."""
    m, n = 6, 130
    kept = (m, 1) if keepdim else (m,)
    x = random("f32", m, n)
    steps = [
        (OPS["mul"], (~0, ~0), (m, n), "f32"),
        (reduction("mean", keepdim=keepdim), (0,), kept, "f32"),
        (OPS["add"], (1, CONST), kept, "f32"),
        (OPS["mul"], (2, ~1), kept, "f32"),
    ]
    if keepdim:
        steps.append((OPS["mul"], (~0, 3), (m, n), "f32"))
    scale = random("f32", *kept, seed=4)
    live = (1, 3, 4) if keepdim else (1, 3)
    program = program_of([view("f32", m, n), view("f32", *kept)], steps, *live, consts=1)
    got = execute(program, [x, scale], [0.5])
    scheme = scheme_of("mean", m, n, 4, H200)
    squares = floats(x * x)
    means = [
        row_oracle.reduced("mean", row, k * n, m, scheme.across, scheme.vec)
        for k, row in enumerate(squares)
    ]
    mean = torch.tensor(np.array(means)).reshape(kept)
    assert_bits(got[1], mean, "f32")
    assert_bits(got[3], (mean + 0.5) * scale, "f32")
    if keepdim:
        assert_bits(got[4], x * ((mean + 0.5) * scale), "f32")


def test_several_reductions_of_the_same_rows():
    """softmax as people write it: an extreme, then a sum of what follows from it."""
    m, n = 4, 300
    x = random("f32", m, n)
    program = program_of(
        [view("f32", m, n)],
        [
            (reduction("amax"), (~0,), (m, 1), "f32"),
            (OPS["sub"], (~0, 0), (m, n), "f32"),
            (OPS["abs"], (1,), (m, n), "f32"),
            (reduction("sum"), (2,), (m, 1), "f32"),
            (OPS["div"], (2, 3), (m, n), "f32"),
        ],
        4,
    )
    (got,) = execute(program, [x]).values()
    (scheme,) = {scheme_of(name, m, n, 4, H200) for name in ("amax", "sum")}
    rows = (x - x.amax(-1, keepdim=True)).abs()
    sums = [
        row_oracle.reduced("sum", row, k * n, m, scheme.across, scheme.vec)
        for k, row in enumerate(floats(rows))
    ]
    assert_bits(got, rows / torch.tensor(np.array(sums)).reshape(m, 1), "f32")


def test_masks_that_repeat_and_other_dtypes():
    """[2, 3, n] scores, a mask of [2, 1, n], and a bool one of [n]."""
    b, s, n = 2, 3, 64
    x, mask, keep = random("bf16", b, s, n), random("bf16", b, 1, n), torch.arange(n) % 3 > 0
    shape = (b, s, n)
    program = Program(
        (
            Pointwise(OPS["add"], (~0, ~1), "bf16", view("bf16", *shape)),
            Pointwise(OPS["mul"], (0, ~2), "bf16", view("bf16", *shape)),
            Reduced(reduction("softmax"), (1,), "bf16", view("bf16", *shape)),
        ),
        (view("bf16", *shape), view("bf16", b, 1, n), view("b1", n)), (), (Output(2),),
    )  # fmt: skip
    (piece,) = make_pieces(program, "cuda", H200)
    source, outs = source_of(piece.plan), torch.zeros(shape, dtype=torch.bfloat16)
    count, blocks, _ = launch_of(piece)
    raw = {~0: x.view(torch.int16), ~1: mask.view(torch.int16), ~2: keep, 2: outs.view(torch.int16)}
    bases = {ref: k << 32 for k, ref in enumerate(raw, 1)}
    buffers = {bases[ref]: t.numpy().reshape(-1).view(np.uint8) for ref, t in raw.items()}
    pointers = [bases[ref] for ref in (*piece.loads, *piece.stores)]
    run(source, blocks, [*pointers, count, *piece.numbers], buffers)
    scores = floats((x + mask) * keep).reshape(-1, n)
    assert_bits(outs.reshape(-1, n), [row_oracle.softmax(row) for row in scores], "bf16")


def test_other_live_outs_have_kernels_of_their_own():
    """What does not have the rows' shape comes first, by pointwise kernels."""
    m, n = 4, 64
    program = program_of(
        [view("f32", m, n), view("f32", n)],
        [
            (OPS["neg"], (~1,), (n,), "f32"),
            (OPS["mul"], (~0, 0), (m, n), "f32"),
            (reduction("softmax"), (1,), (m, n), "f32"),
        ],
        0, 1, 2,
    )  # fmt: skip
    first, second = make_pieces(program, "cuda", H200)
    assert not isinstance(first.plan, RowPlan) and first.stores == (0,)
    assert isinstance(second.plan, RowPlan) and second.stores == (1, 2)
    dead = program_of(program.inputs, [
        (OPS["neg"], (~1,), (n,), "f32"), (reduction("sum"), (~0,), (m, 1), "f32"),
    ], 0)  # fmt: skip
    (only,) = make_pieces(dead, "cuda", H200)
    assert not isinstance(only.plan, RowPlan), "the reduction is dead"


@pytest.mark.parametrize("n", [131, 256])
def test_indices_of_64_bits(n):
    x = random("f32", 3, n)
    program = program_of([view("f32", 3, n)], [
        (OPS["neg"], (~0,), (3, n), "f32"), (reduction("mean"), (0,), (3, 1), "f32"),
        (OPS["sub"], (0, 1), (3, n), "f32"),
    ], 2)  # fmt: skip
    (piece,) = make_pieces(program, "cuda", H200)
    assert piece.loads == (~0,)
    wide = replace(piece, plan=replace(piece.plan, wide=True))
    found = []
    for own in (piece, wide):
        source, out = source_of(own.plan), torch.zeros(3, n)
        assert source.wide is own.plan.wide and compile_ptx(source, "sm_90")
        count, blocks, _ = launch_of(own)
        tensors = {1 << 32: x, 2 << 32: out}
        buffers = {base: t.numpy().reshape(-1).view(np.uint8) for base, t in tensors.items()}
        run(source, blocks, [*buffers, count, *own.numbers], buffers)
        found.append(out)
    assert torch.equal(*found) and found[0].any()


def test_sizes_are_no_part_of_a_kernel():
    def plan(m, n):
        x = view("f32", m, n)
        program = program_of([x, x], [
            (OPS["add"], (~0, ~1), (m, n), "f32"),
            (reduction("layer_norm"), (0, CONST), (m, n), "f32"),
        ], 1, consts=1)  # fmt: skip
        (piece,) = make_pieces(program, "cuda", H200)
        return piece.plan

    assert plan(64, 1000) == plan(32, 996) == plan(7, 520)
    assert plan(64, 1000) != plan(64, 1001)
    assert plan(64, 1024) == plan(8, 1024)


@pytest.mark.parametrize("code", DTYPES)
def test_kernels_compile(code):
    """To PTX that moves vectors, and on to a binary."""
    for name, n in itertools.product(("sum", "softmax", "layer_norm"), (1024, 1025, 4096)):
        affine = name == "layer_norm"
        x = view(code, 64, n)
        steps = [(OPS["mul"], (~0, ~0), (64, n), code)]
        args = (0, ~1, ~1, CONST) if affine else (0,)
        shape = (64, n) if reduction(name, affine).whole else (64, 1)
        steps.append((reduction(name, affine), args, shape, code))
        steps.append((OPS["sub"], (~0, 1), (64, n), code))
        program = program_of([x, view(code, n)], steps, 2, consts=1)
        (piece,) = make_pieces(program, "cuda", H200)
        source = source_of(piece.plan, "sm_90")
        ptx = compile_ptx(source, "sm_90")
        assert f".maxntid {source.rows.block}, 1, 1" in ptx
        vectors = n % 4 == 0 or name == "sum"
        if name == "softmax":  # of two elements, in 16 bits a word
            vectors = n == 1024 and code == "f32"
        assert ("ld.global.v" in ptx) == vectors
        assert assemble(ptx, "sm_90")


def ptx_of(program):
    (piece, *_) = make_pieces(program, "cuda", H200)
    return piece.plan, compile_ptx(source_of(piece.plan, "sm_90"), "sm_90")


@pytest.mark.parametrize("name", ["mean", "std", "amax"])
@pytest.mark.parametrize("n", [200_000, 1 << 20])
def test_a_row_alone_is_read_by_vectors(name, n):
    """What its blocks leave is one number each, wherever that lies."""
    steps = [(OPS["abs"], (~0,), (n,), "f32"), (reduced_by(name, 0, (1,), "f32"))]
    plan, ptx = ptx_of(program_of([view("f32", n)], steps, 1, consts=1))
    assert plan.rows.shared and "ld.global.v" in ptx
    assert plan.vectors[0] and not any(plan.vectors[1:])


@pytest.mark.parametrize("code", DTYPES)
def test_blocks_that_leave_numbers_store_nothing_else(code):
    """Nor do they go through their row for it once more."""
    n = 200_000
    steps = [(OPS["mul"], (~0, ~1), (1, n), code), (reduction("mean"), (0,), (1, 1), code),
             (OPS["sub"], (~0, 1), (1, n), code)]  # fmt: skip
    plan, ptx = ptx_of(program_of([view(code, 1, n)] * 2, steps, 2))
    assert plan.rows.shared and plan.rows.columns is None
    labels = re.findall(r"^(\$L\w+):", ptx, re.MULTILINE)
    loops = [x for x in labels if f"bra \t{x};" in ptx.split(f"\n{x}:")[1]]
    assert len(loops) == 1


def test_counts_that_all_threads_have_are_not_exchanged():
    shape, row = (8, 1024), view("f32", 1024)
    steps = [(reduction("layer_norm", True), (~0, ~1, ~1, CONST), shape, "f32")]
    _, ptx = ptx_of(program_of([view("f32", *shape), row], steps, 0, consts=1))
    assert ptx.count("shfl.sync") == 2 * 5  # of means and squares, five times


def test_long_rows_are_loaded_ahead_of_their_stores():
    shape = (4096, 4096)
    steps = [(reduction("mean"), (~0,), (4096, 1), "f32"), (OPS["sub"], (~0, 0), shape, "f32")]
    plan, ptx = ptx_of(program_of([view("f32", *shape)], steps, 1))
    assert not plan.rows.walk.held
    before, after = ptx.split("shfl.sync")[-1].split("st.global", 1)
    assert before.count("ld.global.v4") == 4 and after.count("st.global.v4") == 3


def test_what_no_row_kernel_does():
    assert "less than two" in scheme_of("sum", 8, 1, 4, H200)
    assert "where they begin" in scheme_of("softmax", 8, 9217, 4, H200)
    assert "32 bits" in scheme_of("softmax", 1 << 22, 1024, 4, H200)
    assert "32 bits" in scheme_of("sum", 600, 1 << 20, 4, H200)  # torch sums its halves
