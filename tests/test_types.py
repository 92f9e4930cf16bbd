"""What type checkers know of autofuse: of everything that a user can name, the whole type."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import autofuse

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


def test_every_public_name_has_its_whole_type(tmp_path):
    """A class is known when all that it has and refers to is; external types aside."""
    pytest.importorskip("pyright", reason="asks pyright, which is not installed")
    symbols = verified(tmp_path)
    lacking = {
        name: [told["message"] for told in symbols[f"autofuse.{name}"]["diagnostics"]]
        for name in autofuse.__all__
        if not symbols[f"autofuse.{name}"]["isTypeKnown"]
        or symbols[f"autofuse.{name}"]["isTypeAmbiguous"]
    }
    assert not lacking
    members = [name for name in symbols if name.startswith("autofuse.observe.explain.Report.")]
    assert len(members) > 3 and "autofuse.observe.counters.Stats" in symbols


def test_the_package_says_that_it_has_types():
    assert (Path(autofuse.__file__).parent / "py.typed").exists()
    project = (ROOT / "pyproject.toml").read_text()
    assert '"Typing :: Typed"' in project and 'autofuse = ["py.typed"]' in project
