"""`fusedadam doctor`: what it says about this machine, and each problem that it knows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam import backends
from fusedadam.cli import doctor, frame
from fusedadam.cli.doctor import facts as gathering
from fusedadam.cli.doctor.facts import Cache, Device, Facts, Threads
from fusedadam.cli.doctor.problems import Problem, find
from tests.cli.common import COMMAND, ENVIRONMENT, in_terminal, piped, without

CPU = Device("cpu", "a processor", 1 << 34, "numba", {"triton": "it needs a GPU", "eager": "slower"}, None, True)
GPU = Device("cuda:0", "NVIDIA H200", 1 << 37, "triton", {}, None, True, (9, 0))
FINE = Facts(
    fusedadam="0.1.0",
    location="/here",
    python="3.12.0",
    system="Linux x86_64",
    versions={"torch": "2.13.0+cpu", "numpy": "2.4.6", "numba": "0.68.1", "triton": None},
    required={"torch": "2.11", "numpy": "1.26", "numba": "0.61"},
    broken={},
    devices=[CPU],
    gpus=0,
    cuda=None,
    complaints=[],
    threads=Threads(torch=8, cores=8, quota=None, team=True),
    caches=[Cache("fusedadam", "/home/me/.cache/fusedadam", 3, 1000, free=1 << 40)],
    compiler="/usr/bin/gcc",
    headers=True,
    numba_settings={"OPT": 3, "LOOP_VECTORIZE": 1, "DEBUGINFO_DEFAULT": 0, "DISABLE_JIT": 0},
)
EAGER = replace(CPU, backend="eager", lacking="numba is not installed (pip install numba)")
NO_FOLDER = Cache("fusedadam", None, error="none could be written to")
ON_GPU = {"devices": [CPU, GPU], "gpus": 1, "cuda": "13.0"}


def cached(**what: object) -> list[Cache]:
    return [replace(FINE.caches[0], **what)]  # type: ignore[arg-type]


SERIOUS = {
    "numba is missing": ({"devices": [EAGER]}, "cpu run eagerly", "pip install numba"),
    "numba cannot be imported": ({"broken": {"numba": "ImportError: needs NumPy 2.3"}}, "NumPy 2.3", "pip install"),
    "torch is too old": ({"versions": {"torch": "2.9.1+cu128"}}, "torch 2.9.1", "torch>=2.11"),
    "the driver is too old": (
        {"gpus": 2, "cuda": "13.0", "complaints": ["The NVIDIA driver on your system is too old"]},
        "2 NVIDIA GPUs, but torch cannot train there: The NVIDIA driver",
        "Update the NVIDIA driver",
    ),
    "no C headers": ({**ON_GPU, "headers": False}, "Python.h", "python3-dev"),
    "CC is no compiler": ({**ON_GPU, "environment": {"CC": "/no/such/cc"}}, "/no/such/cc", "Unset CC"),
    "no folder": ({"caches": [NO_FOLDER]}, "no folder", "FUSEDADAM_CACHE_DIR"),
    "a folder that cannot be written": ({"caches": cached(error="cannot be written to")}, "cannot be", "FUSEDADAM_C"),
    "the disk is full": ({"caches": cached(free=1 << 20)}, "1.0 MiB are left", "Make room"),
    "more threads than cores": ({"threads": Threads(8, 2, None, True)}, "2 cores", "OMP_NUM_THREADS=2"),
    "more threads than quota": ({"threads": Threads(8, 8, 1.5, True)}, "1.5 cores", "OMP_NUM_THREADS=2"),
    "nothing is compiled": ({"numba_settings": {"DISABLE_JIT": 1}}, "NUMBA_DISABLE_JIT", "Unset"),
    "no optimisation": ({"numba_settings": {"OPT": 1}}, "NUMBA_OPT is 1", "Unset NUMBA_OPT"),
    "debug information": ({"numba_settings": {"DEBUGINFO_DEFAULT": 1}}, "NUMBA_DEBUGINFO is 1", "Unset"),
    "another processor": ({"numba_settings": {"CPU_NAME": "generic"}}, "NUMBA_CPU_NAME is generic", "Unset"),
}
NOTES = {
    "one thread": ({"threads": Threads(1, 4, None, True)}, "use one thread", "OMP_NUM_THREADS=4"),
    "a pool": ({"threads": Threads(4, 4, None, False)}, "a pool", "Nothing need be done"),
    "hidden GPUs": ({"gpus": 1, "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "hides an NVIDIA GPU", "Unset"),
    "torch without CUDA": ({"gpus": 4}, "4 NVIDIA GPUs, but this torch was built without CUDA", "Install a torch"),
    "an old GPU": ({**ON_GPU, "devices": [CPU, replace(GPU, capability=(7, 5))]}, "capability 7.5", "verify"),
    "the interpreter": ({"environment": {"TRITON_INTERPRET": "1"}}, "TRITON_INTERPRET=1", "Unset"),
    "threads of Numba": ({"environment": {"NUMBA_NUM_THREADS": "4"}}, "no effect", "OMP_NUM_THREADS"),
    "misspelt": ({"environment": {"FUSEDADAM_CACHE": "x"}}, "nothing reads it", "FUSEDADAM_CACHE_DIR"),
    "another's cache": ({"environment": {"NUMBA_CACHE_DIR": "/tmp"}}, "no effect", "FUSEDADAM_CACHE_DIR"),
    "damaged code": ({"caches": cached(damaged=2)}, "2 files of compiled code", "compiled anew"),
    "a temporary folder": (
        {"caches": cached(folder=f"{tempfile.gettempdir()}/fusedadam-0")}, "after a restart", "FUSEDADAM_CACHE_DIR"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*SERIOUS, *NOTES])
def test_each_problem_is_found_with_what_to_do(name: str) -> None:
    changed, what, do = {**SERIOUS, **NOTES}[name]
    (problem,) = find(replace(FINE, **changed))  # type: ignore[arg-type]
    assert what in problem.what
    assert do in problem.do
    assert problem.serious is (name in SERIOUS)


@pytest.mark.parametrize(
    "changed", [{}, ON_GPU, {"versions": {"torch": "2.11"}}, {"threads": Threads(2, 8, 2.0, True)}], ids=str
)
def test_where_nothing_is_wrong_nothing_is_found(changed: dict[str, object]) -> None:
    assert find(replace(FINE, **changed)) == []  # type: ignore[arg-type]


def test_serious_problems_come_first_and_are_counted() -> None:
    both = replace(FINE, numba_settings={"OPT": 0}, environment={"NUMBA_NUM_THREADS": "4"})
    assert [p.serious for p in find(both)] == [True, False]
    lines = list(doctor.report(both, find(both)))
    assert sum(line.startswith("PROBLEM: ") for line in lines) == 1
    assert sum(line.startswith("Note: ") for line in lines) == 1
    assert lines[-1].strip() == "1 problem found."


@pytest.mark.parametrize(("problems", "code"), [([], 0), ([("note", False)], 0), ([("problem", True)], 1)], ids=str)
def test_only_what_makes_steps_wrong_or_slow_fails(
    problems: list[tuple[str, bool]], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: FINE)
    monkeypatch.setattr(doctor, "find", lambda _: [Problem(what, "do", serious) for what, serious in problems])
    assert doctor.main([]) == code
    assert doctor.main(["--json"]) == code
    text = capsys.readouterr().out
    assert json.loads(text[text.index("{") :])["ok"] is (code == 0)


@pytest.fixture(scope="module")
def this_machine() -> dict[str, object]:
    done = piped("doctor", "--json")
    assert done.returncode in (frame.FINE, frame.WRONG), done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    assert (done.returncode == frame.FINE) is found["ok"]
    return found


def test_json_says_who_serves_what_here_and_why(this_machine: dict[str, object]) -> None:
    assert this_machine["fusedadam"] == fusedadam.__version__
    assert this_machine["versions"]["torch"] == torch.__version__  # type: ignore[index]
    cpu = this_machine["devices"][0]  # type: ignore[index]
    assert (cpu["device"], cpu["backend"]) == ("cpu", "numba")
    assert set(cpu["why_not"]) == {"triton", "eager"}
    threads = this_machine["threads"]
    assert threads["torch"] == 1  # type: ignore[index]
    cache = this_machine["caches"][0]  # type: ignore[index]
    assert Path(cache["folder"]).is_dir()
    assert any("AMD" in kind for kind in this_machine["never_tested"])  # type: ignore[attr-defined]


def test_what_a_person_reads_in_a_terminal() -> None:
    code, seen = in_terminal([*COMMAND, "doctor"])
    assert code in (frame.FINE, frame.WRONG)
    for line in (r"cpu: \S+", r"  backend: numba \((un)?tested on this device\)", "  not eager: many times slower"):
        assert re.search(rf"^{line}", seen.replace("\r", ""), re.MULTILINE), seen
    assert "Threads: 1, for" in seen
    assert "fusedadam's compiled code: " in seen
    assert "Untested: " in seen


def test_it_takes_less_than_three_seconds_beyond_importing_torch() -> None:
    program = """
import time, torch
began = time.process_time()
from fusedadam.__main__ import main
main(["doctor"])
print(time.process_time() - began)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert float(done.stdout.splitlines()[-1]) < 3


def test_without_numba_triton_and_rich_it_says_what_is_missing() -> None:
    done = without(["numba", "triton", "rich"], "doctor")
    assert done.returncode == frame.WRONG, done.stderr
    assert "backend: eager" in done.stdout
    assert "numba is not installed (pip install numba)" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_cache_that_was_asked_for_and_cannot_be_had_is_a_problem() -> None:
    done = piped("doctor", FUSEDADAM_CACHE_DIR="/proc/nowhere", NUMBA_OPT="0")
    assert done.returncode == frame.WRONG
    assert "PROBLEM: There is no folder to keep compiled code in: FUSEDADAM_CACHE_DIR='/proc/nowhere'" in done.stdout
    assert "PROBLEM: NUMBA_OPT is 0" in done.stdout


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
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_quota_of_a_container_is_read(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert gathering._quota(tmp_path) == quota


def test_a_cache_is_counted_and_a_huge_one_not_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    for name in ("a.py", "b.py", "below/c.compiled"):
        (tmp_path / name).write_bytes(b"12345")
    cache = gathering._count("fusedadam", tmp_path, ".py")
    assert (cache.files, cache.bytes, cache.counted, cache.error) == (2, 15, True, None)
    monkeypatch.setattr(gathering, "COUNTING_SECONDS", -1)
    assert not gathering._count("fusedadam", tmp_path, ".py").counted
    assert "at least" in doctor._cache(gathering._count("fusedadam", tmp_path, ".py"))


@pytest.mark.gpu
def test_a_gpu_is_named_with_who_serves_it(this_machine: dict[str, object]) -> None:
    gpu = this_machine["devices"][1]  # type: ignore[index]
    assert gpu["device"] == "cuda:0"
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert gpu["backend"] == backends.best(torch.device("cuda:0"))[0]
    assert gpu["tested"] is (gpu["name"] == "NVIDIA H200")
