"""`verify` and `bench` for an optimizer of somebody else's package, in the current folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusedadam.cli import frame
from tests.cli.common import COMMAND, ENVIRONMENT, THEIRS, make_package

pytestmark = pytest.mark.xdist_group("own_package")  # they share kernels
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A command in the folder of the package, which only the current directory leads to."""
    folder = tmp_path_factory.mktemp("own")
    make_package(folder)
    torch.save({"weight": torch.zeros(64, 192)}, folder / "tiny.pt")

    def command(*arguments: str, program: list[str] = COMMAND) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*program, *arguments], cwd=folder, capture_output=True, text=True, env=ENVIRONMENT, timeout=900
        )

    return command


def test_verify_judges_it_in_several_processes_beside_ours(run: Run) -> None:
    done = run("verify", "--optimizers", THEIRS, "Lion", "--backend", "eager", "--device", "cpu", "--jobs", "2")
    assert done.returncode == frame.FINE, done.stdout + done.stderr
    assert re.search(rf"^{THEIRS}, cpu eager +\d\.\d\d +0\.\d\d", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^Lion, cpu eager +\d\.\d\d", done.stdout, re.MULTILINE)
    assert "All 18 cases are right: errors are within what rounding may add up to in the rule." in done.stdout


def test_verify_compares_backends(run: Run) -> None:
    """As `--optimizer`, which it was called first."""
    done = run("verify", "--optimizer", THEIRS, "--device", "cpu", "--jobs", "1", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == frame.FINE, found["failures"]
    assert [place["backend"] for place in found["places"]] == ["numba", "eager"]
    assert {case["dtypes"] for case in found["cases"]} >= {"f32", "bf16", "f16", "f64", "exact", "16bit", "8bit"}
    for case in found["cases"]:
        assert len(case["errors"]) == (0 if case["dtypes"] in ("16bit", "8bit") else 2)


def test_bench_measures_it_beside_a_yardstick_and_ours(run: Run, tmp_path: Path) -> None:
    """By the installed script, which does not search the current directory by itself."""
    script = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
    program = [*script, "-c", "import sys; from fusedadam.__main__ import main; sys.exit(main())"]
    done = run(
        "bench", "--quick", "--from", "tiny.pt", "--optimizers", THEIRS, "theirs:Lars", "--device", "cpu",
        "--turns", "2", "--json", "--output", str(tmp_path), program=program,
    )  # fmt: skip
    assert done.returncode == frame.FINE, done.stderr
    rows = {(row["optimizer"], row["by"]): row for row in json.loads(done.stdout)["results"]}
    assert set(rows) == {
        (o, by) for o in (THEIRS, "theirs:Lars") for by in ("fusedadam", "fusedadam-8bit", "torch-adamw")
    }
    elements = 64 * 192
    moved = {by: row["bytes_moved"] / elements for by, row in rows.items()}
    assert not [row["failed"] for row in rows.values() if row["failed"]]
    assert all(row["ms"]["median"] > 0 for row in rows.values())
    # read and written: the parameter and two states; read: the gradient
    assert moved[THEIRS, "fusedadam"] == moved[THEIRS, "torch-adamw"] == 28
    assert moved[THEIRS, "fusedadam-8bit"] == 16.125
    # one state, and one more pass that reads parameter and gradient for their norms; the yardstick is what it was
    assert (moved["theirs:Lars", "fusedadam"], moved["theirs:Lars", "torch-adamw"]) == (28, 28)
    assert rows["theirs:Lars", "fusedadam"]["state_bytes"] < 0.6 * rows["theirs:Lars", "torch-adamw"]["state_bytes"]


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_name_that_does_not_exist_is_refused_in_one_line(run: Run, command: str) -> None:
    done = run(command, "--optimizers", "theirs:AdaDisbelief")
    assert done.returncode == frame.BAD_USAGE
    last = done.stderr.splitlines()[-1]
    assert "argument --optimizers" in last
    assert last.endswith("'theirs:AdaDisbelief': theirs has no AdaDisbelief; its optimizers are AdaBelief, Lars")
    assert os.linesep + "Traceback" not in done.stderr
