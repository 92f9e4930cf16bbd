"""autofuse's own exceptions: what happened with which op at which line, why, and what to do.

In three lines at most, which all of these have; eager PyTorch's own are in test_errors.py.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch

import autofuse
from autofuse import errors
from autofuse.supply import build, kernels
from autofuse.supply.disk import DiskCache
from support import write_unseen

HERE = Path(__file__).name


def stale():
    plain = torch.randn(4)
    y = autofuse.wrap(plain) * 2.5
    write_unseen(plain)
    y.sum()  # here


def lost_gradient():
    p = torch.nn.Parameter(torch.randn(4))
    y = autofuse.wrap(torch.randn(4)) * p
    with torch._C.DisableTorchFunctionSubclass():
        torch.select(y, 0, 1)  # here


def cold():
    with autofuse.no_compile():
        autofuse.materialize((autofuse.wrap(torch.randn(4)) * 2.375).erf().cosh())  # here


def mismatch():
    autofuse.config.check = True
    autofuse.materialize(autofuse.wrap(torch.randn(4)) * 2.125 + 1.125)  # here


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """Kernels that multiply where they should not, and nothing on disk; settings come back."""
    real, before = build.build, dict(vars(autofuse.config))

    def wrong(source, target):
        import dataclasses

        return real(dataclasses.replace(source, text=source.text.replace(" * ", " - ")), target)

    monkeypatch.setattr(build, "build", wrong)
    monkeypatch.setattr(DiskCache, "get", lambda *_: None)
    monkeypatch.setattr(DiskCache, "put", lambda *_: None)
    kernels.clear_kernels()
    autofuse.record.modes.forget_all("test")
    autofuse.config.dump_dir = str(tmp_path)
    yield
    for name, value in before.items():
        setattr(autofuse.config, name, value)
    kernels.clear_kernels()
    autofuse.record.modes.forget_all("test")


CASES = {
    "StaleInputError": (stale, "'mul'", r"autofuse\.materialize\(result\) before the write"),
    "LostGradientError": (lost_gradient, "calls select", r"autofuse\.materialize\(tensor\) before"),
    "ColdKernelError": (cold, "af_mul_erf_cosh", r"call autofuse\.wait\(\)"),
    "MismatchError": (mismatch, "op 1, add", r"inside autofuse\.disabled\(\)"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_message_has_the_line_the_op_the_cause_and_the_cure(name, broken, on):
    fails, op, cure = CASES[name]
    with pytest.raises(getattr(errors, name)) as caught:
        fails()
    lines, start = inspect.getsourcelines(fails)
    here = start + next(k for k, line in enumerate(lines) if line.endswith("# here\n"))
    said = str(caught.value).splitlines()
    assert len(said) == 3
    what, cause, last = said
    assert op in what and re.search(cure, last)
    assert f"{HERE}:{here}" in f"{what}\n{cause}" and cause.startswith("Cause: ")


def test_every_exception_that_is_raised_is_here():
    """But for those that only a message on stderr tells of, or nobody."""
    told = {
        name
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, errors.AutofuseError)
        if not re.search("caught inside|Base class|Seen only as a message", error.__doc__)
    }
    assert told == {*CASES}


def test_a_cold_kernel_has_its_text(broken):
    with pytest.raises(errors.ColdKernelError) as caught:
        cold()
    assert "def af_mul_erf_cosh(" in caught.value.source
    assert errors.ColdKernelError("no text").source == ""


def test_a_mismatch_has_its_program(broken, tmp_path):
    with pytest.raises(errors.MismatchError) as caught:
        mismatch()
    (program,) = tmp_path.glob("autofuse-mismatch-*.py")
    assert str(program) in str(caught.value)
    space: dict = {}
    exec(program.read_text(), space)
    assert not torch.equal(space["results"][0], space["fused"][0])
