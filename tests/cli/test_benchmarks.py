"""The scripts in benchmarks/ measure what they say: ours and the peer take the same steps."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # its scripts import each other by name

import cases
import peers
import rows
import small
import speed
import training
import training_model
from rows import Faster, OfCopy, OfTheTime, Row, Timed, lines, measure, table

from fusedadam import AdamP, AdamW
from fusedadam.catalog import CATALOG
from fusedadam.cli.demo.transformer import Size
from fusedadam.cli.harness.processes import Failed
from fusedadam.cli.harness.shapes import many_small, parameters
from fusedadam.cli.harness.timing import Pace

SHAPES = [(6, 20), (8, 4, 3, 3), (40,), (1, 12), (12, 1)]
PAIRS = {(row.ours.__name__, row.peer.__name__, repr(row.options)): row for row in speed.ON_GPU + speed.ON_CPU}


@pytest.mark.parametrize("row", PAIRS.values(), ids=lambda row: f"{row.what} and {row.peer.__name__}")
def test_ours_and_the_peer_do_the_same(row: Row) -> None:
    """In float64, where even the first small steps of a warm-up stand out from rounding."""
    if row.peer is peers.same_bytes_no_mathematics:
        pytest.skip("what it calculates is of no interest")
    if "cycle" in row.what:
        pytest.skip("the peer's betas stay the same")
    if "8bit" in row.what:
        pytest.skip("each rounds in its own way")
    if "DTensors" in row.what:
        pytest.skip("what is calculated on DTensors is compared in tests/distributed")
    if "scaled" in row.ours.__name__ and "scaled" not in row.peer.__name__:
        pytest.skip("the peer's gradients have another sign")
    results = []
    for make in (row.ours, row.peer):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
        before = [param.detach().clone() for param in params]
        try:
            stepping = make(params, **row.options)
        except Failed as missing:
            pytest.skip(str(missing))
        for _ in range(4):
            for param in params:
                param.grad = torch.randn_like(param)
            stepping.step()
        only_clips = isinstance(stepping, peers.Clipping)
        results.append([param.grad if only_clips else param.detach() for param in params])
    entry = CATALOG.get(row.ours.__name__)
    if entry and entry.matrices:  # the peer multiplies matrices in bfloat16
        for start, ours, theirs in zip(before, *results, strict=True):
            assert (ours - theirs).norm() <= 0.05 * (ours - start).norm()
        return
    in_float32 = row.what.startswith(tuple(other.name for other in CATALOG.values() if other.float32_twin))
    torch.testing.assert_close(*results, rtol=0, atol=1e-9 if in_float32 else 1e-12)


def test_a_peer_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for module in ("measure", "contestant"):  # other tests may use the machine
        monkeypatch.setattr(f"fusedadam.cli.harness.{module}.MOST_WAITING", math.inf)
    row = Row("AdamP", AdamP, peers.adamp, [(4, 4)], "float32", [Faster(25), OfCopy(95)])
    ratio, of_copy = found = lines(row, *measure(row, "cpu", Pace(turns=1, seconds=1e-3)))
    assert ratio["peer"] == of_copy["peer"] == "adamp is not installed"
    assert ratio["figure"] is ratio["met"] is None
    assert of_copy["figure"] > 0, "what needs no peer is measured all the same"
    assert "adamp is not installed" in table(found)
    assert "NOT MEASURED" in table(found)


def test_a_row_that_other_programs_disturbed_has_no_figure() -> None:
    row = Row("AdamP", AdamP, peers.adamp, [(4, 4)], "float32", [Faster(25)])
    found = lines(row, Timed(ours=1.0, peer=147.0, disturbed=True), "adamp")
    assert found[0]["figure"] is found[0]["met"] is None
    assert "DISTURBED by other programs" in table(found)


def test_figures_follow_from_the_times() -> None:
    times = Timed(ours=2.0, peer=3.0, copied_per_ms=100.0, moved=140)
    assert Faster().figure(times) == 1.5
    assert OfTheTime().figure(times) == pytest.approx(2 / 3)
    assert OfCopy(95).figure(times) == pytest.approx(70.0)
    assert Faster(1.4).met(1.5)
    assert Faster().met(1.5) is None
    assert Faster(1.6).met(1.5) is OfTheTime(1.1).met(1.2) is False


def test_only_measures_the_rows_that_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "measure", lambda *_: (Timed(1.0, 2.0), "peer"))
    every = {"cpu": speed.ON_CPU}
    assert rows.main(speed.__doc__, every, ["--device", "cpu", "--only", "adamp fp32, two"]) == 0
    assert capsys.readouterr().out.count("AdamP fp32, two matrices: 2 times as fast") == 1
    with pytest.raises(SystemExit):
        rows.main(speed.__doc__, every, ["--device", "cpu", "--only", "adamq"])
    assert "'adamq'" in capsys.readouterr().err


def test_cycling_betas_change_in_every_step() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    stepping = peers.cycling(AdamW)([param])
    seen = []
    for _ in range(3):
        stepping.step()
        seen.append(stepping.param_groups[0]["betas"])
    assert len(set(seen)) == 3


def test_sets_have_as_many_tensors_and_parameters_as_they_say() -> None:
    sets = {2: (cases.two_matrices(), 33.6), 1000: (cases.small_matrices(4096), 1.0), 97: (cases.resnet(), 18.1)}
    for tensors, (shapes, millions) in sets.items():
        assert len(shapes) == tensors
        assert parameters(shapes) / 1e6 == pytest.approx(millions, abs=0.05)


def test_small_matrices_are_matrices_of_nearly_the_sizes_of_small_tensors() -> None:
    for (height, columns), (size,) in zip(cases.small_matrices(4096), many_small(4096), strict=True):
        assert columns >= 1
        assert 0 <= size - height * columns < height


def test_small_models_are_measured_and_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real loop runs with a model of its own, which is small enough for a test."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(small, "ON_CPU", Size(width=16, heads=2, layers=1, context=8, batch=2))
    monkeypatch.setattr(small, "LARGEST_QUICK", 6)
    picture, threads = tmp_path / "small.png", str(torch.get_num_threads())
    assert small.main(["--cpu", "--quick", "--threads", threads, "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line[:1] == "|"]
    assert {len(cells) for cells in lines} == {6}
    measured = [(cells[0], cells[1]) for cells in lines[2:]]
    names = [pair.what for pair in small.pairs("cpu")]
    assert measured[:-1] == [(count, name) for count in ("1", "4", "6") for name in names]
    assert measured[-1][1] == small.LOOP
    verdicts = printed.partition("\n\n")[2].partition("\n\n")[2].splitlines()
    assert len(verdicts) == len(small.goals("cpu"))
    assert sum(line.startswith("not measured: AdamW, 1") for line in verdicts) == 2, "16 and 1,000 tensors"


def test_goals_of_small_models_are_judged_by_medians() -> None:
    row = small.Row(6, "AdamW", small.TORCH, small.Times(ours=[1.0, 4.0, 5.0], peer=[2.0, 6.0, 8.0]))
    wanted = [small.Goal("AdamW", least, 6) for least in (1.5, 1.6)]
    met, missed = small.verdicts([row], wanted)
    assert met == "met: AdamW, 6 tensors: 1.50 times as fast as torch fused (minima: 2.00); at least 1.5"
    assert missed.startswith("MISSED")
    assert small.line(row) == "| 6 | AdamW | 1.0 / 4.0 | torch fused | 2.0 / 6.0 | 2.00 / 1.50 |"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_goal_of_small_models_is_about_something_that_is_measured(device: str) -> None:
    measured = {pair.what for pair in small.pairs(device)} | {small.LOOP, small.LOOP_WITH_DEVICE}
    assert {goal.what for goal in small.goals(device)} <= measured
    assert {goal.tensors for goal in small.goals(device)} <= {*small.COUNTS, small.MLP, None}


def test_small_models_have_as_many_tensors_as_they_say() -> None:
    assert len(cases.mlp()) == small.MLP
    assert parameters(cases.mlp()) == 26_122
    assert parameters(cases.alike(16)) == 16 * 1024


def test_the_resnet_is_one() -> None:
    kernels = {shape[2:] for shape in cases.resnet() if len(shape) == 4}
    assert kernels == {(1, 1), (3, 3), (7, 7)}
    assert sum(len(shape) == 1 for shape in cases.resnet()) == 64


def test_trainings_that_are_done_are_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    chosen = ["--size", "small", "--device", "cpu", "--only", "plain", "--beta2", "0.95", "--steps", "3"]
    command = [*chosen, "--results", str(results)]
    training.main([*command, "--seeds", "0"])
    training.main([*command, "--seeds", "0,1"])
    assert "1 of 2 runs are done" in capsys.readouterr().out
    training.main([*command, "--seeds", "0,1,2", "--minutes", "0"])
    assert "1 runs are left" in capsys.readouterr().out
    found = training.read(results)
    assert [one["seed"] for one in found] == [0, 1]
    assert all(4 < one["loss"] < 6 for one in found)
    assert all(one["bytes"] == pytest.approx(2 + 8, abs=0.01) for one in found)
    assert "plain bfloat16 weights" in training.report(found)


def test_trainings_of_one_seed_start_alike() -> None:
    first, again, other = (training_model.Training(training_model.SMALL, "cpu") for _ in range(3))
    for made, seed in ((first, 0), (again, 0), (other, 1)):
        made.model.initialize(seed)
    weights = [made.model.head.weight for made in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    batches = [made.batches("training", 3, seed) for made, seed in ((first, 0), (again, 0), (other, 1))]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_every_matrix_of_the_language_model_can_have_8_bits() -> None:
    for name, millions in (("full", 25.7), ("middle", 0.87), ("small", 0.13)):
        with torch.device("meta"):
            params = list(training_model.Model(training_model.SIZES[name]).parameters())
        assert all(p.shape[-1] % 32 == 0 and p.numel() >= 4096 for p in params if p.dim() > 1)
        assert sum(p.numel() for p in params) / 1e6 == pytest.approx(millions, rel=0.05)


def test_trainings_are_compared_with_the_exact_one_of_the_same_seed() -> None:
    def found(contestant: str, seed: int, loss: float, moved: float) -> dict[str, object]:
        run = training.Run(contestant, seed, 0.95, 1500, "full")._asdict()
        measured = {"tuning_steps": 300, "loss": loss, "tuned_loss": loss - 0.1, "moved": moved, "bytes": 12, "ms": 5}
        return run | measured | {"torch": "2.11", "device": "H200"}

    exact = [found("exact", seed, loss, 2.0) for seed, loss in enumerate((0.8, 0.9, 1.0))]
    table = training.report([*exact, found("plain", 0, 0.83, 1.0), found("plain", 2, 1.01, 0.5)])
    line = next(line for line in table.splitlines() if "plain" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    difference = ["+0.0200 ± 0.0141", "+0.0300, +0.0100"]
    assert cells[1:] == ["0.9200", *difference, "0.8200", *difference, "0.375", "12.00", "5.00"]
