"""Times optimizers against their peers and against a large copy, all in one run.

`bench` and the scripts in benchmarks/ are lists of cases for :func:`measure.measure`.

shapes.py        sets of parameters
timing.py        how one call is timed, and the large copy
traffic.py       bytes that a step must move, and that an optimizer keeps
contestant.py    one implementation that steps over a set of parameters
processes.py     contestants in processes of their own, with a time limit
measure.py       contestants taking turns
"""
