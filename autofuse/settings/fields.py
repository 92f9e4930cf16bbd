"""Kinds: what a setting may be, as text in the environment and as a value. Knows no settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args

from .sizes import parse_size


class Kind(Protocol):
    """What a setting may be. Errors have no text here; `Setting` knows what they are about."""

    texts: str  # what is valid in the environment: "use ..."
    values: str  # what may be assigned

    def read(self, text: str) -> Any:
        """The value of a text; ValueError if there is none."""

    def check(self, value: Any) -> Any:
        """What is kept of an assigned value; TypeError or ValueError if it is not valid."""

    def show(self, value: Any) -> str:
        """The text that `read` turns into `value`."""
        ...


class Flag:
    """A bool, in the environment 0 or 1."""

    texts, values = "0 or 1", "True or False"

    def read(self, text: str) -> bool:
        if text not in ("0", "1"):
            raise ValueError
        return text == "1"

    def check(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError
        return value

    def show(self, value: bool) -> str:
        return str(int(value))


class Whole:
    """An int of at least `least`."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.texts = self.values = f"a whole number, {least} or more"

    def read(self, text: str) -> int:
        return self.check(int(text))

    def check(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError
        if value < self.least:
            raise ValueError
        return value

    def show(self, value: int) -> str:
        return str(value)


class Size(Whole):
    """Bytes, as an int; in the environment as the disk cache reads them: 1000, 64K, 256M, 1G."""

    def __init__(self) -> None:
        super().__init__(0)
        self.texts = "a number of bytes, also with the suffix K, M or G (powers of 1024)"
        self.values = "a number of bytes, 0 or more"

    def read(self, text: str) -> int:
        return parse_size(text)

    def show(self, value: int) -> str:
        for shift, suffix in ((30, "G"), (20, "M"), (10, "K")):
            if value and not value % (1 << shift):
                return f"{value >> shift}{suffix}"
        return str(value)


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


class Choice:
    """One of the words of a Literal."""

    def __init__(self, literal: Any) -> None:
        self.words: tuple[str, ...] = get_args(literal)
        self.texts, self.values = _either(self.words), _either([repr(w) for w in self.words])

    def read(self, text: str) -> str:
        return self.check(text)

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        if value not in self.words:
            raise ValueError
        return value

    def show(self, value: str) -> str:
        return value


class Choices:
    """A frozenset of words of a Literal, in the environment with commas between them."""

    def __init__(self, literal: Any) -> None:
        self.words: tuple[str, ...] = get_args(literal)
        self.texts = f"any of {', '.join(self.words)}, with commas between them"
        self.values = f"a set of any of {', '.join(map(repr, self.words))}"

    def read(self, text: str) -> frozenset[str]:
        return self.check(filter(None, map(str.strip, text.split(","))))

    def check(self, value: Any) -> frozenset[str]:
        if isinstance(value, str):  # as in the environment, not a set of letters
            return self.read(value)
        if not isinstance(value, Iterable):
            raise TypeError
        found: frozenset[str] = frozenset(value)
        if not found <= {*self.words}:
            raise ValueError
        return found

    def show(self, value: frozenset[str]) -> str:
        return ",".join(word for word in self.words if word in value)


class OptionalPath:
    """A Path, or None, which is an empty text."""

    texts, values = "a path", "a path or None"

    def read(self, text: str) -> Path | None:
        return Path(text) if text else None

    def check(self, value: Any) -> Path | None:
        return None if value is None else self.read(os.fspath(value))

    def show(self, value: Path | None) -> str:
        return "" if value is None else str(value)
