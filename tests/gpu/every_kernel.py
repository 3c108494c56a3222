"""Runs every kernel once, on tensors of awkward sizes, and compares with the eager backend: for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.gpu.every_kernel
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python -m tests.gpu.every_kernel

Without torch's caching allocator every tensor is an allocation of its own, so that an access beyond its end is seen.
`--part 2/4` runs the second of four parts.
"""

from __future__ import annotations

import argparse

import torch

from tests.backends.test_storage import RULES, assert_same, trained
from tests.support import BF16, CASES, F16, F32, F64, SUMMING, apply, assert_same_bits, draw

MIXES = ([F32], [BF16], [BF16, F32, F16], [F64])
# one element, rows on both sides of every tile, a chunk's border, a row of several segments, nothing
SHAPES = [(), (1,), (3, 15), (5, 17), (2, 33), (4, 130), (3, 8200), (2049,), (4097,), (9000, 1), (0,), (2, 0)]


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device to run kernels on")
    amp = {"grad_scale": torch.full((1,), 4.0, device="cuda"), "found_inf": torch.zeros(1, device="cuda")}
    on_host = {name: value.cpu() for name, value in amp.items()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", metavar="K/N")
    part, parts = map(int, parser.parse_args().part.split("/"))
    mine = (*CASES, *SUMMING)[part - 1 :: parts]
    count = 0
    for case in mine:
        exact = "clip" not in case.rule.name or any(case.flags[f] for f in ("euclidean", "absolute", "infinite"))
        for dtypes in MIXES:
            for scaled in (False, True) if "grad" in case.rule.roles else (False,):
                roles = draw(case, SHAPES, dtypes)
                ours = apply(case, roles, ("cuda", "triton"), **(amp if scaled else {}))
                if exact:  # powers may differ by an ulp between backends
                    expected = apply(case, roles, ("cpu", "eager"), **(on_host if scaled else {}))
                    assert_same_bits(ours, expected, f"{case.id} {dtypes} {'scaled' if scaled else ''}")
                count += 1
    if part == 1:
        count += _with_storage()
    torch.cuda.synchronize()
    print(f"{count} launches of {len(mine)} rules with their flags: all as on the CPU")


def _with_storage() -> int:
    """The kernels of storage formats, through the optimizers that have them."""
    shapes = [(65, 64), (2, 33, 96), (3, 8224), (50,), (33, 40), (4097,)]
    for make in RULES.values():
        for storage in ("exact", "16bit", "8bit"):
            for scale in (None, 4.0):
                chosen = {"shapes": shapes, "scale": scale}
                expected = trained(make, storage, ("cpu", "eager"), **chosen)
                assert_same(trained(make, storage, ("cuda", "triton"), **chosen), expected)
    return len(RULES) * 6


if __name__ == "__main__":
    main()
