"""What type checkers know of autofuse: of everything that a user can name, the whole type."""

import ast
import builtins
import inspect
import json
import os
import subprocess
import sys
import typing
from pathlib import Path
from types import FunctionType

import pytest

import autofuse
from autofuse import errors

ROOT = Path(__file__).parent.parent


def verified(tmp_path):
    """By name, what pyright says of each symbol of the package, as an installed one with types."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    beside = [os.path.dirname(sys.executable), os.environ.get("PATH", "")]  # the one that it asks
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--verifytypes", "autofuse", "--ignoreexternal",
         "--outputjson"],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PATH": os.pathsep.join(beside)},
    )  # fmt: skip
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not run here: {done.stderr[-200:]}")
    return {one["name"]: one for one in json.loads(done.stdout)["typeCompleteness"]["symbols"]}


def handed_out():
    """Functions and classes of autofuse that a user can name, and those that these hand out."""
    named = [getattr(autofuse, name) for name in autofuse.__all__] + [*vars(errors).values()]
    waiting = [one if isinstance(one, type | FunctionType) else type(one) for one in named]
    found = set()
    while waiting:
        one = waiting.pop()
        waiting += typing.get_args(one)  # of an alias
        if not isinstance(one, type | FunctionType) or one in found:
            continue
        if module_of(one).startswith("autofuse."):
            found.add(one)
            scope = {**vars(builtins), **vars(sys.modules[module_of(one)])}
            waiting += [scope[name] for name in names_of_types(one)]
            waiting += getattr(one, "__bases__", ())
    return found


def names_of_types(one):
    """What the annotations name of a function, or of the public members of a class."""
    module = ast.parse(inspect.getsource(sys.modules[module_of(one)]))
    made = [node for node in module.body if getattr(node, "name", "") == one.__qualname__]
    members = made[0].body if isinstance(made[0], ast.ClassDef) else made  # overloads
    for member in members:
        if isinstance(member, ast.FunctionDef):
            if member.name.startswith("_") and member.name != "__init__":
                continue
            annotations = [
                node.annotation for node in ast.walk(member)
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute)
                and not node.target.attr.startswith("_")
            ]  # fmt: skip
            arguments = ast.walk(member.args)
            annotations += [node.annotation for node in arguments if isinstance(node, ast.arg)]
            annotations.append(member.returns)
        else:
            annotations = [getattr(member, "annotation", None)]
        for annotation in filter(None, annotations):
            yield from (node.id for node in ast.walk(annotation) if isinstance(node, ast.Name))


def module_of(one):
    """Tensor says that it is torch's, for torch's own messages name its class."""
    return "autofuse.chain.shell" if one is autofuse.Tensor else one.__module__


def test_all_that_a_user_is_handed_has_its_whole_type(tmp_path):
    """Each name, and every member of each class; external types aside."""
    pytest.importorskip("pyright", reason="asks pyright, which is not installed")
    symbols = verified(tmp_path)
    places = {f"{module_of(one)}.{one.__qualname__}" for one in handed_out()}
    assert places > {"autofuse.fused.fuse", "autofuse.errors.LostGradientError",
                     "autofuse.observe.events.Flush", "autofuse.kernel.source.Source"}  # fmt: skip
    assert places <= {*symbols}
    theirs = [
        one for name, one in symbols.items()
        if name in places or name.rpartition(".")[0] in places
    ]  # fmt: skip
    lacking = {
        one["name"]: [told["message"] for told in one["diagnostics"]]
        for one in theirs
        if not one["isTypeKnown"] or one["isTypeAmbiguous"]
    }
    assert len(theirs) > 200 and not lacking


def test_the_package_says_that_it_has_types():
    assert (Path(autofuse.__file__).parent / "py.typed").exists()
    project = (ROOT / "pyproject.toml").read_text()
    assert '"Typing :: Typed"' in project and 'autofuse = ["py.typed"]' in project
