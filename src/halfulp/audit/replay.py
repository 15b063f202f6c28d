"""Another audit of a run that is over, from the weights that its trace kept."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from halfulp import kernels
from halfulp.audit.meter.rows import Row, Summing, tables
from halfulp.errors import CorruptionError, UsageError
from halfulp.numbers.grids import grid as named
from halfulp.text import plain
from halfulp.trace import KEPT, Trace, TraceWriter

Followed = dict[str, Any]
"""The state that :func:`kernels.audit` updates from step to step."""


def replay(trace: Trace, grids: Iterable[str], out: str | Path) -> Trace:
    """Record what other grids would have done to every step of a run whose weights were kept.

    Args:
        trace: A trace that was recorded with ``keep=True``.
        grids: The other grids.
        out: The folder of the new trace.

    Returns:
        The new trace, like that of a second audit.

    Raises:
        UsageError: If the trace kept no weights, or a sample that cannot tell the scale of a grid.
        CorruptionError: If kept weights are missing.

    >>> import tempfile
    >>> from halfulp.audit import Audit
    >>> model, folder = torch.nn.Linear(8, 8), Path(tempfile.mkdtemp())
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    >>> with Audit(optimizer, "bf16", model=model, out=folder / "run", keep=True):
    ...     _ = model(torch.ones(1, 8)).sum().backward()
    ...     optimizer.step()
    >>> replay(Trace.open(folder / "run"), ["e5m2"], folder / "again").grids
    ['e5m2']
    """
    out = Path(out)
    wanted = [named(g) for g in grids]
    if not trace.manifest["options"]["keep"]:
        raise UsageError(f"{trace.path} kept no weights to replay: record with keep=True.")
    if trace.manifest["options"]["sample"] and any(g.scaling is not None and g.scaling.moves for g in wanted):
        raise UsageError(
            "sample= sees some tiles only, but this grid's scale follows whole tensors: leave it out."
        )
    options = {**trace.manifest["options"], "decay": False, "keep": False, "scores": None, "rehearse": None}
    changed = {"grids": [g.name for g in wanted], "options": options, "replayed_from": plain(str(trace.path))}
    writer = TraceWriter(out, {**trace.manifest, **changed})
    follow = [
        name
        for name, on in (("moved", options["never_moved"]), ("stay", options["expected_never_moved"]))
        if on
    ]
    followed: dict[int, Followed] = {}
    listed = zip(
        trace.parts, trace.by_part("tensors", "step", "tensor", "lr"), trace.by_part("run"), strict=True
    )
    for part, by_tensor, by_step in listed:
        losses = dict(by_step.rows())
        if not losses:  # a part of evaluations alone
            continue
        kept = trace.kept(part)
        place: dict[int, int] = {}
        rows = []
        for step, tensor, lr in by_tensor.rows():
            at = place[tensor] = place.get(tensor, -1) + 1
            before, after = (_kept(part, kept, f"{tensor}.{what}", at) for what in ("before", "after"))
            if tensor not in followed:
                followed[tensor] = _fresh(before, len(wanted), follow)
            found = kernels.audit(before, after, wanted, after=True, **followed[tensor])
            rows.append(Row(step=step, ids=[tensor], rates=[lr], numbers=Summing(found)()))
        writer.commit(tables(rows, losses, len(wanted)), {}, last_step=rows[-1].step)
    writer.close()
    return Trace.open(out)


def _kept(part: Path, kept: dict[str, torch.Tensor], name: str, at: int) -> torch.Tensor:
    if name not in kept or at >= len(kept[name]):
        raise CorruptionError(f"{part / KEPT} does not have the weights {name} of every step of its part.")
    return kept[name][at]


def _fresh(x: torch.Tensor, grids: int, follow: list[str]) -> Followed:
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    made = {
        "moved": torch.zeros((grids, (x.numel() + 7) // 8), dtype=torch.uint8, device="cpu"),
        "stay": torch.ones((grids, x.numel()), dtype=work, device="cpu"),
    }
    return {name: made[name] for name in follow}
