"""What the documents say is executed: every block of Python, and the docstrings."""

from __future__ import annotations

import doctest
import importlib
import linecache
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam.__main__ import COMMANDS
from tests.distributed.world import FSDP2_RUNS_ON_CPU

ROOT = Path(__file__).parents[1]
SAVED_AS = re.compile(r"# save as (\w+\.py)\n")  # the first line of a block that later blocks of its page import

# Blocks that are not executed here: a block whose first line is one of these, and why.
EXCEPTIONS = {"# needs a GPU\n": "executed by `pytest -m gpu`"}
# Pages whose blocks another test executes, each in an empty namespace as well.
ELSEWHERE = {"docs/using-it-with.md": "tests/trainers/test_documents.py"}


def code_blocks(name):
    """Any other way to write one would be missed, and is not used."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"^ +```|^~~~|```(py|Python|python3)\n", text, re.MULTILINE), name
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def pages():
    every = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    names = sorted(path.relative_to(ROOT).as_posix() for path in every)
    with_code = [name for name in names if code_blocks(name) and name not in ELSEWHERE]
    for name in with_code:
        yield pytest.param(name, False, id=name)
        if any(block.startswith(tuple(EXCEPTIONS)) for block in code_blocks(name)):
            yield pytest.param(name, True, id=f"{name} on a GPU", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("name", "on_gpu"), list(pages()))
def test_every_block_runs_when_it_is_pasted(name, on_gpu, tmp_path, monkeypatch):
    """In an empty namespace, so that a reader can paste any block by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for k, block in enumerate(code_blocks(name)):
        if block.startswith(tuple(EXCEPTIONS)) != on_gpu:
            continue
        torch.manual_seed(0)
        title = f"<block {k} of {name}>"  # whose source can be read, as that of a notebook's cell: rules need it
        if saved := SAVED_AS.match(block):
            Path(saved[1]).write_text(block, encoding="utf-8")
        if "init_process_group" in block:  # a process has one default group
            run_in_a_process(block)
            continue
        monkeypatch.setitem(linecache.cache, title, (len(block), None, block.splitlines(True), title))
        exec(compile(block, title, "exec"), {"__name__": "__main__"})
    for path in tmp_path.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


def run_in_a_process(block):
    if "fully_shard" in block and not FSDP2_RUNS_ON_CPU:
        pytest.skip(f"fully_shard of torch {torch.__version__} does not run on a CPU")
    job = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=600)
    assert job.returncode == 0, job.stderr


def sessions():
    """Blocks that show Python's prompt."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        found = re.findall(r"^```\n(>>> .*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        yield from (pytest.param(text, id=f"{path.name}: {text.splitlines()[1]}") for text in found)


@pytest.mark.parametrize("text", list(sessions()))
def test_sessions_show_what_python_prints(text):
    test = doctest.DocTestParser().get_doctest(text, {}, "session", None, 0)
    assert not doctest.DocTestRunner().run(test).failed


def shell_blocks():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^```sh\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            yield pytest.param(block, id=f"{path.name}: {block.splitlines()[0][:40]}")


@pytest.mark.parametrize("block", list(shell_blocks()))
def test_shell_blocks_run_or_name_what_exists(block, tmp_path, capsys):
    """A block that writes its own script is executed; of others, which take long, targets and options are checked."""
    if block.startswith("cat > "):
        here = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        job = subprocess.run(
            ["bash", "-ec", block], cwd=tmp_path, env=here, capture_output=True, text=True, timeout=600
        )
        assert job.returncode == 0, job.stderr
        return
    for line in block.splitlines():
        words = line.partition("#")[0].split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), line
        elif words[0] == "pip":
            assert words[1] in ("install", "wheel"), line
            assert words[-1] in (".", "dist/fusedadam-*.whl"), line
        else:
            command = words[words.index("fusedadam") + 1]
            assert command in COMMANDS, line
            options = [word for word in words[words.index(command) :] if word.startswith("--")]
            if command != "run":  # whose options are the script's
                with pytest.raises(SystemExit):
                    importlib.import_module(f"fusedadam.cli.{command}").main(["--help"])
                said = capsys.readouterr().out
                assert all(option in said for option in options), line


def test_no_block_is_left_out():
    for name, test in ELSEWHERE.items():
        assert code_blocks(name)
        assert name.rpartition("/")[2] in (ROOT / test).read_text(encoding="utf-8")
    on_gpu = [b for page in pages() for b in code_blocks(page.values[0]) if b.startswith(tuple(EXCEPTIONS))]
    assert len(on_gpu) <= 2, "most blocks must run on any machine"


DOCUMENTED = [f"optimizers.{path.stem}" for path in (ROOT / "src/fusedadam/optimizers").glob("[!_]*.py")]
DOCUMENTED += ["clipping", "functional", "grouping", "in_backward", "schedules"]
DOCUMENTED += [f"ascend.{name}" for name in ("aclnn", "apply_adam", "mindspeed", "operators", "optimizers")]


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_the_examples_in_docstrings_run(name):
    module = importlib.import_module(f"fusedadam.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch, "AdamW": fusedadam.AdamW})
    assert result.attempted
    assert not result.failed


def test_every_public_name_is_documented():
    for name in fusedadam.__all__:
        assert getattr(fusedadam, name).__doc__
    for name in fusedadam.functional.__all__:
        assert getattr(fusedadam.functional, name).__doc__, name
