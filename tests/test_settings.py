"""The table of settings: what is read from the environment, what may be assigned, what is said."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import autofuse
from autofuse import errors
from autofuse.settings.config import SETTINGS, Config, changed, read, watch
from autofuse.settings.fields import Bytes, kind_of
from autofuse.supply.disk import DiskCache

CONFIG = sys.modules["autofuse.settings.config"]
FIELDS = [setting for setting in SETTINGS if setting.field]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    for setting in FIELDS:
        monkeypatch.setattr(autofuse.config, setting.name, setting.default)


# the table


@each_setting
def test_a_row_is_complete(setting):
    assert setting.help and "\n" not in setting.help and not setting.help.endswith(".")
    assert setting.variable == setting.variable.upper()
    assert setting.kind.check(setting.default) == setting.default
    assert setting.read(setting.kind.show(setting.default)) == setting.default


def test_every_field_is_a_row_with_its_type():
    hints = get_type_hints(Config)
    assert list(hints) == [setting.name for setting in FIELDS]
    for setting in FIELDS:
        hint = hints[setting.name]
        if hint in (bool, int):
            assert type(setting.default) is hint
        elif get_origin(hint) is Literal:
            assert all(setting.check(word) == setting.read(word) == word for word in get_args(hint))


def test_names_in_the_environment():
    names = {setting.name: setting.variable for setting in SETTINGS}
    assert names["enabled"] == "AUTOFUSE" and names["max_nodes"] == "AUTOFUSE_MAX_NODES"
    assert names["cache_dir"] == "AUTOFUSE_CACHE_DIR"
    assert len(set(names.values())) == len(SETTINGS)


# the environment


def test_nothing_set_is_nothing_read(capsys):
    assert read({"PATH": "/bin", "AUTOFUSED": "1", "AUTOFUSE_TEST_SEED": "3"}) == {}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "variable, text, name, value",
    [
        ("AUTOFUSE", "0", "enabled", False),
        ("AUTOFUSE_RELAXED", "1", "relaxed", True),
        ("AUTOFUSE_MAX_NODES", "8", "max_nodes", 8),
        ("AUTOFUSE_WORKERS", "0", "workers", 0),
        ("AUTOFUSE_WORKERS", "", "workers", None),
        ("AUTOFUSE_PINNED_BYTES", "64k", "pinned_bytes", 64 << 10),
        ("AUTOFUSE_COMPILE", "background", "compile", "background"),
        ("AUTOFUSE_CACHE_DIR", "/kernels", "cache_dir", Path("/kernels")),
        ("AUTOFUSE_CACHE_DIR", "", "cache_dir", None),
        ("AUTOFUSE_CACHE_MAXSIZE", "1G", "cache_maxsize", 1 << 30),
    ],
)
def test_a_good_value_is_read(variable, text, name, value):
    assert read({variable: text}) == {name: value}


@pytest.mark.parametrize(
    "variable, text, valid",
    [
        ("AUTOFUSE", "", "use 0 or 1 (default: 1)"),
        ("AUTOFUSE_RELAXED", "true", "use 0 or 1 (default: 0)"),
        ("AUTOFUSE_MAX_NODES", "many", "use a whole number, 1 or more (default: 64)"),
        ("AUTOFUSE_MAX_NODES", "0", "use a whole number, 1 or more (default: 64)"),
        ("AUTOFUSE_MAX_NODES", "1.5", "use a whole number, 1 or more (default: 64)"),
        ("AUTOFUSE_WORKERS", "-1", "use a whole number, 0 or more, or nothing (default: none)"),
        ("AUTOFUSE_COMPILE", "later", "use auto, background or now (default: auto)"),
        ("AUTOFUSE_RECOMPUTE", "all", "use free or inputs (default: free)"),
        ("AUTOFUSE_CACHE_MAXSIZE", "lots", "suffix K, M or G (powers of 1024) (default: 256M)"),
    ],
)
def test_a_bad_value_says_what_is_valid(variable, text, valid):
    with pytest.raises(ValueError) as caught:
        read({variable: text})
    assert str(caught.value).startswith(f"{variable}={text!r} is not valid; use ")
    assert str(caught.value).endswith(valid)


def test_a_slip_of_the_pen_is_warned_of_once(capsys, monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    for _ in range(2):
        assert read({"AUTOFUSE_COMPILE_AFTR": "3", "AUTOFUSE_ENABLED": "0"}) == {}
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "autofuse: AUTOFUSE_COMPILE_AFTR in the environment is no setting; "
        "the nearest is AUTOFUSE_COMPILE_AFTER"
    )
    assert len(lines) == 2 and "AUTOFUSE_ENABLED" in lines[1]


def imported(**variables):
    """What `import autofuse` does under these variables."""
    code = "import autofuse; print(autofuse.config.max_nodes, autofuse.config.compile)"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env={**os.environ, **variables},
        capture_output=True, text=True,
    )  # fmt: skip


def test_import_reads_the_environment_and_warns():
    done = imported(AUTOFUSE_MAX_NODES="9", AUTOFUSE_COMPILE="now", AUTOFUSE_MAX_NODE="8")
    assert done.stdout.split() == ["9", "now"]
    assert done.stderr.splitlines() == [
        "autofuse: AUTOFUSE_MAX_NODE in the environment is no setting; "
        "the nearest is AUTOFUSE_MAX_NODES"
    ]


def test_import_raises_for_a_bad_value_of_the_cache():
    done = imported(AUTOFUSE_CACHE_MAXSIZE="256MB")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ValueError: AUTOFUSE_CACHE_MAXSIZE='256MB' is not valid; use a number of bytes, also with "
        "the suffix K, M or G (powers of 1024) (default: 256M)"
    )


def test_the_table_and_the_disk_cache_agree(monkeypatch):
    monkeypatch.delenv("AUTOFUSE_CACHE_MAXSIZE", raising=False)
    defaults = {setting.name: setting.default for setting in SETTINGS}
    assert DiskCache("x").maxsize == defaults["cache_maxsize"]
    for text in ("0", "3K", " 2g "):
        monkeypatch.setenv("AUTOFUSE_CACHE_MAXSIZE", text)
        assert DiskCache("x").maxsize == read(os.environ)["cache_maxsize"]


# assignment


@pytest.mark.parametrize(
    "name, value, error, valid",
    [
        ("enabled", 1, TypeError, "True or False"),
        ("relaxed", "1", TypeError, "True or False"),
        ("max_nodes", "64", TypeError, "a whole number, 1 or more"),
        ("max_nodes", True, TypeError, "a whole number, 1 or more"),
        ("max_nodes", 64.0, TypeError, "a whole number, 1 or more"),
        ("max_nodes", 0, ValueError, "a whole number, 1 or more"),
        ("pinned_bytes", "2M", TypeError, "a number of bytes, 0 or more"),
        ("pinned_bytes", -1, ValueError, "a number of bytes, 0 or more"),
        ("compile", "later", ValueError, "'auto', 'background' or 'now'"),
        ("compile", None, TypeError, "'auto', 'background' or 'now'"),
        ("recompute", "Free", ValueError, "'free' or 'inputs'"),
    ],
)
def test_assigning_what_is_not_valid(name, value, error, valid):
    before = getattr(autofuse.config, name)
    with pytest.raises(error) as caught:
        setattr(autofuse.config, name, value)
    assert str(caught.value) == f"config.{name} = {value!r} is not valid; use {valid}"
    assert getattr(autofuse.config, name) == before


def test_a_new_setting_is_told(monkeypatch):
    told = []
    monkeypatch.setattr(CONFIG, "_watchers", [])
    watch(told.append)
    autofuse.config.max_nodes = 7
    assert autofuse.config.max_nodes == 7 and told == ["config"]
    with pytest.raises(ValueError):
        autofuse.config.max_nodes = -7
    assert told == ["config"]


def test_names_that_are_no_setting():
    with pytest.raises(AttributeError, match="no setting 'max_node'; the nearest is 'max_nodes'"):
        autofuse.config.max_node = 3
    with pytest.raises(AttributeError, match="set AUTOFUSE_CACHE_DIR before Python starts"):
        autofuse.config.cache_dir = "/kernels"


def test_reading_is_a_plain_attribute():
    assert vars(autofuse.config) == {setting.name: setting.default for setting in FIELDS}


def test_what_differs_from_the_defaults():
    assert changed({}) == {}
    autofuse.config.relaxed, autofuse.config.pinned_bytes = True, 3 << 20
    environment = {"AUTOFUSE_CACHE_DIR": "/kernels", "AUTOFUSE_MAX_NODES": "7"}
    assert changed(environment) == {
        "AUTOFUSE_RELAXED": "1",
        "AUTOFUSE_PINNED_BYTES": "3M",
        "AUTOFUSE_CACHE_DIR": "/kernels",
    }


# kinds that every setting may have


def test_sets_of_words():
    kind = kind_of(frozenset[Literal["flush", "kernel", "cache"]])
    assert kind.read("cache, flush,") == {"flush", "cache"} and kind.read("") == frozenset()
    assert kind.check(["kernel"]) == frozenset({"kernel"}) == kind.check("kernel")
    assert kind.show(frozenset({"cache", "flush"})) == "flush,cache"
    for wrong, error in (("flsh", ValueError), ({"a"}, ValueError), (3, TypeError)):
        with pytest.raises(error):
            kind.check(wrong)
    assert kind.texts == "any of flush, kernel, cache, with commas between them"


def test_paths(tmp_path):
    kind = kind_of(Path | None)
    assert kind.read("") is None and kind.check(None) is None and kind.show(None) == ""
    assert kind.check(str(tmp_path)) == kind.check(tmp_path) == kind.read(kind.show(tmp_path))
    for wrong in (3, b"bytes"):
        with pytest.raises(TypeError):
            kind.check(wrong)


@pytest.mark.parametrize("nbytes, text", [(0, "0"), (1000, "1000"), (2048, "2K"), (3 << 30, "3G")])
def test_sizes_are_shown_as_they_are_read(nbytes, text):
    kind = kind_of(Bytes)
    assert kind.show(nbytes) == text and kind.read(text) == nbytes
