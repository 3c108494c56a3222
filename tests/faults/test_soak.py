"""A short run of benchmarks/soak.py: it passes, and detects every kind of leak and a wrong result."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # its scripts import each other by name

import soak

import fusedadam

SHORT = ["--device", "cpu", "--steps", "300"]


@pytest.fixture(autouse=True)
def one_thread():
    """torch starts its threads when it first needs them, which may be in the middle of a run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_nothing_grows_and_losses_are_those_of_the_references(tmp_path, capsys):
    assert soak.main([*SHORT, "--json", str(tmp_path / "soak.json")]) == 0
    assert "EmaAdamW" in capsys.readouterr().out
    assert (tmp_path / "soak.json").exists()


@pytest.mark.gpu
def test_nothing_grows_on_a_gpu():
    assert soak.main(["--device", "cuda", "--steps", "500"]) == 0


class Leaks:
    """What a step of AdamW may leave behind, again and again."""

    def __init__(self):
        self.kept, self.end = [], threading.Event()

    def gradients(self, optimizer):
        self.kept += [p.grad for group in optimizer.param_groups for p in group["params"]]

    def bytes(self, _):
        self.kept.append(bytes(100_000))

    def files(self, _):
        self.kept.append(open("/dev/null"))  # noqa: SIM115

    def threads(self, _):
        self.kept.append(threading.Thread(target=self.end.wait))
        self.kept[-1].start()

    def stop(self):
        self.end.set()
        for one in self.kept:
            if isinstance(one, threading.Thread):
                one.join()
            elif hasattr(one, "close"):
                one.close()


@pytest.fixture
def leaks():
    made = Leaks()
    yield made
    made.stop()


def test_leaks_are_found_and_named(leaks, monkeypatch, capsys):
    step = fusedadam.AdamW.step

    def leaking(self, closure=None):
        for leak in (leaks.gradients, leaks.bytes, leaks.files, leaks.threads):
            leak(self)
        return step(self, closure)

    monkeypatch.setattr(fusedadam.AdamW, "step", leaking)
    assert soak.main(SHORT) == 1
    said = capsys.readouterr().out
    for what in ("objects of type torch.Tensor", "bytes in use by malloc", "open file handles", "threads"):
        assert f"FAILED: {what} grew from" in said


def stale_betas(optimizer, step):
    """As if options were read once, and kept."""
    now = [group["betas"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["betas"] = (0.95, 0.999)
    step(optimizer)
    for group, betas in zip(optimizer.param_groups, now, strict=True):
        group["betas"] = betas


def counts_late(optimizer, step):
    """As if a step that comes after others were taken for the first."""
    for state in optimizer.state.values():
        state["step"] = torch.zeros(()) if state.get("step") == 20 else state["step"]
    step(optimizer)


def takes_infinities(optimizer, step):
    """As if GradScaler's word did not count: infinite gradients become 0, and the step is taken."""
    if getattr(optimizer, "found_inf", None) is not None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.nan_to_num_(0, 0, 0)
        optimizer.found_inf = torch.zeros_like(optimizer.found_inf)
    step(optimizer)


def test_wrong_results_are_found(monkeypatch, capsys):
    wrongs = {fusedadam.AdamW: stale_betas, fusedadam.AdamP: counts_late, fusedadam.EmaAdamW: takes_infinities}
    for kind, wrong in wrongs.items():
        monkeypatch.setattr(kind, "step", lambda self, closure=None, step=kind.step, wrong=wrong: wrong(self, step))
    assert soak.main(SHORT) == 1
    said = capsys.readouterr().out
    for name in ("AdamW, steady", "AdamW", "AdamP", "EmaAdamW"):
        assert f"FAILED: {name}: losses differ by" in said
    assert "BertAdam: losses" not in said
