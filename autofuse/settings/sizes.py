"""Sizes as people write them: 500, 64K, 1.5G."""

import re

DEFAULT_MAXSIZE = "256M"
_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "1000", "64K", "256M" or "1G"; ValueError says what is valid."""
    match = re.fullmatch(r"([0-9]{1,18})([KMG]?)", text.strip().upper())
    if not match:
        raise ValueError(
            f"{text!r} is not a size; use a number of bytes, or one with the suffix K, M or G "
            f"(powers of 1024) as in {DEFAULT_MAXSIZE}"
        )
    return int(match[1]) * _SUFFIXES[match[2]]


def exact_size(nbytes: int) -> str:
    """The shortest text of which `parse_size` makes `nbytes`."""
    for suffix, unit in reversed(_SUFFIXES.items()):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{suffix}"
    return "0"
