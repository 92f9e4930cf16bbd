"""What makes a tensor as a pending one is, and reads none of its values, ends no chain."""

import queue
import threading

import pytest
import torch

import autofuse
from autofuse.dispatch import metadata
from support import assert_same, functions_called, needs_cuda

SHAPES = {
    "a row": lambda x: x[0], "rows": lambda x: x, "a number": lambda x: x[0, 0],
    "images": lambda x: x.view(2, 3, 4, 1), "of one": lambda x: x[:1, :1],
    "transposed": lambda x: x.t(), "every second": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(3, 4), "nothing": lambda x: x[:0],
    "a column": lambda x: x[:, :1].contiguous(), "images of one": lambda x: x.view(6, 1, 2, 2),
    "a turned row": lambda x: x[:1].t().contiguous().t(), "a turned column": lambda x: x.t()[:, :1],
    "channels_last": lambda x: x.view(2, 3, 2, 2).to(memory_format=torch.channels_last),
}  # fmt: skip
MAKERS = {
    "zeros_like": torch.zeros_like, "ones_like": torch.ones_like, "rand_like": torch.rand_like,
    "randn_like": torch.randn_like, "full_like": lambda x: torch.full_like(x, 2.5),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "of another dtype": lambda x: torch.zeros_like(x, dtype=torch.int64),
    "that requires grad": lambda x: torch.randn_like(x, requires_grad=True),
    "laid out": lambda x: torch.ones_like(x, memory_format=torch.contiguous_format),
    "on a device": lambda x: torch.ones_like(x, device="cpu"),
    "on none": lambda x: torch.ones_like(x, device=None),
    "shape of empty_like": lambda x: torch.empty_like(x).fill_(3.0),
    "new_zeros": lambda x: x.new_zeros(3), "new_ones": lambda x: x.new_ones((2, 2)),
    "new_full": lambda x: x.new_full((2,), 1.5), "new_empty": lambda x: x.new_empty(2).zero_(),
    "new of a dtype": lambda x: x.new_zeros(2, dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MAKERS)
def test_they_are_eagers(on, always, name, shape):
    """And draw the same random numbers."""
    if name == "laid out" and shape == "channels_last":
        pytest.skip("the same as the next")
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))[:6]
    x = SHAPES[shape](x)
    for _ in range(3):
        torch.manual_seed(7)
        want = MAKERS[name](x * 2.0), torch.rand(3)
        torch.manual_seed(7)
        pending = autofuse.wrap(x) * 2.0
        got = MAKERS[name](pending), torch.rand(3)
        assert isinstance(got[0], torch.Tensor)
        assert_same([*map(autofuse.unwrap, got)], [*want], None, shape)
        assert got[0].is_leaf and got[0]._version == want[0]._version
        assert_same(autofuse.unwrap(autofuse.materialize(pending)), x * 2.0, None)


@pytest.mark.parametrize("name", [name for name in MAKERS if "empty" not in name])
def test_the_chain_goes_on(on, always, name):
    x = autofuse.wrap(torch.ones(4, 5))
    for _ in range(4):
        h = x * 2.0
        MAKERS[name](h)
        assert autofuse.is_pending(h)
    assert not autofuse.is_pending(MAKERS["zeros_like"](x))  # of memory, as before


@pytest.mark.parametrize("name", [name for name in MAKERS if "empty" not in name])
def test_machine_code_makes_what_was_made_before(on, always, name):
    if not on:
        pytest.skip("there is machine code for this")
    h = autofuse.wrap(torch.ones(4, 5)) * 2.0
    MAKERS[name](h)  # Python makes what stands for it
    called = functions_called(lambda: MAKERS[name](h))
    assert called == []
    assert autofuse.is_pending(h)


def test_they_are_made_as_what_takes_no_memory(on, always):
    """One for all values that lie alike, on their own device."""
    h = autofuse.wrap(torch.ones(41, 43)) * 2.0
    torch.zeros_like(h)
    stands = h._af.meta.stand_in
    assert stands.untyped_storage().nbytes() == 0 and stands.shape == (41, 43)
    h = autofuse.wrap(torch.ones(41, 43)) + 2.0
    torch.ones_like(h)
    assert h._af.meta.stand_in is stands
    assert autofuse.unwrap(torch.ones_like(h)).untyped_storage().nbytes() == 41 * 43 * 4


def test_errors_are_eagers(on, always):
    calls = [
        lambda x: torch.randint_like(x), lambda x: torch.full_like(x, "a"),
        lambda x: torch.randn_like(x, dtype=torch.int64), lambda x: x.new_zeros((-1,)),
        lambda x: torch.zeros_like(x, memory_format=torch.channels_last),
        lambda x: torch.zeros_like(x, device="nowhere"), lambda x: torch.ones_like(x, 3),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(Exception) as want:
            call(torch.ones(3) * 2.0)
        for _ in range(3):
            h = autofuse.wrap(torch.ones(3)) * 2.0
            torch.zeros_like(h)
            with pytest.raises(type(want.value)) as got:
                call(h)
            assert str(got.value) == str(want.value)


def test_noise_in_a_loop_ends_no_chain(on, always):
    """Steps of a sampler, as one chain."""

    def run(x):
        for _ in range(5):
            x = x - 0.1 * x + torch.randn_like(x) * 0.3
        return x

    x = torch.ones(3, 4)
    for _ in range(2):
        torch.manual_seed(3)
        want = run(x)
        torch.manual_seed(3)
        autofuse.reset_stats()
        got = autofuse.materialize(run(autofuse.wrap(x)))
        assert sum(autofuse.stats().flushes.values()) == 1
        assert_same(autofuse.unwrap(got), want, 1e-6)


def test_values_that_views_and_reductions_give_are_shaped_alike(on, always):
    x = torch.randn(4, 6)
    h = autofuse.wrap(x) * 2.0
    assert_same(autofuse.unwrap(torch.zeros_like(h[:, 1:3])), torch.zeros_like(x[:, 1:3]), None)
    assert_same(autofuse.unwrap(torch.ones_like(h.t())), torch.ones_like(x.t()), None)
    assert autofuse.is_pending(h)


def test_a_large_value_has_no_memory_for_what_is_made_as_it_is(on, always, monkeypatch):
    """Not for a moment either; what is made lies where it would."""
    monkeypatch.setattr(metadata, "_LARGE", 16)
    x = autofuse.wrap(torch.ones(3, 4).t())
    y = x * 2.0
    made = [torch.zeros_like(y), y.new_full((2,), 3.0), torch.ones_like(y, dtype=torch.bool)]
    assert autofuse.is_pending(y) and y._af.meta.stand_in is None
    want = [torch.zeros_like(x), x.new_full((2,), 3.0), torch.ones_like(x, dtype=torch.bool)]
    assert_same(made, want, None)
    assert [one.device for one in made] == [x.device] * 3


def test_modes_are_told_of_the_tensor_itself(on):
    """Which asks what it holds."""
    seen = []

    class Looking(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append((func.__name__, [type(x) for x in args]))
            return func(*args, **kwargs or {})

    h = autofuse.wrap(torch.ones(3)) * 2.0
    with Looking():
        torch.zeros_like(h)
    assert ("zeros_like", [autofuse.Tensor]) in seen


def test_where_nothing_is_recorded_they_are_eagers(on, always):
    """Also of a value that another thread has pending: a trace keeps what is made."""
    made, done = queue.Queue(), threading.Event()

    def work():
        made.put(autofuse.wrap(torch.ones(3, 4)) * 2.0)
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        h = made.get()
        torch.zeros_like(autofuse.wrap(torch.ones(3, 4)) * 2.0)
        with autofuse.disabled():
            y = torch.ones_like(h)
        assert not autofuse.is_pending(h) and type(autofuse.unwrap(y)) is torch.Tensor
        assert_same(autofuse.unwrap(y), torch.ones(3, 4), None)
    finally:
        done.set()
        thread.join()


def test_under_grad_numbers_of_nodes_stay(on, always):
    x = torch.ones(3, requires_grad=True)

    def run(x):
        h = x * 2.0
        y = h * torch.ones_like(h) + x
        return (y * y).sum()

    (want,) = torch.autograd.grad(run(x), x)
    for _ in range(3):
        out = autofuse.unwrap(autofuse.materialize(run(autofuse.wrap(x))))
        assert_same(torch.autograd.grad(out, x), (want,), None)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "on a device"])
def test_on_a_gpu(name, always):
    for shape in ((5, 33), (4, 3, 8, 8), (1000, 1000)):
        x = torch.randn(shape, device="cuda")
        for memory in (x, x.transpose(0, 1)):
            torch.cuda.manual_seed(7)
            want = MAKERS[name](memory * 2.0), torch.rand(3, device="cuda")
            torch.cuda.manual_seed(7)
            pending = autofuse.wrap(memory) * 2.0
            got = MAKERS[name](pending), torch.rand(3, device="cuda")
            assert autofuse.is_pending(pending) or "empty" in name
            assert_same([*map(autofuse.unwrap, got)], [*want], None, f"{shape}")
