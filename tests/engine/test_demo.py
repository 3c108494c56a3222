"""The command line, and the demo as a person starts it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fusedadam import __main__ as command_line
from fusedadam.cli import demo
from fusedadam.cli.side_by_side import Result

# One thread: with several, torch's wait for each other, and beside other busy programs that takes many times as long.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
PEERS = {
    "fusedadam AdamW": "torch AdamW",
    "fusedadam Adam": "torch Adam",
    "fusedadam EmaAdamW": "torch AdamW + EMA",
}


def fusedadam(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fusedadam", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)


def validation_losses(output: str) -> dict[str, float]:
    """From the table: lines of an optimizer's name and three cells, apart by two spaces or more."""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in output.splitlines()]
    names = {*PEERS, *PEERS.values()}
    return {row[0]: float(row[1]) for row in cells if len(row) == 4 and row[0] in names}


def test_demo_trains_every_optimizer_like_its_torch_peer() -> None:
    done = fusedadam("demo", "--steps", "3", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    losses = validation_losses(done.stdout)
    assert losses.keys() == {*PEERS, *PEERS.values()}, done.stdout
    for ours, theirs in PEERS.items():
        assert losses[ours] == pytest.approx(losses[theirs], abs=1e-2)
    assert max(losses.values()) < 5.2, "three steps should get below log(256) = 5.55, the loss of knowing nothing"


def test_without_a_command_the_help_is_shown() -> None:
    done = fusedadam()
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def test_an_unknown_command_is_refused() -> None:
    done = fusedadam("dmeo")
    assert done.returncode == 2
    assert "demo" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", [("--steps", "1"), ("--steps", "many"), ("--device", "toaster"), ("--nonsense",)])
def test_options_out_of_range_are_refused(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command_line.main(["demo", *options])
    assert refused.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_ctrl_c_leaves_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    assert command_line.main(["demo", "--device", "cpu"]) == 130
    assert capsys.readouterr().err.strip() == "Stopped."


def result(name: str, step_ms: float, fastest_step_ms: float | None = None) -> Result:
    return Result(name, 2.0, 30.0, step_ms, fastest_step_ms or step_ms)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [(2.0, 3.0, "faster (1.50 x)"), (3.0, 2.0, "slower (0.67 x)"), (2.0, 2.0, "as fast (1.00 x)")],
)
def test_what_is_said_about_speed_follows_from_the_times(ours: float, theirs: float, said: str) -> None:
    assert said in demo.speed_sentence([(result("fusedadam AdamW", ours), result("torch AdamW", theirs))])


def test_speeds_are_not_compared_on_a_busy_machine_or_after_few_steps() -> None:
    steady, unsteady = result("torch AdamW", 2.0), result("fusedadam AdamW", 2.0, fastest_step_ms=0.5)
    assert demo.speed_doubt([steady, steady], measured=100) is None
    assert "other programs" in (demo.speed_doubt([steady, unsteady], measured=100) or "")
    assert "only 1 of the steps" in (demo.speed_doubt([steady, steady], measured=1) or "")
