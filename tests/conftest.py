import gc
import os
import sys
import tempfile
import threading

import pytest
import torch

if "AUTOFUSE_TEST_KERNELS" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="autofuse-tests-")
    # for tests that these start, too: compiling kernels is 33 s of the 66 that views, inplace and
    # autograd_chains take
    os.environ["AUTOFUSE_TEST_KERNELS"] = _cache.name
os.environ["AUTOFUSE_CACHE_DIR"] = os.environ["AUTOFUSE_TEST_KERNELS"]

import autofuse  # noqa: E402
from autofuse import lending  # noqa: E402
from autofuse.chain import state, verified  # noqa: E402
from autofuse.ops import moves  # noqa: E402
from autofuse.record.modes import forget_all  # noqa: E402
from autofuse.supply import kernels  # noqa: E402
from autofuse.supply.disk import DiskCache  # noqa: E402
from support import NATIVE, TIERS  # noqa: E402

LOCKS = {
    name: lock
    for name, module in list(sys.modules.items())
    if name.startswith("autofuse.")
    for lock in vars(module).values()
    if type(lock) is type(threading.RLock())
}


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device")


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Nothing that is there before a file's tests is collected: a collection takes 10 ms, not 280.

    That is what imports of torch have made, for the most part.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh():
    """Every test starts with nothing pending, zero counters, torch's defaults, and no tiers.

    A chain of one op has its kernel, so that the kernel is what is tested, and every fused call
    records.
    """
    autofuse.config.measure = False
    autofuse.record.policy.FLUSH_US.update(cuda=0.0, cpu=0.0)
    for saved in autofuse.record.costs.SAVED_US.values():  # by functions, which eager may do faster
        saved.clear()
        saved[""] = 0.5
    autofuse.config.compile, autofuse.config.max_kernels_per_line = "now", 1 << 30
    if os.environ.get("AUTOFUSE_TEST_TIER") == "eager":  # no chain ever gets its kernel
        autofuse.config.compile, autofuse.config.compile_after = "background", 1 << 30
    yield
    autofuse.record.flush.flush_all("test")
    verified._met.discard(torch.device("cpu"))  # where tests have had reductions recorded
    verified.wanted.pop(torch.device("cpu"), None)
    moves._known.clear()
    autofuse.reset_stats()
    assert torch.get_default_dtype() is torch.float32
    held = [name for name, lock in LOCKS.items() if autofuse.inside.is_owned(lock)]
    assert not held, "a lock of these modules was left taken"


@pytest.fixture
def nothing_on_disk(monkeypatch, tmp_path):
    """No kernels there, or in memory, whatever other tests have compiled."""
    with monkeypatch.context() as patch:
        patch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path / "nothing"))
        kernels.clear_kernels()  # which know their directory from their first use on
        yield
    kernels.clear_kernels()


def have_no_kernels(monkeypatch):
    """Let no kernel ever come, whatever other tests have compiled; to be forgotten afterwards."""
    monkeypatch.setattr(autofuse.config, "compile", "background")
    monkeypatch.setattr(autofuse.config, "compile_after", 1 << 30)
    monkeypatch.setattr(DiskCache, "get", lambda *_: None)
    kernels.clear_kernels()
    forget_all("test")


@pytest.fixture
def eager_tier(monkeypatch):
    """Chains run as the ops that they were recorded from, whatever other tests have compiled."""
    have_no_kernels(monkeypatch)
    yield
    assert autofuse.stats().kernels_launched == 0
    forget_all("test")


@pytest.fixture(params=NATIVE, ids=lambda on: "native" if on else "python")
def on(request):
    """By machine code, where there is some, and by Python."""
    before = autofuse.config.native
    autofuse.config.native = request.param
    yield request.param
    autofuse.config.native = before


@pytest.fixture(params=TIERS)
def tier(request, monkeypatch):
    """Chains run by kernels; as eager ops where that costs less; as eager ops until they are there.

    In the last tier no kernel ever comes.
    """
    monkeypatch.setattr(autofuse.config, "always_fuse", request.param != "short")
    if request.param == "waiting":
        have_no_kernels(monkeypatch)
    yield request.param
    if request.param == "waiting":
        forget_all("test")


@pytest.fixture
def alone():
    """This thread is the only one that has recorded or lent anything.

    Beside others Python writes, and contests do not know whose wrapped tensors they meet. On CUDA
    recorders of threads that have gone wait for the garbage collector, and those of torch's engine,
    whose hooks may record, stay.
    """
    refs, own = state.all_recorders.refs, state.this_thread.recorders.values()
    if len(refs) != len(own):
        gc.collect()
    others = [recorder for recorder in state.all_recorders if recorder not in own]
    hidden = [known for known in refs if known() in others]
    for known in hidden:
        refs.remove(known)
    lenders = [x for x in lending.lenders if x is not state.this_thread.__dict__.get("lender")]
    for lender in lenders:
        lending.lenders.discard(lender)
    yield
    refs += [known for known in hidden if known() is not None]
    lending.lenders.update(lenders)


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
