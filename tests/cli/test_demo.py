"""The demo, as a person starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedadam import AdamP
from fusedadam import __main__ as command_line
from fusedadam.cli import demo, estimate, figure, side_by_side
from fusedadam.cli.estimate import Saving
from fusedadam.cli.peers import AdamPLoop, BertAdamLoop
from fusedadam.cli.side_by_side import ADAMP_PEER, OPTIMIZERS, Result
from tests.meaning.by_hand import AdamPByHand, BertAdamByHand

# One thread: with several, torch's wait for each other, and beside other busy programs that takes many times as long.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
PEERS = {
    "fusedadam AdamW": "torch AdamW",
    "fusedadam Adam": "torch Adam",
    "fusedadam EmaAdamW": "torch AdamW + EMA",
    "fusedadam AdamP": ADAMP_PEER,
    "fusedadam BertAdam": "plain BertAdam",
}


def fusedadam(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fusedadam", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)


def validation_losses(output: str) -> dict[str, float]:
    """From the table: lines of an optimizer's name and three cells, apart by two spaces or more."""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in output.splitlines()]
    names = {*PEERS, *PEERS.values()}
    return {row[0]: float(row[1]) for row in cells if len(row) == 4 and row[0] in names}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three steps, with --json: what a person reads is on standard error then."""
    picture = tmp_path_factory.mktemp("demo") / "demo.png"
    done = fusedadam("demo", "--steps", "3", "--device", "cpu", "--json", "--output", str(picture))
    assert done.returncode == 0, done.stderr
    return {"said": done.stderr, "json": json.loads(done.stdout), "picture": picture}


def test_demo_trains_every_optimizer_like_its_peer(run: dict[str, Any]) -> None:
    losses = validation_losses(run["said"])
    assert losses.keys() == {*PEERS, *PEERS.values()}, run["said"]
    for ours, theirs in PEERS.items():
        assert losses[ours] == pytest.approx(losses[theirs], abs=1e-2)
    assert max(losses.values()) < 5.2, "three steps should get below log(256) = 5.55, the loss of knowing nothing"
    assert "projected the updates of 20 matrices" in run["said"]
    assert "\x1b" not in run["said"], "plain where there is no terminal"


def test_demo_gives_machines_what_it_tells_people(run: dict[str, Any]) -> None:
    data = run["json"]
    assert (data["version"], data["steps"], data["seed"], data["estimate"]) == (1, 3, 0, None)
    told = validation_losses(run["said"])
    for result in data["results"]:
        assert result["loss"] == pytest.approx(told[result["name"]], abs=1e-4)
        assert len(result["losses"]) == 3
        assert result["losses"][2] < result["losses"][0]
        assert 0 < result["fastest_step_ms"] <= result["step_ms"]
    assert "only 1 of the steps" in data["speed_doubt"]


def test_demo_draws_a_picture(run: dict[str, Any]) -> None:
    assert f"Loss curves and time saved: {run['picture']}" in run["said"]
    assert run["picture"].read_bytes().startswith(b"\x89PNG\r\n")


def test_without_matplotlib_the_demo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(figure, "possible", lambda: False)
    demo.draw([], "a machine", 10, tmp_path / "demo.png")
    assert capsys.readouterr().out == "No picture: matplotlib is not installed (pip install matplotlib).\n"
    assert not list(tmp_path.iterdir())


def test_what_a_run_of_ones_own_would_save() -> None:
    per_parameter = {"torch AdamW": 3e-6, "fusedadam AdamW": 2e-6, "adamp AdamP": 9e-5, "fusedadam AdamP": 3e-6}
    adamw, adamp = estimate.savings(per_parameter, count=1e7, steps_per_second=10)
    assert (adamw.name, adamw.peer) == ("fusedadam AdamW", "torch AdamW")
    assert (adamw.peer_ms, adamw.our_ms, adamw.whole_ms) == pytest.approx((30, 20, 100))
    assert adamw.faster_by == pytest.approx(100 / 90)
    assert adamw.seconds_a_day == pytest.approx(8640)
    assert estimate.cells(adamw) == ["AdamW", "30.0", "20.0", "1.11 x", "+144 min"]
    assert not adamp.possible
    assert estimate.cells(adamp)[3:] == ["-", "-"]
    assert "a step of adamp AdamP would alone take longer" in (estimate.impossible([adamw, adamp]) or "")
    assert estimate.impossible([adamw]) is None
    slower = Saving("fusedadam AdamW", "torch AdamW", peer_ms=20, our_ms=30, whole_ms=100)
    assert estimate.cells(slower)[3:] == ["0.91 x", "-144 min"]


def test_the_estimate_is_measured_here_and_says_what_it_assumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimate, "ON_CPU", [(20, 50), (50, 20)])
    monkeypatch.setattr(estimate, "PACE", estimate.Pace(turns=1, seconds=1e-3))
    saved = demo.estimated(2000, 1.0, torch.device("cpu"))
    assert [s.name for s in saved] == list(OPTIMIZERS)[1::2]
    assert all(0 < s.our_ms < 1000 for s in saved), "as many parameters as were measured take as long as they took"
    said = capsys.readouterr().out
    assert "Your run: 2e+03 parameters, 1 steps a second" in said
    assert "Assumed: all of these parameters are on one such device, in float32" in said


def test_without_a_command_the_help_is_shown() -> None:
    done = fusedadam()
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def test_an_unknown_command_is_refused() -> None:
    done = fusedadam("dmeo")
    assert done.returncode == 2
    assert "demo" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--steps", "1"),
        ("--steps", "many"),
        ("--device", "toaster"),
        ("--nonsense",),
        ("--params", "0", "--steps-per-second", "1"),
        ("--params", "1e9"),
        ("--output", "no such folder/demo.png"),
        ("--output", "/proc/demo.png"),
        ("--output", "demo.jpg"),
        ("--output", "."),
        ("--device", "meta"),
    ],
)
def test_options_out_of_range_are_refused(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command_line.main(["demo", *options])
    assert refused.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_so_is_a_place_that_nobody_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fusedadam-demo.png").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as refused:
        command_line.main(["demo"])
    assert refused.value.code == 2
    assert "fusedadam-demo.png cannot be written" in capsys.readouterr().err


def test_asking_whether_a_picture_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept.png", tmp_path / "new.PNG"
    kept.write_bytes(b"an older one")
    assert [demo._picture(str(path)) for path in (kept, new)] == [kept, new]
    assert kept.read_bytes() == b"an older one"
    assert not new.exists()


def test_ctrl_c_leaves_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    assert command_line.main(["demo", "--device", "cpu"]) == 130
    assert capsys.readouterr().err.strip() == "Stopped."


def test_training_ends_before_a_step_that_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    class Slow:
        name = "slow"

        def step(self, _: torch.Tensor) -> float:
            nonlocal clock
            clock += 20.0
            return 1.0

    monkeypatch.setattr(side_by_side.time, "perf_counter", lambda: clock)
    batches = [torch.zeros(1)] * 100
    assert side_by_side.train([Slow()], batches, 100, seconds=75) == 3  # type: ignore[list-item]
    assert side_by_side.train([Slow()], batches, 100, seconds=5) == 2, "one to compile, one to measure"
    assert side_by_side.train([Slow()], batches, 100, seconds=float("inf")) == 100


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


def test_what_is_said_about_projections_is_what_the_last_step_did() -> None:
    across, along, vector = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(3))
    vector.data = vector.data[0]
    across.grad, along.grad, vector.grad = torch.tensor([[1.0, -1.0], [2.0, -2.0]]), torch.ones(2, 2), torch.ones(2)
    optimizer = AdamP([across, along, vector])
    optimizer.step()
    said = demo.projections_sentence(optimizer)
    assert "2 matrices: 1 by channel, 0 as a whole, 1 not at all" in said


def gradients(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """Along the weight as chance has it, or perpendicular to each row of it, or to all of it but not to each row."""
    grad = torch.randn_like(weight)
    if kind != "any" and weight.ndim > 1:
        rows, raw = (t.reshape(t.shape[0] if kind == "channel" else 1, -1) for t in (weight, grad))
        raw = raw - rows * (rows * raw).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
        grad = raw.reshape(weight.shape)
    return grad


@pytest.mark.parametrize("kind", ["any", "channel", "layer"])
@pytest.mark.parametrize("shape", [(40,), (6, 50), (8, 4, 3, 3)], ids=str)
@pytest.mark.parametrize("judge", ["by hand", "adamp"])
def test_the_loop_that_adamp_is_compared_with_is_adamp(judge: str, shape: tuple[int, ...], kind: str) -> None:
    torch.manual_seed(0)
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3, "wd_ratio": 0.2}
    param = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    other = torch.nn.Parameter(param.detach().clone())
    loop = AdamPLoop([param], **options)
    by_hand = AdamPByHand(param.detach(), **options)
    package = pytest.importorskip("adamp").AdamP([other], **options) if judge == "adamp" else None
    for _ in range(5):
        param.grad = gradients(kind, param.detach())
        other.grad = param.grad.clone()
        loop.step()
        by_hand.step(other.grad)
        if package is not None:
            package.step()
        torch.testing.assert_close(param.detach(), by_hand.p if package is None else other.detach(), rtol=0, atol=1e-12)
        assert by_hand.projection == ("none" if param.ndim == 1 else kind) or kind == "any"


@pytest.mark.parametrize("options", [{}, {"warmup": 0.3, "t_total": 8}, {"max_grad_norm": 0.0, "weight_decay": 0.0}])
def test_the_loop_that_bert_adam_is_compared_with_is_bert_adam(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((30,), (5, 20))]
    loop, by_hand = BertAdamLoop(params, lr=1e-2, **options), [BertAdamByHand(p, lr=1e-2, **options) for p in params]
    for _ in range(10):
        for param, hand in zip(params, by_hand, strict=True):
            param.grad = torch.randn_like(param)
            hand.step(param.grad.clone())
        loop.step()
        for param, hand in zip(params, by_hand, strict=True):
            torch.testing.assert_close(param.detach(), hand.p.detach(), rtol=0, atol=1e-12)
