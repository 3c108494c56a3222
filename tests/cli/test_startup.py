"""Ctrl-C while a command imports: a word and exit code 130, as later; never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusedadam import startup
from tests.cli.common import COMMAND, ENVIRONMENT

# Python runs a sitecustomize.py first: here, the import of one module is interrupted.
INTERRUPTED = """
import sys


class Finder:
    def find_spec(self, name, *rest):
        if name == {name!r}:
            raise {error}


sys.meta_path.insert(0, Finder())
"""
SCRIPT = [sys.executable, "fusedadam", "demo"]  # as pip installs it
MODULES = [("demo", name) for name in ("torch", "numpy", "fusedadam.cli.streams", "fusedadam.cli.demo")]
MODULES += [("run", name) for name in ("torch", "fusedadam.cli.run", "fusedadam.ascend")]


def interrupted(folder: Path, command: list[str], name: str, error: str = "KeyboardInterrupt") -> tuple[int, str]:
    (folder / "sitecustomize.py").write_text(INTERRUPTED.format(name=name, error=error))
    path = os.pathsep.join([str(folder), ENVIRONMENT.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT | {"PYTHONPATH": path}, cwd=folder, timeout=900
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("command", "name"), MODULES)
def test_a_command_that_is_still_importing_stops_with_a_word(command: str, name: str, tmp_path: Path) -> None:
    assert interrupted(tmp_path, [*COMMAND, command, "x"], name) == (startup.INTERRUPTED, "\nStopped.\n")


def test_the_installed_script_too(tmp_path: Path) -> None:
    (tmp_path / "fusedadam").write_text("import sys\nfrom fusedadam.__main__ import main\nsys.exit(main())\n")
    assert interrupted(tmp_path, SCRIPT, "torch") == (startup.INTERRUPTED, "\nStopped.\n")


def test_other_errors_have_their_traceback(tmp_path: Path) -> None:
    code, said = interrupted(tmp_path, [*COMMAND, "demo"], "torch", "ValueError('broken')")
    assert code == 1
    assert said.startswith("Traceback")
    assert said.endswith("ValueError: broken\n")


@pytest.mark.parametrize("program", ["import fusedadam", "import sys; sys.argv = []; import fusedadam"])
def test_a_program_that_imports_the_package_has_its_traceback(program: str, tmp_path: Path) -> None:
    code, said = interrupted(tmp_path, [sys.executable, "-c", program], "torch")
    assert code not in (0, startup.INTERRUPTED)
    assert said.rstrip().endswith("KeyboardInterrupt")


def test_so_does_a_package_that_is_run_as_a_module(tmp_path: Path) -> None:
    """Python says "-m" to it as well, and its own arguments may be anything."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/__init__.py").write_text("import fusedadam")
    (tmp_path / "theirs/__main__.py").write_text("")
    _, said = interrupted(tmp_path, [sys.executable, "-m", "theirs", "-m", "fusedadam"], "torch")
    assert said.rstrip().endswith("KeyboardInterrupt")
