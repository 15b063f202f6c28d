"""Traces without a training run: as large as one likes, and with names that nobody should choose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfulp.audit.sinks import manifest
from halfulp.numbers.grids import grid
from halfulp.trace import Columns, Trace, TraceWriter

GRIDS = ("bf16", "fp16", "e5m2", "e4m3@128", "e3m4", "m7", "int8", "mxfp4")
KINDS = (
    ("attn.c_attn.weight", "attention", (96, 288)), ("attn.c_attn.bias", "attention", (288,)),
    ("attn.c_proj.weight", "attention", (96, 96)), ("attn.c_proj.bias", "attention", (96,)),
    ("mlp.c_fc.weight", "mlp", (96, 384)), ("mlp.c_fc.bias", "mlp", (384,)),
    ("mlp.c_proj.weight", "mlp", (384, 96)), ("mlp.c_proj.bias", "mlp", (96,)),
    ("ln_1.weight", "norm", (96,)), ("ln_1.bias", "norm", (96,)),
    ("ln_2.weight", "norm", (96,)), ("ln_2.bias", "norm", (96,)),
)  # fmt: skip

HOSTILE = (
    "<script>document.title='owned'</script>",
    "\"'><img src=x onerror=document.title='owned'>",
    "\u202egnirts\u2066",
    "x" * 10_000,
    "=cmd()|' /C calc'!A0",
    "@SUM(1+1)",
    "-1+1",
    "+1",
    "\tTAB",
    "]]></script><!--",
    "a\x1b[31mb\x00c\r\nd",
    "$\\frac{1}{",
    "javascript:alert(1)",
    "{{7*7}}${7*7}",
)


def tensors(layers: int) -> list[dict[str, Any]]:
    """The inventory of a decoder."""
    named: list[tuple[str, str, tuple[int, ...]]] = [("wte.weight", "embedding", (512, 96))]
    named += [(f"h.{i}.{name}", group, shape) for i in range(layers) for name, group, shape in KINDS]
    named.append(("ln_f.weight", "norm", (96,)))
    return inventory(named)


def inventory(
    named: Sequence[tuple[str, str, tuple[int, ...]]], stored: str = "float32"
) -> list[dict[str, Any]]:
    """Tensors as a manifest lists them."""
    return [
        {
            "id": i, "name": name, "group": group, "shape": list(shape), "numel": int(np.prod(shape)),
            "recorded": int(np.prod(shape)), "dtype": "float32", "stored": stored, "device": "cpu",
        }
        for i, (name, group, shape) in enumerate(named)
    ]  # fmt: skip


def synthetic(
    folder: Path,
    *,
    steps: int = 60,
    layers: int = 3,
    grids: Sequence[str] = GRIDS,
    part: int = 500,
    every: int = 1,
    listed: list[dict[str, Any]] | None = None,
    run: dict[str, Any] | None = None,
    loss: bool = True,
    seed: int = 0,
) -> Trace:
    """A trace whose updates die with time, deeper layers and coarser grids first."""
    listed = tensors(layers) if listed is None else listed
    options = {
        "sample": None, "decay": False, "never_moved": True, "expected_never_moved": True, "keep": False,
        "scores": None, "seed": 0,
    }  # fmt: skip
    told = manifest.begun(
        [grid(g) for g in grids], every, options, run or {"script": "train.py", "arguments": []}
    )
    told["tensors"] = listed
    told["optimizers"] = [{"class": "AdamW", "defaults": {"lr": "0.0006", "weight_decay": "0.1"}}]
    writer = TraceWriter(folder, told)
    rng = np.random.default_rng(seed)
    depth = np.linspace(0, 1, len(listed)) + 0.2 * rng.standard_normal(len(listed))
    coarse = np.linspace(-3.0, 2.5, len(grids))
    never = np.ones((len(listed), len(grids)))
    for start in range(0, steps, part):
        at = 1 + every * np.arange(start, min(start + part, steps))
        late = np.log(at) / np.log(max(every * steps, 2))
        level = 4 * late[:, None, None] - 3 + depth[None, :, None] + coarse[None, None, :]
        share = 1 / (1 + np.exp(-2 * level - 0.1 * rng.standard_normal(level.shape)))
        followed = never * np.cumprod(0.3 + 0.7 * share, axis=0)
        never = followed[-1]
        writer.commit(
            _tables(at, share, followed, listed, every * steps, loss, rng),
            {"0.moved": torch.zeros(1)},
            last_step=int(at[-1]),
        )
    return Trace.open(folder)


def _tables(
    at: Any, share: Any, never: Any, listed: Any, steps: int, loss: bool, rng: np.random.Generator
) -> dict[str, Columns]:
    n, t, g = share.shape
    size = np.array([tensor["recorded"] for tensor in listed], dtype=np.float64)
    ids = np.array([tensor["id"] for tensor in listed], dtype=np.int32)
    frozen = np.rint(share * size[None, :, None]).astype(np.int64).reshape(-1)
    still = np.rint(never * size[None, :, None]).astype(np.int64).reshape(-1)
    zero, missing = np.zeros(n * t * g, dtype=np.int64), np.full(n * t * g, np.nan)
    one = np.zeros(n * t)
    return {
        "grids": Columns(
            {
                "step": np.repeat(at.astype(np.int64), t * g),
                "tensor": np.tile(np.repeat(ids, g), n),
                "grid": np.tile(np.arange(g, dtype=np.int16), n * t),
                "frozen": frozen, "symmetric": frozen, "endpoint": zero, "subnormal": zero, "zero_code": zero,
                "never_moved": still, "phase": frozen * 2**16, "expected": still * 0.5,
                "frozen_decay": missing, "frozen_gradient": missing,
            }
        ),
        "tensors": Columns(
            {
                "step": np.repeat(at.astype(np.int64), t), "tensor": np.tile(ids, n),
                "zero_proposal": one.astype(np.int64), "nonfinite": one.astype(np.int64),
                "weight_sq": one + 1.0, "proposal_sq": one + 1e-6,
                "lr": np.repeat(6e-4 * (1 - 0.9 * at / steps), t),
            }
        ),
        "run": Columns(
            {
                "step": at.astype(np.int64),
                "loss": 1.5 + 3 * np.exp(-at / 20) + 0.05 * rng.standard_normal(n) + (0 if loss else np.nan),
            }
        ),
    }  # fmt: skip
