"""The tests of the hot path once more: by Python alone, and by CUDA's way of launching."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "settings, files",
    [
        (
            "AUTOFUSE_NATIVE=0 AUTOFUSE_TEST_PLACES=3",
            "test_tiny test_liveness test_inplace test_interrupts test_keys",
        ),
    ],
)
def test_the_other_way(settings, files):
    environment = os.environ | dict(setting.split("=") for setting in settings.split())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark",
               "-k", "not cuda",
               *(str(HERE / f"{file}.py") for file in files.split())]  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
