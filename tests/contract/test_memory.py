"""What a person sees who prints an optimizer, in a notebook or a debugger."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import fusedadam
from fusedadam import backends
from fusedadam.contract import memory

BF16, F32 = torch.bfloat16, torch.float32
STEP_BYTES = 4


def stepped(make=fusedadam.AdamW, shapes=((3, 4), (5,)), dtype=F32, **options):
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    optimizer = make(params, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def last_lines(optimizer):
    return repr(optimizer).splitlines()[-3:]


def rows(text):
    """Each line of the table by its first cells: name and dtype."""
    cells = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    return {tuple(row[:-3]) if len(row) > 3 else row[0]: row[-3:] for row in cells}


def test_repr_says_device_backend_and_bytes_of_state():
    optimizer = stepped()
    state = 2 * 17 * 4 + 2 * STEP_BYTES
    assert last_lines(optimizer)[0] == "Device: cpu (served by numba)"
    assert last_lines(optimizer)[1].startswith(f"State: {state} bytes (")
    assert all(name in last_lines(optimizer)[1] for name in ("exp_avg", "exp_avg_sq", "step"))
    assert repr(optimizer).startswith(torch.optim.Optimizer.__repr__(optimizer).removesuffix(")"))


def test_every_device_and_backend_is_named():
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2))], "backend": "eager"},
        {"params": [torch.nn.Parameter(torch.ones(2))]},
    ]
    optimizer = fusedadam.AdamW(groups)
    groups[1]["params"].append(torch.nn.Parameter(torch.ones(2, device="meta")))
    assert last_lines(optimizer)[0] == "Device: cpu (served by eager and numba), meta (served by eager)"


def test_asking_neither_imports_a_backend_nor_warns():
    """Printing an optimizer must not compile anything, or use up a warning that belongs to the first step."""
    program = """
import sys, warnings, torch, fusedadam
warnings.simplefilter("error")
optimizer = fusedadam.AdamW([torch.nn.Parameter(torch.ones(2))])
repr(optimizer), optimizer.memory_summary()
print("numba" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout.split() == ["False"], done.stderr


class Silent(torch.Tensor):
    @property
    def dtype(self):
        raise RuntimeError("ask me nothing")


def test_repr_never_fails_whatever_a_tensor_answers():
    optimizer = stepped()
    param = next(iter(optimizer.state))
    optimizer.state[param]["exp_avg"] = torch.zeros(3, 4).as_subclass(Silent)
    assert repr(optimizer) == torch.optim.Optimizer.__repr__(optimizer)


def test_the_summary_counts_every_byte_by_state_and_dtype():
    optimizer = stepped(fusedadam.EmaAdamW, dtype=BF16, state_dtype=F32, ema_dtype=torch.float64)
    found = rows(optimizer.memory_summary())
    assert found["parameters", "bfloat16"] == ["2", "17", "34 bytes"]
    assert found["gradients", "bfloat16"] == ["2", "17", "34 bytes"]
    assert found["exp_avg", "float32"] == found["exp_avg_sq", "float32"] == ["2", "17", "68 bytes"]
    assert found["ema_params", "float64"] == ["2", "17", "136 bytes"]
    assert found["step", "float32"] == ["2", "2", "8 bytes"]
    assert optimizer.memory_summary().splitlines()[0].endswith("2 parameters of 17 elements, 280 bytes of state")


def test_the_tables_are_counted_once():
    """On a CPU the words on the host and the table that kernels read are one."""
    optimizer = stepped(max_grad_norm=1.0)
    (launch,) = optimizer._stepper.last_plan.launches
    expected = launch.table.words.nbytes + sum(t.nbytes for t in launch.table.partials.values())
    tables = [k.bytes for k in memory._tables(optimizer)]
    assert sum(tables) == expected > 0
    assert f"{memory.readable(expected)}" in optimizer.memory_summary()


def test_stepping_in_backward_has_tables_for_each_parameter():
    model = torch.nn.Linear(3, 2)
    optimizer = fusedadam.step_in_backward(model, fusedadam.AdamW)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert len(list(memory._tables(optimizer))) == 2


def test_an_expanded_gradient_takes_the_memory_of_what_exists():
    optimizer = stepped(shapes=((3, 4),))
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(1).expand(3, 4)
    assert rows(optimizer.memory_summary())["gradients", "float32"] == ["1", "12", "4 bytes"]


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 52, "4096.0 TiB")],
)
def test_bytes_in_words(count, said):
    assert memory.readable(count) == said


def test_it_is_cheap_for_a_thousand_parameters():
    import time

    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(1000)]
    optimizer = fusedadam.AdamW(params)
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    taken = []
    for _ in range(3):  # of processor time: what other programs take meanwhile does not count
        began = time.process_time()
        repr(optimizer)
        taken.append(time.process_time() - began)
    assert min(taken) < 0.5


EXACTLY = "  2 parameters of 516 elements are kept exactly: fewer than 2 dimensions"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, []),
        (
            {"storage": "8bit"},
            ["5.09 bytes a parameter, weights and states (param bf16+8, exp_avg slice8, exp_avg_sq slice8)", EXACTLY],
        ),
        (
            {"storage": "16bit"},
            ["8.00 bytes a parameter, weights and states (param bf16+16, exp_avg bf16, exp_avg_sq bf16)"],
        ),
        (
            {"storage": "8bit", "amsgrad": True},
            [
                "12.05 bytes a parameter, weights and states (param bf16+8, exp_avg slice8)",
                "  exp_avg_sq and max_exp_avg_sq of 1 parameter of 131,072 elements are kept in float32: the maximum "
                "of a rounded average only grows",
                EXACTLY,
            ],
        ),
        (
            {"storage": "8bit", "betas": (0.995, 0.999)},
            [
                "6.05 bytes a parameter, weights and states (param bf16+8, exp_avg_sq slice8)",
                "  exp_avg of 1 parameter of 131,072 elements is kept in bf16: beta1 is above 0.99: the noise of 8 "
                "bits drowns so slow an average",
                EXACTLY,
            ],
        ),
    ],
    ids=str,
)
def test_both_say_what_storage_keeps_each_role_in_and_what_stays_wider_and_why(options, said):
    optimizer = fusedadam.AdamW([torch.nn.Parameter(torch.ones(256, 512, dtype=BF16))], **options)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(n, dtype=BF16)) for n in (512, 4)]})
    expected = [f"Storage: {said[0]}", *said[1:]] if said else []
    assert repr(optimizer).splitlines()[-2 - len(said) :] == ["State: none yet", *expected, ")"]
    assert optimizer.memory_summary().split("\n\n")[0].splitlines()[1:] == expected


def test_the_bytes_that_storage_promises_are_those_of_the_tensors():
    optimizer = stepped(fusedadam.EmaAdamW, ((64, 96), (96,)), BF16, storage="8bit")
    kept = [t for p in optimizer.state for t in (p, *optimizer.state[p].values()) if t.dim()]
    assert f"Storage: {sum(t.nbytes for t in kept) / (65 * 96):.2f} bytes a parameter" in repr(optimizer)


def test_a_group_without_storage_and_parameters_without_a_shape_are_left_out():
    params = [torch.nn.Parameter(torch.ones(64, 64, dtype=BF16)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "storage": "exact"}]
    groups.append({"params": list(torch.nn.LazyLinear(3).parameters()), "storage": "8bit"})
    lines = fusedadam.AdamW(groups).memory_summary().split("\n\n")[0].splitlines()
    formats = "param bf16+16, exp_avg float32, exp_avg_sq float32"
    assert lines[1:] == [f"Storage: 12.00 bytes a parameter, weights and states ({formats})"]


def test_float32_and_float64_parameters_stay_as_they_are():
    weights = [torch.ones(64, 64, dtype=torch.float64), torch.ones(64, 64)]
    storage = [repr(fusedadam.AdamW([torch.nn.Parameter(w)], storage="8bit")).split("Storage: ")[1] for w in weights]
    assert storage[0].splitlines()[1] == "  1 parameter of 4,096 elements is kept exactly: float64"
    assert storage[1].startswith("6.06 bytes a parameter, weights and states (param float32, exp_avg slice8,")


@pytest.mark.gpu
def test_on_a_gpu_the_device_is_named_and_the_host_keeps_little():
    params = [torch.nn.Parameter(torch.ones(1000, device="cuda"))]
    optimizer = fusedadam.AdamW(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert last_lines(optimizer)[0] == f"Device: cuda:0 (served by {backends.best(params[0].device)[0]})"
    _, there, here = optimizer.memory_summary().split("\n\n")
    assert there.startswith("cuda:0, served by ")
    assert here.startswith("cpu ")
    assert rows(there)["exp_avg", "float32"] == ["1", "1,000", "3.9 KiB"]
    assert rows(here)["step", "float32"] == ["1", "1", "4 bytes"]
