"""Standard streams that are closed, full or no longer read: a command says so once, or not at all; never a traceback.

A shell closes a stream with `>&-`, and Python then sets `sys.stdout` to None. `/dev/full` is a disk without space.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusedadam import __main__ as command_line
from fusedadam.cli import doctor, frame, streams
from tests.cli.common import COMMAND, ENVIRONMENT, ran

BUFFERED = {k: v for k, v in ENVIRONMENT.items() if k != "PYTHONUNBUFFERED"}
UNBUFFERED = BUFFERED | {"PYTHONUNBUFFERED": "1"}
full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")

# in this process; what each command prints, and where, does not matter here
QUICK = {
    "doctor": ["doctor"],
    "doctor, JSON": ["doctor", "--json"],
    "bench": ["bench", "--help"],
    "no command": [],
    "help": ["--help"],
    "a command's help": ["verify", "--help"],
    "the help of run": ["run", "--help"],
    "version": ["--version"],
}
VERIFY = ["verify", "--optimizer", "AdamW", "--backend", "eager", "--jobs", "2"]
DEMO = ["demo", "--steps", "2", "--output", "OUTPUT.png", "--json"]  # says what it does on standard error
CANNOT = "python -m fusedadam: cannot write to standard output: No space left on device\n"


def in_shell(arguments, redirected, cwd, environment=BUFFERED):
    """Exit code, standard output and standard error of a command that a shell starts with these redirections."""
    done = subprocess.run(
        ["sh", "-c", f'"$@" {redirected}', "sh", *arguments],
        capture_output=True, text=True, env=environment, cwd=cwd, timeout=900, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_closed_stream_is_written_to_without_effect(tmp_path):
    assert in_shell([*COMMAND, "doctor"], ">&-", tmp_path) == (frame.FINE, "", "")
    code, out, err = in_shell([*COMMAND, "doctor"], "2>&-", tmp_path)
    assert (code, err) == (frame.FINE, "")
    assert "No problems found" in out


@pytest.mark.exhaustive
def test_a_command_that_starts_processes_runs_with_all_streams_closed(tmp_path):
    """Also at the level of file descriptors: none of a command's own files or pipes may become "standard output"."""
    assert in_shell([*COMMAND, *VERIFY], "<&- >&- 2>&-", tmp_path) == (frame.FINE, "", "")


@pytest.mark.parametrize("command", QUICK)
def test_every_command_runs_without_streams(command, monkeypatch):
    for name in streams.MODES:
        monkeypatch.setattr(sys, name, None)
    assert ran(*QUICK[command]) == frame.FINE


@pytest.mark.exhaustive
def test_json_is_whole_where_only_stdout_is_open(tmp_path):
    code, out, _ = in_shell([*COMMAND, *DEMO], "<&- 2>&-", tmp_path)
    assert code == frame.FINE
    assert json.loads(out)


@full
@pytest.mark.parametrize("environment", [BUFFERED, UNBUFFERED], ids=["buffered", "unbuffered"])
def test_output_to_a_full_disk_is_reported_once(environment, tmp_path):
    """Buffered, it fails when all is said, and would fail again when python exits; unbuffered, at the first line."""
    assert in_shell([*COMMAND, "doctor"], "> /dev/full", tmp_path, environment) == (frame.WRONG, "", CANNOT)


@full
@pytest.mark.parametrize("command", QUICK)
def test_every_command_reports_a_full_disk(command, monkeypatch, capsys):
    with open("/dev/full", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert ran(*QUICK[command]) == frame.WRONG
    assert capsys.readouterr().err == CANNOT


@full
@pytest.mark.parametrize(
    ("arguments", "redirected"),
    [(DEMO, "2> /dev/full"), (["doctor"], "> /dev/full 2>&-"), (["doctor"], "> /dev/full 2> /dev/full")],
)
def test_nothing_is_left_to_say_it_on(arguments, redirected, tmp_path):
    assert in_shell([*COMMAND, *arguments], redirected, tmp_path) == (frame.WRONG, "", "")


def test_a_usage_error_that_cannot_be_shown_is_still_one(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert ran("doctor", "--nonsense") == frame.BAD_USAGE


def test_standard_error_that_nobody_reads_any_more(tmp_path):
    """`demo --json 2>&1 > figures.json | head -1`; test_frame.py has the case of standard output."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, *DEMO], stdout=subprocess.PIPE, stderr=write, env=BUFFERED, cwd=tmp_path, timeout=600
    )
    os.close(write)
    assert (done.returncode, done.stdout) == (frame.WRONG, b"")


def test_an_error_with_another_file_is_not_blamed_on_standard_output(monkeypatch, capsys):
    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor, "gather", fail)
    with pytest.raises(OSError, match="No space left"):
        command_line.main(["doctor"])
    assert "cannot write" not in capsys.readouterr().err


def test_streams_are_as_they_were_afterwards(monkeypatch):
    for missing in itertools.product([True, False], repeat=3):
        given = [None if gone else io.StringIO() for gone in missing]
        for name, stream in zip(("stdin", "stdout", "stderr"), given, strict=True):
            monkeypatch.setattr(sys, name, stream)
        with streams.checked():
            print("written")
            print("written", file=sys.stderr)
            assert sys.stdin.read() == ""
        assert [sys.stdin, sys.stdout, sys.stderr] == given
        assert [stream.getvalue() for stream in given[1:] if stream] == ["written\n"] * (2 - sum(missing[1:]))


# what a script may do to its streams, and how a shell may start it; the exit code and all that is said are python's
SCRIPTS = {
    "prints": ("print('x')", [">&-", "2>&-", "<&- >&- 2>&-", "> /dev/full", "2> /dev/full"]),
    "closes stdout": ("import sys\nprint('x')\nsys.stdout.close()", ["", "2>&-"]),
    "closes its descriptor": ("import os\nprint('x')\nos.close(1)", [""]),
    "has none": ("import sys\nsys.stdout = None", [""]),
    "has one without flush": (
        "import sys\nsys.stdout = type('Own', (), {'write': len, '__repr__': lambda _: 'Own'})()",
        [""],
    ),
    "closes stderr": ("import sys\nprint('x', file=sys.stderr)\nsys.stderr.close()", ["", ">&-"]),
    "looks": (
        "import sys\nsys.exit(sum(2 ** k for k, s in enumerate((sys.stdin, sys.stdout, sys.stderr)) if s is None))",
        ["<&-", ">&-", "2>&-"],
    ),
    "fails": ("raise ValueError('x')", [">&-"]),
}


LONG = ("prints", "looks")


@pytest.mark.parametrize("script", [pytest.param(s, marks=[pytest.mark.exhaustive] * (s in LONG)) for s in SCRIPTS])
def test_the_streams_of_a_script_are_its_own(script, tmp_path):
    """Beside plain python."""
    text, redirections = SCRIPTS[script]
    (tmp_path / "script.py").write_text(text)
    for redirected in redirections:
        expected = in_shell([sys.executable, "script.py"], redirected, tmp_path)
        code, out, err = in_shell([*COMMAND, "run", "script.py"], redirected, tmp_path)
        assert (code, out, re.sub("fusedadam: .npu. means (cpu|cuda) here\n", "", err)) == expected, redirected
