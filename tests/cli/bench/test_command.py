"""`python -m fusedadam bench`, as a person or a program runs it."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from fusedadam import AdamP, AdamW
from fusedadam import __main__ as command_line
from fusedadam.cli import bench as module
from fusedadam.cli.bench.options import MEASURED_BY_DEFAULT
from fusedadam.cli.bench.report import VERSION
from fusedadam.cli.harness.measure import MOST_TURNS, Measured
from tests.cli.bench.test_report import MACHINE
from tests.cli.common import COMMAND, in_terminal, piped

HERE = Path(__file__).parent
RESULT = {"optimizer", "by", "set", "dtype", "failed", "ms", "turns", "against_ours", "bytes_moved", "copy_gb_s"}
RESULT |= {"state_bytes", "bytes_a_parameter", "roofline_ms", "percent_of_copy", "disturbed"}
RESULT |= {"first_ms", "beside", "note"}
pytestmark = pytest.mark.xdist_group("bench")  # they share one run
ALIKE = ("fusedadam", "torch-fused", "optimi", "made_up:Printing")  # in the bytes that they move
MEASURED = (*ALIKE, "fusedadam-8bit")
OPTIMI = "import torch\nclass AdamW(torch.optim.AdamW): pass\n"


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(HERE), str(folder), os.environ.get("PYTHONPATH", "")]
    return piped("bench", *arguments, COLUMNS="200", PYTHONPATH=os.pathsep.join(paths))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tiny checkpoint, and with our kernels compiled, so that a short limit is one for peers alone."""
    made = tmp_path_factory.mktemp("bench")
    torch.save({"model": {"weight": torch.zeros(60, 192), "bias": torch.zeros(60)}}, made / "tiny.pt")
    for optimizer, storage in itertools.product((AdamW, AdamP), (None, "8bit")):
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((60, 192), (60,))]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer(params, storage=storage).step()
    return made


@pytest.fixture(scope="module")
def run(folder: Path) -> dict[str, Any]:
    """One run for many tests: with a peer that is not installed elsewhere, and some that raise, crash, hang, talk."""
    (folder / "optimi.py").write_text(OPTIMI)
    names = ("Printing", "Raising", "Crashing", "Exiting", "Hanging")
    made_up = [f"--add-peer=AdamW=made_up:{name}" for name in names]
    out = folder / "out"
    done = bench(
        folder, "--from", str(folder / "tiny.pt"), "--optimizers", "AdamW", "AdamP",
        "--peers", "torch-fused", "adamp", "optimi", "flashoptim", *made_up, "--turns", "2", "--limit", "30",
        "--device", "cpu", "--json", "--output", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {
        "json": json.loads(done.stdout), "said": done.stderr, "written": json.loads((out / "bench.json").read_text()),
        "html": (out / "bench.html").read_text(encoding="utf-8"), "png": (out / "bench.png").read_bytes(),
    }  # fmt: skip


def by_name(data: dict[str, Any], optimizer: str = "AdamW") -> dict[str, Any]:
    return {row["by"]: row for row in data["results"] if row["optimizer"] == optimizer}


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        ("made_up:Raising", "ValueError: this peer cannot step for reasons of its own"),
        ("made_up:Crashing", "crashed with SIGSEGV"),
        ("made_up:Exiting", "ended with exit code 3; it said last: a licence is missing"),
        ("made_up:Hanging", "no answer within 30 seconds (--limit)"),
    ],
)
def test_a_peer_that_fails_is_shown_with_its_reason(run: dict[str, Any], peer: str, reason: str) -> None:
    row = by_name(run["json"])[peer]
    assert row["failed"] == reason
    assert row["ms"] is None
    assert f"failed: AdamW by {peer} on tiny.pt, float32: {reason}" in run["said"]


def test_the_others_are_measured_all_the_same(run: dict[str, Any]) -> None:
    rows = by_name(run["json"])
    for name in MEASURED:
        assert rows[name]["failed"] is None
        assert 1 <= rows[name]["turns"] <= 2 * MOST_TURNS, "more than asked, if other programs disturb them"
        assert rows[name]["ms"]["median"] > 0


def test_with_json_standard_output_is_json_alone_whatever_peers_print(run: dict[str, Any]) -> None:
    assert run["json"]["version"] == VERSION
    assert "hello from a peer" not in run["said"]
    assert run["written"] == run["json"]


def test_what_is_written_follows_the_schema(run: dict[str, Any]) -> None:
    data = run["json"]
    assert set(data) == {
        "version", "machine", "versions", "command", "began", "sets", "results", "absent", "left_out",
        "seconds", "complete",
    }  # fmt: skip
    assert data["complete"] is True
    assert set(data["machine"]) == {"device", "name", "threads", "copy_gb_s"}
    (own,) = data["sets"]
    assert own == {"name": "tiny.pt", "tensors": 2, "parameters": 11_580, "divided_by": 1}
    for row in data["results"]:
        assert set(row) == RESULT
        if row["failed"]:
            continue
        assert set(row["ms"]) == {"median", "low", "high"}
        assert 0 < row["ms"]["low"] <= row["ms"]["median"] <= row["ms"]["high"]
        assert (row["against_ours"] is None) == (row["by"] == "fusedadam" or row["disturbed"])
        if row["disturbed"] or row["copy_gb_s"] is None:
            assert row["percent_of_copy"] is None
        else:
            assert row["percent_of_copy"] == pytest.approx(100 * row["roofline_ms"] / row["ms"]["median"])


def test_bytes_are_those_of_the_rule(run: dict[str, Any]) -> None:
    for row in (by_name(run["json"])[name] for name in ALIKE):
        assert row["bytes_moved"] == 28 * 11_580
        assert row["state_bytes"] >= 8 * 11_580
        assert row["bytes_a_parameter"] == 4 + row["state_bytes"] / 11_580
    stored = by_name(run["json"])["fusedadam-8bit"]
    assert stored["bytes_moved"] == 16.125 * 11_520 + 28 * 60
    assert 6.06 < stored["bytes_a_parameter"] < 7
    assert by_name(run["json"], "AdamP")["fusedadam"]["bytes_moved"] == 40 * 11_520 + 28 * 60


def test_peers_that_are_there_and_that_are_not(run: dict[str, Any]) -> None:
    assert by_name(run["json"])["optimi"]["failed"] is None
    assert set(by_name(run["json"], "AdamP")) == {"fusedadam", "fusedadam-8bit", "adamp"}
    (absent,) = run["json"]["absent"]
    assert (absent["optimizer"], absent["by"]) == ("AdamW", "flashoptim")
    assert absent["why"] in ("not installed", "runs on a GPU only")
    assert f"flashoptim: {absent['why']}" in run["said"]


def test_piped_output_is_plain_and_tells_as_it_goes(run: dict[str, Any]) -> None:
    assert "\x1b" not in run["said"]
    against = r"([\d.]+ x|disturbed)"
    expected = (
        rf"\[1 of 2\] AdamW on tiny.pt, float32: ours [\d.]+ ms, fusedadam-16bit {against}, fusedadam-8bit {against}"
    )
    assert re.search(expected, run["said"])
    header = next(line for line in run["said"].splitlines() if line.startswith("optimizer"))
    assert re.split(r"\s{2,}", header)[1:] == [
        "ms", "spread", "first ms", "GB moved", "of copy", "state MB", "bytes a parameter", "times fusedadam's time"
    ]  # fmt: skip
    assert "± is half the distance between the quartiles" in run["said"]


def test_the_page_is_well_formed_and_needs_nothing_else(run: dict[str, Any]) -> None:
    page = ElementTree.fromstring(run["html"].replace("<!DOCTYPE html>", ""))
    assert not [e.tag for e in page.iter() if e.tag in ("script", "link", "iframe", "object")]
    for element in page.iter():
        assert not {"href", "srcset", "data"} & set(element.attrib)
    (picture,) = page.iter("img")
    assert base64.b64decode(picture.attrib["src"].removeprefix("data:image/png;base64,")) == run["png"]
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r"/\*.*?\*/|data:[^\"]*", "", run["html"]))
    shown = " ".join(page.itertext())
    for said in ("fusedadam", "torch-fused", "optimi", "adamp", "flashoptim", "AdamP", "failed: crashed with SIGSEGV"):
        assert said in shown
    assert "prefers-color-scheme: dark" in run["html"]
    assert 'name="viewport"' in run["html"]


def test_the_picture_is_a_png(run: dict[str, Any]) -> None:
    assert run["png"].startswith(b"\x89PNG\r\n")
    assert len(run["png"]) > 20_000


def test_on_a_terminal_there_is_a_bar_and_ctrl_c_leaves_nothing_broken(folder: Path) -> None:
    pytest.importorskip("rich")
    out = folder / "stopped"
    arguments = ["--turns", "2", "--from", str(folder / "tiny.pt"), "--device", "cpu", "--output", str(out)]
    code, screen = in_terminal([*COMMAND, "bench", *arguments], lambda seen: "AdamW on tiny.pt, float32: ours" in seen)
    assert code == 130
    assert "\x1b[" in screen
    assert re.search(rf"[01]/{len(MEASURED_BY_DEFAULT)}", screen)
    assert "Stopped." in screen
    assert "Traceback" not in screen
    written = json.loads((out / "bench.json").read_text())
    assert written["complete"] is False
    assert written["results"]
    assert "Stopped before everything was measured" in (out / "bench.html").read_text(encoding="utf-8")
    assert sorted(p.name for p in out.iterdir()) == ["bench.html", "bench.json", "bench.png"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--peers", "tourch-fused"], "--peers: invalid choice: 'tourch-fused' (choose from"),
        (["--optimizers", "Shampoo"], "--optimizers: 'Shampoo' is not an optimizer of this package (AdamW, "),
        (["--shapes", "bert"], "invalid choice: 'bert'"),
        (["--dtypes", "int8"], "invalid choice: 'int8'"),
        (["--scale", "0"], "'0' must be a whole number from 1 on"),
        (["--device", "toaster"], "'toaster' cannot be used here"),
        (["--add-peer", "AdamW=mine"], "'AdamW=mine' must be OPTIMIZER=MODULE:NAME"),
        (["--add-peer", "Shampoo=mine:Shampoo"], "must be OPTIMIZER=MODULE:NAME"),
        (["--from", "nowhere.pt"], "--from: nowhere.pt is not a file"),
        (["--output", os.devnull], "cannot be made"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as refused:
        command_line.main(["bench", *options])
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_quick_ends_in_time_and_says_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of optimizers that take 8 seconds each, a third one would end after 24."""
    clock = 0.0

    def slow(*_: Any) -> dict[str, Measured]:
        nonlocal clock
        clock += 8.0
        return {"fusedadam": Measured([1.0], [1.0])}

    monkeypatch.setattr(module, "look", lambda device: MACHINE)
    monkeypatch.setattr(module, "measure", slow)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock)
    chosen = ["--optimizers", "AdamW", "Lion", "SGD", "NAdam", "--device", "cpu", "--output", str(tmp_path)]
    assert module.main(["--quick", *chosen]) == 0
    said = capsys.readouterr().out
    assert "No time was left for SGD on gpt in float32, NAdam on gpt in float32." in said
    assert "It took 16 seconds." in said
    assert "No time was left for SGD" in (tmp_path / "bench.html").read_text(encoding="utf-8")
    assert module.main(chosen) == 0
    assert "No time was left" not in capsys.readouterr().out


def test_a_device_that_fails_is_said_in_a_sentence(monkeypatch, capsys, tmp_path) -> None:
    def fail(device: str) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(module, "look", fail)
    assert module.main(["--device", "cpu", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "bench: the device cannot be measured: no memory left\n"


@pytest.mark.gpu
def test_on_a_gpu(folder: Path) -> None:
    arguments = ["--quick", "--from", str(folder / "tiny.pt"), "--turns", "2", "--device", "cuda", "--json"]
    done = bench(folder, *arguments, "--output", str(folder / "gpu"))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    for row in data["results"]:
        assert row["failed"] is None
    assert data["machine"]["name"] == torch.cuda.get_device_name()
