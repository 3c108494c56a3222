"""Every row of the migration guide, executed: the new line takes the steps of the old one.

Most packages are not installed: what they document is written out here, in float64, or an optimizer of torch stands in
where it is the same. Those that are installed are compared as well.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adamp
import pytest
import torch
import transformers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fusedadam
from tests.host_memory import pretended

PAGE = Path(__file__).parent.parent / "docs" / "migration.md"
STEPS, SHAPE = 40, (64, 96)
CLOSE = {"rtol": 2e-6, "atol": 2e-7}
NEAR = {"rtol": 0.0, "atol": 8e-3}  # 40 steps of 1e-3 with 8-bit moments, whose noise is independent
with_8_bits = functools.partial(fusedadam.AdamW, storage="8bit")


def rows() -> Iterator[str]:
    """The first cell of every row of the tables "before, after"."""
    in_table = False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells == ["before", "after"]:
            in_table = True
        elif not cells:
            in_table = False
        elif in_table and set(cells[0]) != {"-"}:
            yield cells[0]


def gradient(step: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Noise around a direction that stays."""
    return 0.1 * (drawn(step, shape) + drawn(999, shape))


def start() -> torch.Tensor:
    return drawn(1000, SHAPE)


def drawn(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(make: Callable[..., Any], dtype: torch.dtype = torch.float32, before: Any = None) -> torch.Tensor:
    """``before``: what is done to the parameter before each step."""
    param = torch.nn.Parameter(start().to(dtype))
    optimizer = make([param])
    for step in range(STEPS):
        param.grad = gradient(step).to(dtype)
        if before is not None:
            before(param)
        optimizer.step()
    return param.detach().float()


class Formula:
    """An optimizer of one parameter: ``update(self, param, grad)`` returns the new weights."""

    def __init__(self, params: list[torch.nn.Parameter], update: Callable[..., torch.Tensor]) -> None:
        (self.param,), self.update, self.t = params, update, 0
        self.p = self.param.detach().double()
        self.m, self.v = torch.zeros_like(self.p), torch.zeros_like(self.p)

    def step(self) -> None:
        self.t += 1
        assert self.param.grad is not None
        self.p = self.update(self, self.p, self.param.grad.double())
        self.param.data.copy_(self.p)


def same(ours: Any, theirs: Any, **bound: float) -> None:
    torch.testing.assert_close(trained(ours), trained(theirs), **(bound or CLOSE))


def same_formula(ours: Any, update: Callable[..., torch.Tensor], **bound: float) -> None:
    same(ours, functools.partial(Formula, update=update), **bound)


def eight_bits(package: str = "", theirs: str = "", offload: bool = False, **options: Any) -> None:
    """Near the steps of float32, for float32 and bfloat16 weights; and near theirs."""
    if offload:  # changes no bit
        with pretended():
            there = trained(functools.partial(with_8_bits, offload=True))
        assert torch.equal(there, trained(with_8_bits))
    expected = trained(torch.optim.AdamW)
    assert (expected - start()).abs().mean() > NEAR["atol"]  # the bound says something
    torch.testing.assert_close(trained(with_8_bits), expected, **NEAR)
    torch.testing.assert_close(trained(with_8_bits, torch.bfloat16), expected, rtol=2**-8, atol=NEAR["atol"])
    if package and importlib.util.find_spec(package) is not None:
        make = functools.partial(getattr(importlib.import_module(f"{package}.optim"), theirs), **options)
        same(with_8_bits, make, rtol=0.0, atol=3 * NEAR["atol"])  # theirs is biased, and has fewer bits


def offloaded(theirs: Any, ours: Any = fusedadam.AdamW, **options: Any) -> None:
    """With the CPU in the place of a GPU. torch's optimizers stand in for the ones that compute on the host."""
    with pretended() as device:
        same(functools.partial(ours, offload=True, **options), theirs)
        assert device.allocated


def deepspeeds(ours: Any, theirs: Any, **options: Any) -> None:
    """With float32 weights on the host: a bfloat16 model has those of float32, rounded, given the same gradients."""
    offloaded(functools.partial(theirs, **options), ours, storage="exact", **options)
    make = functools.partial(ours, storage="exact", offload=True, **options)
    param = torch.nn.Parameter(start().bfloat16())
    master = torch.nn.Parameter(param.detach().float())
    with pretended():
        mine, adam = make([param]), theirs([master], **options)
        for step in range(STEPS):
            param.grad = gradient(step).bfloat16()
            master.grad = param.grad.float()
            mine.step()
            adam.step()
    torch.testing.assert_close(param.float(), master.bfloat16().float(), rtol=2**-7, atol=1e-5)


# --- torch.optim ------------------------------------------------------------------------------------------------------
def clipped() -> None:
    expected = trained(torch.optim.AdamW, before=lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0))
    inside = trained(functools.partial(fusedadam.AdamW, max_grad_norm=1.0))
    first = trained(fusedadam.AdamW, before=lambda p: fusedadam.clip_grad_norm_([p], 1.0))
    for ours in (inside, first):
        torch.testing.assert_close(ours, expected, **CLOSE)


def torchs_names() -> None:
    for name in ("SGD", "RMSprop", "Adadelta", "RAdam", "NAdam", "Adafactor"):
        same(getattr(fusedadam, name), getattr(torch.optim, name), rtol=1e-5, atol=1e-6)


def averaged() -> None:
    models = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    averages = AveragedModel(models[1], multi_avg_fn=get_ema_multi_avg_fn(0.999))
    averages.update_parameters(models[1])  # once before training, as the page says
    ours = fusedadam.EmaAdamW(models[0].parameters(), ema_decay=0.999, ema_warmup=False, lr=1e-2)
    theirs = torch.optim.AdamW(models[1].parameters(), lr=1e-2)
    for step in range(200):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            model.weight.grad = gradient(step, (8, 8))
            optimizer.step()
        averages.update_parameters(models[1])
    with ours.ema_weights():
        torch.testing.assert_close(models[0].weight, averages.module.weight, rtol=1e-4, atol=1e-5)


def muon(theirs: Any, **ours: Any) -> None:
    """As close as their products in bfloat16."""
    near = {"rtol": 0.0, "atol": 2e-3}
    mine = trained(lambda params: fusedadam.Muon([{"params": params, **ours}]))
    assert (mine - start()).abs().mean() > 10 * near["atol"]  # the bound says something
    torch.testing.assert_close(mine, trained(theirs), **near)


def both_of_torchs() -> None:
    """The groups that the page writes down, for a matrix and a vector."""
    ours = [torch.nn.Parameter(start()), torch.nn.Parameter(drawn(5, (7,)))]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    of_adamw = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    one = fusedadam.Muon(
        [
            {"params": ours[:1], "use_muon": True, "lr": 0.02, "weight_decay": 0.1},
            {"params": ours[1:], "use_muon": False, **of_adamw},
        ]
    )
    two = torch.optim.Muon(theirs[:1], lr=0.02), torch.optim.AdamW(theirs[1:], lr=1e-3)
    for step in range(STEPS):
        for params in (ours, theirs):
            for param in params:
                param.grad = gradient(step, tuple(param.shape))
        for optimizer in (one, *two):
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=0.0, atol=2e-3)
    torch.testing.assert_close(ours[1], theirs[1], **CLOSE)


def keller_jordans(o: Formula, p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    o.m = o.m.lerp(g, 1 - 0.95)
    x = g.lerp(o.m, 0.95)
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return p - 0.02 * x


def with_auxiliary_adam() -> None:
    """The matrix takes Muon, and the vector Adam with the defaults of the package."""
    matrix, vector = torch.nn.Parameter(start()), torch.nn.Parameter(drawn(5, (7,)))
    optimizer = fusedadam.Muon(
        [
            {"params": [matrix], "use_muon": True},
            {"params": [vector], "use_muon": False},
        ]
    )
    expected = torch.nn.Parameter(vector.detach().clone())
    adam = torch.optim.AdamW([expected], lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0)
    for step in range(STEPS):
        matrix.grad, vector.grad, expected.grad = gradient(step), gradient(step, (7,)), gradient(step, (7,))
        optimizer.step()
        adam.step()
    torch.testing.assert_close(vector, expected, **CLOSE)
    torch.testing.assert_close(
        matrix.detach(), trained(functools.partial(Formula, update=keller_jordans)), rtol=0.0, atol=2e-3
    )


# --- bitsandbytes and HeavyBall ---------------------------------------------------------------------------------------
def lion_in_8_bits(**options: Any) -> None:
    def update(o: Formula, p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        direction = (0.9 * o.m + 0.1 * g).sign()
        o.m = 0.99 * o.m + 0.01 * g
        return p - 1e-4 * direction

    # an average near 0 may have the other sign in 8 bits
    expected = trained(functools.partial(Formula, update=update))
    off = (trained(functools.partial(fusedadam.Lion, storage="8bit", **options)) - expected).abs().mean()
    assert off < 0.1 * (expected - start()).abs().mean()


def lion_on_the_host() -> None:
    with pretended() as device:
        lion_in_8_bits(offload=True)
        assert device.allocated


def in_32_bits(**options: Any) -> None:
    """States in float32, for bfloat16 parameters as well."""
    param = torch.nn.Parameter(start().bfloat16())
    optimizer = fusedadam.AdamW([param], state_dtype=torch.float32, **options)
    param.grad = gradient(0).bfloat16()
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype == torch.float32
    same(functools.partial(fusedadam.AdamW, state_dtype=torch.float32, **options), torch.optim.AdamW)


def on_the_host_in_32_bits() -> None:
    with pretended() as device:
        in_32_bits(offload=True)
        assert device.allocated


def one_in_32_bits() -> None:
    """Beside another one in 8 bits."""
    params = [torch.nn.Parameter(start().bfloat16()) for _ in range(2)]
    groups = [{"params": params[:1], "storage": "8bit"}, {"params": params[1:], "state_dtype": torch.float32}]
    optimizer = fusedadam.AdamW(groups)
    for param in params:
        param.grad = gradient(0).bfloat16()
    optimizer.step()
    assert "exp_avg_codes" in optimizer.state[params[0]]
    assert optimizer.state[params[1]]["exp_avg"].dtype == torch.float32


def heavyballs(o: Formula, p: torch.Tensor, g: torch.Tensor, caution: bool = False) -> torch.Tensor:
    """Its averages need no correction: their decay is 1 - (1 - beta) / (1 - beta**t)."""
    o.m = o.m.lerp(g, (1 - 0.9) / (1 - 0.9**o.t))
    o.v = o.v.lerp(g * g, (1 - 0.99) / (1 - 0.99**o.t))
    update = o.m / (o.v.sqrt() + 1e-8)
    if caution:
        kept = (update * g > 0).double()
        update = update * kept / kept.mean()
    return p - 0.0025 * update


def as_heavyball(**options: Any) -> Any:
    return functools.partial(fusedadam.AdamW, lr=0.0025, betas=(0.9, 0.99), weight_decay=0.0, **options)


# --- BertAdam, apex, transformers -------------------------------------------------------------------------------------
def bert_adam(o: Formula, p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    g = g * min(1.0, 1.0 / (float(g.norm()) + 1e-6))
    o.m, o.v = 0.9 * o.m + 0.1 * g, 0.999 * o.v + 0.001 * g * g
    return p - 1e-3 * (o.m / (o.v.sqrt() + 1e-6) + 0.01 * p)


def learning_rate() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = fusedadam.BertAdam([param], lr=0.5, warmup=0.2, t_total=10)
    param.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.get_lr() == [0.25]  # half of the warm-up is over


def uncorrected(o: Formula, p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    o.m, o.v = 0.9 * o.m + 0.1 * g, 0.999 * o.v + 0.001 * g * g
    return p - 1e-3 * o.m / (o.v.sqrt() + 1e-8)


def lamb(o: Formula, p: torch.Tensor, g: torch.Tensor, decay: float = 0.01) -> torch.Tensor:
    g = g / max(1.0, float(g.norm()))
    o.m, o.v = 0.9 * o.m + 0.1 * g, 0.999 * o.v + 0.001 * g * g
    update = (o.m / (1 - 0.9**o.t)) / ((o.v / (1 - 0.999**o.t)).sqrt() + 1e-6) + decay * p
    ratio = float(p.norm() / update.norm()) if decay else 1.0
    return p - 1e-3 * ratio * update


def lamb_without_decay() -> None:
    same_formula(functools.partial(fusedadam.Lamb, max_grad_norm=1.0), lamb)
    undecayed = functools.partial(fusedadam.Lamb, max_grad_norm=1.0, weight_decay=0.0, adam=True)
    same_formula(undecayed, functools.partial(lamb, decay=0.0))


def no_grad_averaging() -> None:
    with pytest.raises(TypeError, match="grad_averaging"):
        fusedadam.Lamb([torch.nn.Parameter(torch.ones(2))], grad_averaging=False)


def gradients_are_none() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    fusedadam.AdamW([param]).zero_grad()
    assert param.grad is None


def adafactor(ours: dict[str, Any], **theirs: Any) -> None:
    """Without epsilon, where both compute the same."""
    mine = functools.partial(fusedadam.Adafactor, eps=(0.0, 1e-3), **ours)
    same(mine, functools.partial(transformers.Adafactor, eps=(0.0, 1e-3), **theirs), rtol=1e-4, atol=1e-5)


def adafactor_lacks() -> None:
    for option in ("beta1", "scale_parameter", "warmup_init"):
        with pytest.raises(TypeError, match=option):
            fusedadam.Adafactor([torch.nn.Parameter(torch.ones(2))], **{option: 0.9})


CASES: dict[str, Callable[[], None]] = {
    "`from torch.optim import AdamW`": lambda: same(fusedadam.AdamW, torch.optim.AdamW),
    "`torch.optim.Adam(params, lr=1e-3, fused=True)`": lambda: same(
        functools.partial(fusedadam.Adam, lr=1e-3, fused=True), functools.partial(torch.optim.Adam, lr=1e-3)
    ),
    "`torch.nn.utils.clip_grad_norm_(params, 1.0)` and `optimizer.step()`": clipped,
    "`torch.optim.SGD`, `RMSprop`, `Adadelta`, `RAdam`, `NAdam`, `Adafactor`": torchs_names,
    "`torch.optim.Muon(matrices, lr=0.02)`": lambda: muon(functools.partial(torch.optim.Muon, lr=0.02), lr=0.02),
    "`torch.optim.Muon(matrices, lr=0.02)` and `torch.optim.AdamW(rest, lr=1e-3)`": both_of_torchs,
    "AdamW and `AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))`": averaged,
    "`bnb.optim.AdamW8bit(params)`": lambda: eight_bits("bitsandbytes", "AdamW8bit"),
    "`bnb.optim.AdamW32bit(params)`": in_32_bits,
    "`bnb.optim.Lion8bit(params)`": lion_in_8_bits,
    "`bnb.optim.PagedAdamW8bit(params)`": lambda: eight_bits("bitsandbytes", "PagedAdamW8bit", offload=True),
    "`bnb.optim.PagedAdamW(params)`, `PagedAdamW32bit(params)`": on_the_host_in_32_bits,
    "`bnb.optim.PagedLion8bit(params)`": lion_on_the_host,
    '`GlobalOptimManager.get_instance().override_config(param, "optim_bits", 32)`': one_in_32_bits,
    "`torchao.optim.AdamW8bit(params)`": lambda: eight_bits("torchao", "AdamW8bit"),
    "`torchao.optim.AdamW8bit(params, bf16_stochastic_round=True)`": lambda: eight_bits(
        "torchao", "AdamW8bit", bf16_stochastic_round=True
    ),
    "`torchao.optim.AdamW4bit(params)`, `AdamWFp8(params)`": eight_bits,
    "`torchao.optim.CPUOffloadOptimizer(params, torch.optim.AdamW)`": lambda: offloaded(torch.optim.AdamW),
    '`"offload_optimizer": {"device": "cpu"}`, with `DeepSpeedCPUAdam(params)`': lambda: deepspeeds(
        fusedadam.AdamW, torch.optim.AdamW, weight_decay=0.0
    ),
    "`DeepSpeedCPUAdam(params, adamw_mode=False)`": lambda: deepspeeds(fusedadam.Adam, torch.optim.Adam),
    "`heavyball.AdamW(params)`": lambda: same_formula(as_heavyball(), heavyballs),
    "`heavyball.AdamW(params, caution=True)`": lambda: same_formula(
        as_heavyball(cautious=True), functools.partial(heavyballs, caution=True)
    ),
    '`heavyball.AdamW(params, storage_dtype="bfloat16")`': lambda: same_formula(
        as_heavyball(storage="16bit"), heavyballs, **NEAR
    ),
    "`SingleDeviceMuon(matrices, lr=0.02)`": lambda: muon(
        functools.partial(Formula, update=keller_jordans), lr=0.02, use_muon=True
    ),
    "`SingleDeviceMuonWithAuxAdam(groups)`": with_auxiliary_adam,
    "`from adamp import AdamP`": lambda: same(fusedadam.AdamP, adamp.AdamP),
    "`from optimization import BertAdam`": lambda: same_formula(fusedadam.BertAdam, bert_adam),
    "`optimizer.get_lr()`": learning_rate,
    "`apex.optimizers.FusedAdam(params)`": lambda: same(
        functools.partial(fusedadam.AdamW, weight_decay=0.0), functools.partial(torch.optim.AdamW, weight_decay=0.0)
    ),
    "`FusedAdam(params, adam_w_mode=False)`": lambda: same(fusedadam.Adam, torch.optim.Adam),
    "`FusedAdam(params, bias_correction=False)`": lambda: same_formula(
        functools.partial(fusedadam.EmaAdamW, bias_correction=False, weight_decay=0.0), uncorrected
    ),
    "`apex.optimizers.FusedLAMB(params, use_nvlamb=True)`": lambda: same_formula(
        functools.partial(fusedadam.Lamb, max_grad_norm=1.0), lamb
    ),
    "`FusedLAMB(params)`": lamb_without_decay,
    "`FusedLAMB(params, grad_averaging=False)`": no_grad_averaging,
    "`apex.optimizers.FusedSGD(params, lr=0.1, momentum=0.9)`": lambda: same(
        functools.partial(fusedadam.SGD, lr=0.1, momentum=0.9), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    ),
    "`FusedAdam(params, set_grad_none=True)`": gradients_are_none,
    "`transformers.Adafactor(params, lr=1e-3, relative_step=False)`": lambda: adafactor(
        {"lr": 1e-3}, lr=1e-3, relative_step=False
    ),
    "`transformers.Adafactor(params)`: `relative_step=True`": lambda: adafactor({}),
    "`decay_rate`, `clip_threshold`": lambda: adafactor(
        {"lr": 1e-3, "beta2_decay": -0.7, "d": 1.5},
        lr=1e-3, relative_step=False, decay_rate=-0.7, clip_threshold=1.5,
    ),
    "`beta1=0.9`, `scale_parameter=False`, `warmup_init=True`": adafactor_lacks,
}  # fmt: skip


def test_every_row_has_a_case():
    assert list(rows()) == list(CASES)


@pytest.mark.parametrize("row", CASES)
def test_the_new_line_takes_the_steps_of_the_old_one(row):
    CASES[row]()
