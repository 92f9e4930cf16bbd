"""The README is short, and its commands and figures are what others run and measured."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from results import DIRECTORY, load

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FEW = 200  # lines; what does not fit has a page in docs/


def test_it_is_short():
    assert len(README.splitlines()) <= FEW


def test_the_set_up_commands_are_found_once():
    """The tests' is run in a fresh environment, see .ci/."""
    assert len(re.findall(r"^    pip install -e \"\.\[test\]\".*$", README, re.M)) == 1
    assert len(re.findall(r"^    pip install -e \. && python examples/\w+\.py$", README, re.M)) == 1


def figures():
    """(program, by what) and (eager's us, ratio), as bench/results/ has them."""
    found = {}
    for row in (DIRECTORY / "zoo_h200.md").read_text().splitlines():
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        if len(cells) == 7 and cells[1].isdigit():
            program = cells[0].removesuffix(" †")  # at a later commit
            found[program, "fuse"], found[program, "wrap"] = (
                (cells[1], cells[3]),
                (cells[1], cells[4]),
            )
    for workload, device, cells in load(DIRECTORY / "nvidia_h200.json").rows():
        eager, ours = cells["eager"].median, cells["autofuse"].ratio
        if eager and ours:
            name = workload.removesuffix(" float32").removesuffix(", 64x256")
            name += ", on the CPU beside it" * (device == "cpu")
            us = f"{eager:.0f}" if eager >= 100 else f"{eager:.1f}"
            found[name, "wrap"] = us, f"{ours:.2f}"
    return found


def test_the_table_has_the_figures_of_the_results():
    """Losers included, and in bold."""
    table = README.split("| eager, us |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (\S+) \| (\S+) \| `(\w+)`: ", table, re.M)
    known = figures()
    assert len(rows) == len(table.splitlines()) - 2 >= 8
    for program, eager, ratio, by in rows:
        assert known[program, by] == (eager, ratio.strip("*")), program
        assert ratio.startswith("**") == (float(ratio.strip("*")) > 1), program
    assert sum(ratio.startswith("**") for _, _, ratio, _ in rows) >= 3


def test_the_text_has_the_figures_of_the_results():
    said = re.search(
        r"Of (\d+) programs .*?`fuse` takes (\S+) of .*?`wrap` (\S+), all\s+with eager's bits.*?"
        r"(\d+) take more than\s+(\S+) with `fuse`, the\s+worst, [^,]*, (\S+), "
        r"and (\d+) more than (\S+) with `wrap`, the\s+worst, [^,(]*, (\S+) ",
        README, re.S,
    )  # fmt: skip
    told = (DIRECTORY / "zoo_h200.md").read_text()
    line = (
        r"^- {}: median (\S+), worst (\S+), (\d+) of (\d+) over (\S+); "
        r"eager's bits in (\d+) of (\d+)\."
    )
    (fuse,), (wrap,) = (re.findall(line.format(name), told, re.M) for name in ("fuse", "wrap"))
    assert fuse[3] == wrap[3] and fuse[5:] == wrap[5:] and fuse[5] == fuse[6]  # each has them
    unknown = told.count("| eager differs from itself | eager differs from itself |")
    assert int(fuse[5]) + unknown == int(fuse[3])
    wanted = (fuse[3], fuse[0], wrap[0], fuse[2], fuse[4], fuse[1], wrap[2], wrap[4], wrap[1])
    assert said.groups() == wanted


def test_the_picture_is_told_by_its_own_figures():
    """The text of the timeline in place of the picture; a GPU has to have drawn that."""
    picture = ROOT / "docs" / "timeline.svg"
    if not picture.exists():
        pytest.skip("bench/timeline.py draws it, on a GPU")
    root = ElementTree.fromstring(picture.read_text())
    drawn = root.find("{http://www.w3.org/2000/svg}title").text
    assert "kernels" in drawn and not drawn.startswith("eager: 0")
    (told,) = re.findall(r"^!\[([^]]*)\]\(docs/timeline\.svg\)$", README, re.M)
    assert told.endswith(drawn)
