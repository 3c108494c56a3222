"""Whatever is wrong with a step is found."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch

from fusedadam.cli import frame, verify
from fusedadam.cli.verify import run, steps
from fusedadam.cli.verify.cases import BF16, F32, F64, Case, cases_of, together
from fusedadam.cli.verify.steps import Place
from tests.cli.common import piped

NUMBA, EAGER = Place("cpu", "numba"), Place("cpu", "eager")
PLAIN = Case("AdamW", (), F32, F32)


@pytest.fixture
def altered(monkeypatch):
    """Every place gives the steps of the eager backend; those of ``place`` are changed before they are judged."""

    def alter(place, change):
        take = steps.take

        def taken(case, asked, seed):
            made = take(case, EAGER, seed)
            if asked == place:
                change(made)
            return made

        monkeypatch.setattr(run, "take", taken)

    return alter


def test_a_tail_that_gets_no_update_is_found(altered):
    """Others have had that: the last elements of a tensor whose size is not a multiple of a vector's."""

    def without_tails(taken):
        taken[0].after[4]["param"][-1] = taken[0].members[4].before["param"][-1]

    altered(EAGER, without_tails)
    result = run.verify(PLAIN, [EAGER], seed=0)
    assert re.match(r"step 1, param of the tensor of shape \(1025,\) at \(1024,\)", result.failures[0].what)


def test_backends_that_differ_in_one_bit_are_found(altered):
    def almost(taken):
        taken[2].after[5]["exp_avg"].view(torch.int32)[77] += 1

    altered(NUMBA, almost)
    (failure,) = run.verify(PLAIN, [EAGER, NUMBA], seed=0).failures
    assert failure.place == NUMBA
    said = r"other bits than on cpu eager: step 3, exp_avg of the tensor of shape \(8193,\) at \(77,\): (\S+) and (\S+)"
    found = re.fullmatch(said, failure.what)
    assert found is not None
    assert found[1] != found[2]


def test_one_bit_of_a_code_is_found_even_if_only_that_backend_is_asked_for(altered):
    def almost(taken):
        taken[1].after[-1]["exp_avg_codes"][3, 700] ^= 1

    altered(NUMBA, almost)
    result = run.verify(replace(PLAIN, param=BF16, storage="8bit"), [NUMBA], seed=0)
    assert result.errors == {}
    said = r"other bits than on cpu eager: step 2, exp_avg_codes of the tensor of shape \(9, 1056\) at \(3, 700\): .*"
    assert re.fullmatch(said, result.failures[0].what)


def test_exact_storage_is_judged_like_float32(altered):
    stored = replace(PLAIN, param=BF16, storage="exact")
    assert max(run.verify(stored, [EAGER], seed=0).errors[EAGER]) < 3

    def off_by_some_low_bits(taken):
        taken[-1].values[5]["param"].view(torch.int32)[77] += 5

    altered(EAGER, off_by_some_low_bits)
    (failure,) = run.verify(stored, [EAGER], seed=0).failures
    assert failure.what.startswith("step 3, param of the tensor of shape (8193,) at (77,)")


def test_a_reference_that_raises_is_a_failure(monkeypatch):
    def raising(case, place, seed):
        raise ValueError("no such format")

    monkeypatch.setattr(run, "take", raising)
    result = run.verify(replace(PLAIN, param=BF16, storage="8bit"), [NUMBA], seed=0)
    assert result.failures == [(EAGER, "ValueError: no such format")]


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
    double = next(c for c in cases_of("Adam", everything=False) if c.param == F64)
    monkeypatch.setattr(run, "_has", lambda device, dtype: dtype != F64)
    result = run.verify(double, [EAGER], seed=0)
    assert (result.errors, result.failures) == ({}, [])


def test_a_cache_that_cannot_be_had_is_a_failure_in_words():
    done = piped("verify", "--optimizer", "AdamW", "--backend", "numba", "--jobs", "1", FUSEDADAM_CACHE_DIR="/proc/no")
    assert done.returncode == frame.WRONG
    assert "RuntimeError: FUSEDADAM_CACHE_DIR='/proc/no' must be a folder of your own" in done.stdout
    assert "Traceback" not in done.stderr


def test_an_infinite_gradient_that_is_used_nevertheless_is_found(monkeypatch):
    case = next(c for c in cases_of("AdamW", everything=False) if c.scaled)
    assert run.verify(case, [EAGER], seed=0).failures == []
    monkeypatch.setattr(steps, "SKIPPED", 0.0)
    (failure,) = run.verify(case, [EAGER], seed=0).failures
    assert "has to be skipped" in failure.what


def die(task, places, seed):
    os._exit(11)


def test_a_process_that_dies_is_a_failure_of_what_it_verified(monkeypatch):
    """As one does whose kernel writes where it must not."""
    monkeypatch.setattr(run, "_verify_task", die)
    every = [c for c in cases_of("Adam", everything=False) if c.storage is None][-3:]
    assert len(together(every)) == 1, "or more processes are started than are needed here"
    results = [r for some in run.verify_all(every, [EAGER], seed=0, jobs=2) for r in some]
    assert {r.case for r in results} == set(every)
    assert all("a process died" in r.failures[0].what for r in results)


def test_of_many_failures_some_of_each_case_are_shown(capsys):
    which = cases_of("Adam", everything=False)
    results = [run.Result(c, {}, [run.Failure(EAGER, f"wrong {k}") for k in range(12)]) for c in which]
    verify._report(results, [EAGER], 1.0)
    said = capsys.readouterr().out
    assert f"FAILED on cpu eager: {12 * len(which)} complaints." in said
    assert said.count("  wrong 0\n  wrong 1\n  ... and 10 more\n") == verify.CASES_SHOWN
    assert f"... and {len(which) - verify.CASES_SHOWN} more cases." in said
