"""What torch's modules compute in one kernel of their own, they do with our tensors, too.

Its bits are others than those of the layer's ops, so that to leave it is to have other results.
"""

import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.optim import optimizer
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


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_wrapped_leaves_go_through_all_at_once(name, device, monkeypatch):
    """As of plain ones; also where some are wrapped and some are not."""
    monkeypatch.setattr(
        optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cuda", "cpu"]
    )
    several = []
    for call in ("_foreach_mul_", "_foreach_norm", "_foreach_addcdiv_", "_foreach_add_",
                 "_foreach_sqrt", "_foreach_sign_", "_fused_adam_"):  # fmt: skip
        was = getattr(torch, call)

        def told(*args, was=was, call=call, **options):
            several.append(call)
            return was(*args, **options)

        monkeypatch.setattr(torch, call, told)

    def trained(wrap, some):
        several.clear()
        torch.manual_seed(0)
        x, y = torch.randn(6, 5, device=device), torch.randn(6, 4, device=device)
        leaves = [torch.randn(shape, device=device).requires_grad_() for shape in ((5, 4), (4,))]
        w, b = wrap(leaves[0]), some(leaves[1])
        assert w is leaves[0]
        assert b is leaves[1]
        taken = OPTIMIZERS[name](leaves)
        for _ in range(4):
            taken.zero_grad()
            error = torch.matmul(x, w) + b - y
            (error * error).mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
            taken.step()
        return [autofuse.unwrap(leaf).detach() for leaf in (*leaves, norm)], [*several]

    want, calls = trained(lambda x: x, lambda x: x)
    assert calls
    for some in (autofuse.wrap, lambda x: x):
        got, found = trained(autofuse.wrap, some)
        assert found == calls
        assert_same(got, want, None)
