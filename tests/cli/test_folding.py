"""Commands in a narrow terminal: nothing is wider than it, and no word is broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusedadam.cli import display, frame
from tests.cli.common import COMMAND, in_terminal, ran

WIDE = 1000
HELP = [(), ("doctor",), ("verify",), ("bench",), ("demo",), ("run",)]


Said = Callable[..., str]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    def run(width: int, *arguments: str) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        code = ran(*arguments)
        captured = capsys.readouterr()
        assert code == frame.FINE, captured.err
        return captured.out

    return run


def fits(text: str, width: int) -> None:
    """A path or a name can be wider than a terminal; a line that has a second word cannot."""
    long = [line for line in text.splitlines() if len(line) > width and len(line.split()) > 1]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help_is_folded_between_words(command: tuple[str, ...], said: Said) -> None:
    whole = said(WIDE, *command, "--help").split()
    for width in (80, 60):
        narrow = said(width, *command, "--help")
        fits(narrow, width)
        assert narrow.split() == whole


def test_doctor_is_folded_between_words(said: Said) -> None:
    def words(text: str) -> list[str]:
        """Without numbers: other tests write to the cache whose files are counted."""
        return [re.sub(r"[\d,.]+", "0", word) for word in text.split()]

    whole = words(said(WIDE, "doctor"))
    for width in (80, 60):
        narrow = said(width, "doctor")
        fits(narrow, width)
        assert words(narrow) == whole


def test_without_a_terminal_and_without_columns_lines_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "word " * 100 + "end"
    assert display.room() is None
    assert display.fold(long) == long
    monkeypatch.setenv("COLUMNS", "50")
    assert max(map(len, display.fold(long).splitlines())) <= 50


def test_a_line_continues_deeper_than_it_begins() -> None:
    assert display.fold("  - one two three", "  ", 12) == "  - one two\n    three"


HEADERS, ROWS = ("optimizer", "ms", "bytes a parameter"), [["AdamW", "", ""], ["  torch-fused", "1.5", "12.00"]]


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (40, """\
optimizer       ms  bytes a parameter
-------------  ---  -----------------
AdamW
  torch-fused  1.5              12.00"""),
        (30, """\
                      bytes a
optimizer       ms  parameter
-------------  ---  ---------
AdamW
  torch-fused  1.5      12.00"""),
        (20, """\
optimizer
         bytes a
   ms  parameter
  ---  ---------
AdamW
  torch-fused
  1.5      12.00"""),
    ],
)  # fmt: skip
def test_a_table_gives_up_width_but_no_column(width: int, expected: str) -> None:
    assert display.table(HEADERS, ROWS, width) == expected


@pytest.mark.parametrize("width", [80, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_bench_names_every_peer_in_a_terminal_and_says_what_it_waits_for(width: int, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    torch.save({"weight": torch.zeros(60, 192)}, tmp_path / "tiny.pt")
    arguments = ["--quick", "--from", str(tmp_path / "tiny.pt"), "--optimizers", "AdamW", "--turns", "1"]
    code, seen = in_terminal(
        ["env", f"COLUMNS={width}", *COMMAND, "bench", *arguments, "--device", "cpu", "--output", str(tmp_path / "out")]
    )
    assert code == 0, seen
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen).replace("\r", "\n")
    assert re.search(r"compiling\s+and\s+measuring\s+AdamW", lines)
    progress = re.search(r"(?s)\[1 of 1\] AdamW on tiny.pt.*?torch-fused\s+([\d.]+ x|disturbed)", lines)
    assert progress, lines
    _, _, below = lines.partition("tiny.pt: 11,520 in 1 tensors, float32\n")
    assert {"fusedadam", "fusedadam-8bit", "torch-fused", "parameter"} <= set(below.split())
    fits(below.replace(str(tmp_path), ""), width)


def test_verify_fits_a_narrow_terminal_and_says_that_it_compiles(said: Said) -> None:
    wide = said(WIDE, "verify", "--optimizers", "ScheduleFreeAdamW", "--device", "cpu", "--jobs", "1")
    narrow = said(60, "verify", "--optimizers", "ScheduleFreeAdamW", "--device", "cpu", "--jobs", "1")
    assert "compiling the kernels of the first cases" in " ".join(narrow.split())
    fits(narrow, 60)
    numbers = re.findall(r"\d\.\d\d", wide)
    assert len(numbers) > 10
    assert re.findall(r"\d\.\d\d", narrow) == numbers


def test_the_old_spelling_of_optimizers_still_works(said: Said) -> None:
    asked = ["--optimizer", "SGD", "--optimizer", "Lion", "--backend", "eager", "--device", "cpu", "--jobs", "1"]
    both = said(WIDE, "verify", *asked)
    assert both.startswith("Verifying SGD, Lion on cpu eager:")
