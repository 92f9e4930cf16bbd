"""Models of installed packages: whether what autofuse gives has eager's bits.

    python bench/packages.py [--device cuda] [--share 0/8] [--only resnet] [--seconds 60]

Of torchvision, timm and transformers, as far as they are installed, small models of every family:
in evaluation, in evaluation under bfloat16 autocast and in a training step (loss, gradients,
buffers), with deterministic algorithms of torch. Every chain runs in kernels. Both ways to use
autofuse are compared, `fuse` of the model and `wrap` of what it is given, three times each, where
eager gives the same twice. One line for each model, then what was equal; the exit status is 1 if
anything differs. --share: which of how many parts of the list, for several processes. --seconds:
that a model may take in each mode.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

import autofuse

Make = Callable[[], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]
MODES, WAYS = ("evaluation", "autocast", "training"), ("fuse", "wrap")
_MOST = 120_000_000  # parameters
TORCHVISION = {
    96: "alexnet convnext_tiny densenet121 efficientnet_v2_s googlenet mnasnet0_5 mobilenet_v2 "
    "mobilenet_v3_small regnet_x_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 "
    "swin_t swin_v2_t wide_resnet50_2 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large "
    "fcn_resnet50",
    224: "maxvit_t vit_b_32",
    299: "inception_v3",
}
DETECTION = (
    "fasterrcnn_mobilenet_v3_large_320_fpn ssdlite320_mobilenet_v3_large retinanet_resnet50_fpn "
    "fcos_resnet50_fpn keypointrcnn_resnet50_fpn maskrcnn_resnet50_fpn"
)
VIDEO = {"r3d_18": (8, 64), "mc3_18": (8, 64), "r2plus1d_18": (8, 64), "swin3d_t": (8, 64),
         "s3d": (16, 224), "mvit_v2_s": (16, 224)}  # fmt: skip
_SMALL_NAMES = ("tiny", "small", "pico", "nano", "atto", "femto", "mini", "_xs", "_s", "lite",
                "_050", "_xxs", "r26", "18")  # fmt: skip
TRANSFORMERS = (
    "albert bart bert big_bird biogpt blenderbot-small bloom canine convbert cvt data2vec-text "
    "data2vec-vision deberta-v2 deit dinov2 distilbert electra ernie esm falcon_mamba fsmt gemma "
    "gemma2 gpt2 gpt_bigcode gpt_neo gpt_neox granite hubert ibert led llama longformer m2m_100 "
    "mamba mamba2 marian mbart megatron-bert mistral mixtral mobilebert mobilevit mpnet mpt nat "
    "nystromformer olmo olmo2 opt pegasus persimmon phi phi3 plbart poolformer pvt pvt_v2 qwen2 "
    "qwen2_moe qwen3 regnet rembert resnet roberta roc_bert roformer rwkv segformer sew "
    "squeezebert stablelm starcoder2 swiftformer switch_transformers t5 umt5 vit vit_mae vit_msn "
    "wav2vec2 wavlm whisper xglm xlm xlm-roberta yoso glm cohere nemotron dbrx olmoe jetmoe helium"
)
# what configurations of transformers call their sizes
_SIZES = {
    **dict.fromkeys(
        "hidden_size d_model n_embd embedding_size dim emb_dim word_embed_proj_dim state_size "
        "attention_hidden_size moe_intermediate_size".split(), 64
    ),
    **dict.fromkeys(
        "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff hidden_dim ffn_dim d_inner "
        "max_position_embeddings n_positions".split(), 128
    ),
    **dict.fromkeys(
        "num_hidden_layers n_layer encoder_layers decoder_layers num_layers num_decoder_layers "
        "n_layers num_key_value_heads num_experts_per_tok depth pad_token_id".split(), 2
    ),
    **dict.fromkeys(
        "num_attention_heads n_head encoder_attention_heads decoder_attention_heads num_heads "
        "n_heads num_experts num_local_experts".split(), 4
    ),
    "d_kv": 16, "head_dim": 16, "kv_channels": 16, "vocab_size": 200, "image_size": 32,
    "patch_size": 8, "sequence_length": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "max_source_positions": 64,
    "max_target_positions": 64,
}  # fmt: skip


def images(count: int, *size: int) -> torch.Tensor:
    return torch.randn(count, 3, *size)


def of_torchvision() -> Iterator[tuple[str, Make]]:
    import torchvision.models as models

    def make(name: str, *args: Any, **options: Any) -> Make:
        return lambda: (models.get_model(name, weights=None, **options), args, {})

    for size, names in TORCHVISION.items():
        for name in names.split():
            dense = any(kind in name for kind in ("deeplab", "lraspp", "fcn"))
            yield name, make(name, images(2, size, size), **_bare(dense))
    for name, (frames, size) in VIDEO.items():
        yield name, make(name, images(1, frames, size, size))
    yield "raft_small", make("raft_small", images(1, 128, 128), images(1, 128, 128))
    for name in DETECTION.split():
        yield name, make(name, [torch.rand(3, 160, 160)], **_bare(True))


def _bare(has_backbone: bool) -> dict[str, Any]:
    return {"weights_backbone": None} if has_backbone else {}


def of_timm() -> Iterator[tuple[str, Make]]:
    import timm

    def make(name: str) -> Make:
        def made() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
            model = timm.create_model(name, num_classes=10)
            _, *size = model.pretrained_cfg.get("input_size", (3, 224, 224))
            return model, (images(2, *size),), {}

        return made

    names = [n for n in timm.list_models() if any(part in n for part in _SMALL_NAMES)]
    random.Random(5).shuffle(names)
    families = {name.split("_")[0].rstrip("0123456789"): name for name in reversed(names)}
    for name in families.values():
        yield name, make(name)


def of_transformers() -> Iterator[tuple[str, Make]]:
    import transformers

    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES

    def make(kind: str) -> Make:
        def made() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
            kinds = getattr(transformers, known[kind])
            usual = kinds()
            sizes = {
                name: size
                for name, size in _SIZES.items()
                if type(getattr(usual, name, "")) in (int, type(None))
            }
            try:
                config = kinds(**sizes)
            except ValueError:  # of tokens that have to be in its vocabulary
                config = kinds(**{n: size for n, size in sizes.items() if "token" not in n})
            model = transformers.AutoModel.from_config(config)
            return model, *_read_by(model)

        return made

    for kind in TRANSFORMERS.split():
        if kind in known:
            yield kind, make(kind)


def _read_by(model: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    config, decoded = model.config, torch.randint(3, 100, (2, 8))
    match model.main_input_name:
        case "pixel_values":
            size = getattr(config, "image_size", 64)
            size = size if isinstance(size, int) else 64
            return (images(2, size, size),), {}
        case "input_values":
            return (torch.randn(1, 4000),), {}
        case "input_features":
            return (torch.randn(1, config.num_mel_bins, 128),), {"decoder_input_ids": decoded[:1]}
    decodes = getattr(config, "is_encoder_decoder", False)
    return (torch.randint(3, 100, (2, 24)),), {"decoder_input_ids": decoded} if decodes else {}


PACKAGES = {"torchvision": of_torchvision, "timm": of_timm, "transformers": of_transformers}


# --- comparing ------------------------------------------------------------------------------------


def mapped(thing: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`thing` with its tensors replaced."""
    if isinstance(thing, torch.Tensor):
        return function(thing)
    if isinstance(thing, dict):
        return {key: mapped(value, function) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing)([mapped(value, function) for value in thing])
    return thing


def tensors_of(thing: Any) -> list[torch.Tensor]:
    """All tensors in what a model returns, in order."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, dict):
        return [x for value in thing.values() for x in tensors_of(value)]
    if isinstance(thing, (list, tuple)):
        return [x for value in thing for x in tensors_of(value)]
    fields = vars(thing) if hasattr(thing, "__dict__") else {}
    return [x for value in fields.values() for x in tensors_of(value)]


def run(model: torch.nn.Module, args: Any, kwargs: Any, mode: str) -> list[torch.Tensor]:
    """What a model gives; in training the loss and what backward and the step leave."""
    torch.manual_seed(3)
    random.seed(3)
    if "numpy" in sys.modules:  # by which transformers masks
        sys.modules["numpy"].random.seed(3)
    if mode != "training":
        (device,) = {p.device.type for p in model.parameters()}
        cast = torch.autocast(device, torch.bfloat16)
        with torch.no_grad(), cast if mode == "autocast" else contextlib.nullcontext():
            return [autofuse.unwrap(x) for x in tensors_of(model(*args, **kwargs))]
    total: Any = 0.0
    for x in tensors_of(model(*args, **kwargs)):
        if x.is_floating_point() and x.requires_grad:
            weights = torch.linspace(0.5, 1.5, x.numel(), device=x.device)
            total = total + (x.float() * weights.view(x.shape)).mean()
    total.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [autofuse.unwrap(x).detach() for x in (total, *grads, *model.buffers())]


def difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> str:
    """Where they differ first; empty where they do not, NaNs being equal."""
    if len(got) != len(want):
        return f"{len(got)} tensors, not {len(want)}"
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        kinds = [(x.dtype, tuple(x.shape), x.stride()) for x in (a, b)]
        if kinds[0] != kinds[1]:
            return f"tensor {k} is {kinds[0]}, not {kinds[1]}"
        differs = (a != b) & ~((a != a) & (b != b))
        if differs.any():
            return f"{int(differs.sum())} of {a.numel()} elements of tensor {k}"
    return ""


def compare(
    model: torch.nn.Module, args: Any, kwargs: Any, device: str, seconds: float = 60.0
) -> dict[str, str]:
    """What is not as eager has it, by mode and way: empty if nothing; of a mode alone, why it was
    not compared."""
    model = model.to(device)
    args, kwargs = (mapped(given, lambda x: x.to(device)) for given in (args, kwargs))
    state, found = copy.deepcopy(model.state_dict()), {}

    def fresh(mode: str) -> torch.nn.Module:
        own = copy.deepcopy(model).train(mode == "training")
        own.load_state_dict(state)
        return own

    def late(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    for mode in MODES:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            want = run(fresh(mode), args, kwargs, mode)
            if difference(run(fresh(mode), args, kwargs, mode), want):
                found[mode] = "eager gives something else each time"
                continue
        except (RuntimeError, ValueError, TypeError, AssertionError, TimeoutError) as error:
            found[mode] = f"eager raises {type(error).__name__}: {str(error)[:80]}"
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for way in WAYS:
            own = autofuse.fuse(fresh(mode)) if way == "fuse" else fresh(mode)
            wraps = autofuse.wrap if way == "wrap" else lambda x: x
            ours = mapped(args, wraps), mapped(kwargs, wraps)
            for _ in range(3):
                own.load_state_dict(state)
                own.zero_grad(set_to_none=True)
                try:
                    found[f"{mode}, {way}"] = difference(run(own, *ours, mode), want)
                except Exception as error:  # noqa: BLE001 - it is what is looked for
                    found[f"{mode}, {way}"] = f"{type(error).__name__}: {str(error)[:200]}"
                if found[f"{mode}, {way}"]:
                    break
    signal.signal(signal.SIGALRM, before)
    return found


def set_up() -> None:
    """Compile at once, have every chain run in kernels, and torch's kernels repeat themselves."""
    config = autofuse.config
    config.compile, config.measure, config.always_fuse = "now", False, True
    config.max_kernels_per_line = 1 << 30
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    set_up()
    part, parts = map(int, args.share.split("/"))
    every: list[tuple[str, Make]] = []
    for package, models in PACKAGES.items():
        try:
            every += [(f"{package} {name}", make) for name, make in models()]
        except ImportError as error:
            print(f"{package}: {error}")
    equal, differing = Counter[str](), 0
    for name, make in [one for one in every if args.only in one[0]][part::parts]:
        torch.manual_seed(0)
        try:
            model, given, options = make()
            if sum(p.numel() for p in model.parameters()) > _MOST:
                raise ValueError("too large")
        except Exception as error:  # noqa: BLE001 - another version of the package
            print(f"{name}: not made, {type(error).__name__}: {str(error)[:80]}", flush=True)
            continue
        found = compare(model, given, options, args.device, args.seconds)
        equal.update(where for where, text in found.items() if not text)
        wrong = {where: text for where, text in found.items() if text and where not in MODES}
        differing += bool(wrong)
        told = [f"{where}: {text}" for where, text in found.items() if text]
        print(f"{name}: {'; '.join(told) or 'the same bits'}", flush=True)
    print(f"{differing} models differ; equal in", dict(equal), flush=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
