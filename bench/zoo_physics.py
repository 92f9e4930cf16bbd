"""Programs that simulate: ODE, SDE, PDE and lattice solvers, rewards of physics. Plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import nn

from zoo_row import Start, program

# --- ordinary differential equations -------------------------------------------------------------


def runge_kutta(field, y, dt):
    k1 = field(y)
    k2 = field(y + 0.5 * dt * k1)
    k3 = field(y + 0.5 * dt * k2)
    k4 = field(y + dt * k3)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def lotka(y):
    """Prey and predators in columns; y: [B, 2]."""
    prey, hunters = y[:, 0], y[:, 1]
    return torch.stack((prey * (1.1 - 0.4 * hunters), hunters * (0.1 * prey - 0.4)), dim=1)


@program("Lotka-Volterra by RK4")
def lotka_volterra(tiny, training):
    def step(y):
        for _ in range(2 if tiny else 10):
            y = runge_kutta(lotka, y, 0.01)
        return y

    return Start(step, (torch.rand(8 if tiny else 4096, 2) * 4 + 1,), feeds=1)


@program("double pendulum")
def pendulum(tiny, training):
    """Symplectic Euler over a batch of double pendulums, each variable a tensor of its own."""
    count = 8 if tiny else 8192

    def step(a1, a2, w1, w2, g=9.81, dt=0.002):
        for _ in range(2 if tiny else 10):
            d = a1 - a2
            sin, cos, below = torch.sin(d), torch.cos(d), 3 - torch.cos(2 * d)
            acc1 = (
                -3 * g * torch.sin(a1) - g * torch.sin(a1 - 2 * a2)
                - 2 * sin * (w2**2 + w1**2 * cos)
            ) / below  # fmt: skip
            acc2 = 2 * sin * (2 * w1**2 + 2 * g * torch.cos(a1) + w2**2 * cos) / below
            w1, w2 = w1 + dt * acc1, w2 + dt * acc2
            a1 = torch.remainder(a1 + dt * w1 + math.pi, 2 * math.pi) - math.pi
            a2 = torch.remainder(a2 + dt * w2 + math.pi, 2 * math.pi) - math.pi
        return a1, a2, w1, w2

    return Start(step, (*(torch.randn(count) for _ in range(2)), *torch.zeros(2, count)), feeds=4)


@program("N-body by leapfrog")
def bodies(tiny, training):
    count = 8 if tiny else 256
    mass = torch.rand(count, 1)

    def accelerate(x, mass):
        apart = x[None] - x[:, None]  # [N, N, 3]
        squared = (apart**2).sum(-1, keepdim=True) + 1e-2
        return (apart * mass[None] * squared**-1.5).sum(1)

    def step(x, v, mass, dt=1e-3):
        for _ in range(4):
            v = v + 0.5 * dt * accelerate(x, mass)
            x = x + dt * v
            v = v + 0.5 * dt * accelerate(x, mass)
        return x, v

    return Start(step, (torch.randn(count, 3), torch.randn(count, 3) * 0.1, mass), feeds=2)


@program("neural ODE by RK4", "training")
def neural_ode(tiny, training):
    batch, width = (4, 6) if tiny else (256, 64)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def step(y, target):
        optimizer.zero_grad()
        for _ in range(2 if tiny else 5):
            y = runge_kutta(model, y, 0.1)
        loss = (y - target).abs().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return Start(step, (torch.randn(batch, 2), torch.randn(batch, 2)), (model,))


# --- stochastic ones -----------------------------------------------------------------------------


@program("Ornstein-Uhlenbeck paths")
def ornstein(tiny, training):
    def step(x, mean, theta=0.7, sigma=0.3, dt=0.01):
        for _ in range(3 if tiny else 25):
            x = x + theta * (mean - x) * dt + sigma * math.sqrt(dt) * torch.randn_like(x)
        return x

    return Start(step, (torch.randn(8 if tiny else 65536), torch.tensor(0.5)), feeds=1)


@program("Heston paths and a call's price")
def heston(tiny, training):
    def step(spot, variance):
        price, v = spot, variance
        alive = torch.ones_like(spot, dtype=torch.bool)
        for _ in range(3 if tiny else 20):
            z1 = torch.randn_like(spot)
            z2 = -0.7 * z1 + math.sqrt(1 - 0.49) * torch.randn_like(spot)
            root = v.clamp(min=0).sqrt()
            price = price * torch.exp((0.02 - 0.5 * v.clamp(min=0)) / 252 + root * z1 * 252**-0.5)
            v = v + 1.5 * (0.04 - v) / 252 + 0.3 * root * z2 * 252**-0.5
            alive &= price > 80.0
        payoff = torch.relu(price - 100.0) * alive
        return payoff.mean(), payoff.std()

    count = 8 if tiny else 65536
    return Start(step, (torch.full((count,), 100.0), torch.full((count,), 0.04)))


@program("Langevin sampler")
def langevin(tiny, training):
    """Metropolis-adjusted, of a mixture of two normals."""

    def energy_and_slope(x):
        left, right = x + 2.0, x - 2.0
        a, b = torch.exp(-0.5 * left * left), torch.exp(-0.5 * right * right)
        total = a + b + 1e-12
        return -torch.log(total), (a * left + b * right) / total

    def step(x, eps=0.3):
        energy, slope = energy_and_slope(x)
        for _ in range(2 if tiny else 8):
            new = x - eps * slope + math.sqrt(2 * eps) * torch.randn_like(x)
            new_energy, new_slope = energy_and_slope(new)
            there = (new - x + eps * slope).square() / (4 * eps)
            back = (x - new + eps * new_slope).square() / (4 * eps)
            accept = torch.rand_like(x).log() < energy - new_energy + there - back
            x = torch.where(accept, new, x)
            energy = torch.where(accept, new_energy, energy)
            slope = torch.where(accept, new_slope, slope)
        return x

    return Start(step, (torch.randn(8 if tiny else 16384),), feeds=1)


# --- partial differential equations --------------------------------------------------------------


def bump(size):
    """A hill in the middle; [size, size]."""
    axis = torch.linspace(-1, 1, size)
    return torch.exp(-20 * (axis[:, None] ** 2 + axis[None] ** 2))


@program("heat equation by slices")
def heat(tiny, training):
    def step(u):
        u = u.clone()
        for _ in range(3 if tiny else 20):
            inside = u[1:-1, 1:-1]
            u[1:-1, 1:-1] = inside + 0.2 * (
                u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * inside
            )
            u[0] = u[1]
            u[-1] = u[-2]
            u[:, 0] = u[:, 1]
            u[:, -1] = u[:, -2]
        return u

    return Start(step, (bump(8 if tiny else 256),), feeds=1)


@program("wave equation by slices")
def wave(tiny, training):
    def step(u, before, speed):
        for _ in range(3 if tiny else 20):
            lap = torch.zeros_like(u)
            lap[1:-1, 1:-1] = (
                u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4.0 * u[1:-1, 1:-1]
            )
            after = 1.999 * u - 0.999 * before + speed * lap
            before, u = u, after
        return u, before

    size = 8 if tiny else 256
    return Start(step, (bump(size), bump(size), 0.1 + 0.1 * torch.rand(size, size)), feeds=2)


@program("Burgers' equation upwind")
def burgers(tiny, training):
    def step(u, nu=0.01, dt=0.0005):
        dx = 2.0 / u.shape[0]
        for _ in range(3 if tiny else 20):
            left, right = torch.roll(u, 1), torch.roll(u, -1)
            slope = torch.where(u > 0, u - left, right - u) / dx
            u = u - dt * u * slope + nu * dt / dx**2 * (right - 2 * u + left)
        return u

    x = torch.linspace(-1, 1, 16 if tiny else 256)
    return Start(step, (torch.sin(math.pi * x) + 0.1,), feeds=1)


@program("shallow water by slices")
def shallow_water(tiny, training):
    """Heights in the cells' middles, speeds on their faces."""

    def step(h, u, v, dt=0.01, g=1.0):
        for _ in range(2 if tiny else 10):
            u[1:-1, :] -= g * dt * (h[1:, :] - h[:-1, :])
            v[:, 1:-1] -= g * dt * (h[:, 1:] - h[:, :-1])
            u *= 0.9999
            v *= 0.9999
            h -= dt * (u[1:, :] - u[:-1, :] + v[:, 1:] - v[:, :-1])
        return h, u, v

    size = 8 if tiny else 256
    return Start(step, (1 + bump(size), torch.zeros(size + 1, size), torch.zeros(size, size + 1)),
                 feeds=3)  # fmt: skip


@program("lattice Boltzmann by rolls")
def lattice_boltzmann(tiny, training):
    directions = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
    weights = [4 / 9] + [1 / 9] * 4 + [1 / 36] * 4
    size = 8 if tiny else 128
    wall = torch.rand(size, size) < 0.02
    back = [0, 3, 4, 1, 2, 7, 8, 5, 6]

    def step(f, wall, tau=0.6):
        for _ in range(1 if tiny else 2):
            f = [torch.roll(f[k], d, (0, 1)) for k, d in enumerate(directions)]
            rho = sum(f)
            ux = (f[1] + f[5] + f[8] - f[3] - f[6] - f[7]) / rho
            uy = (f[2] + f[5] + f[6] - f[4] - f[7] - f[8]) / rho
            square = 1.5 * (ux**2 + uy**2)
            after = []
            for k, (x, y) in enumerate(directions):
                cu = 3 * (x * ux + y * uy)
                equilibrium = weights[k] * rho * (1 + cu + 0.5 * cu**2 - square)
                after.append(f[k] + (equilibrium - f[k]) / tau)
            f = torch.stack([torch.where(wall, f[back[k]], after[k]) for k in range(9)])
        return f

    start = torch.tensor(weights)[:, None, None] * (1 + 0.1 * bump(size))
    return Start(step, (start, wall), feeds=1)


@program("Gray-Scott")
def gray_scott(tiny, training):
    def laplacian(a):
        return (
            torch.roll(a, 1, 0) + torch.roll(a, -1, 0) + torch.roll(a, 1, 1) + torch.roll(a, -1, 1)
            - 4 * a
        )  # fmt: skip

    def step(u, v, feed=0.037, kill=0.06):
        for _ in range(2 if tiny else 10):
            reaction = u * v * v
            u = u + 0.16 * laplacian(u) - reaction + feed * (1 - u)
            v = v + 0.08 * laplacian(v) + reaction - (feed + kill) * v
        return u, v

    size = 8 if tiny else 128
    return Start(step, (1 - 0.5 * bump(size), 0.25 * bump(size)), feeds=2)


@program("Ising checkerboard")
def ising(tiny, training):
    size = 8 if tiny else 256
    row = torch.arange(size)
    black = (row[:, None] + row[None]) % 2 == 0

    def step(spins, black, beta=0.44):
        for mask in (black, ~black) * (1 if tiny else 4):
            field = spins.roll(1, 0) + spins.roll(-1, 0) + spins.roll(1, 1) + spins.roll(-1, 1)
            flip = torch.rand_like(spins) < torch.exp(-2 * beta * spins * field)
            spins = torch.where(flip & mask, -spins, spins)
        return spins, spins.mean()

    return Start(step, (torch.randn(size, size).sign(), black), feeds=1)


# --- physics with rewards ------------------------------------------------------------------------


@program("many cart-poles")
def cart_pole(tiny, training):
    """A step of the dynamics, a reward, and a reset of those that fell."""

    def step(x, v, angle, spin, weights):
        for _ in range(2 if tiny else 8):
            seen = torch.stack((x, v, angle, spin), dim=-1)
            force = 10.0 * torch.sign(seen @ weights)
            cos, sin = torch.cos(angle), torch.sin(angle)
            push = (force + 0.05 * spin**2 * sin) / 1.1
            turn = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
            acceleration = push - 0.05 * turn * cos / 1.1
            x, v = x + 0.02 * v, v + 0.02 * acceleration
            angle, spin = angle + 0.02 * spin, spin + 0.02 * turn
            fell = (x.abs() > 2.4) | (angle.abs() > 0.21)
            reward = torch.where(fell, -torch.ones_like(x), 1.0 - 0.1 * angle**2 - 0.01 * v**2)
            x, v, angle, spin = (t.masked_fill(fell, 0.01) for t in (x, v, angle, spin))
        return x, v, angle, spin, reward

    count = 8 if tiny else 4096
    state = tuple(torch.randn(count) * 0.05 for _ in range(4))

    return Start(step, (*state, torch.randn(4)), feeds=4)


@program("ant's reward")
def ant_reward(tiny, training):
    """Progress to a target, standing upright and heading, less costs; [N, ...] tensors."""
    count = 8 if tiny else 4096

    def step(position, velocity, quaternion, actions, joints, joint_speeds, target, potential):
        to_target = target - position
        to_target[:, 2] = 0.0
        distance = torch.norm(to_target, dim=-1)
        new_potential = -distance / (1 / 60)
        w, x, y, z = quaternion.unbind(-1)
        heading = torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z)], dim=-1)
        direction = to_target[:, :2] / distance.unsqueeze(-1)
        facing = (heading * direction).sum(-1)
        heading_reward = torch.where(facing > 0.8, torch.full_like(facing, 0.5), 0.5 * facing / 0.8)
        up = 1 - 2 * (x * x + y * y)
        up_reward = torch.where(up > 0.93, torch.ones_like(up) * 0.1, torch.zeros_like(up))
        actions_cost = torch.sum(actions**2, dim=-1)
        electricity = torch.sum(torch.abs(actions * joint_speeds), dim=-1)
        limits = torch.sum(joints.abs() > 0.99, dim=-1)
        total = (
            new_potential - potential + 0.5 + up_reward + heading_reward
            - 0.005 * actions_cost - 0.05 * electricity - 0.1 * limits
        )  # fmt: skip
        total = torch.where(position[:, 2] < 0.31, torch.full_like(total, -2.0), total)
        speed = velocity.norm(dim=-1)
        seen = torch.cat([
            position[:, 2:3], velocity * 0.2, up[:, None], heading, joints.clamp(-1, 1),
            joint_speeds * 0.1, actions, speed[:, None],
        ], dim=-1)  # fmt: skip
        return total, new_potential, seen

    quaternion = torch.randn(count, 4)
    quaternion = quaternion / quaternion.norm(dim=-1, keepdim=True)
    state = (torch.rand(count, 3), torch.randn(count, 3), quaternion,
             *(torch.randn(count, 8) for _ in range(3)), torch.rand(count, 3) * 9 + 5,
             torch.randn(count))  # fmt: skip
    return Start(step, state)
