"""What torch.optim promises, once for all optimizers: groups, closures, state dicts, hooks, GradScaler, sharding.

An optimizer declares its rule, states and options. Everything else that a user of torch.optim expects of it is here,
and so is what every optimizer has on top: storage formats, norms, reports of memory.

declarations.py   what a class declares: states, options, flags that follow from options, and ``peak_lr``
common_options.py the options that optimizers have in common, and their defaults
class_checks.py   does a class agree with its rule?
base.py           the base class: groups, closure, ``step()``
around_step.py    what torch puts around ``step()``: TorchDynamo, hooks, the profiler
group_options.py  the options of all groups, checked when they change
stepper.py        the path of a step: options, plan, infinities, run
nonfinite.py      steps that are left out because a gradient is not finite
storage.py        which format each role is kept in
role_arrays.py    the arrays of a role: made, read, converted
copies.py         states that begin as copies of the parameters, and follow them until the first step
weights.py        weights as float32: saved, loaded, and left out
state_dicts.py    saving and loading
conversion.py     state dicts saved by other optimizers: converted, or refused
reports.py        what an optimizer can be asked after a step: norms, and values that its rule reports
memory.py         how much memory an optimizer keeps: ``repr`` and ``memory_summary()``
wrappers.py       what FSDP, ZeRO, distributed checkpoints, GradScaler and Lightning expect
refusals.py       what is refused because it would go wrong silently
advice.py         warnings of what is likely a mistake

Where a check goes: of one option's value, checks/options.py, listed in the class's ``options``; of options against each
other, ``check`` of the class; of a group and its parameters, ``_check_params`` in base.py; of a class against its rule,
class_checks.py; of what would go wrong silently, refusals.py; of a likely mistake that is allowed, advice.py.

States are made on the device of their parameter, by ``State.new`` in declarations.py and by role_arrays.py; with
``offload=True`` the engine moves them to host memory (engine/participant.py, tensors/host_memory.py).
"""
