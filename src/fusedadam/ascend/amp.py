"""torch_npu.npu.amp: torch's mixed precision with torch_npu's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedadam.ascend import device

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


class autocast(torch.autocast):
    """:class:`torch.autocast` for the device that "npu" means. The default dtype is float16, also on a CPU."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__(device.kind(), enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


def custom_fwd(fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """:func:`torch.amp.custom_fwd` for the device that "npu" means."""
    return torch.amp.custom_fwd(fwd, device_type=device.kind(), cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any] | None = None) -> Any:
    """:func:`torch.amp.custom_bwd` for the device that "npu" means."""
    return torch.amp.custom_bwd(bwd, device_type=device.kind())


class GradScaler(torch.amp.GradScaler):
    """:class:`torch.amp.GradScaler` with torch_npu's order of arguments.

    Args:
        dynamic: whether :meth:`update` changes the scale; False keeps ``init_scale``. Steps with infinite or NaN
            gradients are skipped either way.
    """

    def __init__(
        self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
        growth_interval: int = 2000, dynamic: bool = True, enabled: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(device.kind(), init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._dynamic = dynamic

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if new_scale is None and not self._dynamic and self._enabled:
            new_scale = self._check_scale_growth_tracker("update")[0]  # unchanged
        super().update(new_scale)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "dynamic": self._dynamic} if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._dynamic = state_dict.get("dynamic", self._dynamic)
