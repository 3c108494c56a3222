"""The cache on disk: files in folders of this user that not everybody can write to.

A file's name is a hash of everything that determines its content, so files are never stale, and if several processes
write the same file, they write the same content. Files are renamed into place, so they appear whole or not at all; but
a crash of the machine can still leave an empty or damaged file. Files that are loaded therefore begin with a checksum,
and a file that does not match its checksum counts as missing.

Processes that start together, as those of a distributed run do, want the same files. ``alone_with`` lets one of them
make each file while the others wait, which saves time and nothing else.

No step depends on this cache. A file that cannot be written goes to the next folder; if there is none, its content
stays in memory.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import stat
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "FUSEDADAM_CACHE_DIR"
FORMAT = b"fusedadam 2\n"  # files with a checksum begin with it; it also enters their names, so that formats never mix
SUFFIX = ".compiled"  # of files with a checksum
LOCKS = "locks"  # an empty file, of which one byte is locked for each name
PATIENCE = 60.0  # seconds that a process waits for another one that makes the same file: a kernel takes a few
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_warned = False


def name_of(module: str, function: str) -> str:
    """The name of the file of a compiled function."""
    return f"{module}.{function}{SUFFIX}"


def load(name: str) -> Iterator[bytes]:
    """The payloads that ``save`` wrote under this name: one from each folder that has an intact file."""
    for folder in folders():
        content = _read(folder / name) if _is_ours(folder) else None
        if content is not None and _is_intact(name, content):
            yield content[len(_head(name, b"")) :]


def save(name: str, payload: bytes) -> None:
    _write(name, _head(name, payload) + payload)


def keep(name: str, content: bytes) -> Path | None:
    """The path of a file with exactly this content, written if it does not exist; None if it cannot be written."""
    for folder in folders():
        if _read(folder / name) == content:
            return folder / name
    return _write(name, content)


def is_damaged(path: Path) -> bool:
    """Whether a file that ``save`` wrote no longer matches its checksum; a deleted file is not damaged."""
    try:
        return not _is_intact(path.name, path.read_bytes())
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


@contextlib.contextmanager
def alone_with(name: str) -> Iterator[bool]:
    """While the block runs, other processes that make a file of this name wait. Yields whether this process has waited:
    the file may be there now. Where files cannot be locked, or one is locked for too long, nobody waits."""
    has_waited = False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # not on Windows

            # unlocked when it is closed, or the process ends
            file = stack.enter_context((folders()[0] / LOCKS).open("ab")) if folders() else None
            end = time.monotonic() + PATIENCE
            while file is not None and time.monotonic() < end:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, zlib.crc32(name.encode()))
                except (BlockingIOError, PermissionError):
                    has_waited = True
                    time.sleep(0.01)
                else:
                    break
        yield has_waited


def cache_folder() -> Path | None:
    """The first of the folders: files go there unless it is full or read-only."""
    return next(iter(folders()), None)


@functools.cache
def folders() -> tuple[Path, ...]:
    """The folders that are searched for files, in this order. New files go to the first one that can be written to."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        if not _is_usable(Path(chosen)):
            raise RuntimeError(f"{VARIABLE}={chosen!r} must be a folder of your own, which others cannot write to")
        return (Path(chosen),)
    found = tuple(filter(_is_usable, dict.fromkeys(_candidates())))
    if not found:
        warnings.warn(
            "fusedadam found no folder for compiled code, so every process compiles again; "
            f"set {VARIABLE} to a folder that you can write to",
            stacklevel=2,
        )
    return found


def _candidates() -> Iterator[Path]:
    if os.environ.get("XDG_CACHE_HOME"):
        yield Path(os.environ["XDG_CACHE_HOME"]) / "fusedadam"
    with contextlib.suppress(RuntimeError):  # no home folder
        yield Path.home() / ".cache" / "fusedadam"
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    with contextlib.suppress(FileNotFoundError):  # no temporary folder
        yield Path(tempfile.gettempdir()) / f"fusedadam-{user}"


def _is_usable(folder: Path) -> bool:
    """Whether it is ours and writable. It may be full: existing files can be loaded, and there may be space later."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder):
            return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        return error.errno in NO_SPACE


def _is_ours(folder: Path) -> bool:
    """Whether this user owns it and not everybody can write to it: machine code is loaded from there. A group may."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & stat.S_IWOTH)


def _head(name: str, payload: bytes) -> bytes:
    """The bytes before the payload. The checksum covers the name, so a copy of another file is not intact."""
    return FORMAT + hashlib.sha256(name.encode() + b"\0" + payload).digest()


def _is_intact(name: str, content: bytes) -> bool:
    head = content[: len(_head(name, b""))]
    return head == _head(name, content[len(head) :])


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _write(name: str, content: bytes) -> Path | None:
    """Writes to the first folder where this succeeds and returns the path; None if it fails in all of them."""
    failures, written = [], None
    for folder in folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been deleted
            if not _is_ours(folder):
                failures.append((folder, "others can write to it"))
                continue
            _replace(folder / name, content)
        except OSError as error:
            failures.append((folder, error.strerror or str(error)))
        else:
            written = folder / name
            break
    if failures:
        _warn_once(*failures[0], written)
    return written


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _warn_once(folder: Path, reason: str, written: Path | None) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    result = "the next process compiles it again" if written is None else f"it is kept in {written.parent} instead"
    warnings.warn(
        f"fusedadam could not write compiled code to {folder} ({reason}), so {result}; free space there, make it "
        f"writable, or set {VARIABLE} to another folder that you own",
        stacklevel=4,
    )
