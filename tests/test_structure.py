"""The architecture, as far as imports show it: arrows point one way, leaves stay leaves."""

import ast
from pathlib import Path

import autofuse

PACKAGE = Path(autofuse.__file__).parent
# each module may import only what stands before it
ORDER = [
    "errors", "position", "progress", "cache", "worker", "background", "verdict", "source",
    "polynomials", "targets", "lower", "emit", "build", "inside", "machine", "c", "toolchain",
    "kinds", "config", "dtypes",
    "layout", "op", "activations", "special", "ops", "coverage", "plan", "codegen", "load",
    "compile", "shell", "launch", "trie", "rules", "autograd", "eager", "chain", "tensor",
    "native_record", "native_flush", "native_call", "native_write", "native", "boundaries", "api",
    "report", "trial", "diagnosis", "observe", "logs", "check", "reads", "holders", "wording",
    "explaining", "__init__", "__main__",
]  # fmt: skip
EXCEPTIONS = {("boundaries", "api")}  # inside a function: unwrap is public vocabulary


def imports(path):
    """autofuse modules that a module imports at run time."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found.update(names)
    return found


def test_imports_point_one_way():
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules == set(ORDER)
    for name in ORDER:
        for target in imports(PACKAGE / f"{name}.py"):
            allowed = ORDER.index(target) < ORDER.index(name)
            assert allowed or (name, target) in EXCEPTIONS, f"{name} imports {target}"


def test_pure_modules_know_no_torch_and_no_compiler():
    for name in ("layout", "plan", "codegen", "source"):
        text = (PACKAGE / f"{name}.py").read_text()
        assert "import torch" not in text and "numba" not in text.split('"""', 2)[2]


def test_every_module_says_what_it_owns():
    for path in PACKAGE.glob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring and len(docstring) > 30, path.name
