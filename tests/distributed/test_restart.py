"""examples/fsdp2.py is killed, stopped and restarted: it ends with the bits of an undisturbed run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedadam.catalog import CATALOG
from tests.distributed.disturbed import EXAMPLE, load_example
from tests.distributed.world import NEEDS_FSDP2_ON_CPU, destroy_process_group

pytestmark = [pytest.mark.xdist_group("restarts"), NEEDS_FSDP2_ON_CPU]  # they share the undisturbed run
OPTIONS = ["--width", "16", "--layers", "1", "--steps", "8", "--save-every", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LIMIT = 600.0  # seconds; a machine may be busy
RESULT = re.compile(r"^\w+ after \d+ steps: loss \S+, weights (?P<weights>\w{16})$", re.MULTILINE)


def start(*command: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as the example says, so that restarts work
    command = tuple(map(str, (*TORCHRUN, *command)))
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finished(job: subprocess.Popen[str]) -> str:
    try:
        output, _ = job.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        job.terminate()  # torchrun then ends its workers
        raise
    assert job.returncode == 0, output
    return output


def result(output: str) -> str:
    (found,) = RESULT.finditer(output)
    return found[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What two processes print, and their checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return finished(start(EXAMPLE, *OPTIONS, "--optimizer", "EmaAdamW", "--folder", folder)), folder


def disturbed(folder: Path, disturbance: str) -> list[Any]:
    (folder / "marks").mkdir()
    script = Path(__file__).with_name("disturbed.py")
    options = [*OPTIONS, "--optimizer", "EmaAdamW", "--folder", folder / "checkpoints"]
    return [script, folder / "marks", disturbance, *options]


def steps_shown(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+) of", output, re.MULTILINE)]


def folders(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def test_progress_is_shown_once_and_only_the_last_checkpoint_stays(undisturbed):
    output, folder = undisturbed
    assert steps_shown(output) == list(range(1, 9))
    assert folders(folder) == ["step-00000008"]


def test_a_rank_that_is_killed_comes_back(undisturbed, tmp_path):
    """Rank 0, which the others look to, in a step after which the first checkpoint is complete for sure."""
    output = finished(start("--max-restarts", 1, *disturbed(tmp_path, "kill 0 5")))
    assert (tmp_path / "marks/kill-0-5").exists()
    assert result(output) == result(undisturbed[0])
    shown = steps_shown(output)
    assert shown[:4] == [1, 2, 3, 4]
    assert shown[4] in (3, 5), "it went back to a checkpoint, and not to the beginning"
    assert shown[4:] == list(range(shown[4], 9))
    assert folders(tmp_path / "checkpoints") == ["step-00000008"]


def test_a_job_that_is_killed_while_it_saves_goes_on_from_the_save_before(undisturbed, tmp_path):
    job = start(*disturbed(tmp_path, "stop in save 6"))
    mark, end = tmp_path / "marks/stop-in-save-6", time.monotonic() + LIMIT
    while not mark.exists() and time.monotonic() < end and job.poll() is None:
        time.sleep(0.05)
    kill_all(job, tmp_path / "marks")
    assert mark.exists(), job.stdout and job.stdout.read()
    checkpoints = tmp_path / "checkpoints"
    assert folders(checkpoints) == ["step-00000004", "step-00000006"]
    half = sorted(path.name for path in (checkpoints / "step-00000006").iterdir())
    assert half == ["__0_0.distcp", "__1_0.distcp"], "all is written but for what makes it count"

    output = finished(start(EXAMPLE, *OPTIONS, "--optimizer", "EmaAdamW", "--folder", checkpoints))
    assert steps_shown(output) == [5, 6, 7, 8]
    assert result(output) == result(undisturbed[0])
    assert folders(checkpoints) == ["step-00000008"]


def kill_all(job: subprocess.Popen[str], marks: Path) -> None:
    """torchrun first, which would end its workers otherwise than by SIGKILL."""
    for pid in [job.pid, *(int(path.name.removeprefix("pid-")) for path in marks.glob("pid-*"))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait(timeout=LIMIT)


def test_an_error_of_one_rank_ends_all(tmp_path):
    """Soon: on its own, the group would wait for half an hour."""
    job = start(*disturbed(tmp_path, "raise 1 3"))
    output, _ = job.communicate(timeout=LIMIT)
    assert job.returncode != 0
    assert (tmp_path / "marks/raise-1-3").exists()
    assert "RuntimeError: this rank fails" in output
    for path in (tmp_path / "marks").glob("pid-*"):
        assert not Path("/proc", path.name.removeprefix("pid-")).exists()


# In this process, which is a world of its own


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroy_process_group)
    return load_example()


def test_one_process_takes_over_from_two(undisturbed, example, capsys, tmp_path):
    output, folder = undisturbed
    options = [*OPTIONS, "--optimizer", "EmaAdamW", "--folder", str(folder)]
    example.main(options)
    alone = capsys.readouterr().out
    assert steps_shown(alone) == []
    assert RESULT.search(alone)["weights"] == RESULT.search(output)["weights"]


@pytest.mark.parametrize("optimizer", CATALOG)
def test_every_optimizer_goes_on_as_if_nothing_had_been(optimizer, example, capsys, tmp_path, monkeypatch):
    options = [*OPTIONS, "--optimizer", optimizer, "--folder"]
    example.main([*options, str(tmp_path / "whole")])
    whole = capsys.readouterr().out
    batch = example.batch

    def fails(step: int) -> Any:
        if step == 6:
            saved = tmp_path / "parts/step-00000004/.metadata"
            while not saved.exists():
                time.sleep(0.01)
            raise RuntimeError("it fails")
        return batch(step)

    monkeypatch.setattr(example, "batch", fails)
    with pytest.raises(RuntimeError, match="it fails"):
        example.main([*options, str(tmp_path / "parts")])
    capsys.readouterr()
    monkeypatch.undo()
    example.main([*options, str(tmp_path / "parts")])
    rest = capsys.readouterr().out
    assert steps_shown(rest) == [5, 6, 7, 8]
    assert result(rest) == result(whole)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_progress_is_a_bar(example, monkeypatch, tmp_path):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    example.main([*OPTIONS, "--folder", str(tmp_path)])
    shown = sys.stdout.getvalue()
    assert "━" in shown
    assert "100%" in shown
    assert not steps_shown(shown)
    assert "AdamW after 8 steps: loss" in shown


def test_folders_of_others_are_left_alone(example, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "step-00000002").mkdir()  # of a save that was interrupted
    example.main([*OPTIONS, "--folder", str(tmp_path)])
    assert folders(tmp_path) == ["mine", "step-00000008"]


def test_save_every_is_checked(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--save-every", "0"])
    assert "--save-every is 0; it must be at least 1" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["AdamP", "EmaAdamW"])
def test_on_a_gpu_too_a_run_that_failed_goes_on_to_the_same_bits(optimizer, tmp_path):
    script = Path(__file__).with_name("disturbed.py")
    marks = tmp_path / "marks"
    marks.mkdir()
    options = [*OPTIONS, "--optimizer", optimizer, "--folder"]
    outputs = []
    for command in (
        [EXAMPLE, *options, tmp_path / "whole"],
        [script, marks, "raise 0 6", *options, tmp_path / "parts"],
        [script, marks, "raise 0 6", *options, tmp_path / "parts"],
    ):
        job = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=LIMIT)
        outputs.append(job.stdout)
        assert (job.returncode == 0) == (len(outputs) != 2), job.stderr
    whole, _, rest = outputs
    assert steps_shown(rest)[0] in (3, 5)
    assert result(rest) == result(whole)
