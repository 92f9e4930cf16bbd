"""The compiler of machine code: from functions in the language of `body` to an object file.

It takes some seconds; nothing here knows what it is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from ..kernel.llvm import parsed, target_machine
from .body import write
from .code import ADDRESSES, DATA, Code
from .module import ANYWHERE, WORD, Module

_Function = Callable[..., Any]

# the parameters of a function that takes any call: of which function, arguments from an address on,
# how many are without a keyword, and a tuple of the keywords of the others, or 0
_CALL = ("function", "args", "count", "names")


def compiled(
    functions: Sequence[_Function],
    names: Mapping[str, Any],
    entries: Sequence[tuple[str, int]],
    otherwise: str,
) -> Code:
    """The object code of `functions`, and of `entries`, as `machine.Machine` has them."""
    module = Module(functions, names)
    for function in functions:
        write(module, function)
    # all takes 1.8 times what it does with 0, 2.9 s of a slow core and not 1.6, once for the
    # versions of all; of the instructions between C's calls a quarter goes
    machine = target_machine(opt=1)
    entered = {name for name, _ in entries}
    for function in functions:
        if function.__name__ in entered:
            _enter(module, function, otherwise)
    text = [str(module.ir), f"@{DATA} = external global {ANYWHERE}\n"]
    for k, (name, offset) in enumerate(entries):
        first = f"i64 add (i64 ptrtoint (ptr @{DATA} to i64), i64 {offset})"
        call = f"%r = tail call i64 @enter.{name}({first}, i64 %0, i64 %1, i64 %2, i64 %3)"
        text.append(f"define internal i64 @entry.{k}(i64, i64, i64, i64) {{\n")
        text.append(f"  {call}\n  ret i64 %r\n}}\n")
    made = [f.__name__ for f in functions] + [f"entry.{k}" for k in range(len(entries))]
    listed = ", ".join(f'ptr @"{name}"' for name in made)
    text.append(f"@{ADDRESSES} = constant [{len(made)} x ptr] [{listed}]\n")
    optimized = parsed("".join(text), machine)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(1))
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.add_instruction_combine_pass()
    passes.add_tail_call_elimination_pass()
    passes.run(optimized, builder)
    return Code(machine.emit_object(optimized), tuple(module.named), tuple(module.slots))


def _enter(module: Module, source: _Function, otherwise: str) -> None:
    """What vectorcalls of a function come through; see `machine.Machine`."""
    assert source.__name__ in module.giving
    _, *parameters = source.__code__.co_varnames[: source.__code__.co_argcount]
    signature = ir.FunctionType(WORD, [WORD] * 5)
    entry = ir.Function(module.ir, signature, f"enter.{source.__name__}")
    first, function, args, flags, names = entry.args
    builder = ir.IRBuilder(entry.append_basic_block())
    leave, failed = entry.append_basic_block(), entry.append_basic_block()

    def item(address: Any, k: int) -> Any:
        place = builder.add(address, WORD(8 * k))
        return builder.load(builder.inttoptr(place, WORD.as_pointer()))

    def expect(value: Any, wanted: Any, otherwise: Any = leave) -> None:
        further = entry.append_basic_block()
        builder.cbranch(builder.icmp_signed("==", value, wanted), further, otherwise)
        builder.position_at_end(further)

    count = builder.and_(flags, WORD((1 << 63) - 1))
    passed = [function, args, count, names]
    if tuple(parameters) != _CALL:
        expect(names, WORD(0))
        expect(count, WORD(len(parameters)))
        passed = [item(args, k) for k in range(len(parameters))]
        for parameter, value in zip(parameters, passed, strict=True):
            kind = source.__annotations__.get(parameter)
            if kind is not None:
                expect(item(value, 1), module.word(getattr(kind, "__name__", kind)))
    module.functions[source.__name__].attributes.add("alwaysinline")  # this calls it alone
    result = builder.call(module.functions[source.__name__], [first, *passed])
    with builder.if_then(builder.icmp_signed("!=", result, WORD(0))):
        builder.ret(result)
    expect(builder.call(module.c("PyErr_Occurred"), []), WORD(0), failed)
    builder.branch(leave)
    builder.position_at_end(leave)
    builder.ret(builder.call(module.functions[otherwise], [function, args, flags, names]))
    builder.position_at_end(failed)
    builder.ret(WORD(0))
