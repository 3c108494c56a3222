"""Calls of a user who checks types: mypy accepts each, and refuses those that an ignore names (unused ones are errors).

No test imports this file: mypy reads it together with the package.
"""

import torch

import fusedadam

params = [torch.nn.Parameter(torch.ones(2))]
fusedadam.AdamW(params, 1e-3, cautious=True, max_grad_norm=1.0, maximize=True, foreach=None, fused=True, seed=1)
fusedadam.SGD(params, 0.1, 0.9, storage={"momentum_buffer": "bf16"}, state_dtype=None, backend="numba")
fusedadam.Adan(params, max_grad_norm=1.0, maximize=False, capturable=True, skip_nonfinite=True)
fusedadam.RMSprop(params, 0.1, 0.99, 1e-8, 0, 0, False, True, None, False, storage="8bit", state_dtype=torch.float32)
fusedadam.AdamW(params, weight_decy=0.1)  # type: ignore[call-arg]
fusedadam.AdamW(params, backend="cuda")  # type: ignore[arg-type]
fusedadam.RAdam(params, fused=True)  # type: ignore[call-arg]
fusedadam.EmaAdamW(params, maximize=True)  # type: ignore[call-arg]
