"""Runs examples/fsdp2.py and disturbs it: `torchrun disturbed.py FOLDER DISTURBANCE ...`, then the example's arguments.

A disturbance leaves a file in FOLDER, so that it happens only once.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

EXAMPLE = Path(__file__).parents[2] / "examples/fsdp2.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fsdp2", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def disturb(example: Any, folder: Path, disturbance: str) -> None:
    """``kill R S``: rank R kills itself in step S; ``raise R S``: it raises an error; ``stop in save S``: rank 0 stands
    still when all of step S is written but for the last file."""
    what, *words = disturbance.split()
    mark = folder / disturbance.replace(" ", "-")
    batch, finish = example.batch, FileSystemWriter.finish

    def disturbed_batch(step: int) -> Any:
        if [dist.get_rank(), step] == [int(word) for word in words] and not mark.exists():
            mark.touch()
            if what == "raise":
                raise RuntimeError("this rank fails")
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(step)

    def disturbed_finish(self: FileSystemWriter, **arguments: Any) -> None:
        if str(self.path).endswith(f"step-{int(words[-1]):08}") and not mark.exists():
            mark.touch()
            time.sleep(600)
        finish(self, **arguments)

    if what == "stop":
        FileSystemWriter.finish = disturbed_finish  # type: ignore[method-assign]
    else:
        example.batch = disturbed_batch


if __name__ == "__main__":
    fsdp2, where = load_example(), Path(sys.argv[1])
    (where / f"pid-{os.getpid()}").touch()
    for one in sys.argv[2].split(","):
        disturb(fsdp2, where, one)
    fsdp2.main(sys.argv[3:])
