"""`fusedadam verify`: it passes where kernels are right, and fails, loudly, where one is wrong."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

from fusedadam import generated
from fusedadam.backends import eager
from fusedadam.cli import frame, verify
from fusedadam.cli.verify import cases, run, steps
from fusedadam.cli.verify.cases import BF16, BY_HAND, F16, F32, F64, FLAGS, MIXES, OPTIMIZERS, Case, chosen, together
from fusedadam.cli.verify.judge import Member, judge, ulp
from fusedadam.cli.verify.steps import Place
from fusedadam.generated import cache_files
from tests.cli.common import COMMAND, in_terminal, piped, without

NUMBA, EAGER = Place("cpu", "numba"), Place("cpu", "eager")
PLAIN = Case("AdamW", (("amsgrad", False), ("maximize", False), ("max_grad_norm", None)), F32, F32)


# what is tried


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_value_of_every_flag_and_every_dtype_is_tried(optimizer):
    found = chosen([optimizer], everything=False)
    assert {(c.param, c.state) for c in found} == set(MIXES)
    for name, values in FLAGS[optimizer].items():
        assert {dict(c.flags)[name] for c in found} == set(values), name
    assert len(set(found)) == len(found) == len(BY_HAND[optimizer])


def test_everything_is_every_combination():
    found = chosen([*OPTIMIZERS], everything=True)
    assert len(set(found)) == len(found) == 6 * (8 + 8 + 4 + 8 + 8)


def test_gradients_come_scaled_where_a_scaler_is_used():
    assert {c.optimizer for c in chosen([*OPTIMIZERS], everything=False) if c.scaled} == set(cases.SCALED)


def test_no_case_is_lost_between_processes_and_what_shares_kernels_stays_together():
    every = chosen([*OPTIMIZERS], everything=False)
    tasks = together(every)
    assert sorted(c.title for task in tasks for c in task) == sorted(c.title for c in every)
    assert len({(c.optimizer, c.flags) for c in every}) == len(tasks)
    assert together(every[:1]) == [every[:1]]


def test_rules_are_seen_with_their_flags_as_the_case_says():
    case = Case("BertAdam", (("clip", "group"), ("maximize", True)), F32, F32)
    (step, *_), flags = steps.take(case, EAGER, 0), {"clip_group": True, "clip_all": False, "maximize": True}
    assert flags.items() <= dict(step.members[0].flags).items()
    assert len({m.group for m in step.members}) == 5, "a schedule each, and none"


@pytest.mark.parametrize("param", [F32, BF16, F16, F64], ids=str)
def test_adamp_projects_by_channel_by_layer_and_not_at_all(param, monkeypatch):
    made = spied(monkeypatch)
    steps.take(next(c for c in chosen(["AdamP"], everything=False) if c.param == param), EAGER, 0)
    assert set(made[0].projections().values()) == {"none", "layer", "channel"}


def test_clipping_clips(monkeypatch):
    made = spied(monkeypatch)
    steps.take(next(c for c in chosen(["EmaAdamW"], everything=False) if "max_grad_norm" in c.options), EAGER, 0)
    assert made[0].grad_norm > 1.2 * cases.OF_ALL


def spied(monkeypatch):
    """The optimizers that are made."""
    made, make = [], Case.make

    def spy(case, params, backend):
        made.append(make(case, params, backend))
        return made[-1]

    monkeypatch.setattr(Case, "make", spy)
    return made


# the judge


def one(before, after, **changed):
    flags = {"amsgrad": False, "maximize": False, "decoupled": True, "clipped": False}
    options = {"lr": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 0.0, "weight_decay": 0.0, "max_grad_norm": 1.0}
    member = Member(before, {**flags, **changed.pop("flags", {})}, {**options, **changed}, 0)
    (verdicts,) = judge(OPTIMIZERS["AdamW"].rule, [member], [after], step=1)
    return {v.role: v for v in verdicts}


def tensors(dtype=F32, **values):
    return {name: torch.tensor([value], dtype=dtype) for name, value in values.items()}


def test_the_judge_knows_the_first_step_of_adam():
    """m = g / 2 and v = g^2 / 4, both corrected for their zeros: the step is lr, up to the sign of g."""
    before = tensors(param=2.0, grad=-4.0, exp_avg=0.0, exp_avg_sq=0.0)
    found = one(before, tensors(param=2.5, exp_avg=-2.0, exp_avg_sq=4.0))
    assert [(v.ulps, v.expected) for v in found.values()] == [(0.0, 2.5), (0.0, -2.0), (0.0, 4.0)]


@pytest.mark.parametrize(("off", "right"), [(1, True), (2, True), (3, False), (1000, False), (float("nan"), False)])
def test_two_ulps_are_allowed_and_no_more(off, right):
    before = tensors(param=2.0, grad=-4.0, exp_avg=0.0, exp_avg_sq=0.0)
    stored = torch.tensor([2.5 + off * 2**-22], dtype=F32)
    found = one(before, {**tensors(exp_avg=-2.0, exp_avg_sq=4.0), "param": stored})
    assert (found["param"].of_allowed <= 1) is right
    assert found["param"].ulps == (off if off == off else float("inf"))


def test_half_an_ulp_is_allowed_where_sixteen_bits_are_stored():
    before = tensors(BF16, param=2.0, grad=-4.0, exp_avg=0.0, exp_avg_sq=0.0)
    for param, right in ((2.5, True), (2.5 + 2**-6, False)):
        found = one(before, tensors(BF16, param=param, exp_avg=-2.0, exp_avg_sq=4.0))
        assert (found["param"].of_allowed <= 1) is right


def test_the_judge_clips_by_the_norm_of_all():
    options = {"lr": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 0.0, "weight_decay": 0.0, "max_grad_norm": 2.5}
    flags = {"amsgrad": False, "maximize": False, "decoupled": True, "clipped": True}
    zero = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    members = [Member(tensors(param=1.0, grad=g, **zero), flags, options, k) for k, g in enumerate((3.0, 4.0))]
    after = [tensors(param=0.5, exp_avg=g / 4, exp_avg_sq=g * g / 16) for g in (3.0, 4.0)]
    for own in judge(OPTIMIZERS["AdamW"].rule, members, after, step=1):
        for verdict in own:  # within the 1e-6 that is added to the norm
            assert verdict.got == pytest.approx(verdict.expected, rel=1e-6)
            assert verdict.role == "param" or verdict.got != verdict.expected


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_an_ulp_is_the_distance_to_the_next_number(dtype):
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    values = torch.tensor([1.0, 1.5, 3.0, 0.1, 1000.0], dtype=dtype)
    following = (values.view(kind) + 1).view(dtype)
    assert torch.equal(ulp(values, dtype), following.double() - values.double())
    assert torch.equal(ulp(-values, dtype), ulp(values, dtype))


# the command


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
    assert len(adam["cases"]) == len(BY_HAND["Adam"])
    for case in adam["cases"]:
        assert [(e["device"], e["backend"]) for e in case["errors"]] == places
        assert all(0 <= e["param_ulps"] <= 2 and e["state_ulps"] <= 3 for e in case["errors"])
    rounded = [e["param_ulps"] for c in adam["cases"] if c["dtypes"] == "bf16" for e in c["errors"]]
    assert rounded == pytest.approx([0.5] * len(places), abs=1e-3), "the best that bfloat16 can do, and no better"


def test_in_a_terminal_there_is_a_bar_and_a_table():
    options = ["--optimizer", "EmaAdamW", "--backend", "eager", "--device", "cpu", "--jobs", "1"]
    code, seen = in_terminal([*COMMAND, "verify", *options])
    assert code == frame.FINE, seen
    total = len(BY_HAND["EmaAdamW"])
    assert re.search(rf"cases .*{total}/{total}", seen), seen
    assert re.search(r"EmaAdamW, cpu eager +│ +0\.\d\d", seen), seen
    assert f"All {total} cases are right" in seen


def test_piped_and_without_numba_triton_and_rich_it_is_plain():
    done = without(["numba", "triton", "rich"], "verify", "--optimizer", "Adam", "--jobs", "1", "--device", "cpu")
    assert done.returncode == frame.FINE, done.stderr
    assert re.search(r"^Adam, cpu eager +\d\.\d\d +0\.50", done.stdout, re.MULTILINE)
    assert f"{len(BY_HAND['Adam'])} of {len(BY_HAND['Adam'])} cases" in done.stdout
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
@pytest.mark.parametrize("processes", [2, 3, 4])  # besides the command there is a helper of multiprocessing's
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
    end = time.monotonic() + 20
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


# broken kernels


def few(monkeypatch, *which):
    monkeypatch.setattr(verify, "chosen", lambda optimizers, everything: list(which))


def failing(capsys, *arguments):
    assert verify.main([*arguments, "--jobs", "1", "--device", "cpu"]) == frame.WRONG
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
    load, broken = generated.load, []

    def doctored(title, text, made_for):
        if title == "numba_adam":
            broken.append(text)
            text = text.replace("beta2c * grad * grad", "beta1c * grad * grad")
        return load(title, text, made_for)

    monkeypatch.setattr(generated, "load", doctored)
    monkeypatch.setattr(cache_files, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr("fusedadam.backends.numba._compile", run_uncached())
    said = failing(capsys)
    assert all("beta2c * grad * grad" in text for text in broken)
    assert broken
    assert "exp_avg_sq of the tensor of shape () at ()" in said
    assert "on cpu numba" in said
    assert f"Delete the compiled code in {tmp_path}, and verify again" in said
    assert "use what did: backend='eager' on cpu" in said
    assert "other bits than on cpu numba" not in said.partition("What to do")[2]


def run_uncached():
    from fusedadam.backends import numba

    return numba._compile.__wrapped__


def test_a_tail_that_gets_no_update_is_found(monkeypatch):
    """Others have had that: the last elements of a tensor whose size is not a multiple of a vector's."""
    take = steps.take

    def without_tails(case, place, seed):
        taken = take(case, place, seed)
        taken[0].after[4]["param"][-1] = taken[0].members[4].before["param"][-1]
        return taken

    monkeypatch.setattr(run, "take", without_tails)
    result = run.verify(PLAIN, [EAGER], seed=0)
    assert re.match(r"step 1, param of the tensor of shape \(1025,\) at \(1024,\)", result.failures[0].what)


def test_backends_that_differ_in_one_bit_are_found(monkeypatch):
    take = steps.take

    def almost(case, place, seed):
        taken = take(case, EAGER, seed)
        if place == NUMBA:
            taken[2].after[5]["exp_avg"].view(torch.int32)[77] += 1
        return taken

    monkeypatch.setattr(run, "take", almost)
    (failure,) = run.verify(PLAIN, [EAGER, NUMBA], seed=0).failures
    assert failure.place == NUMBA
    said = r"other bits than on cpu eager: step 3, exp_avg of the tensor of shape \(8193,\) at \(77,\): (\S+) and (\S+)"
    found = re.fullmatch(said, failure.what)
    assert found is not None
    assert found[1] != found[2]


def test_a_run_that_gives_other_bits_than_the_first_is_found(monkeypatch):
    take, runs = steps.take, []

    def sometimes(case, place, seed):
        taken = take(case, place, seed)
        runs.append(torch.get_num_threads())
        if len(runs) == 2:
            taken[1].after[0]["param"].neg_()
        return taken

    monkeypatch.setattr(run, "take", sometimes)
    (failure,) = run.verify(PLAIN, [EAGER], seed=0).failures
    assert failure.what.startswith("other bits in a second run, on one thread: step 2, param")
    assert runs == [run.SEVERAL, 1]


def test_a_step_that_raises_is_a_failure_and_the_others_go_on(monkeypatch):
    take = steps.take

    def raising(case, place, seed):
        if place == NUMBA:
            raise ValueError("no such kernel")
        return take(case, place, seed)

    monkeypatch.setattr(run, "take", raising)
    result = run.verify(PLAIN, [NUMBA, EAGER], seed=0)
    assert [(f.place, f.what) for f in result.failures] == [(NUMBA, "ValueError: no such kernel")]
    assert list(result.errors) == [EAGER]


def test_a_device_without_float64_is_asked_for_none(monkeypatch):
    double = next(c for c in chosen(["Adam"], everything=False) if c.param == F64)
    monkeypatch.setattr(run, "_has", lambda device, dtype: dtype != F64)
    result = run.verify(double, [EAGER], seed=0)
    assert (result.errors, result.failures) == ({}, [])


def test_a_cache_that_cannot_be_had_is_a_failure_in_words():
    done = piped("verify", "--optimizer", "AdamW", "--backend", "numba", "--jobs", "1", FUSEDADAM_CACHE_DIR="/proc/no")
    assert done.returncode == frame.WRONG
    assert "RuntimeError: FUSEDADAM_CACHE_DIR='/proc/no' must be a folder of your own" in done.stdout
    assert "Traceback" not in done.stderr


def test_an_infinite_gradient_that_is_used_nevertheless_is_found(monkeypatch):
    case = next(c for c in chosen(["AdamW"], everything=False) if c.scaled)
    assert run.verify(case, [EAGER], seed=0).failures == []
    monkeypatch.setattr(steps, "SKIPPED", 0.0)
    (failure,) = run.verify(case, [EAGER], seed=0).failures
    assert "has to be skipped" in failure.what


def die(task, places, seed):
    os._exit(11)


def test_a_process_that_dies_is_a_failure_of_what_it_verified(monkeypatch):
    """As one does whose kernel writes where it must not."""
    monkeypatch.setattr(run, "_verify_task", die)
    every = chosen(["Adam"], everything=False)[-3:]
    assert len(together(every)) == 1, "or more processes are started than are needed here"
    results = [r for some in run.verify_all(every, [EAGER], seed=0, jobs=2) for r in some]
    assert {r.case for r in results} == set(every)
    assert all("a process died" in r.failures[0].what for r in results)


def test_of_many_failures_some_of_each_case_are_shown(capsys):
    which = chosen(["Adam"], everything=False)
    results = [run.Result(c, {}, [run.Failure(c.title, EAGER, f"wrong {k}") for k in range(12)]) for c in which]
    verify._report(results, [EAGER], [f for r in results for f in r.failures], 1.0)
    said = capsys.readouterr().out
    assert f"FAILED on cpu eager: {12 * len(which)} complaints." in said
    assert said.count("  wrong 0\n  wrong 1\n  ... and 10 more\n") == verify.CASES_SHOWN
    assert f"... and {len(which) - verify.CASES_SHOWN} more cases." in said


# the whole


@pytest.mark.exhaustive
def test_everything_with_nothing_compiled_in_less_than_a_minute(tmp_path):
    """Two cores: two minutes of their time; what other programs take meanwhile does not count."""
    done = piped("verify", "--jobs", "2", "--json", "--device", "cpu", FUSEDADAM_CACHE_DIR=str(tmp_path))
    assert done.returncode == frame.FINE, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["processor_seconds"] < 2 * 60
    assert len(found["cases"]) == len(chosen([*OPTIMIZERS], everything=False))


@pytest.mark.gpu
def test_on_a_gpu_triton_and_eager_give_the_bits_of_the_cpu():
    done = piped("verify", "--optimizer", "AdamW", "--optimizer", "BertAdam", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == frame.FINE, found["failures"][:3]
    assert {("cuda:0", "triton"), ("cuda:0", "eager")} <= {(p["device"], p["backend"]) for p in found["places"]}
