"""Steps that raise or are interrupted change nothing, and do not affect the next one."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import strategies as st

from tests.fuzz.options import Change
from tests.fuzz.program import Program, a_group, a_param, event

a_refused_option = st.runner().flatmap(lambda program: st.sampled_from(program.family.refused))


class Interrupted(Exception):
    pass


def interrupt(*_: object) -> None:
    raise Interrupted


class Failures(Program):
    @event(group=a_group, option=a_refused_option)
    def set_option_that_is_refused(self, group: int, option: Change) -> None:
        """The next step must raise an error that names the option."""
        name, value = option
        options = self.optimizer.param_groups[group]
        self.set_all_grads()
        versions = [p._version for p in self.params]
        before, options[name] = options[name], value
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            self.optimizer.step()
        assert re.search(rf"\b{name}\b", str(caught.value)), f"the error does not name {name}: {caught.value}"
        assert [p._version for p in self.params] == versions
        options[name] = before

    @event(param=a_param)
    def set_gradient_that_is_refused(self, param: int) -> None:
        owner = self.params[param]
        if not owner.dim():
            return
        self.set_all_grads()
        owner.grad = torch.zeros(owner.shape, dtype=owner.dtype).to_sparse()
        with pytest.raises(RuntimeError, match="grad has layout sparse_coo"):
            self.optimizer.step()
        self.set_grad(param, None)

    @event(where=st.sampled_from(["pre hook", "closure"]))
    def interrupt_before_a_step(self, where: str) -> None:
        self.set_all_grads()
        hooks = [self.optimizer.register_step_pre_hook(interrupt)] if where == "pre hook" else []
        with pytest.raises(Interrupted):
            self.optimizer.step(interrupt if where == "closure" else None)
        for hook in hooks:
            hook.remove()

    @event()
    def interrupt_after_a_step(self) -> None:
        def run() -> None:
            with pytest.raises(Interrupted):
                self.optimizer.step()

        self.set_all_grads()
        hook = self.optimizer.register_step_post_hook(interrupt)
        self.take_step(run)
        hook.remove()
