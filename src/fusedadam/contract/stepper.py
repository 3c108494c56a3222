"""The path of a step: read the options, find the plan or make one, skip on infinities, run.

An optimizer has one stepper for all of its parameters; stepping in backward has one for each parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import Tensor

from fusedadam import backends
from fusedadam.contract import advice, refusals, role_arrays, storage, wrappers
from fusedadam.contract.copies import Copies
from fusedadam.contract.declarations import Group
from fusedadam.contract.group_options import GroupOptions, method_of
from fusedadam.engine.changes.names import CHANGED, MOVED
from fusedadam.engine.changes.snapshot import Tensors
from fusedadam.engine.launch import NO_AMP, Amp
from fusedadam.engine.participant import Participant, StateDict
from fusedadam.engine.plan import Plan, Replaced, States, prepare_plan
from fusedadam.engine.scalars import Flags, Options
from fusedadam.engine.step_counts import StepCounts
from fusedadam.formats import FORMATS
from fusedadam.rules.rule import PARAM_FLAGS, SpecializedRule
from fusedadam.tensors.host_memory import HostMemory
from fusedadam.tensors.shards import is_dtensor
from fusedadam.tensors.transfer import capturing, outside_inference_mode

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer

ATTEMPTS = 10  # to find the same tensors twice, while other threads may replace them


class Targets(NamedTuple):
    """What a step updates: all parameters of the groups, or one, and their states."""

    groups: Sequence[Group]
    params_by_group: Sequence[Sequence[Tensor]]
    states: States

    @property
    def params(self) -> list[Tensor]:
        if len(self.params_by_group) == 1:  # the usual case, without a copy
            only = self.params_by_group[0]
            return only if type(only) is list else list(only)
        return [param for params in self.params_by_group for param in params]


class PreparedStep(NamedTuple):
    """A step that is ready to run. It keeps its tensors alive until then."""

    plan: Plan
    targets: Targets
    params: list[Tensor]
    tensors: Tensors
    options: Options
    amp: Amp
    followed: list[Tensor]  # parameters with copies that still follow them


# What a plan depends on besides the tensors: ``Options.structure_revision``, the sizes of the groups, and whether steps
# are counted on the device
PlanKey: TypeAlias = tuple[int, list[int], bool]


class Stepper:
    """Takes steps of some parameters, and keeps what one step leaves for the next: plan, step counts, options read.

    ``copies``: told of states that begin as copies of parameters. ``is_under_zero``: a ZeroRedundancyOptimizer has
    given other parameters of the model to other processes. ``host``: for a step in backward, where the
    optimizer keeps states with ``offload=True``.
    """

    def __init__(
        self,
        optimizer: type[FusedOptimizer],
        copies: Copies,
        is_under_zero: bool = False,
        host: HostMemory | None = None,
    ) -> None:
        # keys: whether the plan measures norms, which some loops ask for every 100 steps
        self.plans: dict[bool, tuple[PlanKey, Plan]] = {}
        self.last_plan: Plan | None = None  # of the last step, captured or not, for reports
        self.captured_plans: list[Plan] = []  # their memory is what CUDA graphs use, whenever they are replayed
        self._optimizer, self._copies, self._is_under_zero = optimizer, copies, is_under_zero
        self._in_backward, self._plans_that_moved = host is not None, 0
        self.host = HostMemory() if host is None else host  # for states of groups with offload=True
        self._group_options = GroupOptions(optimizer)
        self._step_counts = StepCounts()

    def prepare(self, targets: Targets, options: Options, amp: Amp, measures_norms: bool = False) -> PreparedStep:
        """Finds the plan or makes one. Everything is checked here; no parameter is written.

        ``options``: as ``read`` has just read them.
        """
        params, captured = targets.params, capturing()
        on_device = options.on_device or self._step_counts.on_device or (amp is not NO_AMP and amp.is_on_device)
        key = options.structure_revision, [*map(len, targets.params_by_group)], on_device
        copies = self._copies.params
        followed = [param for param in params if param in copies and param.grad is not None] if copies else []
        # taken away first: if this is interrupted between compare() and place(), the next step makes another plan
        known, plan = self.plans.pop(measures_norms, (None, None))
        if captured or key != known:
            plan = None
        for _ in range(ATTEMPTS):
            if plan is None:
                try:
                    plan = self._make_plan(targets, options.flags, on_device, measures_norms, amp)
                except Replaced:
                    continue
            answer, tensors = plan.snapshot.compare(params, targets.states)
            if answer == MOVED:
                plan.place()
            if answer != CHANGED and plan.snapshot.is_of_expected:
                if amp.grad_scale is not None:
                    plan.check_grads_can_be_unscaled(tensors)
                self.last_plan = plan
                if captured:
                    self.captured_plans.append(plan)
                    self._step_counts.in_graph = True
                else:
                    self.plans[measures_norms] = key, plan
                return PreparedStep(plan, targets, params, tensors, options, amp, followed)
            plan = None
        raise RuntimeError(
            "another thread replaces parameters, gradients or states of this optimizer faster than step() can look at "
            "them; stop it before the step, or share a lock with it"
        )

    def run(self, prepared: PreparedStep) -> Tensor | None:
        """Takes the step, unless an infinity was found. Where only the device knows, the kernels ask. Returns
        ``found_inf`` of all processes, which is not 0 if the step was left out; None if nobody has looked."""
        plan, targets, params, tensors, options, amp, followed = prepared
        if followed:
            self._copies.refresh(targets.states, self._optimizer.states, followed)
        if amp.found_inf is not None:
            found_inf = wrappers.found_anywhere(amp.found_inf, plan.meshes)
            if plan.is_hosted and found_inf.item() != 0:
                return found_inf
            amp = amp._replace(found_inf=found_inf)
        presences = plan.presences
        lacking = [params[k] for presence in presences for k in presence.only_elsewhere()] if presences else []
        if not lacking:
            plan.run(params, tensors, self._step_counts, options, amp)
            return amp.found_inf
        with wrappers.zero_gradients(lacking):
            prepared = self.prepare(targets, options, amp, plan.measures_norms)
            prepared.plan.run(params, prepared.tensors, self._step_counts, options, amp)
        return amp.found_inf

    def forget_plans(self) -> None:
        """The next step makes another plan."""
        self.plans.clear()

    def read(self, groups: Sequence[Group]) -> Options:
        """The flags and hyper-parameters of each group, checked if they have changed."""
        return self._group_options.read(groups)

    def has_sums(self, groups: Sequence[Group]) -> bool:
        """Whether a step sums at all, under the present options."""
        return any(specialized.has_sums for specialized in self._specialized_rules(groups))

    def has_shared_sums(self, groups: Sequence[Group]) -> bool:
        """Whether a step sums over several parameters, under the present options."""
        return any(specialized.shared for specialized in self._specialized_rules(groups))

    def has_products(self, groups: Sequence[Group]) -> bool:
        """Whether a step multiplies matrices, under the present options."""
        return any(specialized.product is not None for specialized in self._specialized_rules(groups))

    def check_sums(self, groups: Sequence[Group], params: Sequence[Tensor]) -> None:
        """Raises if this process sees only a part of what the rule sums over."""
        self.check_flat_sums(groups, params)
        if self._is_under_zero and self.has_shared_sums(groups):
            raise ValueError(
                "ZeroRedundancyOptimizer gives each process some of the parameters, so a norm over several of them is "
                "not the model's; leave max_grad_norm out (BertAdam: use clip='parameter'), and clip with "
                "fusedadam.clip_grad_norm_ before step()"
            )

    def check_flat_sums(self, groups: Sequence[Group], params: Sequence[Tensor]) -> None:
        """Raises if the rule sums over, or multiplies, parameters that FSDP1 has flattened."""
        if wrappers.are_flat(params) and (self.has_sums(groups) or self.has_products(groups)):
            raise ValueError(
                f"{self._optimizer.__name__} sums over parameters and rows, or multiplies matrices, which "
                "FullyShardedDataParallel has flattened and sharded; shard the model with "
                "torch.distributed.fsdp.fully_shard (FSDP2) instead, or use an optimizer, and options, without norms, "
                "projections and matrices"
            )

    def _specialized_rules(self, groups: Sequence[Group]) -> list[SpecializedRule]:
        """The rule as each group uses it for a matrix, the case with the most sums."""
        names, of_matrices = self._optimizer._flags, dict.fromkeys(PARAM_FLAGS, True)
        return [
            self._optimizer.rule.specialize({**dict(zip(names, chosen, strict=True)), **of_matrices})
            for chosen in self.read(groups).flags
        ]

    @outside_inference_mode()
    def _make_plan(self, targets: Targets, flags: list[Flags], on_device: bool, norms: bool, amp: Amp) -> Plan:
        params, rule = targets.params, self._optimizer.rule
        self.check_sums(targets.groups, params)
        if norms and wrappers.are_flat(params):
            raise ValueError(
                "watch_norms=True measures whole parameters, which FullyShardedDataParallel has flattened and sharded; "
                "shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead, or set watch_norms=False"
            )
        participants = []
        in_groups = [(k, param) for k, own in enumerate(targets.params_by_group) for param in own]
        for index, (k, param) in enumerate(in_groups):
            group, grad = targets.groups[k], param.grad
            if grad is None and not is_dtensor(param):
                continue
            refusals.check_param(self._optimizer, group, param)  # options may have changed
            chosen = dict(zip(self._optimizer._flags, flags[k], strict=True))
            specialized = rule.specialize(chosen, param, (), norms)
            if grad is None and not wrappers.is_waited_for(param, specialized):
                continue
            backend = backends.choose(param.device, group.get("backend"))
            formats = storage.choose(self._optimizer, group, param, specialized).formats
            advice.warn_of_offload(group, param)
            advice.warn_of_float16(group, [param])  # options and dtypes may have changed
            deferred = [role for role, fmt in formats.items() if FORMATS[fmt].is_deferred]
            if deferred:
                specialized = rule.specialize(chosen, param, deferred, norms)
            new_state = functools.partial(self._new_state, param, group, formats)
            participants.append(
                Participant(
                    param,
                    grad,
                    index,
                    k,
                    specialized,
                    backend,
                    new_state,
                    formats,
                    group.get("seed", 0),
                    method_of(self._optimizer, group),
                    self.host if refusals.offloads(group, param.device) else None,
                    self._in_backward,
                )
            )
        is_scaled = amp.grad_scale is not None
        states, counts = targets.states, self._step_counts
        moved = self.host.moved
        prepared = prepare_plan(rule, participants, params, states, counts, on_device, is_scaled)
        if self.host.moved > moved:
            self._plans_that_moved += 1
            advice.warn_of_moved_states(self._plans_that_moved)
        return prepared.commit(states, counts, norms)

    def _new_state(
        self, param: Tensor, group: Group, formats: Mapping[str, str], role: str, before: StateDict
    ) -> StateDict:
        self._copies.begin(role, param, before, self._optimizer.states)
        return role_arrays.new_arrays(role, param, group, formats.get(role), self._optimizer.states, before)
