"""Programs with deep nets: transformers, diffusion, flows, graphs, images. Plain PyTorch.

The last rows are models of other packages, absent where those are not installed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo_row import Start, program, trainer

# --- transformers --------------------------------------------------------------------------------


class GptBlock(nn.Module):
    """Layer norm, attention written out, GELU by tanh."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x, mask):
        b, t, c = x.size()
        q, k, v = self.qkv(self.ln1(x)).split(c, dim=2)
        q, k, v = (a.view(b, t, self.heads, c // self.heads).transpose(1, 2) for a in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(mask[:t, :t] == 0, float("-inf"))
        y = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(b, t, c)
        x = x + self.proj(y)
        h = self.up(self.ln2(x))
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * h**3)))
        return x + self.down(h)


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)))

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotated(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.heads = heads

    def forward(self, x, cos, sin):
        b, t, c = x.shape
        h = self.norm1(x)
        q, k, v = (
            p(h).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(depth))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.half = width // heads // 2

    def forward(self, tokens):
        rate = 10000 ** -(torch.arange(self.half, device=tokens.device) / self.half)
        angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * rate
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos(), angle.sin()
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def language_model(cls, tiny: bool, training: bool) -> Start:
    batch, length, width, heads, vocabulary = (2, 5, 8, 2, 11) if tiny else (8, 64, 128, 4, 256)
    model = cls(vocabulary, length, width, heads, 2)
    tokens = torch.randint(vocabulary, (batch, length))
    if not training:
        return Start(model, (tokens,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(model, tokens):
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.reshape(-1, vocabulary), tokens[:, 1:].reshape(-1))

    return Start(trainer(model, loss_of, optimizer), (tokens,), (model,))


@program("GPT blocks", "inference", "training")
def gpt(tiny, training):
    return language_model(Gpt, tiny, training)


@program("Llama blocks", "inference", "training")
def llama(tiny, training):
    return language_model(Llama, tiny, training)


# --- diffusion and other generators --------------------------------------------------------------


class Denoiser(nn.Module):
    """An MLP that is told the time by sines; x: [B, D], t: [B]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.into, self.time = nn.Linear(width, hidden), nn.Linear(hidden, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.out = nn.Linear(hidden, width)
        self.half = hidden // 2

    def forward(self, x, t):
        rate = torch.exp(-math.log(10000.0) * torch.arange(self.half, device=x.device) / self.half)
        angle = t[:, None].float() * rate[None]
        when = F.silu(self.time(torch.cat([angle.sin(), angle.cos()], dim=-1)))
        h = F.silu(self.into(x))
        for layer in self.layers:
            h = h + F.silu(layer(h) + when)
        return self.out(h)


def noise_schedule():
    """What is left of the signal after each of 1,000 steps; [1000]."""
    return torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), dim=0)


@program("DDIM sampling")
def ddim(tiny, training):
    batch, width, hidden = (4, 6, 8) if tiny else (256, 64, 128)
    model = Denoiser(width, hidden)

    def step(x, kept):
        for t in range(999, 0, -500 if tiny else -200):
            now, after = kept[t], kept[max(t - 200, 0)]
            times = torch.full((x.shape[0],), t, device=x.device)
            eps = model(x, times)
            clean = ((x - (1 - now).sqrt() * eps) / now.sqrt()).clamp(-3, 3)
            sigma = 0.2 * ((1 - after) / (1 - now)).sqrt() * (1 - now / after).sqrt()
            towards = (1 - after - sigma**2).sqrt() * eps
            x = after.sqrt() * clean + towards + sigma * torch.randn_like(x)
        return x

    return Start(step, (torch.randn(batch, width), noise_schedule()))


@program("DDPM", "training")
def ddpm(tiny, training):
    batch, width, hidden = (4, 6, 8) if tiny else (256, 64, 128)
    model = Denoiser(width, hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(model, x, kept):
        t = torch.randint(0, 1000, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        share = kept[t].unsqueeze(1)
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        signal = share / (1 - share)
        weight = torch.minimum(signal, torch.full_like(signal, 5.0)) / signal
        return (weight * (model(noisy, t) - noise) ** 2).mean()

    return Start(trainer(model, loss_of, optimizer), (torch.randn(batch, width), noise_schedule()),
                 (model,))  # fmt: skip


class Autoencoder(nn.Module):
    def __init__(self, width: int, hidden: int, code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(width, hidden), nn.ELU(), nn.Linear(hidden, 2 * code)
        )
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ELU(), nn.Linear(hidden, width))

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        return self.decoder(z), mean, log_var


@program("variational autoencoder", "training")
def vae(tiny, training):
    batch, width, hidden, code = (4, 6, 8, 2) if tiny else (256, 256, 128, 16)
    model = Autoencoder(width, hidden, code)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(model, x):
        logits, mean, log_var = model(x)
        bce = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        kl = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
        return (bce + kl) / x.shape[0]

    return Start(trainer(model, loss_of, optimizer), (torch.rand(batch, width),), (model,))


class Coupling(nn.Module):
    """A layer of a real-valued flow: one half scales and shifts the other."""

    def __init__(self, width: int, hidden: int, flip: bool) -> None:
        super().__init__()
        half = width // 2
        self.net = nn.Sequential(nn.Linear(half, hidden), nn.Tanh(), nn.Linear(hidden, width))
        self.flip = flip

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        log_scale, shift = self.net(a).chunk(2, dim=1)
        log_scale = 2.0 * torch.tanh(log_scale / 2.0)
        b = b * torch.exp(log_scale) + shift
        return torch.cat([b, a] if self.flip else [a, b], dim=1), log_scale.sum(1)


@program("normalizing flow", "training")
def flow(tiny, training):
    batch, width, hidden = (4, 6, 8) if tiny else (256, 16, 64)
    model = nn.ModuleList(Coupling(width, hidden, k % 2 == 1) for k in range(4))
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3)

    def loss_of(model, x):
        total = torch.zeros(x.shape[0], device=x.device)
        for layer in model:
            x, log_det = layer(x)
            total += log_det
        log_prob = -0.5 * (x**2 + math.log(2 * math.pi)).sum(dim=1)
        return -(log_prob + total).mean()

    return Start(trainer(model, loss_of, optimizer), (torch.randn(batch, width),), (model,))


# --- images and scenes ---------------------------------------------------------------------------


class ResBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.squeeze, self.excite = nn.Linear(channels, 4), nn.Linear(4, channels)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        y = y * gate[:, :, None, None]
        y += x
        return F.relu(y, inplace=True)


@program("residual blocks of an image net", "inference", "training")
def resnet(tiny, training):
    batch, channels, size = (2, 4, 6) if tiny else (16, 32, 32)
    blocks = [ResBlock(channels) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    x, y = torch.randn(batch, channels, size, size), torch.randint(10, (batch,))
    if not training:
        return Start(model.eval(), (x,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    step = trainer(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer)
    return Start(step, (x, y), (model,))


@program("radiance field", "training")
def radiance(tiny, training):
    """Rays through a small field of colour and density, rendered by alpha compositing."""
    rays, points, hidden = (3, 4, 8) if tiny else (256, 32, 64)
    model = nn.Sequential(nn.Linear(39, hidden), nn.ReLU(), nn.Linear(hidden, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    def loss_of(model, origin, direction, colour):
        depth = torch.linspace(2.0, 6.0, points, device=origin.device).expand(rays, points)
        depth = depth + torch.rand_like(depth) * (4.0 / points)
        where = origin[:, None] + direction[:, None] * depth[..., None]
        parts = [where]
        for k in range(6):
            parts += [torch.sin(2.0**k * where), torch.cos(2.0**k * where)]
        raw = model(torch.cat(parts, dim=-1))
        apart = torch.cat([depth[:, 1:] - depth[:, :-1], torch.full_like(depth[:, :1], 1e10)], -1)
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * apart)
        clear = torch.cumprod(1.0 - alpha + 1e-10, dim=-1)
        weights = alpha * torch.cat([torch.ones_like(clear[:, :1]), clear[:, :-1]], dim=-1)
        seen = (weights[..., None] * torch.sigmoid(raw[..., :3])).sum(1)
        return ((seen - colour) ** 2).mean()

    batch = torch.randn(rays, 3), F.normalize(torch.randn(rays, 3), dim=1), torch.rand(rays, 3)
    return Start(trainer(model, loss_of, optimizer), batch, (model,))


# --- graphs and splines --------------------------------------------------------------------------


class GatedGraph(nn.Module):
    """Messages along edges, summed where they arrive, into a gated cell; x: [N, D]."""

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__()
        self.message = nn.Linear(2 * width, width)
        self.cell = nn.GRUCell(width, width)
        self.gate, self.out = nn.Linear(width, 1), nn.Linear(width, 4)
        self.rounds = rounds

    def forward(self, x, sources, targets):
        h = x
        for _ in range(self.rounds):
            m = F.leaky_relu(self.message(torch.cat([h[sources], h[targets]], dim=-1)), 0.1)
            summed = torch.zeros_like(h).index_add(0, targets, m)
            h = self.cell(summed, h)
        return (torch.sigmoid(self.gate(h)) * torch.tanh(self.out(h))).sum(0)


@program("gated graph net", "inference", "training")
def graph(tiny, training):
    nodes, edges, width = (5, 9, 6) if tiny else (512, 2048, 64)
    model = GatedGraph(width, 2 if tiny else 4)
    x, ends = torch.randn(nodes, width), torch.randint(nodes, (2, edges))
    if not training:
        return Start(model, (x, ends[0], ends[1]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    target = torch.randn(4)

    def loss_of(model, x, sources, targets, target):
        return F.huber_loss(model(x, sources, targets), target)

    return Start(trainer(model, loss_of, optimizer), (x, ends[0], ends[1], target), (model,))


class SplineLayer(nn.Module):
    """A Kolmogorov-Arnold layer with quadratic B-splines by the recursion of Cox and de Boor."""

    def __init__(self, inputs: int, outputs: int, cells: int = 5) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.coefficients = nn.Parameter(torch.randn(outputs, inputs * (cells + 2)) * 0.05)
        self.register_buffer("knots", torch.arange(-2.0, cells + 3) * (2 / cells) - 1)

    def forward(self, x):
        knots, z = self.knots, x.unsqueeze(-1)
        basis = ((z >= knots[:-1]) & (z < knots[1:])).to(x.dtype)
        for k in (1, 2):
            up = (z - knots[: -(k + 1)]) / (knots[k:-1] - knots[: -(k + 1)])
            down = (knots[k + 1 :] - z) / (knots[k + 1 :] - knots[1:-k])
            basis = up * basis[..., :-1] + down * basis[..., 1:]
        return self.base(F.silu(x)) + F.linear(basis.flatten(1), self.coefficients)


@program("spline net", "training")
def splines(tiny, training):
    batch, width = (4, 3) if tiny else (256, 32)
    model = nn.Sequential(SplineLayer(width, width), SplineLayer(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.rand(batch, width) * 2 - 1
    return Start(trainer(model, lambda m, x, y: F.mse_loss(m(x), y), optimizer),
                 (x, torch.sin(3 * x.sum(1, keepdim=True))), (model,))  # fmt: skip


# --- of other packages ---------------------------------------------------------------------------


def classifier(model: nn.Module, x: torch.Tensor, classes: int) -> Start:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = trainer(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer)
    return Start(step, (x, torch.randint(classes, (len(x),))), (model,))


@program("torchvision's BasicBlock", "inference", "training", needs="torchvision")
def basic_block(tiny, training):
    from torchvision.models.resnet import BasicBlock

    batch, channels, size = (2, 4, 6) if tiny else (16, 64, 32)
    block = BasicBlock(channels, channels)
    x = torch.randn(batch, channels, size, size)
    if not training:
        return Start(block.eval(), (x,))
    head = nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return classifier(head, x, 10)


@program("timm's vision transformer", "inference", "training", needs="timm")
def vision_transformer(tiny, training):
    from timm.models.vision_transformer import VisionTransformer

    batch, size, width = (2, 16, 8) if tiny else (8, 32, 96)
    model = VisionTransformer(img_size=size, patch_size=4, embed_dim=width, depth=2, num_heads=2,
                              num_classes=10, init_values=0.1)  # fmt: skip
    x = torch.randn(batch, 3, size, size)
    return classifier(model, x, 10) if training else Start(model.eval(), (x,))


@program("transformers' GPT-2", "inference", "training", needs="transformers")
def gpt2(tiny, training):
    from transformers import GPT2Config, GPT2LMHeadModel

    batch, length, width = (2, 5, 8) if tiny else (8, 64, 128)
    config = GPT2Config(vocab_size=97, n_positions=length, n_embd=width, n_layer=2, n_head=2,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    model, tokens = GPT2LMHeadModel(config), torch.randint(97, (batch, length))
    if not training:
        model.eval()
        return Start(lambda t: model(t).logits, (tokens,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Start(trainer(model, lambda m, t: m(t, labels=t).loss, optimizer), (tokens,), (model,))


@program("torch_geometric's gated graph", "inference", needs="torch_geometric")
def gated_graph_conv(tiny, training):
    from torch_geometric.nn import GatedGraphConv

    nodes, edges, width = (5, 9, 6) if tiny else (512, 2048, 64)
    net = GatedGraphConv(width, 3).to(torch.get_default_device())  # some of it is made on the CPU
    return Start(net, (torch.randn(nodes, width), torch.randint(nodes, (2, edges))))


@program("torchdiffeq's odeint", "inference", needs="torchdiffeq")
def odeint(tiny, training):
    from torchdiffeq import odeint as solve

    def step(y, times):
        return solve(lambda t, y: torch.stack((y[:, 1], -torch.sin(y[:, 0])), 1), y, times)

    return Start(step, (torch.randn(8 if tiny else 1024, 2), torch.linspace(0.0, 1.0, 5)))
