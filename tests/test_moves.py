"""Rolls, flips, repetitions, padding, copies in another shape: reads of what stands elsewhere."""

import functools
import itertools
import os
import random

import pytest
import torch
import torch.nn.functional as F
from test_groups import kernels  # noqa: F401
from test_reductions import emulated, launched, recorded, recording, table  # noqa: F401

import autofuse
from autofuse import errors
from autofuse.ops import moves
from support import assert_same, needs_cuda

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool)


def values(shape, dtype=torch.float32, seed=0, device="cpu"):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9
    return (x > 0 if dtype is torch.bool else x.to(dtype)).to(device)


def laplacian(u):
    return (torch.roll(u, 1, 0) + torch.roll(u, -1, 0) + torch.roll(u, 1, 1)
            + torch.roll(u, -1, 1) - 4.0 * u)  # fmt: skip


def upwind(u):
    """Of one dimension, and of what is computed: stored before it is read elsewhere."""
    flux = u * u * 0.5
    return u - 0.1 * (flux - flux.roll(1, -1))


PROGRAMS = {
    "a Laplacian": laplacian,
    "a step of diffusion": lambda u: u + 0.1 * laplacian(u),
    "both dimensions": lambda u: torch.roll(u, (1, -2), (0, 1)) * 2.0 + u,
    "upwind": upwind,
    "twice": lambda u: torch.roll(torch.roll(u, 1, 0) * 2.0, 3, 1) + u,
    "a view of it": lambda u: torch.roll(u * 2.0, 1, 0)[1:] * 3.0 + u[1:],
    "its beginning": lambda u: torch.roll(u, len(u) - 1, 0)[: len(u) // 2 + 1] * 3.0 + 1.0,
    "its end cut off": lambda u: torch.roll(u, 1, 1)[:, :-1] * 2.0 - u[:, 1:],
    "its middle": lambda u: torch.roll(u, (-2, 3), (0, 1))[1:-1, 1:] * u[1:-1, 1:],
    "every second": lambda u: torch.roll(u, 1, 1)[:, ::2] * 2.0,
    "one row of it": lambda u: torch.roll(u, 1, 0)[0] * 3.0 + u[-1],
    "one column of it": lambda u: torch.roll(u, 1, 1)[:, 0:1] * u,
    "its diagonal": lambda u: torch.roll(u, 1, 1).diagonal() * 2.0,
    "turned and cut": lambda u: torch.roll(u, 1, 0).t()[:-1] * 2.0,
    "of a view": lambda u: torch.roll(u.t().contiguous() * 2.0, 1, 0) * 2.0,
    "beside a row": lambda u: torch.roll(u, 2, 1) * u[0] + 1.0,
    "joined": lambda u: torch.cat([torch.roll(u, 1, 1) * 2.0, u * 3.0]),
    "held": lambda u: (h := torch.roll(u, 1, 0) * 2.0, h.roll(1, 0) + u),
    "from the end on": lambda u: u.flip(1) * 2.0 + u,
    "both from the end on": lambda u: torch.flip(u, (0, 1)) + u * 2.0,
    "what is computed, from its end": lambda u: (u * 2.0).flip(0) - u,
    "there and back": lambda u: (u.flip(1) * 2.0).flip(1) + u,
    "two of it": lambda u: (h := u * 3.0, h.flip(0) + h.flip(1), torch.flip(h, [-1, -2]) * h)[1:],
    "a view of it, from its end": lambda u: (u * 2.0)[1:].flip(1)[:, ::2] * 3.0 + 1.0,
    "turned, from its end": lambda u: (u * 2.0).t().flip(0)[:1] + 1.0,
    "cut in two, from its end": lambda u: (u * 2.0).reshape(-1).flip(0).view(u.shape) + u,
    "joined to one, from its end": lambda u: (u * 2.0).flip(1).reshape(-1) + 1.0,
    "rows beside their ends": lambda u: torch.cat([u * 2.0, (u * 2.0).flip(1)], 1) + 1.0,
    "of another order": lambda u: u.t().flip(0) * 2.0 + u.t(),
    "windows from their end": lambda u: (u * 2.0).unfold(1, 1, 1).flip(2, 0) + 1.0,
    "broadcast, from its end": lambda u: (u[0] * 2.0).expand(u.shape).flip(1) + u,
    "rolled from its end": lambda u: u.flip(1).roll(1, 1) * 2.0 + u,
    "the end of what is rolled": lambda u: torch.roll(u, 1, 1).flip(1) * 2.0 + u,
    "its reverse held": lambda u: (h := u.flip(0) * 2.0, h.flip(0) + u),
    "repeated": lambda u: u.repeat(2, 1) * 2.0 + 1.0,
    "repeated both ways": lambda u: (u * 2.0).repeat(2, 3) + 1.0,
    "repeated before itself": lambda u: (u * 2.0).repeat(3, 1, 1) + u,
    "repeated and cut": lambda u: (u * 2.0).repeat(1, 2)[:, 1:-1] * 3.0,
    "repeated, turned": lambda u: (u * 2.0).repeat(1, 2).t().reshape(-1) + 1.0,
    "repeated, from its end": lambda u: torch.tile(u * 2.0, (1, 2)).flip(1) + 1.0,
    "a row repeated": lambda u: (u[0] * 2.0).repeat(len(u), 1) * u,
    "tiled by fewer": lambda u: (u * 2.0).tile(3) + 1.0,
    "each twice": lambda u: (u * 2.0).repeat_interleave(2, 1) + 1.0,
    "each three times, from its end": lambda u: (u * 2.0).repeat_interleave(3, 0).flip(0) * 2.0,
    "copied flat": lambda u: (u * 2.0).t().reshape(-1) + 1.0,
    "copied to its shape": lambda u: (u * 2.0).t().reshape(u.shape) * u,
    "copied flat and back": lambda u: (u * 2.0).t().flatten().view(u.shape[::-1]).t() + u,
    "copied from its end": lambda u: ((u * 2.0).flip(0).t()).reshape(-1)[::2] + 1.0,
    "of what is expanded": lambda u: (u[0] * 2.0).expand(3, len(u[0])).reshape(-1) + 1.0,
    "a column copied flat": lambda u: (u * 2.0)[:, ::2].reshape(-1) * 3.0,
    "copies held": lambda u: (h := (u * 2.0).t().reshape(-1), h * 3.0, h.view(-1, 1) + 1.0),
    "left and right": lambda u: torch.fliplr(u * 2.0) + u.flipud() * u,
    "padded": lambda u: F.pad(u, (1, 2, 3, 1)) * 2.0 + 1.0,
    "padded by a number": lambda u: F.pad(u, (0, 0, 2, 0), value=2.5) * 2.0,
    "mixed with the row before": lambda u: u * 0.25 + F.pad(u, (0, 0, 1, -1)) * 0.75,
    "beside its neighbours": lambda u: F.pad(u, (1, 1))[:, :-2] + F.pad(u, (1, 1))[:, 2:] * u,
    "what is computed, padded": lambda u: F.pad(u * 2.0, (2, 1)).tanh() - 1.0,
    "padded and cut": lambda u: F.pad(u, (4, -1, -1, 4))[1:, ::2] * 3.0,
    "its border": lambda u: F.pad(u, (2, 2), value=-1.0)[:, 0] * 2.0,
    "padded twice": lambda u: F.pad(F.pad(u * 2.0, (1, 1)), (0, 0, 1, 1), value=1.0) * u.sum(),
    "padded, turned": lambda u: F.pad(u, (1, 2)).t() * 2.0 + 1.0,
    "padded, from its end": lambda u: F.pad(u, (3, 0)).flip(1) * 2.0,
    "rolled and padded": lambda u: F.pad(u.roll(1, 0) * 2.0, (1, 0)) + F.pad(u, (1, 0)).roll(1, 1),
    "padded of another order": lambda u: F.pad(u.t(), (1, 0)) * 2.0 + 1.0,
    "padded of a view": lambda u: F.pad((u * 2.0)[:, ::2], (1, 1)) + 1.0,
    "padded and joined": lambda u: torch.cat([F.pad(u, (1, 0)) * 2.0, F.pad(u, (0, 1))], 1),
    "all of it, of what is padded": lambda u: F.pad(u[:, :1] * 2.0, (2, 1))[:, 2:-1] - u,
    "one column padded": lambda u: F.pad(u[:, :1] * 2.0, (0, 2)) * 3.0,
    "one column of it rolled": lambda u: torch.roll(u, 2, 1)[:, :1] * u,
    "one column that is left": lambda u: F.pad(u, (1, 1 - u.shape[1])) * 2.0,
    "a pad that is held": lambda u: (h := F.pad(u, (1, 1)) * 2.0, h[:, 1:] - h[:, :-1]),
}
SHAPES = ((4, 8), (3, 5), (1, 7), (6, 1), (16, 32), (33, 64))


def compare(name, shapes, rtol, **how):
    errors._said.clear()
    for shape in shapes:
        u = values(shape, **how)
        want = PROGRAMS[name](u)
        for _ in range(3):
            got = PROGRAMS[name](autofuse.wrap(u))
            got, wanted = (list(t) if isinstance(t, tuple) else [t] for t in (got, want))
            got = [autofuse.unwrap(autofuse.materialize(t)) for t in got]
            assert_same(got, wanted, rtol, f"{shape}")
    assert not errors._said  # no kernel has failed


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_eagers(on, always, name):
    compare(name, SHAPES, 1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_whatever_runs_them(tier, name):
    """Beside a write that is pending, too, which whoever runs ops eagerly has to see first."""
    for shape in ((4, 8), (3, 5)):
        u = values(shape)
        for _ in range(3):
            mine, w = u.clone(), autofuse.wrap(u.clone())
            want, got = [], []
            for found, x in ((want, mine), (got, w)):
                x *= 2.0
                outs = PROGRAMS[name](x)
                h = (x + 1.0).mul_(3.0)
                again = PROGRAMS[name](h)
                x -= h
                float(x.sum())  # in memory now
                first = PROGRAMS[name](x)
                first = first[0] if isinstance(first, (tuple, list)) else first
                into = torch.ones(first.shape)  # which is not wrapped
                into += first
                for out in (outs, again, x, into):
                    found += out if isinstance(out, (tuple, list)) else [out]
            got = [autofuse.unwrap(autofuse.materialize(t)) for t in got]
            assert_same(got, want, 1e-5, f"{shape}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_for_cuda_read_them(kernels, name):  # noqa: F811
    compare(name, SHAPES[:-1], 1e-5)


@pytest.mark.parametrize("name", ["a step of diffusion", "mixed with the row before",
                                  "beside its neighbours", "padded by a number"])  # fmt: skip
def test_a_stencil_of_memory_is_one_kernel(kernels, name):  # noqa: F811
    u = values((6, 8))
    for _ in range(3):
        launched.clear()
        autofuse.reset_stats()
        got = autofuse.materialize(PROGRAMS[name](autofuse.wrap(u)))
        assert len(launched) == 1 and autofuse.stats().ops_eager == 0
    assert_same(autofuse.unwrap(got), PROGRAMS[name](u), 1e-6)


def step_in_place(u, v):
    u += 0.1 * laplacian(u)
    return u


def copied(u, v):
    u.copy_(torch.roll(u, 1, 0) * 2.0)
    return u


def written_beside(u, v):
    """Memory of another tensor, which nothing reads elsewhere."""
    v.copy_(torch.roll(u, 1, 1) + v)
    return v


def written_rows(u, v):
    u[1:] = (torch.roll(u, 1, 0) * 2.0)[1:]
    return u


def through_a_view(u, v):
    half = u[: len(u) // 2 + 1]
    half *= (torch.roll(u, 1, 0) * 2.0)[: len(half)]
    return u


def out_of(u, v):
    torch.add(torch.roll(u, 1, 1) * 2.0, v, out=u)
    return u


def pending_in_place(u, v):
    h = torch.roll(u, 1, 1) * 2.0
    r = torch.roll(h, 1, 0)
    h += 1.0
    return r + h


def written_after(u, v):
    h = torch.roll(u, 1, 1) * 2.0
    u.mul_(3.0)
    return h + u


def flipped_over_itself(u, v):
    u.copy_(u.flip(0) * 2.0)
    u += u.flip(1)
    return u


def flipped_out(u, v):
    torch.mul(u.flip(1), v, out=u)
    return u


def repeated_over_itself(u, v):
    u.copy_((u[:1] * 2.0).repeat(len(u), 1) + u)
    u[:, : u.shape[1] // 2 * 2] += u[:, : u.shape[1] // 2].repeat(1, 2)
    return u


def padded_over_itself(u, v):
    u.copy_(F.pad(u, (1, -1)) * 2.0 + u)
    u += F.pad(u, (0, 0, 1, -1))
    return u


WRITES = [step_in_place, copied, written_beside, written_rows, through_a_view, out_of,
          pending_in_place, written_after, flipped_over_itself, flipped_out,
          repeated_over_itself, padded_over_itself]  # fmt: skip


@pytest.mark.parametrize("program", WRITES, ids=lambda program: program.__name__)
def test_what_is_written_is_not_read_elsewhere_after(kernels, always, program):  # noqa: F811
    """In three steps from where the last has left it, versions too."""
    for shape in ((4, 8), (5, 7), (16, 64)):
        u, v = values(shape), values(shape, seed=1)
        mine, other = u.clone(), v.clone()
        wrapped, beside = autofuse.wrap(mine), autofuse.wrap(other)
        for _ in range(3):
            want = program(u, v)
            got = autofuse.unwrap(autofuse.materialize(program(wrapped, beside)))
            assert_same(got, want, 1e-5, f"{shape}")
            assert_same([mine, other], [u, v], 1e-5)
            assert (mine._version, other._version) == (u._version, v._version)


@pytest.mark.parametrize("program", WRITES, ids=lambda program: program.__name__)
def test_the_same_by_kernels_of_the_cpu(on, always, program):
    u, v = values((6, 40)), values((6, 40), seed=1)
    mine, other = autofuse.wrap(u.clone()), autofuse.wrap(v.clone())
    for _ in range(4):
        want = program(u, v)
        assert_same(autofuse.unwrap(autofuse.materialize(program(mine, other))), want, 1e-5)
        assert_same([*map(autofuse.unwrap, (mine, other))], [u, v], 1e-5)


CALLS = {
    "a list of dimensions": lambda x: x.roll([1, 2], [0, 1]),
    "of what is flat": lambda x: x.roll(3),
    "by nothing": lambda x: x.roll(0, 1),
    "all the way": lambda x: x.roll(8, 1),
    "far": lambda x: x.roll(-1001, -1),
    "a dimension twice": lambda x: x.roll((1, 1), (0, -2)),
    "of one dimension": lambda x: x[0].clone().roll(2),
    "more shifts than dimensions": lambda x: x.roll((1, 2), 0),
    "more dimensions": lambda x: x.roll(1, (0, 1)),
    "out of range": lambda x: x.roll(1, 2),
    "no dimensions": lambda x: x.roll((), ()),
    "beyond int64": lambda x: x.roll(2**70, 1),
    "beyond int64, by something": lambda x: x.roll(2**70 + 1, 1),
    "as far as int64": lambda x: x.roll(2**62 + 1, 1),
    "a float": lambda x: x.roll(1.0, 0),
    "of nothing": lambda x: x[:0].clone().roll(1, 0),
    "a number": lambda x: x[0, 0].clone().roll(1, 0),
    "of another order": lambda x: x.t().roll(1, 0),
    "of a slice": lambda x: x[:, ::2].roll(1, 1),
    "by names": lambda x: torch.roll(input=x, shifts=1, dims=0),
    "repeated": lambda x: x.repeat(2, 3),
    "repeated by a list": lambda x: x.repeat([2, 1, 1]),
    "repeated by a size": lambda x: x.repeat(torch.Size((2, 1))),
    "repeated by names": lambda x: x.repeat(repeats=(1, 2)),
    "repeated by fewer": lambda x: x.repeat(2),
    "repeated by nothing": lambda x: x.repeat(),
    "a number repeated by none": lambda x: x[0, 0].repeat(),
    "each repeated without end": lambda x: x.repeat_interleave(2**70, 1),
    "repeated by none": lambda x: x.repeat(0, 1),
    "repeated by less": lambda x: x.repeat(-1, 1),
    "repeated by a float": lambda x: x.repeat(1.0, 2),
    "repeated by a bool": lambda x: x.repeat(True, 2),
    "nothing repeated": lambda x: x[:0].clone().repeat(2, 1),
    "a number repeated": lambda x: x[0, 0].clone().repeat(3),
    "a number repeated by nothing": lambda x: x[0, 0].clone().repeat(()),
    "tiled": lambda x: torch.tile(x, (2, 1)),
    "tiled by an int": lambda x: torch.tile(x, 2),
    "tiled by ints": lambda x: x.tile(1, 2),
    "tiled by more": lambda x: x.tile((2, 1, 1)),
    "tiled by nothing": lambda x: x.tile(()),
    "each repeated": lambda x: x.repeat_interleave(2, 1),
    "each repeated by names": lambda x: x.repeat_interleave(repeats=2, dim=0),
    "each repeated, flat": lambda x: x.repeat_interleave(2),
    "each repeated by none": lambda x: x.repeat_interleave(0, 1),
    "each repeated by less": lambda x: x.repeat_interleave(-1, 1),
    "each repeated by numbers": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1]), 0),
    "each repeated out of range": lambda x: x.repeat_interleave(2, 2),
    "copied flat": lambda x: x.t().reshape(-1),
    "copied in another order": lambda x: x.t().reshape(4, 8),
    "copied by threes": lambda x: x.t()[:6].reshape(3, 8),
    "copied by division": lambda x: x.t()[:6].reshape(8, 3),
    "flattened": lambda x: x.t().flatten(),
    "copied out of range": lambda x: x.t().reshape(5, 7),
    "copied as another": lambda x: x.t().reshape_as(torch.zeros(2, 16)),
    "flipped": lambda x: x.flip(0, -1),
    "flipped by a list": lambda x: x.flip([1, 0]),
    "flipped by names": lambda x: torch.flip(input=x, dims=(1,)),
    "flipped by a name": lambda x: x.flip(dims=[0]),
    "flipped by one": lambda x: torch.flip(x, 0),
    "flipped by one with a name": lambda x: x.flip(dims=0),
    "tiled by one with a name": lambda x: x.tile(dims=2),
    "flipped twice over": lambda x: x.flip((0,), (1,)),
    "flipped by both": lambda x: x.flip(0, dims=(1,)),
    "tiled by both": lambda x: x.tile(2, dims=(1,)),
    "repeated beyond counting": lambda x: x.repeat(2**40, 2**40),
    "tiled beyond counting": lambda x: x.tile((2**40, 2**40)),
    "repeated beyond counting, and by none": lambda x: x.repeat(2**33, 2**33, 0),
    "flipped along nothing": lambda x: x.flip(()),
    "a dimension flipped twice": lambda x: x.flip(0, -2),
    "flipped out of range": lambda x: x.flip(2),
    "flipped by a float": lambda x: x.flip(1.0),
    "flipped by a bool": lambda x: x.flip(True),
    "a number flipped": lambda x: x[0, 0].clone().flip(0),
    "a number flipped along nothing": lambda x: x[0, 0].clone().flip(()),
    "nothing flipped": lambda x: x[:0].clone().flip(0),
    "a slice flipped": lambda x: x[:, ::2].flip(1),
    "another order flipped": lambda x: x.t().flip(0),
    "repeated rows flipped": lambda x: x[0].expand(3, 8).flip(0),
    "padded": lambda x: F.pad(x, (1, 2)),
    "padded by a list": lambda x: F.pad(x, [1, 2, 0, 1], "constant", 3),
    "padded by names": lambda x: F.pad(input=x, pad=(1, 2), mode="constant", value=-0.0),
    "padded by none": lambda x: F.pad(x, (1, 0), value=None),
    "padded by nothing": lambda x: F.pad(x, ()),
    "padded by zeros": lambda x: F.pad(x, (0, 0)),
    "padded by less": lambda x: F.pad(x, (-1, -2)),
    "padded by less, of another order": lambda x: F.pad(x.t(), (-1, 0)),
    "padded to one element": lambda x: F.pad(x, (1, -8)),
    "cut to one element": lambda x: F.pad(x, (-2, -5, 1, 0)),
    "one element padded": lambda x: F.pad(x[:, 2:3], (1, 2)),
    "cut beyond its end": lambda x: F.pad(x, (-9, 12)),
    "cut to its end": lambda x: F.pad(x, (-8, 12)),
    "cut before its beginning": lambda x: F.pad(x, (12, -9)),
    "integers padded beyond counting": lambda x: F.pad(x.long(), (1, 0), value=2**53 + 1),
    "nothing flipped, of what is repeated": lambda x: x[:0].expand(2, 0, 8).flip(-1)[::2].tanh(),
    "padded to none": lambda x: F.pad(x, (1, -9)),
    "padded to less than none": lambda x: F.pad(x, (1, -20)),
    "padded by an odd number": lambda x: F.pad(x, (1, 2, 3)),
    "padded along more": lambda x: F.pad(x, (1,) * 6),
    "padded by floats": lambda x: F.pad(x, (1.0, 2)),
    "padded by bools": lambda x: F.pad(x, (True, 2)),
    "padded beyond counting": lambda x: F.pad(x, (2**40, 2**40)),
    "padded by infinity": lambda x: F.pad(x, (1, 2), value=float("inf")),
    "padded by a bool": lambda x: F.pad(x, (1, 2), value=True),
    "padded by a tensor": lambda x: F.pad(x, (1, 2), value=torch.tensor(2.0)),
    "padded by too much": lambda x: F.pad(x.half(), (1, 2), value=1e6),
    "integers padded by a fraction": lambda x: F.pad(x.int(), (1, 2), value=1.5),
    "integers padded by too much": lambda x: F.pad(x.to(torch.int8), (1, 2), value=1000),
    "bools padded": lambda x: F.pad(x > 0, (1, 2), value=1),
    "padded in another way": lambda x: F.pad(x[None], (1, 2), "reflect"),
    "padded by what is near": lambda x: F.pad(x[None], (1, 2), mode="replicate"),
    "padded all around": lambda x: F.pad(x[None], (1, 2), "circular"),
    "padded in no way": lambda x: F.pad(x, (1, 2), "konstant"),
    "padded by aten": lambda x: torch.constant_pad_nd(x, (1, 2), 0.5),
    "padded by a module": lambda x: torch.nn.ConstantPad1d((2, 1), 7.0)(x),
    "padded rows by a module": lambda x: torch.nn.ZeroPad2d((0, 0, 1, -1))(x[None]),
    "a number padded": lambda x: F.pad(x[0, 0].clone(), (1, 1)),
    "nothing padded": lambda x: F.pad(x[:0].clone(), (1, 1)),
    "a slice padded": lambda x: F.pad(x[:, ::2], (1, 1)),
    "repeated rows padded": lambda x: F.pad(x[0].expand(3, 8), (1, 1)),
    "left and right of one dimension": lambda x: torch.fliplr(x[0]),
    "up and down of one dimension": lambda x: torch.flipud(x[0] * 2.0),
    "up and down of a number": lambda x: torch.flipud(x[0, 0]),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_are_eagers(on, always, call):
    def outcome(x):
        try:
            return CALLS[call](x * 2.0)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            return type(error), str(error)

    x = values((4, 8))
    for _ in range(3):
        got, want = outcome(autofuse.wrap(x)), outcome(x)
        if isinstance(want, torch.Tensor):
            got = autofuse.unwrap(autofuse.materialize(got))
            assert_same(got, want, None)
            assert want._is_view() or not got._is_view()
        else:
            assert got == want


@pytest.mark.parametrize("shapes", [*itertools.permutations([(5,), (5, 5), (2, 5, 5)])])
def test_one_call_of_tensors_of_several_dimensions(on, always, shapes):
    moves = (lambda t: t.roll(1, -1), lambda t: t.roll((2, 1)[: t.ndim], (-1, 0)[: t.ndim]),
             lambda t: t.flip(-1), lambda t: t.flip(0), lambda t: t.repeat(2, 1, 1, 1),
             lambda t: t.tile(2), lambda t: t.repeat_interleave(2, -1),
             lambda t: t.transpose(0, -1).reshape(-1), lambda t: F.pad(t, (1, 2)),
             lambda t: F.pad(t, (1, -1)))  # fmt: skip
    for move in moves:
        for shape in shapes * 2:
            x = values(shape).requires_grad_()
            w = autofuse.wrap(x.detach().clone().requires_grad_())
            program = functools.partial(lambda move, t: move(t * 2.0) * 3.0, move)
            assert_same(gradients(program, w), gradients(program, x), 1e-5, f"{shape}")
            with torch.no_grad():
                got = autofuse.unwrap(autofuse.materialize(move(autofuse.wrap(x.detach()) * 2.0)))
                assert_same(got, move(x * 2.0).detach(), 1e-5, f"{shape}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_every_dtype(on, always, dtype):
    for shape, dim in itertools.product([(7,), (4, 6), (2, 3, 4), (2, 3, 2, 5)], range(-4, 4)):
        if not -len(shape) <= dim < len(shape):
            continue
        x = values(shape, dtype)
        one = torch.ones((), dtype=dtype)
        for move in (
            lambda t: torch.roll(t, 1, dim), lambda t: t.flip(dim),  # noqa: B023
            lambda t: (t & 1 if dtype is torch.bool else t * 1).repeat_interleave(2, dim),  # noqa: B023
            lambda t: t.repeat(*[2] * t.ndim), lambda t: (t == 0).transpose(0, dim).reshape(-1),  # noqa: B023
            lambda t: F.pad(t, (0, 0) * (-dim - 1 if dim < 0 else t.ndim - dim - 1) + (2, 1)),  # noqa: B023
            lambda t: F.pad(t, (1, 1), value=None if dtype is torch.bool else 3),  # noqa: B023
        ):  # fmt: skip
            got = autofuse.materialize(move(autofuse.wrap(x)) == one)
            assert_same(autofuse.unwrap(got), move(x) == one, None)


def laid(shape, order, **how):
    """Values of a shape whose dimensions lie in memory in this order."""
    x = values([shape[d] for d in order], **how)
    return x.permute([order.index(d) for d in range(len(shape))])


PADS = [(1, 1), (0, 0, 1, -1), (1, 0, 0, 2), (0, 0, 0, 0, 1, 1), (-1, 2), (0, 0, 0, 0, 0, 0, 2, -1)]


@pytest.mark.parametrize("pad", PADS, ids=str)
def test_padding_of_every_layout(on, always, pad):
    """The result's is one of torch's memory formats; the gradient's too, as what comes in lies."""
    orders = {n: [*itertools.permutations(range(n))] for n in (1, 2, 3, 4)}
    orders[5] = [(0, 1, 2, 3, 4), (0, 2, 3, 4, 1), (4, 3, 2, 1, 0)]
    shapes = ((4,), (3, 4), (2, 1, 3), (2, 3, 4, 5), (1, 1, 3, 3), (3, 2, 1, 4), (4, 4, 1, 1),
              (2, 2, 3, 2, 3))  # fmt: skip
    for shape in shapes:
        for order in orders[len(shape)]:
            x = laid(shape, order).requires_grad_()
            try:
                like = F.pad(x, pad)
            except RuntimeError:  # more dimensions than it has
                continue
            g = laid(like.shape, order[1:] + order[:1], seed=1)
            for h in (g, torch.ones_like(like), laid(like.shape, order, seed=2)):
                found = []
                for t in (autofuse.wrap(x), x):
                    out = F.pad(t * 0.5, pad, value=1.5) * 2.0
                    (grad,) = torch.autograd.grad(out, x, h)
                    found.append([autofuse.unwrap(autofuse.materialize(out)).detach(), grad])
                assert_same(*found, 1e-6, f"{shape} {order}")


def test_shifts_that_are_others_each_time_come_to_an_end(on, always, monkeypatch):
    """As of augmentations: each would be a program of its own."""
    moves._known.clear()
    w, u = autofuse.wrap(values((4, 1000))), values((4, 1000))
    for shift in range(1, 200):
        got = autofuse.materialize(torch.roll(w * 2.0, shift, 1) + 1.0)
        assert_same(autofuse.unwrap(got), torch.roll(u * 2.0, shift, 1) + 1.0, None)
    assert len(moves._known["roll"]) == moves._MOST
    autofuse.reset_stats()
    autofuse.materialize(torch.roll(w * 2.0, 1, 1) + 1.0)  # these stay
    assert autofuse.stats().ops_eager == 0


def test_sizes_are_no_part_of_a_way_to_move(on, always):
    for n in range(2, 140):
        u = values((n, 3))
        autofuse.reset_stats()
        w = autofuse.wrap(u)
        got = autofuse.materialize(w.roll(1, 0) + w.flip(0) * 2.0)
        assert autofuse.stats().ops_eager == 0
        assert_same(autofuse.unwrap(got), u.roll(1, 0) + u.flip(0) * 2.0, 1e-6)
        again = autofuse.materialize((w * 2.0).t().reshape(-1) + 1.0)  # each is a way of its own
        assert_same(autofuse.unwrap(again), (u * 2.0).t().reshape(-1) + 1.0, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim, fused", [(0, True), (1, False)])
def test_on_a_cpu_rows_that_wrap_are_left_to_torch_where_they_are_long(on, dtype, dim, fused):
    """Their loops are not vectorised."""
    u = values((256, 256), dtype)
    w = autofuse.wrap(u)
    for _ in range(8):
        autofuse.reset_stats()
        got = autofuse.materialize(torch.roll(w, 1, dim) + w * 2.0 - w)
        left = {name for name, _ in autofuse.stats().eager_ops}
        assert_same(autofuse.unwrap(got), torch.roll(u, 1, dim) + u * 2.0 - u, 1e-2)
    assert ("roll" not in left) is fused, left


def gradients(program, x, twice=False):
    """Of what a program gives, and of a sum of these; the names of its nodes too."""
    outs = program(x)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    outs = [autofuse.unwrap(autofuse.materialize(out)) for out in outs]
    weights = [torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos() for out in outs]
    loss = sum((out * w.to(out.device)).sum() for out, w in zip(outs, weights, strict=True))
    leaf = autofuse.unwrap(x)
    (g,) = torch.autograd.grad(loss, leaf, create_graph=twice)
    if not twice:
        return [*outs, g]
    return [*outs, g, torch.autograd.grad((g * g * leaf).sum(), leaf)[0]]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(always, name, twice):
    for shape in ((4, 8), (1, 7)) if twice else SHAPES[:-2]:
        x = values(shape).div(9).requires_grad_()
        want = gradients(PROGRAMS[name], x, twice)
        for _ in range(3):
            w = autofuse.wrap(x.detach().clone().requires_grad_())
            assert_same(gradients(PROGRAMS[name], w, twice), want, 1e-4, f"{shape}")


def test_gradients_are_recorded(on, always):
    x = values((6, 8)).requires_grad_()
    for _ in range(3):
        autofuse.reset_stats()
        w = autofuse.wrap(x.detach().clone().requires_grad_())
        h = (torch.roll(w, 1, 0) * w.flip(1)).tanh()
        assert h.grad_fn.name() == "TanhBackward0"
        h.backward(torch.ones_like(x))
        stats = autofuse.stats()
        assert stats.ops_recorded == 4
        assert not {"roll", "flip", "mul", "tanh"} & {name for name, _ in stats.eager_ops}
    for op in (
        lambda t: t.flip(0),
        lambda t: t.roll(1, 0),
        lambda t: F.pad(t * 2.0, (1, 2)),
        lambda t: F.pad(t * 2.0, (-1, 0)),
        lambda t: torch.constant_pad_nd(t, (1, 2)),
    ):
        got, want = (op(t * 2.0) for t in (autofuse.wrap(x), x))
        assert autofuse.materialize(got).grad_fn.name() == want.grad_fn.name()


def test_reductions_of_them_begin_another_chain(kernels):  # noqa: F811
    u = values((6, 33))
    for _ in range(3):
        got = autofuse.materialize((torch.roll(autofuse.wrap(u), 1, 1) * u).amax(-1))
        assert_same(autofuse.unwrap(got), (torch.roll(u, 1, 1) * u).amax(-1), None)
        h = autofuse.wrap(u) * 2.0
        got = autofuse.materialize(torch.roll(h - h.amax(-1, keepdim=True), 1, 1) + u)
        want = torch.roll(u * 2.0 - (u * 2.0).amax(-1, keepdim=True), 1, 1) + u
        assert_same(autofuse.unwrap(got), want, None)


def test_what_is_read_from_its_end_keeps_no_other_from_vectors(kernels):  # noqa: F811
    u, v = values((8, 64)), values((8, 64), seed=1)
    for dims in (0, 1, (0, 1)):
        launched.clear()
        got = autofuse.materialize(autofuse.wrap(u).flip(dims) * autofuse.wrap(v) + 1.0)
        assert_same(autofuse.unwrap(got), u.flip(dims) * v + 1.0, 1e-6)
        assert [blocks for _, blocks, _ in launched] == [1]  # 4 elements a thread


def test_shifts_are_no_part_of_a_kernel(kernels):  # noqa: F811
    u = values((8, 16))
    names = set()
    for shift in range(1, 8):
        launched.clear()
        got = autofuse.materialize(torch.roll(autofuse.wrap(u), shift, 0) * 2.0)
        assert_same(autofuse.unwrap(got), torch.roll(u, shift, 0) * 2.0, None)
        names.add(id(launched[0][0]))
    assert len(names) == 1


def expression(rng, depth):
    """One over u and v, of their shape, or for a view of it of a part that all have."""
    if depth == 0:
        return rng.choice("uv")
    a, b = expression(rng, depth - 1), expression(rng, rng.randint(0, depth - 1))
    dims = rng.choice([(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
    shifts = tuple(rng.choice([-3, -1, 1, 2, 5]) for _ in dims)
    return rng.choice([
        f"torch.roll({a}, {shifts}, {dims})", f"(torch.roll({a}, {shifts}, {dims}) - {b})",
        f"({a} * {b})", f"({a} + 0.5 * {b})", f"({a} - {b}[:, :1])", f"({b}[:, :, -1:] + {a})",
        f"torch.cat([{a}[:, 1:], {a}[:, :1]], 1)", f"torch.flip({a}, {dims})",
        f"({a}.flip({dims[0]}) - {b})", f"({a}).transpose(0, 2).reshape({b}.shape)",
        f"({a}).repeat(1, 2, 1)[:, {b}.shape[1] // 2:][:, :{b}.shape[1]]",
        f"F.pad({a}, {rng.choice(['(1, -1)', '(-1, 1)', '(0, 0, 2, -2)', '(1, 0, 1, 0)'])})"
        f"[:, :{b}.shape[1], :{b}.shape[2]]", f"(F.pad({a}, (2, 1), value=0.5)[..., 2:-1] - {b})",
    ])  # fmt: skip


PARTS = ["", "[:, :-1]", "[..., :-1]", "[..., 1:]", "[:, 0]", "[:, :1]", "[:, ::2]", "[..., ::3]",
         ".transpose(0, 2)[:-1]", ".diagonal(0, 1, 2)", "[:1]", "[:, -1:, 1:]"]  # fmt: skip


def drawn(rng):
    """The text of a program of stencils over u and v."""
    lines = []
    for k in range(rng.randint(1, 3)):
        if rng.random() < 0.15:
            lines.append(f"{rng.choice('uv')} += {expression(rng, 1)} * 0.5")
        lines.append(f"h{k} = ({expression(rng, rng.randint(1, 3))}){rng.choice(PARTS)} * 2.0")
    body = "".join(f"    {line}\n" for line in [*lines, f"return [h{k}, h0 + 1.0]"])
    return f"def run(u, v):\n{body}"


@pytest.mark.parametrize("seed", range(int(os.environ.get("AUTOFUSE_TEST_ORDERS", "12"))))
def test_random_stencils(kernels, always, seed):  # noqa: F811
    rng = random.Random(f"{os.environ.get('AUTOFUSE_TEST_SEED', '1128')} {seed}")
    space = {"torch": torch, "F": F}
    source = drawn(rng)
    exec(source, space)
    shape = [rng.choice([1, 2, 3]), rng.choice([1, 2, 5, 8]), rng.choice([1, 3, 8, 33, 64])]
    own = [values(shape, seed=seed), values(shape, seed=seed + 1)]
    try:
        want = space["run"](*(t := [x.clone() for x in own])), t
    except RuntimeError:  # less than nothing is left
        return
    errors._said.clear()
    for _ in range(2):
        mine = [x.clone() for x in own]
        got = [autofuse.unwrap(autofuse.materialize(h))
               for h in space["run"](*map(autofuse.wrap, mine))]  # fmt: skip
        assert_same([got, mine], [*want], 1e-4, f"{shape}\n{source}")
    assert not any("failed" in said for said in errors._said), errors._said


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_gpu(name, dtype, always):
    if dtype is torch.bool:
        pytest.skip("programs of numbers")
    shapes = (*SHAPES, (1000, 1000), (257, 1023), (2048, 4096))
    compare(name, shapes, None, dtype=dtype, device="cuda")


@pytest.mark.cuda
@needs_cuda
def test_more_than_32_bits_count_on_a_gpu(always):
    u = torch.randint(-9, 9, (3, (1 << 31) // 3 + 70), dtype=torch.int8, device="cuda")
    for dim in (0, 1):
        around = (0, 0) * (1 - dim) + (3, -2)
        for move in (lambda t: torch.roll(t, -5, dim), lambda t: t.flip(dim),  # noqa: B023
                     lambda t: F.pad(t, around, value=7)):  # noqa: B023 # fmt: skip
            got = autofuse.materialize(move(autofuse.wrap(u)) + 1)
            assert torch.equal(autofuse.unwrap(got), move(u) + 1)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_on_a_gpu(name, always):
    for shape in (*SHAPES, (257, 1023)):
        x = values(shape, device="cuda").div(9).requires_grad_()
        want = gradients(PROGRAMS[name], x)
        for _ in range(3):
            w = autofuse.wrap(x.detach().clone().requires_grad_())
            assert_same(gradients(PROGRAMS[name], w), want, None, f"{shape}")
