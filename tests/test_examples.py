"""The examples run as a user would run them, shortened, and show what they are there to show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


# One process for all of them: most of what an example takes is the import of torch.
ALL = """
import runpy, sys
for path, steps in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.argv = [path, "--steps", steps]
    runpy.run_path(path, run_name="__main__")
    print("=====")
"""


def outputs(steps: dict[str, int]) -> dict[str, str]:
    arguments = [word for name, count in steps.items() for word in (str(EXAMPLES / name), str(count))]
    done = subprocess.run(
        [sys.executable, "-c", ALL, *arguments], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "an example gives no warnings"
    return dict(zip(steps, done.stdout.split("=====\n"), strict=False))


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_each_has_its_line_in_the_readme():
    listed = re.findall(r"^- \[(\S+)\]\(\1\): \S", (EXAMPLES / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(file.name for kind in ("*.py", "*.ipynb") for file in EXAMPLES.glob(kind))


def a_transformer_learns(said: str) -> None:
    bits = numbers(r"([\d.]+) bits a byte", said)
    assert bits[0] > 7
    assert bits[-1] < 5.5


def the_averaged_weights_are_those_that_are_served(said: str) -> None:
    pretrained, tuned, averaged, served = numbers(r": +([\d.]+)%", said)
    assert tuned > pretrained
    assert averaged > pretrained
    assert averaged != tuned
    assert served == averaged


def adamp_keeps_scale_invariant_weights_short(said: str) -> None:
    adamw, adamp = numbers(r"convolutions ([\d.]+) times", said)
    assert adamp < adamw
    projected = re.findall(r"^  (\S+) .* projected: channel$", said, re.MULTILINE)
    convolutions = ["0.weight", "4.weight", "8.weight"]
    # a GPU multiplies convolutions in TF32, and a gradient is then less orthogonal to its weight than it should be
    assert set(projected) <= set(convolutions) if torch.cuda.is_available() else projected == convolutions
    assert min(numbers(r"([\d.]+)% right", said)) > 90


def a_resumed_warm_up_goes_on_where_it_was(said: str) -> None:
    rates = numbers(r"learning rate ([\d.e+-]+)", said)
    peak = rates.index(max(rates))
    assert rates[0] == 0
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert numbers(r"with a learning rate of ([\d.e+-]+)", said) == [3e-3 / 2]  # half way up
    losses = numbers(r"loss ([\d.]+)", said)
    assert losses[-1] < losses[0] - 0.5


def mixed_precision_says_what_it_does(said: str) -> None:
    assert ("GradScaler" if torch.cuda.is_available() else "no GPU here: bfloat16") in said.splitlines()[0]
    losses = numbers(r"loss ([\d.]+)", said)
    assert losses[-1] < losses[0] / 4
    assert "moments torch.float32" in said
    taken, asked, skipped = map(int, re.search(r"(\d+) of (\d+) steps taken, (\d+) skipped", said).groups())
    assert (taken + skipped, asked) == (40, 40)


def an_optimizer_of_ones_own_is_the_papers_and_trains_in_8_bits(said: str) -> None:
    assert numbers(r"in float64: ([\d.e+-]+)", said)[0] < 1e-14
    for first, last in re.findall(r"loss ([\d.]+) -> ([\d.]+)", said):
        assert float(last) < float(first) / 3


def every_way_to_name_an_optimizer_trains(said: str) -> None:
    rows = re.findall(r"^(\S+) +(\S+) +loss ([\d.]+) -> ([\d.]+)$", said, re.MULTILINE)
    assert [name for _, name, _, _ in rows] == ["AdamW", "Lion", "AdamP", "EmaAdamW"]
    assert all(float(last) < float(first) for _, _, first, last in rows)


EXPECTED = {
    "train_transformer.py": (40, a_transformer_learns),
    "finetune_with_ema.py": (150, the_averaged_weights_are_those_that_are_served),
    "adamp_conv_net.py": (60, adamp_keeps_scale_invariant_weights_short),
    "bert_adam_warmup.py": (60, a_resumed_warm_up_goes_on_where_it_was),
    "mixed_precision.py": (40, mixed_precision_says_what_it_does),
    "chosen_by_name.py": (40, every_way_to_name_an_optimizer_trains),
    "your_own_optimizer.py": (300, an_optimizer_of_ones_own_is_the_papers_and_trains_in_8_bits),
}


def test_the_examples_show_what_they_are_there_to_show():
    for name, said in outputs({name: steps for name, (steps, _) in EXPECTED.items()}).items():
        EXPECTED[name][1](said)
