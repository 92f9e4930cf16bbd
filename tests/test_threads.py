"""Several threads: each records its own chains, and values may travel between them."""

import queue
import sys
import threading

import pytest
import torch

import autofuse
from support import DEVICES, assert_same

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def switch_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run(*targets):
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_record_independently(device):
    def work(seed):
        def body():
            x = torch.full((64,), float(seed), device=device)
            w = autofuse.wrap(x)
            for k in range(300):
                got = (w * 2.0 + float(k)) - 1.0
                assert got[0].item() == 2.0 * seed + k - 1

        return body

    run(*(work(seed) for seed in range(4)))


def test_pending_values_travel(device):
    """One thread records, the other reads while the first goes on recording."""
    pipe: queue.Queue = queue.Queue()
    x = torch.arange(64.0, device=device)

    def produce():
        w = autofuse.wrap(x)
        try:
            for k in range(400):
                y = w * float(k)
                pipe.put((k, y))
                for _ in range(k % 5):
                    y = y + 1.0
        finally:
            pipe.put(None)

    def consume():
        while (item := pipe.get(timeout=60)) is not None:
            k, y = item
            assert_same(y + 1.0, x * float(k) + 1.0, None)

    run(produce, consume)


def test_pending_values_are_ops_operands_elsewhere(device):
    x = torch.arange(64.0, device=device)
    y = autofuse.wrap(x) * 2
    found = []
    run(lambda: found.append(autofuse.unwrap(y * 3 + y)))
    assert_same(found[0], x * 2 * 3 + x * 2, None)
