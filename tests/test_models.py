"""Public models, unchanged: random weights, small sizes, forward and backward equal to eager.

Their packages are no dependencies: pip install -e ".[test-models]".
"""

import copy
import warnings

import pytest
import torch

import autofuse
from support import DEVICES

SKIP = "a model of another package, which is not installed: pip install -e '.[test-models]'"


def _import(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _declare_torchvision_ops()  # the others import it where it is installed
        return pytest.importorskip(name, reason=SKIP)


def _declare_torchvision_ops():
    """The index has torchvision for CUDA; beside a CPU build of torch it misses these at import.

    No model here uses them.
    """
    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                text = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{name}", text)


def mobilenet():
    """A CNN: hard-swish, squeeze and excitation, batch norm."""
    models = _import("torchvision").models
    return models.mobilenet_v3_small(num_classes=5), torch.randn(2, 3, 32, 32)


def vision_transformer():
    """An encoder: layer norm, attention, GELU, layer scale."""
    _import("timm")
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2,
                              num_classes=5, init_values=0.1)  # fmt: skip
    return model, torch.randn(2, 3, 16, 16)


def llama():
    """A decoder: RMS norm, rotary embeddings, gated SiLU."""
    _import("transformers")
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, vocab_size=50)  # fmt: skip
    return LlamaModel(config), torch.arange(20).reshape(2, 10)


def mamba():
    """A recurrent one: a selective state space, step by step."""
    _import("transformers")
    from transformers import MambaConfig, MambaModel

    config = MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=50)
    return MambaModel(config), torch.arange(12).reshape(2, 6)


def _first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [mobilenet, vision_transformer, llama, mamba])
def test_a_public_model(make, device, monkeypatch):
    torch.manual_seed(0)
    plain, inputs = make()
    plain, inputs = plain.to(device), inputs.to(device)
    fused = autofuse.fuse(copy.deepcopy(plain))
    for always in (False, True):  # as the user gets it, and with every chain fused
        monkeypatch.setattr(autofuse.config, "always_fuse", always)
        autofuse.reset_stats()
        for model in (plain, fused):
            model.zero_grad()
            torch.manual_seed(1)  # for dropout
            _first(model(inputs)).square().mean().backward()
    stats = autofuse.stats()
    assert stats.kernels_launched > 0 and stats.nodes_elided > 0 and stats.replays == 0
    for (name, ours), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)
    for ours, theirs in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        want, got = _first(plain.eval()(inputs)), _first(fused.eval()(inputs))
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
