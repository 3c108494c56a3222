"""Errors of MindSpeed's and CANN's operators: they name the operator's own arguments, and nothing has been written.

The types of errors are those of ``fusedadam.checks``; the two-phase call returns a status and a reason instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

from fusedadam import ascend
from tests.support import BF16, F16, F64
from tests.test_checks import ALLOWED, KINDS, VALUES, bits, overlapping, readable

# what others call the same things: no message may
OURS = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "ema", "ema_params")
MINDSPEEDS = ("var", "m", "v", "s", "ema_decay", "bias_correction", "weight_decay")


class NullPointer(Exception):
    pass


class Invalid(Exception):
    pass


def first_phase(**arguments):
    """A status that is not 0, as an error."""
    status, size, executor = ascend.aclnnApplyFusedEmaAdamGetWorkspaceSize(**arguments)
    assert (size, executor) == (0, None), "it was not refused"
    raise {161001: NullPointer, 161002: Invalid}[status](ascend.aclGetRecentErrMsg())


@dataclass
class Operator:
    call: object
    tensors: tuple[str, ...]  # the parameter second or first, as the page has it
    numbers: tuple[str, ...]
    flags: tuple[str, ...]
    other: tuple[tuple[str, object], ...] = ()

    @property
    def var(self):
        return next(name for name in self.tensors if name.startswith("var"))

    def error(self, own):
        return own if self.call is not first_phase else Invalid

    def arguments(self):
        block = {name: torch.full((2, 3), 0.5) for name in self.tensors}
        return {**block, "step": torch.tensor([2]), **dict(self.other)}


BETAS = ("beta1", "beta2")
ADAMW = Operator(
    ascend.npu_apply_fused_adamw_v2,
    ("var", "grad", "m", "v", "max_grad_norm"),
    ("lr", *BETAS, "weight_decay", "eps"),
    ("amsgrad", "maximize"),
    (("amsgrad", True),),
)
EMA = Operator(
    ascend.npu_apply_fused_ema_adamw,
    ("grad", "var", "m", "v", "s"),
    ("lr", *BETAS, "weight_decay", "eps", "ema_decay"),
    ("bias_correction",),
)
FIRST = Operator(
    first_phase,
    ("grad", "varRef", "mRef", "vRef", "sRef"),
    ("lr", *BETAS, "weightDecay", "eps", "emaDecay"),
    ("biasCorrection",),
    (("lr", 0.1), ("emaDecay", 0.9), ("beta1", 0.9), ("beta2", 0.99), ("eps", 1e-8), ("mode", 1))
    + (("biasCorrection", True), ("weightDecay", 0.1)),
)
OPERATORS = {"adamw_v2": ADAMW, "ema_adamw": EMA, "aclnn": FIRST}
EVERY = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
AVERAGING = pytest.mark.parametrize("operator", [EMA, FIRST], ids=["ema_adamw", "aclnn"])


def every_tensor(which=lambda operator, name: True):
    pairs = [(label, own, name) for label, own in OPERATORS.items() for name in own.tensors if which(own, name)]
    own = [pytest.param(operator, name, id=f"{label}-{name}") for label, operator, name in pairs]
    return pytest.mark.parametrize(("operator", "name"), own)


def refused(error, name, operator, **changed):
    """The message has the argument's name as a word of its own, and no one else's; all tensors are as they were."""
    arguments = operator.arguments() | changed
    tensors = [t for v in arguments.values() for t in (v if isinstance(v, list) else [v])]
    before = [bits(t) for t in tensors]
    with pytest.raises(error, match=ALLOWED) as caught:
        operator.call(**arguments)
    assert all(new is old or new == old for new, old in zip(map(bits, tensors), before, strict=True))
    message = str(caught.value)
    words = re.findall(r"(?<!')\b\w+", message)
    assert name in words, message
    assert not {*OURS, *(MINDSPEEDS if operator is FIRST else ())} & {*words}, message
    return message


TENSORS = {
    "shape": (lambda: torch.ones(3, 2), RuntimeError),
    "one element more": (lambda: torch.ones(2, 4), RuntimeError),
    "as many elements": (lambda: torch.ones(6), RuntimeError),
    "float64": (lambda: torch.ones(2, 3, dtype=F64), RuntimeError),
    "integer": (lambda: torch.ones(2, 3, dtype=torch.int32), RuntimeError),
    "bool": (lambda: torch.ones(2, 3, dtype=torch.bool), RuntimeError),
    "complex": (lambda: torch.ones(2, 3, dtype=torch.complex64), RuntimeError),
    "sparse": (lambda: torch.ones(2, 3).to_sparse(), RuntimeError),
    "meta": (lambda: torch.ones(2, 3, device="meta"), RuntimeError),
    "a list": (lambda: [torch.ones(2, 3)], TypeError),
    "a number": (lambda: 1.0, TypeError),
}


@every_tensor()
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_that_does_not_fit(operator, name, kind):
    make, error = TENSORS[kind]
    refused(operator.error(error), name, operator, **{name: make()})


@every_tensor(lambda operator, name: name != "grad")  # which is only read
def test_a_tensor_that_cannot_be_written(operator, name):
    refused(operator.error(RuntimeError), name, operator, **{name: torch.ones(3).expand(2, 3)})


@every_tensor()
def test_a_tensor_that_is_missing(operator, name):
    error = NullPointer if operator is FIRST else ValueError if name == "max_grad_norm" else TypeError
    refused(error, name, operator, **{name: None})


def test_a_missing_step_is_a_null_pointer_too():
    refused(NullPointer, "step", FIRST, step=None)


@every_tensor()
def test_the_dtypes_that_a_message_allows_are_those_that_are_allowed(operator, name):
    message = refused(operator.error(RuntimeError), name, operator, **{name: torch.ones(2, 3, dtype=torch.int32)})
    assert "float64" not in message


AS_VAR = [(ADAMW, name) for name in ("m", "v")] + [
    (own, name) for own in (EMA, FIRST) for name in own.tensors if name != own.var
]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("operator", "name"), AS_VAR, ids=lambda v: v if isinstance(v, str) else v.var)
def test_dtypes_that_must_be_equal(operator, name, dtype):
    """Neither may the parameter be another than all the rest."""
    error = operator.error(RuntimeError)
    message = refused(error, name, operator, **{name: torch.ones(2, 3, dtype=dtype)})
    assert operator.var in message
    refused(error, operator.var, operator, **{operator.var: torch.ones(2, 3, dtype=dtype)})


@every_tensor(lambda operator, name: name != operator.var)
@pytest.mark.parametrize("kind", ["same", "partly"])
def test_tensors_that_share_memory(operator, name, kind):
    first, second = overlapping(kind)
    message = refused(operator.error(RuntimeError), name, operator, **{operator.var: first, name: second})
    assert operator.var in message


@pytest.mark.parametrize("kind", TENSORS)
def test_a_maximum_that_is_not_used_is_looked_at_all_the_same(kind):
    make, error = TENSORS[kind]
    refused(error, "max_grad_norm", ADAMW, max_grad_norm=make(), amsgrad=False)


def test_amsgrad_needs_the_maximum_and_says_so():
    assert "amsgrad" in refused(ValueError, "max_grad_norm", ADAMW, max_grad_norm=None)


STEPS = [
    (0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError), ([1], TypeError),
    (torch.tensor([0]), ValueError), (torch.tensor([-1]), ValueError), (torch.tensor([1.0]), TypeError),
    (torch.tensor([True]), TypeError), (torch.tensor([1], dtype=torch.int32), TypeError),
    (torch.tensor([1, 2]), TypeError), (torch.tensor([[1]]), TypeError),
    (torch.tensor([], dtype=torch.int64), TypeError),
]  # fmt: skip


@EVERY
@pytest.mark.parametrize(("step", "error"), STEPS, ids=readable)
def test_a_bad_step(operator, step, error):
    refused(operator.error(error), "step", operator, step=step)


@pytest.mark.parametrize("operator", [ADAMW, EMA], ids=["adamw_v2", "ema_adamw"])
def test_a_step_that_is_missing(operator):
    refused(TypeError, "step", operator, step=None)


def test_the_two_phase_call_takes_no_int_for_a_step():
    refused(Invalid, "step", FIRST, step=1)


@EVERY
@pytest.mark.parametrize("name", ["step", "lr"])
def test_a_number_without_memory(operator, name):
    refused(operator.error(RuntimeError), name, operator, **{name: torch.ones(1, dtype=torch.int64, device="meta")})


@EVERY
@pytest.mark.parametrize(("value", "error"), KINDS + VALUES, ids=readable)
def test_a_bad_number(operator, value, error):
    for name in operator.numbers:
        refused(operator.error(error), name, operator, **{name: value})


@EVERY
@pytest.mark.parametrize("value", [1.0, 1, 1.5])
def test_betas_must_be_below_one(operator, value):
    for name in BETAS:
        assert "[0, 1)" in refused(operator.error(ValueError), name, operator, **{name: value})


@pytest.mark.parametrize("name", BETAS)
def test_a_beta_that_is_one_in_float32(name):
    """Its bias correction would be 0. One float32 below is the largest that is taken."""
    refused(ValueError, name, ADAMW, **{name: 0.99999999})
    ADAMW.call(**ADAMW.arguments() | {name: 1 - 2**-24})


@pytest.mark.parametrize("name", ADAMW.numbers)
def test_an_attribute_that_is_infinite_in_float32(name):
    refused(ValueError, name, ADAMW, **{name: 1e39})


@AVERAGING
@pytest.mark.parametrize("value", [1.001, 2])
def test_a_decay_above_one(operator, value):
    name = next(name for name in operator.numbers if name.startswith("ema"))
    assert "[0, 1]" in refused(operator.error(ValueError), name, operator, **{name: value})


@EVERY
def test_an_integer_beyond_all_floats(operator):
    """The two-phase call even raises, where a status was promised."""
    refused(operator.error(ValueError), "lr", operator, lr=10**400)


@EVERY
@pytest.mark.parametrize("value", [None, "yes", 0.5, 1, 0])
def test_a_flag_that_is_no_bool(operator, value):
    for name in operator.flags:
        refused(operator.error(TypeError), name, operator, **{name: value})


@AVERAGING
@pytest.mark.parametrize("value", [2, -1, None, "1", 0.5, True, [1]])
def test_a_mode_that_is_neither_0_nor_1(operator, value):
    refused(operator.error(ValueError), "mode", operator, mode=value)
