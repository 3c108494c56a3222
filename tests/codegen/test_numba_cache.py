"""Numba's compiled code in our files: versions and settings do not mix, and an intact file may still be unusable."""

from __future__ import annotations

import pickle

import numba
import pytest

from fusedadam.codegen import cache_files, numba_cache
from tests.codegen.one_kernel import hit, the_file


@pytest.mark.parametrize("payload", [b"this is no pickle", b"", pickle.dumps((1, 2))], ids=["none", "empty", "other"])
def test_an_intact_file_with_an_unusable_pickle_is_compiled_anew_and_replaced(payload, folder):
    assert not hit()
    assert hit()
    path = the_file(folder)
    path.write_bytes(cache_files._head(path.name, payload) + payload)
    assert not cache_files.is_damaged(path)
    assert not hit()
    assert hit()
    assert not cache_files.is_damaged(path)
    assert not list(folder.rglob("*.tmp"))


def test_two_versions_share_a_folder_and_not_a_file(folder, monkeypatch):
    """Each finds its own code again, however often the other one runs in between."""
    assert not hit()
    assert not hit(made_for="other words")
    assert hit()
    assert hit(made_for="other words")
    monkeypatch.setattr(cache_files, "FORMAT", b"fusedadam 3\n")
    numba_cache.made_for.cache_clear()
    try:
        assert not hit()
        assert hit()
    finally:
        numba_cache.made_for.cache_clear()


@pytest.mark.parametrize(("name", "value"), [("OPT", 0), ("LOOP_VECTORIZE", 0), ("CPU_NAME", "generic")])
def test_settings_of_numba_are_part_of_the_key(name, value, monkeypatch):
    """NUMBA_OPT=0 in one process left slow code to all later ones."""
    before = numba_cache.made_for.__wrapped__()
    monkeypatch.setattr(numba.config, name, value)
    assert numba_cache.made_for.__wrapped__() != before
