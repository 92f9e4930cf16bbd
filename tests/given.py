"""What tests give to processes that they start, which autofuse has no part in."""

from pathlib import Path


def lend_machine_code(source: str | Path, target: str | Path) -> None:
    """Put what the trial of machine code has left in a cache directory into another one.

    Or every process that has one of its own would try and compile it: 4 of its 6 s.
    """
    Path(target).mkdir(mode=0o700, exist_ok=True)
    for path in Path(source).glob("*.kernel"):
        data = path.read_bytes()
        if b'"name": "machine code"' in data[:1000]:
            copy = Path(target) / path.name
            copy.touch(mode=0o600)
            copy.write_bytes(data)
