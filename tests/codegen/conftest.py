"""Cache folders for the tests that reload a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fusedadam.codegen import cache_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from using(monkeypatch, tmp_path / "own")


@pytest.fixture
def two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """No folder is asked for, and there are two to choose from."""
    both = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr(cache_files, "_candidates", lambda: iter(both))
    for _ in using(monkeypatch, ""):
        yield both


def using(monkeypatch: pytest.MonkeyPatch, folder: Path | str) -> Iterator[Path]:
    monkeypatch.setenv(cache_files.VARIABLE, str(folder))
    monkeypatch.setattr(cache_files, "_warned", False)
    cache_files.folders.cache_clear()
    yield Path(folder)
    cache_files.folders.cache_clear()
