"""The language of machine code: each construct does in words what it says."""

import ast
import ctypes
import inspect
import sys
import textwrap

import pytest

from autofuse.hot import native
from autofuse.hot.c import (
    GIVEN,
    ITEMS,
    C,
    Py_IncRef,
    PyFloat_AsDouble,
    PyList_Append,
    PyLong_AsLong,
    PyObject_GetAttr,
    call_pointer,
    load,
    load32,
    reciprocal,
    room,
    store,
    store_double,
    store_float,
)
from autofuse.hot.code import offset_of
from autofuse.hot.machine import Machine


class Pair:
    __slots__ = ("first", "second")

    def __init__(self, first, second):
        self.first, self.second = first, second


NAME = "real"


def arithmetic(a, b):
    return (a + b) * 3 - (a & b) + (a << 2) + (b >> 1) - ~a + -b


def ladder(a, b):
    if a < 0 and b < 0 or a == 100:
        return 1
    elif not a <= b:
        return 2
    if a != b and (a > 5 or b >= 7):
        a = a + 10
        return a
    return 3


def gcd(a, b):
    while b != 0:
        c = a
        while c >= b:
            c -= b
        a = b
        b = c
    return a


def turns(n, skipped):
    total = 0
    while True:
        n -= 1
        if n == skipped:
            continue
        if n < 0:
            break
        total += n
    return total


def recursive(n):
    if n < 2:
        return n
    return recursive(n - 1) + recursive(n - 2)


def swapped(pair: Pair):
    first = pair.first
    Py_IncRef(first)
    pair.first = pair.second
    pair.second = first


def is_listed(x):
    return load(x + 8) is list


def appended(items, x):
    return PyList_Append(items, x)


def real_part(x):
    return PyObject_GetAttr(x, NAME)


def is_between(x, low, high):
    return PyFloat_AsDouble(low) <= PyFloat_AsDouble(x) and PyFloat_AsDouble(x) < PyFloat_AsDouble(
        high
    )


def written(at, x):
    store(at, PyLong_AsLong(x))
    store_double(at + 8, PyFloat_AsDouble(x))
    store(at + 16, 0)
    store_float(at + 16, PyFloat_AsDouble(x))
    store_double(at + 24, reciprocal(PyFloat_AsDouble(x)))
    return load32(at + 16)


def called(function, x):
    place = room(2)
    store(place, x)
    store(place + 8, 2)
    return call_pointer(function, load(place), load(place + 8))


def second_of(pair):
    item = load(pair + ITEMS + 8)
    Py_IncRef(item)
    return item


def counted(start, x):
    return start + x


FUNCTIONS = [arithmetic, ladder, gcd, turns, recursive, swapped, is_listed, appended, real_part,
             is_between, written, called, second_of, counted]  # fmt: skip


@pytest.fixture(scope="module")
def machine():
    return Machine(FUNCTIONS, {**globals(), "list": list}, [("counted", 5), ("counted", 7)])


@pytest.fixture
def run(machine):
    """Calls a function with words."""

    def call(function, *words):
        kind = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(words))
        return kind(machine.address(function.__name__))(*words)

    return call


NUMBERS = (-7, -1, 0, 1, 3, 6, 12, 100)


@pytest.mark.parametrize("function", [arithmetic, ladder])
def test_numbers(run, function):
    for a in NUMBERS:
        for b in NUMBERS:
            assert run(function, a, b) == function(a, b), (a, b)


def test_loops(run):
    assert run(gcd, 84, 36) == 12
    assert [run(turns, n, 2) for n in range(6)] == [turns(n, 2) for n in range(6)]
    assert run(recursive, 15) == 610


def test_attributes_keep_count_of_references(run):
    a, b = object(), object()
    pair = Pair(a, b)
    before = sys.getrefcount(a), sys.getrefcount(b)
    run(swapped, id(pair))
    assert pair.first is b and pair.second is a
    # the borrowed one was taken by hand, and is one too many
    assert (sys.getrefcount(a), sys.getrefcount(b)) == (before[0] + 1, before[1])


def test_objects_by_name(run, machine):
    assert run(is_listed, id([])) == 1 and run(is_listed, id(())) == 0
    items, value = [], 12345.5
    assert run(appended, id(items), id(value)) == 0 and items[0] is value
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
    assert kind(machine.address("real_part"))(value) == value


def test_doubles(run):
    def between(x, low, high):
        return run(is_between, id(x), id(low), id(high))

    assert between(0.5, 0.0, 1.0) == 1
    assert between(1.0, 0.0, 1.0) == between(float("nan"), 0.0, 1.0) == 0
    place, three = (ctypes.c_uint8 * 32)(), 3
    assert run(written, ctypes.addressof(place), id(three)) == 0x40400000
    assert ctypes.c_int64.from_buffer(place).value == 3
    assert ctypes.c_double.from_buffer(place, 8).value == 3.0
    assert ctypes.c_double.from_buffer(place, 24).value == 1 / 3
    nothing = 0
    run(written, ctypes.addressof(place), id(nothing))
    assert ctypes.c_double.from_buffer(place, 24).value == float("inf")


def test_pointers(run):
    times = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(lambda a, b: a * b)
    assert run(called, ctypes.cast(times, ctypes.c_void_p).value, 21) == 42
    pair = ("a", "b")
    assert run(second_of, id(pair)) == id("b")


def test_entries_come_before_the_arguments(machine):
    kind = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    assert [kind(machine.entry(k))(100) for k in (0, 1)] == [105, 107]


def test_a_class_without_slots_has_no_places():
    class Plain:
        pass

    with pytest.raises(KeyError):
        offset_of(Plain, "first")
    assert offset_of(Pair, "first") != offset_of(Pair, "second")


def missing(x):
    return x + NOWHERE  # noqa: F821


def ungiven(x):
    return x + LATER


def loops_over(x):
    for _ in range(3):
        x += 1
    return x


def elsewhere(x):
    return no_such_function(x)


LATER = GIVEN
no_such_function = C("word", 1)


@pytest.mark.parametrize("function", [missing, ungiven, loops_over, elsewhere])
def test_what_it_does_not_know_it_refuses(function):
    with pytest.raises((KeyError, AssertionError, NotImplementedError)):
        Machine([function], globals())


ALLOCATE = {"PyLong_FromLong", "PyLong_FromVoidPtr", "PyTuple_New", "PyDict_New"}


def test_what_may_not_be_allocated_is_asked_for():
    """Results of functions that allocate are compared with 0 where they are first used.

    Integers from -5 to 256 are there already, a list that is given away is for whoever takes it.
    """
    seen = 0
    for function in native._functions():
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        calls = {
            id(node): node for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ALLOCATE
        }  # fmt: skip
        small = [k for k, call in calls.items() if _is_small(call)]
        for k in small:
            del calls[k]
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and id(node.value) in calls:
                seen += 1
                del calls[id(node.value)]
                (target,) = node.targets
                assert isinstance(target, ast.Name)
                uses = [
                    (use.lineno, use.col_offset) for use in ast.walk(tree)
                    if isinstance(use, ast.Name) and use.id == target.id
                    and isinstance(use.ctx, ast.Load) and use.lineno > node.lineno
                ]  # fmt: skip
                asked = [
                    (test.left.lineno, test.left.col_offset) for test in ast.walk(tree)
                    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name)
                    and ast.unparse(test) in (f"{target.id} == 0", f"{target.id} != 0")
                ]  # fmt: skip
                assert min(uses) in asked, f"{function.__name__}, line {node.lineno}: {target.id}"
        assert not calls, f"{function.__name__}: {[ast.unparse(call) for call in calls.values()]}"
    assert seen >= 12


def _is_small(call):
    try:
        return -5 <= ast.literal_eval(call.args[0]) <= 256
    except (ValueError, IndexError):
        return False
