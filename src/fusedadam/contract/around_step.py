"""What torch puts around ``step()``: TorchDynamo, hooks and the profiler. Each takes as long as a small step does, so a
step does without those that are not in use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# in 2.6 each call of get_eval_frame_callback takes away a reference: Python dies after some ten thousand
CAN_ASK_DYNAMO = torch.torch_version.TorchVersion(torch.__version__) >= "2.8"

P = ParamSpec("P")
R = TypeVar("R")


def outside_dynamo(function: Callable[P, R]) -> Callable[P, R]:
    """Disables TorchDynamo only where it is active: _disable_dynamo itself takes longer than a small step."""
    disabled = _disable_dynamo(function)
    if not CAN_ASK_DYNAMO:
        return disabled

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        is_traced = torch.compiler.is_compiling() or get_eval_frame_callback() is not None
        return disabled(*args, **kwargs) if is_traced else function(*args, **kwargs)

    return call


def profile_hook_step(func: Callable[P, R]) -> Callable[P, R]:
    """Called by torch, once for each class, to add hooks and a profiler's record to ``step``. A new kind of hook must
    be added to this list, or steps pass it by."""
    watched = torch.optim.Optimizer.profile_hook_step(func)

    @functools.wraps(func)
    def step(*args: P.args, **kwargs: P.kwargs) -> R:
        optimizer: Any = args[0]
        is_watched = (
            len(args) > 1  # a closure, which may add a hook
            or kwargs
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or _profiler_enabled()
        )
        return watched(*args, **kwargs) if is_watched else func(*args, **kwargs)

    return step
