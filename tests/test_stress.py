"""The stress of tests/stress.py, where it is asked for: by machine code and by Python alone, or as
AUTOFUSE_NATIVE says; on the CPU also with backward in a thread of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import DEVICES

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("AUTOFUSE_TEST_STRESS_SECONDS", "0"))  # for each of them


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("way", ["", "engine"])
@pytest.mark.parametrize("device", DEVICES)
def test_stress(device, way, native):
    if not SECONDS:
        pytest.skip("AUTOFUSE_TEST_STRESS_SECONDS is not set")
    if os.environ.get("AUTOFUSE_NATIVE", native) != native:
        pytest.skip("AUTOFUSE_NATIVE says the other")
    if way and device == "cuda":
        pytest.skip("CUDA does")
    command = [sys.executable, str(HERE / "stress.py"), "--seconds", str(SECONDS)]
    done = subprocess.run(
        [*command, "--device", device, *["--engine"] * bool(way)],
        env={
            **os.environ,
            "AUTOFUSE_NATIVE": native,
            "PYTHONPATH": str(HERE.parent),
        },
        capture_output=True,
        text=True,
        timeout=SECONDS + 120,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert " 0 failures" in done.stdout
