"""`fusedadam verify`: it passes where kernels are right, and fails, loudly, where one is wrong."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from fusedadam import codegen
from fusedadam.backends import eager
from fusedadam.cli import frame, verify
from fusedadam.cli.verify.cases import F32, Case, cases_of
from fusedadam.codegen import cache_files
from tests.cli.common import COMMAND, in_terminal, piped, without

TOTAL = {name: len(cases_of(name, everything=False)) for name in ("Adam", "EmaAdamW")}
PLAIN = Case("AdamW", (), F32, F32)


@pytest.fixture(scope="module")
def adam():
    """One optimizer, all backends, in two processes, as JSON."""
    done = piped("verify", "--optimizer", "Adam", "--jobs", "2", "--json")
    assert done.returncode == frame.FINE, done.stdout + done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def test_json_has_every_case_with_its_error_in_every_place(adam):
    assert adam["ok"] is True
    assert adam["failures"] == []
    places = [(p["device"], p["backend"]) for p in adam["places"]]
    assert places[:2] == [("cpu", "numba"), ("cpu", "eager")]
    assert len(adam["cases"]) == TOTAL["Adam"]
    assert [case["dtypes"] for case in adam["cases"] if not case["errors"]] == ["16bit", "8bit"], "compared, not judged"
    for case in [case for case in adam["cases"] if case["errors"]]:
        assert [(e["device"], e["backend"]) for e in case["errors"]] == places
        # a state that is a sum of terms that cancel may be further off
        assert all(0 <= e["param_ulps"] <= 2 and 0 <= e["state_ulps"] < 1000 for e in case["errors"])
    rounded = [e["param_ulps"] for c in adam["cases"] if c["dtypes"] == "bf16" for e in c["errors"]]
    assert rounded == pytest.approx([0.5] * len(places), abs=1e-3), "the best that bfloat16 can do, and no better"


def test_in_a_terminal_there_is_a_bar_and_a_table():
    options = ["--optimizer", "EmaAdamW", "--backend", "eager", "--device", "cpu", "--jobs", "1"]
    code, seen = in_terminal([*COMMAND, "verify", *options])
    assert code == frame.FINE, seen
    total = TOTAL["EmaAdamW"]
    assert re.search(rf"cases .*{total}/{total}", seen), seen
    assert re.search(r"EmaAdamW, cpu eager +0\.\d\d", seen), seen
    assert f"All {total} cases are right" in seen
    assert "With storage= 'exact', '16bit', '8bit', all bits are those of the eager backend on the CPU." in seen


def test_piped_and_without_numba_triton_and_rich_it_is_plain():
    done = without(["numba", "triton", "rich"], "verify", "--optimizer", "Adam", "--jobs", "1", "--device", "cpu")
    assert done.returncode == frame.FINE, done.stderr
    assert re.search(r"^Adam, cpu eager +\d\.\d\d +0\.50", done.stdout, re.MULTILINE)
    assert f"{TOTAL['Adam']} of {TOTAL['Adam']} cases" in done.stdout
    assert "\x1b" not in done.stdout
    assert "─" not in done.stdout


def children_of(session: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split() if name.isdigit() else []
        except OSError:
            continue
        if fields and int(fields[3]) == session and fields[0] != "Z":
            found.append(int(name))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    "processes", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (3, 4))]
)  # besides the command there is a helper of multiprocessing's
def test_ctrl_c_ends_everything_at_once(processes):
    program = "import os, sys; sys.stderr.write(f'session {os.getsid(0)} '); from fusedadam.__main__ import main; "
    program += "sys.exit(main(['verify', '--jobs', '2', '--device', 'cpu', '--backend', 'eager', '--all']))"

    def at_work(seen):
        return "cases" in seen and len(children_of(int(re.findall(r"session (\d+)", seen)[0]))) >= processes

    code, seen = in_terminal([*COMMAND[:1], "-c", program], interrupt_when=at_work)
    assert code == frame.INTERRUPTED, seen
    assert seen.rstrip().endswith("Stopped.")
    assert "Traceback" not in seen
    session = int(re.findall(r"session (\d+)", seen)[0])
    end = time.monotonic() + 300
    while children_of(session) and time.monotonic() < end:
        time.sleep(0.1)
    assert children_of(session) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "toaster"], "toaster"),
        (["--device", "meta"], "'meta' cannot be used here"),
        (["--jobs", "0"], "from 1 on"),
        (["--seed", "-1"], "from 0 on"),
        (["--backend", "fast"], "fast"),
        (["--backend", "triton", "--device", "cpu"], "triton is unavailable on cpu: it needs a GPU"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(arguments, says, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as refused:
        verify.main(arguments)
    assert refused.value.code == frame.BAD_USAGE
    assert says in capsys.readouterr().err


def few(monkeypatch, *which):
    monkeypatch.setattr(verify, "cases_of", lambda optimizer, everything: list(which))


def failing(capsys, *arguments):
    assert verify.main([*arguments, "--optimizer", "AdamW", "--jobs", "1", "--device", "cpu"]) == frame.WRONG
    return capsys.readouterr().out


def test_a_broken_word_is_found(monkeypatch, capsys):
    """As an approximate square root would be, if it were off by one part in 100,000."""
    few(monkeypatch, PLAIN)
    sqrt = eager.OPS["sqrt"]
    monkeypatch.setattr(eager, "OPS", {**eager.OPS, "sqrt": lambda x: sqrt(x) * 1.00001})
    said = failing(capsys, "--backend", "eager")
    assert "FAILED" in said
    assert "AdamW(), parameters in float32, states in float32; on cpu eager:" in said
    where = r"step \d, param of the tensor of shape \(.*\) at \(.*\)"
    assert re.search(rf"^  {where}: expected [-.\d]+, got [-.\d]+: [.\d]+ times the error", said, re.MULTILINE)
    assert "Do not train with these optimizers on this machine until it passes." in said
    assert "doctor --json" in said


def test_a_broken_kernel_is_found_and_the_backend_that_is_right_is_named(monkeypatch, capsys, tmp_path):
    """A compiled kernel with one scalar for another, and only Numba's."""
    few(monkeypatch, PLAIN)
    function, broken = codegen.function, []

    def doctored(title, text, made_for, *name):
        if title == "numba_adam":
            broken.append(text)
            text = text.replace("beta2c * grad * grad", "beta1c * grad * grad")
        return function(title, text, made_for, *name)

    monkeypatch.setattr(codegen, "function", doctored)
    monkeypatch.setattr(cache_files, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr("fusedadam.backends.numba._compile", run_uncached())
    said = failing(capsys)
    assert all("beta2c * grad * grad" in text for text in broken)
    assert broken
    assert "exp_avg_sq of the tensor of shape () at ()" in said
    assert "on cpu numba" in said
    assert "Delete the compiled code (`python -m fusedadam doctor` shows where) and verify again" in said
    assert "use what did: backend='eager' on cpu" in said
    assert "other bits than on cpu numba" not in said.partition("What to do")[2]


def run_uncached():
    from fusedadam.backends import numba

    return numba._compile.__wrapped__


@pytest.mark.exhaustive
def test_with_nothing_compiled_it_takes_less_than_a_minute_for_each_optimizer(tmp_path):
    """Of processor time; what other programs take meanwhile does not count."""
    names = ["AdamW", "EmaAdamW", "AdamP", "SGD"]
    asked = [word for name in names for word in ("--optimizer", name)]
    done = piped("verify", "--jobs", "2", "--json", "--device", "cpu", *asked, FUSEDADAM_CACHE_DIR=str(tmp_path))
    assert done.returncode == frame.FINE, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["processor_seconds"] < 60 * len(names)
    assert len(found["cases"]) == sum(len(cases_of(name, everything=False)) for name in names)


@pytest.mark.gpu
def test_on_a_gpu_triton_and_eager_give_the_bits_of_the_cpu():
    done = piped("verify", "--optimizer", "AdamW", "--optimizer", "BertAdam", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == frame.FINE, found["failures"][:3]
    assert {("cuda:0", "triton"), ("cuda:0", "eager")} <= {(p["device"], p["backend"]) for p in found["places"]}
