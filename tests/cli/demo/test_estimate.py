"""What a run of one's own would save."""

from __future__ import annotations

import pytest
import torch

from fusedadam.cli.demo import estimate
from fusedadam.cli.demo.estimate import Saving
from fusedadam.cli.demo.training import OPTIMIZERS


def test_what_a_run_of_ones_own_would_save() -> None:
    per_parameter = {"torch AdamW": 3e-6, "fusedadam AdamW": 2e-6, "adamp AdamP": 9e-5, "fusedadam AdamP": 3e-6}
    adamw, adamp = estimate.savings(per_parameter, count=1e7, steps_per_second=10)
    assert (adamw.name, adamw.peer) == ("fusedadam AdamW", "torch AdamW")
    assert (adamw.peer_ms, adamw.our_ms, adamw.whole_ms) == pytest.approx((30, 20, 100))
    assert adamw.faster_by == pytest.approx(100 / 90)
    assert adamw.seconds_a_day == pytest.approx(8640)
    assert adamw.cells() == ["AdamW", "30.0", "20.0", "1.11 x", "+144 min"]
    assert not adamp.possible
    assert adamp.cells()[3:] == ["-", "-"]
    assert "a step of adamp AdamP would alone take longer" in (estimate.impossible([adamw, adamp]) or "")
    assert estimate.impossible([adamw]) is None
    slower = Saving("fusedadam AdamW", "torch AdamW", peer_ms=20, our_ms=30, whole_ms=100)
    assert slower.cells()[3:] == ["0.91 x", "-144 min"]


def test_the_estimate_is_measured_here_and_says_what_it_assumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimate, "ON_CPU", [(20, 50), (50, 20)])
    monkeypatch.setattr(estimate, "PACE", estimate.Pace(turns=1, seconds=1e-3))
    saved = estimate.estimated(2000, 1.0, torch.device("cpu"))
    assert [s.name for s in saved] == list(OPTIMIZERS)[1::2]
    assert all(0 < s.our_ms < 1000 for s in saved), "as many parameters as were measured take as long as they took"
    said = capsys.readouterr().out
    assert "Your run: 2e+03 parameters, 1 steps a second" in said
    assert "Assumed: all of these parameters are on one such device, in float32" in said
