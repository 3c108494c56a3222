"""What the tests share: where a rule can run, the rules' test table, and how far apart two results are."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedadam import backends
from fusedadam.cli.verify.bounded import ulp
from fusedadam.clipping import clip
from fusedadam.engine.launch import Amp, Launches
from fusedadam.engine.member import Member
from fusedadam.engine.scalars import Options
from fusedadam.formats import compute_dtype
from fusedadam.optimizers.adadelta import adadelta
from fusedadam.optimizers.adafactor import adafactor
from fusedadam.optimizers.adamp import adamp
from fusedadam.optimizers.adamw import adam
from fusedadam.optimizers.adan import adan
from fusedadam.optimizers.ademamix import ademamix
from fusedadam.optimizers.bert_adam import CLIPS, bert_adam
from fusedadam.optimizers.ema_adamw import ema_adam
from fusedadam.optimizers.lamb import lamb
from fusedadam.optimizers.lion import lion
from fusedadam.optimizers.nadam import nadam
from fusedadam.optimizers.radam import radam
from fusedadam.optimizers.rmsprop import rmsprop
from fusedadam.optimizers.schedule_free import schedule_free
from fusedadam.optimizers.sgd import sgd
from fusedadam.rules.rule import PARAM_FLAGS, PARAM_SCALARS, Rule
from fusedadam.tensors.factored import shape_in

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
DTYPES = (F32, BF16, F16, F64)

# where a rule can run: (device, backend); on the CPU Triton is interpreted
PLACES = [
    pytest.param(("cpu", "numba"), id="cpu-numba"),
    pytest.param(("cpu", "eager"), id="cpu-eager"),
    pytest.param(
        ("cpu", "triton"),
        id="cpu-triton",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton is tested there"),
    ),
    pytest.param(("cuda", "triton"), id="cuda-triton", marks=pytest.mark.gpu),
    pytest.param(("cuda", "eager"), id="cuda-eager", marks=pytest.mark.gpu),
]

# Whether a formula is right is asked of Triton's interpreter, which takes long, by the exhaustive tests alone: that all
# backends give the same bits is tested anyway (tests/backends).
QUICK_PLACES = [
    pytest.param(*p.values, id=p.id, marks=[*p.marks, pytest.mark.exhaustive]) if p.id == "cpu-triton" else p
    for p in PLACES
]


def available() -> list[tuple[str, str]]:
    """The places that are on this machine."""
    gpu = torch.cuda.is_available()
    return [p.values[0] for p in PLACES if (p.values[0] != ("cpu", "triton") if gpu else p.values[0][0] == "cpu")]


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_program(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which must succeed."""
    command, variables = [sys.executable, "-c", program, *arguments], {**os.environ, **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


def forget_default_device() -> None:
    """``set_default_device(None)``, after which ``get_default_device`` of torch 2.6 fails for want of a device."""
    torch.set_default_device(None)
    if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", 0) is None:
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


def _takes_lr_of_one_dimension() -> bool:
    param = torch.zeros(1, requires_grad=True)
    param.grad = torch.ones(1)
    try:
        torch.optim.AdamW([param], lr=torch.tensor([0.1])).step()
    except TypeError:
        return False
    return True


# Ours are compared to torch.optim, which has both of these in torch 2.8 and neither in 2.6.
LR_OF_ONE_DIMENSION = _takes_lr_of_one_dimension()
SAVES_HOW_WEIGHTS_DECAY = "decoupled_weight_decay" in torch.optim.Adam([torch.zeros(1)]).state_dict()["param_groups"][0]

ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.5}
EMA = {**ADAM, "ema_decay": 0.99, "ema_warmup": 0.0, "bias_correction": 1.0}
ADAMP = {**ADAM, "delta": 0.1, "wd_ratio": 0.1}
BERT = {"lr": 1e-2, "b1": 0.9, "b2": 0.99, "e": 1e-6, "weight_decay": 0.1, "max_grad_norm": 1.5}
BERT |= {"warmup": -1, "t_total": -1, "schedule": "warmup_linear"}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1, "max_grad_norm": 1.5}
RMSPROP = {"lr": 1e-2, "alpha": 0.9, "eps": 1e-8, "momentum": 0.9, "weight_decay": 0.1, "max_grad_norm": 1.5}
RMSPROP |= {"lr_in_momentum": 1.0}
ADADELTA = {"lr": 0.5, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 1.5}
LAMB = {**ADAM, "eps": 1e-6, "bias_correction": 1.0, "max_weight_norm": 10.0}
# betas that no multiplication rounds: the sign of a sum that cancels must not hang on that
LION = {"lr": 1e-2, "beta1": 0.875, "beta2": 0.75, "weight_decay": 0.1, "max_grad_norm": 1.5}
ADAN = {**ADAM, "beta2": 0.8, "beta3": 0.99}
SCHEDULE_FREE = {**ADAM, "warmup": 5.0}
NADAM = {**ADAM, "anneal": 0.96**0.004}
ADAFACTOR = {"lr": 1e-2, "beta2_decay": -0.8, "eps1": 1e-3, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.1}
ADAFACTOR |= {"max_grad_norm": 1.5}
ADEMAMIX = {
    **ADAM,
    "beta3": 0.999,
    "log_beta1": -0.105,
    "log_beta3": -1e-3,
    "beta3_warmup": 1.0,
    "schedule": "constant",
}
ADEMAMIX |= {"alpha": 2.0, "alpha_warmup": 5.0}


@dataclass(frozen=True)
class Case:
    """One row of the test table: a rule with its flags, and the hyper-parameters to test it with."""

    rule: Rule
    flags: Mapping[str, bool]
    options: Mapping[str, Any] = field(hash=False)
    step: float = 3.0

    @property
    def id(self) -> str:
        return "-".join([self.rule.name, *(name for name, on in self.flags.items() if on)])


def all_flags(rule: Rule, options: Mapping[str, Any], step: float = 3.0, **fixed: bool) -> Iterator[Case]:
    free = [name for name in rule.flags if name not in fixed and name not in PARAM_FLAGS]
    for choice in itertools.product((False, True), repeat=len(free)):
        flags = {**dict(zip(free, choice, strict=True)), **fixed}
        yield Case(rule, {name: flags.get(name, False) for name in rule.flags}, options, step)


def with_flags(rule: Rule, options: Mapping[str, Any], *on: str, step: float = 3.0) -> Case:
    return Case(rule, {name: name in on for name in rule.flags}, options, step)


# rules of one stage, and rules that sum; of those with many flags, the choices that the exhaustive tests add
CASES = [
    *all_flags(adam, ADAM, clipped=False, cautious=False, update_clipping=False),
    *all_flags(ema_adam, EMA, clipped=False),
    with_flags(sgd, SGD, "with_momentum", "nesterov"),
    with_flags(rmsprop, RMSPROP, "centered", "with_momentum"),
    with_flags(adadelta, ADADELTA),
    with_flags(lion, LION),
    with_flags(ademamix, ADEMAMIX),
    with_flags(schedule_free, SCHEDULE_FREE),
    with_flags(adan, ADAN),
    with_flags(radam, ADAM, step=20.0),
    with_flags(nadam, NADAM),
]
MORE_CASES = [
    case
    for case in (
        *all_flags(sgd, SGD, clipped=False),
        *all_flags(rmsprop, RMSPROP, clipped=False),
        *all_flags(adadelta, ADADELTA, clipped=False),
        *all_flags(lion, LION, clipped=False, cautious=False),
        *all_flags(ademamix, ADEMAMIX, clipped=False),
        *all_flags(adan, ADAN, clipped=False),
        *all_flags(schedule_free, SCHEDULE_FREE, clipped=False),
        *all_flags(radam, ADAM, step=20.0, clipped=False),
        *all_flags(nadam, NADAM, clipped=False),
    )
    if case.flags not in [known.flags for known in CASES if known.rule is case.rule]
]
EVERY_CASE = [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in MORE_CASES)]
ALL_ADAMP = list(all_flags(adamp, ADAMP))
SUMMING = [
    *(ALL_ADAMP[k] for k in (0, 3, 5, 6)),  # every pair of flags
    *all_flags(adam, ADAM, clipped=True, maximize=False, cautious=False, update_clipping=False),
    with_flags(adam, ADAM, "decoupled", "cautious"),
    with_flags(adam, ADAM, "decoupled", "cautious", "update_clipping", "amsgrad", "clipped"),
    with_flags(lion, LION, "cautious", "maximize"),
    *all_flags(ema_adam, EMA, clipped=True),
    *(Case(bert_adam, {**dict.fromkeys(bert_adam.flags, False), f"clip_{own}": True}, BERT) for own in CLIPS),
    with_flags(lamb, LAMB),
    with_flags(lamb, LAMB, "use_global_grad_norm", "maximize"),
    with_flags(rmsprop, RMSPROP, "clipped", "with_momentum"),
    with_flags(nadam, NADAM, "clipped", "decoupled", "maximize"),
    with_flags(adafactor, ADAFACTOR),
    with_flags(adafactor, ADAFACTOR, "own_eps", "clipped", "maximize"),
    *(
        Case(clip, {**dict.fromkeys(clip.flags, False), "scaled": True, **norm}, {"max_norm": 1.5, "order": 3.0})
        for norm in ({"euclidean": True}, {"absolute": True}, {"infinite": True}, {})
    ),
]
SIGNED = ("z", "exp_avg_diff", "neg_pre_grad", "exp_avg_fast", "exp_avg_slow")


def sums(make: Callable[..., Any]) -> bool:
    """Whether a step of an optimizer depends on sums over elements."""
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make([param])
    flags = dict(zip(optimizer._flags, optimizer._options()[0][0], strict=True))
    return optimizer.rule.specialize(flags, param).has_sums


def draw(
    case: Case, shapes: Iterable[tuple[int, ...]], dtypes: Sequence[torch.dtype], seed: int = 0
) -> list[dict[str, Tensor]]:
    """Roles on the CPU: param and grad of both signs, second moments positive, all well away from zero."""
    generator = torch.Generator().manual_seed(seed)
    roles = []
    for shape in shapes:
        own = case.rule.specialize(case.flags, torch.empty(shape, device="meta")).roles
        of_roles = {r: shape_in(case.rule.spaces[r], shape) for r in own}
        values = {r: torch.rand(of_roles[r], generator=generator, dtype=F64) + 0.1 for r in own}
        if "mu_product" in values:  # a product of numbers below 1
            values["mu_product"] *= 0.5
        for role in ("param", "grad", "exp_avg", "ema_params", "grad_avg", "momentum_buffer", *SIGNED):
            if role in values:
                values[role] *= torch.where(torch.rand(shape, generator=generator) < 0.5, -1, 1)
        if "grad_avg" in values:  # a variance of about 1, which is what is left of the two averages
            values["square_avg"] += 1 + values["grad_avg"] ** 2
        roles.append({r: v.to(d) for (r, v), d in zip(values.items(), itertools.cycle(dtypes))})
    return roles


def scalars_of(case: Case, step: float | None) -> dict[str, Any]:
    """``step``: another than the case's own."""
    return case.rule.scalars(step=case.step if step is None else step, **case.options)


def apply(
    case: Case, roles: list[dict[str, Tensor]], place: tuple[str, str], step: float | None = None,
    deferred: Collection[str] = (), **amp: Tensor,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """One step on copies of the roles; the results are on the CPU."""
    copies = [{r: t.clone().to(place[0]) for r, t in own.items()} for own in roles]
    apply_in_place(case, copies, place, step, deferred, **amp)
    return [{r: t.cpu() for r, t in own.items()} for own in copies]


def apply_in_place(
    case: Case, roles: list[dict[str, Tensor]], place: tuple[str, str], step: float | None = None,
    deferred: Collection[str] = (), **amp: Tensor,
) -> None:  # fmt: skip
    device, backend = place
    chosen = backends.choose(torch.device(device), backend)
    scalars = scalars_of(case, step)
    launches = Launches(
        [Member(case.rule.specialize(case.flags, own["param"], deferred), chosen, own) for own in roles]
    )
    launches.set_scalars([scalars], np.zeros(len(roles), dtype=np.int64))
    launches.execute(roles, Amp(**amp))


def options_of(hyper_parameters: Sequence[Any], revisions: Iterator[int] = itertools.count(1)) -> Options:  # noqa: B008
    """The options of each group, other ones than before."""
    revision = next(revisions)
    return Options([], list(hyper_parameters), False, False, revision, revision)


def exact(case: Case, roles: list[dict[str, Tensor]], step: float | None = None) -> list[dict[str, Tensor]]:
    """The rule itself in float64, from the same stored values and the same float64 scalars."""
    scalars = {n: torch.tensor(float(v), dtype=F64) for n, v in scalars_of(case, step).items()}
    results = []
    for own in roles:
        specialized = case.rule.specialize(case.flags, own["param"])
        flags = case.flags | {n: ask(own["param"]) for n, ask in PARAM_FLAGS.items() if n in case.rule.flags}
        values = {r: own[r].double() if r in own else None for r in case.rule.roles}
        param = own["param"]
        of_param = {n: torch.tensor(float(ask(param, param.dtype)), dtype=F64) for n, ask in PARAM_SCALARS.items()}
        own = {n: value for n, value in of_param.items() if n in case.rule.scalar_names}
        new = case.rule(**values, **scalars, **own, **flags)
        results.append({r: v for r, v in zip(case.rule.returned, new, strict=True) if r in specialized.outputs})
    return results


def assert_rounded(result: Tensor, expected: Tensor, size: Tensor, compute: torch.dtype, label: str) -> None:
    """Within 2 ulp of ``size`` in the compute dtype, and half an ulp more where storage is coarser than that."""
    allowed = 2 * ulp(size, compute)
    if torch.finfo(result.dtype).eps > torch.finfo(compute).eps:
        allowed = allowed + 0.5 * ulp(expected, result.dtype)
    error = (result.double() - expected.double()).abs()
    assert torch.isfinite(result).all(), label
    assert (error <= allowed).all(), f"{label}: {(error / allowed).max().item():.2f} times what is allowed"


def assert_same_bits(a: Sequence[Mapping[str, Tensor]], b: Sequence[Mapping[str, Tensor]], label: str = "") -> None:
    for k, (x, y) in enumerate(zip(a, b, strict=True)):
        for role in x:
            assert x[role].dtype == y[role].dtype
            assert torch.equal(x[role], y[role]), f"{label} {role} of tensor {k}, shape {tuple(x[role].shape)}"


def assert_scaled_and_skipped(case: Case, roles: list[dict[str, Tensor]], place: tuple[str, str]) -> None:
    """What a GradScaler asks for: the gradients are unscaled, or, with an infinity, nothing is written."""
    scaled = [{**own, "grad": own["grad"] * 8} for own in roles]
    scale, clear, found = (torch.tensor([x], device=place[0]) for x in (8.0, 0.0, 1.0))
    plain = apply(case, roles, place)
    assert_same_bits(plain, apply(case, scaled, place, grad_scale=scale, found_inf=clear), "scaled, and left unscaled")
    assert_same_bits(scaled, apply(case, scaled, place, grad_scale=scale, found_inf=found), "inf: nothing is written")
    assert_same_bits(scaled, apply(case, scaled, place, found_inf=found), "inf without scale: nothing is written")
    assert_same_bits(plain, apply(case, roles, place, found_inf=clear), "no inf, no scale")
    assert_same_bits(plain, apply(case, scaled, place, grad_scale=scale), "scale alone")


def pairwise(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows in which every pair of values of every two columns occurs: greedy, and the same each time."""
    missing = {
        (i, a, j, b)
        for (i, x), (j, y) in itertools.combinations(enumerate(columns), 2)
        for a in range(len(x))
        for b in range(len(y))
    }
    rows = []
    candidates = list(itertools.product(*(range(len(c)) for c in columns)))

    def gain(row: tuple[int, ...]) -> int:
        return sum((i, row[i], j, row[j]) in missing for i, j in itertools.combinations(range(len(row)), 2))

    while missing:
        best = max(candidates, key=gain)
        missing -= {(i, best[i], j, best[j]) for i, j in itertools.combinations(range(len(best)), 2)}
        rows.append(tuple(c[k] for c, k in zip(columns, best, strict=True)))
    return rows


def compute_of(roles: Mapping[str, Tensor]) -> torch.dtype:
    return compute_dtype(roles["param"].dtype)
