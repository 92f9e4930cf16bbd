"""Programs of many kinds that lost most, or by another cause than the others, when they were first
run. Plain PyTorch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo_row import Start, program, trainer


def FeedForward(dim, expansion=4, dropout=0.0, dense=nn.Linear):
    inner = int(dim * expansion)
    return nn.Sequential(
        dense(dim, inner), nn.GELU(), nn.Dropout(dropout), dense(inner, dim), nn.Dropout(dropout)
    )


class PreNormResidual(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.fn(self.norm(x)) + x


def softmax_kernel(data, projection, is_query, eps=1e-4):
    """Performer's positive random features."""
    data_normalizer = data.shape[-1] ** -0.25
    ratio = projection.shape[0] ** -0.5
    data_dash = torch.einsum("bhid,jd->bhij", data_normalizer * data, projection)
    diag = ((data**2).sum(-1) / 2.0 * data_normalizer**2).unsqueeze(-1)
    if is_query:
        peak = torch.amax(data_dash, dim=-1, keepdim=True).detach()
    else:
        peak = torch.amax(data_dash, dim=(-1, -2), keepdim=True).detach()
    return ratio * (torch.exp(data_dash - diag - peak) + eps)


class Performer(nn.Module):
    def __init__(self, dim, heads, features):
        super().__init__()
        self.h = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)
        d = dim // heads
        blocks = []
        for _ in range(math.ceil(features / d)):
            q, _ = torch.linalg.qr(torch.randn(d, d))
            blocks.append(q.t())
        proj = torch.cat(blocks)[:features]
        self.register_buffer("projection", torch.randn(features, d).norm(dim=1)[:, None] * proj)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = [t.view(b, n, self.h, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1)]
        q = softmax_kernel(q, self.projection, True)
        k = softmax_kernel(k, self.projection, False)
        # causal, by sums of prefixes
        k_cumsum = k.cumsum(dim=-2)
        context = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(dim=-3)
        D_inv = 1.0 / torch.einsum("...nd,...nd->...n", q, k_cumsum)
        out = torch.einsum("...nde,...nd,...n->...ne", context, q, D_inv)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


@program("causal linear attention", "inference", "training")
def performer(tiny, training):
    b, n, dim, h, m = (2, 5, 8, 2, 4) if tiny else (4, 64, 128, 4, 32)
    layers = nn.ModuleList([PreNormResidual(dim, Performer(dim, h, m)) for _ in range(2)])

    def run(x):
        for layer in layers:
            x = layer(x)
        return x

    x = torch.randn(b, n, dim)
    if not training:
        return Start(run, (x,))
    opt = torch.optim.Adam(layers.parameters(), 1e-3)
    return Start(
        trainer(layers, lambda _, x: F.mse_loss(run(x)[:, :-1], x[:, 1:]), opt), (x,), (layers,)
    )


class WindowAttention(nn.Module):
    """Swin's, with relative position bias and shift masks."""

    def __init__(self, dim, window, heads, shift, resolution):
        super().__init__()
        self.dim, self.ws, self.heads, self.shift = dim, window, heads, shift
        self.scale = (dim // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        coords = torch.stack(torch.meshgrid([torch.arange(window)] * 2, indexing="ij")).flatten(1)
        rel = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        rel[:, :, 0] += window - 1
        rel[:, :, 1] += window - 1
        rel[:, :, 0] *= 2 * window - 1
        self.register_buffer("relative_position_index", rel.sum(-1))
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        mask = None
        if shift > 0:
            img = torch.zeros((1, resolution, resolution, 1))
            cnt = 0
            slices = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
            for h in slices:
                for w in slices:
                    img[:, h, w, :] = cnt
                    cnt += 1
            mw = self.partition(img).view(-1, window * window)
            mask = mw.unsqueeze(1) - mw.unsqueeze(2)
            mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        self.register_buffer("attn_mask", mask)

    def partition(self, x):
        B, H, W, C = x.shape
        x = x.view(B, H // self.ws, self.ws, W // self.ws, self.ws, C)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, self.ws, self.ws, C)

    def forward(self, x):
        B, H, W, C = x.shape
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        xw = self.partition(x).view(-1, self.ws * self.ws, C)
        B_, N, _ = xw.shape
        qkv = self.qkv(xw).reshape(B_, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        attn = attn + bias.view(N, N, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.attn_mask is not None:
            nW = self.attn_mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.heads, N, N)
            attn = attn + self.attn_mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.heads, N, N)
        xw = self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B_, N, C))
        xw = xw.view(B, H // self.ws, W // self.ws, self.ws, self.ws, -1)
        x = xw.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        return x


class SwinBlock(nn.Module):
    def __init__(self, dim, window, heads, shift, resolution):
        super().__init__()
        self.attn = WindowAttention(dim, window, heads, shift, resolution)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = FeedForward(dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@program("shifted windows", "inference", "training")
def swin(tiny, training):
    B, R, D, ws, nh = (1, 4, 4, 2, 2) if tiny else (4, 16, 96, 4, 3)
    net = nn.Sequential(SwinBlock(D, ws, nh, 0, R), SwinBlock(D, ws, nh, ws // 2, R))
    x = torch.randn(B, R, R, D)
    if not training:
        return Start(net.eval(), (x,))
    head = nn.Linear(D, 10)
    opt = torch.optim.AdamW(list(net.parameters()) + list(head.parameters()), lr=5e-4)
    both = nn.ModuleList([net, head])
    return Start(
        trainer(both, lambda m, x, y: F.cross_entropy(m[1](m[0](x).mean((1, 2))), y), opt),
        (x, torch.randint(10, (B,))),
        (both,),
    )


class ChannelGate(nn.Module):
    """CBAM: attention over channels."""

    def __init__(self, ch, reduction=4):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Flatten(), nn.Linear(ch, ch // reduction), nn.ReLU(), nn.Linear(ch // reduction, ch)
        )

    def forward(self, x):
        total = None
        for pool in ("avg", "max", "lse"):
            if pool == "avg":
                raw = self.mlp(F.avg_pool2d(x, (x.size(2), x.size(3))))
            elif pool == "max":
                raw = self.mlp(F.max_pool2d(x, (x.size(2), x.size(3))))
            else:
                flat = x.view(x.size(0), x.size(1), -1)
                s, _ = torch.max(flat, dim=2, keepdim=True)
                raw = self.mlp(s + (flat - s).exp().sum(dim=2, keepdim=True).log())
            total = raw if total is None else total + raw
        return x * torch.sigmoid(total).unsqueeze(2).unsqueeze(3).expand_as(x)


class SpatialGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)
        self.bn = nn.BatchNorm2d(1, eps=1e-5, momentum=0.01)

    def forward(self, x):
        z = torch.cat((torch.max(x, 1)[0].unsqueeze(1), torch.mean(x, 1).unsqueeze(1)), dim=1)
        return x * torch.sigmoid(self.bn(self.conv(z)))


class ECA(nn.Module):
    def __init__(self, k=3):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, k, padding=(k - 1) // 2, bias=False)

    def forward(self, x):
        y = F.adaptive_avg_pool2d(x, 1)
        y = self.conv(y.squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        return x * y.sigmoid().expand_as(x)


@program("channel attention", "inference", "training")
def cbam(tiny, training):
    B, ch, S = (2, 8, 6) if tiny else (8, 64, 28)
    trunk = nn.Sequential(
        nn.Conv2d(ch, ch, 3, padding=1, groups=ch),
        nn.Conv2d(ch, ch, 1),
        nn.Hardswish(),
        ChannelGate(ch),
        SpatialGate(),
        ECA(),
    )
    x = torch.randn(B, ch, S, S)
    if not training:
        trunk.eval()
        return Start(lambda x: x + trunk(x), (x,))
    opt = torch.optim.NAdam(trunk.parameters(), lr=1e-3)
    return Start(trainer(trunk, lambda m, x: (m(x) - x.flip(-1)).abs().mean(), opt), (x,), (trunk,))


def pairwise_distances(embeddings, squared=False):
    dot = torch.matmul(embeddings, embeddings.t())
    sq = torch.diag(dot)
    distances = sq.unsqueeze(0) - 2.0 * dot + sq.unsqueeze(1)
    distances[distances < 0] = 0
    if not squared:
        mask = distances.eq(0).float()
        distances = distances + mask * 1e-16
        distances = (1.0 - mask) * torch.sqrt(distances)
    return distances


@program("hardest triplets", "training")
def triplet(tiny, training):
    B, D, E, C = (6, 5, 4, 2) if tiny else (128, 64, 32, 16)
    net = nn.Sequential(nn.Linear(D, 2 * E), nn.PReLU(), nn.Linear(2 * E, E))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(x, labels):
        emb = F.normalize(net(x))
        d = pairwise_distances(emb)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        eye = torch.eye(labels.size(0), device=labels.device).bool()
        anchor_positive = d * (same & ~eye).float()
        hardest_pos = anchor_positive.max(1, keepdim=True)[0]
        max_neg, _ = d.max(1, keepdim=True)
        hardest_neg, _ = (d + max_neg * same.float()).min(1, keepdim=True)
        tl = F.relu(hardest_pos - hardest_neg + 0.2)
        active = tl > 1e-16
        num = active.sum()
        loss = tl[active].sum() / (num.float() + 1e-16)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach(), num / labels.numel()

    return Start(step, (torch.randn(B, D), torch.arange(B) % C), (net,))


@program("Cahn-Hilliard by FFT")
def cahn_hilliard(tiny, training):
    n = 16 if tiny else 128
    k = 2 * math.pi * torch.fft.fftfreq(n)
    kx, ky = k[:, None], torch.fft.rfftfreq(n)[None, :] * 2 * math.pi
    k2 = kx**2 + ky**2
    dealias = (kx.abs() < 2 / 3 * math.pi) & (ky.abs() < 2 / 3 * math.pi)
    M, kappa, dt = 1.0, 0.5, 0.1
    denominator = 1 + dt * M * kappa * k2**2 + dt * M * 2 * k2

    def step(c):
        c_hat = torch.fft.rfft2(c)
        for _ in range(2 if tiny else 8):
            mu = c**3 - c - 2 * c
            mu_hat = torch.fft.rfft2(mu) * dealias
            c_hat = (c_hat - dt * M * k2 * mu_hat) / denominator
            c = torch.fft.irfft2(c_hat, s=(n, n))
        energy = 0.25 * ((c**2 - 1) ** 2).mean()
        return c, energy

    return Start(step, (0.05 * torch.randn(n, n),), feeds=1)


@program("JPEG's blocks")
def jpeg(tiny, training):
    n = 16 if tiny else 256
    k = torch.arange(8.0)
    D = torch.cos((2 * k[None] + 1) * k[:, None] * math.pi / 16) * 0.5
    D[0] /= math.sqrt(2)
    Q = 8 + 5 * (k[:, None] + k[None])
    zigzag = torch.argsort((k[:, None] + k[None]).flatten() * 10 + k.repeat(8) * 0.1)

    def step(img, quality):
        x = (img * 255 - 128).unfold(1, 8, 8).unfold(2, 8, 8)
        c = D @ x @ D.T
        q = torch.round(c / (Q * quality))
        kept = q.to(torch.int16)
        flat = kept.flatten(-2)[..., zigzag]
        nz = (flat != 0).long()
        last = (nz * torch.arange(1, 65, device=img.device)).amax(-1)
        bits = (flat.abs().float() + 1).log2().ceil().sum() + last.sum()
        y = D.T @ (kept.float() * Q * quality) @ D
        out = y.permute(0, 1, 3, 2, 4).reshape(img.shape)
        out = ((out + 128) / 255).clamp(0, 1)
        return out, bits, 10 * torch.log10(1 / F.mse_loss(out, img))

    return Start(step, (torch.rand(3, n, n), torch.tensor(1.5)))


@program("Stein variational gradients")
def svgd(tiny, training):
    n, d = (6, 2) if tiny else (256, 4)
    means = torch.randn(3, d) * 2

    def score(x):
        diff = means[None] - x[:, None]
        w = torch.softmax(-0.5 * diff.pow(2).sum(-1), dim=1)
        return (w.unsqueeze(-1) * diff).sum(1)

    def step(x, hist):
        for _ in range(1 if tiny else 5):
            sq = torch.cdist(x, x) ** 2
            h = (sq.median() / math.log(n + 1)).clamp(min=1e-3)
            K = torch.exp(-sq / h)
            repulse = (x * K.sum(1, keepdim=True) - K @ x) * 2 / h
            phi = (K @ score(x) + repulse) / n
            hist = 0.9 * hist + 0.1 * phi**2
            x = x + 0.05 * phi / (1e-6 + hist.sqrt())
        return x, hist

    return Start(step, (torch.randn(n, d), torch.ones(n, d)), feeds=2)
