"""What `python -m autofuse try` runs in a process of its own: a script, plain or fused, on a clock.

    python child.py plain|fused FACTS.json script.py [args]
    python child.py plain|fused FACTS.json -m package [args]

A script by itself, for a plain run knows nothing of autofuse. FACTS.json says afterwards what the
run did: `seconds` without imports of torch and autofuse, `calls` of outermost modules, of a plain
one whether it `imports` autofuse by itself, and of a fused one the counters and the advice.
"""

import sys

del sys.path[0]  # this folder, whose modules the script must not find

import functools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

# outermost calls of modules that are explained, once kernels are there; neither run counts them
FIRST, LAST = 5, 7


class Clock:
    """Seconds of the script, and the calls of modules that no other module has made."""

    def __init__(self) -> None:
        self.calls = self.depth = 0
        self.left_out = 0.0
        self.report: Any = None  # of `autofuse.explain`, while it is open
        self.advice: list[str] = []
        self.begun = time.perf_counter()

    def now(self) -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def entered(self, explain: Any) -> None:
        """An outermost call of a module begins."""
        self.calls += 1
        if self.calls == FIRST:
            self.left_out -= self.now()
            if explain is not None:
                self.report = explain().__enter__()
        elif self.calls == LAST + 1:
            self.close()

    def close(self) -> None:
        """End what is explained, and left out of the time."""
        if self.calls >= FIRST and self.left_out < 0:
            if self.report is not None:
                self.report.__exit__()
                self.advice, self.report = self.report.advice, None
            self.left_out += self.now()

    def facts(self) -> dict[str, Any]:
        self.close()
        seconds = self.now() - self.begun - self.left_out
        cuda = torch.cuda.is_initialized()
        return {"seconds": seconds, "calls": self.calls, "advice": self.advice, "cuda": cuda}


def watched(plain: Any, call: Any, clock: Clock, explain: Any) -> Any:
    """`torch.nn.Module.__call__`, which is `plain`: the outermost by `call`, of which `clock`
    learns."""

    @functools.wraps(plain)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        if clock.depth:  # 2 us less, which whoever fuses the model alone does not pay either
            return plain(*args, **kwargs)
        clock.entered(explain)
        clock.depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            clock.depth -= 1

    return outermost


def run(program: list[str]) -> None:
    """Run a script, or `-m` and a module, as `python` would."""
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


def main(way: str, place: str, *program: str) -> None:
    explain: Any = None
    counters: Any = None
    plain = call = torch.nn.Module.__call__
    if way == "fused":
        import autofuse

        explain, counters = autofuse.explain, autofuse.stats
        call = autofuse.fuse(plain)
    clock = Clock()
    torch.nn.Module.__call__ = watched(plain, call, clock, explain)
    try:
        run(list(program))
    finally:
        facts = clock.facts() | {"imports": way == "plain" and "autofuse" in sys.modules}
        if counters is not None:
            found = counters()
            facts |= {
                name: getattr(found, name)
                for name in ("ops_recorded", "kernels_launched", "kernels_compiled",
                             "kernels_loaded", "bytes_elided")
            }  # fmt: skip
        with open(place, "w") as file:
            json.dump(facts, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
