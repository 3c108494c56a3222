"""`python -m fusedadam run SCRIPT` behaves like `python SCRIPT`, as far as the script and its user can see."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fusedadam import __main__ as command_line

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FUSEDADAM_DEVICE")}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

# all that a script may look at; the file is in Latin-1, and says so
SURROUNDINGS = '''# -*- coding: latin-1 -*-
"""Its docstring."""
import atexit, inspect, pickle, sys
import sibling

class Own:
    """Of the module that was started."""

def plain(x: int) -> int:
    return x

number: int = 3
atexit.register(print, "at the end")
print("text", ascii("déjà vu"), sibling.VALUE, input())
print("argv", sys.argv)
print("name", __name__, __package__, __doc__, __annotations__)
print("file", __file__)
print("spec", __spec__)
print("builtins", __builtins__)
print("loader", type(__loader__), __loader__.name, __loader__.path)
print("globals", sorted(globals()))
print("path", sys.path[0])
print("main", sys.modules["__main__"].__dict__ is globals(), Own.__module__)
print("pickle", pickle.loads(pickle.dumps(Own)) is Own, type(pickle.loads(pickle.dumps(Own()))) is Own)
print("source", inspect.getsource(plain), inspect.getmodule(plain) is sys.modules["__main__"])
print("modules", "torch_npu" in sys.modules, file=sys.stderr)
if sys.argv[1:]:
    try:
        sys.exit(3)
    finally:
        print("finally")
'''
CHAINED = """
import atexit

def divide(x):
    try:
        return 1 / x
    except ZeroDivisionError as error:
        raise ValueError("bad x") from error

def outer():
    try:
        divide(0)
    except ValueError:
        raise KeyError("outer")

atexit.register(print, "at the end")
print("begun")
outer()
"""
HOOK = """
import sys, traceback

def hook(kind, error, frames):
    print(kind.__name__, error, [f.name for f in traceback.extract_tb(frames)], error.__traceback__ is frames)

def fail():
    raise ValueError("seen by the hook")

sys.excepthook = hook
fail()
"""
PACKAGE = """
import sys
from . import other
print(__name__, __package__, __spec__.name, __file__, sys.path[0], sys.argv, other.__name__)
print(__builtins__, sys.modules["__main__"].__dict__ is globals())
sys.exit("text")
"""
FOLDER = """
import sys
import inner
print(__name__, __package__, __spec__.name, __file__, sys.path[0], sys.argv, inner.__file__)
print(__builtins__, sys.modules["__main__"].__dict__ is globals())
sys.exit(None)
print("never")
"""
FILES = {
    "work/surroundings.py": SURROUNDINGS.encode("latin-1"),
    "work/sibling.py": "VALUE = 5",
    "work/chained.py": CHAINED,
    "work/wrong.py": "print('never')\nx = (1,\ny z\n",
    "work/interrupted.py": "def f():\n    raise KeyboardInterrupt\nf()\n",
    "work/hook.py": HOOK,
    "work/folder/__main__.py": FOLDER,
    "work/folder/inner.py": "",
    "work/package/__init__.py": "print('package', __name__)",
    "work/package/__main__.py": PACKAGE,
    "work/package/other.py": "",
    "work/package/fails.py": "def f():\n    raise ValueError('x')\nf()\n",
}
# name: (folder, arguments, exit status)
CASES = {
    "arguments, and an exit with a number": (
        "work",
        ["surroundings.py", "--", "-h", "--device", "x", "-q", "", "a b"],
        3,
    ),
    "a link, and a path with dots": ("work", ["./../elsewhere/link.py"], 0),
    "errors in a chain": (".", ["work/chained.py"], 1),
    "a syntax error": ("work", ["wrong.py"], 1),
    "interrupted": ("work", ["interrupted.py"], -2),
    "a hook for errors": ("work", ["hook.py"], 1),
    "no such file": ("work", ["missing.py", "x"], 2),
    "a folder, and an exit with None": ("work", ["folder", "x"], 0),
    "a package, and an exit with a text": ("work", ["-m", "package", "-m", "-h"], 1),
    "a module that fails": ("work", ["-m", "package.fails"], 1),
    "a module without a space": ("work", ["-mpackage", "--", "-mx"], 1),
    "the end of options": ("work", ["--", "surroundings.py", "--", "-"], 3),
    "no such module": ("work", ["-m", "package.missing"], 1),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (root / "elsewhere").mkdir()
    (root / "elsewhere/link.py").symlink_to(root / "work/surroundings.py")
    return root


def python(*arguments, cwd, typed="typed\n", **variables):
    command, environment = [sys.executable, *map(str, arguments)], ENVIRONMENT | variables
    return subprocess.run(command, cwd=cwd, env=environment, input=typed, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("case", CASES)
def test_a_script_cannot_tell_how_it_was_started(world, case):
    folder, arguments, status = CASES[case]
    plain = python(*arguments, cwd=world / folder)
    ours = python("-m", "fusedadam", "run", "-q", *arguments, cwd=world / folder)
    assert plain.returncode == status, plain.stderr
    assert ours.stdout.splitlines() == plain.stdout.splitlines()
    assert ours.stderr == plain.stderr
    assert ours.returncode == status


FROM_STDIN = """
import sys
import sibling
print(sys.argv, sibling.VALUE, repr(sys.path[0]), sorted(globals()), __name__, __file__, __loader__, __spec__)
print(sys.modules["__main__"].__dict__ is globals(), sys.stdin.read())
def fail():
    raise ValueError("x")
fail()
"""


def test_a_script_from_standard_input_cannot_tell_either(world):
    arguments = ["--", "-", "-m", "--", "-"]
    plain = python(*arguments, cwd=world / "work", typed=FROM_STDIN)
    ours = python("-m", "fusedadam", "run", "-q", *arguments, cwd=world / "work", typed=FROM_STDIN)
    assert plain.returncode == ours.returncode == 1
    assert ours.stdout.splitlines() == plain.stdout.splitlines()
    assert ours.stderr == plain.stderr


def test_a_script_from_standard_input_has_the_npu(tmp_path):
    script = "import torch, torch_npu; print(torch.ones(2).npu().sum().item(), torch.device('npu').type)"
    done = python("-m", "fusedadam", "run", "--device", "cpu", "-", cwd=tmp_path, typed=script)
    assert done.stdout == "2.0 cpu\n", done.stderr


def test_a_missing_script_is_all_that_is_said(tmp_path):
    done = python("-m", "fusedadam", "run", "missing.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "can't open file" in done.stderr
    assert len(done.stderr.splitlines()) == 1


SPAWNING = """
import json, multiprocessing, sys
import torch
import torch_npu

def work(queue):
    queue.put([torch.arange(3.0).npu().sum().item(), torch.device("npu").type, __name__])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(json.dumps(queue.get(timeout=900)))
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_what_npu_means_is_said_and_holds_in_processes_that_the_script_spawns(tmp_path, kind):
    (tmp_path / "spawning.py").write_text(SPAWNING)
    done = python("-m", "fusedadam", "run", "--device", kind, "spawning.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f'fusedadam: "npu" means {kind} here\n'
    assert json.loads(done.stdout) == [3.0, kind, "__mp_main__"]


TALKING = """
import os
import torch
import torch.distributed as dist
import torch_npu
from torch.nn.parallel import DistributedDataParallel

local_rank = int(os.environ["LOCAL_RANK"])
assert local_rank < torch.npu.device_count()
torch.npu.set_device(local_rank)
device = torch.device("npu", local_rank)
dist.init_process_group("hccl", device_id=device)
model = torch.nn.Linear(2, 1, bias=False).to(local_rank)
model = DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank)
batch = torch.full((1, 2), float(local_rank)).npu(non_blocking=True)
batch.record_stream(torch.npu.current_stream())
model(batch.to(f"npu:{local_rank}")).sum().backward()
dist.barrier(device_ids=[local_rank])
assert model.module.weight.grad.tolist() == [[0.5, 0.5]], "the mean over both processes"
total = torch.tensor(dist.get_rank() + 1.0).npu()
dist.all_reduce(total)
print(f"rank {dist.get_rank()} has {total.item()}\\n", end="")
dist.destroy_process_group()
"""


def test_torchrun_starts_it_as_it_starts_scripts(tmp_path):
    (tmp_path / "talking.py").write_text(TALKING)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m")
    done = python(*torchrun, "fusedadam", "run", "-q", "--device", "cpu", "talking.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.8 says this, too
    assert sorted(printed) == ["rank 0 has 3.0", "rank 1 has 3.0"]


def test_where_the_real_torch_npu_is_it_steps_aside_and_says_so(tmp_path):
    (tmp_path / "site/torch_npu").mkdir(parents=True)
    (tmp_path / "site/torch_npu/__init__.py").write_text("real = True")
    (tmp_path / "script.py").write_text("import torch, torch_npu; print(torch_npu.real, hasattr(torch, 'npu'))")
    done = python("-m", "fusedadam", "run", "script.py", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True False\n"
    assert done.stderr == "fusedadam: torch_npu is installed, so nothing is replaced: the script runs as it is\n"


@pytest.mark.parametrize("device", ["nonsense", "cuda:0"])
def test_a_device_that_cannot_be_had_is_refused(monkeypatch, device):
    monkeypatch.setenv("FUSEDADAM_DEVICE", "")  # and brought back afterwards
    with pytest.raises(SystemExit, match=device) as refused:
        command_line.main(["run", "--device", device, __file__])
    assert isinstance(refused.value.code, str), "a text: python prints it, and exits with 1"


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--device", "cpu"], ["--nonsense", "script.py"]], ids=str)
def test_without_a_script_it_says_how_it_is_used(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        command_line.main(["run", *arguments])
    assert refused.value.code == 2
    assert "usage: python -m fusedadam run" in capsys.readouterr().err


def test_help_is_shown(capsys):
    with pytest.raises(SystemExit) as asked:
        command_line.main(["run", "--help"])
    assert asked.value.code == 0
    assert "(SCRIPT | -m MODULE | -)" in " ".join(capsys.readouterr().out.split())


def test_after_two_dashes_a_script_may_begin_with_one(tmp_path):
    (tmp_path / "-m.py").write_text("import sys; print(sys.argv)", encoding="utf-8")
    done = python("-m", "fusedadam", "run", "-q", "--device", "cpu", "--", "-m.py", "-x", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("['-m.py', '-x']\n", "")
