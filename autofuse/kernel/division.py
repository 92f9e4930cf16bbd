"""Division: how torch's CUDA kernels divide a reduction among threads, and so its order.

Pure integer arithmetic, over sizes, strides in elements and addresses in bytes; knows nothing of
torch tensors or of code. The rules are those of torch 2.10 to 2.13: `setReduceConfig` of
aten/src/ATen/native/cuda/Reduce.cuh, `host_softmax` of SoftMax.cu, `LayerNormKernelImplInternal` of
layer_norm_kernel.cu, `GroupNormKernelImplInternal` of group_norm_kernel.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..layout import Iteration, iteration
from .source import WARP, Ints

NORMS = ("layer_norm", "rms_norm", "group_norm")
SOFT = ("softmax", "log_softmax")
MOMENTS = ("var", "std")
# sums over a row of which their gradients are made; the dot is of products with a number of the row
NORM_SUMS = ("norm_sum", "norm_dot")
SOFT_SUM = "softmax_sum"
# how many numbers each of the blocks that share a row leaves to what combines them, if not one; of
# a mean the second is its factor
PARTIAL = {"mean": 2, **dict.fromkeys(MOMENTS, 3)}
_THREADS = 512  # of a block of the reduce kernel, at most
_VECTORISED = 128  # elements of a reduction from which its kernel reads vectors
_SOFTMAX_THREADS = 1024  # of a block of a softmax kernel that gives a row one...
AS_ONE = 4  # ...of which one of ours does what so many do: more rows are in work at a time
BY_ELEMENTS = 512  # of the norms' kernels that take elements one by one; of groups' from...
_FEWEST_BY_BLOCK = 512  # ...so many elements on, and one of ours is AS_ONE up to
_MOST_AS_ONE = 4096
_INTERLEAVED = 256  # threads of a block of ours whose rows of softmax are interleaved


@dataclass(frozen=True, slots=True)
class Division:
    """What each thread (x, y) of each block (x, y) of torch's reduce kernel takes."""

    block: tuple[int, int]  # threads
    grid: tuple[int, int]  # blocks; the second: that share one result
    vec: int  # neighbouring elements that a thread reads at once, to a slot each; 1 for not so
    results: int  # neighbouring results that a thread makes at once
    inputs: Ints  # by how many elements the index of thread x, thread y, block y is multiplied
    outputs: Ints  # ...of results, that of thread x and thread y
    step_in: int  # elements that all threads of a result take at once
    step_out: int  # results of a block

    @property
    def across(self) -> tuple[int, int]:
        """How many threads, x and y, make one result together."""
        x, y = self.block
        return (x if self.inputs[0] else 1, y if self.inputs[1] else 1)


def slots_of(op: str) -> int:
    """To how many slots torch's kernel for `op` gives the elements of a thread in turn."""
    return 2 if op in MOMENTS else 4


def vector_of(op: str, itemsize: int) -> int:
    """Neighbouring elements that torch's kernel for `op` reads at once, where it reads vectors."""
    return 8 if itemsize == 2 and op in ("sum", "mean") else slots_of(op)


@lru_cache(maxsize=4096)
def division_of(
    results: int,
    elements: int,
    through: Iteration,
    address: int,
    itemsize: int,
    vec: int,
    processors: int,
    threads_per_processor: int,
) -> Division:
    """How torch divides `results` reductions of `elements` each.

    through: how it goes through them. address: where the input begins, in bytes. vec: `vector_of`
    the op.
    """
    fastest = is_along(through)
    stride = through.row[0] if fastest else through.kept[0]
    first, second = (elements, results) if fastest else (results, elements)
    vectorised, together = False, 1
    if stride == 1:
        if fastest and first >= _VECTORISED and len(through.row) == 1:
            vectorised = True
            first //= vec
        elif not fastest:
            together = 4
            # get_output_vec_size: where it begins, and all strides but that of neighbouring results
            bounds = (address // itemsize, through.size, *through.row, *through.kept[1:])
            while any(number % together for number in bounds):
                together //= 2
            first //= together
    most = _THREADS // together
    x, y = _threads(first, most), _threads(second, most)
    width = min(x, WARP)
    height = min(y, most // width)
    width = min(x, most // height)
    inputs, outputs = [0, 0, 0], [0, 0]
    step_in = step_out = 1
    if fastest:
        inputs[0], step_in = step_in, step_in * width
    else:
        outputs[0], step_out = step_out, step_out * width
    if -(-elements // step_in) >= min(16 * height, 256):
        inputs[1], step_in = step_in, step_in * height
    else:
        outputs[1], step_out = step_out, step_out * height
    wanted = processors * (threads_per_processor // (width * height))
    blocks = -(-(results // together) // step_out)
    each, shared = -(-elements // step_in), 1
    if inputs[1] and each >= 256 and blocks <= wanted:
        shared = max(min(-(-wanted // blocks), -(-each // 16)), -(-each // 256))
        if shared > 1:
            inputs[2], step_in = step_in, step_in * shared
    return Division(
        (width, height), (blocks, shared), vec if vectorised else 1, together,
        tuple(inputs), tuple(outputs), step_in, step_out,
    )  # fmt: skip


def is_along(through: Iteration) -> bool:
    """Whether neighbouring threads of torch's reduce kernel take elements of one row."""
    return not through.kept or bool(through.row) and through.row[0] < through.kept[0]


def _threads(count: int, most: int) -> int:
    """The largest power of two that neither `count` nor `most` is below."""
    return min(1 << (count.bit_length() - 1) if count else 1, most)


def softmax_threads(columns: int) -> int:
    """Threads that torch's softmax for short rows gives a row."""
    return min(WARP, 1 << (columns - 1).bit_length())


def spatial_softmax_threads(columns: int, stride: int) -> int:
    """Threads that torch's softmax and its backward give a row of that stride."""
    together, threads = min(stride, _SOFTMAX_THREADS), 1
    if together <= 64 <= columns:
        while together * threads <= _SOFTMAX_THREADS and threads <= columns:
            threads *= 2
        threads //= 2
    return threads


def softmax_kernel(columns: int, itemsize: int) -> str:
    """Which of torch's softmax kernels takes contiguous rows: by a warp ("warp"), by a block that
    keeps them in registers ("block"), or one whose order depends on addresses ("").
    """
    if columns <= 2048 and columns * itemsize <= 8192:
        return "warp"
    return "block" if -(-columns // _SOFTMAX_THREADS) < 10 else ""


def _by_warp(columns: int) -> Scheme:
    """How a warp takes rows of softmax, or of its backward."""
    return Scheme("warp", (softmax_threads(columns), 1), 1, False, paired=columns % (2 * WARP) == 0)


def softmax_sum_scheme(columns: int, itemsize: int) -> Scheme | str:
    """How torch's backward of a softmax sums the rows of what it is given, at aligned addresses."""
    if columns <= 1024 and columns * itemsize <= 4096:
        return _by_warp(columns)
    vec = 16 // itemsize
    threads = WARP
    while threads < min(columns // vec, 1024) // 2:
        threads *= 2
    shared = 49152 - threads // WARP * 4  # bytes of a block that are left to the row
    if columns % vec or columns >= shared // itemsize:
        return "rows so long that the order depends on where they begin"
    return Scheme("block", (threads, 1), vec, False)


def norm_kernel(columns: int) -> str:
    """Which of torch's layer_norm kernels takes rows of float32, float16 or bfloat16.

    By vectors ("vectors"), where all operands are aligned to four elements, or not ("elements").
    """
    return "vectors" if columns % 4 == 0 and columns <= 1 << 24 else "elements"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How torch reduces rows of some size: which kernel, which threads."""

    kernel: str
    across: tuple[int, int]
    vec: int
    uneven: bool
    blocks: int = 1  # that share a row
    interleaved: int = 1  # rows whose threads take turns in a block
    anchored: bool = False  # whether that depends on where the rows begin
    paired: bool = False  # whether a thread of ours takes two neighbours, see `Exchanges.dealt`

    @property
    def threads(self) -> int:
        """Of a row, or of a block's share of it."""
        return self.across[0] * self.across[1]

    @property
    def group(self) -> int:
        """Neighbouring elements that a thread of ours takes at once."""
        return 2 if self.paired else self.vec


@lru_cache(maxsize=4096)
def scheme_of(
    op: str, rows: int, columns: int, itemsize: int, processors: tuple[int, int],
    through: Iteration | None = None,
) -> Scheme | str:  # fmt: skip
    """How torch computes `op` over rows that begin at an aligned address, or why a row kernel
    cannot do the same.

    processors: how many the GPU has, and how many threads each of them runs. through: how torch
    goes through them; if it is not said, along the last of two contiguous dimensions.
    """
    if through is None:
        through = iteration((rows, columns), (columns, 1), (-1,))
    stride = through.row[0] if through.row else 1  # from one element of a row to the next
    if columns < 2 or not rows:
        return "rows of less than two elements"
    if rows * columns >= 1 << 31:
        return "more elements than torch's kernels count in 32 bits"
    if op in NORMS:
        kernel = "elements" if op == "group_norm" else norm_kernel(columns)
        if kernel == "vectors":
            return Scheme(kernel, (128, 1), 4, False)
        threads = BY_ELEMENTS
        if op == "group_norm" and columns < _FEWEST_BY_BLOCK:
            threads = WARP
        elif op == "group_norm" and columns <= _MOST_AS_ONE:
            threads //= AS_ONE
        return Scheme(kernel, (threads, 1), 1, False)
    if op in NORM_SUMS:  # by vectors or by elements, in the same order
        return Scheme("fours", (128, 1), 4, columns % 4 > 0)
    if op in (*SOFT, SOFT_SUM) and stride > 1:
        threads = spatial_softmax_threads(columns, stride)
        interleaved = max(2, _INTERLEAVED // threads)
        while (
            interleaved * threads > WARP and interleaved > 2 and rows // interleaved < processors[0]
        ):
            interleaved //= 2  # no order depends on it, and few rows have more processors so
        return Scheme("spatial", (1, threads), 1, False, interleaved=interleaved)
    if op == SOFT_SUM:
        return softmax_sum_scheme(columns, itemsize)
    if op in SOFT:
        kernel = softmax_kernel(columns, itemsize)
        if not kernel:
            return "rows so long that the order depends on where they begin"
        if kernel == "warp":
            return _by_warp(columns)
        return Scheme(kernel, (_SOFTMAX_THREADS // AS_ONE, 1), 1, False)
    if rows * columns * itemsize >= 1 << 31:  # it reduces parts, each divided by itself
        return "more bytes than torch's kernels count in 32 bits"
    vec = vector_of(op, itemsize)
    division = division_of(rows, columns, through, 0, itemsize, vec, *processors)
    if not is_along(through):
        interleaved = division.step_out * division.results
        return Scheme(
            "reduce", division.across, 1, False, division.grid[1], interleaved, division.results > 1
        )
    uneven = any(number % division.vec for number in (columns, *through.kept))
    return Scheme("reduce", division.across, division.vec, uneven, division.grid[1])
