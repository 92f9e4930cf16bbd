"""The stress of tests/stress.py, by machine code and by Python alone, where it is asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import DEVICES

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("AUTOFUSE_TEST_STRESS_SECONDS", "0"))  # for each of the two


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("device", DEVICES)
def test_stress(device, native):
    if not SECONDS:
        pytest.skip("AUTOFUSE_TEST_STRESS_SECONDS is not set")
    command = [sys.executable, str(HERE / "stress.py"), "--seconds", str(SECONDS)]
    done = subprocess.run(
        [*command, "--device", device],
        env={**os.environ, "AUTOFUSE_NATIVE": native, "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        timeout=SECONDS + 300,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert " 0 failures" in done.stdout
