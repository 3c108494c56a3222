"""Random programs: every optimizer here beside torch.optim, the adamp package and formulas written out by hand.

tensors.py        values in every layout, and views with torch's negative and conjugate bits
options.py        the optimizers, which options they may be given, and which must be refused
reference.py      one step in float64, by code that is not ours
judge.py          how far a stored value may be from that
program.py        what a program must leave behind, and the steps that it takes
gradients.py, parameters.py, changed_options.py, checkpoints.py, failures.py      what happens between steps
machine.py        all of it as one Hypothesis state machine for each optimizer
__main__.py       `make fuzz`: random seeds, for as long as you like
"""
