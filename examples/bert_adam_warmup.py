"""BertAdam with warm-up: the learning rate rises, then falls, with the step count of the parameters, which is saved.

A small encoder learns to fill in masked tokens. Half way through the warm-up, the script saves the training and resumes
it with a new optimizer, which continues the warm-up.
"""

import argparse
import io

import torch
from torch import nn

from fusedadam import BertAdam

TOKENS, MASK, LENGTH, WIDTH = 32, 0, 16, 64

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--steps", type=int, default=200)
steps = arguments.parse_args().steps

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def sentences() -> torch.Tensor:
    """Tokens that count upwards, so that neighbours reveal a masked token."""
    first = torch.randint(1, TOKENS, (32, 1), device=device)
    return 1 + (first - 1 + torch.arange(LENGTH, device=device)) % (TOKENS - 1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def new_optimizer(model: nn.Module) -> BertAdam:
    # Clips each gradient to a norm of max_grad_norm; there is no bias correction.
    return BertAdam(model.parameters(), lr=3e-3, warmup=0.2, t_total=steps, schedule="warmup_linear", max_grad_norm=1.0)


model = Encoder().to(device)
optimizer = new_optimizer(model)
for step in range(steps):
    if step == max(1, steps // 10):  # in the middle of the warm-up
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model = Encoder().to(device)
        model.load_state_dict(saved["model"])
        optimizer = new_optimizer(model)
        optimizer.load_state_dict(saved["optimizer"])
        print(f"resumed after {step} steps, with a learning rate of {optimizer.get_lr()[0]:.1e}")
    truth = sentences()
    masked = torch.rand(truth.shape, device=device) < 0.15
    loss = nn.functional.cross_entropy(model(truth.where(~masked, MASK))[masked], truth[masked])
    rate = optimizer.get_lr()[0]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % max(1, steps // 10) == 0 or step == steps - 1:
        print(f"step {step + 1:4}: learning rate {rate:.1e}, loss {loss.item():.3f}")
