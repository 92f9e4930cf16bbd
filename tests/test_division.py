"""How torch's reduce kernel divides its work, against tables that were proven on a GPU."""

import pytest

from autofuse.kernel.division import (
    division_of,
    norm_kernel,
    softmax_kernel,
    softmax_threads,
    vector_of,
)
from autofuse.layout import iteration

H200 = (132, 2048)  # processors, threads of each


def rows(results, elements, itemsize=4, vec=4, gpu=H200):
    through = iteration((results, elements), (elements, 1), (-1,))
    return division_of(results, elements, through, 0, itemsize, vec, *gpu)


@pytest.mark.parametrize(
    ("results", "elements", "block", "across", "grid"),
    [
        (8192, 1024, (32, 16), (32, 1), (512, 1)),  # a warp a row
        (16384, 8160, (32, 16), (32, 1), (1024, 1)),
        (16384, 8161, (32, 16), (32, 16), (16384, 1)),  # all of the block, from 256 a thread
        (1, 4096, (512, 1), (512, 1), (1, 1)),
        (2, 4096, (256, 2), (256, 1), (1, 1)),
        (64, 256, (32, 16), (32, 1), (4, 1)),
        (64, 128, (32, 16), (32, 1), (4, 1)),
        (64, 100, (32, 16), (32, 1), (4, 1)),
        (64, 3, (2, 64), (2, 1), (1, 1)),
    ],
)
def test_rows(results, elements, block, across, grid):
    made = rows(results, elements)
    assert (made.block, made.across, made.grid) == (block, across, grid)
    assert made.vec == (4 if elements >= 128 else 1)


def test_16_bit_sums_read_eight_elements_and_extrema_four():
    assert [vector_of(op, 2) for op in ("sum", "mean", "amax", "amin")] == [8, 8, 4, 4]
    assert [vector_of(op, 4) for op in ("sum", "mean", "amax", "amin")] == [4] * 4
    assert [vector_of(op, size) for op in ("var", "std") for size in (2, 4)] == [2] * 4
    made = rows(4096, 128, itemsize=2, vec=8)
    assert made.vec == 8 and made.across == (16, 1), "two rows a warp"


def test_columns_are_made_up_to_four_at_a_time():
    def divided(address, results):
        through = iteration((512, results), (results, 1), (0,))
        return division_of(results, 512, through, address, 4, 4, *H200)

    def columns(address, results):
        return divided(address, results).results

    assert columns(0, 1024) == 4
    assert columns(8, 1024) == 2 and columns(4, 1024) == 1  # by where the input begins
    assert columns(0, 1022) == 2 and columns(0, 1023) == 1
    made = divided(0, 1024)
    assert made.vec == 1 and made.outputs[0] == 1 and made.inputs[0] == 0


def test_rows_of_several_dimensions_are_read_one_by_one():
    """Those that torch does not walk as one: over the first and the last, but not over the last two
    or over all."""
    shape, stride = (8, 4, 512), (2048, 512, 1)
    for axes, results, vec in (((0, 2), 4, 1), ((1, 2), 8, 4), ((0, 1, 2), 1, 4)):
        through = iteration(shape, stride, axes)
        made = division_of(results, 16384 // results, through, 0, 4, 4, *H200)
        assert (made.vec, made.results, made.inputs[0]) == (vec, 1, 1)


def test_only_blocks_that_share_a_result_depend_on_the_gpu():
    small = (46, 1536)
    assert rows(8192, 1024) == rows(8192, 1024, gpu=small)
    large, less = rows(1, 1 << 24), rows(1, 1 << 24, gpu=small)
    assert large.grid == (1, 528) and less.grid == (1, 138)
    assert large.inputs[2] == large.block[0]
    assert rows(1, 1 << 16).grid == (1, 1)


def test_every_element_is_taken_once():
    for results, elements in ((1, 5000), (3, 999), (40, 130), (7, 20000), (2, 1 << 18)):
        made = rows(results, elements)
        (width, height), (blocks, shared) = made.block, made.grid
        taken = [
            (x * made.outputs[0] + y * made.outputs[1] + bx * made.step_out,
             x * made.inputs[0] + y * made.inputs[1] + by * made.inputs[2])
            for bx in range(blocks) for by in range(shared)
            for y in range(height) for x in range(width)
        ]  # fmt: skip
        inside = [pair for pair in taken if pair[0] < results]
        assert len(set(inside)) == len(inside) == results * made.step_in


def test_kernels_of_softmax_and_norms():
    kinds = {
        (n, size): softmax_kernel(n, size)
        for n in (2048, 2049, 9216, 9217) for size in (2, 4, 8)
    }  # fmt: skip
    assert [kinds[2048, size] for size in (2, 4, 8)] == ["warp", "warp", "block"]
    assert kinds[2049, 2] == kinds[9216, 4] == "block" and kinds[9217, 2] == ""
    assert [softmax_threads(n) for n in (1, 2, 3, 17, 32, 33)] == [1, 2, 4, 32, 32, 32]
    assert [norm_kernel(n) for n in (4, 6, 1024, 1 << 25)] == [
        "vectors", "elements", "vectors", "elements",
    ]  # fmt: skip
