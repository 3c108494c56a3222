"""Imported once by the server that contestants' processes are forked from: slow imports, and nothing that computes.

So a process starts quickly, and no thread runs in it, no kernel is compiled and no device is in use.
"""

import importlib.util

import torch

import fusedadam.cli.contestants
import fusedadam.cli.harness.processes

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer of a process imports half of torch.compile
if importlib.util.find_spec("numba") is not None:
    import fusedadam.backends.numba  # noqa: F401
