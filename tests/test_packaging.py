"""The wheel holds everything that a user needs, and what is written about the project elsewhere is true of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
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

# the code of README.md under "Use it", with what a reader is expected to have
model = torch.nn.Linear(4, 2)
batches, before = [torch.ones(3, 4)] * 2, model.weight.detach().clone()
exec(sys.argv[2])
assert isinstance(optimizer, fusedadam.AdamW) and optimizer.grad_norm > 0
assert not torch.equal(model.weight, before)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, str(folder), str(_copy(folder / "sources"))], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_installing_it_leaves_the_installed_torch_alone(wheel: Path) -> None:
    """pip is asked what it would install, and has no index to take anything else from."""
    asked = ["install", "--dry-run", "--quiet", "--no-index", "--report", "-", str(wheel)]
    command = [sys.executable, "-m", "pip", *asked]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {one["metadata"]["name"] for one in json.loads(done.stdout)["install"]} <= {"fusedadam"}


def test_requirements_are_lower_bounds_that_the_tests_run_with(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    required = dict(re.findall(r"^Requires-Dist: (\w+)>=([\d.]+)$", text, re.MULTILINE))
    oldest = (ROOT / "constraints/torch-2.6.0.txt").read_text()
    assert required.keys() == {"torch", "numpy", "numba"}
    assert required["torch"] == "2.6"
    for name in ("numpy", "numba"):
        assert re.search(rf"^{name}=={re.escape(required[name])}\.\d+$", oldest, re.MULTILINE)


def test_a_source_distribution_has_what_a_build_needs(tmp_path: Path) -> None:
    sources = _copy(tmp_path / "sources")
    build = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/fusedadam/py.typed"} <= names
    assert "src/fusedadam/cli/bench/page.html" in names
    assert [name for name in names if name.startswith("src/fusedadam/ascend/stand_ins/") and name.endswith(".py")]


def test_a_wheel_installs_and_steps_and_runs_the_lines_of_the_readme(wheel: Path, tmp_path: Path) -> None:
    """Unpacked into an empty folder, which is what installing it does, and away from the sources."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert f"fusedadam-{fusedadam.__version__}.dist-info/licenses/LICENSE" in names
    assert {"fusedadam/py.typed", "fusedadam/cli/bench/page.html"} <= {*names}
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    _, _, used = (ROOT / "README.md").read_text("utf-8").partition("\n## Install it")
    code = re.findall(r"```python\n(.*?)```", used, re.DOTALL)[0]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-c", SMOKE, str(tmp_path / "installed"), code]
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
