"""What torch's modules compute in one kernel of their own, they do with our tensors, too.

Its bits are others than those of the layer's ops, so that to leave it is to have other results.
"""

import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import autofuse
from support import DEVICES, assert_same, functions_called

MASK = torch.zeros(3, 7, dtype=torch.bool)
MASK[0, 5:] = True


def attention():
    return nn.MultiheadAttention(32, 4, batch_first=True)


def layer(**options):
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)


CALLS = {
    "attention": (attention, lambda m, x, mask: m(x, x, x)[0]),
    "attention, weights": (attention, lambda m, x, mask: m(x, x, x)[1]),
    "attention, none": (attention, lambda m, x, mask: m(x, x, x, need_weights=False)[0]),
    "attention, masked": (attention, lambda m, x, mask: m(x, x, x, mask, False)[0]),
    "attention to others": (attention, lambda m, x, mask: m(x, x * 0.5, x)[0]),
    "layer": (layer, lambda m, x, mask: m(x)),
    "layer, norm first": (lambda: layer(norm_first=True), lambda m, x, mask: m(x)),
    "layer, gelu": (lambda: layer(activation="gelu"), lambda m, x, mask: m(x)),
    "layer, masked": (layer, lambda m, x, mask: m(x, src_key_padding_mask=mask)),
    "layer, causal": (layer, lambda m, x, mask: m(x, nn.Transformer.generate_square_subsequent_mask(
        7, device=x.device))),
    "encoder": (lambda: nn.TransformerEncoder(layer(), 2), lambda m, x, mask: m(x)),
    "encoder, masked": (lambda: nn.TransformerEncoder(layer(), 2),
                        lambda m, x, mask: m(x, src_key_padding_mask=mask)),
    "decoder": (lambda: nn.TransformerDecoderLayer(32, 4, 64, batch_first=True),
                lambda m, x, mask: m(x, x)),
}  # fmt: skip
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


@pytest.fixture(autouse=True)
def said():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes of nested tensors
        yield


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("before", [lambda x: x, lambda x: x * 2.0], ids=["concrete", "pending"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_eagers(always, on, name, mode, before, device):
    torch.manual_seed(0)
    make, call = CALLS[name]
    module, x, mask = (
        make().to(device).eval(),
        torch.randn(3, 7, 32, device=device),
        MASK.to(device),
    )
    # a GELU of ours, in the layer's ops, is another than the CPU's
    apart = 1e-6 if "gelu" in name and mode == "grad" and device == "cpu" else None
    with MODES[mode]():
        want = call(module, before(x), mask)
        for _ in range(3):
            got = call(module, before(autofuse.wrap(x)), mask)
            assert_same(autofuse.unwrap(autofuse.materialize(got)), want, apart)
        got = autofuse.fuse(lambda x: call(module, before(x), mask))(x)
        assert type(got) is torch.Tensor
        assert_same(got, want, apart)


def test_what_is_asked_is_torchs_own(always):
    """For the functions that others see: their text, their names, and what else they were told."""
    for module in (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder):
        assert "torch.overrides.has_torch_function(" in inspect.getsource(module.forward)
        assert "has_torch_function" not in module.forward.__code__.co_names
    torch.jit.script(attention())


class Other(torch.Tensor):
    """Somebody's."""


def test_others_are_asked(always):
    """A subclass, even beside tensors of ours, and modes."""
    asks = vars(torch.overrides)["_has_torch_function_beside_autofuse"]
    x, other = torch.randn(2), torch.randn(2).as_subclass(Other)
    assert not asks((x, autofuse.wrap(x), None))
    assert asks((x, autofuse.wrap(x), other)) and asks([other])
    with TorchFunctionMode():
        assert asks((autofuse.wrap(x),)) and asks((x,))
        assert torch.overrides.has_torch_function((x,))


def test_no_python_of_ours_runs_for_it_but_the_question(always):
    if not autofuse.hot.native.active():
        pytest.skip("there is no machine code")
    module, x = layer().eval(), torch.randn(3, 7, 32)
    with torch.no_grad():
        for _ in range(4):
            autofuse.materialize(module(autofuse.wrap(x)))
        w = autofuse.wrap(x)
        called = [name for name in functions_called(lambda: module(w)) if name != "<listcomp>"]
    assert called == ["_has_others"]


def test_a_compiled_function_is_told_which_arguments_are_one(always):
    """As attention asks, to take its fast path."""
    compiled = torch.compile(lambda a, b, c: (a + c, a is b, b is c), backend="eager")
    x = torch.randn(4)
    for make in (lambda: autofuse.wrap(x), lambda: autofuse.wrap(x) * 1.0):
        w, other = make(), make()
        assert compiled(w, w, other)[1:] == (True, False) == compiled(x, x, x * 1.0)[1:]
