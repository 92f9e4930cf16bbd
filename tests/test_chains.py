"""Random programs against eager: ops, dtypes, shapes, layouts, writes, liveness and reads mixed.

A failure prints the program as plain code, to be run with this directory in PYTHONPATH. On the CPU
the programs use arithmetic only and every bit counts; on CUDA they use the whole table, and every
bit counts there too. `AUTOFUSE_TEST_CHAINS` programs per device are cut into shards of `SHARD`,
each a test with a seed of its own, so that `pytest -n 16` spreads them; without pytest-xdist 10,000
are run by

    export AUTOFUSE_TEST_CHAINS=10000
    seq 0 79 | xargs -P16 -I{} pytest -q "tests/test_chains.py::test_random_programs[-cuda-{}]"
"""

import contextlib
import os
import random
import warnings

import pytest
import torch

import autofuse
import cases
from support import DEVICES, FLOATS, INTS

SEED = int(os.environ.get("AUTOFUSE_TEST_SEED", "20261121"))
COUNT = int(os.environ.get("AUTOFUSE_TEST_CHAINS", "100"))
SHARD = 125

# {a}, {b}, {d}: any values; {m}: a bool value, if there is one; {w}: a value that may be written;
# {s}: a number; a line that eager PyTorch refuses is rarely kept
EXACT = """
{a} + {b} ; {a} - {b} ; {a} * {b} ; -{a} ; {a}.abs() ; {a} * {s} ; {a} + {s} ; {s} - {a} ; {a} / {s}
torch.maximum({a}, {b}) ; torch.minimum({a}, {b}) ; torch.where({a} > {b}, {a}, {b})
torch.where({m}, {a}, {b}) ; torch.where({m}, {a}, {s}) ; torch.where({m}, {s}, {b})
{a}.masked_fill({m}, {s}) ; {a}.masked_fill({a} < {b}, 2) ; {a}.clamp(-1, 1) ; {a}.clamp(min={s})
torch.clamp({a}, {b}, {d}) ; {a}.relu() ; {a}.square() ; {a} ** 2 ; {a}.floor() ; {a}.trunc()
{a}.sign() ; {a} == {b} ; {a} != {s} ; {a} < {s} ; {a} >= {b} ; {a}.isfinite() ; {a}.logical_not()
torch.add({a}, {b}) ; torch.mul({a}, {b}) ; torch.neg({a}) ; torch.sub({a}, {b}) ; {a} & {b}
{a} | {b} ; {a} ^ {b} ; ~{a} ; torch.logical_xor({a}, {b}) ; {a}.clone()
"""
FLOATING = """
torch.tanh({a}) ; {a}.sigmoid() ; F.gelu({a}) ; F.silu({a}) ; torch.exp({a}) ; {a} / {b}
torch.add({a}, {b}, alpha={s}) ; torch.lerp({a}, {b}, 0.3) ; torch.lerp({a}, {b}, {d})
torch.addcmul({a}, {a}, {b}, value={s}) ; torch.addcdiv({a}, {b}, {d}) ; {a}.sin() ; F.softplus({a})
torch.sqrt({a}.abs()) ; F.leaky_relu({a}, 0.1) ; {a}.erf() ; 1 / {a} ; {a} ** 3 ; F.elu({a})
torch.rsqrt({a}.abs() + 1) ; {a} % {b} ; {a} // {s} ; {a} ** {b} ; {s} ** {a} ; torch.pow({a}, {s})
"""
WRITES = """
{w}.add_({b}) ; {w}.mul_({s}) ; {w} += {b} ; {w} *= {s} ; {w} -= {b} ; {w}.sub_({b}, alpha=2)
{w}.clamp_(-1, 1) ; {w}.neg_() ; {w}.relu_() ; F.relu({w}, inplace=True) ; {w}.zero_()
{w}.fill_(2) ; {w}.copy_({b}) ; {w}.masked_fill_({m}, 1) ; {w}[..., :1] = 2 ; {w}[...] = {b}
torch.add({a}, {b}, out={w}) ; torch.mul({a}, {b}, out={w}) ; torch.neg({a}, out={w})
torch.lt({a}, {b}, out={w}) ; plain({w}).mul_({b}) ; plain({w}).add_({a} * {s}) ; plain({w}).neg_()
torch.mul({a}, {b}, out=plain({w})) ; plain({w}).sub_({b} - {a}) ; plain({w}).copy_({a} + {s})
"""
FLOATING_WRITES = """
{w}.tanh_() ; {w}.sigmoid_() ; {w}.div_({b}) ; {w} /= {s} ; torch.exp({a}, out={w}) ; {w}.exp_()
{w}.addcmul_({a}, {b}, value={s}) ; {w}.lerp_({b}, 0.3) ; {w}.pow_(2) ; F.elu({w}, inplace=True)
"""
VIEWS = """
{a}.view_as({a}) ; {a}[...] ; {a}.detach() ; {a}.transpose(0, -1) ; {a}.unsqueeze(0) ; {a}[..., ::2]
{a}[..., :1] ; {a}[:1] ; {a}.expand_as({b}) ; {a}.reshape(-1) ; {a}.squeeze() ; {a}.mT
{a}.contiguous(memory_format=torch.channels_last) ; {a}.flip(tuple(range({a}.dim()))) ; {a}.sum()
{a} if bool(({b} > 0).any()) else {a} * 2 ; {a}.amax(-1, keepdim=True) ; {a}.roll(1) ; {a}[..., 1:]
"""
READS = """
{a} = {a}.contiguous() ; {a} = {a}.clone() ; float({a}.float().sum()) ; del {a} ; {a}.tolist()
autofuse.materialize({a}) ; {a}.shape, {a}.stride(), {a}.dtype ; bool(({a} == {b}).all())
"""
POOLS = {
    name: [line for line in globals()[name].replace("\n", " ; ").split(" ; ") if line]
    for name in ("EXACT", "FLOATING", "WRITES", "FLOATING_WRITES", "VIEWS", "READS")
}
TABLES = {  # of tests/cases.py, on CUDA
    "FLOAT_CALLS": "{a}", "WIDE_CALLS": "{a}", "PAIR_CALLS": "{a}, {b}",
    "TRIPLE_CALLS": "{a}, {b}, {d}", "INT_CALLS": "{a}", "INT_PAIR_CALLS": "{a}, {b}",
    "INT_SHIFTS": "{a}, {b}", "INT_DIVISIONS": "{a}, {b}",
}  # fmt: skip
CALLS = [(table, name) for table in TABLES for name in getattr(cases, table)]
SHAPES = [(8, 12), (8, 12), (2, 8, 12), (7, 5), (6, 6), (2, 3, 4, 5), (3, 1, 5), (1, 9), (33,),
          (1030,), (2, 1, 2, 3, 2), (4, 4, 4), (), (0,), (3, 0, 2)]  # fmt: skip
LAYOUTS = "dense dense dense permuted channels gaps offset expanded odd overlap".split()
HEAD = f"""\
import torch
import torch.nn.functional as F

import autofuse
from autofuse import unwrap as plain
from cases import {", ".join(TABLES)}
from support import assert_same_as_eager, random_tensor


"""


# --- inputs -------------------------------------------------------------------------------------


def broadcastable(rng, shape):
    """A shape that broadcasts with `shape`."""
    if rng.random() < 0.6:
        return shape
    cut = rng.randint(0, len(shape)) if rng.random() < 0.5 else 0
    return tuple(1 if rng.random() < 0.25 else n for n in shape[cut:])


def layout(rng, shape):
    """(a shape to draw, what makes `shape` of that in an odd layout)."""
    rank = len(shape)
    kind = rng.choice(LAYOUTS)
    if kind == "permuted" and rank > 1:
        order = rng.sample(range(rank), rank)
        back = tuple(order.index(k) for k in range(rank))
        return tuple(shape[k] for k in order), f".permute({back})"
    if kind == "channels" and rank == 4:
        return shape, ".contiguous(memory_format=torch.channels_last)"
    if kind == "gaps" and rank:
        dim, step = rng.randrange(rank), rng.choice([2, 3])
        wide = tuple(n * step if k == dim else n for k, n in enumerate(shape))
        return wide, f"[{':, ' * dim}::{step}]"
    if kind == "offset" and rank:
        return (*shape[:-1], shape[-1] + 1), "[..., 1:]"
    if kind == "expanded" and rank:
        return tuple(rng.choice([1, n]) for n in shape), f".expand({shape})"
    if kind in ("odd", "overlap") and rank:
        strides, step = [], 1
        for n in reversed(shape):
            odd = rng.choice([0, 1, 5, 777]) if n == 1 else step
            strides.insert(0, odd if kind == "odd" else rng.choice([0, 1, 2, min(odd, 40)]))
            step *= max(n, 1)
        size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 1)
        return (size,), f".as_strided({shape}, {tuple(strides)})"
    return shape, ""


def separate(t):
    """Whether no two elements share memory, so that a write has one meaning."""
    reach = 1
    for stride, n in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach += (n - 1) * stride
    return True


def clash(t, other):
    """Whether a write to `t` meets a read of `other` in part."""
    place = (t.data_ptr(), t.shape, t.stride())
    shared = t.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return shared and place != (other.data_ptr(), other.shape, other.stride())


# --- programs -----------------------------------------------------------------------------------


class Program:
    """Lines of `run(i0, i1, ...)`, chosen while they are run in eager PyTorch."""

    def __init__(self, rng, device, autocast=False):
        self.rng, self.device = rng, device
        self.regions = []  # what the next line stands in, outermost first
        dtypes = [torch.float32, torch.float32, torch.float64, *INTS, torch.bool]
        if device == "cuda":
            dtypes += [torch.float32, torch.float16, torch.float16, torch.bfloat16, torch.bfloat16]
        shape, dtype = rng.choice(SHAPES), rng.choice(dtypes)
        self.drawn, self.lines, self.names = [], [], []
        self.space = {}
        exec(HEAD, self.space)
        for k in range(rng.choice([2, 3, 3, 4])):
            self.draw(f"i{k}", broadcastable(rng, shape), dtype, dtypes)
        self.inputs = len(self.names)
        length = rng.randint(2, 20)
        while len(self.lines) < length and not self.extend(f"v{len(self.lines)}"):
            if autocast:
                self.enter_or_leave()
        made = self.names[self.inputs :]
        self.kept = [n for n in made if rng.random() < 0.4] or self.names[-1:]

    def draw(self, name, shape, dtype, dtypes):
        rng = self.rng
        dtype = dtype if rng.random() < 0.7 else rng.choice(dtypes)
        # beside CUDA tensors a 0-d one of the CPU is a scalar
        device = "cpu" if shape == () and name != "i0" and rng.random() < 0.3 else self.device
        drawn, view = layout(rng, shape)
        text = f"random_tensor({drawn}, {dtype}, {device!r}, {rng.randrange(1 << 30)}"
        text += ", True)" if rng.random() < 0.5 else ")"
        inside = bool(view) and rng.random() < 0.5  # the view is made of a wrapped tensor
        self.drawn.append(text if inside else text + view)
        self.names.append(name)
        exec(f"{name} = {self.drawn[-1]}", self.space)
        if inside:
            self.lines.append(f"{name} = {name}{view}")
            exec(self.lines[-1], self.space)

    def extend(self, name):
        """Add a line, or none if the choice has no meaning; True ends the program."""
        rng, space = self.rng, self.space
        here = [n for n in self.names if space[n].device.type == self.device]
        a, b, d = rng.choice(here[-4:]), rng.choice(self.names), rng.choice(self.names)
        bools = [n for n in self.names if space[n].dtype is torch.bool]
        m = rng.choice(bools) if bools and rng.random() < 0.8 else f"({a} > {b})"
        template = self.template(space[a])
        writes = "{w}" in template
        w = rng.choice(here[-6:]) if writes else ""
        used = {n for key, n in (("{a}", a), ("{b}", b), ("{m}", m)) if key in template}
        if writes and not self.writable(space[w], [space[n] for n in used & {*self.names}]):
            return False
        if template == "del {a}" and (len(self.names) < 5 or a.startswith("i")):
            return False
        s = rng.choice(["2", "0.5", "-1.25", "3"])
        line = template.format(a=a, b=b, d=d, m=m, w=w, s=s)
        if writes or template in POOLS["READS"]:
            name = w or a
        else:
            line = f"{name} = {line}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with contextlib.ExitStack() as stack:
                    for region in self.regions:
                        stack.enter_context(eval(region))
                    exec(line, space)
            if name in space and space[name].numel() > 5000:
                return False
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError, Warning) as e:
            if isinstance(e, Warning) or rng.random() > 0.02:
                return False
            self.add(line)
            return True  # and it raises there
        self.add(line)
        if template == "del {a}":
            self.names.remove(a)
        elif name not in self.names:
            self.names.append(name)
        return False

    def add(self, line):
        self.lines.append("    " * len(self.regions) + line)

    def enter_or_leave(self):
        """Have the next line stand in one more autocast, or in one less."""
        pick = self.rng.random()
        if pick < 0.2 and len(self.regions) < 3:
            dtype = self.rng.choice(["torch.bfloat16", "torch.float16"])
            region = f"torch.autocast({self.device!r}, {dtype}, enabled={pick < 0.15})"
            self.add(f"with {region}:")
            self.regions.append(region)
            self.add("pass")
        elif pick > 0.85 and self.regions:
            self.regions.pop()

    def template(self, a):
        rng, cuda = self.rng, self.device == "cuda"
        pick = rng.random()
        if pick < 0.08:
            return rng.choice(POOLS["READS"])
        if pick < 0.16:
            return rng.choice(POOLS["VIEWS"])
        if pick < 0.26:
            return rng.choice(POOLS["WRITES"] + (POOLS["FLOATING_WRITES"] if cuda else []))
        if pick < 0.34:
            dtype = rng.choice([*(FLOATS if cuda else FLOATS[:2]), *INTS, torch.bool])
            if a.is_floating_point() and dtype in INTS:  # beyond the range C++ leaves it open
                return f"torch.where({{a}} == {{a}}, {{a}}, 0).clamp(0, 100).to({dtype})"
            return f"{{a}}.to({dtype})"
        if cuda and pick < 0.6:
            table, name = rng.choice(CALLS)
            if not (table.startswith("INT") and a.is_floating_point()):  # again casts beyond range
                return f"{table}[{name!r}]({TABLES[table]})"
        return rng.choice(POOLS["EXACT"] + (POOLS["FLOATING"] if cuda else []))

    def writable(self, w, operands):
        """Whether a write to `w` has one meaning in C++ for these operands."""
        try:
            fits = torch.broadcast_shapes(*(t.shape for t in operands)) == w.shape
        except RuntimeError:
            return False
        whole = any(t.is_floating_point() for t in operands) and not w.is_floating_point()
        return fits and not whole and separate(w) and not any(clash(w, t) for t in operands)

    @property
    def source(self):
        names = ", ".join(f"i{k}" for k in range(self.inputs))
        made = "".join(f"        {text},\n" for text in self.drawn)
        body = "".join(f"    {line}\n" for line in self.lines)
        return (
            f"{HEAD}def inputs():\n    return (\n{made}    )\n\n\n"
            f"def run({names}):\n{body}    return [{', '.join(self.kept)}]\n\n\n"
            "assert_same_as_eager(run, *inputs())\n"
        )


SHARDS = range(-(-COUNT // SHARD))


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_random_programs(autocast, device, shard):
    rng = random.Random(f"{SEED} {device} {shard}{' autocast' if autocast else ''}")
    count = min(SHARD, COUNT - shard * SHARD)
    failures = []
    for number in range(count):
        source = Program(rng, device, autocast).source
        try:
            exec(source, {})
        except Exception as error:
            about = f"# seed {SEED}, shard {shard}, program {number}: {type(error).__name__}"
            failures.append(f"{about}: {error}\n{source}")
    assert not failures, f"{len(failures)} of {count} programs:\n\n" + "\n\n".join(failures[:4])
    assert autofuse.stats().ops_recorded > 5 * count
