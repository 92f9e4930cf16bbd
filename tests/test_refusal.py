"""Refusals: one object for an op and a reason, whoever counts there."""

import ctypes

import pytest

from autofuse.chain.refusal import Refusal, refusal_of, refusals, watchers


@pytest.fixture
def refusal():
    made = refusal_of("an op of no program", "no reason")
    yield made
    del refusals["an op of no program", "no reason"]


def test_there_is_one_for_an_op_and_a_reason(refusal):
    assert refusal_of("an op of no program", "no reason") is refusal
    assert refusals["an op of no program", "no reason"] is refusal
    assert (refusal.op, refusal.reason, refusal.times) == ("an op of no program", "no reason", 0)
    assert Refusal("an op of no program", "no reason") is not refusal


def test_machine_code_counts_where_python_does(refusal):
    refusal.count()
    ctypes.c_int64.from_address(refusal.address).value += (1 << 40) + 1
    refusal.count()
    assert refusal.times == (1 << 40) + 3
    refusal.reset()
    assert refusal.times == 0 == ctypes.c_int64.from_address(refusal.address).value


def test_watchers_are_told_of_each(refusal):
    told = []
    watchers.append(lambda *which: told.append(which))
    try:
        refusal.count()
        refusal.count()
    finally:
        watchers.pop()
    refusal.count()
    assert told == [("an op of no program", "no reason")] * 2 and refusal.times == 3
