"""Copies of the optimizer, state dicts that go through files and other optimizers, and the averaged weights."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import adamp
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from fusedadam.catalog import CATALOG
from tests.fuzz.program import Program, assert_same, event

OTHERS: dict[str, Any] = {
    entry.name: entry.torch_twin for entry in CATALOG.values() if entry.torch_twin and not entry.matrices
}
OTHERS |= {"EmaAdamW": torch.optim.AdamW, "AdamP": adamp.AdamP}


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Checkpoints(Program):
    @event(saved=st.booleans())
    def load_own_state_dict(self, saved: bool) -> None:
        state_dict = self.optimizer.state_dict()
        self.optimizer.load_state_dict(through_a_file(state_dict) if saved else state_dict)

    @event(saved=st.booleans())
    def resume_with_a_new_optimizer(self, saved: bool) -> None:
        """With new parameters, as after a restart."""
        state_dict = copy.deepcopy(self.optimizer.state_dict())
        groups = []
        for group in self.optimizer.param_groups:
            params = [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]
            groups.append({"params": params, "backend": group["backend"]})
        self.optimizer = self.family.make(groups)
        self.optimizer.load_state_dict(through_a_file(state_dict) if saved else state_dict)
        self.read_gradients()  # torch decides whether a copied parameter keeps its own

    @precondition(lambda self: self.family.name in OTHERS)
    @event(saved=st.booleans())
    def load_by_way_of_another_package(self, saved: bool) -> None:
        """torch and adamp cast states to the parameter's dtype, and carry options along that they do not know."""
        if any(self.is_compiled(k) and self._has_wider_states(k) for k in range(len(self.kept))):
            return  # the states come back in another dtype, and Numba would compile kernels for this event alone
        groups = [{"params": [p.detach().clone() for p in group["params"]]} for group in self.optimizer.param_groups]
        other = OTHERS[self.family.name](groups)
        other.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        state_dict = other.state_dict()
        self.optimizer.load_state_dict(through_a_file(state_dict) if saved else state_dict)
        for kept in self.kept:
            kept.states = {name: value.to(kept.value.dtype) for name, value in kept.states.items()}

    def _has_wider_states(self, param: int) -> bool:
        kept = self.kept[param]
        return any(state.dtype != kept.value.dtype for state in kept.states.values())

    @event()
    def deepcopy(self) -> None:
        self.optimizer = copy.deepcopy(self.optimizer)
        self.read_gradients()  # torch decides whether a copied parameter keeps its own

    @event()
    def pickle(self) -> None:
        self.optimizer = pickle.loads(pickle.dumps(self.optimizer))
        self.read_gradients()  # torch decides whether a copied parameter keeps its own

    @precondition(lambda self: self.family.name == "EmaAdamW")
    @event(fails=st.booleans())
    def look_at_averages(self, fails: bool) -> None:
        try:
            with self.optimizer.ema_weights():
                for k, (param, kept) in enumerate(zip(self.params, self.kept, strict=True)):
                    average = kept.states.get("ema_params", kept.value)
                    assert_same(param.detach(), average.to(kept.value.dtype), f"average of parameter {k}")
                with pytest.raises(RuntimeError, match="ema_weights"):
                    self.optimizer.step()
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert fails
