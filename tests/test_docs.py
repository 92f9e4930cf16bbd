"""What docs/ names is there."""

import importlib
import re
from pathlib import Path

import pytest

import autofuse

DOCS = Path(__file__).parent.parent / "docs"
PACKAGE = Path(autofuse.__file__).parent
MODULES = {path.stem for path in PACKAGE.glob("*.py")}
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_files_and_functions_exist(page):
    text = page.read_text()
    files = {name for name in re.findall(r"`([\w/]+\.(?:py|md))`", text)}
    for name in files:
        found = [PACKAGE / name, DOCS / name, DOCS.parent / name]
        assert any(path.is_file() for path in found), name
    named = re.findall(r"`(\w+)\.(\w+)`", text)
    for module, name in named:
        if module in MODULES and name not in ("py", "md"):
            assert hasattr(importlib.import_module(f"autofuse.{module}"), name), (module, name)
    assert files or named


def test_every_module_has_its_place():
    text = (DOCS / "layout.md").read_text()
    table = text.partition("## Where does it go?")[0]
    assert set(re.findall(r"`(\w+)`", table)) - {"glossary", "life_of_a_value"} == MODULES
