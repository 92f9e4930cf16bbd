"""Kinds: what a setting may be, as text in the environment and as a value. Knows no settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from .sizes import exact_size, parse_size

Bytes = Annotated[int, "in the environment as the disk cache reads them: 1000, 64K, 256M, 1G"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a setting may be. Errors have no text here; `Setting` knows what they are about."""

    texts: str  # what is valid in the environment: "use ..."
    values: str  # what may be assigned
    read: Callable[[str], Any]  # the value of a text; ValueError if there is none
    check: Callable[[Any], Any]  # what is kept of an assigned value; TypeError or ValueError
    show: Callable[[Any], str]  # the text that `read` turns into a value


def kind_of(annotation: Any, least: int = 1) -> Kind:
    """What a field of this type may be; a whole number: `least` or more."""
    words = get_args(annotation)
    if annotation is bool:
        return Kind("0 or 1", "True or False", _read_flag, _checked(bool), lambda on: str(int(on)))
    said, check = f"a whole number, {least} or more", _checked(int, lambda n: n >= least)
    if annotation is int:
        return Kind(said, said, lambda text: check(int(text)), check, str)
    if annotation == int | None:
        return Kind(
            f"{said}, or nothing",
            f"{said}, or None",
            lambda text: check(int(text)) if text else None,
            lambda value: None if value is None else check(value),
            lambda value: "" if value is None else str(value),
        )
    if annotation == Bytes:
        texts = "a number of bytes, also with the suffix K, M or G (powers of 1024)"
        check = _checked(int, lambda n: n >= 0)
        return Kind(texts, "a number of bytes, 0 or more", parse_size, check, exact_size)
    if annotation == Path | None:
        return Kind("a path", "a path or None", _path, _path, lambda path: str(path or ""))
    if get_origin(annotation) is Literal:
        check = _checked(str, words.__contains__)
        return Kind(_either(words), _either([repr(word) for word in words]), check, check, str)
    assert get_origin(annotation) is frozenset
    return _set_of(get_args(*words))


def _checked(cls: type, valid: Callable[[Any], bool] = lambda value: True) -> Callable[[Any], Any]:
    """A check for `valid` values of a class; a bool is no int."""

    def check(value: Any) -> Any:
        if not isinstance(value, cls) or isinstance(value, bool) is not (cls is bool):
            raise TypeError
        if not valid(value):
            raise ValueError
        return value

    return check


def _read_flag(text: str) -> bool:
    return ("0", "1").index(text) == 1


def _path(value: Any) -> Path | None:
    """A Path, or None, which is an empty text."""
    text = None if value is None else os.fspath(value)
    return Path(text) if text else None


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _set_of(words: Sequence[str]) -> Kind:
    """Sets of some of `words`, in the environment with commas between them."""

    def check(value: Any) -> frozenset[str]:
        if isinstance(value, str):  # as in the environment, not a set of letters
            value = filter(None, map(str.strip, value.split(",")))
        if not isinstance(value, Iterable):
            raise TypeError
        found: frozenset[str] = frozenset(value)
        if not found <= {*words}:
            raise ValueError
        return found

    return Kind(
        f"any of {', '.join(words)}, with commas between them",
        f"a set of any of {', '.join(map(repr, words))}",
        check,
        check,
        lambda value: ",".join(word for word in words if word in value),
    )
