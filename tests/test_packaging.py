"""The wheel holds everything that a user needs, and what is written about the project elsewhere is true of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import fusedadam

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SMOKE = """
import pathlib, sys
import torch, fusedadam
assert pathlib.Path(fusedadam.__file__).is_relative_to(sys.argv[1]), fusedadam.__file__
model = torch.nn.Linear(4, 2)
optimizer = fusedadam.AdamW(model.parameters(), lr=1e-3, storage="8bit")
model(torch.ones(3, 4)).sum().backward()
optimizer.step()
import fusedadam.ascend
fusedadam.ascend.NpuFusedAdamW(model.parameters()).step()
"""


def test_a_wheel_installs_and_steps(tmp_path: Path) -> None:
    """Unpacked into an empty folder, which is what installing it does, and away from the sources."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, str(tmp_path), str(_copy(tmp_path / "sources"))], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert f"fusedadam-{fusedadam.__version__}.dist-info/licenses/LICENSE" in names
    assert {"fusedadam/py.typed", "fusedadam/cli/bench/page.html"} <= {*names}
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-c", SMOKE, str(tmp_path / "installed")]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)


def _copy(target: Path) -> Path:
    """What git tracks or would track: a build writes beside its sources."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src", "pyproject.toml"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip("not a clone")
    for name in [*found.stdout.split("\n"), "README.md", "LICENSE"]:
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())
    return target


def test_the_citation_names_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == fusedadam.__version__


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = re.findall(r"make ([a-z-]+)", path.read_text())
    assert {*called} <= targets
    assert called or path.stem == "release"
    assert all("runs-on" in job for job in workflow["jobs"].values())


def test_the_oldest_torch_of_the_workflow_is_the_lower_bound() -> None:
    (version,) = re.findall(r"VERSION=(\d+\.\d+)\.\d+", (ROOT / ".github/workflows/tests.yml").read_text())
    assert f'"torch>={version}"' in (ROOT / "pyproject.toml").read_text()


def test_hooks_run_what_make_runs() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    commands = [hook["entry"] for hook in local["hooks"]]
    assert commands == [".venv/bin/ruff check", ".venv/bin/ruff format", ".venv/bin/mypy"]
