"""The disk cache: what is damaged or foreign is a miss, what many processes do at once is safe."""

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofuse.__main__ import main, show_size
from autofuse.settings.sizes import parse_size
from autofuse.supply import disk as cache
from autofuse.supply.disk import DiskCache, Entry

POSIX = pytest.mark.skipif(os.name != "posix", reason="owners, modes and pipes are POSIX's")
PAYLOAD = b"\x7fELF\n\x00payload\n"
ABOUT = {"name": "mul_add", "target": "sm_90", "shape": [64, 256]}
LOAD = f"""
import os, sys, time, types
package = types.ModuleType("autofuse")
package.__path__ = [{os.path.dirname(os.path.dirname(cache.__file__))!r}]
sys.modules["autofuse"] = package
from autofuse.supply import disk as cache
"""


def key_of(text):
    return hashlib.sha256(str(text).encode()).hexdigest()


KEY = key_of("a")


@pytest.fixture
def disk(tmp_path):
    return DiskCache(tmp_path / "cache", 1 << 20)


def path_of(disk, key=KEY):
    return disk.directory / f"{key}.kernel"


def mode_of(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


def total(disk):
    return sum(path.stat().st_size for path in disk.directory.glob("*.kernel"))


def keys(disk):
    return {entry.key for entry in disk.entries()}


def use_at(disk, key, seconds):
    os.utime(path_of(disk, key), (seconds, seconds))


def sealed(body):
    """A file whose checksum is right."""
    return b"autofuse-kernel 1 " + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def run(*scripts):
    """Processes that load the disk cache without the package, started together; their outputs.

    Each says "ready" first and goes on when all have.
    """
    start = "print('ready', flush=True); sys.stdin.readline()\n"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD + start + script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) for script in scripts
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()
    outputs = []
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and not errors, errors
        outputs.append(output)
    return outputs


# what is kept


def test_round_trip(disk):
    assert disk.get(KEY) is None
    assert disk.put(KEY, PAYLOAD, ABOUT) == ""
    assert disk.get(KEY) == PAYLOAD
    assert disk.get(key_of("b")) is None
    assert DiskCache(disk.directory).get(KEY) == PAYLOAD


@pytest.mark.parametrize("payload", [b"", b"\n", b"\n\n{}\n", bytes(range(256)) * 1000])
def test_any_payload_round_trips(disk, payload):
    assert disk.put(KEY, payload, ABOUT) == ""
    assert disk.get(KEY) == payload


def test_a_later_put_replaces(disk):
    disk.put(KEY, b"old", ABOUT)
    assert disk.put(KEY, b"new", ABOUT) == ""
    assert disk.get(KEY) == b"new"
    assert len(list(disk.entries())) == 1


def test_the_format_is_the_documented_one(disk):
    disk.put(KEY, PAYLOAD, ABOUT)
    first, header, payload = path_of(disk).read_bytes().split(b"\n", 2)
    magic, version, checksum = first.split(b" ")
    assert (magic, version) == (b"autofuse-kernel", b"1")
    assert checksum.decode() == hashlib.sha256(header + b"\n" + payload).hexdigest()
    assert json.loads(header) == {**ABOUT, "key": KEY}
    assert payload == PAYLOAD


def test_facts_may_hold_anything_that_json_does(disk):
    about = {"name": "zwei\nZeilen \u20ac", "key": "not the key", "list": [1, None, 2.5]}
    assert disk.put(KEY, PAYLOAD, about) == ""
    assert disk.get(KEY) == PAYLOAD
    (entry,) = disk.entries()
    assert entry.key == KEY
    assert entry.about == {"name": "zwei\nZeilen \u20ac", "list": [1, None, 2.5]}


def test_facts_have_a_limit(disk):
    assert "facts" in disk.put(KEY, PAYLOAD, {"name": "x" * cache.HEADER_BYTES})
    assert disk.get(KEY) is None


@pytest.mark.parametrize("key", ["", "a", KEY.upper(), KEY + "\n", f"../{KEY}", "g" * 64])
def test_other_keys_are_errors(disk, key):
    for use in (disk.get, lambda key: disk.put(key, b"", {}), lambda key: open_lock(disk, key)):
        with pytest.raises(ValueError, match="SHA-256"):
            use(key)


def open_lock(disk, key, patience=0.0):
    with disk.building(key, patience) as held:
        return held


def test_reading_makes_nothing(disk):
    assert disk.get(KEY) is None
    assert list(disk.entries()) == [] and disk.clear() == 0 and disk.prune(0) == 0
    assert disk.refusal() == "" and not disk.directory.exists()


@POSIX
def test_modes(disk):
    before = os.umask(0)
    try:
        assert disk.put(KEY, PAYLOAD, ABOUT) == ""
        assert open_lock(disk, KEY)
    finally:
        os.umask(before)
    assert mode_of(disk.directory) == 0o700
    assert mode_of(disk.directory / "locks") == 0o700
    assert mode_of(disk.directory / "locks" / KEY[:2]) == 0o600
    assert mode_of(path_of(disk)) == 0o600


def test_entries(disk):
    disk.put(KEY, PAYLOAD, ABOUT)
    use_at(disk, KEY, 1000.5)
    nbytes = path_of(disk).stat().st_size
    assert list(disk.entries()) == [Entry(KEY, nbytes, 1000.5, ABOUT)]


# what is damaged


def test_truncated_anywhere(disk):
    disk.put(KEY, PAYLOAD, {})
    data = path_of(disk).read_bytes()
    for length in range(len(data)):
        path_of(disk).write_bytes(data[:length])
        assert disk.get(KEY) is None, length
        list(disk.entries())
    path_of(disk).write_bytes(data)
    assert disk.get(KEY) == PAYLOAD


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0xFF])
def test_any_byte_flipped(disk, flip):
    disk.put(KEY, PAYLOAD, {})
    data = path_of(disk).read_bytes()
    for k in range(len(data)):
        path_of(disk).write_bytes(data[:k] + bytes([data[k] ^ flip]) + data[k + 1 :])
        assert disk.get(KEY) is None, k
        list(disk.entries())


DAMAGED = {
    "empty": b"",
    "foreign": b"#!/bin/sh\necho hello\n",
    "a later format": b"autofuse-kernel 2" + sealed(b"{}\n")[17:],
    "longer by a byte": sealed(json.dumps({"key": KEY}).encode() + b"\npayload") + b"\n",
    "no header": sealed(b""),
    "no line end after the header": sealed(json.dumps({"key": KEY}).encode()),
    "a header that is no JSON": sealed(b"key\npayload"),
    "a header that is no object": sealed(b"[1]\npayload"),
    "a header without key": sealed(b"{}\npayload"),
    "a header of another key": sealed(json.dumps({"key": key_of("b")}).encode() + b"\npayload"),
    "a header of bytes": sealed(b"\xff\xfe\x00\npayload"),
    "a deep header": sealed(b"[" * 50_000 + b"\npayload"),
    "a long number": sealed(b"1" * 50_000 + b"\npayload"),
    "checksum in capitals": sealed(b"{}\n")[:18] + b"A" * 64 + b"\n{}\n",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_is_no_entry_is_a_miss_and_put_heals_it(disk, damage):
    disk.put(KEY, PAYLOAD, ABOUT)
    path_of(disk).write_bytes(DAMAGED[damage])
    assert disk.get(KEY) is None
    list(disk.entries())
    assert disk.put(KEY, PAYLOAD, ABOUT) == ""
    assert disk.get(KEY) == PAYLOAD


def test_an_entry_renamed_to_another_key_is_a_miss(disk):
    disk.put(KEY, PAYLOAD, ABOUT)
    other = key_of("b")
    path_of(disk).rename(path_of(disk, other))
    assert disk.get(other) is None and disk.get(KEY) is None
    assert list(disk.entries()) == []


def test_a_file_larger_than_the_cache_is_not_read(disk):
    disk.put(KEY, PAYLOAD, ABOUT)
    assert DiskCache(disk.directory, path_of(disk).stat().st_size).get(KEY) == PAYLOAD
    assert DiskCache(disk.directory, path_of(disk).stat().st_size - 1).get(KEY) is None


GENUINE = sealed(json.dumps({"key": KEY}).encode() + b"\n" + PAYLOAD)
PIECES = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda a, b: GENUINE[min(a, b) : max(a, b)], st.integers(0, 300), st.integers(0, 300)
    ),
    st.just(GENUINE),
    st.sampled_from([b"autofuse-kernel 1 ", b"\n", json.dumps({"key": KEY}).encode()]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=4))
def test_arbitrary_bytes_give_the_genuine_payload_or_none(pieces):
    with tempfile.TemporaryDirectory() as directory:
        disk = DiskCache(directory, 1 << 20)
        path_of(disk).write_bytes(b"".join(pieces))
        assert disk.get(KEY) == (PAYLOAD if b"".join(pieces) == GENUINE else None)
        assert keys(disk) <= {KEY}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100), st.sampled_from([KEY, key_of("b"), 1, None]))
def test_arbitrary_bytes_of_the_right_checksum_raise_nothing(body, key):
    with tempfile.TemporaryDirectory() as directory:
        disk = DiskCache(directory, 1 << 20)
        path_of(disk).write_bytes(sealed(body))
        assert disk.get(KEY) is None  # no 100 bytes hold a header with a key
        path_of(disk).write_bytes(sealed(json.dumps({"key": key}).encode() + b"\n" + body))
        assert disk.get(KEY) == (body if key == KEY else None)


# what is not a file, or not ours


def test_a_directory_in_the_place_of_an_entry(disk):
    disk.put(key_of("b"), PAYLOAD, ABOUT)
    path_of(disk).mkdir()
    assert disk.get(KEY) is None
    assert "cannot write" in disk.put(KEY, PAYLOAD, ABOUT)
    assert keys(disk) == {key_of("b")} and list(disk.directory.glob("*.tmp")) == []
    assert disk.clear() == 1 and path_of(disk).is_dir()


@POSIX
def test_a_symbolic_link_in_the_place_of_an_entry(disk, tmp_path):
    disk.put(KEY, PAYLOAD, ABOUT)
    elsewhere = tmp_path / "elsewhere"
    path_of(disk).rename(elsewhere)
    path_of(disk).symlink_to(elsewhere)
    assert disk.get(KEY) is None and list(disk.entries()) == []
    assert disk.clear() == 0 and elsewhere.exists()
    data = elsewhere.read_bytes()
    assert disk.put(KEY, b"new", ABOUT) == "" and disk.get(KEY) == b"new"
    assert not path_of(disk).is_symlink() and elsewhere.read_bytes() == data


@POSIX
def test_a_pipe_in_the_place_of_an_entry_does_not_block(disk):
    disk.put(key_of("b"), PAYLOAD, ABOUT)
    os.mkfifo(path_of(disk))
    assert disk.get(KEY) is None
    assert keys(disk) == {key_of("b")} and disk.clear() == 1
    assert disk.put(KEY, PAYLOAD, ABOUT) == "" and disk.get(KEY) == PAYLOAD


@POSIX
@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_is_not_used(disk, mode):
    disk.put(KEY, PAYLOAD, ABOUT)
    disk.directory.chmod(mode)
    assert disk.get(KEY) is None
    assert "chmod go-w" in disk.put(KEY, PAYLOAD, ABOUT) and "chmod go-w" in disk.refusal()
    assert not open_lock(disk, KEY)
    assert list(disk.entries()) == [] and disk.clear() == 0 and disk.prune(0) == 0
    disk.directory.chmod(0o755)
    assert disk.get(KEY) == PAYLOAD


@POSIX
def test_a_directory_of_somebody_else_is_not_used(disk, monkeypatch):
    disk.put(KEY, PAYLOAD, ABOUT)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert disk.get(KEY) is None
    assert "belongs to user" in disk.put(KEY, PAYLOAD, ABOUT)
    assert not open_lock(disk, KEY) and list(disk.entries()) == []


@POSIX
def test_a_file_of_somebody_else_is_not_used(disk, monkeypatch):
    disk.put(KEY, PAYLOAD, ABOUT)
    fstat, owner = os.fstat, os.geteuid()

    def owned(descriptor):
        fields = list(fstat(descriptor))
        fields[stat.ST_UID] = owner
        return os.stat_result(fields)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", owned)
        assert disk.get(KEY) == PAYLOAD
        owner = os.geteuid() + 1
        assert disk.get(KEY) is None and list(disk.entries()) == []
        owner = 0  # root could do anything anyway
        assert disk.get(KEY) == PAYLOAD


@POSIX
def test_a_file_that_others_may_write_is_not_used(disk):
    disk.put(KEY, PAYLOAD, ABOUT)
    path_of(disk).chmod(0o620)
    assert disk.get(KEY) is None and list(disk.entries()) == []


def test_a_file_in_the_place_of_the_directory(disk):
    disk.directory.write_text("mine")
    assert disk.get(KEY) is None
    assert "not a directory" in disk.put(KEY, PAYLOAD, ABOUT)
    assert not open_lock(disk, KEY) and list(disk.entries()) == [] and disk.clear() == 0
    below = DiskCache(disk.directory / "below", 1000)
    assert below.get(KEY) is None and below.put(KEY, PAYLOAD, ABOUT) != ""
    assert disk.directory.read_text() == "mine"


def test_a_file_in_the_place_of_the_locks(disk):
    disk.put(KEY, PAYLOAD, ABOUT)
    (disk.directory / "locks").write_text("")
    assert not open_lock(disk, KEY)


# what cannot be written


@contextmanager
def failing(monkeypatch, name, number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


@pytest.mark.parametrize(
    "name, number",
    [
        ("open", errno.EACCES),
        ("open", errno.EROFS),
        ("write", errno.ENOSPC),
        ("write", errno.EDQUOT),
        ("replace", errno.EACCES),
    ],
)
def test_what_cannot_be_written_is_said(disk, monkeypatch, name, number):
    disk.put(key_of("b"), PAYLOAD, ABOUT)
    with failing(monkeypatch, name, number):
        assert os.strerror(number) in disk.put(KEY, PAYLOAD, ABOUT)
    assert [path.name for path in disk.directory.iterdir()] == [f"{key_of('b')}.kernel"]
    assert disk.put(KEY, PAYLOAD, ABOUT) == ""


def test_a_directory_that_cannot_be_made_is_said(disk, monkeypatch):
    with failing(monkeypatch, "makedirs", errno.EACCES):
        assert os.strerror(errno.EACCES) in disk.put(KEY, PAYLOAD, ABOUT)
        assert not open_lock(disk, KEY)


@pytest.mark.parametrize("name", ["open", "utime", "listdir", "lstat", "unlink"])
def test_a_disk_that_fails_raises_nothing(disk, monkeypatch, name):
    disk.put(KEY, PAYLOAD, ABOUT)
    with failing(monkeypatch, name, errno.EIO):
        assert disk.get(KEY) == (None if name == "open" else PAYLOAD)
        list(disk.entries())
        disk.prune(0)
        disk.clear()
        open_lock(disk, KEY)


def test_a_read_that_fails_is_a_miss(disk, monkeypatch):
    class Broken:
        def __init__(self, descriptor, mode):
            self.descriptor = descriptor

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            os.close(self.descriptor)

        def fileno(self):
            return self.descriptor

        def read(self, size=-1):
            raise OSError(errno.EIO, "")

    disk.put(KEY, PAYLOAD, ABOUT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", Broken)
        assert disk.get(KEY) is None and list(disk.entries()) == []


def test_an_interrupted_write_leaves_nothing(disk, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            disk.put(KEY, PAYLOAD, ABOUT)
    assert list(disk.directory.iterdir()) == []


@POSIX
def test_a_temporary_file_that_is_there_is_not_written_through(disk, tmp_path, monkeypatch):
    disk.put(key_of("b"), PAYLOAD, ABOUT)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    link = disk.directory / f"{KEY}.{bytes(8).hex()}.tmp"
    link.symlink_to(mine)
    monkeypatch.setattr(os, "urandom", bytes)
    assert os.strerror(errno.EEXIST) in disk.put(KEY, PAYLOAD, ABOUT)
    assert link.is_symlink() and mine.read_text() == "mine"
    link.unlink()
    link.write_text("half")
    assert os.strerror(errno.EEXIST) in disk.put(KEY, PAYLOAD, ABOUT)
    assert link.read_text() == "half"


def test_short_writes_are_continued(disk, monkeypatch):
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:7]))
        assert disk.put(KEY, PAYLOAD, ABOUT) == ""
    assert disk.get(KEY) == PAYLOAD


# how much is kept


def test_the_least_recently_used_go_first(disk):
    for k in range(10):
        disk.put(key_of(k), bytes(1000), ABOUT)
        use_at(disk, key_of(k), 1000 + k)
    assert disk.get(key_of(2)) == bytes(1000)  # used now
    nbytes = path_of(disk, key_of(0)).stat().st_size
    assert disk.prune(3 * nbytes) == 7
    assert keys(disk) == {key_of(k) for k in (2, 8, 9)}
    assert disk.prune() == 0 and disk.prune(3 * nbytes) == 0
    assert disk.prune(0) == 3 and keys(disk) == set()


def test_a_hit_counts_as_a_use_and_a_miss_does_not(disk):
    disk.put(KEY, PAYLOAD, ABOUT)
    use_at(disk, KEY, 1000)
    start = time.time()
    assert disk.get(KEY) == PAYLOAD
    assert path_of(disk).stat().st_mtime >= start - 5
    path_of(disk).write_bytes(b"damaged")
    use_at(disk, KEY, 1000)
    assert disk.get(KEY) is None
    assert path_of(disk).stat().st_mtime == 1000


def test_put_keeps_the_total_below_maxsize(tmp_path, monkeypatch):
    scans, listdir = 0, os.listdir

    def counted(path):
        nonlocal scans
        scans += 1
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    disk = DiskCache(tmp_path / "cache", 100_000)
    for k in range(400):
        assert disk.put(key_of(k), bytes(500), ABOUT) == ""
        use_at(disk, key_of(k), k)
        assert total(disk) <= 100_000
    assert total(disk) > 80_000
    assert keys(disk) >= {key_of(k) for k in range(351, 400)}
    assert scans < 300  # of 400; far less where a tenth of maxsize has more than 14 entries


def test_far_from_the_limit_put_does_not_scan(tmp_path, monkeypatch):
    disk = DiskCache(tmp_path / "cache")
    disk.put(KEY, PAYLOAD, ABOUT)
    monkeypatch.setattr(os, "listdir", None)  # not to be called
    for k in range(20):
        assert disk.put(key_of(k), PAYLOAD, ABOUT) == ""


def test_an_eviction_goes_below_nine_tenths(tmp_path):
    disk = DiskCache(tmp_path / "cache", 1 << 20)
    for k in range(20):
        disk.put(key_of(k), bytes(1000), ABOUT)
    most = total(disk)
    other = DiskCache(disk.directory, most)
    assert other.put(key_of("one more"), bytes(1000), ABOUT) == ""
    assert total(disk) <= 0.9 * most
    assert other.get(key_of("one more")) == bytes(1000)


def test_the_entry_just_written_stays(tmp_path):
    disk = DiskCache(tmp_path / "cache", 10_000)
    for k in range(5):
        disk.put(key_of(k), bytes(1000), ABOUT)
        use_at(disk, key_of(k), time.time() + 1000)  # another machine's clock
    assert disk.put(KEY, bytes(9_500), ABOUT) == ""
    assert keys(disk) == {KEY}


def test_an_entry_larger_than_maxsize_is_not_written(tmp_path):
    disk = DiskCache(tmp_path / "cache", 1000)
    disk.put(KEY, PAYLOAD, ABOUT)
    assert "more than the whole cache" in disk.put(key_of("b"), bytes(1000), ABOUT)
    assert keys(disk) == {KEY}


def test_maxsize_0_switches_the_cache_off(disk):
    disk.put(KEY, PAYLOAD, ABOUT)
    off = DiskCache(disk.directory, 0)
    assert off.get(KEY) is None and "switched off" in off.put(KEY, PAYLOAD, ABOUT)
    assert not open_lock(off, KEY)
    assert keys(off) == {KEY} and not (disk.directory / "locks").exists()
    assert off.clear() == 1
    nowhere = DiskCache(disk.directory / "nowhere", 0)
    assert "switched off" in nowhere.put(KEY, PAYLOAD, ABOUT)
    assert not nowhere.directory.exists()


def test_temporary_files_of_dead_processes_go(disk):
    disk.put(KEY, PAYLOAD, ABOUT)
    old, young = (disk.directory / f"{KEY}.{digit * 16}.tmp" for digit in "01")
    for path, age_s in ((old, 3700), (young, 3500)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    assert DiskCache(disk.directory).put(KEY, PAYLOAD, ABOUT) == ""
    assert not old.exists() and young.exists()
    os.utime(young, (1000, 1000))
    assert disk.prune() == 1 and keys(disk) == {KEY}


def test_clear_removes_nothing_else(disk):
    disk.put(KEY, PAYLOAD, ABOUT)
    open_lock(disk, KEY)
    mine = ["note.txt", "a.kernel", f"{KEY}.kernel.bak", f"{KEY}.tmp", f"x{KEY}.kernel", ".kernel"]
    for name in mine:
        (disk.directory / name).write_text("mine")
    (disk.directory / f"{KEY}.{'0' * 16}.tmp").write_text("half")
    path_of(disk, key_of("damaged")).write_text("damaged")
    assert disk.clear() == 3
    assert {path.name for path in disk.directory.iterdir()} == {*mine, "locks"}
    assert (disk.directory / "locks" / KEY[:2]).exists()
    assert disk.clear() == 0


# settings


@pytest.mark.parametrize(
    "text, nbytes",
    [("0", 0), ("1000", 1000), ("64K", 64 << 10), ("3m", 3 << 20), (" 2G ", 2 << 30)],
)
def test_sizes(text, nbytes, monkeypatch):
    assert parse_size(text) == nbytes
    monkeypatch.setenv("AUTOFUSE_CACHE_MAXSIZE", text)
    assert DiskCache("x").maxsize == nbytes


@pytest.mark.parametrize(
    "text", ["", "M", "-1", "1.5M", "10T", "256MB", "1 M", "\u0663", "9" * 5000]
)
def test_bad_sizes_say_what_is_valid(text, monkeypatch):
    monkeypatch.setenv("AUTOFUSE_CACHE_MAXSIZE", text)
    with pytest.raises(ValueError, match="AUTOFUSE_CACHE_MAXSIZE.*suffix K, M or G.*256M.*0"):
        DiskCache("x")
    assert DiskCache("x", 5).maxsize == 5


def test_a_negative_maxsize_is_an_error():
    with pytest.raises(ValueError, match="negative"):
        DiskCache("x", -1)


@pytest.fixture
def home(monkeypatch):
    for name in ("AUTOFUSE_CACHE_DIR", "AUTOFUSE_CACHE_MAXSIZE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    return monkeypatch


@pytest.mark.parametrize(
    "platform, environment, directory",
    [
        ("linux", {}, "/home/me/.cache/autofuse"),
        ("linux", {"XDG_CACHE_HOME": "/scratch/me"}, "/scratch/me/autofuse"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/autofuse"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/home/me/.cache/autofuse"),
        ("darwin", {"XDG_CACHE_HOME": "/scratch/me"}, "/home/me/Library/Caches/autofuse"),
        ("win32", {"LOCALAPPDATA": "/users/me/local"}, "/users/me/local/autofuse/Cache"),
        ("win32", {}, "/home/me/AppData/Local/autofuse/Cache"),
        ("linux", {"AUTOFUSE_CACHE_DIR": "/kernels", "XDG_CACHE_HOME": "/scratch"}, "/kernels"),
        ("win32", {"AUTOFUSE_CACHE_DIR": "/kernels", "LOCALAPPDATA": "/local"}, "/kernels"),
        ("linux", {"AUTOFUSE_CACHE_DIR": ""}, "/home/me/.cache/autofuse"),
    ],
)
def test_default_directories(home, platform, environment, directory):
    for name, value in environment.items():
        home.setenv(name, value)
    with home.context() as patch:
        patch.setattr(sys, "platform", platform)
        found = DiskCache()
    assert found.directory == Path(directory) and found.maxsize == 256 << 20


def test_a_relative_directory_stays_where_it_was(home, tmp_path):
    home.chdir(tmp_path)
    home.setenv("AUTOFUSE_CACHE_DIR", "kernels")
    assert DiskCache().directory == tmp_path / "kernels"


def test_no_home(home):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    home.setattr(Path, "home", fail)
    disk = DiskCache()
    assert disk.directory is None and disk.get(KEY) is None
    assert "AUTOFUSE_CACHE_DIR" in disk.put(KEY, PAYLOAD, ABOUT)
    assert not open_lock(disk, KEY)
    assert list(disk.entries()) == [] and disk.clear() == 0 and disk.prune() == 0


# many processes


def test_the_module_stands_alone():
    (loaded,) = run("print(*sys.modules)")
    ours = {name for name in loaded.split() if name.startswith("autofuse.")}
    assert ours == {
        f"autofuse.{name}" for name in ("settings", "settings.sizes", "supply", "supply.disk")
    }
    assert not {"torch", "numba", "numpy"} & set(loaded.split())


@POSIX
def test_each_key_is_built_once(tmp_path):
    """Eight processes that want the same five keys, each in another order."""
    script = """
disk, log = cache.DiskCache({directory!r}, 1 << 20), {log!r}
keys = {keys!r}
for key in keys:
    with disk.building(key):
        payload = disk.get(key)
        if payload is None:
            with open(log, "a") as file:
                file.write(key + "\\n")
            time.sleep(0.05)
            payload = key.encode() * 100
            assert disk.put(key, payload, {{"name": key}}) == ""
    assert payload == key.encode() * 100
"""
    names = [key_of(k) for k in range(5)]
    log = tmp_path / "log"
    scripts = (
        script.format(
            directory=str(tmp_path / "cache"),
            log=str(log),
            keys=names[k % 5 :] + names[: k % 5],
        )
        for k in range(8)
    )
    run(*scripts)
    assert sorted(log.read_text().split()) == sorted(names)


@POSIX
def test_a_builder_that_hangs_only_delays(disk):
    script = f"""
with cache.DiskCache({str(disk.directory)!r}, 1 << 20).building({KEY!r}) as held:
    print(held, flush=True)
    sys.stdin.readline()
"""
    builder = subprocess.Popen(
        [sys.executable, "-c", LOAD + script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with builder:
        assert builder.stdout.readline().strip() == b"True"
        start = time.monotonic()
        with disk.building(KEY, patience=0.1) as held:
            assert not held and time.monotonic() - start >= 0.1
            assert disk.put(KEY, PAYLOAD, ABOUT) == "" and disk.get(KEY) == PAYLOAD
        assert open_lock(disk, key_of("another key"))
        builder.kill()
        builder.wait()
        assert open_lock(disk, KEY)


@POSIX
def test_a_lock_is_waited_for_and_threads_exclude_each_other(disk):
    order = []

    def build():
        with disk.building(KEY) as held:
            order.append(("thread", held))

    with disk.building(KEY) as held:
        thread = threading.Thread(target=build)
        thread.start()
        time.sleep(0.05)
        order.append(("main", held))
    thread.join()
    assert order == [("main", True), ("thread", True)]


@POSIX
def test_a_forked_child_does_not_keep_the_lock(disk):
    (output,) = run(f"""
import signal
disk = cache.DiskCache({str(disk.directory)!r}, 1 << 20)
with disk.building({KEY!r}) as first:
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
with disk.building({KEY!r}, patience=0) as second:
    print(first, second)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
""")
    assert output.split() == ["True", "True"]


@POSIX
def test_an_error_while_building_gives_the_lock_back(disk):
    with pytest.raises(ZeroDivisionError), disk.building(KEY) as held:
        assert held
        raise ZeroDivisionError
    assert open_lock(disk, KEY)


def test_without_locks_building_goes_on_at_once(disk, monkeypatch):
    monkeypatch.setattr(cache, "fcntl", None)
    with disk.building(KEY) as held:
        assert not held and disk.put(KEY, PAYLOAD, ABOUT) == ""


@POSIX
def test_a_file_system_without_locks(disk, monkeypatch):
    def fail(file, flags):
        raise OSError(errno.ENOLCK, "")

    monkeypatch.setattr(cache.fcntl, "flock", fail)
    start = time.monotonic()
    assert not open_lock(disk, KEY, patience=30) and time.monotonic() - start < 5


def test_put_prune_clear_and_get_at_once(tmp_path):
    script = """
import hashlib, random
disk = cache.DiskCache({directory!r}, 20_000)
pick = random.Random({seed})
for _ in range(300):
    key = hashlib.sha256(bytes([pick.randrange(40)])).hexdigest()
    action = pick.random()
    if action < 0.5:
        assert disk.get(key) in (None, key.encode() * 20)
    elif action < 0.9:
        disk.put(key, key.encode() * 20, dict(name=key))
    elif action < 0.94:
        disk.prune(pick.randrange(20_000))
    elif action < 0.98:
        assert all(entry.about == dict(name=entry.key) for entry in disk.entries())
    else:
        disk.clear()
"""
    directory = str(tmp_path / "cache")
    run(*(script.format(directory=directory, seed=seed) for seed in range(6)))
    assert list(Path(directory).glob("*.tmp")) == []


# the command line


@pytest.fixture
def kept(disk, monkeypatch):
    """The cache of the command line, with three kernels."""
    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", str(disk.directory))
    monkeypatch.setenv("AUTOFUSE_CACHE_MAXSIZE", "1M")
    for k, name in enumerate(("mul_add", "tanh", "sigmoid_mul")):
        disk.put(key_of(k), bytes(2000), {"name": name, "target": f"sm_{90 + k}"})
        use_at(disk, key_of(k), 1_700_000_000 + 3600 * k)
    return disk


def test_cli_without_a_command_prints_help(capsys):
    for argv, text in (([], "cache"), (["cache"], "prune")):
        assert main(argv) == 2
        assert text in capsys.readouterr().err


def test_cli_path(kept, capsys):
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out == f"{kept.directory}\n"


def test_cli_ls(kept, capsys):
    assert main(["cache", "ls"]) == 0
    title, *rows, last = capsys.readouterr().out.splitlines()
    assert title.split() == ["kernel", "target", "size", "last", "use"]
    names = [row.split()[:2] for row in rows]
    assert names == [["sigmoid_mul", "sm_92"], ["tanh", "sm_91"], ["mul_add", "sm_90"]]
    assert len({row.index("sm_") for row in rows}) == 1
    assert rows[0].split()[2:] == [
        show_size(path_of(kept, key_of(2)).stat().st_size),
        *time.strftime("%Y-%m-%d %H:%M", time.localtime(1_700_007_200)).split(),
    ]
    assert last == f"3 kernels, {show_size(total(kept))} bytes of 1M"


def test_cli_ls_of_facts_that_are_no_text(kept, capsys):
    kept.clear()
    kept.put(KEY, PAYLOAD, {"name": "\x1b[31m\u20ac\ud800"})
    kept.put(key_of("b"), PAYLOAD, {"name": ["mul"]})
    assert main(["cache", "ls"]) == 0
    output = capsys.readouterr().out
    assert "?[31m??" in output and "['mul']" in output and "\x1b" not in output


def test_cli_clear(kept, capsys):
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "removed 3 files\n"
    assert list(kept.entries()) == []
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "removed 0 files\n"


def test_cli_prune(kept, capsys, monkeypatch):
    assert main(["cache", "prune"]) == 0
    assert capsys.readouterr().out == "removed 0 files\n"
    assert main(["cache", "prune", "--maxsize", "5K"]) == 0
    assert capsys.readouterr().out == "removed 1 file\n"
    assert keys(kept) == {key_of(1), key_of(2)}
    monkeypatch.setenv("AUTOFUSE_CACHE_MAXSIZE", "3K")
    assert main(["cache", "prune"]) == 0
    assert keys(kept) == {key_of(2)}


def test_cli_bad_sizes(kept, capsys, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        main(["cache", "prune", "--maxsize", "64X"])
    assert stop.value.code == 2 and "suffix K, M or G" in capsys.readouterr().err
    monkeypatch.setenv("AUTOFUSE_CACHE_MAXSIZE", "lots")
    assert main(["cache", "ls"]) == 2
    assert "AUTOFUSE_CACHE_MAXSIZE" in capsys.readouterr().err


def test_cli_without_a_cache(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path / "nowhere"))
    monkeypatch.delenv("AUTOFUSE_CACHE_MAXSIZE", raising=False)
    for command in ("path", "ls", "clear", "prune"):
        assert main(["cache", command]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[1:] == ["0 kernels, 0 bytes of 256M", "removed 0 files", "removed 0 files"]
    assert not (tmp_path / "nowhere").exists()


def test_cli_of_a_cache_that_is_switched_off(kept, capsys, monkeypatch):
    monkeypatch.setenv("AUTOFUSE_CACHE_MAXSIZE", "0")
    assert main(["cache", "ls"]) == 0
    assert "switched off" in capsys.readouterr().out.splitlines()[-1]


@POSIX
def test_cli_says_why_a_directory_is_not_used(kept, capsys):
    kept.directory.chmod(0o777)
    assert main(["cache", "ls"]) == 1
    output = capsys.readouterr()
    assert output.out == "0 kernels, 0 bytes of 1M\n" and "chmod go-w" in output.err


@pytest.mark.parametrize(
    "nbytes, text",
    [(0, "0"), (1023, "1023"), (1024, "1K"), (1536, "1.5K"), (3 << 30, "3G"), (5 << 40, "5120G")],
)
def test_show_size(nbytes, text):
    assert show_size(nbytes) == text
