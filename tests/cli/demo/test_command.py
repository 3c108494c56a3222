"""The demo, as a person starts it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedadam import __main__ as command_line
from fusedadam.cli import charts, demo
from fusedadam.cli.demo import picture
from fusedadam.cli.demo.speed import Speed
from fusedadam.cli.demo.training import Result, optimizers_on
from tests.cli.common import piped

pytestmark = pytest.mark.xdist_group("demo")  # they share a run

PEERS = {f"fusedadam {name}": f"{by} {name}" for name, by in optimizers_on(torch.device("cpu"))[::2]}


def validation_losses(output: str) -> dict[str, float]:
    """From the table: lines of an optimizer's name and three cells, apart by two spaces or more."""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in output.splitlines()]
    names = {*PEERS, *PEERS.values()}
    return {row[0]: float(row[1]) for row in cells if len(row) in (4, 5) and row[0] in names}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three steps, with --json: what a person reads is on standard error then."""
    picture = tmp_path_factory.mktemp("demo") / "demo.png"
    done = piped("demo", "--steps", "3", "--device", "cpu", "--json", "--output", str(picture))
    assert done.returncode == 0, done.stderr
    return {"said": done.stderr, "json": json.loads(done.stdout), "picture": picture}


def test_demo_trains_every_optimizer_like_its_peer(run: dict[str, Any]) -> None:
    losses = validation_losses(run["said"])
    assert losses.keys() == {*PEERS, *PEERS.values()}, run["said"]
    for ours, theirs in PEERS.items():
        assert losses[ours] == pytest.approx(losses[theirs], abs=1e-2)
    assert max(losses.values()) < 5.2, "three steps should get below log(256) = 5.55, the loss of knowing nothing"
    assert "\x1b" not in run["said"], "plain where there is no terminal"


def test_demo_gives_machines_what_it_tells_people(run: dict[str, Any]) -> None:
    data = run["json"]
    assert (data["version"], data["steps"], data["seed"]) == (5, 3, 0)
    told = validation_losses(run["said"]) | stored_losses(run["said"])
    assert data["results"][-1]["name"] == "fusedadam-8bit AdamW"
    for result in data["results"]:
        assert result["loss"] == pytest.approx(told[result["name"]], abs=1e-4)
        assert len(result["losses"]) == 3
        assert result["losses"][2] < result["losses"][0]
    assert data["speeds"].keys() == PEERS.keys()
    for speed in data["speeds"].values():  # however few steps were taken
        assert speed["ours_ms"] > 0
        assert speed["peer_ms"] > 0


def test_adamp_projects_in_the_demo(run: dict[str, Any]) -> None:
    pytest.importorskip("adamp")
    assert run["json"]["projections"]["channel"] >= 1
    assert re.search(r"AdamP projected [1-9]\d* of \d+ tensors in its last step\.", run["said"])


def stored_losses(output: str) -> dict[str, float]:
    return {name: float(loss) for name, loss in re.findall(r"(?m)^(fusedadam-8bit AdamW), bfloat16 +([\d.]+) ", output)}


def test_demo_shows_eight_bits_beside_float32(run: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in run["json"]["results"]}
    wide, stored = rows["fusedadam AdamW"], rows["fusedadam-8bit AdamW"]
    assert 12 <= wide["bytes_a_parameter"] < 12.1
    assert 5.06 < stored["bytes_a_parameter"] < 5.15
    assert stored["loss"] == pytest.approx(wide["loss"], abs=0.1)
    for name, row in (("fusedadam AdamW, float32", wide), ("fusedadam-8bit AdamW, bfloat16", stored)):
        said = rf"(?m)^{name} +{row['loss']:.4f} +[\d.]+ +{row['bytes_a_parameter']:.2f}$"
        assert re.search(said, run["said"]), run["said"]
    assert re.search(r"Weights and states take 5[78] % less memory\.", run["said"])


def test_demo_draws_a_picture(run: dict[str, Any]) -> None:
    assert f"Loss curves, time and memory saved: {run['picture']}" in run["said"]
    assert run["picture"].read_bytes().startswith(b"\x89PNG\r\n")


def test_without_matplotlib_the_demo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(charts, "possible", lambda: False)
    demo.draw([], [], TWINS, None, "a machine", tmp_path / "demo.png")
    assert 'pip install "fusedadam[bench]", or from a clone pip install ".[bench]"' in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        ("--steps", "1"),
        ("--steps", "many"),
        ("--optimizers", "AdamZ"),
        ("--device", "toaster"),
        ("--nonsense",),
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


def test_an_optimizer_without_a_peer_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "first_peer", lambda name: None)
    with pytest.raises(SystemExit) as refused:
        command_line.main(["demo", "--optimizers", "Adan"])
    assert refused.value.code == 2
    assert "Adan is shown beside a peer, and none is installed; install adan or timm" in capsys.readouterr().err


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


def result(name: str) -> Result:
    return Result(name, 2.0, (3.0, 2.0), 12.0)


PAIR = result("fusedadam AdamW"), result("torch-fused AdamW")
TWINS = result("fusedadam AdamW"), result("fusedadam-8bit AdamW")


def test_what_is_said_about_speed_follows_from_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    demo.report([PAIR], [Speed(2.0, 3.0, 1.5)], 30.0, 100, {"none": 2, "layer": 1})
    said = capsys.readouterr().out
    assert re.search(r"fusedadam AdamW +2\.0000 +2\.000 +1\.50 x +3\.0 %", said)
    assert "AdamP projected 1 of 3 tensors" in said
    assert "disturbed" not in said


def test_speeds_are_not_compared_where_other_programs_disturbed_them(capsys: pytest.CaptureFixture[str]) -> None:
    demo.report([PAIR], [Speed(2.0, 300.0, None)], 30.0, 100, {})
    said = capsys.readouterr().out
    assert re.search(r"fusedadam AdamW +2\.0000 +2\.000 +disturbed +disturbed", said)
    assert "stop these programs and run the demo again" in said
    assert "The times are those of the fastest turns" in said
    assert Speed(2.0, 3.0, 1.5).saved_percent(None) is None, "the pass was disturbed"


def test_every_optimizer_has_a_panel_of_its_own_with_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(charts, "png", lambda figure: drawn.append(figure) or b"")
    pairs = [tuple(result(f"{by} {name}") for by in ("fusedadam", "torch")) for name in ("AdamW", "Adam", "AdamP")]
    disturbed = Speed(1.0, 4.0, None)
    picture.png(pairs, [Speed(1.0, 2.0, 2.0)] * 2 + [disturbed, Speed(3.0, 2.0, 2 / 3)], TWINS, 30.0, "title")
    *losses, memory, times = drawn[0].axes
    assert [axes.get_title(loc="left") for axes in losses] == ["AdamW", "Adam", "AdamP"]
    assert [len(axes.get_legend().get_texts()) for axes in (*losses, memory)] == [2] * 4
    bars = [(bar.get_width(), bar.get_hatch()) for bar in times.patches]
    assert bars[::2] == [(100, None), (100, None), (100, "///"), (100, None)]
    assert bars[1::2] == [(50, None), (50, None), (25, "///"), (150, None)], "ours, however disturbed"
    assert "hatched: other programs disturbed most turns" in times.get_title(loc="left")
    assert [label.get_text() for label in times.get_yticklabels()][-1] == "8bit AdamW"
    assert [text.get_text() for text in times.texts][-2:] == ["fusedadam AdamW: 2.000 ms", "3.000 ms"]
