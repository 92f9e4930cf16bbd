"""The shortest tour: read this first."""

import torch

import autofuse


def test_a_chain_is_one_kernel():
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    w = autofuse.wrap(x)
    z = (w * y + 1.5).neg()  # three ops, nothing has run
    assert autofuse.is_pending(z)
    assert z.shape == (8, 16) and z.dtype is torch.float32  # known without running
    assert torch.equal(autofuse.unwrap(z), (x * y + 1.5).neg())
    stats = autofuse.stats()
    assert stats.ops_recorded == 3 and stats.kernels_launched == 1
    assert stats.nodes_elided == 2 and stats.live_outs_stored == 1


def test_reading_a_value_runs_the_chain():
    w = autofuse.wrap(torch.tensor([1.0, 2.0]))
    z = w + w
    assert z.tolist() == [2.0, 4.0]
    assert not autofuse.is_pending(z)


def test_a_fused_function_returns_plain_tensors():
    @autofuse.fuse
    def f(x, y):
        return torch.where(x > y, x, y) * 2

    x, y = torch.randn(5), torch.randn(5)
    out = f(x, y)
    assert type(out) is torch.Tensor
    assert torch.equal(out, torch.maximum(x, y) * 2)
    assert autofuse.stats().kernels_launched == 1
