"""The verdict on machine code: whether it does here what Python does, found out once and kept.

A process of its own runs the programs of `trial` both ways, so that a crash is a verdict too. The
verdict stays beside the kernels, under the versions of all that machine code relies on.
"""

from __future__ import annotations

import hashlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ..progress import progress
from ..supply.disk import DiskCache
from ..supply.service import HungError, LostError, Worker, packages
from .machine import keep

SECONDS = 120.0  # for the process; it takes 0.5 besides the imports
# what a process dies of that reads or calls what is not there
_CRASHES = {
    -getattr(signal, name)
    for name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")
    if hasattr(signal, name)
}
# as the worker's, but with all of the package, and from where it is
BOOT = """
import sys
sys.path[:] = library = [path for path in sys.path if path]
import os
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
import site, warnings
site.main()
warnings.simplefilter("ignore")
directory, *packages = sys.argv[1:]
sys.path[:] = [*library, *packages]
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("autofuse", os.path.join(directory, "__init__.py"),
                               submodule_search_locations=[directory])
sys.modules["autofuse"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
from autofuse.hot.trial import main
main(answers)
"""


def verdict(facts: Sequence[str]) -> str:
    """Why machine code is not to be trusted with these versions; "" if it is."""
    key = hashlib.sha256("\0".join(("machine code", *facts)).encode()).hexdigest()
    cache = DiskCache()
    kept = cache.get(key)
    if kept is None:
        with cache.building(key, SECONDS), progress("trying machine code, once for its versions"):
            kept = cache.get(key)
            if kept is None:
                reason, decided = _tried()
                if decided:
                    about = {"name": "machine code", "target": reason or "as Python", "source": ""}
                    cache.put(key, reason.encode(), about)
                return reason
    return kept.decode(errors="replace")


def _tried() -> tuple[str, bool]:
    """(why not, whether that is true of the next process too)."""
    if not sys.executable or getattr(sys, "frozen", False):
        return "no Python interpreter is known that could try it", False
    environment = {"AUTOFUSE_NATIVE": "0", "AUTOFUSE_CACHE_MAXSIZE": "0"}
    command = [BOOT, str(Path(__file__).parents[1]), *packages()]
    try:
        worker = Worker.begin(command, environment)
    except OSError as error:
        return f"no process can be started that would try it: {error}", False
    try:
        header, code = worker.ask({}, SECONDS)
    except LostError as error:
        # one that was interrupted, or had no memory, may do better the next time
        status = worker.process.poll() or 0
        decided = isinstance(error, HungError) or status in _CRASHES or status >= 0xC0000000
        return f"the process that tried it gave no answer: {error}", decided
    finally:
        worker.drop()
    if code:  # what was tried is what will run: nobody has to compile it again, for seconds
        keep(header["key"], code)
    return str(header["reason"]), True
