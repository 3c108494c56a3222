"""Times optimizers against their peers and against a large copy, all in one run.

`bench` and the scripts in benchmarks/ are lists of cases for :func:`measure.measure`.

shapes.py        sets of parameters
timing.py        how one call is timed, and the large copy
disturbance.py   whether other programs kept a turn waiting
contestant.py    one implementation that steps over a set of parameters, and the bytes that it moves and keeps
processes.py     contestants in processes of their own, with a time limit
measure.py       contestants taking turns
"""
