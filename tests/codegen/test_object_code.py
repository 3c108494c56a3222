"""Compiled functions in a process that never imports Numba, and what happens where that is not possible."""

from __future__ import annotations

import pickle
from pathlib import Path

import numba
import pytest

from fusedadam.codegen import cache_files, numba_cache, object_code
from tests.codegen.one_kernel import KERNEL, fresh, hit, the_file
from tests.support import run_program

pytestmark = pytest.mark.xdist_group("object code")  # one worker fills the folder for all of them

STEPS = """
import sys, torch, fusedadam
from fusedadam import codegen
params = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
for param in params:
    param.grad = torch.full_like(param, 0.5)
fusedadam.SGD(params, lr=0.1, max_grad_norm=0.5, backend=sys.argv[1]).step()
print("numba" if "numba" in sys.modules else "")
print(sum(function.was_cached for function in codegen.functions.values()), len(codegen.functions))
print(params[0][0, 0].item(), params[1][0, 0].item())
"""
# a check that may fail calls Numba's runtime
RAISING = (
    KERNEL
    + """
    if int64_at(_words, 0) == 3:
        raise ValueError
"""
)


def start(cache: Path, backend: str = "numba", before: str = "", **environment: str) -> list[str]:
    """What a process prints: whether it has imported Numba; cached functions and all; results."""
    done = run_program(before + STEPS, backend, **{cache_files.VARIABLE: str(cache), **environment})
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("filled")
    said = start(folder)
    assert said[0] == "numba"
    assert said[1].startswith("0 ")
    return folder, said


@pytest.mark.parametrize("backend", ["numba", "eager"])
def test_with_everything_cached_a_first_step_does_not_import_numba(backend, filled):
    """Importing it took most of the first step. The eager backend has tensors compared by a compiled loop."""
    folder, said = filled
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    imported, counts, results = start(folder, backend)
    assert imported == ""
    assert len(set(counts.split())) == 1
    assert results == said[2]
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_process_that_has_imported_numba_finds_the_same_code(filled):
    folder, said = filled
    imported, counts, results = start(folder, before="import numba\n")
    assert (imported, results) == ("numba", said[2])
    assert len(set(counts.split())) == 1


@pytest.mark.parametrize("setting", ["variable", pytest.param("attribute", marks=pytest.mark.exhaustive)])
def test_other_settings_of_numba_find_no_code_of_these(setting, filled):
    """Whether they come from the environment, before Numba is imported, or are set afterwards."""
    folder, _ = filled
    change = "import numba\nnumba.config.SLP_VECTORIZE = 1 - numba.config.SLP_VECTORIZE\n"
    other = {"variable": {"NUMBA_OPT": "1"}, "attribute": {"before": change}}[setting]
    imported, counts, _ = start(folder, "eager", **other)
    assert imported == "numba"
    assert counts.startswith("0 ")


def test_a_lost_note_of_what_code_is_made_for_costs_an_import_and_no_compilation(filled):
    folder, said = filled
    for path in folder.glob("made_for_*"):
        path.write_bytes(b"")
    imported, counts, results = start(folder)
    assert (imported, results) == ("numba", said[2])
    assert len(set(counts.split())) == 1
    assert start(folder)[0] == ""


def test_without_metadata_numba_itself_is_asked_for_its_version(monkeypatch):
    def missing(name: str) -> str:
        raise object_code.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(object_code.importlib.metadata, "version", missing)
    assert object_code._version_of_numba() == numba.__version__


@pytest.mark.parametrize(("name", "value"), [("NUMBA_OPT", "1"), ("NUMBA_CPU_NAME", "generic"), ("NUMBA_ANY", "")])
def test_any_variable_of_numba_counts(name, value, monkeypatch):
    before = object_code._known_without_numba()
    monkeypatch.setenv(name, value)
    assert object_code._known_without_numba() != before


def test_the_settings_file_of_numba_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = object_code._known_without_numba()
    (tmp_path / object_code.SETTINGS).write_text("opt: 1")
    assert object_code._known_without_numba() != before


def test_a_function_that_calls_numbas_runtime_is_loaded_by_numba(folder):
    """llvmlite alone does not find what it calls."""
    assert not hit(text=RAISING)
    kind, *_ = pickle.loads(next(cache_files.load(the_file(folder).name)))
    assert kind == numba_cache.KIND
    assert hit(text=RAISING)


def test_a_kernel_that_calls_nothing_is_kept_as_object_code(folder):
    fresh()
    kind, entry, code = pickle.loads(next(cache_files.load(the_file(folder).name)))
    assert kind == object_code.KIND
    assert entry.encode() in code


@pytest.mark.parametrize("content", [("no such function", None), (None, b"no object file"), (None, b"")])
def test_object_code_that_cannot_be_linked_is_compiled_anew_and_replaced(content, folder):
    fresh()
    path = the_file(folder)
    _, entry, code = pickle.loads(next(cache_files.load(path.name)))
    object_code.save(path.name, content[0] or entry, code if content[1] is None else content[1])
    assert not hit()
    assert hit()


def test_where_llvmlite_cannot_link_numbas_own_form_is_kept(folder, monkeypatch):
    """An llvmlite without the linker that is used here, say."""

    def missing(*_: object) -> int:
        raise AttributeError

    monkeypatch.setattr(object_code, "link", missing)
    assert not hit()
    assert hit()
    assert pickle.loads(next(cache_files.load(the_file(folder).name)))[0] == numba_cache.KIND
