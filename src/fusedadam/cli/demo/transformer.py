"""A small GPT on bytes, and text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
ASCII = 128
PAIR_SIZE = 0.1  # of the numbers in the embedding of a pair, as a root mean square


@dataclass(frozen=True)
class Size:
    """Short sequences and small batches: the fewer tokens per step, the larger the optimizer's share of its time."""

    width: int
    heads: int
    layers: int
    context: int
    batch: int


class TinyTransformer(nn.Module):
    """Computes the logits of the next byte for each byte.

    Each pair of neighbouring characters has an embedding, like the tokens of most language models: many parameters at
    little cost, so that the optimizer has something to do. These embeddings are normalized, so only their direction
    matters: weights that AdamP projects.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(BYTES, size.width)
        self.pair_embedding = nn.Embedding(ASCII * ASCII, size.width)
        self.position_embedding = nn.Embedding(size.context, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(size.width)
        self.layers = nn.TransformerEncoder(layer, size.layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        self.apply(_small_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        before = F.pad(tokens[:, :-1], (1, 0))
        pairs = (before % ASCII) * ASCII + tokens % ASCII
        directions = F.normalize(self.pair_embedding(pairs), dim=-1)
        embedded = self.byte_embedding(tokens) + PAIR_SIZE * directions.shape[-1] ** 0.5 * directions
        x = embedded + self.position_embedding.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.layers(x, mask, is_causal=True))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy, in nats per byte, of predicting each byte of a window from the bytes before it."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def _small_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def standard_library(limit: int = 4_000_000) -> tuple[Tensor, Tensor]:
    """The first ``limit`` bytes of the standard library's modules, their lines shuffled, always in the same order: what
    a batch contains does not depend on its module. A tenth is for validation."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < limit // 10:
        raise RuntimeError(f"the demo trains on Python's standard library, but {folder} has hardly any source files")
    lines = [line for line in text[:limit].splitlines(keepends=True) if len(set(line)) > 5]  # not blank, no ruler
    random.Random(0).shuffle(lines)
    tokens = torch.frombuffer(bytearray().join(lines), dtype=torch.uint8).long()
    border = len(tokens) * 9 // 10
    return tokens[:border], tokens[border:]


def random_windows(text: Tensor, size: Size, generator: torch.Generator) -> Tensor:
    """A batch to train on: ``context`` bytes and the next one, from random positions."""
    starts = torch.randint(len(text) - size.context, (size.batch,), generator=generator)
    return _windows(text, starts, size.context + 1)


def even_windows(text: Tensor, size: Size, count: int) -> Tensor:
    """``count`` windows spread evenly over the text, the same for every optimizer."""
    return _windows(text, torch.linspace(0, len(text) - size.context - 1, count).long(), size.context + 1)


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length)]
