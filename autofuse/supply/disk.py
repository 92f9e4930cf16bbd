"""The disk cache of compiled binaries. Imports nothing of autofuse, neither torch nor numba.

It keeps bytes under keys and knows nothing of kernels. An entry `<key>.kernel` has two lines and
then the payload:

    autofuse-kernel 1 <SHA-256 of everything after this line>
    {"key": <key>, and facts about the payload, for people}

What is not exactly that is a miss, whatever the state of the disk; nothing is unpickled. The
payload runs with the user's rights, so that only a directory and files count that nobody else could
have written.
"""

import hashlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..settings.sizes import DEFAULT_MAXSIZE, parse_size

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
HEADER_BYTES = 1 << 20  # the most that the second line may have; it may hold a source
STALE_S = 3600  # a temporary file of this age was left behind by a process that died
POLL_S = 0.01  # between two attempts to get a lock

_KEY = re.compile("[0-9a-f]{64}")
_ENTRY = re.compile(r"([0-9a-f]{64})\.kernel")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_FIRST = re.compile(rb"autofuse-kernel 1 ([0-9a-f]{64})\n")
_FIRST_BYTES = len("autofuse-kernel 1 \n") + 64
# a symbolic link is refused, a pipe does not block, Windows translates no line ends
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, as its file's header and status tell."""

    key: str  # SHA-256 in hex
    nbytes: int  # of the file
    used: float  # last use, seconds since the epoch
    about: dict[str, Any]  # what `put` was told


def _maxsize_from_environment() -> int:
    text = os.environ.get("AUTOFUSE_CACHE_MAXSIZE", DEFAULT_MAXSIZE)
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"AUTOFUSE_CACHE_MAXSIZE: {error}; 0 switches the cache off") from None


def _user_cache() -> Path:
    """The platform's directory for caches of this user; RuntimeError if there is no home."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "autofuse" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "autofuse"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # its specification has relative paths ignored
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "autofuse"


def _default_directory() -> Path | None:
    named = os.environ.get("AUTOFUSE_CACHE_DIR")
    try:
        return Path(named).absolute() if named else _user_cache()
    except (RuntimeError, OSError):  # no home; a relative path and the working directory is gone
        return None


def _foreign(status: os.stat_result, owners: tuple[int, ...]) -> str:
    """Who else could have written a file or directory: "" for nobody."""
    if not hasattr(os, "geteuid"):  # Windows: a user's profile is private
        return ""
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it"
    return ""


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _header(line: bytes, key: str) -> dict[str, Any] | None:
    """The second line of the entry of `key`, without the key; None if it is not that."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or header.pop("key", None) != key:
        return None
    return header


def _name(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a key of the disk cache; use a SHA-256 in lower-case hex")
    return f"{key}.kernel"


def _lock(file: int, patience: float) -> bool:
    """Wait for the lock on an open file; False after `patience` s or if there are no locks."""
    assert fcntl is not None
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        except OSError:  # a network file system without locks
            return False


def _unlock(file: int) -> None:
    assert fcntl is not None
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


class DiskCache:
    """Payloads under keys, in a directory that many processes may use at once.

    directory: default `AUTOFUSE_CACHE_DIR`, else `autofuse` in the user's cache directory. None
        where there is no home; nothing is kept then.
    maxsize: bytes of all entries, default `AUTOFUSE_CACHE_MAXSIZE`, else 256 MB. 0 switches the
        cache off. Processes that write at once may exceed it by what each writes between two scans.

    Keys are SHA-256 in hex; others raise ValueError. The state of the disk raises nothing.
    """

    def __init__(self, directory: Path | str | None = None, maxsize: int | None = None) -> None:
        self.directory = _default_directory() if directory is None else Path(directory)
        self.maxsize = _maxsize_from_environment() if maxsize is None else maxsize
        if self.maxsize < 0:
            raise ValueError(f"maxsize={self.maxsize} is negative; use 0 to switch the cache off")
        self._room = 0  # bytes to write before the directory is scanned again

    def refusal(self) -> str:
        """Why the directory is not used; "" if it is, or would be if it were there."""
        if self.directory is None:
            return "no directory is known; set AUTOFUSE_CACHE_DIR to an absolute path"
        try:
            status = os.stat(self.directory)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{self.directory}: {error.strerror}"
        if not stat.S_ISDIR(status.st_mode):
            return f"{self.directory} is not a directory"
        why = _foreign(status, (_user(),))
        return f"{self.directory} {why}" if why else ""

    def get(self, key: str) -> bytes | None:
        """The payload under `key`, or None. A hit counts as a use."""
        name = _name(key)
        if self.maxsize == 0 or self.refusal():
            return None
        try:
            file = self._open(name)
            if file is None:
                return None
            with file:
                # nothing larger is written, and memory is not for what somebody left here
                large = os.fstat(file.fileno()).st_size > self.maxsize
                data = b"" if large else file.read()
        except OSError:
            return None
        first = _FIRST.match(data)
        body = data[_FIRST_BYTES:]
        if not first or hashlib.sha256(body).hexdigest().encode() != first[1]:
            return None
        end = body.find(b"\n") + 1
        if _header(body[:end], key) is None:
            return None
        with suppress(OSError):
            os.utime(self._path(name))
        return body[end:]

    def put(self, key: str, payload: bytes, about: Mapping[str, Any]) -> str:
        """Keep `payload` under `key`; "" or, where that failed, a short reason.

        about: facts for people, as JSON has them; "name" and "target" are shown by
            `python -m autofuse cache ls`.
        """
        name = _name(key)
        line = json.dumps({**about, "key": key}).encode() + b"\n"
        body = line + payload
        data = b"autofuse-kernel 1 %s\n" % hashlib.sha256(body).hexdigest().encode() + body
        if len(line) > HEADER_BYTES:
            return f"the facts about it take {len(line)} bytes, more than {HEADER_BYTES}"
        if self.maxsize and len(data) > self.maxsize:
            return f"{len(data)} bytes are more than the whole cache may have ({self.maxsize})"
        why = self._prepare() or self._write(name, data)
        if not why:
            self._room -= len(data)
            if self._room < 0:
                _, nbytes = self._evict(self.maxsize, self.maxsize * 9 // 10, keep=name)
                # an eighth of what is free, because other processes count on it, too
                self._room = (self.maxsize - nbytes) // 8
        return why

    @contextmanager
    def building(self, key: str, patience: float = 30.0) -> Iterator[bool]:
        """Hold the lock of those who build `key`; gives whether it is held, in `patience` s.

        Without the lock the caller goes on all the same: work may be done twice, but nobody waits
        forever for a process that hangs. `get` belongs inside, because who held the lock before
        may have built it. Keys share 256 locks: do not nest.
        """
        file = self._open_lock(_name(key))
        if file is None:
            yield False
            return
        try:
            held = _lock(file, patience)
            try:
                yield held
            finally:
                if held:  # closing would not do: a forked child has the file open, too
                    _unlock(file)
        finally:
            os.close(file)

    def entries(self) -> Iterator[Entry]:
        """Every file that starts as an entry does, in no order; checksums are not verified."""
        for name, status in self._files():
            match = _ENTRY.fullmatch(name)
            if not match:
                continue
            try:
                file = self._open(name)
                if file is None:
                    continue
                with file:
                    first, line = file.read(_FIRST_BYTES), file.readline(HEADER_BYTES)
            except OSError:
                continue
            about = _header(line, match[1]) if _FIRST.fullmatch(first) else None
            if about is not None:
                yield Entry(match[1], status.st_size, status.st_mtime, about)

    def clear(self) -> int:
        """Remove all entries and temporary files; the number of files removed.

        Locks stay: a lock on a file that has no name any more would not keep anybody out.
        """
        return sum(self._remove(name) for name, _ in self._files())

    def prune(self, maxsize: int | None = None) -> int:
        """Remove least recently used entries until `maxsize` bytes are left, and what dead
        processes left behind; the number of files removed."""
        limit = self.maxsize if maxsize is None else maxsize
        return self._evict(limit, limit)[0]

    def _path(self, name: str) -> str:
        assert self.directory is not None
        return os.path.join(self.directory, name)

    def _prepare(self) -> str:
        """Make the directory; "" or why there is nothing to write to."""
        if self.maxsize == 0:
            return "the disk cache is switched off (its size is 0)"
        if why := self.refusal():
            return why
        assert self.directory is not None
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
        except OSError as error:
            return f"cannot make {self.directory}: {error.strerror}"
        return self.refusal()

    def _open(self, name: str) -> BinaryIO | None:
        """A file of this directory, None if it is nothing to trust; OSError if it is not there."""
        if self.directory is None:
            return None
        descriptor = os.open(self._path(name), os.O_RDONLY | _FLAGS)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and not _foreign(status, (_user(), 0)):
                file, descriptor = os.fdopen(descriptor, "rb"), -1
                return file
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return None

    def _open_lock(self, name: str) -> int | None:
        if fcntl is None or self._prepare():
            return None
        locks = self._path("locks")
        try:
            os.makedirs(locks, mode=0o700, exist_ok=True)
            return os.open(os.path.join(locks, name[:2]), os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        except OSError:
            return None

    def _write(self, name: str, data: bytes) -> str:
        """Readers see all of it or nothing. Not synced: after a power cut the checksum tells."""
        path = self._path(name)
        temporary = self._path(f"{name.removesuffix('kernel')}{os.urandom(8).hex()}.tmp")
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
            try:
                try:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[os.write(file, rest) :]
                finally:
                    os.close(file)
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            return f"cannot write to {self.directory}: {error.strerror}"
        return ""

    def _files(self) -> list[tuple[str, os.stat_result]]:
        """Entries and temporary files by their names, which are regular files."""
        if self.directory is None or self.refusal():
            return []
        found = []
        with suppress(OSError):
            for name in os.listdir(self.directory):
                if _ENTRY.fullmatch(name) or _TEMPORARY.fullmatch(name):
                    with suppress(OSError):  # it has just gone
                        status = os.lstat(self._path(name))
                        if stat.S_ISREG(status.st_mode):
                            found.append((name, status))
        return found

    def _remove(self, name: str) -> bool:
        try:
            os.unlink(self._path(name))
        except OSError:  # another process was first; on Windows, somebody reads it
            return False
        return True

    def _evict(self, limit: int, goal: int, keep: str = "") -> tuple[int, int]:
        """If entries have more than `limit` bytes, remove least recently used ones but `keep` down
        to `goal`; remove stale temporary files. The number of files removed, the bytes left."""
        removed, entries = 0, []
        for name, status in self._files():
            if _ENTRY.fullmatch(name):
                entries.append((status.st_mtime_ns, name, status.st_size))
            elif time.time() - status.st_mtime > STALE_S:
                removed += self._remove(name)
        total = sum(nbytes for _, _, nbytes in entries)
        if total <= limit:
            return removed, total
        for _, name, nbytes in sorted(entries):
            if total <= goal:
                break
            if name != keep:
                removed += self._remove(name)
                total -= nbytes
        return removed, total
