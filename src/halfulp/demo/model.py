"""Define the model of the demo (nanoGPT's shape and names, without biases) and its plain training loop.

Initial weights and the order of data depend on a seed alone, so the runs of the demo differ only in how they
store their weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from halfulp.numbers.streams import Stream

Tokens = npt.NDArray[np.uint16]
HEADS = 4
STD = 0.02
HELD_OUT_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the model and the length of the run."""

    layers: int
    width: int
    context: int
    batch: int
    updates: int
    rate: float = 1e-3

    def learning_rate(self, update: int) -> float:
        """Return the rate of an update, counted from 1: a cosine from the peak towards a tenth of it."""
        floor, through = self.rate / 10, (update - 1) / self.updates
        return floor + 0.5 * (1.0 + math.cos(math.pi * through)) * (self.rate - floor)


class LetterAttention(nn.Module):
    """Causal attention; queries, keys and values are one matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to the letters so far."""
        b, t, width = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(seen.transpose(1, 2).reshape(b, t, width))  # type: ignore[no-any-return]  # torch's


class FeedForward(nn.Module):
    """Four widths of GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the two linear layers."""
        return self.c_proj(F.gelu(self.c_fc(x)))  # type: ignore[no-any-return]  # torch's


class Layer(nn.Module):
    """Attention, then the feed-forward network, each added to what it read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width, bias=False), LetterAttention(width)
        self.ln_2, self.mlp = nn.LayerNorm(width, bias=False), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add attention, then the feed-forward layers."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]  # torch's


class LetterModel(nn.Module):
    """Logits of the next letter at every position; the output matrix is the input's."""

    def __init__(self, size: Size, letters: int, seed: int = 0) -> None:
        super().__init__()
        with torch.device("meta"):  # so that nothing is drawn from the global generator
            self.transformer = nn.ModuleDict(
                {
                    "wte": nn.Embedding(letters, size.width),
                    "wpe": nn.Embedding(size.context, size.width),
                    "h": nn.ModuleList([Layer(size.width) for _ in range(size.layers)]),
                    "ln_f": nn.LayerNorm(size.width, bias=False),
                }
            )
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                std = STD / (2 * size.layers) ** 0.5 if name.endswith("c_proj.weight") else STD
                if p.dim() < 2:
                    p.fill_(1.0)
                else:
                    p.normal_(0.0, std, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next letter."""
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for layer in parts["h"]:  # type: ignore[attr-defined]  # it is a list
            x = layer(x)
        return F.linear(parts["ln_f"](x), self.transformer["wte"].weight)  # type: ignore[arg-type]  # a tensor


def adamw(model: nn.Module, size: Size) -> torch.optim.AdamW:
    """Make AdamW with weight decay on matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=size.rate, betas=(0.9, 0.95), fused=True)


class LetterTraining:
    """A run, as :mod:`halfulp.pilots.rungs` takes it: ``update`` says how far it is."""

    def __init__(
        self, model: LetterModel, optimizer: torch.optim.Optimizer, size: Size, text: Tokens, held_out: Tokens
    ) -> None:
        self.model: nn.Module = model
        self.optimizer, self.size = optimizer, size
        self.text, self.held_out = text, held_out
        self.update = 0

    @property
    def done(self) -> bool:
        """Return True when every update has been made."""
        return self.update >= self.size.updates

    def batch(self, update: int) -> torch.Tensor:
        """Return the sequences of an update."""
        return self._sequences(self.text, Stream(seed=1, name="training", step=update))

    def step(self, batch: torch.Tensor, update: int) -> torch.Tensor:
        """Make one update; return its training loss."""
        self.update = update
        for group in self.optimizer.param_groups:
            group["lr"] = self.size.learning_rate(self.update)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the same held-out sequences every time."""
        streams = (Stream(seed=4242, name="evaluation", step=i) for i in range(HELD_OUT_BATCHES))
        batches = (self._sequences(self.held_out, stream) for stream in streams)
        return sum(float(self._loss(batch)) for batch in batches) / HELD_OUT_BATCHES

    def _sequences(self, text: Tokens, stream: Stream) -> torch.Tensor:
        """Return a batch of sequences that begin where the stream says."""
        words = stream.words(2 * self.size.batch).astype(np.uint64)
        starts = ((words[::2] << np.uint64(32)) | words[1::2]) % np.uint64(len(text) - self.size.context)
        rows = np.stack([text[i : i + self.size.context + 1] for i in starts.astype(np.int64).tolist()])
        return torch.from_numpy(rows.astype(np.int64))

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the mean loss of a batch."""
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
