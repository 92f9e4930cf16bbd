"""The language of machine code: each construct does in words what it says."""

import builtins
import ctypes
import functools
import sys

import pytest

from autofuse.hot.c import (
    GIVEN,
    ITEMS,
    C,
    Py_IncRef,
    PyErr_Clear,
    PyFloat_AsDouble,
    PyList_Append,
    PyLong_AsLong,
    PyLong_FromLong,
    PyObject_Call,
    PyObject_CallNoArgs,
    PyObject_GetAttr,
    PyTuple_New,
    borrowed,
    call_object,
    call_pointer,
    kept,
    load,
    load32,
    reciprocal,
    room,
    store_double,
    store_float,
    tried,
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


def real_part(x) -> object:
    return PyObject_GetAttr(x, NAME)


def is_between(x, low, high):
    return PyFloat_AsDouble(low) <= PyFloat_AsDouble(x) and PyFloat_AsDouble(x) < PyFloat_AsDouble(
        high
    )


def written(at, x):
    at[0] = PyLong_AsLong(x)
    store_double(at + 8, PyFloat_AsDouble(x))
    at[2] = 0
    store_float(at + 16, PyFloat_AsDouble(x))
    store_double(at + 24, reciprocal(PyFloat_AsDouble(x)))
    return load32(at + 16)


def called(function, x):
    place = room(2)
    place[0] = x
    place[1] = 2
    return call_pointer(function, place[0], place[1])


def second_of(pair):
    item = load(pair + ITEMS + 8)
    Py_IncRef(item)
    return item


def squares(n, skipped):
    total = 0
    for k in range(n):
        for j in range(k, 2 * k):
            if j == skipped:
                continue
            total += j
        if total > 1000:
            break
    else:
        total = -total
    return total


def place_of(items: tuple, x):
    k = 0
    for item in items:
        if item is x:
            return k
        k += 1
    return -1


def sizes(a: tuple, b: list, c: dict):
    return 100 * len(a) + 10 * len(b) + len(c)


def reversed_tuple(items: list) -> object:
    made: tuple = PyTuple_New(len(items))
    for k in range(len(items)):
        made[k] = items[len(items) - k - 1]
    return made


def rotated(items: list):
    first = kept(items[0])
    items[0] = items[1]
    items[1] = first


def total(numbers: list) -> object:
    result = PyLong_FromLong(0)
    for k in range(len(numbers)):
        result = PyLong_FromLong(int(result) + int(numbers[k]))
    return result


def chosen(x, y, which) -> object:
    found = x
    if which != 0:
        found = (x, y)
    if which > 1:
        return True
    return found


def asked(function, x):
    if borrowed(PyObject_Call(function, (x,), 0)) is True:
        return 1
    return 2


def asked_often(functions: list, x):
    count = 0
    for k in range(len(functions)):
        answer = PyObject_Call(functions[k], (x,), 0)
        if answer is None:
            continue
        if answer is False:
            break
        while borrowed(PyObject_Call(functions[k], (x, answer), 0)) is True:
            count += 1
    return count


def asked_in_any_case(function):
    answer = tried(PyObject_CallNoArgs(function))
    if answer == 0:
        PyErr_Clear()
        return -1
    return int(answer)


def replaced(pair: Pair, function):
    pair.first = PyObject_CallNoArgs(function)
    return 1


def by_pointer(address, x) -> object:
    return call_object(address, x)


def any_call(word, function, args, count, names) -> object:
    if word == 5 or count == 0:
        return 0
    return args[count - 1]


def two_arguments(word, pair: Pair, x) -> object:
    if word == 5:
        return 0
    return pair.first


def failing(word, function) -> object:
    return PyObject_CallNoArgs(function)


def otherwise(function, args, flags, names) -> object:
    return NAME


FUNCTIONS = [arithmetic, ladder, gcd, turns, recursive, swapped, is_listed, appended, real_part,
             is_between, written, called, second_of, squares, place_of, sizes, reversed_tuple,
             rotated, total, chosen, asked, asked_often, asked_in_any_case, replaced, by_pointer,
             any_call, two_arguments, failing, otherwise]  # fmt: skip
DATA = 5
ENTRIES = [("any_call", 0), ("any_call", 2), ("two_arguments", 0), ("two_arguments", 2),
           ("failing", 4)]  # fmt: skip


@pytest.fixture(scope="module")
def machine():
    return Machine(FUNCTIONS, {**vars(builtins), **globals()}, ENTRIES, "otherwise", data=DATA)


@pytest.fixture
def run(machine):
    """Calls a function with words and objects; it gives a word."""
    return functools.partial(_call, machine, ctypes.c_int64)


def _call(machine, result, function, *args):
    types = [ctypes.c_int64 if type(arg) is int else ctypes.py_object for arg in args]
    return _kind(result, *types)(machine.address(function.__name__))(*args)


_kind = functools.cache(ctypes.PYFUNCTYPE)


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


# --- references --------------------------------------------------------------------------------


@pytest.fixture
def give(machine):
    """The same; it gives an object, or raises an error."""
    return functools.partial(_call, machine, ctypes.py_object)


@pytest.fixture
def held():
    """Calls something often and says how many references that leaves to objects."""

    def difference(objects, call):
        counts = []
        for times in (1, 5):
            for _ in range(times):
                call()
            counts.append([sys.getrefcount(x) for x in objects])
        return [after - before for before, after in zip(*counts, strict=True)]

    return difference


def test_items(run, give, held):
    a, b = object(), object()
    assert [run(place_of, (a, b), x) for x in (a, b, a, None)] == [0, 1, 0, -1]
    assert run(sizes, (a,), [a, b], {}) == 120
    items = [a, b]
    assert give(reversed_tuple, items) == (b, a)
    run(rotated, items)
    assert items == [b, a]
    assert held([a, b], lambda: run(rotated, items)) == [0, 0]
    assert held([a, b], lambda: give(reversed_tuple, items)) == [0, 0]


def test_numbers_that_are_objects(give):
    numbers = [1 << 40, 1 << 41, 7]
    before = sys.getallocatedblocks()
    for _ in range(100):
        assert give(total, numbers) == sum(numbers)
    assert sys.getallocatedblocks() - before < 50


def test_what_is_given_is_held_once(give, held):
    a, b = object(), object()
    assert give(chosen, a, b, 0) is a and give(chosen, a, b, 1) == (a, b)
    assert give(chosen, a, b, 2) is True
    assert held([a, b], lambda: [give(chosen, a, b, k) for k in range(3)]) == [0, 0]


def test_what_comes_up_in_the_middle_is_let_go(run, held):
    calls = []

    def often(x, answer=None):
        calls.append(x)
        return object() if answer is None else len(calls) < 4

    def never(x):
        return None

    def last(x):
        return False

    def after_last(x):
        raise AssertionError

    x = object()
    functions = [often, never, last, after_last]

    def call():
        assert run(asked_often, functions, x) == 2
        calls.clear()

    assert held([x, None, *functions], call) == [0] * 6
    assert held([x], lambda: run(asked, type, x)) == [0]


class Failed(Exception):
    pass


def fails(*args):
    raise Failed


@pytest.mark.parametrize("function", [asked, asked_often, replaced])
def test_an_error_ends_the_function(function, give, held):
    pair = Pair("a", "b")
    args = {asked: (fails, 1.5), asked_often: ([fails], 1.5), replaced: (pair, fails)}[function]

    def ended():
        with pytest.raises(Failed):
            give(function, *args)

    assert held([fails, *args], ended) == [0, 0, 0]
    assert pair.first == "a"


def test_errors_that_are_looked_at(run):
    assert run(asked_in_any_case, fails) == -1
    assert run(asked_in_any_case, lambda: 12) == 12


def test_attributes_take_what_is_new(run, held):
    pair, x = Pair("a", "b"), object()
    assert held([x], lambda: run(replaced, pair, lambda: x)) == [0]
    assert pair.first is x


def test_c_functions_that_give_objects(give):
    address = ctypes.cast(ctypes.pythonapi.PyObject_Repr, ctypes.c_void_p).value
    assert give(by_pointer, address, 1.5) == "1.5"


# --- entries -----------------------------------------------------------------------------------


@pytest.fixture
def enter(machine):
    """Calls the k-th entry as CPython does."""

    def call(k, *args, names=0):
        kind = ctypes.PYFUNCTYPE(ctypes.py_object, *[ctypes.c_uint64] * 4)
        given = (ctypes.py_object * max(1, len(args)))(*args)
        flag = 1 << 63  # PY_VECTORCALL_ARGUMENTS_OFFSET
        return kind(machine.entry(k))(0, ctypes.addressof(given), len(args) | flag, names)

    return call


def test_entries_take_any_call(enter):
    assert [enter(k, "a", "b") for k in (0, 1)] == [NAME, "b"]
    assert enter(1) == NAME


def test_entries_take_arguments_by_position(enter, held):
    pair = Pair("a", "b")
    assert [enter(k, pair, 2) for k in (2, 3)] == [NAME, "a"]
    assert enter(3, pair) == enter(3, pair, 2, 3) == NAME
    assert enter(3, "a", 2) == enter(3, pair, 2, names=id(("x",))) == NAME
    assert held([pair, "a", NAME], lambda: (enter(3, pair, 2), enter(3, pair))) == [0, 0, 0]


def test_errors_of_entries_are_the_callers(enter):
    assert enter(4, lambda: "b") == "b"
    with pytest.raises(Failed):
        enter(4, fails)


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


def loops_over(items: list):
    for _ in items:
        return 1


def loses_what_is_new(x):
    return PyLong_FromLong(x)


def loses_what_it_owns(x):
    made = PyLong_FromLong(x)
    return made


def owns_what_is_given(x):
    x = PyLong_FromLong(1)
    return int(x)


def elsewhere(x):
    return no_such_function(x)


LATER = GIVEN
no_such_function = C("word", 1)


REFUSED = [missing, ungiven, loops_over, elsewhere, loses_what_is_new, loses_what_it_owns,
           owns_what_is_given]  # fmt: skip


@pytest.mark.parametrize("function", REFUSED)
def test_what_it_does_not_know_it_refuses(function):
    with pytest.raises((KeyError, AssertionError, NotImplementedError)):
        Machine([function], {**vars(builtins), **globals()})
