"""What the recipes share: the answer of an audit, comparisons of models and ranks, a printed outcome."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import halfulp as hu

FIXES = "hu.AdamW", "hu.WriteBack("
"""Beginnings of the lines that a verdict prints for a bf16 run: a new optimizer, or one that is wrapped."""


def lost(folder: Path | str, at_least: float = 0.5) -> float:
    """Return the share of updates that a plain bf16 run lost; the verdict goes to standard error."""
    if several_ranks():
        torch.distributed.barrier()  # the first rank writes the trace
    verdict = hu.verdict(hu.Trace.open(folder))
    print(verdict, file=sys.stderr)
    (finding,) = (f for f in verdict.findings if f.grid == "bf16")
    assert finding.measured
    assert finding.lost > at_least
    assert any(fix in str(verdict) for fix in FIXES)
    return finding.lost


def assert_equal(a: torch.nn.Module, b: torch.nn.Module) -> None:
    """Bit by bit."""
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def ranks_agree(model: torch.nn.Module) -> dict[str, str]:
    """Check that every rank holds the same bits after DDP; of one rank nothing is said."""
    import torch.distributed as dist

    if not several_ranks():
        return {}
    for name, p in model.named_parameters():
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, p), name
    return {"distributed": "DDP, two ranks agree"}


def ranks() -> int:
    """Return the number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def several_ranks() -> bool:
    return ranks() > 1


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def report(main: Callable[[Path], dict[str, Any]]) -> None:
    """Run a recipe in a folder of its own, one for all ranks, and print what it showed as a line of JSON."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))
    folder = Path(tempfile.gettempdir()) / f"halfulp-recipe-{run}"
    folder.mkdir(exist_ok=True)
    try:
        shown = main(folder)
        if several_ranks():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    finally:
        if is_first():
            shutil.rmtree(folder, ignore_errors=True)
    if is_first():
        print(json.dumps(shown))
    if several_ranks():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # a process that ends as usual may be aborted by threads that torch's gloo leaves behind
