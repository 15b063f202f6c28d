"""Recordings in memory: what is saved is what is loaded, and damage is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import halfulp as hu
from halfulp.errors import CorruptionError, TamperingError

Saved = dict[str, torch.Tensor]
FROZEN = "table.grids/frozen"


@pytest.fixture
def memory() -> hu.Memory:
    torch.manual_seed(0)
    model, memory = torch.nn.Linear(8, 8), hu.Memory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with hu.Audit(optimizer, "bf16", model=model, out=memory):
        for _ in range(3):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    return memory


def test_what_was_saved_is_loaded(memory: hu.Memory) -> None:
    again = hu.Memory.loaded(memory.save())
    assert (again.manifest, again.last_step) == (memory.manifest, 3)
    assert again.trace.table().equals(memory.trace.table())
    assert hu.Memory.loaded(hu.Memory().save()).trace.recorded is False


def manifest(saved: Saved, text: bytes) -> Saved:
    return {**saved, "manifest": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("damage", "kind", "said"),
    [
        (lambda saved: {}, CorruptionError, "is no recording: it has no manifest"),
        (lambda saved: manifest(saved, b'{"a": 1'), CorruptionError, "not valid JSON"),
        (lambda saved: manifest(saved, b"{}"), CorruptionError, "it has no last_step"),
        (lambda saved: {**saved, FROZEN: saved[FROZEN] + 1}, TamperingError, "SHA-256 of its tensors"),
        (lambda saved: {k: t for k, t in saved.items() if k != FROZEN}, TamperingError, "SHA-256"),
        (
            lambda saved: manifest(saved, bytes(saved["manifest"].numpy()).replace(b'p": 3', b'p": 4')),
            TamperingError,
            "SHA-256 differs",
        ),
    ],
)
def test_damage_is_noticed(
    memory: hu.Memory, damage: Callable[[Saved], Saved], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        hu.Memory.loaded(damage(memory.save()))


def test_a_trace_without_scores_has_no_tiles(memory: hu.Memory) -> None:
    with pytest.raises(hu.UsageError, match="has no tiles: it holds neither scores"):
        _ = memory.trace.tile


def test_a_verdict_takes_it_as_it_is(memory: hu.Memory) -> None:
    assert hu.verdict(memory) == hu.verdict(memory.trace)
    with pytest.raises(hu.UsageError, match=r"takes a trace, .* not NoneType"):
        hu.verdict(None)  # type: ignore[arg-type]
