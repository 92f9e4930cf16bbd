import pytest
import torch

import autofuse


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device")


@pytest.fixture(autouse=True)
def fresh():
    """Every test starts with nothing pending, zero counters, and torch's defaults."""
    yield
    autofuse.chain.flush_all("test")
    autofuse.reset_stats()
    assert torch.get_default_dtype() is torch.float32
