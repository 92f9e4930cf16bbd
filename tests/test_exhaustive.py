"""The exhaustive comparison itself: it walks what it says, and sees what differs."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from exhaustive import FAR, differing, main, measure, moderate, space, ulps

import autofuse
import cases
from autofuse.ops.arithmetic import OPS
from support import DEVICES, FLOATS, INTS


def values(*numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ulps_count_the_numbers_between(dtype):
    one, inf = values(1.0, dtype=dtype), values(float("inf"), dtype=dtype)
    above = one + torch.finfo(dtype).eps
    below = one - torch.finfo(dtype).eps / 2
    largest = values(torch.finfo(dtype).max, dtype=dtype)
    assert ulps(one, one).item() == 0
    assert ulps(above, one).item() == ulps(one, above).item() == 1
    assert ulps(-above, -below).item() == 2
    assert ulps(inf, largest).item() == 1
    assert ulps(inf, -inf).item() > 2**15 - 2**12


def test_ulps_at_zero_and_nan():
    tiny, nan = 2.0**-149, float("nan")
    got, want = values(0.0, -0.0, -tiny, nan, nan, 1.0), values(-0.0, tiny, tiny, nan, 1.0, nan)
    assert ulps(got, want).tolist() == [0, 1, 2, 0, FAR, FAR]
    assert ulps(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [0, FAR]
    assert ulps(torch.tensor([True]), torch.tensor([True])).tolist() == [0]


def test_differing_is_about_bits():
    nan = float("nan")
    mask = differing(values(0.0, nan, 1.0, nan), values(-0.0, -nan, 1.0, 1.0))
    assert mask.tolist() == [True, False, False, True]
    assert differing(values(1.0, nan), values(1.0, nan)) is None


@pytest.mark.parametrize("dtype", (torch.int8, torch.uint8), ids=str)
def test_all_pairs(dtype):
    words, chunks = space(dtype, 2, 32, "cpu")
    pairs = [pair for x, y in chunks for pair in zip(x.tolist(), y.tolist(), strict=True)]
    assert words == "all 2^16" and len(pairs) == len(set(pairs)) == 2**16


def test_all_halves():
    words, chunks = space(torch.float16, 1, 32, "cpu")
    bits = torch.cat([x.view(torch.int16) for (x,) in chunks])
    assert words == "all 2^16" and len(bits.unique()) == len(bits) == 2**16


def test_patterns_in_several_chunks(monkeypatch):
    monkeypatch.setitem(sys.modules["exhaustive"].CHUNK, "cpu", 12)
    _, chunks = space(torch.bfloat16, 1, 32, "cpu")
    parts = [x.view(torch.int16) for (x,) in chunks]
    assert len(parts) == 16 and len(torch.cat(parts).unique()) == 2**16


def test_sampled_patterns_lie_evenly():
    words, chunks = space(torch.float32, 1, 16, "cpu")
    special, (x,) = next(chunks), next(chunks)
    assert words.startswith("2^16 of 2^32, ") and next(chunks, None) is None
    bits = x.view(torch.int32).sort().values.to(torch.int64)
    assert bits.diff().max() <= 2**16 + 1 and len((bits & 255).unique()) == 256
    assert special[0].isnan().any() and len(special[0]) % 64 == 0


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int32, torch.int64), ids=str)
def test_random_space(dtype):
    words, chunks = space(dtype, 3, 14, "cpu")
    chunks = list(chunks)
    assert "2^14 random" in words and sum(len(x) for x, _, _ in chunks[1:]) == 2**14
    assert all(len(x) % 64 == 0 and x.is_contiguous() for parts in chunks for x in parts)
    small = moderate(chunks[1][0]).double().abs()
    assert small[small.isfinite()].max() <= 2**16


CASES = (("neg", torch.neg, torch.float32, 1), ("add", torch.add, torch.bfloat16, 2),
         ("addcdiv", torch.addcdiv, torch.float32, 3), ("and", torch.bitwise_and, torch.uint8, 2),
         ("add", torch.add, torch.int64, 2))  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "call", "dtype", "count"), CASES)
def test_same_bits(op, call, dtype, count, device):
    result = measure(op, call, dtype, count, device=device, log2=12, exact=True)
    assert result.passed and result.tested >= 2**12, result


@pytest.mark.parametrize("exact", (True, False))
@pytest.mark.parametrize("device", DEVICES)
def test_a_mismatch_is_counted(device, exact):
    result = measure(
        "floor", torch.floor, torch.float16, device=device, exact=exact,
        eager=lambda x: torch.where(x == 2.5, 2.001953125, torch.floor(x)),
    )  # fmt: skip
    assert not result.passed and result.mismatches == 1 and result.tested == 2**16
    assert result.ulp == (0 if exact else 1)
    want = {"input": ["0x4100 (2.5)"], "got": "0x4000 (2)", "want": "0x4001 (2.00195312)"}
    assert result.example == want and "1 of 65536 differ" in str(result)


def test_a_mismatch_of_two_operands():
    result = measure(
        "xor", torch.bitwise_xor, torch.int8, 2, exact=True,
        eager=lambda x, y: (x ^ y) + (x == 7) * (y < -125).to(torch.int8),
    )  # fmt: skip
    assert result.mismatches == 3
    assert result.example == {"input": ["7", "-128"], "got": "-121", "want": "-120"}


def test_what_is_not_fused_is_said():
    assert measure("cumsum", lambda x: x.cumsum(0), torch.float32, log2=8).cell == (
        "not fused: cumsum"
    )
    assert measure("to", lambda x: x.float(), torch.float32, log2=8).cell == "no op"
    refused = measure("invert", torch.bitwise_not, torch.float32, log2=8)
    assert refused.cell == "not in torch" and refused.passed
    late = measure("neg", torch.neg, torch.float32, log2=8, deadline=0.0)
    assert late.cell == "not reached" and not late.passed


def test_every_table_is_walked():
    tables = {name for name in vars(cases) if name.startswith("INT_") or name.endswith("_CALLS")}
    walked = [calls for _, calls, _, _ in sys.modules["exhaustive"].GROUPS]
    assert all(any(vars(cases)[name] is calls for calls in walked) for name in tables)


def test_every_short_expression_is_walked():
    """Over all values of one operand and all pairs of two, or --short would prove nothing."""
    short = {(name, len(op.names)) for name, op in OPS.items() if op.f16 or op.bf16}
    walked = {
        (name, count)
        for _, calls, count, dtypes in sys.modules["exhaustive"].GROUPS
        for name in calls
        if {torch.float16, torch.bfloat16} <= set(dtypes)
    }
    assert short and short <= walked
    for dtype in (torch.float16, torch.bfloat16):
        assert [space(dtype, count, 32, "cpu")[0] for count in (1, 2)] == ["all 2^16", "all 2^32"]


def test_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", False)  # `main` sets it
    main(["--device", "cpu", "--log2", "8", "--ops", "sigmoid,add,lerp,to_uint8,bitwise_not",
          "--dtypes", "float32,float16,int32", "--out", str(tmp_path)])  # fmt: skip
    out = capsys.readouterr().out
    assert "2^8 of 2^16" in out and "10 cases" in out and "0 not fused" in out
    record = json.loads((tmp_path / "exhaustive.json").read_text())
    results = [result for group in record["groups"].values() for result in group]
    assert {result["status"] for result in results} == {"fused"}
    assert all(result["tested"] >= 2**8 for result in results)
    table = (tmp_path / "exhaustive.md").read_text()
    assert "## Two floats" in table and f"torch {torch.__version__}" in table
    assert "| bitwise_not | 0 |" in table and "| sigmoid | " in table
    assert not {str(dtype)[6:] for dtype in INTS if dtype is not torch.int32} & set(table.split())
