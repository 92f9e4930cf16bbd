"""The architecture, as far as imports show it: arrows point one way, leaves stay leaves."""

import ast
from pathlib import Path

import pytest

import autofuse

PACKAGE = Path(autofuse.__file__).parent
# each module may import only what stands before it
ORDER = [
    "errors", "position", "progress", "cache", "source", "polynomials", "targets", "lower", "emit",
    "inside", "build", "machine", "c", "toolchain", "worker", "background", "verdict", "kinds",
    "config", "dtypes", "layout", "op", "activations", "special", "ops", "coverage", "plan",
    "codegen", "load", "compile", "shell", "sequence", "launch", "trie", "rules", "autograd",
    "eager", "chain", "tensor", "native_record", "native_flush", "native_call", "native_write",
    "native", "api", "boundaries", "report", "trial", "observe", "logs", "check", "reads",
    "holders", "wording", "explaining", "__init__", "diagnosis", "__main__",
]  # fmt: skip
# (from, to, where the import stands): these point up all the same, and each closes a circle
UPWARD = {
    # launch, trie, rules, autograd and chain: what is recorded knows its recorder
    ("launch", "trie", "types"),
    ("launch", "chain", "types"),
    ("trie", "chain", "types"),
    ("rules", "autograd", "types"),
    ("rules", "chain", "types"),
    ("autograd", "chain", "types"),
    # a Report prints by the words for Reports
    ("wording", "explaining", "types"),
}


class Imports(ast.NodeVisitor):
    """Modules of autofuse that a file imports, and where: "top", in a "function", for "types"."""

    def __init__(self, text):
        self.found, self.where = set(), "top"
        self.visit(ast.parse(text))

    def note(self, name):
        self.found.add((name if name in ORDER else "__init__", self.where))

    def visit_ImportFrom(self, node):
        names = [alias.name for alias in node.names]
        if node.level == 0:
            first, _, rest = (node.module or "").partition(".")
            if first != "autofuse":
                return
        else:
            rest = node.module or ""
        for name in [rest.partition(".")[0]] if rest else names:
            self.note(name)

    def visit_Import(self, node):
        for alias in node.names:
            first, _, rest = alias.name.partition(".")
            if first == "autofuse":
                self.note(rest or "__init__")

    def visit_Call(self, node):
        called = ast.unparse(node.func)
        assert not called.endswith(("import_module", "__import__")), "which module, no test can see"
        self.generic_visit(node)

    def visit_If(self, node):
        types = ast.unparse(node.test).endswith("TYPE_CHECKING")
        self.inside("types" if types else self.where, node.body)
        self.inside(self.where, node.orelse)

    def visit_FunctionDef(self, node):
        self.inside("types" if self.where == "types" else "function", node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def inside(self, where, body):
        before, self.where = self.where, where
        for statement in body:
            self.visit(statement)
        self.where = before


EVERY_KIND = """
import torch, autofuse.errors
from . import cache, __version__
from .kinds import a
if TYPE_CHECKING:
    from .chain import Chain
class A:
    from .op import Op
    def method(self):
        with a:
            from autofuse.ops import b
        return lambda: None
try:
    from .native import c
except ImportError:
    async def other():
        import autofuse
"""


def test_every_kind_of_import_is_seen():
    assert Imports(EVERY_KIND).found == {
        ("errors", "top"), ("cache", "top"), ("__init__", "top"), ("kinds", "top"),
        ("chain", "types"), ("op", "top"), ("ops", "function"), ("native", "top"),
        ("__init__", "function"),
    }  # fmt: skip
    for text in ("importlib.import_module('.api', 'autofuse')", "def f():\n    __import__(name)"):
        with pytest.raises(AssertionError, match="which module"):
            Imports(text)


def test_imports_point_one_way():
    """Those in functions and for types too: a circle is one wherever it is closed."""
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(ORDER)
    upward = {
        (name, target, where)
        for name in ORDER
        for target, where in Imports((PACKAGE / f"{name}.py").read_text()).found
        if ORDER.index(target) >= ORDER.index(name)
    }
    assert upward == UPWARD


def test_pure_modules_know_no_torch_and_no_compiler():
    for name in ("layout", "plan", "codegen", "source"):
        text = (PACKAGE / f"{name}.py").read_text()
        assert "import torch" not in text and "numba" not in text.split('"""', 2)[2]


def test_every_module_says_what_it_owns():
    for path in PACKAGE.glob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring and len(docstring) > 30, path.name
