"""Programs around learning: losses, updates, optimizers by hand, augmentation. Plain PyTorch."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo_row import Start, program, trainer


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


# --- reinforcement learning ----------------------------------------------------------------------


@program("GAE loop")
def advantages(tiny, training):
    def step(rewards, values, dones, last_value, gamma=0.99, lam=0.95):
        steps = rewards.shape[0]
        advantage = torch.zeros_like(rewards)
        last = 0
        for t in reversed(range(steps)):
            alive = 1.0 - dones[t]
            after = last_value if t == steps - 1 else values[t + 1]
            delta = rewards[t] + gamma * after * alive - values[t]
            advantage[t] = last = delta + gamma * lam * alive * last
        returns = advantage + values
        return (advantage - advantage.mean()) / (advantage.std() + 1e-8), returns

    length, count = (4, 8) if tiny else (64, 1024)
    dones = (torch.rand(length, count) < 0.05).float()
    return Start(step, (torch.randn(length, count), torch.randn(length, count), dones,
                        torch.randn(count)))  # fmt: skip


class ActorCritic(nn.Module):
    def __init__(self, state: int, action: int, width: int) -> None:
        super().__init__()
        self.actor = mlp(state, width, width, action, act=nn.Tanh)
        self.critic = mlp(state, width, width, 1, act=nn.Tanh)
        self.log_std = nn.Parameter(torch.zeros(action))

    def forward(self, state):
        return self.actor(state), self.log_std.exp(), self.critic(state).squeeze(-1)


@program("PPO update", "training")
def ppo(tiny, training):
    batch, width = (8, 6) if tiny else (1024, 64)
    model = ActorCritic(17, 6, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-5)

    def step(state, action, old_logp, advantage, returns, old_value):
        mean, std, value = model(state)
        logp = (
            -((action - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
        ).sum(-1)
        entropy = (0.5 + 0.5 * math.log(2 * math.pi) + std.log()).sum()
        log_ratio = logp - old_logp
        ratio = log_ratio.exp()
        with torch.no_grad():
            kl = ((ratio - 1) - log_ratio).mean()
            clipped = ((ratio - 1.0).abs() > 0.2).float().mean()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = torch.max(
            -advantage * ratio, -advantage * torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
        ).mean()
        near = old_value + torch.clamp(value - old_value, -0.2, 0.2)
        value_loss = 0.5 * torch.max((value - returns) ** 2, (near - returns) ** 2).mean()
        loss = policy_loss - 0.01 * entropy + 0.5 * value_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach(), kl, clipped

    state = torch.randn(batch, 17), torch.randn(batch, 6), torch.randn(batch) - 8
    return Start(step, (*state, *(torch.randn(batch) for _ in range(3))), (model,))


def follow(slow: nn.Module, fast: nn.Module, tau: float = 0.005) -> None:
    with torch.no_grad():
        for s, f in zip(slow.parameters(), fast.parameters(), strict=True):
            s.data.mul_(1 - tau)
            s.data.add_(tau * f.data)


@program("SAC update", "training")
def sac(tiny, training):
    batch, width = (8, 6) if tiny else (256, 128)
    actor = mlp(17, width, width, 12)
    critics = nn.ModuleList(mlp(23, width, width, 1) for _ in range(2))
    slow = copy.deepcopy(critics)
    temperature = nn.Module()
    temperature.log_alpha = nn.Parameter(torch.zeros(()))
    optimizers = [torch.optim.Adam(m.parameters(), lr=3e-4) for m in (critics, actor, temperature)]

    def sample(state):
        mean, log_std = actor(state).chunk(2, dim=-1)
        log_std = torch.clamp(log_std, -20, 2)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        action = torch.tanh(raw)
        logp = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        logp = logp - 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        return action, logp.sum(-1, keepdim=True)

    def q_values(nets, state, action):
        both = torch.cat([state, action], dim=-1)
        return nets[0](both), nets[1](both)

    def learn(optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def step(state, action, reward, following, done):
        alpha = temperature.log_alpha.exp().detach()
        with torch.no_grad():
            next_action, next_logp = sample(following)
            q = torch.min(*q_values(slow, following, next_action)) - alpha * next_logp
            target = reward + 0.99 * (1 - done) * q
        q1, q2 = q_values(critics, state, action)
        critic_loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
        learn(optimizers[0], critic_loss)
        new_action, logp = sample(state)
        actor_loss = (alpha * logp - torch.min(*q_values(critics, state, new_action))).mean()
        learn(optimizers[1], actor_loss)
        alpha_loss = -(temperature.log_alpha * (logp - 6.0).detach()).mean()
        learn(optimizers[2], alpha_loss)
        follow(slow, critics)
        return critic_loss.detach(), actor_loss.detach(), alpha_loss.detach()

    done = (torch.rand(batch, 1) < 0.1).float()
    state = (torch.randn(batch, 17), torch.randn(batch, 6).tanh(), torch.randn(batch, 1),
             torch.randn(batch, 17), done)  # fmt: skip
    return Start(step, state, (actor, critics, slow, temperature))


@program("TD3 update", "training")
def td3(tiny, training):
    batch, width = (8, 6) if tiny else (256, 128)
    actor, critic = mlp(17, width, 6), mlp(23, width, 1)
    slow_actor, slow_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    optimize = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (actor, critic)]

    def step(state, action, reward, following, done):
        with torch.no_grad():
            noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
            next_action = (torch.tanh(slow_actor(following)) + noise).clamp(-1, 1)
            q = slow_critic(torch.cat([following, next_action], 1))
            target = reward + (1 - done) * 0.99 * q
        critic_loss = F.smooth_l1_loss(critic(torch.cat([state, action], 1)), target)
        optimize[1].zero_grad()
        critic_loss.backward()
        optimize[1].step()
        actor_loss = -critic(torch.cat([state, torch.tanh(actor(state))], 1)).mean()
        optimize[0].zero_grad()
        actor_loss.backward()
        optimize[0].step()
        follow(slow_actor, actor)
        follow(slow_critic, critic)
        return critic_loss.detach(), actor_loss.detach()

    done = (torch.rand(batch, 1) < 0.1).float()
    state = (torch.randn(batch, 17), torch.randn(batch, 6).tanh(), torch.randn(batch, 1),
             torch.randn(batch, 17), done)  # fmt: skip
    return Start(step, state, (actor, critic, slow_actor, slow_critic))


# --- optimizers and averages by hand -------------------------------------------------------------


def weights(tiny: bool) -> list[torch.Tensor]:
    width = 4 if tiny else 128
    shapes = [(width, width), (width,)] * (2 if tiny else 12)
    return [torch.randn(*shape) * 0.1 for shape in shapes]


@program("Adam by hand")
def adam(tiny, training):
    def step(params, grads, means, squares, count):
        count += 1
        for p, g, m, v in zip(params, grads, means, squares, strict=True):
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            m_hat = m / (1 - 0.9**count)
            v_hat = v / (1 - 0.999**count)
            p -= 1e-3 * m_hat / (v_hat.sqrt() + 1e-8)
        return params

    params = weights(tiny)
    zeros = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    grads = [torch.randn_like(p) for p in params]
    return Start(step, (params, grads, *zeros, torch.zeros(())))


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average = state["average"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = average * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


@program("Lion", "training")
def lion(tiny, training):
    batch, width = (4, 6) if tiny else (128, 128)
    model = mlp(width, width, width, width, 10, act=nn.GELU)
    optimizer = Lion(model.parameters())
    x, y = torch.randn(batch, width), torch.randint(10, (batch,))
    step = trainer(model, lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1), optimizer)
    return Start(step, (x, y), (model,))


@program("average of weights", "training")
def averaged(tiny, training):
    """SGD with momentum, a cosine rate, and an exponential average of the weights."""
    batch, width = (4, 6) if tiny else (128, 128)
    model = mlp(width, width, width, 10, act=nn.SiLU)
    slow = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for s, p in zip(slow.parameters(), model.parameters(), strict=True):
                s.lerp_(p, 0.01)
        return loss.detach()

    return Start(step, (torch.randn(batch, width), torch.randint(10, (batch,))), (model, slow))


# --- losses --------------------------------------------------------------------------------------


@program("masked focal loss", "training")
def focal(tiny, training):
    batch, length, width = (2, 5, 6) if tiny else (32, 64, 64)
    model = mlp(width, width, 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(model, x, target, mask):
        logits = model(x)
        bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        p = torch.sigmoid(logits)
        hit = p * target + (1 - p) * (1 - target)
        balance = 0.25 * target + 0.75 * (1 - target)
        loss = balance * (1 - hit) ** 2 * bce
        return (loss * mask.unsqueeze(-1)).sum() / mask.sum().clamp(min=1) / 20

    lengths = torch.randint(1, length + 1, (batch, 1))
    mask = (torch.arange(length)[None] < lengths).float()
    target = (torch.rand(batch, length, 20) < 0.2).float()
    return Start(trainer(model, loss_of, optimizer),
                 (torch.randn(batch, length, width), target, mask), (model,))  # fmt: skip


@program("contrastive loss", "training")
def contrastive(tiny, training):
    batch, width = (4, 6) if tiny else (128, 64)
    model = mlp(width, width, 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(model, one, two):
        a, b = F.normalize(model(one), dim=1), F.normalize(model(two), dim=1)
        z = torch.cat([a, b])
        similar = z @ z.t() / 0.5
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        similar = similar.masked_fill(itself, float("-inf"))
        n = len(a)
        positive = torch.cat([similar.diagonal(n), similar.diagonal(-n)])
        top = similar.max(dim=1, keepdim=True).values.detach()
        log_sum = (similar - top).exp().sum(1).log() + top.squeeze(1)
        return (log_sum - positive).mean()

    x = torch.randn(batch, width)
    pair = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
    return Start(trainer(model, loss_of, optimizer), pair, (model,))


@program("distillation", "training")
def distillation(tiny, training):
    batch, width = (4, 6) if tiny else (128, 128)
    teacher, student = mlp(width, 2 * width, 10), mlp(width, width // 2, 10)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)

    def loss_of(student, x, y):
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 4.0, dim=-1)
        logits = student(x)
        kl = (soft * (torch.log(soft + 1e-9) - F.log_softmax(logits / 4.0, -1))).sum(-1).mean()
        hard = F.cross_entropy(logits, y)
        return 0.7 * kl * 16.0 + 0.3 * hard

    return Start(trainer(student, loss_of, optimizer),
                 (torch.randn(batch, width), torch.randint(10, (batch,))), (student,))  # fmt: skip


# --- augmentation --------------------------------------------------------------------------------


@program("colour jitter")
def colour_jitter(tiny, training):
    """Brightness, contrast, saturation, gamma, noise and normalization of [B, 3, H, W]."""
    batch, size = (2, 8) if tiny else (32, 64)

    def step(image, mean, std):
        b = image.shape[0]
        factor = torch.empty(3, b, 1, 1, 1, device=image.device).uniform_(0.6, 1.4)
        image = (image * factor[0]).clamp(0, 1)
        grey = 0.299 * image[:, 0:1] + 0.587 * image[:, 1:2] + 0.114 * image[:, 2:3]
        level = grey.mean(dim=(1, 2, 3), keepdim=True)
        image = (factor[1] * image + (1 - factor[1]) * level).clamp_(0, 1)
        image = (factor[2] * image + (1 - factor[2]) * grey).clamp_(0, 1)
        image = image.clamp(min=1e-6) ** 0.9
        image = image + 0.02 * torch.randn_like(image)
        flip = torch.rand(b, device=image.device) < 0.5
        image = torch.where(flip[:, None, None, None], image.flip(-1), image)
        return (image - mean[:, None, None]) / std[:, None, None]

    image = torch.rand(batch, 3, size, size)
    return Start(step, (image, torch.tensor([0.48, 0.46, 0.41]), torch.tensor([0.27, 0.26, 0.28])))


@program("mixup", "training")
def mixup(tiny, training):
    batch, size = (4, 8) if tiny else (32, 32)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
                          nn.Flatten(), nn.Linear(128, 10))  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(model, x, y):
        share = torch.rand(x.shape[0], device=x.device) * 0.5 + 0.5
        order = torch.randperm(x.shape[0], device=x.device)
        mixed = share.view(-1, 1, 1, 1) * x + (1 - share.view(-1, 1, 1, 1)) * x[order]
        hot = F.one_hot(y, 10).float()
        soft = share[:, None] * hot + (1 - share[:, None]) * hot[order]
        return -(soft * F.log_softmax(model(mixed), dim=1)).sum(1).mean()

    return Start(trainer(model, loss_of, optimizer),
                 (torch.rand(batch, 3, size, size), torch.randint(10, (batch,))),
                 (model,))  # fmt: skip
