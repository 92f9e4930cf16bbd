"""torch.distributed in two processes: collectives on pending tensors, DDP and FSDP2 around fusing.

Each process runs every check of CHECKS and says what came of it; a test asks for one of them.
"""

import os
import shutil
import tempfile
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import autofuse

W = autofuse.wrap


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.full((8,), 1.1))  # read by a recorded op

    def forward(self, x):
        h = self.linear(x) * self.gain
        return torch.tanh(torch.sigmoid(h) * h * 1.5 + x) * 0.5


def build(device, fused=""):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(device)
    if fused == "inside":
        for block in model:
            autofuse.fuse(block)
    return autofuse.fuse(model) if fused == "around" else model


def batch(device):
    return torch.full((4, 8), (dist.get_rank() + 1) / 3, device=device)


def train(model, device, call=None):
    """Three steps; the parameters that come out, whole."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        y = model(batch(device)) if call is None else call(model, batch(device))
        y.square().mean().backward()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in whole]


def assert_trains_alike(model, device, call=None):
    want = train(nn.parallel.DistributedDataParallel(build(device)), device)
    autofuse.reset_stats()
    got = train(model, device, call)
    assert autofuse.stats().kernels_launched > 0
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


# --- the checks ----------------------------------------------------------------------------------


def collectives(device):
    rank = dist.get_rank()
    w = W(torch.ones(3, device=device) * (rank + 1))

    y = w * 2
    dist.all_reduce(y)
    assert y.tolist() == [6.0] * 3
    y = w * 2
    dist.all_reduce(y, async_op=True).wait()
    assert (y + 1).tolist() == [7.0] * 3
    y = w * 2
    dist.broadcast(y, 0)
    assert y.tolist() == [2.0] * 3
    parts = [torch.empty(3, device=device) for _ in range(2)]
    dist.all_gather(parts, w * 2)
    assert [part[0].item() for part in parts] == [2.0, 4.0]
    if rank == 0:
        dist.send(w * 5, 1)
    else:
        taken = torch.zeros(3, device=device)
        before = W(taken) + 1
        dist.recv(taken, 0)
        assert before.tolist() == [1.0] * 3 and taken.tolist() == [5.0] * 3
    objects = [None, None]
    dist.all_gather_object(objects, w * 2)
    assert [value.cpu()[0].item() for value in objects] == [2.0, 4.0]


def functional_collectives(device):
    import torch.distributed._functional_collectives as functional

    w = W(torch.ones(3, device=device) * (dist.get_rank() + 1))
    total = functional.all_reduce(w * 2, "sum", dist.group.WORLD)
    assert (total + 1).tolist() == [7.0] * 3


def a_collective_writes_what_a_pending_op_reads(device):
    value = float(dist.get_rank() + 1)
    memory = torch.full((3,), value, device=device)
    y = W(memory) * 2  # recorded, and reads the memory before it is reduced
    dist.all_reduce(memory)
    assert y.tolist() == [2 * value] * 3
    assert memory.tolist() == [3.0] * 3


def ddp_around(device):
    model = nn.parallel.DistributedDataParallel(build(device, "around"))
    assert_trains_alike(model, device)


def ddp_inside(device):
    assert_trains_alike(autofuse.fuse(nn.parallel.DistributedDataParallel(build(device))), device)


def ddp_over_fused_blocks(device):
    model = nn.parallel.DistributedDataParallel(build(device, "inside"), static_graph=True)
    assert_trains_alike(model, device)


def ddp_walks_the_graph_of_a_pending_result(device):
    model = nn.parallel.DistributedDataParallel(build(device), find_unused_parameters=True)
    assert_trains_alike(model, device, lambda module, x: module(W(x) * 1.0))


def _sharded(device, fused):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.device(device).type, (2,))
    model = build(device, fused)
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_inside(device):
    assert_trains_alike(_sharded(device, "inside"), device)


def fsdp_around(device):
    assert_trains_alike(_sharded(device, "around"), device)


def fused_after_sharding(device):
    assert_trains_alike(autofuse.fuse(_sharded(device, "")), device)


def dtensor(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh(torch.device(device).type, (2,))
    x = torch.arange(8.0, device=device).reshape(2, 4)
    fused = autofuse.fuse(lambda t: t * 2 + 1)
    assert torch.equal(fused(distribute_tensor(x, mesh, [Shard(0)])).full_tensor(), x * 2 + 1)
    local = DTensor.from_local(W(x[:1]) * 2, mesh, [Shard(0)])
    assert torch.equal((local + 1).full_tensor(), (x[:1] * 2 + 1).expand(2, -1))


# --- mixed precision and checkpoints; the same steps in eager PyTorch give the same bits ----------


class Typical(nn.Module):
    """What is written around the products of a model, exact on the CPU: [B, 8] to [B, 8]."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.75))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1.0
        h = (self.up(x * self.scale) + 0.5).relu() * 0.5
        return x + self.down(h * h + h).float() * self.scale - 0.25


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList([Typical(), Typical()])
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x * 2.0


def _whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def steps_of(model, optimizer, device, wrap):
    """Losses, gradients and parameters of three steps under autocast, whole, and the buffers."""
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind, init_scale=64.0)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        x = wrap((batch(device) * (step + 1)).requires_grad_())
        with torch.autocast(kind, torch.bfloat16):
            loss = (model(x).float() * 0.5 - 1.0).square().mean()
        scaler.scale(loss).backward()
        found += [_whole(autofuse.unwrap(loss)), *(_whole(p.grad) for p in model.parameters())]
        scaler.step(optimizer)
        scaler.update()
    return [*found, *map(_whole, model.parameters()), *map(_whole, model.buffers())]


def assert_same_bits(make, device):
    """Models of `make`, whose argument says whether they are fused, trained with and without."""
    results = []
    for fused, wrap in ((False, lambda t: t), (False, W), (True, lambda t: t)):
        autofuse.reset_stats()
        torch.manual_seed(0)
        model = make(fused)
        results.append(steps_of(model, torch.optim.SGD(model.parameters(), 0.125), device, wrap))
        assert (autofuse.stats().kernels_launched > 0) is (fused or wrap is W)
    for got in results[1:]:
        for ours, theirs in zip(got, results[0], strict=True):
            assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


def _mixed_ddp(device, reentrant):
    def make(fused):
        model = Checkpointed(reentrant).to(device)
        options = {"static_graph": True} if reentrant else {}
        model = nn.parallel.DistributedDataParallel(model, **options)
        return autofuse.fuse(model) if fused else model

    assert_same_bits(make, device)


def ddp_with_autocast_and_checkpoints(device):
    _mixed_ddp(device, reentrant=False)


def ddp_with_autocast_and_reentrant_checkpoints(device):
    _mixed_ddp(device, reentrant=True)


def _mixed_fsdp(device, fused, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.device(device).type, (2,))
    model = Checkpointed(reentrant=False).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    model = fully_shard(model, mesh=mesh, **options)
    return autofuse.fuse(model) if fused else model


def fsdp_with_autocast_and_checkpoints(device):
    assert_same_bits(lambda fused: _mixed_fsdp(device, fused), device)


def fsdp_with_a_policy_of_mixed_precision(device):
    """Parameters are gathered in bfloat16; gradients are reduced in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # torch 2.9 casts what enters a block in a checkpoint's first run alone
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    assert_same_bits(lambda fused: _mixed_fsdp(device, fused, mp_policy=policy), device)


def saved_and_loaded(device):
    """torch.distributed.checkpoint of a sharded fused model: a new one goes on with its bits."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def going_on(fused, wrap, folder):
        torch.manual_seed(0)
        first = _mixed_fsdp(device, fused)
        optimizer = torch.optim.SGD(first.parameters(), 0.125, momentum=0.5)
        found = steps_of(first, optimizer, device, wrap)
        names = ("model", "optimizer")
        state = dict(zip(names, get_state_dict(first, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder)
        found += steps_of(first, optimizer, device, wrap)
        torch.manual_seed(1)
        second = _mixed_fsdp(device, fused)
        other = torch.optim.SGD(second.parameters(), 0.125, momentum=0.5)
        state = dict(zip(names, get_state_dict(second, other), strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            second, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        again = steps_of(second, other, device, wrap)
        for ours, theirs in zip(again, found[-len(again) :], strict=True):
            assert torch.equal(ours, theirs)
        return found

    folders = [None] * 3
    if dist.get_rank() == 0:
        folders = [tempfile.mkdtemp() for _ in folders]
    dist.broadcast_object_list(folders)
    ways = ((False, lambda t: t), (False, W), (True, lambda t: t))
    try:
        results = [going_on(*way, at) for way, at in zip(ways, folders, strict=True)]
        for got in results[1:]:
            for ours, theirs in zip(got, results[0], strict=True):
                assert torch.equal(ours, theirs)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            for folder in folders:
                shutil.rmtree(folder)


CHECKS = (
    collectives, functional_collectives, a_collective_writes_what_a_pending_op_reads, ddp_around,
    ddp_inside, ddp_over_fused_blocks, ddp_walks_the_graph_of_a_pending_result, fsdp_inside,
    fsdp_around, fused_after_sharding, dtensor, ddp_with_autocast_and_checkpoints,
    ddp_with_autocast_and_reentrant_checkpoints, fsdp_with_autocast_and_checkpoints,
    fsdp_with_a_policy_of_mixed_precision, saved_and_loaded,
)  # fmt: skip


# --- the processes -------------------------------------------------------------------------------


def work(rank, kind, folder):
    """One process: every check, until one fails; the other process could not follow after that."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not given to every container
    torch.set_num_threads(1)
    device = "cpu" if kind == "cpu" else f"cuda:{rank}"
    options = {}
    if kind == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device(device)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl", init_method=f"file://{folder}/store", rank=rank,
        world_size=2, **options,
    )  # fmt: skip
    autofuse.config.compile, autofuse.config.always_fuse = "now", True
    for check in CHECKS:
        said = "ok"
        try:
            check(device)
        except Exception:
            said = traceback.format_exc()
        with open(f"{folder}/{check.__name__}.{rank}", "w") as file:
            file.write(said)
        if said != "ok":
            os._exit(0)  # a collective of the other process may wait for this one for ever
    dist.destroy_process_group()


needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 CUDA devices, {torch.cuda.device_count()} here"
)


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_two])]
)
def said(request, tmp_path_factory):
    """What the processes of one kind of device have said, by check and rank."""
    if not dist.is_available():
        pytest.skip("torch was built without torch.distributed")
    folder = tmp_path_factory.mktemp("distributed")
    context = torch.multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=work, args=(rank, request.param, folder)) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
        if process.is_alive():
            process.kill()
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != "store"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_processes(check, said):
    for rank in (0, 1):
        assert said.get(f"{check.__name__}.{rank}", "not reached") == "ok"
