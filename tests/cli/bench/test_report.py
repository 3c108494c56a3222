"""What was measured, as data and in words."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fusedadam.cli import demo
from fusedadam.cli.bench.options import parse
from fusedadam.cli.bench.report import COLUMNS, Report, Result, Set, Spread, line, results
from fusedadam.cli.harness.measure import Measured

MACHINE = {"device": "cpu", "name": "a machine", "threads": 2, "copy_gb_s": 10.0}


def report(*results: Result) -> Report:
    return Report(MACHINE, {"torch": "2"}, "command", "now", [Set("gpt", 1, 100)], list(results), complete=True)


def test_spread_and_percentages_follow_from_the_times() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([2.0]).percent == 0
    measured = Measured(ms=[1.9, 2.0, 2.1, 1.9, 2.1], copied_per_ms=[1e7], bytes_moved=10**7)
    gpt = Set("gpt", 1, 100)
    (result,) = results("AdamW", gpt, "float32", {"fusedadam": measured})
    assert result.ms == Spread(2.0, 1.9, 2.1)
    assert result.copy_gb_s == 10.0
    assert result.roofline_ms == 1.0
    assert result.percent_of_copy == 50.0
    assert result.ms is not None
    assert result.ms.percent == pytest.approx(5.0)
    assert "fit into a cache" not in str(list(report(result).notes()))
    (cached,) = results("AdamW", gpt, "float32", {"fusedadam": replace(measured, bytes_moved=4 * 10**7)})
    assert cached.percent_of_copy == 200.0
    assert "fit into a cache" in str(list(report(result, cached).notes()))


def test_bytes_a_parameter_are_those_of_weights_and_states() -> None:
    measured = {
        "fusedadam": Measured([2.0], [1.0], bytes_moved=1400, state_bytes=400),
        "fusedadam-8bit": Measured([3.0], [1.0], [1.5], bytes_moved=1212, state_bytes=306),
    }
    ours, stored = results("AdamW", Set("gpt", 1, 100), "bfloat16", measured)
    assert [COLUMNS["bytes a parameter"](r) for r in (ours, stored)] == ["6.00", "5.06"]
    assert [r.is_ours for r in (ours, stored)] == [True, True]
    assert [r.label for r in (ours, stored)] == ["AdamW", "AdamW 8bit"]
    assert stored.bytes_moved == 1212
    assert COLUMNS["times fusedadam's time"](stored) == "1.50 x"


def test_a_peer_with_low_memory_is_compared_with_our_8_bits() -> None:
    measured = {
        "fusedadam": Measured([2.0], [1.0], bytes_moved=1400, state_bytes=400, allocated=512),
        "fusedadam-8bit": Measured([3.0], [1.0], [1.5], bytes_moved=1212, state_bytes=306, allocated=512),
        "bitsandbytes-8bit": Measured([6.0], [1.0], [2.0], "fusedadam-8bit", 80.0, state_bytes=206, allocated=1024),
        "torchao-8bit": Measured(beside="fusedadam-8bit", failed="so"),
    }
    rows = results("AdamW", Set("gpt", 1, 100), "bfloat16", measured)
    assert [COLUMNS["times fusedadam's time"](r) for r in rows] == ["", "1.50 x", "2.00 x 8bit", ""]
    assert [COLUMNS["bytes a parameter"](r) for r in rows] == ["7.12", "7.12", "12.24", ""]
    assert [COLUMNS["first ms"](r) for r in rows] == ["", "", "80.0", ""]
    assert line(rows).endswith("bitsandbytes-8bit 2.00 x 8bit, torchao-8bit failed")
    notes = list(report(*rows).notes())
    assert notes[2].startswith("bitsandbytes-8bit, torchao-8bit: 8-bit states in blocks")
    assert any("against fusedadam-8bit" in note for note in notes)
    assert not any("against fusedadam-8bit" in note for note in report(*rows[:2]).notes())


def test_if_one_of_ours_fails_it_is_a_failure() -> None:
    assert report(Result("AdamW", "fusedadam-8bit", "gpt", "float32", failed="so")).our_failures
    assert not report(Result("AdamW", "torch-fused", "gpt", "float32", failed="so")).our_failures
    assert report(Result("AdamW", "fusedadam", "gpt", "float32", failed="so")).our_failures


def test_the_document_has_every_column_and_no_option_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "bench.md").read_text(encoding="utf-8")
    for column in COLUMNS:
        assert f"| {column} |" in text
    for main in (parse, demo.main):
        with pytest.raises(SystemExit):
            main(["--help"])
    said = capsys.readouterr().out
    named = re.findall(r"(?<!-)--[a-z][a-z-]+", text)
    assert len(named) > 10
    assert not [option for option in named if option not in said]
