"""The frame of the command line: help that teaches, exit codes, the installed script."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fusedadam
from fusedadam import __main__ as command_line
from fusedadam.cli import doctor, frame
from tests.cli.common import COMMAND, ENVIRONMENT, ran


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = ran(*arguments)
    captured = capsys.readouterr()
    assert isinstance(code, int)
    return code, captured.out + captured.err


def test_help_names_every_command_with_an_example_and_the_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, text = said(capsys, "--help")
    assert code == frame.FINE
    for name, (summary, example) in command_line.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}\n +\S.*{re.escape(example)}$", text, re.MULTILINE), name
    assert "0 fine, 1 found something wrong or failed, 2 bad usage, 130 interrupted" in text
    assert (code, text) == said(capsys), "without a command, the help"


@pytest.mark.parametrize("command", ["doctor", "verify"])
def test_each_command_teaches_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, command, "--help")
    assert code == frame.FINE
    assert "examples:" in text
    assert "exit codes:" in text
    assert "--json" in text


def test_every_command_that_is_listed_can_be_had() -> None:
    for name in command_line.COMMANDS:
        assert callable(importlib.import_module(f"fusedadam.cli.{name}").main)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == (frame.FINE, f"fusedadam {fusedadam.__version__}\n")


@pytest.mark.parametrize(
    "arguments", [("dcotor",), ("--nonsense",), ("doctor", "--nonsense"), ("verify", "now"), ("doctor", "now")]
)
def test_bad_usage_is_refused_with_two(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, *arguments)
    assert code == frame.BAD_USAGE
    assert arguments[-1] in text


def test_a_misspelt_command_is_answered_with_those_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = said(capsys, "dcotor")
    assert all(name in text for name in command_line.COMMANDS)


def test_the_installed_script_calls_itself_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    module, function = re.findall(r'^\[project\.scripts\]\nfusedadam = "(.+):(.+)"$', text, re.MULTILINE)[0]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/fusedadam", "--version"])
    with pytest.raises(SystemExit) as ended:
        getattr(importlib.import_module(module), function)()
    assert ended.value.code == frame.FINE
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/fusedadam", "--help"])
    with pytest.raises(SystemExit):
        getattr(importlib.import_module(module), function)()
    assert "usage: fusedadam [-h]" in capsys.readouterr().out


def test_ctrl_c_ends_with_130_and_a_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "gather", interrupted)
    assert said(capsys, "doctor") == (frame.INTERRUPTED, "\nStopped.\n")


def test_nobody_is_shouted_at_who_reads_only_the_beginning() -> None:
    """`fusedadam doctor | true`: the pipe is closed before anything is written."""
    process = subprocess.Popen(
        [*COMMAND, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    complaints = process.stderr.read()
    assert (process.wait(timeout=600), complaints) == (frame.WRONG, "")
