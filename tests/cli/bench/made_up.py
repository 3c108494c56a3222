"""Peers that nobody should have: handed to `bench` by --add-peer."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch


class Printing(torch.optim.AdamW):
    """Talks, as some packages do, on the stream that figures go to."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        print("hello from a peer", flush=True)
        os.write(1, b"and from its library\n")
        super().step(closure)


class Raising(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("this peer cannot step\nfor reasons of its own")


class Crashing(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGSEGV)


class Exiting(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        os.write(2, b"a licence is missing\n")
        os._exit(3)


class Hanging(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(1000)
