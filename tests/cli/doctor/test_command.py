"""`fusedadam doctor`: what it says about this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam import backends
from fusedadam.cli import doctor, frame
from fusedadam.cli.doctor import facts
from fusedadam.cli.doctor.bus import Bus
from fusedadam.cli.doctor.problems import Problem, find
from tests.cli.common import COMMAND, ENVIRONMENT, in_terminal, piped, without
from tests.cli.doctor.test_problems import FINE


def test_serious_problems_come_first_and_are_counted() -> None:
    both = replace(FINE, environment={"NUMBA_OPT": "0", "FUSEDADAM_CACHE": "x"})
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


def test_a_gpu_has_a_bus_and_the_host_memory_to_be_locked() -> None:
    gpu = replace(FINE.devices[0], device="cuda:0", bus=Bus(55.2, 55.0, 50.5))
    lines = [*doctor.report(replace(FINE, devices=[gpu], lockable=3 << 34), [])]
    assert "  bus: 55 GB/s to the device, 55 from it, 50 each way at once (offload=True is bound by it)" in lines
    assert "Host memory: 48.0 GiB are left, to be page-locked by offload=True" in lines
    without_gpu = [*doctor.report(replace(FINE, lockable=3 << 34), [])]
    assert not any(line.startswith("Host memory") for line in without_gpu)


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
    for line in (r"cpu: \S+", r"  backend: numba \((un)?tested on this device\)", "  eager: available, slower"):
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
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, check=True, timeout=600
    )
    assert float(done.stdout.splitlines()[-1]) < 3


def test_without_numba_triton_and_rich_it_says_what_is_missing() -> None:
    done = without(["numba", "triton", "rich"], "doctor")
    assert done.returncode == frame.WRONG, done.stderr
    assert "backend: eager" in done.stdout
    assert "numba is not installed (pip install numba)" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("lacking", ["_installed", "_has_compiler"])
def test_what_triton_lacks_is_no_advice_for_a_cpu(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backends, lacking, lambda name="triton": name != "triton")
    found = facts._device(torch.device("cpu"))
    assert (found.backend, found.why_not["triton"]) == ("numba", "it needs a GPU")


def test_a_cache_that_was_asked_for_and_cannot_be_had_is_a_problem() -> None:
    done = piped("doctor", FUSEDADAM_CACHE_DIR="/proc/nowhere", NUMBA_OPT="0")
    assert done.returncode == frame.WRONG
    assert "PROBLEM: There is no folder to keep compiled code in: FUSEDADAM_CACHE_DIR='/proc/nowhere'" in done.stdout
    assert "PROBLEM: NUMBA_OPT is 0" in done.stdout


@pytest.mark.gpu
def test_a_gpu_is_named_with_who_serves_it(this_machine: dict[str, object]) -> None:
    gpu = this_machine["devices"][1]  # type: ignore[index]
    assert gpu["device"] == "cuda:0"
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert gpu["backend"] == backends.best(torch.device("cuda:0"))[0]
    assert gpu["tested"] is (gpu["name"] == "NVIDIA H200")
