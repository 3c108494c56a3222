"""docs/scale-costs.md, and Muon's table in docs/scale.md: benchmarks/scale.py prints their tables, and counts what the
document's formula says.

That real process groups send what a plan says: test_reduction.py.
"""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fusedadam

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/scale-costs.md"
sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts import each other by name

import scale  # noqa: E402

# up to torch 2.6, the time to find the group of a mesh grows with the square of its devices
SLOW_GROUPS = "_find_pg_by_ranks_and_tag" in inspect.getsource(DeviceMesh.get_group)

SHAPES = [(7, 5), (1, 6), (4, 2, 3), (5,), (2,)]  # of three processes, some have nothing of most of them
CHOICES: dict[str, Any] = {
    **scale.CHOICES,
    "Adam": (fusedadam.Adam, {}),
    "EmaAdamW, clipped": (fusedadam.EmaAdamW, {"max_grad_norm": 1.0}),
    "BertAdam by group": (fusedadam.BertAdam, {"clip": "group"}),
    "BertAdam by all": (fusedadam.BertAdam, {"clip": "all"}),
}
MATRICES, VECTORS = [s for s in SHAPES if len(s) > 1], [s for s in SHAPES if len(s) == 1]


@pytest.mark.skipif(SLOW_GROUPS, reason=f"torch {torch.__version__} takes minutes to find the groups of large meshes")
def test_the_tables_are_what_the_script_prints() -> None:
    job = subprocess.run([sys.executable, ROOT / "benchmarks/scale.py"], capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stderr
    text = DOCUMENT.read_text(encoding="utf-8")
    *printed, of_muon = [block.strip("\n") for block in job.stdout.split("\n\n") if block.strip()]
    assert len(printed) == 5
    assert of_muon in (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    for block in printed:
        assert block in text, f"docs/scale-costs.md does not have\n{block}"
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    counted = [table for table in tables if re.search(r"\| [\d,]+ \|", table)]
    assert [table.strip() for table in counted] == [block for block in printed if block.startswith("|")]


def test_the_model_is_the_one_it_says() -> None:
    weights = scale.llama_8b()
    assert len(weights) == 291
    assert sum(math.prod(w.shape) for w in weights) == 8_030_261_248


# What the document says: for each parameter that is summed over, one number, the count of processes that have a
# gradient, and then one for each sum; where rows are divided and summed by, one for each row and sum.


def formula(name: str, split: bool) -> list[int]:
    matrices = sum(rows for rows, *_ in MATRICES) if split else len(MATRICES)
    whole = 0 if split else len(VECTORS)  # tensor parallel leaves vectors whole
    everybody = len(MATRICES) + whole
    cosines = (
        4 * matrices if split else 5 * matrices
    )  # the count of rows over the threshold is no sum over divided rows
    numbers = {
        "AdamW, Adam, EmaAdamW": [],
        "these with `max_grad_norm=1`": [2 * everybody],
        "BertAdam": [2 * everybody],
        "AdamP": [len(MATRICES) + cosines],
        "AdamP, `max_grad_norm=1`": [everybody + matrices + whole, cosines],
    }
    alike = {"Adam": "AdamW, Adam, EmaAdamW", "EmaAdamW, clipped": "these with `max_grad_norm=1`"}
    alike |= {f"BertAdam by {clip}": "BertAdam" for clip in ("group", "all")}
    return [8 * count for count in numbers[alike.get(name, name)]]


def placements(shape: tuple[int, ...], split: bool) -> list[Any]:
    return [Shard(0) if not split else Shard(1) if len(shape) > 1 else Replicate()]


def planned(devices: int, rank: int, split: bool, columns: int = 1) -> dict[str, list[int]]:
    """The bytes of each all-reduce of one step, as the script counts them."""
    with scale.world(devices, rank):
        mesh = init_device_mesh("cpu", (devices,))
        shapes = [shape[:1] + tuple(columns * n for n in shape[1:]) for shape in SHAPES]
        params = [scale.divided(shape, mesh, placements(shape, split)) for shape in shapes]
        return {name: scale.cost(make, options, params).messages for name, (make, options) in CHOICES.items()}


@pytest.mark.parametrize("split", [False, True], ids=["Shard(0)", "Shard(1)"])
def test_what_travels_depends_neither_on_the_number_of_devices_nor_on_the_rank_nor_on_how_long_rows_are(split) -> None:
    expected = {name: formula(name, split) for name in CHOICES}
    many = 1000 if SLOW_GROUPS else 100_000
    for devices, rank, columns in ((2, 1, 3), (3, 2, 1), (8, 7, 1), (1000, 999, 2), (many, 4, 1)):
        assert planned(devices, rank, split, columns) == expected


def test_no_device_has_more_than_the_first_and_pieces_are_what_is_not_empty() -> None:
    weights = [scale.Weight(shape, "column") for shape in SHAPES]
    for devices in (2, 3, 8):
        shares, pieces = [], 0
        for rank in range(devices):
            with scale.world(devices, rank):
                layout = scale.layouts(devices)[0]
                mesh = init_device_mesh("cpu", layout.mesh)
                shares.append(scale.share(weights, layout, mesh))
                pieces += sum(scale.local_shape(shape, mesh, [Shard(0)]).numel() > 0 for shape in SHAPES)
        assert max(shares) == shares[0]
        assert sum(shares) == sum(math.prod(shape) for shape in SHAPES)
        assert scale.pieces(weights, devices) == pieces


def test_states_have_the_bytes_that_the_script_says() -> None:
    for name, (make, options) in CHOICES.items():
        expected = 12 if make is fusedadam.EmaAdamW else 8
        assert scale.bytes_of_state(make, torch.float32, **options) == expected, name
