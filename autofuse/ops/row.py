"""What a row of the op table is, and the tables that rows and spellings go into.

An `Op` is a scalar function; its expression is Python over carried values (float16 and bfloat16
are computed in float32 and rounded once, at the end, unless the expression says `rnd`); `name =
value;` in front of it names a part. A spelling is a torch function: it takes torch's own arguments
and names the Op and its operands; it returns an argument where torch hands that back, and None
where only eager PyTorch knows what to do. A composite is a torch function that PyTorch itself
makes of other pointwise functions; it returns its result, or None as a spelling does.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from ..dtypes import CODES, EXACT, kind, result_type
from ..layout import Ints

Operand = object  # a tensor or a Python scalar
Chosen = tuple["Op", tuple[Operand, ...]] | torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One row: a scalar function and its dtype rule.

    params: the operands' names, in order. A suffix takes an operand out of type promotion:
        `c:bool` must be a bool tensor, `s:opmath` is a scalar in the compute type, `v:common` is a
        scalar converted to the dtype of the others, `i:inverse` one of which a kernel on CUDA is
        given the reciprocal, taken in float64; `x:place` one that is not read, but its place;
        `w:channel` a tensor in memory of one number for each channel, dimension 1 of the first
        operand, which is read in the compute type.
    result: "common" (the promoted dtype), "float" (the same, integers first become the default
        float dtype), "bool", or the dtype itself (a cast).
    accepts: categories the promoted dtype may have: f(loat), i(nteger), b(ool), or w for the wide
        floats, float32 and float64, alone. Others are eager.
    scalar: whether a promoting Python scalar is first rounded to the "common" dtype or stays in
        the "opmath" type: on CUDA; `cpu_scalar` is the same for the CPU, for the last operand.
    by_scalar: the Op that stands in when the last operand is a scalar.
    integer, boolean: the expressions for integers and for bool, where they are others; integer `/`
        and `%` truncate as in C, and on the CPU, where they raise, the op is eager.
    narrow: the expression for float16 and bfloat16, where PyTorch's kernel rounds on the way.
    f16, bf16: short expressions for one of the two on CUDA, which give the same bits for all that
        16-bit operands can be, though not for a scalar, which is more; see `kernel.text.PROVEN`.
    double: the expression for float64, where PyTorch has another.
    cpu: the expression on the CPU, where PyTorch has another; or for which type codes.
    grad: the derivative rules, one per operand, separated by `;`, with PyTorch's own formulas
        (tools/autograd/derivatives.yaml): over `g` (the gradient of the result), the operands,
        `out` (the result) and calls of other rows, each of which rounds as that torch function
        does; `none` where an operand has no gradient, `zeros(g, y)` for one that is zero and for
        which eager saves y, `cast(x, out)` for x in the dtype of `out`. A row without rules is
        eager under grad.
    keeps: operands and `out` that eager's node saves even where no rule reads them; a Python
        number among them is saved as a tensor.
    move: of one that gives elements of its operand in other places: how, see `ops.moves`.
    back: of one that moves elements: what moves those of its gradient back; `grad` says no more
        than that there is one.
    eager: the torch function of the same operands, for chains that run without their kernel.
    costs: how many eager ops it counts for where the host's time is weighed.
    """

    name: str
    params: str
    expr: str
    result: str | torch.dtype = "common"
    accepts: str = "f"
    scalar: str = "common"
    cpu_scalar: str = "common"
    grad: str = ""
    keeps: str = ""
    integer: str = ""
    boolean: str = ""
    narrow: str = ""
    f16: str = ""
    bf16: str = ""
    double: str = ""
    cpu: str | Mapping[str, str] = ""
    takes_bool: bool = True  # as an operand, even where another one decides the dtype
    tensors_only: bool = False  # no Python scalar among the operands
    one_device: bool = False  # beside tensors on CUDA torch takes no 0-d one that is on the CPU
    one_dtype: bool = False  # of all operands
    identical: bool = True  # to eager on CUDA, bit for bit; otherwise fused by `relaxed` alone
    reversed: bool = False  # the result's layout follows the operands from the last to the first
    contiguous: str = ""  # device types on which the result is; else TensorIterator decides
    copies: str = ""  # categories in which a dense first operand's layout carries over
    # (shape, stride of the operand) -> the result's, where eager takes several steps
    strides: Callable[[Ints, Ints], Ints] | None = None
    by_scalar: Op | None = None
    move: Any = None
    back: Op | None = None
    eager: Callable[..., torch.Tensor] | None = None  # over the operands; torch.<name> if not given
    costs: int = 1
    names: tuple[str, ...] = field(init=False)
    roles: tuple[str, ...] = field(init=False)
    rules: tuple[ast.expr | None, ...] = field(init=False)  # of `grad`, parsed

    def __post_init__(self) -> None:
        split = [param.partition(":") for param in self.params.split()]
        object.__setattr__(self, "names", tuple(name for name, _, _ in split))
        object.__setattr__(self, "roles", tuple(role or "promote" for _, _, role in split))

        if self.eager is None:
            own = getattr(torch, self.name, None) or getattr(torch.special, self.name, None)
            object.__setattr__(self, "eager", own)
        object.__setattr__(self, "rules", tuple(map(_rule, self.grad.split(";"))))
        assert not self.grad or len(self.rules) == len(self.names), self.name

    def __repr__(self) -> str:
        return f"Op({self.name})"

    @property
    def fits(self) -> bool:
        """Whether torch converts its scalars with a check for overflow."""
        roles = self.roles
        named = self.name.startswith(("clamp", "hardtanh", "where", "pow"))
        return named or "opmath" in roles or "common" in roles

    @property
    def by_channel(self) -> bool:
        """Whether it has operands of one number for each channel."""
        return "channel" in self.roles

    @property
    def selects(self) -> bool:
        """Whether torch converts the operands before its kernel, which takes one dtype."""
        return self.name.startswith("where")

    @property
    def scalars_apart(self) -> bool:
        """Whether torch's kernel takes Python scalars beside its operands, not as 0-d ones."""
        return self.name.startswith(("clamp", "hardtanh", "pow"))

    def expression(self, common: str, device: str, short: bool = False) -> str:
        """The expression for operands of type code `common` on a device type.

        short: whether it may be one of `f16` and `bf16`.
        """
        if common == "b1":
            return self.boolean or self.integer or self.expr
        if common not in ("f64", "f32", "f16", "bf16"):
            return self.integer or self.expr
        if device == "cpu":
            own = self.cpu if isinstance(self.cpu, str) else self.cpu.get(common)
            if own:
                return own
        if common in ("f16", "bf16"):
            own = self.f16 if common == "f16" else self.bf16
            return (own if short else "") or self.narrow or self.expr
        return self.double or self.expr if common == "f64" else self.expr

    def divides(self, common: str) -> bool:
        """Whether integer operands of type `common` are divided."""
        integer = common not in ("f64", "f32", "f16", "bf16", "b1")
        return integer and any(sign in self.integer for sign in "/%")

    def carries(self, common: torch.dtype) -> bool:
        """Whether a dense first operand's strides carry over, as in `clone` and `empty_like`."""
        return isinstance(self.result, torch.dtype) or kind(common) in self.copies

    def resolve(
        self, operands: tuple[tuple[torch.dtype | type, int], ...]
    ) -> tuple[torch.dtype, torch.dtype] | None:
        """(dtype the operands are converted to, dtype of the result), or None for "eager".

        operands: (dtype, ndim) per operand, a Python scalar as (its class, 0).
        """
        return self._resolve(operands, torch.get_default_dtype())

    @cache  # noqa: B019 - bounded by rows, dtypes and ranks
    def _resolve(
        self, operands: tuple[tuple[torch.dtype | type, int], ...], default: torch.dtype
    ) -> tuple[torch.dtype, torch.dtype] | None:
        promoting = []
        if self.tensors_only and any(isinstance(dtype, type) for dtype, _ in operands):
            return None
        dtypes = {dtype for dtype, _ in operands if not isinstance(dtype, type)}
        if self.one_dtype and len(dtypes) > 1:
            return None
        if not self.takes_bool and any(dtype in (torch.bool, bool) for dtype, _ in operands):
            return None
        for (dtype, ndim), role in zip(operands, self.roles, strict=True):
            scalar = isinstance(dtype, type)
            if role == "bool":
                if dtype is not torch.bool:
                    return None
            elif role in ("promote", "place"):
                promoting.append((dtype, ndim))
            elif scalar is (role == "channel"):
                return None
        common = result_type(tuple(promoting))
        if self.result == "float" and not common.is_floating_point:
            common = default if kind(common) in self.accepts else torch.bool
        category = kind(common)
        wide = "w" in self.accepts and common in (torch.float32, torch.float64)
        if not (category in self.accepts or wide) or common not in CODES:
            return None
        for (dtype, _), role in zip(operands, self.roles, strict=True):
            if role in ("opmath", "common") and category != "f" and dtype is float:
                return None
        if isinstance(self.result, torch.dtype):
            return common, self.result
        return common, torch.bool if self.result == "bool" else common


def _rule(text: str) -> ast.expr | None:
    text = text.strip()
    return None if text in ("", "none") else ast.parse(text, mode="eval").body


class Several(NamedTuple):
    """What a chooser names where torch gives several results: of what class, and what each is."""

    kind: Callable[[list[Any]], Any]
    chosen: tuple[tuple[Op, tuple[Operand, ...]], ...]


OPS: dict[str, Op] = {}
SPELLINGS: dict[str, Callable[..., Chosen]] = {}  # torch name -> chooser, beyond the plain rows
PLAIN: dict[str, Op] = {}  # torch name -> Op of one or two operands with no options
METHODS: dict[str, Callable[..., Chosen]] = {}  # where the method has another order of arguments
COMPOSITES: dict[str, Callable[..., object]] = {}  # torch name -> the same by torch functions
RETURNING: set[Callable[..., object]] = set()  # of these, those that return their argument or None
# of these, what a pending value alone is recorded as where they give None
PENDING: dict[Callable[..., object], Op] = {}
FUNCTIONAL: set[str] = set()  # those of torch.nn.functional alone: C's have other arguments
MAKING: set[Callable[..., object]] = set()  # choosers that make tensors on the way


def row(name: str, params: str, expr: str, **columns: object) -> Op:
    """Add an Op to the table."""
    made = OPS[name] = Op(name, params, expr, **columns)  # type: ignore[arg-type]
    return made


def plain(name: str, params: str, expr: str, *aliases: str, **columns: object) -> Op:
    """Add an Op that torch has under its own name and `aliases`, with no options."""
    made = row(name, params, expr, **columns)
    for spelling in (name, *aliases):
        PLAIN[spelling] = made
    return made


def registrar(table: dict[str, Any]) -> Callable[..., Callable[[Any], Any]]:
    """A decorator that enters a function under the names given, or under its own."""

    def named(*names: str) -> Callable[[Any], Any]:
        def register(function: Any) -> Any:
            for name in names or (function.__name__,):
                table[name] = function
            return function

        return register

    return named


spelled = registrar(SPELLINGS)  # a chooser
composite = registrar(COMPOSITES)  # what stands for functions that PyTorch composes


def returning(function: Any) -> Any:
    """A decorator of a composite that does nothing but return its argument, or None."""
    RETURNING.add(function)
    return function


def making(function: Any) -> Any:
    """A decorator of a chooser that makes tensors on the way, which may be recorded."""
    MAKING.add(function)
    return function


def since(*version: int) -> bool:
    """Whether torch is of this version or newer: its kernels differ."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= version


def is_number(value: Operand) -> bool:
    """Whether a chooser has been given a Python float, or an int that is one as well."""
    return type(value) is float or (type(value) is int and -EXACT <= value <= EXACT)


def single(value: float) -> float:
    """`value` rounded to float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def is_nan(value: Operand) -> bool:
    """Whether a chooser has been given the Python number NaN."""
    return type(value) is float and value != value
