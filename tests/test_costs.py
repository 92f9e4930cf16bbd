"""Costs: the ops and the bytes of chains, as policy counts them."""

import pytest
import torch
from test_columns import values
from test_reductions import recorded, recording  # noqa: F401

import autofuse
from autofuse.kernel.text import functions_of
from autofuse.ops.row import OPS
from autofuse.record import costs, ways
from support import SAVED_US

N = 4 * 131072 * 4  # bytes of a tensor here


@pytest.fixture
def counted(recorded, monkeypatch):  # noqa: F811
    """(ops, bytes of eager ops, bytes of kernels) of the chains that are met."""
    found = []

    def is_short(nodes, results, device_type):
        found.append((costs.ops_of(nodes), *costs.traffic(nodes, results)))
        return False

    monkeypatch.setattr(ways, "is_short", is_short)
    return found


def run(program, *args):
    with torch.no_grad():
        made = program(*map(autofuse.wrap, args))
        for one in made if isinstance(made, tuple) else (made,):
            autofuse.materialize(one)


ROW = 4 * 4  # bytes of a result of four columns
CHAINS = {
    "one kernel": (lambda x, y: torch.tanh(x * y) + 1.0, (3, 7 * N, 3 * N)),
    "numbers of columns that blocks share": (
        lambda x, y: (x * y).sum(0), (2, 4 * N + ROW, 2 * N + ROW)
    ),
    "and the columns": (lambda x, y: (h := x * y, h.sum(0)), (2, 4 * N + ROW, 5 * N + ROW)),
    "a join of what is in memory": (lambda x, y: torch.cat([x * 2.0, y]), (2, 6 * N, 4 * N)),
    "bools that are counted": (  # N / 4 bytes, in 8 of a result
        lambda x, y: (x > y).sum(),
        (2, 2 * N + 2 * N // 4 + costs._COUNTING * N // 4 + 8, 2 * N + 8),
    ),
    "views": (lambda x, y: (x * y).t() * 2.0, (2, 5 * N, 3 * N)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_counted(counted, name):
    program, want = CHAINS[name]
    run(program, values((131072, 4)), values((131072, 4), seed=1))
    assert counted == [want]


def test_rows_of_one_block_are_in_one_kernel_with_their_numbers(counted):
    x, y = values((64, 8, 256)), values((64, 8, 256), seed=1)
    size, row = 4 * x.numel(), 4 * 64 * 256
    run(lambda x, y: (h := x * y, h - h.mean(1, keepdim=True)), x, y)
    assert counted == [(3, 6 * size + 2 * row, 4 * size)]
    counted.clear()
    run(lambda x, y: torch.group_norm(x * y, 4) * 2.0, x, y)
    assert counted[0][2] == 5 * size


@pytest.mark.parametrize("program, saved", [
    (lambda x, y: x * y + y, 2 * 0.025),
    (lambda x, y: torch.tanh(x * y), 0.025 + 1.5),
    (lambda x, y: torch.sin(x) * y, 0.025 - 0.9),
    (lambda x, y: torch.log1p(x) * y, 0.025 + 0.5),  # as all others
    (lambda x, y: torch.sqrt(x.double()), 0.025 + 0.7),
    (lambda x, y: (x * y).view(-1) * 2.0, 2 * 0.025),
    (lambda x, y: x.roll(1, -1) * y, 2 * 0.025 - 0.5),
])  # fmt: skip
def test_what_kernels_save_of_elements_on_a_cpu(program, saved, monkeypatch):
    """In us, by functions; of what leaves the caches also that ops after it read it again."""
    for code, known in (("f32", {"": 0.5, "tanh": 1.5, "sin": -0.9}), ("f64", {"sqrt": 0.7})):
        monkeypatch.setitem(costs.SAVED_US, code, {"": -2.5, **known})
    found = []

    def is_short(nodes, results, device_type):
        found.append(nodes)
        return False

    monkeypatch.setattr(ways, "is_short", is_short)
    for shape in ((16, 250), (1000, 1000)):
        run(program, torch.ones(shape), torch.ones(shape))
        nodes, size = found.pop(), shape[0] * shape[1] / 1000
        given = [node.meta.nbytes / 1000 for node in nodes if node.base < 0][:-1]
        memory = 0.1 * sum(given) if shape[0] == 1000 else 0.0
        assert costs.us_saved(nodes) == pytest.approx(saved * size + memory)


def test_savings_are_of_ops_and_none_is_of_arithmetic(monkeypatch):
    for code, saved in SAVED_US.items():
        monkeypatch.setitem(costs.SAVED_US, code, saved)
        for name in saved.keys() - {""}:
            assert any(op.name == name and functions_of(op, code) for op in OPS.values()), name
    found = []
    monkeypatch.setattr(ways, "is_short", lambda nodes, *_: found.append(nodes))
    for dtype in (torch.float32, torch.float64):
        for program in (
            lambda x, y: torch.add(torch.sub(x, y, alpha=2.0), y, alpha=3.0),
            lambda x, y: (x * y) ** 0.5,
            lambda x, y: (x * y) ** -0.5,
            lambda x, y: torch.nn.functional.huber_loss(x * y, y, reduction="none"),
            lambda x, y: torch.nn.functional.smooth_l1_loss(x * y, y, reduction="none"),
            lambda x, y: torch.lerp(x * y, y, 0.5),
            lambda x, y: torch.addcmul(x * y, x, y),
        ):
            run(program, torch.ones(16, 16, dtype=dtype), torch.ones(16, 16, dtype=dtype))
            assert costs.us_saved(found.pop()) > 0.0
