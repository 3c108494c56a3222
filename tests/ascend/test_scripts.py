"""Scripts written for Ascend run unmodified, and print the values of the formulas.

What they do not call is tested without a process of its own: test_install.py has the modules that scripts import.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedadam
from tests.cli.common import ENVIRONMENT
from tests.meaning.by_hand import AdamByHand, AdamPByHand, BertAdamByHand, EmaAdamByHand, norm_by_hand
from tests.meaning.judge import judge
from tests.support import F32, F64, assert_rounded

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    def run(script):
        """What it printed, and what it said besides."""
        command = [sys.executable, "-m", "fusedadam", "run", "-q", "--device", request.param, SCRIPTS / script]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    return run


def tensor(shown):
    return torch.tensor(shown["values"], dtype=getattr(torch, shown["dtype"]))


def tensors(shown):
    return {name: tensor(value) for name, value in shown.items()}


def judge_average(by_hand, stored, label):
    """After `judge`: the average of what the formula has, rounded once; the next step starts from what is stored."""
    size = 4 * torch.maximum(by_hand.p.abs(), by_hand.s.abs())
    assert_rounded(stored, by_hand.s, size, F32, f"{label} average")
    by_hand.s = stored.double()


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


def test_apply_adam(run):
    rows, _ = run("apply_adam.py")
    lr, b1, b2, eps, decay = 0.01, 0.9, 0.99, 1e-6, 0.1
    assert len(rows) == 8
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


@pytest.mark.parametrize("run", ["cpu"], indirect=True)  # two processes: nccl wants a device for each
def test_distributed_muon(run):
    """In processes that the script spawns; the bits of one process."""
    printed, _ = run("distributed_muon.py")
    assert printed["states"] == ["momentum_buffer", "step"]
    shapes = [(6, 4), (5, 7), (4, 6), (1, 3)]

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator) for shape in shapes]

    params = [torch.nn.Parameter(v) for v in draw(0)]
    alone = fusedadam.Muon(params, lr=0.05, weight_decay=0.01, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for param, grad in zip(params, draw(1 + step), strict=True):
            param.grad = grad
        alone.step()
    for param, values in zip(params, printed["params"], strict=True):
        assert torch.equal(torch.tensor(values), param.detach())
