"""What the README says is so: its code runs, its commands work, its table is the generated one."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch

import autofuse
from autofuse.__main__ import main, markdown
from autofuse.settings.config import SETTINGS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SOURCE = "".join(path.read_text() for path in sorted((ROOT / "autofuse").rglob("*.py")))
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
FENCED = re.findall(r"```(?:sh|bash|console)\n(.*?)```", README, re.S)
INDENTED = re.findall(r"(?:^|\n\n)((?:    \S.*\n)+)", README)
SPANS = re.findall(r"`([^`\n]+)`", README)


def expanded(command):
    """The commands that a shell makes of one with {a,b} in it."""
    parts = [part.split(",") for part in re.split(r"[{}]", command)]
    return ["".join(words) for words in product(*parts)] if "{" in command else [command]


LINES = [line.strip() for block in (*FENCED, *INDENTED) for line in block.splitlines()]
COMMANDS = sorted({
    command
    for text in (*LINES, *SPANS)
    for part in text.split(" && ")
    if part.startswith("python -m autofuse")
    for command in expanded(part)
})  # fmt: skip


def test_blocks_are_found():
    assert BLOCKS and len(INDENTED) >= 3
    assert README.count("```") == 2 * (len(BLOCKS) + len(FENCED)), "a block of another language"


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block(block, monkeypatch):
    """Each in a namespace of its own, on the CPU; warnings are errors, settings come back."""
    before = dict(vars(autofuse.config))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    finally:
        for name, value in before.items():
            setattr(autofuse.config, name, value)


def test_commands_are_found():
    named = {command.split()[3] for command in COMMANDS if len(command.split()) > 3}
    assert named == {"report", "coverage", "settings", "cache"}


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path / "kernels"))
    arguments = command.split()[3:]
    assert main(arguments) == 0
    assert capsys.readouterr().out


def test_table_of_settings():
    between = README.split("<!-- settings -->\n")[1].split("<!-- /settings -->")[0]
    assert between == markdown(SETTINGS), (
        "replace what stands between the README's markers by what "
        "`python -m autofuse settings --markdown` prints"
    )


def test_variables_and_fields_are_settings():
    variables = set(re.findall(r"\bAUTOFUSE(?!_TEST_)(?:_[A-Z]+)+\b", README))
    assert variables == {setting.variable for setting in SETTINGS} - {"AUTOFUSE"}
    for name in {*re.findall(r"\bconfig\.(\w+)", README)} - {"py"}:
        assert hasattr(autofuse.config, name), name


def test_messages_are_those_of_the_source():
    """The first column under "Troubleshooting", in pieces, because the source has f-strings."""
    section = README.split("## Troubleshooting")[1].split("\n## ")[0]
    messages = [
        message
        for row in re.findall(r"^\| (`.*?) \|", section, re.M)
        for message in re.findall(r"`([^`]+)`", row)
    ]
    assert len(messages) >= 7
    source = re.sub(r'"\s+f?"', "", SOURCE)  # literals that follow each other are one
    for message in messages:
        for piece in re.split(r"\.\.\.|\bN\b", message):
            assert piece.strip(" ;:") in source, message


def test_files_that_are_named_exist():
    names = re.findall(r"\b((?:autofuse|bench|examples|tests)/[\w./]*)", README)
    assert len(names) > 8
    for name in names:
        assert (ROOT / name.rstrip(".")).exists(), name


def test_the_set_up_command_is_found_once():
    """The one that is run in a fresh environment, see .ci/."""
    assert len(re.findall(r"^    pip install -e \"\.\[test\]\".*$", README, re.M)) == 1
