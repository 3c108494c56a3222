"""The trainings that take turns, and how much of them fits into the demo's time."""

from __future__ import annotations

import pytest
import torch

from fusedadam.cli.demo import plan as planning
from fusedadam.cli.demo import speed, training
from fusedadam.cli.demo.plan import ON_CPU, SECONDS, SMALL, STEPS, fitting
from fusedadam.cli.demo.speed import Speed
from fusedadam.cli.demo.training import CLIPPED, FEWEST, STORED, Training, optimizers_on
from fusedadam.cli.demo.transformer import Size, TinyTransformer, standard_library
from fusedadam.cli.harness.measure import Measured

TINY = Size(width=32, heads=2, layers=1, context=8, batch=2)
CPU = torch.device("cpu")
ADAMW = optimizers_on(CPU)[:2]


class Slow:
    """A training whose steps take ``seconds``."""

    clock = 0.0

    def __init__(self, seconds: float) -> None:
        self.name, self.seconds, self.losses = "slow", seconds, [1.0]

    def step(self, _: torch.Tensor) -> None:
        Slow.clock += self.seconds


def trained(trainings: int, a_step: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many steps were taken, and how many trainings were left."""
    monkeypatch.setattr(training.time, "perf_counter", lambda: Slow.clock)
    slow = [Slow(a_step) for _ in range(trainings)]
    done = training.train(slow, [torch.zeros(1)] * STEPS, STEPS, seconds)  # type: ignore[arg-type]
    return done, len(slow)


def test_training_ends_in_time_but_not_before_its_curves_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained(3, 0.125, 37.5, monkeypatch) == (96, 3)
    assert trained(3, 20.0, 60.0, monkeypatch) == (FEWEST, 3)
    assert trained(5, 20.0, float("inf"), monkeypatch) == (STEPS, 5)


def test_where_time_is_short_there_are_fewer_optimizers_rather_than_fewer_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nine would take a second a step: at half time, two pairs are given up."""
    done, left = trained(9, 1 / 9, 30.0, monkeypatch)
    assert done >= FEWEST
    assert left == 5


@pytest.mark.parametrize(
    ("ms", "size", "optimizers", "steps"),
    [
        ({ON_CPU: 10}, ON_CPU, 10, STEPS),
        ({ON_CPU: 50}, ON_CPU, 10, 72),
        ({ON_CPU: 500, SMALL: 25}, SMALL, 10, 145),
        ({ON_CPU: 2000, SMALL: 200}, SMALL, 4, FEWEST),
        ({ON_CPU: 9000, SMALL: 2000}, SMALL, 2, FEWEST),
    ],
    ids=["quiet", "slower", "smaller", "fewer", "least"],
)
def test_what_fits_into_the_time_is_planned(
    ms: dict[Size, int], size: Size, optimizers: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def known(named: list[training.Named], size: Size, device: torch.device) -> float:
        tried.extend(named)
        return len(named) * ms[size] / 1e3

    monkeypatch.setattr(planning, "seconds_a_step", known)
    monkeypatch.setattr(planning.Watch, "waited", lambda self: 0.0)
    every = [(f"Adam{k // 2}", "by") for k in range(10)]
    chosen = every[:optimizers]
    assert fitting(every, CPU, None) == (size, chosen, steps, SECONDS)
    assert {*tried} == {*chosen, STORED}, "what is not shown is not compiled"
    assert fitting(every, CPU, 3)[2:] == (3, float("inf"))


def test_compilation_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    class Compiling:
        def __init__(self, *_: object) -> None:
            self.seconds = 60.0

        def step(self, _: torch.Tensor) -> None:
            nonlocal clock
            clock += self.seconds
            self.seconds = 0.25

    monkeypatch.setattr(planning, "Training", Compiling)
    monkeypatch.setattr(planning.time, "perf_counter", lambda: clock)
    assert planning.seconds_a_step([STORED, STORED], TINY, CPU) == 0.5


@pytest.mark.parametrize(("waited", "threads"), [(0.0, 2), (0.5, 1)])
def test_beside_busy_programs_one_thread_is_left(waited: float, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(planning.Watch, "waited", lambda self: waited)
    monkeypatch.setattr(planning, "seconds_a_step", lambda *_: 0.1)
    torch.set_num_threads(2)
    try:
        fitting(ADAMW, CPU, None)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_gpu_user_sees_clipping_in_the_step() -> None:
    named = optimizers_on(torch.device("cuda"))
    assert named[:4] == [*ADAMW, (CLIPPED, "torch-fused"), (CLIPPED, "fusedadam")]
    model, windows = TinyTransformer(TINY), torch.randint(0, 256, (2, 9))
    peer, ours, plain = (Training(*one, model, CPU, steps=3) for one in (*named[2:4], named[1]))
    for _ in range(3):
        losses = [each.step(windows) for each in (peer, ours, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert ours.optimizer.param_groups[0]["max_grad_norm"] == 1.0
    norm = torch.nn.utils.get_total_norm([p.grad for p in peer.params if p.grad is not None])
    assert norm <= 1.001, "the peer has clipped its gradients"


@pytest.mark.parametrize("name", ["Muon", "NAdam"])
def test_an_optimizer_that_is_asked_for_trains_beside_adamw(name: str) -> None:
    named = optimizers_on(CPU, [name, "AdamW"])
    assert [*dict(named)] == ["AdamW", name]
    torch.manual_seed(0)
    model = TinyTransformer(TINY)
    peer, ours = (Training(*one, model, CPU, steps=5) for one in named[2:])
    for _ in range(5):
        windows = torch.randint(0, 256, (2, 9))
        losses = [each.step(windows) for each in (peer, ours)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02 if name == "Muon" else 1e-4), "products are in bfloat16"
    assert losses[0] != ours.losses[0]


def test_disturbed_times_are_those_of_the_fastest_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        speed.OURS: Measured([9.0, 2.0, 4.0], disturbed=True),
        speed.PEER: Measured([50.0, 3.0, 70.0], disturbed=True),
    }
    monkeypatch.setattr(speed, "_measured", lambda *_: found)
    model = TinyTransformer(TINY)
    own = Training(*ADAMW[1], model, CPU, steps=3)
    assert speed.compare(own, own, CPU) == Speed(2.0, 3.0, None)


def test_lines_are_shuffled_and_always_in_the_same_order() -> None:
    (text, held_out), (again, _) = standard_library(500_000), standard_library(500_000)
    assert torch.equal(text, again)
    assert 8 < len(text) / len(held_out) < 10
    first = bytes(text[:20_000].tolist()).splitlines()
    assert sum(line.startswith((b"import ", b"from ", b'"""')) for line in first[:20]) < 5, "no module begins here"


def test_a_stored_training_starts_from_the_float32_weights_of_the_model() -> None:
    model = TinyTransformer(TINY)
    stored = Training(*STORED, model, CPU, steps=3)
    assert {p.dtype for p in stored.params} == {torch.bfloat16}
    kept = stored.optimizer.float32_state_dict(stored.model)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(kept[name], weight, rtol=2**-16, atol=0)
    windows = torch.randint(0, 256, (2, 9))
    assert stored.step(windows) == pytest.approx(model.loss(windows).item(), rel=0.01)
