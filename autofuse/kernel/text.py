"""Text: from a Plan to the text of its element function.

Pure. The text is a small subset of Python, one statement per op, and it is what gets compiled:

    def af_mul_tanh(x0: f32, x1: f32):  # 4 lanes, 32-bit index
        v0: f32 = x0 * x1  # mul
        v1: f32 = tanh(v0)  # tanh
        return v1

An annotated statement is one op: its value is rounded to the annotated type and never contracts
with another op. In a relaxed kernel ops on floats have no annotation, and what is stored is
rounded. A call such as `bf16(x0)` converts. Any emitter that reads this text will do.
"""

from __future__ import annotations

import ast
from functools import cache

from ..dtypes import CODES
from ..ops.row import Op
from ..program.program import CONST
from .plan import Line, Plan
from .source import Source, carried, walk

# where the short expressions of 16-bit ops gave eager's bits for all operands: NVIDIA bounds the
# errors of the approximate instructions that they are made of, but specifies no bits. To prove
# another target: bench/exhaustive.py --short
PROVEN = frozenset({"sm_90"})


def source_of(plan: Plan, target: str = "") -> Source:
    """What the compiler gets to see of `plan`.

    target: what it is compiled for, as `sm_90`; what is made without one is right for all.
    """
    return Source(
        name=plan.name,
        text=render(plan, target),
        device=plan.device,
        loads=plan.loads,
        stores=tuple(operand for _, operand in plan.stores),
        consts=tuple(const_code(plan, k) for k in range(len(plan.consts))),
        rank=plan.rank,
        lanes=plan.lanes,
        wide=plan.wide,
        relaxed=plan.relaxed,
        spaced=plan.spaced,
    )


def render(plan: Plan, target: str = "") -> str:
    """The kernel's source text; the same for equal Plans and targets."""
    params = [f"x{k}: {load.code}" for k, load in enumerate(plan.loads)]
    params += [f"c{k}: {const_code(plan, k)}" for k in range(len(plan.consts))]
    width = "64" if plan.wide else "32"
    text = [
        f"def {plan.name}({', '.join(params)}):"
        f"  # {plan.device}, {plan.lanes} {'spaced ' * plan.spaced}lanes, {width}-bit index"
    ]
    text += [f"    # x{k} {walk(load.axes)}" for k, load in enumerate(plan.loads) if plan.rank > 1]
    for index, line in enumerate(plan.lines):
        text += _statements(plan, index, line, target)
    results = []
    for line, operand in plan.stores:
        if line < 0:  # what was read, which is what a row kernel reduces then
            results.append(f"x{~line}")
            continue
        free = _code(plan, line) != operand.code
        results.append(f"r{line}" if free else f"v{line}")
        if free:
            text.append(f"    r{line}: {operand.code} = v{line}")
    text.append("    return " + ", ".join(results))
    return "\n".join(text) + "\n"


def const_code(plan: Plan, const: int) -> str:
    """Type of a Const parameter: the compute type of the op that reads it."""
    for line in plan.lines:
        if CONST + const in line.refs:
            code = carried(line.common)
            return code if code in ("f32", "f64") else "i64"
    raise AssertionError("every Const of a Plan is read")


def _code(plan: Plan, line: int) -> str:
    """Type of a line's value: in a relaxed kernel no op on floats rounds, but a cast does."""
    op, result = plan.lines[line].op, plan.lines[line].result
    return carried(result) if plan.relaxed and isinstance(op.result, str) else result


def _statements(plan: Plan, index: int, line: Line, target: str) -> list[str]:
    op = line.op
    own = carried(line.common)
    common = own if plan.relaxed else line.common
    names: dict[str, str] = {}
    text = []
    for name, role, ref in zip(op.names, op.roles, line.refs, strict=True):
        if ref >= CONST:
            value, code = f"c{ref - CONST}", const_code(plan, ref - CONST)
            exact = op.scalar
            if plan.device == "cpu":
                exact = op.cpu_scalar if name == op.names[-1] else "common"
            keep = role in ("opmath", "inverse") or (role == "promote" and exact == "opmath")
            wanted = own if keep else common
        else:
            value = f"v{ref}" if ref >= 0 else f"x{~ref}"
            code = _code(plan, ref) if ref >= 0 else plan.loads[~ref].code
            wanted = code if role in ("bool", "place") else own if role == "channel" else common
        if code != wanted:
            text.append(f"    v{index}_{name} = {wanted}({value})")
            value = f"v{index}_{name}"
        names[name] = value
    short = target in PROVEN and all(ref < CONST for ref in line.refs)
    *parts, result = parse(op.expression(common, plan.device, short))
    for part in parts:
        assert isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name)
        name = part.targets[0].id
        value = _substituted(part.value, names, common)
        names[name] = f"v{index}_{name}"
        text.append(f"    {names[name]} = {value}")
    assert isinstance(result, ast.Expr)
    value = _substituted(result.value, names, common)
    code = _code(plan, index)
    free = code in ("f32", "f64") and plan.relaxed and isinstance(op.result, str)
    kind = "" if free and _has_name(result.value) else f": {code}"
    text.append(f"    v{index}{kind} = {value}  # {op.name}")
    return text


@cache
def parse(source: str) -> tuple[ast.stmt, ...]:
    """The statements of an op's expression; the last is its value."""
    return tuple(ast.parse(source.replace(";", "\n").replace("\n ", "\n")).body)


_ARITHMETIC = {"abs", "floor", "ceil", "trunc", "round", "copysign", "fmax", "fmin", "clip", "own",
               "rnd", *CODES.values()}  # fmt: skip


def calls_functions(op: Op, common: str) -> bool:
    """Whether the CPU kernel of `op` needs more than arithmetic and what is exact."""
    return bool(functions_of(op, common))


@cache
def functions_of(op: Op, common: str) -> frozenset[str]:
    """What the CPU kernel of `op` needs besides arithmetic and what is exact."""
    trees = [tree for part in parse(op.expression(common, "cpu")) for tree in ast.walk(part)]
    called = {
        tree.func.id
        for tree in trees
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)
    }
    return frozenset(called - _ARITHMETIC)


class _Substitute(ast.NodeTransformer):
    def __init__(self, names: dict[str, str], common: str) -> None:
        self.names, self.common = names, common

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """A choice of two literals has the type that the op computes in."""
        self.generic_visit(node)
        if not any(_has_name(arm) for arm in (node.body, node.orelse)):
            node.body = _converted(carried(self.common), node.body)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        assert isinstance(node.func, ast.Name)
        args = [self.visit(arg) for arg in node.args]
        if node.func.id == "own":
            return _converted(carried(self.common), *args)
        if node.func.id == "rnd":  # rounds to the op's dtype where that is narrower
            return (
                args[0] if carried(self.common) == self.common else _converted(self.common, *args)
            )
        return ast.Call(node.func, args, [])


def _converted(code: str, tree: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(code, ast.Load()), [tree], [])


def _has_name(tree: ast.expr) -> bool:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return bool(names - {"inf", "nan"})


def _substituted(tree: ast.expr, names: dict[str, str], common: str) -> str:
    copy = ast.parse(ast.unparse(tree), mode="eval").body
    return ast.unparse(_Substitute(names, common).visit(copy))
