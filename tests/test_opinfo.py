"""PyTorch's own samples (OpInfo) of its pointwise ops: wrapped tensors against eager ones.

A few samples, dtypes and layouts of each op are drawn with a seed that a failure prints and
AUTOFUSE_TEST_SEED sets; with AUTOFUSE_TEST_FULL=1 everything runs, which takes hours: nearly every
case is a kernel of its own.
"""

import hashlib
import random
from dataclasses import replace
from pathlib import Path

import conformance
import pytest
import torch
from conformance import SEED, Case, cases, check, entries, with_gradients
from test_derivatives import LOOSE
from test_ops import RTOL

import autofuse
from support import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)


def pytest_generate_tests(metafunc):
    """One test per entry; pytest's cache holds their names, for to find them takes 10 s."""
    if "name" not in metafunc.fixturenames:
        return
    source = Path(conformance.__file__).read_text() + str(sorted(conformance.spelled()))
    key = f"autofuse/opinfo-{torch.__version__}-{hashlib.sha1(source.encode()).hexdigest()}"
    cache = getattr(metafunc.config, "cache", None)
    names = cache and cache.get(key, None)
    if names is None:
        names = conformance.pointwise_names()
        if cache:
            cache.set(key, names)
    metafunc.parametrize("name", names)


def run(name, some, rtol):
    """Check cases of one entry; report all that fail."""
    failures = []
    for case in some:
        try:
            check(case, rtol)
        except AssertionError as error:
            failures.append(f"{case}:\n    {error}")
    if failures:
        count = f"{len(failures)} cases of {name} differ from eager (AUTOFUSE_TEST_SEED={SEED})"
        pytest.fail("\n".join((count, *failures[:20])), pytrace=False)


def generator(name, device):
    return random.Random(f"{SEED} {name} {device}")


def test_samples(name, device):
    entry, rng = entries()[name], generator(name, device)
    run(name, cases(entry, device, rng), RTOL)


def test_gradients(name, device, monkeypatch):
    entry, rng = entries()[name], generator(name, device)
    if not entry.supported_backward_dtypes(device):
        pytest.skip("has no derivative")
    if not conformance.FULL and rng.random() < 0.75:
        pytest.skip("not drawn; AUTOFUSE_TEST_FULL=1 runs it")
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    some = (
        replace(case, call=with_gradients(case.call, dense=rng.random() < 0.5))
        for case in cases(entry, device, rng, grad=True)
    )
    run(name, some, LOOSE)


def test_errors(name, device):
    entry = entries()[name]
    if entry.error_inputs_func is None:
        pytest.skip("torch has no error inputs for it")
    run(name, error_cases(name, entry, device), RTOL)


def error_cases(name, entry, device):
    for error_input in entry.error_inputs(device):
        sample = error_input.sample_input
        values = sample.input, sample.args, sample.kwargs
        for variant, call in conformance.variants(entry, values):
            yield Case(
                entry.formatted_name, torch.float32, variant, "as given", "all", call, values
            )
