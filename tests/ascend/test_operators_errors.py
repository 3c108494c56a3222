"""Errors of Ascend's operators: they name the operator's own arguments, and nothing has been written.

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


def first_phase(get_workspace_size):
    """A status that is not 0, as an error."""

    def call(**arguments):
        status, size, executor = get_workspace_size(**arguments)
        assert (size, executor) == (0, None), "it was not refused"
        raise {161001: NullPointer, 161002: Invalid}[status](ascend.aclGetRecentErrMsg())

    return call


def into_out(operator):
    """torch_npu's operators take the tensors that they write as ``out``, and no step."""

    def call(var, m, v, step, **arguments):
        return operator(**arguments, out=(var, m, v))

    return call


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

    @property
    def has_phases(self):
        return self.var == "varRef"

    def error(self, own):
        return Invalid if self.has_phases else own

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
    first_phase(ascend.aclnnApplyFusedEmaAdamGetWorkspaceSize),
    ("grad", "varRef", "mRef", "vRef", "sRef"),
    ("lr", *BETAS, "weightDecay", "eps", "emaDecay"),
    ("biasCorrection",),
    (("lr", 0.1), ("emaDecay", 0.9), ("beta1", 0.9), ("beta2", 0.99), ("eps", 1e-8), ("mode", 1))
    + (("biasCorrection", True), ("weightDecay", 0.1)),
)
V2 = Operator(
    first_phase(ascend.aclnnApplyAdamWV2GetWorkspaceSize),
    ("varRef", "grad", "mRef", "vRef", "maxGradNormOptionalRef"),
    ("lr", *BETAS, "weightDecay", "eps"),
    ("amsgrad", "maximize"),
    (("lr", 0.1), ("beta1", 0.9), ("beta2", 0.99), ("eps", 1e-8), ("weightDecay", 0.1), ("amsgrad", True))
    + (("maximize", False),),
)
APPLY = (("lr", 0.1), ("beta1", 0.9), ("beta2", 0.99), ("epsilon", 1e-8))
POWERS = (("beta1_power", 0.5), ("beta2_power", 0.5))
ADAM_W = Operator(
    into_out(ascend.npu_apply_adam_w),
    ("var", "grad", "m", "v", "max_grad_norm"),
    ("lr", *BETAS, "weight_decay", "epsilon", "beta1_power", "beta2_power"),
    (),
    (*APPLY, *POWERS, ("weight_decay", 0.1), ("amsgrad", True)),
)
TENSORFLOWS = Operator(
    into_out(ascend.npu_apply_adam),
    ("var", "grad", "m", "v"),
    ("lr", *BETAS, "epsilon", "beta1_power", "beta2_power"),
    (),
    (*APPLY, *POWERS),
)
BERT = Operator(
    into_out(ascend.npu_bert_apply_adam),
    ("var", "grad", "m", "v"),
    ("lr", *BETAS, "weight_decay", "epsilon", "global_grad_norm"),
    (),
    (*APPLY, ("weight_decay", 0.1), ("max_grad_norm", -1.0), ("global_grad_norm", 1.0)),
)
APPLYING = {"adam_w": ADAM_W, "adam": TENSORFLOWS, "bert": BERT}
STEPPING = {"adamw_v2": ADAMW, "ema_adamw": EMA, "aclnn": FIRST, "aclnn_v2": V2}
OPERATORS = STEPPING | APPLYING
WITH_STEP = pytest.mark.parametrize("operator", STEPPING.values(), ids=STEPPING)
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
    assert not {*OURS, *(MINDSPEEDS if operator.has_phases else ())} & {*words}, message
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
    message = refused(operator.error(error), name, operator, **{name: make()})
    assert kind != "integer" or "float64" not in message, "it says which dtypes are allowed"


@every_tensor(lambda operator, name: name != "grad")  # which is only read
def test_a_tensor_that_cannot_be_written(operator, name):
    refused(operator.error(RuntimeError), name, operator, **{name: torch.ones(3).expand(2, 3)})


@every_tensor()
def test_a_tensor_that_is_missing(operator, name):
    of_amsgrad = name == "max_grad_norm"
    error = NullPointer if operator.has_phases else ValueError if of_amsgrad else TypeError
    message = refused(error, name, operator, **{name: None})
    assert not of_amsgrad or "amsgrad" in message


AS_VAR = [(own, name) for own in (ADAMW, ADAM_W, TENSORFLOWS, BERT) for name in ("m", "v")]
AS_VAR += [(V2, name) for name in ("mRef", "vRef")]
AS_VAR += [(own, name) for own in (EMA, FIRST) for name in own.tensors if name != own.var]


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


STEPS = [
    (0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError), ([1], TypeError),
    (torch.tensor([0]), ValueError), (torch.tensor([-1]), ValueError), (torch.tensor([1.0]), TypeError),
    (torch.tensor([True]), TypeError), (torch.tensor([1], dtype=torch.int32), TypeError),
    (torch.tensor([1, 2]), TypeError), (torch.tensor([[1]]), TypeError),
    (torch.tensor([], dtype=torch.int64), TypeError),
]  # fmt: skip


@WITH_STEP
@pytest.mark.parametrize(("step", "error"), STEPS, ids=readable)
def test_a_bad_step(operator, step, error):
    if (
        operator is V2
        and isinstance(step, torch.Tensor)
        and step.tolist() in ([0], [1], [[1]])
        and step.dtype in V2_STEPS
    ):
        return  # it counts the steps before, in any shape of one element
    refused(operator.error(error), "step", operator, step=step)


V2_STEPS = (torch.int64, torch.float32)


@pytest.mark.parametrize("step", [[0.5], [float("nan")], [float("inf")], [-1.0]])
def test_a_count_that_is_no_whole_number(step):
    refused(Invalid, "step", V2, step=torch.tensor(step))


@WITH_STEP
def test_a_step_that_is_missing(operator):
    refused(NullPointer if operator.has_phases else TypeError, "step", operator, step=None)


@pytest.mark.parametrize("operator", [FIRST, V2], ids=["aclnn", "aclnn_v2"])
def test_the_two_phase_calls_take_no_int_for_a_step(operator):
    refused(Invalid, "step", operator, step=1)


@WITH_STEP
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
    refused(Invalid, name, V2, **{name: 0.99999999})
    ADAMW.call(**ADAMW.arguments() | {name: 1 - 2**-24})


@pytest.mark.parametrize("name", ADAMW.numbers)
def test_an_attribute_that_is_infinite_in_float32(name):
    refused(ValueError, name, ADAMW, **{name: 1e39})
    called = {"weight_decay": "weightDecay"}.get(name, name)
    refused(Invalid, called, V2, **{called: 1e39})


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


@pytest.mark.parametrize("name", ["beta1_power", "beta2_power"])
def test_powers_out_of_range(name):
    """The power before the first step is 1; a step's own power is below."""
    for value in (-0.1, 1.5):
        refused(ValueError, name, ADAM_W, **{name: value})
        refused(ValueError, name, TENSORFLOWS, **{name: value})
    refused(ValueError, name, TENSORFLOWS, **{name: 1.0})
    ADAM_W.call(**ADAM_W.arguments() | {name: 1.0})


@pytest.mark.parametrize(
    ("operator", "name"),
    [(ADAM_W, "amsgrad"), (ADAM_W, "maximize"), (TENSORFLOWS, "use_locking"), (TENSORFLOWS, "use_nesterov")],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_flags_are_bools_or_none(operator, name):
    for value in ("yes", 0.5, 1, 0):
        refused(TypeError, name, operator, **{name: value})
    operator.call(**operator.arguments() | {name: None})


@pytest.mark.parametrize("value", [2, -1, None, "1", 0.5, True, [1]])
def test_a_mode_of_bert_that_is_neither_0_nor_1(value):
    refused(ValueError, "adam_mode", BERT, adam_mode=value)


def test_berts_own_numbers():
    refused(ValueError, "step_size", BERT, adam_mode=1)
    refused(ValueError, "step_size", BERT, adam_mode=1, step_size=-0.1)
    refused(TypeError, "max_grad_norm", BERT, max_grad_norm=None)
    refused(ValueError, "max_grad_norm", BERT, max_grad_norm=float("nan"))
    BERT.call(**BERT.arguments() | {"step_size": None})


OUTS = [None, torch.ones(3), (torch.ones(3),), (torch.ones(3),) * 4]


@pytest.mark.parametrize("out", OUTS, ids=["None", "a tensor", "one", "four"])
@pytest.mark.parametrize("label", APPLYING)
def test_an_out_that_is_not_three_tensors(label, out):
    operator = {"adam_w": ascend.npu_apply_adam_w, "adam": ascend.npu_apply_adam, "bert": ascend.npu_bert_apply_adam}
    numbers = dict(APPLYING[label].other) | {"amsgrad": False} if label == "adam_w" else dict(APPLYING[label].other)
    with pytest.raises(TypeError, match=r"^out is a .*\(var, m, v\)"):
        operator[label](**numbers, grad=torch.ones(3), out=out)
