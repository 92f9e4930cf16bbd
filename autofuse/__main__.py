"""The command line, `python -m autofuse`: one subcommand per `add_` function. Owns no state."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from .cache import DiskCache, Entry, parse_size


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:  # argparse shows the text of this class only
        raise argparse.ArgumentTypeError(str(error)) from None


def show_size(nbytes: int) -> str:
    """1536 as "1.5K": four digits at most."""
    value, suffix = float(nbytes), ""
    for larger in "KMG":
        if value < 1024:
            break
        value, suffix = value / 1024, larger
    return f"{value:.4g}{suffix}"


def _word(entry: Entry, fact: str) -> str:
    """A fact of an entry for a terminal, which a damaged file must not write to."""
    text = str(entry.about.get(fact, "?"))
    return "".join(c if c.isprintable() and c.isascii() else "?" for c in text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def show_path(cache: DiskCache, args: argparse.Namespace) -> None:
    if cache.directory is not None:
        print(cache.directory)


def show_entries(cache: DiskCache, args: argparse.Namespace) -> None:
    entries = sorted(cache.entries(), key=lambda entry: (-entry.used, entry.key))
    rows = [("kernel", "target", "size", "last use")]
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        facts = _word(entry, "name"), _word(entry, "target")
        rows.append((*facts, show_size(entry.nbytes), used))
    name, target, size, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    if entries:
        for row in rows:
            print(f"{row[0]:{name}}  {row[1]:{target}}  {row[2]:>{size}}  {row[3]}")
    total = show_size(sum(entry.nbytes for entry in entries))
    limit = f"of {show_size(cache.maxsize)}" if cache.maxsize else "(the cache is switched off)"
    print(f"{_count(len(entries), 'kernel')}, {total} bytes {limit}")


def clear(cache: DiskCache, args: argparse.Namespace) -> None:
    print(f"removed {_count(cache.clear(), 'file')}")


def prune(cache: DiskCache, args: argparse.Namespace) -> None:
    print(f"removed {_count(cache.prune(args.maxsize), 'file')}")


def on_cache(
    command: Callable[[DiskCache, argparse.Namespace], None],
) -> Callable[[argparse.Namespace], int]:
    """`command` on the cache of this environment, with the exit status: 1 if its directory is
    refused, 2 if a setting is not valid."""

    def run(args: argparse.Namespace) -> int:
        try:
            cache = DiskCache()
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        command(cache, args)
        if why := cache.refusal():
            print(f"the disk cache is not used: {why}", file=sys.stderr)
            return 1
        return 0

    return run


def add_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("cache", help="the compiled kernels on disk")
    parser.set_defaults(run=lambda args: show_help(parser))
    actions = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command, text in (
        ("path", show_path, "print the directory"),
        ("ls", show_entries, "list the kernels, last used first"),
        ("clear", clear, "remove all kernels"),
        ("prune", prune, "remove the least recently used kernels"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run=on_cache(command))
        if command is prune:
            action.add_argument(
                "--maxsize", type=_size, metavar="SIZE",
                help="bytes to keep, as in 64M (default: AUTOFUSE_CACHE_MAXSIZE, else 256M)",
            )  # fmt: skip


def show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m autofuse",
        description="Eager PyTorch, with chains of pointwise ops run as one kernel each.",
    )
    parser.set_defaults(run=lambda args: show_help(parser))
    add_cache(parser.add_subparsers(title="commands", metavar="COMMAND"))
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
