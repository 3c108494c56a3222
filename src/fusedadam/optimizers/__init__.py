"""The optimizers: one file each, with its rule, its scalars and its class, on a base that knows torch's contract.

adamw.py, adamp.py, bert_adam.py, ema_adamw.py
base.py            groups, closure, ``step()``, state dicts
group_options.py   the options of all groups, checked when they change
memory.py          what an optimizer keeps: ``repr`` and ``memory_summary()``
state_dicts.py     state dicts saved by other optimizers: converted, or refused
distributed.py     what FSDP, ZeRO, GradScaler and distributed checkpoints expect
"""
