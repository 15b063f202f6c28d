"""GGUF files: tensors are where the format says, and nothing else is believed."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.checkpoints import gguf_file
from halfulp.tensors import raw

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30, torch.float64: 28}


def text(said: str) -> bytes:
    return struct.pack("<Q", len(said.encode())) + said.encode()


def written(tensors: dict[str, torch.Tensor], alignment: int = 32, quantised: bool = False) -> bytes:
    """A file as the format's specification lays it out, with a key of every kind."""
    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.alignment") + struct.pack("<II", 4, alignment),
        text("a.flag") + struct.pack("<IB", 7, 1),
        text("a.number") + struct.pack("<Id", 12, 0.5),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
        text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1.0, 2.0, 3.0),
    ]
    entries, data = b"", b""
    for name, x in tensors.items():
        data += bytes(-len(data) % alignment)
        shape = list(reversed(x.shape))
        entries += text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape, KINDS[x.dtype], len(data)
        )
        data += bytes(raw(x))
    if quantised:
        data += bytes(-len(data) % alignment)
        entries += text("blk.0.ffn_up.weight") + struct.pack("<IQQIQ", 2, 256, 1, 12, len(data))
        data += bytes(144)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors) + quantised, len(pairs)) + b"".join(pairs) + entries
    return head + bytes(-len(head) % alignment) + data


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        "blk.0.attn_q.weight": torch.randn(8, 32, generator=made).bfloat16(),
        "blk.0.attn_norm.weight": torch.ones(33),
        "output.weight": torch.randn(16, 8, generator=made).half(),
    }


@pytest.mark.parametrize("alignment", [32, 64])
def test_it_is_as_the_same_tensors_in_memory(
    tensors: dict[str, torch.Tensor], alignment: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(written(tensors, alignment, quantised=True))
    found = hu.check(path, 1e-5)
    assert found.table() == hu.check(tensors, 1e-5).table()
    assert found.skipped == {"blk.0.ffn_up.weight": "Q4_K is not a type of weights that is known here"}
    moved = {name: x + 0.01 for name, x in tensors.items()}
    assert hu.diff(path, moved).table() == hu.diff(tensors, moved).table()


def test_damage_is_named(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Every cut, and bytes that changed, end in an error of ours or in other numbers."""
    path, content = tmp_path / "model.gguf", written(tensors)
    made: Any = np.random.default_rng(0)
    for cut in (0, 3, 7, 20, 60, 200, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(hu.HalfulpError, match="is not a GGUF file that can be read"):
            gguf_file.places(path)
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(made.integers(1, 6)):
            changed[made.integers(0, 400)] = made.integers(0, 256)
        path.write_bytes(changed)
        with contextlib.suppress(hu.HalfulpError):
            hu.check(path, 1e-5)
