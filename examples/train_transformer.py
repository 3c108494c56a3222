"""Train a small transformer on text, with parameter groups, clipping and a schedule, as in a real training.

The text is the source code of Python's standard library, so there is nothing to download.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn

from fusedadam import AdamW

CONTEXT, WIDTH, BATCH = 48, 96, 8

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--steps", type=int, default=150)
steps = arguments.parse_args().steps

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
text = torch.tensor(list(b"".join(file.read_bytes() for file in files)), device=device)


class Transformer(nn.Module):
    """Predicts the logits of the next byte from the bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.bytes(tokens) + self.positions.weight[:length]
        return self.head(self.layers(x, mask=self.mask[:length, :length], is_causal=True))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), device=device)
    windows = text[starts + torch.arange(CONTEXT + 1, device=device)]
    return windows[:, :-1], windows[:, 1:]


model = Transformer().to(device)

# Weight decay for matrices, none for biases and norms: two groups, as with any torch optimizer.
matrices = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
# max_grad_norm clips inside the step and leaves p.grad unchanged.
optimizer = AdamW(groups, lr=2e-3, betas=(0.9, 0.95), max_grad_norm=1.0)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)

print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}, {len(text):,} bytes of text")
for step in range(1, steps + 1):
    inputs, targets = batch()
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step == 1 or step % max(1, steps // 10) == 0:  # reading the loss waits for the device, so not in every step
        print(f"step {step:4}: {loss.item() / math.log(2):.2f} bits a byte, norm {optimizer.grad_norm.item():.2f}")

said = torch.tensor([list(b"def ")], device=device)
with torch.no_grad():
    for _ in range(60):
        choices = torch.softmax(model.eval()(said[:, -CONTEXT:])[:, -1] / 0.7, dim=-1)
        said = torch.cat([said, torch.multinomial(choices, 1)], dim=1)
print(f"It now writes: {bytes(said[0].tolist()).decode(errors='replace')!r}")
