"""The architecture, as far as imports show it: arrows point one way, leaves stay leaves."""

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import autofuse

PACKAGE = Path(autofuse.__file__).parent
# the order of reading: a folder or a module of the package may import only what stands before it
ORDER = [
    "errors", "hooks", "dtypes", "layout", "lines", "progress", "inside", "torch_private",
    "sole", "settings", "ops", "program", "kernel", "supply", "chain", "run", "grad", "record",
    "dispatch", "api", "lending", "fused", "patches", "observe", "hot", "__init__", "cli",
    "__main__",
]  # fmt: skip
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
}  # by dotted names without the package's


def imports(text, module, files=FILES):
    """Modules of autofuse that `module` imports anywhere: in functions and for types too."""

    def named(parts):
        while parts and ".".join(parts) not in files:
            parts = parts[:-1]  # a name in a module
        return ".".join(parts) or "__init__"

    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert not called.endswith(("import_module", "__import__")), "no test sees which module"
        elif isinstance(node, ast.Import):
            found |= {
                named(name.name.split(".")[1:])
                for name in node.names
                if name.name.split(".")[0] == "autofuse"
            }
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            parts = [*base, *(node.module.split(".") if node.module else [])]
            if node.level or parts[0] == "autofuse":
                parts = parts if node.level else parts[1:]
                found |= {named([*parts, name.name]) for name in node.names}
    return found


@functools.cache
def arrows():
    return {name: imports(path.read_text(), name) for name, path in FILES.items()}


def stage(module):
    return ORDER.index(module.partition(".")[0])


EVERY_KIND = """
import torch, autofuse.errors
from . import trie, absent
from .. import __version__
from ..settings.fields import a
if TYPE_CHECKING:
    from .state import Chain
class A:
    from ..ops import row
    def method(self):
        with a:
            from autofuse.ops.row import b
        return lambda: None
try:
    from ..hot.native import c
except ImportError:
    async def other():
        import autofuse
"""


def test_every_kind_of_import_is_seen():
    files = {"errors", "chain.trie", "chain.state", "settings.fields", "ops.row", "hot.native"}
    assert imports(EVERY_KIND, "chain.shell", files) == files | {"__init__"}
    for text in ("importlib.import_module('.api', 'autofuse')", "def f():\n    __import__(name)"):
        with pytest.raises(AssertionError, match="no test sees"):
            imports(text, "chain.shell")


def test_stages_import_only_what_stands_before_them():
    assert {name.partition(".")[0] for name in FILES} == set(ORDER)
    upward = {
        (name, target)
        for name, targets in arrows().items()
        for target in targets
        if stage(target) > stage(name)
    }
    assert not upward


def test_there_are_no_circles():
    TopologicalSorter(arrows()).prepare()  # raises CycleError


def test_folders_are_only_folders():
    """The compiler's process imports modules of them without what `autofuse` itself imports."""
    folders = {name.rpartition(".")[0] for name in FILES} - {""}
    for folder in folders:
        text = FILES[f"{folder}.__init__"].read_text()
        assert len(ast.parse(text).body) == 1 and ast.get_docstring(ast.parse(text))


def test_pure_modules_know_no_torch_and_no_compiler():
    for name in ("layout", "kernel.plan", "kernel.text", "kernel.source"):
        text = FILES[name].read_text()
        assert "import torch" not in text and "numba" not in text.split('"""', 2)[2]


def test_numba_is_named_where_it_compiles_and_nowhere_else():
    """Its import, in one function; the emitter is given a builder of llvmlite's, and no more."""

    def imported(text):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module

    by = {
        name
        for name, path in FILES.items()
        if any(module.split(".")[0] == "numba" for module in imported(path.read_text()))
    }
    assert by == {"kernel.cuda", "cli.diagnose"}
    for name in ("source", "plan", "text", "lower", "emit", "targets", "llvm", "polynomials"):
        tree = ast.parse(FILES[f"kernel.{name}"].read_text())
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not [one for one in named if "numba" in one.lower() or one == "cgutils"], name


def test_every_module_says_what_it_owns():
    for path in FILES.values():
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring and len(docstring) > 30, path.name


def test_files_are_short():
    """But for the table of ops."""
    for name, path in FILES.items():
        lines = len(path.read_text().splitlines())
        assert lines <= (700 if name == "ops.arithmetic" else 500), name


def names_of_c(text):
    """Names that a module of `hot` may have from `hot/c.py`, as it is used.

    What a stage names that is no variable of the function, `c.name`, and what the writer calls by
    `c("name")`: not a key under which something is given, nor an attribute of something else.
    """
    found, tree = set(), ast.parse(text)
    stage = any(isinstance(node, ast.ImportFrom) and node.module == "c" for node in tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and stage:
            names = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
            own = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            own |= {name.arg for name in ast.walk(node) if isinstance(name, ast.arg)}
            found |= {name.id for name in names} - own
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "c":
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".c", "._c")):
            found |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    return found


USES = """
from . import c
given = {"key": of.attribute, "others": key}
def write(self):
    self._c("called", [key]), given["key"], c.constant
"""
STAGE = """
from .c import *
def function(parameter):
    variable = named
    return variable + parameter.attribute
"""


def test_a_use_of_what_machine_code_may_name_is_seen():
    """And what is no use is not: what `native` gives under a name that nothing has."""
    assert names_of_c(USES) == {"called", "constant"}
    assert names_of_c(STAGE) == {"named"}


def test_machine_code_names_all_that_it_may():
    """`hot/c.py` lists that, and its stages import all of it."""
    tree = ast.parse(FILES["hot.c"].read_text())
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    listed = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    used = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    for name, path in FILES.items():
        if name.startswith("hot."):
            used |= names_of_c(path.read_text())
    assert len(listed) > 100 and not listed - used
