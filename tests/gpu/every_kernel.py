"""Runs every kernel once, on tensors of awkward sizes, and compares with the eager backend: for compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --report-api-errors no --tool memcheck python -m tests.gpu.every_kernel
    compute-sanitizer --report-api-errors no --tool racecheck python -m tests.gpu.every_kernel

Without torch's caching allocator every tensor is an allocation of its own, so that an access beyond its end is seen.
`--part 2/4` runs the second of four parts.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from fusedadam.backends.triton import orthogonal
from fusedadam.catalog import CATALOG
from fusedadam.rules.newton_schulz import DEFAULT
from tests.backends.test_orthogonal import distances, drawn, exact, result
from tests.backends.test_storage import MULTIPLYING, RULES, assert_same, trained
from tests.support import BF16, CASES, F16, F32, F64, MORE_CASES, SUMMING, apply, assert_same_bits, draw

CPU = ("cpu", "eager")
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
    mine = (*CASES, *MORE_CASES, *SUMMING)[part - 1 :: parts]
    count = 0
    for case in mine:
        exact = "clip" not in case.rule.name or any(case.flags[f] for f in ("euclidean", "absolute", "infinite"))
        for dtypes in MIXES:
            for scaled in (False, True) if "grad" in case.rule.roles else (False,):
                roles = draw(case, SHAPES, dtypes)
                ours = apply(case, roles, ("cuda", "triton"), **(amp if scaled else {}))
                if exact:  # powers may differ by an ulp between backends
                    expected = apply(case, roles, CPU, **(on_host if scaled else {}))
                    assert_same_bits(ours, expected, f"{case.id} {dtypes} {'scaled' if scaled else ''}")
                count += 1
    count += _with_storage() if part == 1 else 0
    count += _with_scalars_on_the_device() if part == parts else 0
    count += _products() if part == parts else 0
    torch.cuda.synchronize()
    print(f"{count} launches of {len(mine)} rules with their flags: all as on the CPU")


def _with_storage() -> int:
    """The kernels of storage formats, through the optimizers that have them."""
    shapes = [(65, 64), (2, 33, 96), (3, 8224), (50,), (33, 40), (4097,)]
    for name, make in RULES.items():
        for storage in ("exact", "16bit", "8bit"):
            for scale in (None, 4.0):
                chosen = {"shapes": shapes, "scale": scale}
                # products of matrices have the bits of the device, and are in weights from the first step on, in
                # states from the second
                steps = 1 if name in MULTIPLYING else 2
                found, expected = (
                    trained(make, storage, place, steps=steps, **chosen) for place in (("cuda", "triton"), CPU)
                )
                if name in MULTIPLYING:
                    found, expected = ([_without_weights(one) for one in each] for each in (found, expected))
                assert_same(found, expected)
    return len(RULES) * 6


def _without_weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert torch.isfinite(state["param"]).all()
    return {name: value for name, value in state.items() if not name.startswith("param")}


def _with_scalars_on_the_device() -> int:
    """The kernels for scalars and counts, and a step's kernels as one graph, which the third step is at the latest.
    Compared is how far parameters move."""
    makers = [(make, entry.matrices) for entry in CATALOG.values() for make in entry.tested.values()]
    for make, multiplies in makers:
        expected = _steps(make, "cpu", backend="eager")
        for options in ({}, {"capturable": True}):
            for is_scaled in (False, True):
                found = _steps(make, "cuda", is_scaled, **options)
                same = _is_near if multiplies else torch.equal
                assert all(map(same, found, expected)), f"{make} {options} {is_scaled}"
    return len(makers) * 4


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """What products make of 16 bits differs by their rounding, at most 4 % of a matrix with these coefficients."""
    return bool((found - expected).norm() <= 0.04 * expected.norm())


def _steps(make: Any, device: str, is_scaled: bool = False, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 15), (2, 33), (4, 130), (300,), (1,)]
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    before = [param.detach().clone() for param in params]
    optimizer = make([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}], **options)
    for _ in range(5):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(device) * (4 if is_scaled else 1)
        if is_scaled:
            optimizer.grad_scale = torch.full((), 4.0, device=device)
            optimizer.found_inf = torch.zeros((), device=device)
        optimizer.step()
    return [(param.detach() - start).cpu() for param, start in zip(params, before, strict=True)]


def _products() -> int:
    """Tiles of every size, on matrices that do not fill them, wide and tall, with rows that have no descriptors."""
    if not orthogonal.multiplies(torch.float32, torch.device("cuda")):
        return 0  # torch's own products
    shapes = [(60, 131), (131, 60), (600, 700), (701, 600), (1601, 1700)]
    for shape in shapes:
        stack = drawn(2, *shape)
        assert (distances(result(stack, at_once=1), exact(stack, DEFAULT)) < 0.02).all(), shape
    return len(shapes)


if __name__ == "__main__":
    main()
