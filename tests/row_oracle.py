"""The orders of torch's CUDA reductions over a row, in numpy: what row kernels are compared with.

Each function takes the row as float32, already rounded to its dtype, and stays in float32. Written
from the kernels' text, one thread after another, and apart from what emits ours.
"""

import math

import numpy as np
from simt import F32, exp, exp_parts, fma, fmax, log

ZERO = F32(0)


def _combined(op):
    if op in ("sum", "mean", "vector_norm"):
        return lambda a, b: F32(a + b)
    if op == "amax":
        return lambda a, b: a if a != a or a > b else b
    return lambda a, b: a if a != a or a < b else b


def _moments(state, x):
    """WelfordOps: mean, sum of squares about it and count, with one element more."""
    mean, second, count = state
    count = F32(count + 1)
    d = F32(x - mean)
    mean = F32(mean + F32(d / count))
    return mean, fma(d, F32(x - mean), second), count


def _moments_of_both(a, b):
    if a[2] == 0:
        return b
    if b[2] == 0:
        return a
    d, count = F32(b[0] - a[0]), F32(a[2] + b[2])
    ratio = F32(b[2] / count)
    second = fma(F32(F32(d * d) * a[2]), ratio, F32(a[1] + b[1]))
    return fma(d, ratio, a[0]), second, count


def _fold(values, first, combine):
    """Lane 0 of what shuffles down by first, ..., 2, 1 give; a state is a tuple."""
    values = list(values)
    while first:
        values = [
            combine(v, values[k + first]) if k + first < len(values) else v
            for k, v in enumerate(values)
        ]
        first //= 2
    return values[0]


def reduced(op, row, start, rows, across, vec, correction=1, blocks=1):
    """What the reduce kernel makes of a row that begins at element `start` of aligned memory.

    rows: how many there are; across: threads x and y of a row; vec: elements of a vector, or 1.
    correction: of a variance. blocks: that share a row.
    """
    combine, n, threads = _combined(op), len(row), math.prod(across)
    nothing = (
        (ZERO,) * 3 if op in ("var", "std") else F32({"amax": -np.inf, "amin": np.inf}.get(op, 0))
    )
    combine = _moments_of_both if op in ("var", "std") else combine
    left = []
    for first in range(0, blocks * threads, threads):
        found = [
            _of_thread(op, row, start, t, first, blocks * threads, vec, nothing, combine)
            for t in range(threads)
        ]
        left.append(_along_y(_along_x(found, across, combine), combine))
    (total, *_) = left
    if blocks > 1:
        found = [nothing] * threads
        for k, value in enumerate(left):
            found[k % threads] = combine(found[k % threads], value)
        width = across[0]
        columns = [_along_y(found[x::width], combine) for x in range(width)]
        (total,) = _along_x(columns, (width, 1), combine)
    if op in ("var", "std"):
        _, second, count = total
        total = F32(second / F32(count - F32(correction))) if count > correction else F32(np.nan)
    if op == "mean":
        total = F32(total * F32(F32(rows) / F32(rows * n)))
    return F32(np.sqrt(total)) if op in ("vector_norm", "std") else total


def _of_thread(op, row, start, t, first, step, vec, nothing, combine):
    """Of the elements of thread t, of groups t + first, one `step` further, and so on."""
    n, n_slots = len(row), 4
    take = (lambda a, x: fma(x, x, a)) if op == "vector_norm" else combine
    if op in ("var", "std"):
        take, n_slots = _moments, 2
    if vec == 1:
        slots = [nothing] * n_slots
        for k, at in enumerate(range(t + first, n, step)):
            slots[k % n_slots] = take(slots[k % n_slots], row[at])
    else:
        slots = [nothing] * vec
        shift = start % vec
        begin, end = 0, n
        if shift:
            begin, end = -shift, n + shift
            if shift <= t < vec and not first:
                slots[0] = take(slots[0], row[begin + t])
            begin, end = begin + vec, end - vec
        at = t + first
        while at * vec + vec - 1 < end:
            for k in range(vec):
                slots[k] = take(slots[k], row[begin + at * vec + k])
            at += step
        at = end - end % vec + t
        if at < end and not first:
            slots[0] = take(slots[0], row[begin + at])
    value = slots[0]
    for other in slots[1:]:
        value = combine(value, other)
    return value


def _along_x(found, across, combine):
    width, height = across
    by_y = []
    for y in range(height):
        line = found[y * width : (y + 1) * width]
        apart = width // 2
        while apart >= 32:
            line = [combine(line[x], line[x + apart]) for x in range(apart)]
            apart //= 2
        by_y.append(_fold(line, min(width, 32) // 2, combine))
    return by_y


def _along_y(by_y, combine):
    apart = len(by_y) // 2
    while apart:
        by_y = [combine(by_y[y], by_y[y + apart]) for y in range(apart)]
        apart //= 2
    return by_y[0]


def _block(values, nothing, combine):
    """BlockReduce: warps, then the first warp over what they have found."""
    warps = [_fold(values[k : k + 32], 16, combine) for k in range(0, len(values), 32)]
    return _fold(warps + [nothing] * (32 - len(warps)), 16, combine)


def _exchanged(values, combine):
    apart = len(values) // 2
    while apart:
        values = [combine(v, values[k ^ apart]) for k, v in enumerate(values)]
        apart //= 2
    return values[0]


def softmax(row, log_of=False):
    n = len(row)
    by_warp = n <= 2048
    threads = min(32, 1 << (n - 1).bit_length()) if by_warp else 1024
    best = []
    for t in range(threads):
        m = F32(-np.inf) if by_warp else np.finfo(F32).min
        for x in row[t::threads]:
            m = (m if m > x else x) if by_warp else fmax(m, x)
        best.append(m)
    larger = lambda a, b: b if a < b else a  # noqa: E731
    m = _exchanged(best, larger) if by_warp else _block(best, np.finfo(F32).min, larger)
    totals = []
    for t in range(threads):
        s = ZERO
        for x in row[t::threads]:
            if by_warp and not log_of:
                s = F32(s + exp(F32(x - m)))
            else:
                s = fma(*exp_parts(F32(x - m)), s)
        totals.append(s)
    plus = lambda a, b: F32(a + b)  # noqa: E731
    s = _exchanged(totals, plus) if by_warp else _block(totals, ZERO, plus)
    if log_of:
        return np.array([F32(F32(x - m) - log(s)) for x in row])
    if by_warp and s == 0:
        return np.full(n, np.nan, F32)
    return np.array([F32(exp(F32(x - m)) / s) for x in row])


def softmax_of_columns(row, threads, log_of=False):
    """Of elements that are apart, by so many threads; of a block's y."""
    larger, plus = (lambda a, b: b if a < b else a), (lambda a, b: F32(a + b))
    m = _along_y([_most(row[t::threads]) for t in range(threads)], larger)
    totals = []
    for t in range(threads):
        s = ZERO
        for x in row[t::threads]:
            s = fma(*exp_parts(F32(x - m)), s)
        totals.append(s)
    s = _along_y(totals, plus)
    if log_of:
        return np.array([F32(F32(x - m) - log(s)) for x in row])
    return np.array([F32(exp(F32(x - m)) / s) for x in row])


def _most(values):
    m = np.finfo(F32).min
    for x in values:
        m = fmax(m, x)
    return m


def _welford(row, vec):
    """(mean, sum of squares about it, count) of layer_norm's two kernels."""
    if vec == 1:
        states = []
        for t in range(512):
            state = (ZERO, ZERO, ZERO)
            for x in row[t::512]:
                state = _moments(state, x)
            states.append(state)
        return _block(states, (ZERO, ZERO, ZERO), _moments_of_both)

    def step(state, x):
        mean, second, count = state
        d, count = F32(x - mean), F32(count + 1)
        mean = fma(d, F32(1 / count), mean)
        return mean, fma(d, F32(x - mean), second), count

    def merge(a, b):
        d, count = F32(a[0] - b[0]), F32(b[2] + a[2])
        if not count > 0:
            return ZERO, ZERO, count
        r = F32(1 / count)
        theirs, own = F32(b[2] * r), F32(a[2] * r)
        mean = fma(b[0], theirs, F32(own * a[0]))
        return mean, fma(own, F32(b[2] * F32(d * d)), F32(b[1] + a[1])), count

    return _by_four_warps(row, step, merge, (ZERO, ZERO, ZERO))


def _by_four_warps(row, step, merge, nothing):
    states = []
    for t in range(128):
        state = nothing
        for group in range(t, len(row) // 4, 128):
            for x in row[4 * group : 4 * group + 4]:
                state = step(state, x)
        states.append(state)
    warps = [_fold(states[k : k + 32], 16, merge) for k in range(0, 128, 32)]
    lower = [merge(warps[k], warps[k + 2]) for k in (0, 1)]
    return merge(*lower)


def _root(x):
    return F32(1 / np.sqrt(float(x)))


def layer_norm_statistics(row, eps):
    """Mean and reciprocal deviation, as torch keeps them for backward."""
    mean, second, count = _welford(row, 4 if len(row) % 4 == 0 else 1)
    return mean, _root(F32(F32(second / count) + eps))


def layer_norm(row, w, b, eps):
    fast = len(row) % 4 == 0
    mean, r = layer_norm_statistics(row, eps)
    if fast and w is not None:
        return np.array(
            [fma(F32(r * F32(x - mean)), *wb) for x, *wb in zip(row, w, b, strict=True)]
        )
    if fast:
        return np.array([F32(r * F32(x - mean)) for x in row])
    if w is not None:
        return np.array(
            [fma(wk, F32(F32(x - mean) * r), bk) for x, wk, bk in zip(row, w, b, strict=True)]
        )
    return np.array([fma(F32(x - mean), r, ZERO) for x in row])


def group_norm_statistics(row, eps):
    """Mean and reciprocal deviation; eps: rounded to the dtype, as both are to be."""
    threads = 32 if len(row) < 512 else 512
    states = []
    for t in range(threads):
        state = (ZERO, ZERO, ZERO)
        for x in row[t::threads]:
            state = _moments(state, x)
        states.append(state)
    mean, second, count = _block(states, (ZERO, ZERO, ZERO), _moments_of_both)
    return mean, _root(F32(F32(second / count) + eps))


def group_norm(x, mean, r, w, b, single):
    """The elements x of a channel whose weights are w and b, or None; single: it has no more."""
    if w is None:
        return np.array([F32(F32(v - mean) * r) for v in x])
    if single:
        return np.array([fma(F32(F32(v - mean) * r), w, b) for v in x])
    a = F32(r * w)
    shift = F32(b - F32(a * mean))
    return np.array([fma(a, v, shift) for v in x])


def rms_norm_statistics(row, eps):
    """The reciprocal root of the mean square alone."""
    if len(row) % 4 == 0:
        step = lambda s, x: (fma(x, x, s[0]),)  # noqa: E731
        merge = lambda a, b: (F32(a[0] + b[0]),)  # noqa: E731
        (total,) = _by_four_warps(row, step, merge, (ZERO,))
        return (_root(F32(F32(total / F32(len(row))) + eps)),)
    mean, second, count = _welford(row, 1)
    return (_root(F32(fma(mean, mean, F32(second / count)) + eps)),)


def rms_norm(row, w, eps):
    (r,) = rms_norm_statistics(row, eps)
    return np.array([F32(F32(x * r) * wk) for x, wk in zip(row, w, strict=True)])


def softmax_sum(row, itemsize):
    """What the backward of a softmax adds up of a row."""
    n, plus = len(row), lambda a, b: F32(a + b)
    if n <= 1024 and n * itemsize <= 4096:
        threads, vec = min(32, 1 << (n - 1).bit_length()), 1
    else:
        threads, vec = 32, 16 // itemsize
        while threads < min(n // vec, 1024) // 2:
            threads *= 2
    totals = []
    for t in range(threads):
        total = ZERO
        for group in range(t, n // vec, threads):
            for x in row[vec * group : vec * group + vec]:
                total = F32(total + x)
        totals.append(total)
    return _exchanged(totals, plus) if vec == 1 else _block(totals, ZERO, plus)


def softmax_backward(g, out, itemsize, log_of=False):
    """g: the gradient, for softmax times the result, rounded to the dtype."""
    total = softmax_sum(g, itemsize)
    return np.array(
        [fma(-(exp(o) if log_of else o), total, x) for x, o in zip(g, out, strict=True)]
    )


def layer_norm_backward(g, x, mean, rstd, w=None):
    n = len(x)
    plus = lambda a, b: F32(a + b)  # noqa: E731
    products = [F32(a * b) for a, b in zip(g, w, strict=True)] if w is not None else list(g)
    sums, dots = [], []
    for t in range(128):
        total = dot = ZERO
        for start in range(4 * t, n, 512):
            for k in range(start, min(start + 4, n)):
                total = F32(total + products[k])
                dot = fma(rstd, F32(products[k] * F32(x[k] - mean)), dot)
        sums.append(total)
        dots.append(dot)
    total, dot = _block(sums, ZERO, plus), _block(dots, ZERO, plus)
    term = F32(F32(1 / F32(n)) * rstd)
    found = []
    for k in range(n):
        scaled = F32(n) if w is None else F32(F32(n) * w[k])
        f = fma(g[k], scaled, -F32(dot * F32(rstd * F32(x[k] - mean))))
        found.append(F32(F32(f - total) * term))
    return np.array(found)


def rms_norm_backward(g, x, rstd, w=None):
    n = len(x)
    products = [F32(a * b) for a, b in zip(g, w, strict=True)] if w is not None else list(g)
    dots = []
    for t in range(128):
        dot = ZERO
        for start in range(4 * t, n, 512):
            for k in range(start, min(start + 4, n)):
                dot = fma(rstd, F32(products[k] * x[k]), dot)
        dots.append(dot)
    dot = _block(dots, ZERO, lambda a, b: F32(a + b))
    term = F32(F32(1 / F32(n)) * rstd)
    found = []
    for k in range(n):
        scaled = F32(n) if w is None else F32(F32(n) * w[k])
        found.append(F32(fma(g[k], scaled, -F32(dot * F32(rstd * x[k]))) * term))
    return np.array(found)
