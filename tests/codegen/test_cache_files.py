"""Damaged, foreign and unwritable cache files: they cost a compilation, never a step and never a wrong result.

Most tests reload one small kernel in this process, as if in a new process (one_kernel.py). The tests that start real
processes check what a user sees: optimizers, every backend, and the same bits as before.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from fusedadam.cli.doctor import facts
from fusedadam.codegen import cache_files
from tests.codegen.one_kernel import executed, fresh, hit, the_file
from tests.support import run_program

STEPS = """
import hashlib, sys, torch, fusedadam
from fusedadam import codegen
torch.manual_seed(0)
params = [torch.nn.Parameter(torch.randn(4, 300, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
optimizer = fusedadam.AdamW(params, lr=0.1, backend=sys.argv[1])
for _ in range(3):
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
numbers = torch.cat([param.detach().flatten() for param in params]).numpy()
compiled = [function.was_cached for function in codegen.functions.values()]
print(hashlib.sha256(numbers.tobytes()).hexdigest(), sum(compiled), len(compiled))
"""


def start(cache: Path | str, backend: str = "numba", before: str = "") -> tuple[str, int, int, str]:
    """Three steps in a process of their own: the hash of the parameters, cache hits, compiled functions and stderr."""
    done = run_program(before + STEPS, backend, FUSEDADAM_CACHE_DIR=str(cache))
    digest, hits, compiled = done.stdout.split()
    return digest, int(hits), int(compiled), done.stderr


def compiled_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ""))


def written(folder: Path) -> list[Path]:
    """All but the file that is locked while something is compiled, which stays empty."""
    return sorted(path for path in folder.iterdir() if path.name != cache_files.LOCKS or path.stat().st_size)


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache with all that three steps need, and the hash of their result."""
    folder = tmp_path_factory.mktemp("filled")
    digest, hits, compiled, _ = start(folder)
    assert hits == 0 < compiled
    assert not leftovers(folder)
    return folder, digest


@pytest.fixture
def cache(filled: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled[0], tmp_path / "cache"))


@pytest.mark.parametrize(
    ("backend", "content"),
    [
        pytest.param("numba", b"", id="numba"),
        pytest.param("eager", b"\x80\x04garbage", id="eager", marks=pytest.mark.exhaustive),
    ],
)
def test_steps_with_a_damaged_cache(backend, content, cache, filled):
    """They died in Numba's loader; the eager backend, too, whose tensors are compared by a compiled loop."""
    for path in compiled_files(cache):
        path.write_bytes(content)
    digest, hits, compiled, complaint = start(cache, backend)
    assert (digest, hits, complaint) == (filled[1], 0, "")
    digest, hits, compiled, _ = start(cache, backend)
    assert (digest, hits) == (filled[1], compiled), "what was damaged has not been replaced"


def test_steps_on_a_full_disk(tmp_path, filled):
    """No file may grow beyond 100 bytes, so every write fails in the middle, as on a full disk."""
    # torch 2.6 writes a file of its own when torch._dynamo is imported, as every optimizer does
    limit = "import torch._dynamo, resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    digest, hits, _, complaint = start(tmp_path / "full", before=limit)
    assert (digest, hits) == (filled[1], 0)
    assert complaint.count("UserWarning") == 1
    assert str(tmp_path / "full") in complaint
    assert "File too large" in complaint
    assert "set FUSEDADAM_CACHE_DIR" in complaint
    assert written(tmp_path / "full") == []


@pytest.mark.exhaustive
def test_a_cache_that_vanishes_while_processes_run(tmp_path, filled):
    """Two at once, in a folder that is deleted each time something has been compiled."""
    vanish = f"""
import shutil
from fusedadam.codegen.numba_cache import DiskCache
def save_and_delete(self, *what, save=DiskCache.save_overload):
    save(self, *what)
    shutil.rmtree({str(tmp_path / "cache")!r}, ignore_errors=True)
DiskCache.save_overload = save_and_delete
"""
    variables = {**os.environ, "FUSEDADAM_CACHE_DIR": str(tmp_path / "cache")}
    program = [sys.executable, "-W", "ignore", "-c", vanish + STEPS, "numba"]
    running = [subprocess.Popen(program, env=variables, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=600)[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert [digest for digest, *_ in said] == [filled[1]] * 2


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


HEAD = len(cache_files.FORMAT) + 32  # then comes the payload: a pickle with an ELF file in it
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated in the format": lambda content: content[:5],
    "truncated in the checksum": lambda content: content[: HEAD - 1],
    "truncated before the payload": lambda content: content[:HEAD],
    "truncated in the payload": lambda content: content[: len(content) // 2],
    "truncated by a byte": lambda content: content[:-1],
    "too long by a byte": lambda content: content + b"\0",
    "a bit of the format": lambda content: flipped(content, 0),
    "a bit of its version": lambda content: flipped(content, len(cache_files.FORMAT) - 2),
    "a bit of the checksum": lambda content: flipped(content, HEAD - 10),
    "a bit of the pickle": lambda content: flipped(content, HEAD + 2),
    "a bit of the machine code": lambda content: flipped(content, content.index(b"\x7fELF") + 100),
    "a bit at the end": lambda content: flipped(content, len(content) - 1),
    "zeros": lambda content: bytes(len(content)),
    "a block of zeros": lambda content: content[:4096] + bytes(4096) + content[8192:],
    "random": lambda content: np.random.default_rng(0).bytes(len(content)),
    "random behind the right format": lambda content: cache_files.FORMAT + np.random.default_rng(0).bytes(5000),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_compiled_anew_and_replaced(damage, folder):
    assert not hit()
    assert hit()
    path = the_file(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert not hit()
    assert hit()
    assert not cache_files.is_damaged(path)
    assert not leftovers(folder)


def test_any_byte_and_any_length_counts():
    name, payload = "a.compiled", bytes(range(50))
    content = cache_files._head(name, payload) + payload
    assert cache_files._is_intact(name, content)
    assert not any(cache_files._is_intact(name, flipped(content, at)) for at in range(len(content)))
    assert not any(cache_files._is_intact(name, content[:length]) for length in range(len(content)))
    assert not cache_files._is_intact("b.compiled", content)


def test_another_kernels_file_under_this_name(folder):
    """It is intact; run as this kernel, it would add 5."""
    assert not hit(amount=5)
    other = the_file(folder).rename(folder / "other").read_bytes()
    assert not hit()
    the_file(folder).write_bytes(other)
    assert not hit()
    assert hit()


def test_a_directory_in_place_of_the_file(folder):
    fresh()
    path = the_file(folder)
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="Is a directory"):
        assert not hit()
    assert not leftovers(folder)


def test_a_file_that_may_not_be_read(folder, monkeypatch):
    fresh()
    path, read = the_file(folder), Path.read_bytes
    path.chmod(0)

    def refuse(self: Path) -> bytes:  # root may read it
        if self == path and self.stat().st_mode & 0o777 == 0:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert cache_files.is_damaged(path)
    assert not hit()
    assert hit()


@pytest.mark.parametrize("content", [b"", b"1 / 0", b"\xff\xfe\x00", None], ids=["empty", "other", "garbage", "gone"])
def test_the_source_on_disk_does_not_matter(content, folder):
    """Triton reads the source of a function through inspect, which looks for it on disk."""
    path = Path(fresh().source)
    source = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    assert hit()
    assert path.read_bytes() == source
    module = executed()
    path.unlink() if content is None else path.write_bytes(content)
    assert inspect.getsource(module.run.__wrapped__).startswith("@c_function\ndef run(_words):\n    put(")


def test_source_without_a_file_can_be_inspected_too(two_folders):
    two_folders.clear()
    with pytest.warns(UserWarning, match="found no folder"):
        module = executed()
    assert module.__file__ == f"<{module.__name__}>"
    assert inspect.getsource(module.run.__wrapped__).startswith("@c_function\ndef run(_words):\n    put(")


def no_space(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


FAILURES = [(tempfile, "mkstemp", no_space), (os, "replace", no_space), (tempfile, "mkstemp", read_only)]


@pytest.mark.parametrize(("module", "name", "failure"), FAILURES, ids=lambda value: getattr(value, "__name__", value))
def test_what_cannot_be_written_is_compiled_in_memory(module, name, failure, folder, monkeypatch):
    fresh(amount=2)
    there = sorted(folder.iterdir())
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(module, name, failure)
        assert not hit()
        assert not hit()
        assert hit(amount=2), "what is there already is not used"
    (warning,) = caught
    assert str(folder) in str(warning.message)
    assert "could not write" in str(warning.message)
    assert "the next process compiles it again" in str(warning.message)
    assert f"set {cache_files.VARIABLE}" in str(warning.message)
    assert sorted(folder.iterdir()) == there
    assert not hit()
    assert hit(), "with room on the disk it is not written again"


def test_a_write_that_fails_in_the_middle_leaves_nothing(folder, monkeypatch):
    class Full(io.BytesIO):
        write = no_space  # type: ignore[assignment]

    def open_full(descriptor: int, _: str) -> Full:
        os.close(descriptor)
        return Full()

    monkeypatch.setattr(cache_files, "open", open_full, raising=False)
    with pytest.warns(UserWarning, match="No space left"):
        assert not hit()
    assert written(folder) == []


def test_the_next_folder_is_used_and_found_again(two_folders, monkeypatch):
    """The first is full: its files are used, new ones go to the second, and later processes find both."""
    first, second = two_folders
    fresh(amount=2)
    make = tempfile.mkstemp
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", lambda **where: no_space() if where["dir"] == first else make(**where))
        with pytest.warns(UserWarning, match=f"it is kept in {second} instead"):
            assert not hit()
        assert (hit(), hit(amount=2)) == (True, True)
    assert {path.suffix for path in second.iterdir()} == {".py", cache_files.SUFFIX}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hit()
        the_file(second).write_bytes(b"")
        assert not hit()
    assert hit(), "with room in the first folder it is not written there"
    assert len(list(first.glob("*" + cache_files.SUFFIX))) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_chosen_folder_on_a_full_disk_is_no_error(number, folder, monkeypatch):
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", full)
    assert cache_files.cache_folder() == folder
    with pytest.warns(UserWarning, match=re.escape(os.strerror(number))):
        assert not hit()


def test_a_chosen_folder_that_is_read_only_from_the_start_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(RuntimeError, match="must be a folder of your own"):
        fresh()


def test_a_default_folder_that_is_read_only_from_the_start_is_skipped_in_silence(two_folders, monkeypatch):
    first, second = two_folders
    make = tempfile.TemporaryFile
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda **where: read_only() if where["dir"] == first else make(**where)
    )
    assert not hit()
    assert cache_files.cache_folder() == second
    assert hit()


def test_a_folder_that_vanishes_between_two_compilations(folder):
    assert not hit()
    shutil.rmtree(folder)
    assert not hit()
    assert hit()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX permissions")
def test_a_folder_that_others_can_suddenly_write_to(folder):
    assert not hit()
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="others can write to it"):
        assert not hit()


def test_a_warning_as_an_error_does_not_stop_the_next_step(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "mkstemp", no_space)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="No space left"):
            fresh()
        assert not hit()


def test_doctor_counts_damaged_files(folder):
    fresh(), fresh(amount=2), fresh(amount=3)
    assert facts._own_cache().damaged == 0
    files = sorted(folder.glob("*" + cache_files.SUFFIX))
    files[0].write_bytes(b"")
    files[1].write_bytes(files[2].read_bytes())
    assert facts._own_cache().damaged == 2
