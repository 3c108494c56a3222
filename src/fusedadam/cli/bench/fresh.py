"""Imported by the process that all others are forked from: what is slow to import, and nothing that computes.

A process is as fresh as one that has just imported torch: no thread runs, no kernel is compiled, no device is used.
"""

import importlib.util

import torch

import fusedadam.cli.bench.worker

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer of a process imports half of torch.compile
if importlib.util.find_spec("numba") is not None:
    import fusedadam.backends.numba  # noqa: F401
