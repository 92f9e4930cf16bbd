"""What docs/ names is there."""

import importlib
import re
from pathlib import Path

import pytest
from test_structure import FILES

import autofuse

DOCS = Path(__file__).parent.parent / "docs"
PACKAGE = Path(autofuse.__file__).parent
MODULES = {name for name in FILES if not name.endswith("__init__")}
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
        of_name = [known for known in MODULES if known.rpartition(".")[2] == module]
        if of_name and name not in ("py", "md"):
            found = [importlib.import_module(f"autofuse.{known}") for known in of_name]
            assert any(hasattr(one, name) for one in found), (module, name)
    assert files or named


def test_every_module_has_its_place():
    text = (DOCS / "layout.md").read_text()
    table = text.partition("## Where does it go?")[0]
    placed = []
    for folder, modules in re.findall(r"^\| (?:`(\w+)/` )?\| ((?:`\w+` ?)+)\|", table, re.M):
        placed += [f"{folder}.{name}".strip(".") for name in re.findall(r"`(\w+)`", modules)]
    assert len(placed) == len({*placed})
    assert {*placed} == MODULES - {"__main__"}
