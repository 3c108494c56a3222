"""Peers compute the same as ours, and are chosen if they are installed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedadam.catalog import CATALOG
from fusedadam.cli import contestants
from fusedadam.cli.harness.timing import parameters_with_gradients
from fusedadam.peer import KAHAN, PLAIN

HERE = [
    (name, peer.name)
    for name, entry in CATALOG.items()
    for peer in entry.peers
    if peer.installed and not peer.gpu_only and not peer.compiles and peer.note in (PLAIN, KAHAN)  # not in float64
]


@pytest.mark.parametrize(("optimizer", "by"), HERE, ids=str)
def test_peers_compute_the_same(optimizer: str, by: str) -> None:
    atol = 1e-10 if CATALOG[optimizer].float32_twin else 1e-12
    torch.testing.assert_close(*parameters_after(optimizer, by), rtol=0, atol=atol)


@pytest.mark.exhaustive
def test_the_compiled_peer_computes_the_same() -> None:
    """But for beta ** step, which it takes in float32."""
    torch.testing.assert_close(*parameters_after("AdamW", "torch-compiled"), rtol=0, atol=1e-7)


def parameters_after(optimizer: str, by: str) -> list[list[torch.Tensor]]:
    results = []
    for name in (contestants.OURS, by):
        params = parameters_with_gradients([(6, 20), (40,), (8, 4, 3, 3)], "cpu", torch.float64)
        made, grads = contestants.make(optimizer, name, params), [param.grad for param in params]
        for _ in range(4):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()  # some peers write there
            made.step()
        results.append([param.detach() for param in params])
    return results


def test_a_peer_is_chosen_if_it_is_installed_and_soon_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.Peer, "installed", property(lambda peer: peer.name != "optimi"))
    chosen, absent = contestants.choose("AdamW", "cpu", None)
    assert chosen == ["torch-fused", "torch-foreach", "bitsandbytes", "bitsandbytes-8bit", "bitsandbytes-paged-8bit"]
    why = {one.by: one.why for one in absent}
    assert why["optimi"] == "not installed"
    assert why["flashoptim"] == why["torchao-offload"] == "runs on a GPU only"
    assert why["torch-compiled"] == why["torchao-4bit"] == why["heavyball"] == contestants.COMPILES
    assert "torch-compiled" in contestants.choose("AdamW", "cpu", ["all"])[0]
    assert contestants.choose("AdamW", "cpu", ["torch-compiled"])[0] == ["torch-compiled"]
    assert contestants.choose("AdamW", "cuda", ["flashoptim"])[0] == ["flashoptim"]
    assert contestants.choose("AdamW", "cpu", ["none"]) == ([], [])


LOW_MEMORY = {"bitsandbytes": ["-8bit", "-paged-8bit"], "torchao": ["-8bit", "-8bit-stochastic", "-4bit", "-fp8"]}


def test_peers_with_low_memory_are_compared_with_8_bits() -> None:
    """If both are measured: with float64 parameters there is no 8bit."""
    names = [package + how for package, ways in LOW_MEMORY.items() for how in ways]
    names += ["torchao-offload", "flashoptim-8bit"]
    every = ["fusedadam", "fusedadam-8bit", *(peer.name for peer in contestants.peers_of("AdamW"))]
    found = contestants.beside("AdamW", every)
    assert sorted(found) == sorted(names)
    assert set(found.values()) == {"fusedadam-8bit"}
    assert contestants.beside("AdamW", ["fusedadam", *names]) == {}
    assert contestants.beside("Lion", every) == {"bitsandbytes-8bit": "fusedadam-8bit"}


def test_a_contestant_says_what_it_computes() -> None:
    assert "stochastically" in contestants.note("AdamW", "fusedadam-8bit")
    assert "to nearest" in contestants.note("AdamW", "torchao-8bit")
    assert contestants.note("AdamW", "made_up:Printing") == ""


def test_new_peers_are_made_as_their_packages_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their own defaults, but the usual hyper-parameters, which are the same for all."""
    made: dict[str, Any] = {}

    def module(name: str, *classes: str) -> None:
        def constructor(cls: str) -> Any:
            return lambda params, **options: made.setdefault(cls, SimpleNamespace(params=params, options=options))

        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{cls: constructor(cls) for cls in classes}))

    module("bitsandbytes.optim", "AdamW32bit", "AdamW8bit", "PagedAdamW8bit", "Lion8bit")
    module("torchao.optim", "AdamW8bit", "AdamW4bit", "AdamWFp8", "CPUOffloadOptimizer")
    module("heavyball", "AdamW")
    usual = dict(CATALOG["AdamW"].usual)
    for by in ("bitsandbytes", "bitsandbytes-8bit", "bitsandbytes-paged-8bit", "torchao-4bit", "torchao-fp8"):
        contestants.make("AdamW", by, [])
    assert [*made] == ["AdamW32bit", "AdamW8bit", "PagedAdamW8bit", "AdamW4bit", "AdamWFp8"]
    assert all(one.options == usual for one in made.values())
    contestants.make("Lion", "bitsandbytes-8bit", [])
    assert made["Lion8bit"].options == CATALOG["Lion"].usual
    assert contestants.make("AdamW", "heavyball", []).options == usual
    made.clear()
    assert contestants.make("AdamW", "torchao-8bit-stochastic", []).options == {**usual, "bf16_stochastic_round": True}
    assert contestants.make("AdamW", "torchao-offload", []).needs_backward


def test_presets_are_measured_with_adamw_and_where_someone_asks() -> None:
    presets, (exact, half, byte, offloaded) = contestants.presets, contestants.PRESETS
    assert presets("AdamW", "bfloat16", False, "cpu") == [exact, half, byte]
    assert presets("AdamW", "bfloat16", False, "cuda") == [exact, half, byte, offloaded]
    assert presets("AdamW", "float32", False, "cpu") == [half, byte], "exact is what float32 is anyway"
    assert presets("AdamP", "bfloat16", True, "cuda") == [byte]
    assert presets("AdamP", "bfloat16", False, "cuda") == []
    assert presets("AdamW", "float64", True, "cuda") == []


@pytest.mark.filterwarnings("ignore:fusedadam. offload=True does nothing")
@pytest.mark.parametrize("by", contestants.PRESETS)
def test_a_preset_is_our_optimizer_with_storage(by: str) -> None:
    params = parameters_with_gradients([(64, 64)], "cpu", torch.bfloat16)
    for name, entry in CATALOG.items():
        made = contestants.make(name, by, params)
        assert type(made) is entry.cls
        stored, _, offloaded = by.removeprefix("fusedadam-").partition("-")
        assert made.param_groups[0]["storage"] == stored
        assert made.param_groups[0]["offload"] is bool(offloaded)
