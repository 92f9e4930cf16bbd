"""Rows of the op table: special functions.

Where CUDA has a device function, that is PyTorch's too. The others are rational and Chebyshev
approximations of the Cephes Mathematical Library (S. L. Moshier: ndtri.c, i0.c, i1.c, psi.c), in
the order in which PyTorch evaluates them.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from .row import METHODS, OPS, composite, plain, row, spelled

# fmt: off

_FLOAT = {"result": "float", "accepts": "fib"}
_WIDE = {"result": "float", "accepts": "wib"}


def _series(function: str, variable: str, coefficients: tuple[float, ...]) -> str:
    return f"{function}({variable}, {', '.join(map(repr, coefficients))})"


# --- gamma functions ------------------------------------------------------------------------------

plain("lgamma", "x", "lgamma(x)", "gammaln", **_FLOAT, grad="g * digamma(x)")
_PSI = (0.08333333333333333, -0.021092796092796094, 0.007575757575757576, -0.004166666666666667,
        0.003968253968253968, -0.008333333333333333, 0.08333333333333333)
plain(
    "digamma",
    "x",
    "r = f64(x) - trunc(f64(x));"
    "a = own(-3.14159265358979323846 / tan(3.14159265358979323846 * r)) if x < 0 else 0;"
    "z = 1 - x if x < 0 else x;"
    + "a = a - 1 / z if z < 10 else a; z = z + 1 if z < 10 else z;"
    * 10
    + "q = 1 / (z * z);"
    f"y = q * {_series('horner', 'q', _PSI)} if z < 1.0e17 else 0;"
    "v = a + 2.25175258906672110764 if z == 10 else log(z) - 0.5 / z - y + a;"
    "copysign(inf, -x) if x == 0 else nan if x < 0 and x == trunc(x) else v",
    "psi",
    **_FLOAT,
    grad="g * trigamma(x)",
)
row(
    "trigamma",
    "x",
    "h = sin(3.14159265358979323846 * x);"
    "a = 0 - 3.14159265358979323846 * 3.14159265358979323846 / (h * h) if x < 0.5 else 0;"
    "z = 1 - x if x < 0.5 else x;" + "a = a + 1 / (z * z); z = z + 1;" * 6 + "i = 1 / (z * z);"
    "a = a + fma(i, fma(-i, fma(-i, 1 / 42, 1 / 30), 1 / 6), 1 + 1 / (2 * z)) / z;"
    "-a if x < 0.5 else a",
    **_FLOAT,
    eager=partial(torch.polygamma, 1),
)


@spelled()
def polygamma(n, input):
    rows = {0: OPS["digamma"], 1: OPS["trigamma"]}  # others sum a series until it converges
    return (rows[n], (input,)) if n in rows and type(n) is int else None


METHODS["polygamma"] = lambda input, n: polygamma(n, input)


# --- error function and normal distribution -------------------------------------------------------

plain(
    "erfinv",
    "x",
    "erfinv(x)",
    cpu="a = abs(x); z = x * x;"
    "c = x * (((-0.140543331 * z + 0.914624893) * z - 1.645349621) * z + 0.886226899)"
    "  / ((((0.012229801 * z - 0.329097515) * z + 1.442710462) * z - 2.118377725) * z + 1);"
    "u = sqrt(-log((1 - a) / 2));"
    "t = copysign(((1.641345311 * u + 3.429567803) * u - 1.624906493) * u - 1.970840454, x)"
    "  / ((1.637067800 * u + 3.543889200) * u + 1);"
    "v = abs(c if a <= 0.7 else t);"  # then Halley's steps, next to 1 by what is left to it
    "d = (erf(v) - a if a <= 0.7 else (1 - a) - erfc(v)) / (1.1283791670955126 * exp(-v * v));"
    "v = v - d / (1 + v * d);"
    "d = (erf(v) - a if a <= 0.7 else (1 - a) - erfc(v)) / (1.1283791670955126 * exp(-v * v));"
    "v = v - d / (1 + v * d);"
    "nan if a > 1 else copysign(inf, x) if a == 1 else copysign(v, x)",
    **_FLOAT,
    grad=f"{0.5 * math.sqrt(math.pi)!r} * exp(pow_2(erfinv(x))) * g",
)
_P0 = (
    -59.96335010141079, 98.00107541859997, -56.67628574690703, 13.931260938727968,
    -1.2391658386738125,
)
_Q0 = (
    1.0, 1.9544885833814176, 4.676279128988815, 86.36024213908905, -225.46268785411937,
    200.26021238006066, -82.03722561683334, 15.90562251262117, -1.1833162112133,
)
_P1 = (
    4.0554489230596245, 31.525109459989388, 57.16281922464213, 44.08050738932008,
    14.684956192885803, 2.1866330685079025, -0.1402560791713545, -0.03504246268278482,
    -0.0008574567851546854,
)
_Q1 = (
    1.0, 15.779988325646675, 45.39076351288792, 41.3172038254672, 15.04253856929075,
    2.504649462083094, -0.14218292285478779, -0.03808064076915783, -0.0009332594808954574,
)
_P2 = (
    3.2377489177694603, 6.915228890689842, 3.9388102529247444, 1.3330346081580755,
    0.20148538954917908, 0.012371663481782003, 0.00030158155350823543, 2.6580697468673755e-06,
    6.239745391849833e-09,
)
_Q2 = (
    1.0, 6.02427039364742, 3.6798356385616087, 1.3770209948908132, 0.21623699359449663,
    0.013420400608854318, 0.00032801446468212774, 2.8924786474538068e-06, 6.790194080099813e-09,
)
plain(
    "ndtri",
    "x",
    "c = x > 1 - 0.13533528323661269189; y = 1 - x if c else x;"
    "m = y - 0.5; q = m * m;"
    f"u = m + m * (q * {_series('horner', 'q', _P0)} / {_series('horner', 'q', _Q0)});"
    "s = sqrt(-2 * log(y)); z = 1 / s;"
    f"n = z * {_series('horner', 'z', _P1)} / {_series('horner', 'z', _Q1)};"
    f"f = z * {_series('horner', 'z', _P2)} / {_series('horner', 'z', _Q2)};"
    "v = s - log(s) / s - (n if s < 8 else f); v = v if c else -v;"
    "w = u * 2.50662827463100050242 if y > 0.13533528323661269189 else v;"
    "-inf if x == 0 else inf if x == 1 else nan if x < 0 or x > 1 else w",
    **_WIDE,
)


@composite()
def ndtr(input):
    return (1 + torch.erf(input * math.sqrt(0.5))) * 0.5


# --- logarithms -----------------------------------------------------------------------------------

def _logarithm(tensors, scalar, input, other):
    both = isinstance(input, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors if both else scalar, (input, other)


for _name, _log, _grad in (
    ("xlogy", "log", "masked_fill(xlogy(g, y), logical_and(x == 0.0, y <= 0.0), 0); g * x / y"),
    ("xlog1py", "log1p",
     "masked_fill(xlog1py(g, y), logical_and(x == 0.0, y <= -1.0), 0); g * x / (y + 1)"),
):
    _xlogy = partial(row, params="x y", expr=f"nan if y != y else 0 if x == 0 else x * {_log}(y)",
                     eager=getattr(torch.special, _name), **_FLOAT)
    spelled(_name)(partial(_logarithm, _xlogy(_name, grad=_grad), _xlogy(f"{_name}_scalar")))
plain("entr", "x", "x if x != x else -x * log(x) if x > 0 else 0 if x == 0 else -inf", **_FLOAT,
      grad="g * -(1 + log(x))")


def _logit_backward(g, x, e=None):
    if not torch.is_grad_enabled():
        return torch.ops.aten.logit_backward(g, x, e)
    low, high, outside = (0.0, 1.0, math.nan) if e is None else (e, 1.0 - e, 0.0)  # differentiable
    inside = torch.logical_and(torch.ge(x, low), torch.le(x, high))
    return torch.where(inside, torch.div(g, torch.mul(x, torch.rsub(x, 1.0))), outside)


row("logit", "x", "log(x / (1 - x))", **_FLOAT, grad="logit_backward(g, x)")
row("logit_clamped", "x e:opmath",
    "h = 1 - e; z = e if x < e else h if x > h else x; log(z / (1 - z))", **_FLOAT,
    eager=torch.logit, grad="logit_clamped_backward(g, x, e); none")
row("logit_backward", "g x", "nan if x < 0 or x > 1 else g / (x * (1 - x))", eager=_logit_backward)
row("logit_clamped_backward", "g x e:opmath",
    "h = 1 - e; 0 if x < e or x > h else g / (x * (1 - x))", eager=_logit_backward)


@spelled()
def logit(input, eps=None):
    if eps is None:
        return OPS["logit"], (input,)
    if not (eps.__class__ is float or eps.__class__ is int) or eps < 0:
        return None
    return OPS["logit_clamped"], (input, float(eps))


# --- trigonometry and Bessel functions ------------------------------------------------------------

plain(
    "sinc",
    "x",
    "p = 3.14159265358979323846 * x; 1 if x == 0 else sin(p) / p",
    **_FLOAT,
    grad="where(x * x * 3.141592653589793 == 0.0, 0, g * ((x * 3.141592653589793"
    " * cos(x * 3.141592653589793) - sin(x * 3.141592653589793)) / (x * x * 3.141592653589793)))",
)
_I0_SMALL = (
    -4.4153416464793395e-18, 3.3307945188222384e-17, -2.431279846547955e-16,
    1.715391285555133e-15, -1.1685332877993451e-14, 7.676185498604936e-14,
    -4.856446783111929e-13, 2.95505266312964e-12, -1.726826291441556e-11, 9.675809035373237e-11,
    -5.189795601635263e-10, 2.6598237246823866e-09, -1.300025009986248e-08,
    6.046995022541919e-08, -2.670793853940612e-07, 1.1173875391201037e-06,
    -4.4167383584587505e-06, 1.6448448070728896e-05, -5.754195010082104e-05,
    0.00018850288509584165, -0.0005763755745385824, 0.0016394756169413357,
    -0.004324309995050576, 0.010546460394594998, -0.02373741480589947, 0.04930528423967071,
    -0.09490109704804764, 0.17162090152220877, -0.3046826723431984, 0.6767952744094761,
)
_I0_LARGE = (
    -7.233180487874754e-18, -4.830504485944182e-18, 4.46562142029676e-17, 3.461222867697461e-17,
    -2.8276239805165836e-16, -3.425485619677219e-16, 1.7725601330565263e-15,
    3.8116806693526224e-15, -9.554846698828307e-15, -4.150569347287222e-14,
    1.54008621752141e-14, 3.8527783827421426e-13, 7.180124451383666e-13,
    -1.7941785315068062e-12, -1.3215811840447713e-11, -3.1499165279632416e-11,
    1.1889147107846439e-11, 4.94060238822497e-10, 3.3962320257083865e-09, 2.266668990498178e-08,
    2.0489185894690638e-07, 2.8913705208347567e-06, 6.889758346916825e-05,
    0.0033691164782556943, 0.8044904110141088,
)
_I1_SMALL = (
    2.7779141127610464e-18, -2.111421214358166e-17, 1.5536319577362005e-16,
    -1.1055969477353862e-15, 7.600684294735408e-15, -5.042185504727912e-14,
    3.223793365945575e-13, -1.9839743977649436e-12, 1.1736186298890901e-11,
    -6.663489723502027e-11, 3.625590281552117e-10, -1.8872497517228294e-09,
    9.381537386495773e-09, -4.445059128796328e-08, 2.0032947535521353e-07,
    -8.568720264695455e-07, 3.4702513081376785e-06, -1.3273163656039436e-05,
    4.781565107550054e-05, -0.00016176081582589674, 0.0005122859561685758,
    -0.0015135724506312532, 0.004156422944312888, -0.010564084894626197, 0.024726449030626516,
    -0.05294598120809499, 0.1026436586898471, -0.17641651835783406, 0.25258718644363365,
)
_I1_LARGE = (
    7.517296310842105e-18, 4.414348323071708e-18, -4.6503053684893586e-17,
    -3.209525921993424e-17, 2.96262899764595e-16, 3.3082023109209285e-16,
    -1.8803547755107825e-15, -3.8144030724370075e-15, 1.0420276984128802e-14,
    4.272440016711951e-14, -2.1015418427726643e-14, -4.0835511110921974e-13,
    -7.198551776245908e-13, 2.0356285441470896e-12, 1.4125807436613782e-11,
    3.2526035830154884e-11, -1.8974958123505413e-11, -5.589743462196584e-10,
    -3.835380385964237e-09, -2.6314688468895196e-08, -2.512236237870209e-07,
    -3.882564808877691e-06, -0.00011058893876262371, -0.009761097491361469, 0.7785762350182801,
)


def _bessel(scale: str, odd: bool, small: tuple[float, ...], large: tuple[float, ...]) -> str:
    """A modified Bessel function of order 0, or 1 if `odd`, times `scale` of |x|."""
    near = _series("chebyshev", "y / 2 - 2", small)
    far = _series("chebyshev", "32 / y - 2", large)
    if scale:
        near = f"{scale} * y * {near}" if odd else f"{scale} * {near}"
        far = f"{scale} * {far}"
    elif odd:
        near = f"{near} * y"
    text = f"y = abs(x); n = {near}; f = {far} / sqrt(y);"
    if odd:
        return text + "v = n if y <= 8 else f; -v if x < 0 else v"
    return text + "n if y <= 8 else f"


for _name in ("j0", "j1", "y0", "y1"):  # PyTorch has approximations of its own
    plain(f"bessel_{_name}", "x", f"{_name}(x)", identical=False, **_WIDE)
plain("i0", "x", _bessel("exp(y)", False, _I0_SMALL, _I0_LARGE), **_FLOAT)
plain("i0e", "x", _bessel("", False, _I0_SMALL, _I0_LARGE), **_FLOAT)
plain("i1", "x", _bessel("exp(y)", True, _I1_SMALL, _I1_LARGE), **_WIDE)
plain("i1e", "x", _bessel("", True, _I1_SMALL[-17:], _I1_LARGE[-7:]),
      double=_bessel("", True, _I1_SMALL, _I1_LARGE), **_WIDE)
