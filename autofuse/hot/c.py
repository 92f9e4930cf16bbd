"""What machine code may name: what `compiler` builds in, C functions, and what `native` gives it.

Nothing here can be called from Python.
"""

from __future__ import annotations

from typing import Any

GIVEN: Any = object()  # stands for what the namespace has to give


class C:
    """A C function of this process; `C("int", 2)` takes two words and gives an int."""

    def __init__(self, result: str, arity: int) -> None:
        """result: "word", "int", "double", "void", or "new": a reference, or 0 with an error."""
        self.result, self.arity = result, arity

    def __call__(self, *args: Any) -> Any:
        raise TypeError("only machine code calls it")


class Address(int):
    """A number that is another one in the next process."""


load: Any = GIVEN  # (address): the word there
load32: Any = GIVEN  # its lower half
store_double: Any = GIVEN  # (address, double)
store_float: Any = GIVEN  # the same rounded to float
reciprocal: Any = GIVEN  # of a double, as C divides
call_pointer: Any = GIVEN  # (address, words...): what the C function there returns
call_object: Any = GIVEN  # the same, that it is a new reference, or 0 with an error
room: Any = GIVEN  # (count): the address of words that live until the function returns
kept: Any = GIVEN  # (reference): a new one
tried: Any = GIVEN  # (call): its new reference, or 0 and the function goes on
borrowed: Any = GIVEN  # (call): its new reference as a word, for something else holds it too

PyDict_Clear = C("void", 1)
PyDict_DelItem = C("int", 2)
PyDict_GetItemWithError = C("word", 2)
PyDict_New = C("new", 0)
PyDict_Next = C("int", 4)
PyDict_SetItem = C("int", 3)
PyDict_Size = C("word", 1)
PyErr_Clear = C("void", 0)
PyErr_Fetch = C("void", 3)
PyErr_NormalizeException = C("void", 3)
PyErr_Occurred = C("word", 0)
PyErr_Restore = C("void", 3)
PyException_SetTraceback = C("int", 2)
PyEval_GetFrame = C("word", 0)  # borrowed
PyEval_RestoreThread = C("void", 1)
PyEval_SaveThread = C("word", 0)
PyFloat_AsDouble = C("double", 1)
PyFrame_GetBack = C("new", 1)  # or 0 without an error
PyFrame_GetCode = C("new", 1)
PyFrame_GetLasti = C("int", 1)
PyList_Append = C("int", 2)
PyList_GetItem = C("word", 2)  # borrowed
PyList_New = C("new", 1)
PyList_SetItem = C("int", 3)
PyList_SetSlice = C("int", 4)
PyList_Size = C("word", 1)
PyLong_AsLong = C("word", 1)
PyLong_AsVoidPtr = C("word", 1)
PyLong_FromLong = C("new", 1)
PyNumber_Multiply = C("new", 2)
PyObject_Call = C("new", 3)
PyObject_CallNoArgs = C("new", 1)
PyObject_CallOneArg = C("new", 2)
PyObject_GenericSetAttr = C("int", 3)
PyObject_GetAttr = C("new", 2)
PyObject_RichCompareBool = C("int", 3)
PyObject_Vectorcall = C("new", 4)
PySet_Contains = C("int", 2)
PyInterpreterState_ThreadHead = C("word", 1)
PyThreadState_Get = C("word", 0)
PyThreadState_GetDict = C("word", 0)  # borrowed
PyThreadState_GetInterpreter = C("word", 1)
PyThreadState_Next = C("word", 1)
PyThread_get_thread_ident = C("word", 0)
PyType_GetFlags = C("word", 1)
PyTuple_GetSlice = C("new", 3)
PyTuple_New = C("new", 1)
PyTuple_Size = C("word", 1)
PyType_IsSubtype = C("int", 2)
Py_DecRef = C("void", 1)
Py_IncRef = C("void", 1)
_PyObject_MakeTpCall = C("new", 5)  # (thread, function, args, count, names)

ITEMS = tuple.__basicsize__  # where a tuple has its first item: 24, from Python 3.14 on 32
TUPLES = 1 << 26  # the flag of tuple and its subclasses
EQUAL = 2  # Py_EQ
WITH_KEYWORDS = 3  # METH_VARARGS | METH_KEYWORDS, as torch has its functions called
MOST_OPERANDS = 32  # of an op that is recorded: what `room`s are for
MOST_CHOICES = 256  # calls of a function that are known
TELL = 1  # in place of a function: that it is to be called
ANEW = 1  # in place of a Meta: see `record.recorded`
FAILED = (1 << 32) - 1  # the bits of a C int, which is not 0 where a setter fails
SIZED = 16  # where a tuple has how many
COUNT = (1 << 63) - 1  # of the flags of a vectorcall, how many arguments have no keyword
LISTED = 24  # where a list has the address of its first item
SLICED = 16  # where a slice has its start, stop and step
(AF, CURRENT, OBSERVER, WORDS, RECORDERS, EMPTY, WRITE, INPLACE, MATERIALIZE, OUT, DIM,
 ATTRIBUTES, DIFFERENTIATED, WORK, TO_SAVE, SAVED, MATERIALIZES, CLOSED, APPLIES, APPLY) = (
    "_af", "autofuse_current", "flushing", "words", "recorders", "",
    "write", "inplace", "materialize", "out", "dim", "__dict__", "differentiated",
    "work", "to_save", "saved_tensors", "materialize_grads", "closed", "applies", "apply",
)  # fmt: skip
GRAD, CASTS = "grad mode", "autocast"

# objects of `chain`, `record` and torch
Plain: Any = GIVEN  # torch.Tensor
Parameter: Any = GIVEN
DeviceContext: Any = GIVEN  # the class of a default device, which is a mode
function_mode_at: Any = GIVEN  # (position): a mode of torch functions
Size: Any = GIVEN  # torch's
Builtin: Any = GIVEN  # the class of functions of C
Function: Any = GIVEN  # of Python
local: Any = GIVEN
flushes: Any = GIVEN  # counted by their reasons
end_closed: Any = GIVEN  # `modes.end_closed`
refusals: Any = GIVEN  # by op and reason
watchers: Any = GIVEN  # who is told of eager ops
ranges: Any = GIVEN
hook_names: Any = GIVEN  # the globals of `hooks`
chain_flush: Any = GIVEN
tell: Any = GIVEN  # `flush.tell`
record_anew: Any = GIVEN  # `record.record`
CLONE: Any = GIVEN  # its op
inside: Any = GIVEN
is_foreign: Any = GIVEN
others_writing: Any = GIVEN
using: Any = GIVEN
serving: Any = GIVEN
others_waited: Any = GIVEN
BEGUN: Any = GIVEN  # where `claims.begun` has its value
all_recorders: Any = GIVEN
relieve: Any = GIVEN
OWNER_AT: Any = GIVEN  # where C++'s part of a tensor has the owner of its memory; 0 if not known
AUTOGRAD_AT: Any = GIVEN  # and what autograd knows of it
KNOWN_AT: Any = GIVEN  # where that owner has its object in Python
lifted: Any = GIVEN
SLOTS: Any = GIVEN  # ~k for each position k that Inputs mostly have
TARGETS: Any = GIVEN  # keywords by which a function may write
getitem: Any = GIVEN  # `Tensor.__getitem__` of torch's
GETITEM: Any = GIVEN  # (tensor, index): C's function behind it
Module: Any = GIVEN  # torch.nn.Module
loans: Any = GIVEN  # `lending.loans`
L1_LOSS: Any = GIVEN  # torch's
left_plain: Any = GIVEN  # `fused.left_plain`
call_fused: Any = GIVEN
is_outermost: Any = GIVEN
is_compiling: Any = GIVEN  # torch's
setitem: Any = GIVEN  # `Tensor.__setitem__` of torch's
SETITEM: Any = GIVEN  # (tensor, index, value): C's function behind it, a C int
indexed: Any = GIVEN  # the handler of it
reciprocal_of: Any = GIVEN  # the handler of `Tensor.reciprocal`
METHOD: Any = GIVEN  # (function, args, flags, names): what runs methods with keywords in C
strided: Any = GIVEN  # the layout
CODED: Any = GIVEN  # dtypes that kernels read
HANDLERS: Any = GIVEN  # `protocol.HANDLERS`
OPTIONS: Any = GIVEN
asking: Any = GIVEN  # functions of torch's in Python: see `called.asking`
known_functions: Any = GIVEN  # what is known of torch's functions, by these
origins: Any = GIVEN  # Origins by their instructions
between: Any = GIVEN  # code that calls ops for a program
trials: Any = GIVEN  # when there are some
measuring: Any = GIVEN  # has items while results may stay plain
wanted: Any = GIVEN  # devices on which reductions are recorded
CPU: Any = GIVEN  # the device
ask_origin: Any = GIVEN  # `origins.ask`
exactly: Any = GIVEN  # `writes.reads_apart`
STAY: Any = GIVEN
SIMPLE: Any = GIVEN  # classes of what no walk over arguments looks into
increment_version: Any = GIVEN
in_functorch: Any = GIVEN  # whether transforms of torch.func run
after_error: Any = GIVEN  # `grad.backward.after_error`
gradients_of: Any = GIVEN  # `Backward.gradients`
AT_ONCE: Any = GIVEN  # arguments with which a lock does not wait; to make them costs 25 ns
get_device: Any = GIVEN
get_num_threads: Any = GIVEN
entered: Any = GIVEN  # threads of torch's engine in which a context is current

PYTHON: Any = GIVEN  # (function, args, flags, names): what functions do by themselves

# C functions behind attributes of a tensor: (tensor, closure), or (tensor, 0) for a method
GRAD_GETTER: Any = GIVEN
GRAD_CLOSURE: Any = GIVEN
LAYOUT_GETTER: Any = GIVEN
LAYOUT_CLOSURE: Any = GIVEN
USERS_METHOD: Any = GIVEN

CLOSURE_AT: Any = GIVEN  # where a function has its cells
CELL_AT: Any = GIVEN  # where a cell has what is in it
TENSOR_AT: Any = GIVEN  # where a tensor has C++'s, whose address these take:
ADDRESS_OF: Any = GIVEN  # (tensor, where the address of its memory goes): a C int, 0 if it has one
COUNTER_OF: Any = GIVEN  # (tensor): where it has the address of its version counter, or 0
VERSION_AT: Any = GIVEN  # where that has the version
DTYPE_OF: Any = GIVEN  # (tensor, where it goes): torch's number of its dtype
INDEX_OF: Any = GIVEN  # the same: its device's index
DIM_OF: Any = GIVEN  # the same: how many dimensions there are
SIZES_OF: Any = GIVEN  # the same: the address of its sizes
STRIDES_OF: Any = GIVEN  # the same: that of its strides
BYTES_OF: Any = GIVEN  # the same: how many bytes its storage has
OFFSET_OF: Any = GIVEN  # the same: how many elements of it come before
WIDTH_OF: Any = GIVEN  # (torch's number of a dtype): how many bytes an element has
KEYS_AT: Any = GIVEN  # where what a tensor's first word leads to has its dispatch keys
DENSE: Any = GIVEN  # that of them by which its memory is laid out by strides
CPU_KEYS: Any = GIVEN  # those of a tensor that is nothing but memory there...
CUDA_KEYS: Any = GIVEN  # ...and there
REQUIRES_GRAD: Any = GIVEN  # (that): whether it requires grad, in the lowest byte
NUMBER_AT: Any = GIVEN  # where a dtype has its number, and a device those of its type and index

GRAD_MODE: Any = GIVEN  # (): whether grad mode is on, in the lowest byte
AUTOCAST: Any = GIVEN  # (device type): whether autocast of that is on, in the lowest byte
PEEK: Any = GIVEN  # (): the number of the next node of autograd
TAKE: Any = GIVEN  # (): the same, used up
FUNCTIONS_OFF: Any = GIVEN  # (): what torch functions are off for, in the lowest byte
SWITCH_OFF: Any = GIVEN  # (state): 0 for nobody, 1 for classes, 2 for modes too
FUNCTION_MODES: Any = GIVEN  # (): how many modes of torch functions are on
DISPATCH_MODES: Any = GIVEN  # (): how many modes of torch's dispatcher are on
SKIPS_NEXT: Any = GIVEN  # (): whether the next call asks for no overrides, in the lowest byte; or 0

WEAKREFS: Any = GIVEN  # where a tensor has its weak references
COUNTED: Any = GIVEN  # what a flush counts above an object's reference count
