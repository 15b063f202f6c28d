"""Fine-tune a bfloat16 checkpoint at 1e-5 three ways: as people do it, with one line changed, and in float32.

A small decoder first learns Python's help texts in float32 and is saved in bfloat16, as most checkpoints are.
Then it is fine-tuned on other text at a learning rate of 1e-5, from one checkpoint and on the same batches:

    python examples/bf16_finetune.py                    # all three, about a minute on two cores
    halfulp audit examples/bf16_finetune.py plain       # what the first of them loses, and the fix

Everything is plain PyTorch apart from the line under test.
"""

from __future__ import annotations

import pydoc
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn

import halfulp as hu

CONTEXT, BATCH, WIDTH = 64, 16, 128
CHECKPOINT = Path(tempfile.gettempdir()) / "halfulp_bf16_finetune.pt"


class Decoder(nn.Module):
    """A character-level transformer of two layers."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, dtype=x.dtype)
        return self.head(self.norm(self.layers(x, mask=mask, is_causal=True)))


def texts() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the text to learn first, the text to fine-tune on, and how many letters there are."""
    first = "\n".join(topics[key] for key in sorted(topics))
    names = ("str", "int", "list", "dict", "set", "bytes")
    second = "\n".join(pydoc.plain(pydoc.render_doc(name)) for name in names)
    letters = sorted(set(first + second))
    code = {letter: i for i, letter in enumerate(letters)}
    encoded = [torch.tensor([code[letter] for letter in text]) for text in (first, second)]
    return encoded[0], encoded[1], len(letters)


def batches(tokens: torch.Tensor, steps: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([tokens[s : s + CONTEXT + 1] for s in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, tokens: torch.Tensor) -> float:
    return sum(loss_of(model, x, y).item() for x, y in batches(tokens, 40, seed=99)) / 40


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, steps: int) -> None:
    for x, y in batches(tokens, steps, seed=1):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5),
    "fixed": lambda model: hu.AdamW(model.parameters(), lr=1e-5),
    "float32": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5),
}


def prepare() -> None:
    """Learn the first text in float32, and save the weights in bfloat16."""
    torch.manual_seed(0)
    first, _, letters = texts()
    model = Decoder(letters)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), first, 400)
    torch.save(model.to(torch.bfloat16).state_dict(), CHECKPOINT)


def main(ways: list[str]) -> None:
    if not CHECKPOINT.exists():
        subprocess.run([sys.executable, __file__, "prepare"], check=True)
    _, second, letters = texts()
    held_out, second = second[: len(second) // 5], second[len(second) // 5 :]
    for way in ["checkpoint", *ways]:
        model = Decoder(letters).to(torch.bfloat16)
        model.load_state_dict(torch.load(CHECKPOINT, weights_only=True))
        if way == "float32":
            model.float()
        if way != "checkpoint":
            train(model, OPTIMIZERS[way](model), second, 300)
        print(f"{way}: {evaluate(model, held_out):.4f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["prepare"]:
        prepare()
    else:
        main(sys.argv[1:] or list(OPTIMIZERS))
