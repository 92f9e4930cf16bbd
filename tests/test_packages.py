"""bench/packages.py, over models that are made here: packages are not asked for in tests."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autofuse

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import packages


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)

    def forward(self, x, scale=None):
        h = self.drop(torch.relu(self.norm(self.first(x)) * 2.0))
        h = h if scale is None else h * scale
        return {"out": self.last(h), "more": [h, (h > 0,)]}


class Asking(Net):
    """Which does something else where it meets a wrapped tensor."""

    def forward(self, x, scale=None):
        own = super().forward(x, scale)
        own["more"][0] = own["more"][0] + (type(x) is not torch.Tensor or autofuse.is_pending(x))
        return own


class Raising(Net):
    def forward(self, x, scale=None):
        if isinstance(x, autofuse.Tensor):
            raise KeyError("a wrapped one")
        return super().forward(x, scale)


class Counting(Net):
    """Which is not twice the same."""

    calls = 0

    def forward(self, x, scale=None):
        Counting.calls += 1
        return super().forward(x + Counting.calls, scale)


def given():
    torch.manual_seed(0)
    return (torch.randn(5, 6),), {"scale": torch.rand(8)}


def test_what_has_eagers_bits(monkeypatch):
    found = packages.compare(Net(), *given(), "cpu")
    assert found == {f"{mode}, {way}": "" for mode in packages.MODES for way in packages.WAYS}


def test_what_has_not():
    found = packages.compare(Asking(), *given(), "cpu")
    assert "elements of tensor 1" in found["evaluation, wrap"]
    assert "elements of tensor" in found["training, wrap"]
    found = packages.compare(Raising(), *given(), "cpu")
    assert found["evaluation, wrap"] == "KeyError: 'a wrapped one'"


def test_what_eager_does_not_repeat_or_refuses():
    found = packages.compare(Counting(), *given(), "cpu")
    assert found == dict.fromkeys(packages.MODES, "eager gives something else each time")
    (x,), more = given()
    found = packages.compare(Net(), (x[:, :5],), more, "cpu")
    assert {*found} == {*packages.MODES} and "eager raises RuntimeError" in found["training"]


@pytest.mark.parametrize("got, want, said", [
    ([1.0], [1.0], ""), ([float("nan")], [float("nan")], ""), ([1.0, 2.0], [1.0, 3.0], "1 of 2"),
    ([0.0, float("nan")], [0.0, 1.0], "1 of 2"),
])  # fmt: skip
def test_differences_are_told(got, want, said):
    found = packages.difference([torch.tensor(got)], [torch.tensor(want)])
    assert found.startswith(said) and bool(found) == bool(said)
    assert packages.difference([], [torch.zeros(1)]) == "0 tensors, not 1"
    assert "torch.float16" in packages.difference([torch.zeros(1).half()], [torch.zeros(1)])
    x = torch.zeros(2, 3)
    assert "(1, 2)" in packages.difference([x.t().contiguous().t()], [x])


def test_the_list_and_its_end(monkeypatch, capsys):
    def made():
        yield "net", lambda: (Net(), *given())
        yield "asking", lambda: (Asking(), *given())
        yield "none", lambda: F.relu(None)

    def absent():
        raise ImportError("No module named 'absent'")
        yield

    monkeypatch.setattr(packages, "set_up", lambda: None)
    monkeypatch.setattr(packages, "PACKAGES", {"here": made, "absent": absent})
    for more, status in ((["--only", "here net"], 0), ([], 1), (["--share", "1/3"], 1)):
        assert packages.main(["--device", "cpu", *more]) == status
        out = capsys.readouterr().out
        assert "absent: No module named" in out
        assert ("here net: the same bits" in out) is ("--share" not in more)
        if not more:
            assert "here none: not made, TypeError" in out and "1 models differ" in out
            assert "here asking: evaluation, " in out
