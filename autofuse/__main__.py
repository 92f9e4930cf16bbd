"""The command line, `python -m autofuse`: one subcommand per `add_` function. Owns no state."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Sequence

import torch

from .cli.attempt import attempt
from .cli.diagnose import OPS, SHAPE, facts, self_test
from .cli.verify import verify
from .observe.spelling import plural
from .ops.coverage import coverage, look_up
from .settings.config import SETTINGS, Setting, config, nearest
from .settings.sizes import parse_size
from .supply.disk import DiskCache, Entry

# --- cache ---------------------------------------------------------------------------------------


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
    print(f"{plural(len(entries), 'kernel')}, {total} bytes {limit}")


def clear(cache: DiskCache, args: argparse.Namespace) -> None:
    print(f"removed {plural(cache.clear(), 'file')}")


def prune(cache: DiskCache, args: argparse.Namespace) -> None:
    print(f"removed {plural(cache.prune(args.maxsize), 'file')}")


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


# --- report --------------------------------------------------------------------------------------


def show_report(args: argparse.Namespace) -> int:
    """Exit status 1 if the self-test failed, 2 if a setting is not valid."""
    try:
        for name, text in facts():
            print(f"{name:12s} {text}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    result = self_test("cuda" if torch.cuda.is_available() else "cpu")
    if result.failure:
        print(f"{'self-test':12s} FAILED on {result.device}: {result.failure}")
        return 1
    size = "x".join(map(str, SHAPE))
    print(f"{'self-test':12s} passed on {result.device}: eager's bits from a chain of {OPS} ops")
    print(f"{'':12s} {result.record_us:.2f} us per op recorded, {result.flush_us:.1f} us per flush")
    print(f"{'':12s} ({size} float32; eager takes {result.eager_us:.1f} us for the {OPS})")
    return 0


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "versions, devices, disk cache, settings and a self-test, for a bug report"
    parser = commands.add_parser("report", help=text, description=text)
    parser.set_defaults(run=show_report)


# --- coverage ------------------------------------------------------------------------------------


def show_coverage(args: argparse.Namespace) -> int:
    """Exit status 1 if torch has no pointwise op of the name that was asked for."""
    if args.op is not None:
        return _show_op(args.op)
    table = coverage()
    names: dict[str, list[str]] = {}
    for name, state in table.items():
        names.setdefault(state, []).append(name)
    for state in sorted(names, key=lambda state: (state != "fused", -len(names[state]), state)):
        print(f"{_state(state)} ({len(names[state])})")
        print(textwrap.fill(", ".join(names[state]), 100, initial_indent="  ",
                            subsequent_indent="  ", break_on_hyphens=False))  # fmt: skip
    fused = len(names["fused"])
    print(f"{fused} of the {len(table)} pointwise ops of torch {torch.__version__} are fused")
    return 0


def _state(state: str) -> str:
    return state if state == "fused" else f"eager: {state}"


def _show_op(name: str) -> int:
    found = look_up(name)
    if found is not None:
        print(f"{found[0]}: {_state(found[1])}")
        return 0
    print(
        f"no pointwise op of torch {torch.__version__} is called {name!r}, and others run eagerly; "
        f"the nearest name is {nearest(name.rpartition('.')[2], coverage())!r}",
        file=sys.stderr,
    )
    return 1


def add_coverage(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "the pointwise ops of torch: which are fused, and why the others are not"
    parser = commands.add_parser("coverage", help=text, description=text)
    parser.add_argument("--op", metavar="NAME", help="say it of one op, as in --op sigmoid")
    parser.set_defaults(run=show_coverage)


# --- settings ------------------------------------------------------------------------------------


def markdown(settings: Sequence[Setting]) -> str:
    """The table of docs/settings.md."""
    rows = ["| `config.` | in the environment | valid there | default | |", "|---|---|---|---|---|"]
    for setting in settings:
        name = f"`{setting.name}`" if setting.field else ""
        default = setting.kind.show(setting.default)
        default = f"`{default}`" if default else ""
        cells = name, f"`{setting.variable}`", setting.kind.texts, default, setting.help
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def show_settings(args: argparse.Namespace) -> int:
    if args.markdown:
        print(markdown(SETTINGS), end="")
        return 0
    for setting in SETTINGS:
        default = setting.kind.show(setting.default) or "none"
        print(f"{setting.variable} ({setting.kind.texts}; default: {default})")
        if setting.field:
            print(f"  config.{setting.name} = {getattr(config, setting.name)!r}")
        print(textwrap.indent(textwrap.fill(setting.help, 96), "    "))
    return 0


def add_settings(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "what may be set, in the environment and in a program"
    parser = commands.add_parser("settings", help=text, description=text)
    parser.add_argument("--markdown", action="store_true", help="as the table of docs/settings.md")
    parser.set_defaults(run=show_settings)


# --- try -----------------------------------------------------------------------------------------


def show_attempt(args: argparse.Namespace) -> int:
    if not args.module and args.script is None:
        print("give a script, or -m and a module", file=sys.stderr)
        return 2
    program = ["-m", *args.module] if args.module else [args.script, *args.args]
    return attempt(program, args.timeout, args.limit, args.once)


def add_try(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "run a program as it is and with its modules fused, in turns, and compare"
    parser = commands.add_parser("try", help=text, description=text)
    parser.add_argument("--once", action="store_true", help="run it fused alone")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS",
                        help="for each run (default: 600)")  # fmt: skip
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS",
                        help="after which no more turns begin (default: 300)")  # fmt: skip
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, default=[],
                        metavar="MODULE", help="a module and its arguments")  # fmt: skip
    parser.add_argument("script", nargs="?", help="a script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=show_attempt)


# --- verify --------------------------------------------------------------------------------------


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "compare reductions with eager's on this GPU, and fuse them from then on if they agree"
    parser = commands.add_parser("verify", help=text, description=text)
    parser.set_defaults(run=lambda args: verify())


# --- all of them ---------------------------------------------------------------------------------


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
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (add_report, add_try, add_coverage, add_settings, add_cache, add_verify):
        add(commands)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
