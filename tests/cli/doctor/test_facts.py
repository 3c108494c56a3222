"""What is read from a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusedadam import backends
from fusedadam.cli import doctor
from fusedadam.cli.doctor import facts as gathering
from fusedadam.codegen import cache_files


def test_a_package_that_is_there_and_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_numba.py").write_text("raise ImportError('Numba needs NumPy 1.0 or less')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(backends, "_installed", lambda name: True)
    assert gathering._import_error("broken_numba") == "ImportError: Numba needs NumPy 1.0 or less"
    assert gathering._import_error("json") is None


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_quota_of_a_container_is_read(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert gathering._quota(tmp_path) == quota


def test_a_cache_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "b.py", "c.compiled", "d.other"):
        (tmp_path / name).write_bytes(b"12345")
    monkeypatch.setattr(cache_files, "cache_folder", lambda: tmp_path)
    cache = gathering._own_cache()
    assert (cache.kernels, cache.bytes, cache.error) == (2, 15, None)
    assert "2 kernels, 15 bytes; 1 damaged" in doctor._cache(cache)


def test_damaged_code_is_counted_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "cache_folder", lambda: tmp_path)
    (tmp_path / f"cut off{cache_files.SUFFIX}").write_bytes(b"half a kern")
    cache = gathering._own_cache()
    assert cache.damaged == 1
    assert "1 damaged, compiled again when needed" in doctor._cache(cache)
