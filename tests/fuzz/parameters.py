"""Parameters and states that are replaced, moved or given another layout between steps."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from tests.fuzz.program import Program, a_group, a_param, event
from tests.fuzz.tensors import DTYPES, LAYOUTS, laid_out, plain

a_layout = st.sampled_from(LAYOUTS)
SIGNED = ("exp_avg", "ema_params", "momentum_buffer")
a_state = st.sampled_from(
    [*SIGNED, "exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "variance", "row_var", "col_var"]
)
has_states = precondition(lambda self: any(kept.states for kept in self.kept))


class Parameters(Program):
    @event(param=a_param, layout=a_layout)
    def replace_data(self, param: int, layout: str) -> None:
        self.params[param].data = laid_out(self.new_values(param), layout)
        self.kept[param].value = plain(self.params[param])

    @event(param=a_param, layout=a_layout)
    def swap_tensors(self, param: int, layout: str) -> None:
        other = torch.nn.Parameter(laid_out(self.new_values(param), layout))
        torch.utils.swap_tensors(self.params[param], other)
        self.kept[param].value, self.kept[param].grad = plain(self.params[param]), None

    @event(param=a_param)
    def overwrite(self, param: int) -> None:
        with torch.no_grad():
            self.params[param].copy_(self.new_values(param))
        self.kept[param].value = plain(self.params[param])

    @precondition(lambda self: any(not self.is_compiled(k) for k in range(len(self.kept))))
    @event(dtype=st.sampled_from(sorted(DTYPES)))
    def convert_parameters(self, dtype: str) -> None:
        """As ``model.half()`` does; states stay in the dtype that they have."""
        for k, param in enumerate(self.params):
            if not self.is_compiled(k):
                self.set_grad(k, None)
                param.data = param.data.to(DTYPES[dtype])
                self.kept[k].value = plain(param)

    @event(group=a_group)
    def reverse_parameters(self, group: int) -> None:
        """Of a group, in place. Their states stay theirs."""
        self.optimizer.param_groups[group]["params"].reverse()
        mine = [k for k, kept in enumerate(self.kept) if kept.group == group]
        self.kept[mine[0] : mine[-1] + 1] = reversed(self.kept[mine[0] : mine[-1] + 1])

    @event(param=a_param, on=st.booleans())
    def require_grad(self, param: int, on: bool) -> None:
        self.params[param].requires_grad_(on)

    @has_states
    @event(param=a_param, name=a_state, layout=a_layout)
    def replace_state(self, param: int, name: str, layout: str) -> None:
        kept = self.kept[param]
        if name in kept.states:
            new = self.new_values_like(kept.states[name])
            kept.states[name] = new if name in SIGNED else new.abs()
            self.optimizer.state[self.params[param]][name] = laid_out(kept.states[name], layout)

    @has_states
    @event(param=a_param, name=a_state, dtype=st.sampled_from(sorted(DTYPES)))
    def convert_state(self, param: int, name: str, dtype: str) -> None:
        kept = self.kept[param]
        if name in kept.states and not self.is_compiled(param):
            kept.states[name] = kept.states[name].to(DTYPES[dtype])
            self.optimizer.state[self.params[param]][name] = kept.states[name].clone()

    @has_states
    @event(param=a_param, step=st.sampled_from([0, 7, 100]), kind=st.sampled_from(["number", "0-d", "in place"]))
    def set_step(self, param: int, step: int, kind: str) -> None:
        if self.kept[param].step is None:
            return
        state = self.optimizer.state[self.params[param]]
        if kind == "in place" and isinstance(state["step"], torch.Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = step if kind == "number" else torch.tensor(float(step))
        self.kept[param].step = step

    @has_states
    @event(param=a_param)
    def move_state_to_the_end(self, param: int) -> None:
        """Of the dict of states, as a dict of its own."""
        state = self.optimizer.state.pop(self.params[param], None)
        if state is not None:
            self.optimizer.state[self.params[param]] = dict(state)

    @has_states
    @event(param=a_param)
    def forget_state(self, param: int) -> None:
        self.optimizer.state.pop(self.params[param], None)
        self.kept[param].states, self.kept[param].step = {}, None
