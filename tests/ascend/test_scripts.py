"""Scripts written for Ascend run unmodified, and print the values of the formulas."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.meaning.by_hand import (
    AdamByHand,
    AdamPByHand,
    BertAdamByHand,
    EmaAdamByHand,
    LambByHand,
    RMSpropTFByHand,
    clipped,
    norm_by_hand,
)
from tests.meaning.judge import judge
from tests.support import F32, F64, assert_rounded

SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FUSEDADAM_DEVICE")}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1"}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    def run(script, *arguments):
        """What it printed, and what it said besides."""
        command = [sys.executable, "-m", "fusedadam", "run", "-q", "--device", request.param, SCRIPTS / script]
        done = subprocess.run([*command, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    return run


def tensor(shown):
    return torch.tensor(shown["values"], dtype=getattr(torch, shown["dtype"]))


def tensors(shown):
    return {name: tensor(value) for name, value in shown.items()}


def larger(a, b):
    return torch.maximum(a.abs(), b.abs())


def judge_average(by_hand, stored, label):
    """After `judge`: the average of what the formula has, rounded once; the next step starts from what is stored."""
    assert_rounded(stored, by_hand.s, 4 * larger(by_hand.p, by_hand.s), F32, f"{label} average")
    by_hand.s = stored.double()


def float32(**attributes):
    return {name: float(np.float32(value)) for name, value in attributes.items()}


ADAMW = float32(lr=1e-3, beta1=0.9999, beta2=0.9999, weight_decay=0.1, eps=1e-8)


def operator_by_hand(row, first):
    """As the script begins it."""
    full = lambda value: torch.full((10, 10), value).to(first.dtype).double()  # noqa: E731
    if row["operator"] == "adamw":
        options = {k: v for k, v in ADAMW.items() if "beta" not in k} | {"betas": (ADAMW["beta1"], ADAMW["beta2"])}
        hand = AdamByHand(full(0.5), **options, amsgrad=row["amsgrad"], maximize=row["maximize"])
        hand.m, hand.v, hand.x = full(0.9), full(0.9), torch.full((10, 10), 0.9).double()
        return hand
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "ema_decay": 0.75}
    return EmaAdamByHand(full(0.5), **options, mode=row["mode"], bias_correction=row["bias_correction"])


def test_operators(run):
    rows, _ = run("operators.py")
    assert len(rows) == 3 * (3 + 3) * 3
    for k, row in enumerate(rows):
        shown = tensors({name: value for name, value in row.items() if isinstance(value, dict)})
        if k % 3 == 0:
            hand = operator_by_hand(row, shown["p"])
        label = f"{row['operator']} {shown['p'].dtype} row {k}"
        state = {"step": k % 3 + 1, "exp_avg": shown["m"], "exp_avg_sq": shown["v"]}
        judge(hand, shown["p"], state, shown["grad"], label)
        if row["operator"] == "ema":
            judge_average(hand, shown["s"], label)
        elif row["amsgrad"]:
            assert_rounded(shown["x"], hand.x, 4 * hand.x, F32, f"{label} maximum")
            hand.x = shown["x"].double()
        else:
            assert (shown["x"] == torch.tensor(0.9)).all(), "not touched without amsgrad"


def optimizer_by_hand(name, options, param):
    options = {key: tuple(value) if key == "betas" else value for key, value in options.items()}
    if name == "NpuFusedAdamW":
        return AdamByHand(param, **{"weight_decay": 1e-2, **options})
    if name == "NpuFusedAdamP":
        return AdamPByHand(param, **options)
    if name == "NpuFusedBertAdam":
        return BertAdamByHand(param, **{"b2": 0.99, **options})
    theirs = {"use_num_updates": True, "adam_w_mode": True, "weight_decay": 1e-2, **options}
    mode, warmup = int(theirs.pop("adam_w_mode")), theirs.pop("use_num_updates")
    return EmaAdamByHand(param, mode=mode, warmup=warmup, **theirs)


def test_optimizers(run):
    runs, said = run("optimizers.py")
    names = [own["class"] for own in runs]
    assert names[::2] == names[1::2] == ["NpuFusedAdamW", "NpuFusedAdamP", "NpuFusedBertAdam", "FusedEmaAdamW"]
    projected = []
    for own in runs:
        start = [tensor(shown) for shown in own["start"]]
        assert [str(p.dtype)[6:] for p in start].count("float16") == 3
        hands = [optimizer_by_hand(own["class"], own["options"], p.double()) for p in start[:-1]]
        for k, step in enumerate(own["steps"]):
            *params, without = map(tensor, step["params"])
            *states, nothing = map(tensors, step["states"])
            assert torch.equal(without, start[-1])
            assert nothing == {}
            for n, (hand, param, state) in enumerate(zip(hands, params, states, strict=True)):
                label = f"{own['class']} {own['options']} step {k} parameter {n}"
                judge(hand, param, state, tensor(step["grads"][n]), label)
                if "ema_params" in state:
                    judge_average(hand, state["ema_params"], label)
                projected.append(getattr(hand, "projection", ""))
        moved = [not torch.equal(tensor(shown), p) for shown, p in zip(own["steps"][-1]["params"], start, strict=True)]
        assert moved == [True] * 6 + [False]
    assert {"none", "channel"} <= set(projected), "both ways of AdamP were judged"
    assert said.count("NpuFusedBertAdam: b2 is not given") == 1


def test_mixed_precision(run):
    """Each step by hand from the gradients that it had; the one with infinite gradients changes nothing."""
    printed, _ = run("mixed_precision.py")
    infinite, options = printed["infinite"], printed["options"] | {"betas": tuple(printed["options"]["betas"])}
    for training in printed["runs"]:
        begun = 2.0**10
        scales = [begun] * (infinite + 1) + [begun / 2 if training["dynamic"] else begun] * 3
        for name in ("ours", "torch"):
            steps = training[name]
            assert [step["scale"] for step in steps] == scales, name
            assert {step["computed in"] for step in steps} == {"torch.float16"}
            assert steps[-1]["loss"] < steps[0]["loss"]
        hands = [AdamByHand(torch.tensor(p, dtype=F64), **options) for p in printed["start"]]
        for k, step in enumerate(training["ours"]):
            lists = step["params"], step["grads"], *step["moments"]
            params, grads, *moments = ([torch.tensor(values) for values in own] for own in lists)
            for n, hand in enumerate(hands):
                state = {"step": step["counts"][n], "exp_avg": moments[0][n], "exp_avg_sq": moments[1][n]}
                if k == infinite:
                    assert not torch.isfinite(grads[n]).all()
                    for stored, before in ((params[n], hand.p), (moments[0][n], hand.m), (moments[1][n], hand.v)):
                        assert torch.equal(stored.double(), before)
                    assert state["step"] == hand.t
                else:
                    judge(hand, params[n], state, grads[n], f"step {k} parameter {n}")
        for ours, theirs in zip(training["ours"][-1]["params"], training["torch"][-1]["params"], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-4)


def test_clipping(run):
    rows, _ = run("clipping.py")
    assert {(row["class"], row["norm_type"]) for row in rows} >= {("NpuFusedAdamW", "inf"), ("NpuFusedBertAdam", "2")}
    for row in rows:
        label, order = f"{row['class']} {row['max_norm']} {row['norm_type']}", float(row["norm_type"])
        before = [torch.tensor(values, dtype=F64) for values in row["before"][:-1]]
        flat = torch.cat([grad.flatten() for grad in before]).abs()
        norm = norm_by_hand(before) if order == 2 else flat.max().item() if order == math.inf else flat.sum().item()
        assert row["total"] == pytest.approx(norm, rel=3e-7), label
        assert row["torch's total"] == pytest.approx(norm, rel=1e-3), label  # a norm of float16 is float16 in torch
        assert row["is tensor"]
        assert row["in place"]
        assert row["ours"][-1] is row["torch"][-1] is None
        for k, expected in enumerate(clipped(before, row["max_norm"], norm)):
            close = {"rtol": 2**-11 if k == 2 else 4e-7, "atol": 0.0}  # the third is in float16
            torch.testing.assert_close(torch.tensor(row["ours"][k], dtype=F64), expected, **close, msg=f"{label} {k}")
            torch.testing.assert_close(torch.tensor(row["torch"][k], dtype=F64), expected, rtol=2e-3, atol=0)


def test_checkpoints_between_torch_and_npu_fused_adamw(run, tmp_path):
    rows, _ = run("checkpoints.py", tmp_path)
    assert {(row["first"].split(".")[0], row["second"].split(".")[0]) for row in rows} == {
        ("torch", "fusedadam"), ("fusedadam", "torch"),
    }  # fmt: skip
    for row in rows:
        options = row["options"] | {"betas": tuple(row["options"]["betas"]), "amsgrad": row["amsgrad"]}
        for n, (start, end) in enumerate(zip(row["start"], row["end"], strict=True)):
            hand = AdamByHand(torch.tensor(start, dtype=F64), **options)
            for grads in row["grads"]:
                hand.step(torch.tensor(grads[n], dtype=F64))
            torch.testing.assert_close(torch.tensor(end, dtype=F64), hand.p, rtol=0, atol=2e-7)
        assert row["counts"] == [6.0, 6.0]


TORCHS = {
    "NpuFusedSGD": torch.optim.SGD, "NpuFusedAdam": torch.optim.Adam, "NpuFusedAdadelta": torch.optim.Adadelta,
    "NpuFusedRMSprop": torch.optim.RMSprop, "AdamW": torch.optim.AdamW, "FusedTorchAdamW": torch.optim.AdamW,
}  # fmt: skip
NPUS_LAMB = {"weight_decay": 0, "bias_correction": False, "max_weight_norm": 10.0}


def test_neighbours(run):
    """Against torch.optim where it has them, else by hand, both in float64 from the gradients that were printed."""
    runs, _ = run("neighbours.py")
    for own in runs:
        name, options = own["class"], {k: tuple(v) if k == "betas" else v for k, v in own["options"].items()}
        start = [torch.tensor(values, dtype=F64) for values in own["start"]]
        params = [torch.nn.Parameter(p.clone()) for p in start[:-1]]
        if name in TORCHS:
            oracle = TORCHS[name](params, **options)
        elif name == "NpuFusedLamb":
            hands = [LambByHand(p.detach(), **{**NPUS_LAMB, **options}) for p in params]
        else:
            assert name == "NpuFusedRMSpropTF"
            hands = [RMSpropTFByHand(p.detach(), **options) for p in params]
        for k, step in enumerate(own["steps"]):
            grads = [torch.tensor(values, dtype=F64) for values in step["grads"]]
            if name in TORCHS:
                for p, grad in zip(params, grads, strict=True):
                    p.grad = grad
                oracle.step()
                expected = [p.detach() for p in params]
            else:
                norm = {"norm": norm_by_hand(grads)} if name == "NpuFusedLamb" else {}
                for hand, grad in zip(hands, grads, strict=True):
                    hand.step(grad, **norm)
                expected = [hand.p for hand in hands]
            *found, without = (torch.tensor(values, dtype=F64) for values in step["params"])
            assert torch.equal(without, start[-1]), "it has no gradient"
            for n, (p, q) in enumerate(zip(found, expected, strict=True)):
                label = f"{name} {options} step {k} parameter {n}"
                torch.testing.assert_close(p, q, rtol=1e-6, atol=2e-6, msg=lambda text, label=label: f"{label}: {text}")
        assert not torch.equal(torch.tensor(own["steps"][-1]["params"][0], dtype=F64), start[0]), name


def test_apply_adam(run):
    rows, _ = run("apply_adam.py")
    lr, b1, b2, eps, decay = 0.01, 0.9, 0.99, 1e-6, 0.1
    assert len(rows) == 7
    for row in rows:
        name, p = row["name"], torch.tensor(row["start"], dtype=F64)
        m, v, s = torch.zeros_like(p), torch.zeros_like(p), p.clone()
        for t, values in enumerate(row["grads"], 1):
            g = torch.tensor(values, dtype=F64)
            if name == "npu_bert_apply_adam":
                g = g / max(1.0, norm_by_hand([g]) / 0.1)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            c1, c2 = 1 - b1**t, 1 - b2**t
            if name in ("npu_apply_adam", "nesterov"):
                along = b1 * m + (1 - b1) * g if name == "nesterov" else m
                p = p - lr * math.sqrt(c2) / c1 * along / (v.sqrt() + eps)
            elif name == "npu_bert_apply_adam":
                p = p - lr * (m / (v.sqrt() + eps) + decay * p)
            elif name == "mbart":
                p = p - 0.05 * m / (v.sqrt() + eps) - lr * decay * p
            else:
                p = p * (1 - lr * decay) - lr * (m / c1) / ((v / c2).sqrt() + eps)
            s = 0.5 * s + 0.5 * p
        for values, expected in zip(row["out"], (p, m, v, s)[: len(row["out"])], strict=True):
            close = {"rtol": 2e-6, "atol": 1e-9, "msg": lambda text, name=name: f"{name}: {text}"}
            torch.testing.assert_close(torch.tensor(values, dtype=F64), expected, **close)
