"""The optimizers of this package, one entry each: what documents, commands and tests need to know about them.

Tables in docs/, the site's navigation, `bench`, `demo`, `verify`, the fuzzer and the tests are made from it. What the
class itself says (its options, states, rule, ``takes_complex``) is not repeated here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import fusedadam
from fusedadam.contract.base import FusedOptimizer
from fusedadam.peer import KAHAN, WIDE, WRITTEN_HERE, Options, Peer, adams, adamws, bitsandbytes, torchs

Variants = Mapping[str, Options]

CLIPPED: Options = {"max_grad_norm": 1.0}
OFF_ON = (False, True)


@dataclass(frozen=True, eq=False, kw_only=True)
class Entry:
    """One optimizer.

    page           docs/optimizers/PAGE.md
    when, because  its row in "Which optimizer?": what is trained, and why with this one
    costs          sets of options, one for each row of its page's table of bytes; the overview shows the first
    usual          what people train with, for `bench` and `demo`: explicit, since defaults differ between packages
    peers          what computes the same; the first is what people would use without us
    choices        options that choose other kernels, with their values, besides ``maximize`` and ``max_grad_norm``:
                   for `verify` and the fuzzer
    variants       named sets of options for tests of the contract, of shards and on GPUs, on top of TESTED; the first
                   one's name is empty
    core           `bench` and `demo` take it by default, and quick tests take each of its variants
    quick          quick tests take its first variant
    float32_twin   torch's class keeps a state in float32 whatever the dtype of the parameter
    matrices       it multiplies matrices: its bits depend on the processor, and its peers take matrices alone
    """

    cls: type[FusedOptimizer]
    page: str
    when: str
    because: str
    usual: Options
    peers: tuple[Peer, ...] = ()
    costs: tuple[Options, ...] = ({}, CLIPPED)
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    variants: Variants = field(default_factory=lambda: {"": {}, "clipped": CLIPPED})
    core: bool = False
    quick: bool = False
    float32_twin: bool = False
    matrices: bool = False

    @property
    def name(self) -> str:
        return self.cls.__name__

    @property
    def torch_twin(self) -> type[torch.optim.Optimizer] | None:
        """torch's own, whose arguments and state dicts ours takes."""
        return getattr(torch.optim, self.name, None)

    @property
    def tested(self) -> dict[str, Callable[..., FusedOptimizer]]:
        """Its variants, by the optimizer's name and theirs."""
        make: Callable[..., FusedOptimizer] = self.cls
        return {
            f"{self.name} {variant}".strip(): functools.partial(make, **{**TESTED, **options})
            for variant, options in self.variants.items()
        }


TESTED: Options = {"lr": 1e-2, "weight_decay": 0.1}
ADAM: Options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}

_ENTRIES = (
    Entry(
        cls=fusedadam.AdamW,
        page="adamw",
        when="a transformer, a diffusion model, or anything new",
        because="it is the standard choice; a drop-in replacement for torch's",
        usual=ADAM,
        peers=adamws(),
        costs=({}, {"amsgrad": True}, CLIPPED),
        choices={"amsgrad": OFF_ON},
        variants={"": {}, "clipped": CLIPPED, "that holds back": {"cautious": True, "update_clipping": True}},
        core=True,
    ),
    Entry(
        cls=fusedadam.Adam,
        page="adam",
        when="a model from a paper that used Adam with an L2 penalty",
        because="torch's Adam, up to rounding",
        usual={**ADAM, "weight_decay": 0.0},
        peers=adams("Adam"),
        costs=({}, {"amsgrad": True}, CLIPPED),
        choices={"amsgrad": OFF_ON},
        variants={"": {"amsgrad": True, "maximize": True}, "clipped": CLIPPED},
        core=True,
    ),
    Entry(
        cls=fusedadam.EmaAdamW,
        page="ema-adamw",
        when="a model that you evaluate or serve with averaged weights",
        because="it updates the average in the same pass over memory",
        usual=ADAM,
        peers=(Peer("torch-fused+ema", f"{WRITTEN_HERE}:TorchAdamWWithEma"),),
        costs=({}, {"ema_dtype": torch.float32}, CLIPPED),
        choices={"decoupled": (True, False)},
        variants={"": {"ema_decay": 0.9}, "clipped": {"ema_decay": 0.9, **CLIPPED}},
        core=True,
    ),
    Entry(
        cls=fusedadam.AdamP,
        page="adamp",
        when="a network with many normalisations: ResNets, most vision models",
        because="it keeps scale-invariant weights from growing",
        usual=ADAM,
        peers=(Peer("adamp", "adamp:AdamP"), Peer("pytorch_optimizer", "pytorch_optimizer:AdamP")),
        costs=({}, {"nesterov": True}, CLIPPED),
        choices={"nesterov": OFF_ON},
        variants={"": {"delta": 0.5, "nesterov": True}, "clipped": CLIPPED},
        core=True,
    ),
    Entry(
        cls=fusedadam.BertAdam,
        page="bert-adam",
        when="BERT, or a script with its own `BertAdam`",
        because="it clips, warms up and schedules as those scripts do",
        usual={"lr": 1e-3, "weight_decay": 1e-2, "max_grad_norm": 1.0, "warmup": 0.1, "t_total": 100_000},
        peers=(Peer("loop", f"{WRITTEN_HERE}:BertAdamLoop"),),
        costs=({}, {"max_grad_norm": None}),
        choices={"clip": ("parameter", "group", "all")},
        variants={"": {"warmup": 0.3, "t_total": 20}, "by group": {"clip": "group"}, "over all": {"clip": "all"}},
        core=True,
    ),
    Entry(
        cls=fusedadam.RAdam,
        page="radam",
        when="with Adam, without tuning a warm-up",
        because="its first steps do not use the second moment; torch's RAdam, up to rounding",
        usual=ADAM,
        peers=(*torchs("RAdam", "foreach"), Peer("optimi", "optimi:RAdam", note=KAHAN)),
        choices={"decoupled_weight_decay": OFF_ON},
        variants={"": {"betas": (0.9, 0.99)}, "clipped": {"decoupled_weight_decay": True, **CLIPPED}},
    ),
    Entry(
        cls=fusedadam.NAdam,
        page="nadam",
        when="with Adam, and Nesterov's momentum",
        because="torch's NAdam, up to rounding",
        usual={**ADAM, "momentum_decay": 4e-3},
        peers=torchs("NAdam", "foreach"),
        choices={"decoupled_weight_decay": OFF_ON},
        variants={"": {}, "clipped": {"decoupled_weight_decay": True, **CLIPPED}},
        quick=True,
        float32_twin=True,
    ),
    Entry(
        cls=fusedadam.Adafactor,
        page="adafactor",
        when="a transformer, with next to no memory for states",
        because="it keeps one value for each row and column; torch's Adafactor, up to rounding",
        usual={"lr": 1e-2, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 1e-2},
        peers=torchs("Adafactor", "foreach"),
        choices={"eps": ((None, 1e-3), (1e-3, 1e-2))},
        variants={"": {}, "clipped": {"eps": (1e-3, 1e-3), **CLIPPED}},
        quick=True,
    ),
    Entry(
        cls=fusedadam.SGD,
        page="sgd",
        when="a convolutional network with a well-tuned schedule, or with little memory",
        because="it keeps one tensor, or none; torch's SGD, up to rounding",
        usual={"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4},
        peers=torchs("SGD", "fused", "foreach"),
        costs=({"momentum": 0.9}, {}, {"momentum": 0.9, **CLIPPED}),
        choices={"momentum": (0.9, 0.0), "nesterov": OFF_ON},
        variants={"": {"momentum": 0.9, "dampening": 0.5}, "clipped": {"momentum": 0.9, "nesterov": True, **CLIPPED}},
        quick=True,
    ),
    Entry(
        cls=fusedadam.RMSprop,
        page="rmsprop",
        when="a model from a paper that used it",
        because="torch's RMSprop, up to rounding",
        usual={"lr": 1e-3, "alpha": 0.99, "eps": 1e-8, "weight_decay": 1e-4},
        peers=torchs("RMSprop", "foreach"),
        costs=({}, {"momentum": 0.9}, {"momentum": 0.9, "centered": True}, CLIPPED),
        choices={"momentum": (0.9, 0.0), "centered": OFF_ON},
        variants={"": {"momentum": 0.9, "centered": True}, "clipped": CLIPPED},
    ),
    Entry(
        cls=fusedadam.RMSpropTF,
        page="rmsprop-tf",
        when="MobileNet, MnasNet, EfficientNet",
        because="TensorFlow's RMSprop, as their settings expect",
        usual={"lr": 1e-3, "alpha": 0.9, "eps": 1e-10, "weight_decay": 1e-5, "momentum": 0.9},
        peers=(Peer("timm", "timm.optim:RMSpropTF"),),
        costs=({"momentum": 0.9}, {}, {"momentum": 0.9, "centered": True}, {"momentum": 0.9, **CLIPPED}),
        choices={"momentum": (0.9, 0.0), "centered": OFF_ON, "decoupled_decay": OFF_ON},
        variants={"": {"momentum": 0.9}, "clipped": {"centered": True, **CLIPPED}},
        quick=True,
    ),
    Entry(
        cls=fusedadam.Adadelta,
        page="adadelta",
        when="a model from a paper that used it",
        because="torch's Adadelta, up to rounding",
        usual={"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 1e-4},
        peers=torchs("Adadelta", "foreach"),
        variants={"": {"lr": 0.5, "maximize": True}, "clipped": {"lr": 0.5, **CLIPPED}},
    ),
    Entry(
        cls=fusedadam.Lamb,
        page="lamb",
        when="with batches of thousands of examples",
        because="it scales each parameter's step to the size of its weights",
        usual={**ADAM, "eps": 1e-6},
        peers=(
            Peer("loop", f"{WRITTEN_HERE}:LambLoop"),
            Peer("apex", "apex.optimizers:FusedLAMB", {"max_grad_norm": 0.0, "use_nvlamb": True}, gpu_only=True),
        ),
        costs=({}, {"adam": True}, CLIPPED),
        choices={"adam": OFF_ON, "use_global_grad_norm": OFF_ON},
        variants={"": {}, "clipped": CLIPPED, "by the global norm": {"use_global_grad_norm": True}},
        quick=True,
    ),
    Entry(
        cls=fusedadam.Lion,
        page="lion",
        when="a transformer or a vision model with large batches, and less memory than AdamW needs",
        because="it keeps one tensor",
        usual={"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 1e-1},
        peers=(
            Peer("timm", "timm.optim:Lion"),
            Peer("lion_pytorch", "lion_pytorch:Lion"),
            Peer("pytorch_optimizer", "pytorch_optimizer:Lion"),
            Peer("optimi", "optimi:Lion", note=KAHAN),
            *bitsandbytes("Lion"),
        ),
        variants={"": {}, "clipped": CLIPPED, "that holds back": {"cautious": True, **CLIPPED}},
    ),
    Entry(
        cls=fusedadam.Muon,
        page="muon",
        when="a transformer in fewer steps than AdamW needs",
        because="it orthogonalizes the updates of matrices; torch's Muon, up to rounding, with AdamW for the rest",
        usual={"lr": 2e-2, "weight_decay": 1e-2, "momentum": 0.95, "use_muon": None},
        peers=(Peer("torch-muon", f"{WRITTEN_HERE}:TorchMuonAndAdamW", note="products in bfloat16"),),
        choices={"use_muon": (None, False), "nesterov": (True, False), "adjust_lr_fn": (None, "match_rms_adamw")},
        variants={"": {"use_muon": None}, "clipped": {"use_muon": None, "nesterov": False, **CLIPPED}},
        matrices=True,
    ),
    Entry(
        cls=fusedadam.ScheduleFreeAdamW,
        page="schedule-free-adamw",
        when="without knowing for how long, or without tuning a schedule",
        because="an average replaces the decaying schedule",
        usual={**ADAM, "lr": 2.5e-3, "warmup_steps": 100},
        peers=(Peer("schedulefree", f"{WRITTEN_HERE}:schedule_free", package="schedulefree"),),
        variants={"": {"warmup_steps": 4}, "clipped": CLIPPED},
    ),
    Entry(
        cls=fusedadam.Adan,
        page="adan",
        when="a vision model or a transformer in fewer epochs, with memory to spare",
        because="Nesterov's momentum from differences of gradients",
        usual={**ADAM, "betas": (0.98, 0.92, 0.99)},
        peers=(
            Peer("adan", "adan:Adan"),
            Peer("timm", "timm.optim:Adan"),
            Peer("pytorch_optimizer", "pytorch_optimizer:Adan"),
            Peer("optimi", "optimi:Adan", note=KAHAN),
        ),
        choices={"no_prox": OFF_ON},
        variants={"": {}, "clipped": {"no_prox": True, **CLIPPED}},
    ),
    Entry(
        cls=fusedadam.AdEMAMix,
        page="ademamix",
        when="a large model for a long time",
        because="AdamW with an average that remembers tens of thousands of steps",
        usual={**ADAM, "betas": (0.9, 0.999, 0.9999), "alpha": 5.0},
        peers=(
            Peer("pytorch_optimizer", "pytorch_optimizer:AdEMAMix"),
            Peer("bitsandbytes", "bitsandbytes.optim:AdEMAMix", note=WIDE),
        ),
        variants={"": {"alpha_warmup": 4, "beta3_warmup": 3}, "clipped": CLIPPED},
    ),
)
CATALOG: Mapping[str, Entry] = {entry.name: entry for entry in _ENTRIES}
