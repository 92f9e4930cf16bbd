"""Holders: who keeps a value alive, as a program's author would name them.

Looks at frames and at what the garbage collector knows, which takes 20 ms; nothing else does.
"""

from __future__ import annotations

import dis
import gc
import inspect
import sys
from types import CellType, CodeType, FrameType, GeneratorType
from typing import Any

import torch

from ..chain.shell import Tensor
from ..chain.state import Chain, Node
from ..lines import frames, is_inside

ARGUMENT = "an argument of the call"


def holders(shells: list[Tensor], counts: list[int]) -> list[tuple[str, ...]]:
    """Who holds each of `shells`, which have so many references from outside autofuse.

    First the variables of the frames on the stack, then, where they do not account for every
    reference, what the garbage collector knows.
    """
    names: list[dict[str, None]] = [{} for _ in shells]
    ours = {id(shells)}  # containers of autofuse's own
    theirs: dict[int, str] = {}  # id of a container in a variable -> its name
    arguments: set[int] = set()
    modules: set[int] = set()
    for frame in frames():
        inside = is_inside(frame)
        for name, value in _variables(frame, modules):
            if isinstance(value, (list, tuple, dict, set)):
                if inside:
                    ours.add(id(value))
                    if isinstance(value, tuple):
                        arguments.update(
                            k for k, shell in enumerate(shells) if any(x is shell for x in value)
                        )
                else:
                    theirs.setdefault(id(value), name)
            for k, shell in enumerate(shells):
                if value is shell and inside:
                    arguments.add(k)
                elif value is shell:
                    names[k][f"variable {name}"] = None
    ours.difference_update(theirs)
    missing = [(k, shell) for k, shell in enumerate(shells) if len(names[k]) < counts[k]]
    if missing:
        _add_containers(names, missing, ours, theirs)
    for k, shell in enumerate(shells):
        if not names[k]:
            in_c = torch.Tensor._use_count(shell) > 1  # type: ignore[attr-defined]
            name = "C++" if in_c else ARGUMENT if k in arguments else "a temporary"
            names[k][name] = None
    return [tuple(found) for found in names]


def _variables(frame: FrameType, modules: set[int]) -> list[tuple[str, Any]]:
    """The local variables of `frame`, and those of its module unless it is among `modules`."""
    variables, module, code = frame.f_locals, frame.f_globals, frame.f_code
    unread = _unread(code) if _CELLS_CRASH and code.co_cellvars else set()
    if unread:
        names = dict.fromkeys((*code.co_varnames, *code.co_cellvars, *code.co_freevars))
        found = [
            (name, variables[name]) for name in names if name not in unread and name in variables
        ]
    else:
        found = list(variables.items())
    if _COPY and code.co_flags & inspect.CO_OPTIMIZED:
        if sys.getrefcount(variables) <= _COPY:
            variables.clear()
    if id(module) not in modules and variables is not module and not is_inside(frame):
        modules.add(id(module))
        found += [(f"{name} (global)", value) for name, value in list(module.items())]
    return found


def _unread(code: CodeType) -> set[str]:
    """Names of closures that comprehensions use too, whose items are no cells meanwhile."""
    used = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_FAST_AND_CLEAR"}
    return used.intersection(code.co_cellvars)


def _calibrate() -> int:
    """References to the copy that nobody else holds."""
    variables = sys._getframe().f_locals
    count = sys.getrefcount(variables)
    variables.clear()
    return count


# these versions of Python take what lies there for cells all the same (CPython's gh-128396)
_CELLS_CRASH = (3, 13) <= sys.version_info < (3, 13, 3)
# up to Python 3.12 `f_locals` is a copy that stays with the frame, and would keep the values alive
_COPY = _calibrate() if sys.version_info < (3, 13) else 0


def _add_containers(
    names: list[dict[str, None]],
    missing: list[tuple[int, Tensor]],
    ours: set[int],
    theirs: dict[int, str],
) -> None:
    """Add to `names` the containers and objects that refer to the `missing` shells."""
    ours.add(id(missing))
    for referrer in gc.get_referrers(*(shell for _, shell in missing)):
        if id(referrer) in ours or isinstance(referrer, (Chain, Node)):
            continue
        referents = set(map(id, gc.get_referents(referrer)))
        if isinstance(referrer, FrameType):  # its variables are known, but for a generator's
            if sys.version_info >= (3, 11):  # which refers to them itself
                continue
            above = (r for r in gc.get_referrers(referrer) if isinstance(r, GeneratorType))
            referrer = next(above, None)
            if referrer is None:
                continue
        for k, shell in missing:
            name = _as_holder(referrer, shell, theirs) if id(shell) in referents else ""
            if name and not (name == "a closure" and names[k]):  # its variable is named
                names[k][name] = None


def _as_holder(referrer: Any, shell: Tensor, theirs: dict[int, str]) -> str:
    """What `referrer` is called as the holder of `shell`; empty if it is none of the user's."""
    kind = type(referrer).__name__
    if isinstance(referrer, tuple) and id(referrer) not in theirs:
        return ""  # mostly the arguments of a call
    if id(referrer) in theirs:
        return f"{kind} {theirs[id(referrer)]}"
    if isinstance(referrer, dict):
        name = next((key for key, value in referrer.items() if value is shell), None)
        owned = (o for o in gc.get_referrers(referrer) if getattr(o, "__dict__", None) is referrer)
        owner = next(owned, None)
        return "a dict" if owner is None else f"attribute {name} of {type(owner).__name__}"
    if isinstance(referrer, (list, set)):
        return f"a {kind}"
    if isinstance(referrer, GeneratorType):
        inside = referrer.gi_frame is not None and is_inside(referrer.gi_frame)
        return "" if inside else f"generator {referrer.__name__}"
    if isinstance(referrer, CellType):
        return "a closure"
    for name, value in list((getattr(referrer, "__dict__", None) or {}).items()):
        if value is shell:
            return f"attribute {name} of {kind}"
    return "" if type(referrer).__module__.startswith("autofuse") else f"a {kind}"
