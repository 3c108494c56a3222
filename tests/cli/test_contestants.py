"""Peers compute the same as ours, and are chosen if they are installed."""

from __future__ import annotations

import pytest
import torch

from fusedadam.catalog import CATALOG
from fusedadam.cli import contestants
from fusedadam.cli.harness.timing import parameters_with_gradients

HERE = [
    (name, peer.name)
    for name, entry in CATALOG.items()
    for peer in entry.peers
    if peer.installed and not peer.gpu_only and not peer.compiles
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
    assert chosen == ["torch-fused", "torch-foreach"]
    why = {one.by: one.why for one in absent}
    assert why["optimi"] == "not installed"
    assert why["flashoptim"] == why["bitsandbytes-8bit"] == "runs on a GPU only"
    assert why["torch-compiled"] == contestants.COMPILES
    assert "torch-compiled" in contestants.choose("AdamW", "cpu", ["all"])[0]
    assert contestants.choose("AdamW", "cpu", ["torch-compiled"])[0] == ["torch-compiled"]
    assert contestants.choose("AdamW", "cuda", ["flashoptim"])[0] == ["flashoptim"]
    assert contestants.choose("AdamW", "cpu", ["none"]) == ([], [])


def test_presets_are_measured_with_adamw_and_where_someone_asks() -> None:
    exact, half, byte = contestants.PRESETS
    assert contestants.presets("AdamW", "bfloat16", asked=False) == [exact, half, byte]
    assert contestants.presets("AdamW", "float32", asked=False) == [half, byte], "exact is what float32 is anyway"
    assert contestants.presets("AdamP", "bfloat16", asked=True) == [byte]
    assert contestants.presets("AdamP", "bfloat16", asked=False) == []
    assert contestants.presets("AdamW", "float64", asked=True) == []


@pytest.mark.parametrize("by", contestants.PRESETS)
def test_a_preset_is_our_optimizer_with_storage(by: str) -> None:
    params = parameters_with_gradients([(64, 64)], "cpu", torch.bfloat16)
    for name, entry in CATALOG.items():
        made = contestants.make(name, by, params)
        assert type(made) is entry.cls
        assert made.param_groups[0]["storage"] == by.removeprefix("fusedadam-")
