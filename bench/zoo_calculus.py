"""Programs that ask more of autograd, of distributions and of precision. Plain PyTorch."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

from zoo_learning import mlp
from zoo_row import Start, program, trainer

# --- derivatives of derivatives ------------------------------------------------------------------


@program("gradient penalty", "training")
def gradient_penalty(tiny, training):
    """A critic of real and made samples whose slope between them is held at one."""
    batch, width = (4, 6) if tiny else (256, 64)
    critic, maker = mlp(2, width, width, 1, act=nn.Softplus), mlp(8, width, 2, act=nn.SELU)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.5, 0.9))

    def loss_of(critic, real, noise):
        made = maker(noise).detach()
        share = torch.rand(len(real), 1, device=real.device)
        between = (share * real + (1 - share) * made).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        return critic(made).mean() - critic(real).mean() + 10 * penalty

    batch_of = torch.randn(batch, 2), torch.randn(batch, 8)
    return Start(trainer(critic, loss_of, optimizer), batch_of, (critic,))


@program("physics-informed net", "training")
def informed(tiny, training):
    """Burgers' equation as a loss: first and second derivatives of a net by its inputs."""
    count, width = (4, 6) if tiny else (1024, 32)
    model = mlp(2, width, width, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(model, x, t, x0, u0):
        x, t = x.requires_grad_(True), t.requires_grad_(True)
        u = model(torch.cat([x, t], dim=1))
        ones = torch.ones_like(u)
        u_x, u_t = torch.autograd.grad(u, (x, t), ones, create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x, x, ones, create_graph=True)
        residual = u_t + u * u_x - 0.01 / math.pi * u_xx
        start = model(torch.cat([x0, torch.zeros_like(x0)], dim=1)) - u0
        return (residual**2).mean() + (start**2).mean()

    x, t, x0 = (torch.rand(count, 1) * 2 - 1 for _ in range(3))
    state = x, t.abs(), x0, -torch.sin(math.pi * x0)
    return Start(trainer(model, loss_of, optimizer), state, (model,))


@program("Hamiltonian net", "training")
def hamiltonian(tiny, training):
    """The flow of a learned energy, integrated by leapfrog, against a path that was seen."""
    batch, width = (4, 6) if tiny else (256, 32)
    model = mlp(2, width, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def flow(model, q, p):
        both = torch.stack((q, p), dim=1)
        if not both.requires_grad:
            both.requires_grad_(True)
        (slope,) = torch.autograd.grad(model(both).sum(), both, create_graph=True)
        return slope[:, 1], -slope[:, 0]

    def loss_of(model, q, p, q_seen, p_seen):
        for _ in range(3):
            p = p + 0.05 * flow(model, q, p)[1]
            q = q + 0.1 * flow(model, q, p)[0]
            p = p + 0.05 * flow(model, q, p)[1]
        return ((q - q_seen) ** 2 + (p - p_seen) ** 2).mean()

    state = tuple(torch.randn(batch) for _ in range(4))
    return Start(trainer(model, loss_of, optimizer), state, (model,))


@program("MAML", "training")
def maml(tiny, training):
    """Two inner steps of gradient descent per task, differentiated through."""
    tasks, shots, width = (2, 3, 6) if tiny else (4, 20, 40)
    model = mlp(1, width, width, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(x, y, x_new, y_new):
        total = 0.0
        for k in range(tasks):
            fast = dict(model.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(functional_call(model, fast, (x[k],)), y[k])
                slopes = torch.autograd.grad(loss, tuple(fast.values()), create_graph=True)
                fast = {
                    name: w - 0.01 * g
                    for (name, w), g in zip(fast.items(), slopes, strict=True)
                }  # fmt: skip
            total = total + F.mse_loss(functional_call(model, fast, (x_new[k],)), y_new[k])
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return total.detach()

    def points():
        x = torch.rand(tasks, shots, 1) * 10 - 5
        return x, torch.sin(x)

    return Start(step, (*points(), *points()), (model,))


@program("option prices and their slopes", grad=True)
def greeks(tiny, training):
    """Black and Scholes' price of many options; delta, gamma and vega by autograd."""
    count = 8 if tiny else 65536

    def step(spot, strike, time, volatility, rate=0.02):
        spot, volatility = (t.clone().requires_grad_(True) for t in (spot, volatility))
        spread = volatility * time.sqrt()
        d1 = (torch.log(spot / strike) + (rate + volatility**2 / 2) * time) / spread
        d2 = d1 - spread
        normal = [0.5 * (1 + torch.erf(d / math.sqrt(2))) for d in (d1, d2)]
        price = spot * normal[0] - strike * torch.exp(-rate * time) * normal[1]
        delta, vega = torch.autograd.grad(price.sum(), (spot, volatility), create_graph=True)
        (gamma,) = torch.autograd.grad(delta.sum(), spot)
        return price.detach(), delta.detach(), vega.detach(), gamma

    def between(low, high):
        return torch.rand(count) * (high - low) + low

    return Start(step, (between(80, 120), between(80, 120), between(0.1, 2), between(0.1, 0.5)))


# --- other ways through autograd -----------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """Rounding whose gradient passes straight through, within the range that is kept."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return torch.clamp(torch.round(x / scale), -8, 7) * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        inside = ((x / scale) > -8.5) & ((x / scale) < 7.5)
        return grad * inside, None


@program("quantization-aware layers", "training")
def quantized(tiny, training):
    batch, width = (4, 6) if tiny else (128, 128)
    model = mlp(width, width, width, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_of(model, x, y):
        for layer in model:
            if isinstance(layer, nn.Linear):
                scale = layer.weight.detach().abs().max() / 7
                x = F.linear(Rounded.apply(x, scale * 4), Rounded.apply(layer.weight, scale))
                x = x + layer.bias
            else:
                x = layer(x)
        return F.cross_entropy(x, y)

    return Start(trainer(model, loss_of, optimizer),
                 (torch.randn(batch, width), torch.randint(10, (batch,))), (model,))  # fmt: skip


class Feed(nn.Module):
    """A gated block, whose backward may compute it again."""

    def __init__(self, width: int, again: bool) -> None:
        super().__init__()
        self.again = again
        self.norm, self.into = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.out, self.scale = nn.Linear(2 * width, width), nn.Parameter(torch.full((width,), 0.1))

    def run(self, x):
        a, b = self.into(self.norm(x)).chunk(2, -1)
        return x + self.scale * F.dropout(self.out(F.gelu(a) * torch.sigmoid(b)), 0.1)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.again else self.run(x)


@program("checkpointed blocks", "training")
def checkpointed(tiny, training):
    batch, width = (4, 6) if tiny else (512, 64)
    model = nn.Sequential(*(Feed(width, again=True) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = trainer(model, lambda m, x, y: F.smooth_l1_loss(m(x), y), optimizer)
    return Start(step, (torch.randn(batch, width), torch.randn(batch, width)), (model,))


@program("mixed precision", "training")
def mixed_precision(tiny, training):
    """Autocast to bfloat16, gradients accumulated over two halves and clipped by hand."""
    batch, width = (4, 6) if tiny else (256, 128)
    model = nn.Sequential(*(Feed(width, again=False) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x, y):
        optimizer.zero_grad()
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.autocast(x.device.type, torch.bfloat16):
                loss = ((model(a) - b) ** 2).mean() / 2
            loss.backward()
        total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.mul_((1.0 / (total + 1e-6)).clamp(max=1.0))
        optimizer.step()
        return loss.detach(), total

    return Start(step, (torch.randn(batch, width), torch.randn(batch, width)), (model,))


@program("ensemble by vmap")
def ensemble(tiny, training):
    """Predictions of several nets at once, and each sample's gradient by its input."""
    batch, width, members = (4, 6, 2) if tiny else (128, 32, 4)
    nets = [mlp(4, width, 1, act=nn.SiLU) for _ in range(members)]
    params, buffers = stack_module_state(nets)
    base = copy.deepcopy(nets[0])

    def one(params, buffers, x):
        return functional_call(base, (params, buffers), (x,)).squeeze(-1)

    def step(x):
        guesses = vmap(one, in_dims=(0, 0, None))(params, buffers, x)
        mean, spread = guesses.mean(0), guesses.std(0)
        slope = vmap(grad(lambda x: one({k: v[0] for k, v in params.items()}, {}, x)))(x)
        return mean, torch.tanh(spread * 2.0) + 0.1, slope * torch.sigmoid(mean)[:, None]

    return Start(step, (torch.randn(batch, 4),))


# --- distributions -------------------------------------------------------------------------------


@program("policy gradient by distributions", "training")
def policy_gradient(tiny, training):
    batch, width = (4, 6) if tiny else (512, 64)
    model = mlp(8, width, 5, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(model, state, action, gain, old_logits):
        policy, old = Categorical(logits=model(state)), Categorical(logits=old_logits)
        ratio = torch.exp(policy.log_prob(action) - old.log_prob(action))
        kept = torch.clamp(ratio, 0.8, 1.2)
        loss = -torch.minimum(ratio * gain, kept * gain)
        return (loss + 0.5 * kl_divergence(old, policy) - 0.01 * policy.entropy()).mean()

    state = (torch.randn(batch, 8), torch.randint(5, (batch,)), torch.randn(batch),
             torch.randn(batch, 5))  # fmt: skip
    return Start(trainer(model, loss_of, optimizer), state, (model,))


@program("world model in latent space", "training")
def world_model(tiny, training):
    """A recurrent state with a normal prior and posterior, sampled and compared at every step."""
    steps, batch, width = (2, 3, 6) if tiny else (8, 64, 64)
    model = nn.ModuleDict({
        "cell": nn.GRUCell(width + 4, width), "prior": nn.Linear(width, 2 * width),
        "posterior": nn.Linear(2 * width, 2 * width), "decoder": nn.Linear(2 * width, width),
    })  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def normal(out):
        mean, raw = out.chunk(2, -1)
        return Normal(mean, F.softplus(raw) + 0.1)

    def loss_of(model, seen, actions):
        h = torch.zeros(batch, width, device=seen.device)
        z, total = torch.zeros_like(h), torch.zeros((), device=seen.device)
        for t in range(steps):
            h = model["cell"](torch.cat([z, actions[t]], -1), h)
            prior = normal(model["prior"](h))
            posterior = normal(model["posterior"](torch.cat([h, seen[t]], -1)))
            z = posterior.rsample()
            guess = Normal(model["decoder"](torch.cat([h, z], -1)), 1.0)
            divergence = kl_divergence(posterior, prior).sum(-1)
            total = total + torch.clamp(divergence, min=1.0).mean()
            total = total - guess.log_prob(seen[t]).sum(-1).mean()
        return total / steps

    return Start(trainer(model, loss_of, optimizer),
                 (torch.randn(steps, batch, width), torch.randn(steps, batch, 4)),
                 (model,))  # fmt: skip


@program("sampling of tokens")
def sampling(tiny, training):
    """Temperature, repetition penalty, top-k and top-p, then a draw by the Gumbel trick."""
    batch, vocabulary = (3, 11) if tiny else (32, 4096)

    def step(logits, seen, temperature=0.8, k=5, p=0.9):
        for _ in range(2):
            scores = torch.where(seen, torch.where(logits > 0, logits / 1.2, logits * 1.2), logits)
            scores = scores / temperature
            least = scores.topk(k if tiny else 50, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -float("inf"))
            ordered, order = scores.sort(dim=-1, descending=True)
            chance = ordered.softmax(dim=-1)
            cut = chance.cumsum(-1) - chance > p
            scores = scores.masked_fill(cut.scatter(1, order, cut), -float("inf"))
            noise = -torch.log(-torch.log(torch.rand_like(scores).clamp(1e-9, 1 - 1e-6)))
            token = (scores.log_softmax(-1) + noise).argmax(-1, keepdim=True)
            seen = seen.scatter(1, token, True)
        return token, seen

    seen = torch.rand(batch, vocabulary) < 0.1
    return Start(step, (torch.randn(batch, vocabulary) * 3, seen))


@program("optimal transport by Sinkhorn", "training")
def sinkhorn(tiny, training):
    """Points moved so that their entropic distance to a target shrinks; log domain."""
    count, rounds = (4, 2) if tiny else (128, 10)
    cloud = nn.ParameterList([torch.randn(count, 2)])
    optimizer = torch.optim.SGD(cloud.parameters(), lr=0.1)

    def loss_of(cloud, target, eps=0.5):
        x = cloud[0]
        cost = ((x[:, None] - target[None]) ** 2).sum(-1)
        f, g = torch.zeros_like(x[:, 0]), torch.zeros_like(target[:, 0])
        share = -math.log(count)
        for _ in range(rounds):
            f = -eps * torch.logsumexp((g[None] - cost) / eps + share, dim=1)
            g = -eps * torch.logsumexp((f[:, None] - cost) / eps + share, dim=0)
        plan = torch.exp((f[:, None] + g[None] - cost) / eps + 2 * share)
        return (plan * cost).sum()

    return Start(trainer(cloud, loss_of, optimizer), (torch.randn(count, 2) + 2,), (cloud,))


@program("Kalman filters")
def kalman(tiny, training):
    """A batch of filters of a place and a speed, two by two matrices written out."""
    count = 8 if tiny else 8192

    def step(place, speed, a, b, c, seen):
        for k in range(seen.shape[0]):
            place, (a, b, c) = place + 0.1 * speed, (a + 0.2 * b + 0.01 * c + 1e-3, b + 0.1 * c, c)
            c = c + 1e-2
            error, noise = seen[k] - place, a + 0.25
            gain1, gain2 = a / noise, b / noise
            place, speed = place + gain1 * error, speed + gain2 * error
            a, b, c = (1 - gain1) * a, (1 - gain1) * b, c - gain2 * b
        return place, speed, a, b, c

    start = (torch.zeros(count), torch.zeros(count), torch.ones(count), torch.zeros(count),
             torch.ones(count))  # fmt: skip
    return Start(step, (*start, torch.randn(3 if tiny else 16, count).cumsum(0) * 0.1), feeds=5)
