"""Optimizers chosen by name: what a trainer's configuration file has to say, without a change to the trainer.

Every optimizer of fusedadam is a class at the top of the package with the signature of torch.optim, so that any trainer
that imports its optimizer by a dotted path can have it. The configurations below are what YAML or TOML files of such
trainers contain; `by_name` resolves them as those trainers do.
"""

import argparse
import importlib

import torch
from torch import nn

CONFIGURATIONS = {
    # one dotted path, as in torchtune's recipes
    "_component_": {"_component_": "fusedadam.AdamW", "lr": 3e-3, "max_grad_norm": 1.0},
    # Hydra
    "_target_": {"_target_": "fusedadam.Lion", "lr": 2e-3},
    # LightningCLI
    "class_path": {"class_path": "fusedadam.AdamP", "init_args": {"lr": 3e-3, "weight_decay": 1e-2}},
    # a module and a name in it, as in verl's optimizer_impl
    "optimizer_impl": {"optimizer_impl": "fusedadam", "optimizer": "EmaAdamW", "lr": 3e-3, "ema_decay": 0.99},
}


def by_name(configuration, params):
    """The optimizer that a configuration names."""
    options = dict(configuration)
    if "optimizer_impl" in options:
        path = f"{options.pop('optimizer_impl')}.{options.pop('optimizer')}"
    else:
        path = options.pop(next(key for key in ("_component_", "_target_", "class_path") if key in options))
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(params, **options.pop("init_args", options))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=100)
    steps = arguments.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for style, configuration in CONFIGURATIONS.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
        optimizer = by_name(configuration, model.parameters())
        x, losses = torch.randn(64, 8, device=device), []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x[:, :1] * x[:, 1:2] + x[:, 2:3])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"{style:14} {type(optimizer).__name__:8} loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
