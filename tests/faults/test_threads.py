"""Other threads replace and write gradients, parameters, states and options while a step runs.

The promise. Nothing crashes or hangs, and only memory that belongs to the optimizer's tensors is read and written: the
step works with the tensors that it found, or raises a RuntimeError that says that they changed during the step. Which
values are used is not promised.

One thing cannot be promised, since torch itself crashes: one thread sets ``p.grad = None`` (or calls ``zero_grad()``)
while another reads ``p.grad``.

They run in other processes, so that a crash is a test that fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedadam import AdamW
from tests.faults.racing import RACES

ROOT = Path(__file__).parents[2]
SECONDS = 1


def outcome(backend, *races, seconds=SECONDS):
    command = [sys.executable, "-m", "tests.faults.racing", backend, str(seconds), *races]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail(f"one of {', '.join(races)} with {backend} hangs")


def assert_survived(done):
    assert done.returncode == 0, f"exit status {done.returncode} (below 0: killed by that signal)\n{done.stderr}"
    assert all(int(turns) > 5 for turns in done.stdout.split()), "it hardly ran"


def test_with_numba():
    assert_survived(outcome("numba", "GradientsReplaced", "StatesReplaced", "StatesTakenAway", "Clipping"))


def test_eagerly():
    assert_survived(outcome("eager", "GradientsReplaced"))


def test_a_state_that_appears_while_the_step_looks_for_the_first(monkeypatch):
    """It met threads that take states away, now and then: a dict that changes ends every loop over it."""
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = AdamW([param])
    optimizer.state["of a hook"] = {}
    is_tensor = torch.is_tensor

    def appears(key):
        optimizer.state[len(optimizer.state)] = {}
        return is_tensor(key)

    monkeypatch.setattr(torch, "is_tensor", appears)
    optimizer._step()
    assert optimizer.state[param]["step"] == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("race", "backend"),
    [*((race, backend) for race in RACES for backend in ("numba", "eager")), ("ZeroGrad", "triton")],
)
def test_for_longer(race, backend):
    """Triton runs in its interpreter, which is enough to see what is read and written."""
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("with a GPU, Triton's interpreter is off")
    assert_survived(outcome(backend, race, seconds=15))
