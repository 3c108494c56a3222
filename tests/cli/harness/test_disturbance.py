"""Whether other programs disturbed a measurement."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusedadam.cli.bench.report import COLUMNS, Report, Set, line, results
from fusedadam.cli.harness import disturbance, measure
from fusedadam.cli.harness.contestant import First, Turn
from fusedadam.cli.harness.disturbance import Watch
from fusedadam.cli.harness.measure import Conditions, Measured
from fusedadam.cli.harness.timing import Pace
from tests.cli.bench.test_report import MACHINE

# Two processes that want the only core that they may use.
SHARED_CORE = """
import os, signal, time
from fusedadam.cli.harness.disturbance import Watch
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
other = os.fork()
if other == 0:
    while os.getppid() != 1:
        pass
    os._exit(0)
watch, end = Watch(), time.perf_counter() + 0.5
while time.perf_counter() < end:
    pass
print(watch.waited())
os.kill(other, signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pins processes to a core")
def test_sharing_a_core_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", SHARED_CORE], capture_output=True, text=True, timeout=600, check=True)
    assert float(done.stdout) > 2 * measure.MOST_WAITING


def test_every_thread_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for thread, nanoseconds in (("1", 100_000_000), ("2", 400_000_000)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"123 {nanoseconds} 7\n")
    (tmp_path / "3").mkdir()  # it ended while the folder was read
    monkeypatch.setattr(disturbance, "THREADS", tmp_path)
    assert disturbance.seconds_queued() == pytest.approx(0.5)


def test_without_linux_the_calling_thread_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbance, "THREADS", tmp_path / "nowhere")
    assert disturbance.seconds_queued() is None
    watch = Watch()
    time.sleep(0.05)
    assert watch.waited() > 0.8


class Scripted:
    """A contestant whose turns are known."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.left: Iterator[Turn] = iter(turns)

    def tell(self, command: str) -> None:
        self.command = command

    def answer(self) -> Any:
        if self.command == "turn":
            return next(self.left)
        return First(5.0, 28, 8) if self.command == "first_step" else None

    def close(self) -> None:
        pass


def measured(device: str = "cpu", turns: int = 3, **scripts: Sequence[Turn]) -> dict[str, Measured]:
    found = {name: Measured(beside="ours") for name in scripts}
    started: Any = {name: Scripted(script) for name, script in scripts.items()}
    measure._take_turns(started, found, Conditions(device, Pace(turns, 0.0)))
    return found


QUIET, WAITING = Turn(2.0, 10.0, 0.0), Turn(9.0, 10.0, 0.6)


def test_disturbed_turns_are_taken_again_and_do_not_count() -> None:
    found = measured(ours=[QUIET, WAITING, QUIET, QUIET], peer=[Turn(4.0, 10.0, 0.0)] * 4)
    assert found["ours"].ms == [2.0] * 3
    assert found["peer"].against_ours == [2.0] * 3
    assert not found["ours"].disturbed
    assert not found["peer"].disturbed


@pytest.mark.parametrize("disturbed", ["ours", "peer"])
def test_where_most_turns_are_disturbed_there_is_no_ratio(disturbed: str) -> None:
    """Steady, but wrong: a spread of 0 % proves nothing."""
    scripts = {"ours": [QUIET] * 9, "peer": [QUIET] * 9, "other": [QUIET] * 9} | {disturbed: [WAITING] * 9}
    found = measured(**scripts)
    assert found["peer"].disturbed
    assert found["peer"].against_ours == []
    assert found["other"].disturbed == (disturbed == "ours")
    assert len(found[disturbed].ms) == 9, "three times as many turns as wanted"


def test_a_busy_machine_is_not_measured_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(measure.time, "monotonic", lambda: float(next(clock)))
    found: dict[str, Measured] = {"ours": Measured()}
    started: Any = {"ours": Scripted([WAITING] * 21)}
    measure._take_turns(started, found, Conditions("cpu", Pace(7, 0.0), longest=2.0))
    assert found["ours"].disturbed
    assert len(found["ours"].ms) == measure.ENOUGH_TURNS


def test_on_an_accelerator_a_slow_copy_shows_that_others_use_it() -> None:
    halved = Turn(4.0, 5.0, 0.0)
    turns = [QUIET, halved, halved, *[QUIET] * 6]
    assert measured("cuda", ours=turns)["ours"].ms == [2.0] * 3
    assert measured("cpu", ours=turns)["ours"].ms == [2.0, 4.0, 4.0], "a copy on a CPU varies by itself"
    assert measured("cuda", ours=[QUIET, *[halved] * 8])["ours"].disturbed


def test_the_table_says_disturbed_instead_of_a_ratio() -> None:
    found = {"fusedadam": Measured([1.0], [1.0], bytes_moved=28), "torch-fused": Measured([147.0], [1.0])}
    found["torch-fused"].disturbed = True
    gpt = Set("gpt", 1, 100)
    rows = results("AdamW", gpt, "float32", found)
    assert COLUMNS["times fusedadam's time"](rows[1]) == "disturbed"
    assert COLUMNS["of copy"](rows[1]) == ""
    assert line(rows) == "AdamW on gpt, float32: ours 1.000 ms, torch-fused disturbed"
    made = Report(MACHINE, {}, "command", "now", [gpt], rows)
    assert "stop the other programs and measure again" in str(list(made.notes()))
    assert "147" not in line(rows)
