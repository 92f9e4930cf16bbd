"""A script: what a trial says of machine code in which something is wrong, each in its own fork.

Prints JSON: the name of a breakage -> [signal that ended it, what the trial said].
"""

import json
import os
import resource
import select
import signal
import sys

os.environ["AUTOFUSE_NATIVE"] = "0"

from autofuse.hot import c, native, places, trial, values  # noqa: E402
from autofuse.hot.c import C  # noqa: E402


def replace(function):
    """Let `function` be the machine function of its name."""
    (stage,) = (
        stage
        for stage in native._STAGES
        if getattr(vars(stage).get(function.__name__), "__module__", "") == stage.__name__
    )
    function.__module__ = stage.__name__
    setattr(stage, function.__name__, function)


def give(**others):
    """Give the stages something else."""
    given = native._given()
    native._given = lambda: {**given, **{name: make(given) for name, make in others.items()}}


def put(**constants):
    """Change constants, in every stage that has them."""
    for module in (c, *native._STAGES):
        for name in constants.keys() & vars(module).keys():
            setattr(module, name, constants[name])


def nothing():
    pass


def lists_elsewhere():
    put(LISTED=32)


def lists_at_no_pointer():
    put(LISTED=16)


def tuples_elsewhere():
    put(ITEMS=16)


def types_elsewhere():
    def class_of(x):
        return load(x + 16)  # noqa: F821

    replace(class_of)


def types_at_no_address():
    def class_of(x):
        return load(x - x + 8)  # noqa: F821

    replace(class_of)


def calls_elsewhere():
    real = native._Calls.__init__

    def init(self):
        real(self)
        self.place -= 1

    native._Calls.__init__ = init


def functions_run_by_another():
    from autofuse.record import record

    calls = native._Calls()
    calls.set(record.relieve, calls.python + 1)
    native._hot = lambda: [("flush", record.relieve, ())]


def counts_elsewhere():
    give(COUNTED=lambda given: given["COUNTED"] + 1)


def other_count_of_references():
    from autofuse.chain import liveness

    liveness.ALONE += 1


def other_getter():
    give(DENSE=lambda given: 0,  # or it would be asked about few
         LAYOUT_GETTER=lambda given: given["GRAD_GETTER"],
         LAYOUT_CLOSURE=lambda given: given["GRAD_CLOSURE"])  # fmt: skip


def other_method():
    give(USERS_METHOD=lambda given: given["ADDRESS_OF"])


def tensors_elsewhere():
    give(TENSOR_AT=lambda given: given["TENSOR_AT"] + 8)


def versions_elsewhere():
    give(VERSION_AT=lambda given: given["VERSION_AT"] - 8)


def getters_have_moved():
    real = places.entry_of
    places.entry_of = lambda descriptor, kind, size: real(type.__dict__["__dict__"], kind, size)


def no_such_getter():
    from autofuse.chain.shell import Tensor

    places.Tensor = type("Tensor", (Tensor,), {"__weakrefoffset__": 0})
    places.TensorBase = object


def weak_references_elsewhere():
    give(WEAKREFS=lambda given: given["WEAKREFS"] - 8)


def no_such_c_function():
    def number_of(function):
        return PyList_NoSuchFunction(function)  # noqa: F821

    values.PyList_NoSuchFunction = C("word", 1)
    replace(number_of)


def counts_twice():
    def count_one(counter, key):
        number = 2
        before = PyDict_GetItemWithError(counter, key)  # noqa: F821
        if before != 0:
            number += int(before)
        PyDict_SetItem(counter, key, PyLong_FromLong(number))  # noqa: F821

    replace(count_one)


def leaves_all_to_python():
    def handler(entry, function, args, count, names) -> object:
        return 0

    replace(handler)


def keeps_a_reference():
    def emptied(items) -> object:
        Py_IncRef(items)  # noqa: F821
        return PyList_New(0)  # noqa: F821

    replace(emptied)


def gives_a_reference_back_twice():
    def count_one(counter, key):
        number = 1
        before = PyDict_GetItemWithError(counter, key)  # noqa: F821
        if before != 0:
            number += int(before)
        PyDict_SetItem(counter, key, PyLong_FromLong(number))  # noqa: F821
        Py_DecRef(counter)  # noqa: F821

    replace(count_one)


def ends_in_an_assertion():
    def make(*args):
        raise AssertionError("not so")

    native.Machine = make


def of_a_type_that_is_missing():
    native.c = None


BREAKAGES = (
    nothing, lists_elsewhere, lists_at_no_pointer, tuples_elsewhere, types_elsewhere,
    types_at_no_address, calls_elsewhere, functions_run_by_another, counts_elsewhere,
    other_count_of_references, other_getter, other_method, tensors_elsewhere, versions_elsewhere,
    getters_have_moved, no_such_getter,
    weak_references_elsewhere, no_such_c_function, counts_twice, leaves_all_to_python,
    keeps_a_reference, gives_a_reference_back_twice, ends_in_an_assertion,
    of_a_type_that_is_missing,
)  # fmt: skip


def tried(breakage):
    """(signal, what the trial says) in a fork."""
    mine, others = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            breakage()
            said = trial.differences()
        except Exception as error:
            said = f"the breakage itself: {error!r}"
        os.write(others, said.encode()[:4000])
        os._exit(0)
    os.close(others)
    if not select.select([mine], [], [], 120)[0]:
        os.kill(pid, signal.SIGKILL)
    said = os.read(mine, 4000).decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


if __name__ == "__main__":
    chosen = [b for b in BREAKAGES if not sys.argv[1:] or b.__name__ in sys.argv[1:]]
    json.dump({breakage.__name__: tried(breakage) for breakage in chosen}, sys.stdout, indent=1)
