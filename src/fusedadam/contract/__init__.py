"""What torch.optim promises, once for all optimizers: groups, closures, state dicts, hooks, GradScaler, sharding.

An optimizer declares its rule, states and options. Everything else that a user of torch.optim expects of it is here,
and so is what every optimizer has on top: storage formats, norms, reports of memory.

decay.py           weight decay that does not depend on how large the learning rate is
declarations.py    what a class declares: states, options, and flags that follow from options
class_checks.py    does a class agree with its rule?
base.py            torch's contract: groups, closure, ``step()``
stepper.py         the path of a step: options, plan, infinities, run
storage.py         which format each role is kept in
role_arrays.py     the arrays of a role: made, read, converted
weights.py         weights as float32: saved, loaded, and left out
group_options.py   the options of all groups, checked when they change
spelling.py        options that are misspelt in a group
precision.py       warns of bfloat16 parameters with bfloat16 states
state_dicts.py     saving and loading
conversion.py      state dicts saved by other optimizers: converted, or refused
memory.py          how much memory an optimizer keeps: ``repr`` and ``memory_summary()``
capture.py         whether a step can be captured in a CUDA graph
wrappers.py        what FSDP, ZeRO and GradScaler expect
complex_params.py  which optimizers and options take complex parameters
norms.py           norms of gradients, updates and weights: ``norms()``
nonfinite.py       steps that are left out because a gradient is not finite
callers.py         who is calling, where only the call stack tells
"""
