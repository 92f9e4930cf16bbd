"""What the README and docs/ say is so: code runs, commands work, tables are the generated ones, and
what is named is there."""

import importlib
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from test_structure import FILES

import autofuse
from autofuse import errors
from autofuse.__main__ import main, markdown
from autofuse.settings.config import SETTINGS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(autofuse.__file__).parent
SOURCE = "".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
MODULES = {name for name in FILES if not name.endswith("__init__")}
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
ALL = "\n".join(PAGES.values())
OF_THE_CODE = ("glossary.md", "layout.md", "life_of_a_value.md")  # name modules without folders

each_page = pytest.mark.parametrize("page", PAGES)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
BLOCKS = [
    pytest.param(code, id=f"{page}-{k}")
    for page, text in PAGES.items()
    for k, (language, code) in enumerate(FENCED.findall(text))
    if language == "python"
]
INDENTED = re.findall(r"(?:^|\n\n)((?:    \S.*\n)+)", ALL)
SPANS = re.findall(r"`([^`\n]+)`", ALL)


def expanded(command):
    """The commands that a shell makes of one with {a,b} in it."""
    parts = [part.split(",") for part in re.split(r"[{}]", command)]
    return ["".join(words) for words in product(*parts)] if "{" in command else [command]


LINES = [line.strip() for block in INDENTED for line in block.splitlines()]
COMMANDS = sorted({
    command
    for text in (*LINES, *SPANS)
    for part in text.split(" && ")
    if part.startswith("python -m autofuse ")
    for command in expanded(part)
})  # fmt: skip


# code and commands


@each_page
def test_blocks_are_of_known_languages(page):
    """Python, which is run, and figures made of characters; commands are indented."""
    languages = {language for language, _ in FENCED.findall(PAGES[page])}
    assert languages <= {"python", "text"}
    assert PAGES[page].count("```") == 2 * len(FENCED.findall(PAGES[page]))


def test_blocks_are_found():
    assert len(BLOCKS) >= 4 and len(INDENTED) >= 3


@pytest.mark.parametrize("block", BLOCKS)
def test_python_block(block, monkeypatch):
    """Each in a namespace of its own, on the CPU; warnings are errors, settings come back."""
    before = dict(vars(autofuse.config))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        exec(compile(block, "page.md", "exec"), {"__name__": "__main__"})
    finally:
        for name, value in before.items():
            setattr(autofuse.config, name, value)


def test_commands_are_found():
    named = {command.split()[3] for command in COMMANDS}
    assert named == {"report", "try", "coverage", "settings", "cache", "verify"}


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path / "kernels"))
    arguments = command.split()[3:]
    if arguments[0] == "try":  # test_try.py runs programs
        monkeypatch.setattr("autofuse.__main__.attempt", lambda *args: print(*args) or 0)
    if arguments[0] == "verify":  # on a GPU alone, and for minutes
        monkeypatch.setattr("autofuse.__main__.verify", lambda: print("verified") or 0)
    assert main(arguments) == 0
    assert capsys.readouterr().out


# settings and messages


def test_table_of_settings():
    between = PAGES["settings.md"].split("<!-- settings -->\n")[1].split("<!-- /settings -->")[0]
    assert between == markdown(SETTINGS), (
        "replace what stands between the markers of docs/settings.md by what "
        "`python -m autofuse settings --markdown` prints"
    )


def test_variables_and_fields_are_settings():
    variables = set(re.findall(r"\bAUTOFUSE(?!_TEST_)(?:_[A-Z]+)+\b", ALL))
    assert variables == {setting.variable for setting in SETTINGS} - {"AUTOFUSE"}
    for name in {*re.findall(r"\bconfig\.(\w+)", ALL)} - {"py"}:
        assert hasattr(autofuse.config, name), name


def test_messages_are_those_of_the_source():
    """The first column of troubleshooting.md, in pieces, because the source has f-strings."""
    messages = [
        message
        for row in re.findall(r"^\| (`.*?) \|", PAGES["troubleshooting.md"], re.M)
        for message in re.findall(r"`([^`]+)`", row)
    ]
    assert len(messages) >= 7
    source = re.sub(r'"\s+f?"', "", SOURCE)  # literals that follow each other are one
    for message in messages:
        for piece in re.split(r"\.\.\.|\bN\b", message):
            assert piece.strip(" ;:") in source, message


def table_of_exceptions():
    """The one of troubleshooting.md, from the docstrings, without what is caught inside."""
    rows = ["| | what happened | what to do |", "|---|---|---|"]
    for name, error in vars(errors).items():
        ours = isinstance(error, type) and issubclass(error, errors.AutofuseError)
        if ours and "caught inside" not in error.__doc__:
            cells = (" ".join(part.split()) for part in error.__doc__.split("\n\n"))
            rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def test_table_of_exceptions():
    between = PAGES["troubleshooting.md"].split("<!-- exceptions -->\n")[1]
    assert between.split("<!-- /exceptions -->")[0] == table_of_exceptions()
    raised = set(re.findall(r"raise (\w+Error)\(", SOURCE)) & set(vars(errors))
    assert raised <= set(re.findall(r"`(\w+)` \|", between)) | {"NotReadyError", "BuildError"}


# what is named


@each_page
def test_files_that_are_named_exist(page):
    names = re.findall(r"\b((?:autofuse|bench|examples|tests)/\w[\w./-]*)", PAGES[page])
    for name in names:
        assert (ROOT / name.rstrip(".")).exists(), name


@pytest.mark.parametrize("page", OF_THE_CODE)
def test_modules_and_functions_exist(page):
    files = {name for name in re.findall(r"`([\w/]+\.(?:py|md))`", PAGES[page])}
    for name in files:
        found = [PACKAGE / name, DOCS / name, ROOT / name]
        assert any(path.is_file() for path in found), name
    named = re.findall(r"`(\w+)\.(\w+)`", PAGES[page])
    for module, name in named:
        of_name = [known for known in MODULES if known.rpartition(".")[2] == module]
        if of_name and name not in ("py", "md"):
            found = [importlib.import_module(f"autofuse.{known}") for known in of_name]
            assert any(hasattr(one, name) for one in found), (module, name)
    assert files or named


def test_every_module_has_its_place():
    table = PAGES["layout.md"].partition("## Where does it go?")[0]
    placed = []
    for folder, modules in re.findall(r"^\| (?:`(\w+)/` )?\| ((?:`\w+` ?)+)\|", table, re.M):
        placed += [f"{folder}.{name}".strip(".") for name in re.findall(r"`(\w+)`", modules)]
    assert len(placed) == len({*placed})
    assert {*placed} == MODULES - {"__main__"}


# pages


def links(text):
    """Targets of the links outside code, of this repository."""
    text = re.sub(r"`[^`\n]*`", "code", FENCED.sub("", text))
    return [at for at in re.findall(r"\]\(([^)\s]+)\)", text) if not at.startswith("https://")]


@each_page
def test_links_lead_somewhere(page):
    """A page of docs/ links to pages of docs/ alone, for on the site there is nothing else."""
    folder = ROOT if page == "README.md" else DOCS
    for link in links(PAGES[page]):
        path = folder / link
        assert path.exists(), link
        assert folder == ROOT or path.parent == DOCS, link


@each_page
def test_a_page_says_for_whom_it_is(page):
    if page != "README.md":
        title, _, first = PAGES[page].split("\n", 2)
        assert title.startswith("# ") and first.startswith("For whoever "), page


def test_every_page_is_found_from_each_beginning():
    """The README, the first page of docs/, and the menu of the site."""
    pages = {*PAGES} - {"README.md", "index.md"}
    for beginning in ("README.md", "index.md"):
        named = {Path(link).name for link in links(PAGES[beginning]) if link.endswith(".md")}
        assert {name for name in named if (DOCS / name).exists()} == pages, beginning
    menu = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(menu) == sorted({*pages, "index.md"})


# what is said in more than one place


def test_versions_are_the_same_everywhere():
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"', project, re.M)
    assert version == autofuse.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}, " in (ROOT / "CHANGELOG.md").read_text()
    pythons = re.findall(r":: Python :: (3\.\d+)", project)
    run = set(re.findall(r"\b(3\.1\d) torch", (ROOT / ".ci" / "run").read_text()))
    assert set(pythons) == run and f'>={pythons[0]}"' in project
    assert f"Python {pythons[0]} to {pythons[-1]}" in PAGES["install.md"]


def test_the_table_of_versions_is_what_ci_runs():
    """Each row of the first table of install.md's versions is a job of .ci/run, in its order."""
    project = (ROOT / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', project)
    (numba_cuda,) = {*re.findall(r"numba-cuda\[cu\d+\]>=([\d.]+),", project)}
    ci = (ROOT / ".ci" / "run").read_text()
    jobs = re.findall(r"(?:^|\s)(3\.\d+) torch(?:==(\S+))?((?: [01]:[A-Z]+)*)", ci)
    said = {
        "": "all | all that C calls",  # as it is by itself, on 3.11
        " 1:HOT 0:REFERENCES": "of the hot path; of references, threads, interrupts | on; off",
        " 1:HOT 1:OPS": "of the hot path, of ops | on",
        " 0:ALONE": "of references, threads, interrupts, frames, errors | none",
    }
    rows = ["| Python | torch | tests | machine code |", "|---|---|---|---|"]
    for python, pinned, ways in jobs:
        torch_ = pinned.replace("$oldest", oldest) or "the newest"
        rows.append(f"| {python} | {torch_} | {said[ways]} |")
    text, table = PAGES["install.md"].partition("\n## Versions\n\n")[2].split("\n\n")[:2]
    assert len(jobs) >= 4 and table == "\n".join(rows)
    assert f" numba-cuda {numba_cuda}," in text


def test_the_tests_that_ci_names_are_there():
    """One name that pytest does not find, and it runs none of a whole list."""
    ci = (ROOT / ".ci" / "run").read_text()
    lists = re.findall(r'^export (?:HOT|REFERENCES|ALONE|OPS)="(?:\$\w+)?([^"]*)"', ci, re.M)
    names = {name for each in lists for name in each.split()}
    assert len(lists) == 4 and len(names) > 48
    for name in names:
        file, _, test = name.partition("::")
        text = (ROOT / "tests" / f"test_{file}.py").read_text()
        assert not test or re.search(rf"^def test_{test}\(", text, re.M), name
