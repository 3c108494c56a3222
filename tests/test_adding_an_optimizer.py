"""A toy optimizer is added to a copy of the repository, by the six changes that CONTRIBUTING.md lists.

It must then be in the documentation's tables, in the commands, in the fuzzer and in the sharded tests.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "site", "build", "*.egg-info")
ENTRY = """\
    Entry(
        cls=fusedadam.Toy,
        page="toy",
        when="a toy model",
        because="it is small",
        usual={"lr": 1e-3, "betas": (0.9, 0.99)},
        choices={"cautious": OFF_ON},
    ),
"""
MEANING = '''\
"""The formula of Toy: steps along a momentum."""

import torch

import fusedadam


def test_the_formula():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = fusedadam.Toy([param], lr=0.5, betas=(0.75, 0.5))
    param.grad = torch.full((3,), 2.0, dtype=torch.float64)
    optimizer.step()
    assert param.tolist() == [1 - 0.5 * 0.25 * 2.0] * 3
    assert optimizer.state[param]["exp_avg"].tolist() == [0.5 * 2.0] * 3
'''


class Copy:
    def __init__(self, folder: Path) -> None:
        self.root = folder
        for name in ("src", "tests", "tools", "docs", "examples"):
            shutil.copytree(ROOT / name, folder / name, ignore=NOT_COPIED)
        for path in (p for p in ROOT.iterdir() if p.is_file() and not p.name.startswith(".")):
            shutil.copy(path, folder)
        self.changed: list[str] = []

    def write(self, path: str, text: str) -> None:
        (self.root / path).write_text(text, encoding="utf-8")
        self.changed.append(path)

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_text("utf-8")
        assert text.count(old) == 1, f"{path} no longer has {old!r} once: adapt this test"
        self.write(path, text.replace(old, new))

    def read(self, path: str) -> str:
        return (self.root / path).read_text("utf-8")

    def run(self, *command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": f"{self.root / 'src'}{os.pathsep}{self.root}"}
        environment.pop("PYTEST_ADDOPTS", None)
        given = [sys.executable, *command]
        done = subprocess.run(
            given, cwd=self.root, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def passed(self, selected: str, *paths: str) -> int:
        """How many tests of that name pass; exhaustive ones, too."""
        said = self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selected, *paths)
        (count,) = re.findall(r"(\d+) passed", said)
        return int(count)


def toy(text: str) -> str:
    """Lion without its sign, under another name."""
    made = re.sub(r"\bLion\b", "Toy", re.sub(r"\blion(?=\b|_)", "toy", text))
    return re.sub(r"(?<!import )\bsign\((exp_avg [^\n]*)\)\n", r"\1\n", made)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    copy = Copy(tmp_path_factory.mktemp("repository"))
    copy.write("src/fusedadam/optimizers/toy.py", toy(copy.read("src/fusedadam/optimizers/lion.py")))
    copy.write("docs/optimizers/toy.md", toy(copy.read("docs/optimizers/lion.md")))
    copy.write("tests/meaning/test_toy.py", MEANING)
    copy.edit("src/fusedadam/catalog.py", "\n)\nCATALOG", f"\n{ENTRY})\nCATALOG")
    line, public = "from fusedadam.optimizers.lion import Lion\n", copy.read("src/fusedadam/__init__.py")
    copy.write("src/fusedadam/__init__.py", public.replace(line, line + toy(line)).replace('"Lion"', '"Lion", "Toy"'))
    copy.write("CHANGELOG.md", copy.read("CHANGELOG.md").replace("### Added\n", "### Added\n- `Toy`.\n", 1))
    return copy


def test_six_files_are_enough(copied):
    assert "update = exp_avg" in copied.read("src/fusedadam/optimizers/toy.py"), "lion.py has changed: adapt this test"
    assert len(copied.changed) == len({*copied.changed}) == 6
    different = filecmp.dircmp(ROOT / "tests", copied.root / "tests", ignore=["__pycache__"])
    assert not different.diff_files
    copied.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/meaning/test_toy.py", "tests/test_catalog.py")


def test_the_documentation(copied):
    copied.run("tools/reference.py")
    index = copied.read("docs/optimizers/index.md")
    assert "| a toy model | [Toy](toy.md) | it is small |" in index
    assert "| [Toy](toy.md) | 20 | 10 | 4 | 2 |" in index
    assert "| `max_grad_norm=1.0` | 24 moved, 4 kept |" in copied.read("docs/optimizers/toy.md")
    assert re.search(r"^##+ Toy$", copied.read("docs/api/optimizers.md"), re.MULTILINE)
    assert copied.passed("Toy", "tests/test_site.py") > 1
    code = """
import sys; sys.path.insert(0, "tools")
from mkdocs.config import load_config
import mkdocs_hooks
config = mkdocs_hooks.on_config(load_config("mkdocs.yml"))
print([page for section in config.nav for page in section.get("Optimizers", [])])
"""
    pytest.importorskip("mkdocs")
    assert "{'Toy': 'optimizers/toy.md'}" in copied.run("-c", code)


def test_verify(copied):
    said = copied.run("-m", "fusedadam", "verify", "--optimizers", "Toy", "--backend", "eager", "--jobs", "1")
    assert "Toy, cpu" in said
    assert "are right" in said


def test_bench(copied):
    assert "Toy" in copied.run("-m", "fusedadam", "bench", "--help")
    code = "from fusedadam.cli import contestants as c; import torch; p = torch.nn.Parameter(torch.ones(2))\n"
    assert "Toy" in copied.run("-c", code + "print(c.make('Toy', c.OURS, [p]), c.choose('Toy', 'cpu', None))")


def test_the_fuzzer(copied):
    assert copied.passed("Toy", "tests/fuzz/test_fuzz.py") == 1


def test_the_contract_and_shards(copied):
    """The sharded checkpoints of all optimizers are one test: that Toy is among them is asked without running it."""
    assert copied.passed("Toy", "tests/contract/test_matrix.py") > 20
    assert copied.passed("Toy and rest_on_two and FSDP2", "tests/distributed/test_same_results.py") == 1
    code = "from tests.distributed.test_every_checkpoint import CASES; print([c for c in CASES if c[0] == 'Toy'])"
    assert copied.run("-c", code).count("Toy") == 4
