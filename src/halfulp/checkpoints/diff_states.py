"""Read the optimizer state in a checkpoint, by kind and type: moments, step counters, masters.

A rounded master equals its weight, because every framework writes it so. If it does not, weights and masters
come from different steps, one of the two was not loaded, or the export took the wrong one. Optimizers number
their parameters, and not every file records their names; a master without a name belongs to the weight of its
shape that agrees with it at the first values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfulp import files
from halfulp.checkpoints.diff_tensors import Difference, compared, unfit
from halfulp.checkpoints.stored_tensors import Stored, in_memory, unpickled
from halfulp.documents import MOST_BYTES, parsed
from halfulp.errors import CorruptionError, HalfulpError
from halfulp.text import shown

FILES = ("optimizer.pt", "optimizer.bin", "optimizer.pth")
"""File names of optimizer states beside the weights: Hugging Face's Trainer, accelerate, others."""
WITHIN = ("optimizer_states", "optimizer_state_dict", "optimizer", "optim")
"""Keys of the optimizer state in a file that also has the weights: Lightning's and common ones."""
MASTER = re.compile(r"master|fp32|main_param", re.IGNORECASE)
"""The names that frameworks give to copies of the weights in a wider type."""
NARROW = ("bfloat16", "float16")
SAMPLE = 4096
"""Values by which a master is recognised."""


@dataclass(frozen=True)
class Kept:
    """An optimizer's state in a checkpoint."""

    where: str
    kinds: dict[str, dict[str, int]]
    """Values by kind of state and by type: ``{"exp_avg": {"float32": 1000}}``."""
    trouble: str | None = None
    steps: int | None = None
    """The largest of its step counters."""
    copies: list[tuple[str | None, torch.Tensor]] = field(default_factory=list, repr=False)
    """The masters, with the names of their weights where the file has them."""

    @property
    def masters(self) -> dict[str, dict[str, int]]:
        """The kinds whose names mark them as copies of the weights in a wider type."""
        return {k: v for k, v in self.kinds.items() if MASTER.search(k)}

    def lines(self) -> list[str]:
        """Describe the state in words."""
        if self.trouble is not None:
            return [f"not read: {self.trouble}"]
        kinds = (
            f"{shown(kind)} {' and '.join(f'{t} ({n:,})' for t, n in sorted(types.items()))}"
            for kind, types in sorted(self.kinds.items())
        )
        at = "" if self.steps is None else f" at step {self.steps:,}"
        return [(", ".join(kinds) or "holds no tensor") + at]

    def to_json(self) -> dict[str, Any]:
        """Return the state in a form that ``json.dumps`` accepts."""
        return {"where": self.where, "kinds": self.kinds, "steps": self.steps, "trouble": self.trouble}

    def says(self) -> list[str]:
        """Say what is wrong with these types, if anything is."""
        out = []
        if any(t in NARROW for t in self.kinds.get("step", {})):
            out.append(
                "Counter: the optimizer's step is counted in 16 bits: in bfloat16 it stops at 256, and "
                "Adam's bias correction with it."
            )
        narrow = [k for k in ("exp_avg_sq", "v") if "bfloat16" in self.kinds.get(k, {})]
        if narrow:
            out.append(
                f"Moments: {narrow[0]} is kept in bfloat16 by nearest rounding: with beta2 = 0.999 it "
                "changes only where it is far from the new square. Keep it in float32, or write it "
                "stochastically."
            )
        averages = [k for k, types in self.kinds.items() if "ema" in k.lower() and set(types) & set(NARROW)]
        if averages:
            out.append(
                f"Average: {shown(averages[0])} is kept in 16 bits: an average with decay 0.999 stops "
                "following. Keep it in float32."
            )
        if self.copies and all(_bfloat16_only(x) for _, x in self.copies):
            out.append(
                f"Masters: all {len(self.copies)} hold bfloat16 values only, as after a resume that began "
                "them anew from the weights: what they had kept was dropped."
            )
        return out

    def changed(self, old: Kept) -> list[str]:
        """Say what an earlier checkpoint kept that this one does not; nothing if either was not read."""
        if self.trouble is not None or old.trouble is not None:
            return []
        out = []
        if old.masters and not self.masters:
            names = ", ".join(map(shown, sorted(old.masters)))
            out.append(
                f"Masters: the first checkpoint keeps float32 masters ({names}), the second none: a resume "
                "dropped them."
            )
        gone = sorted(k for k in old.kinds if k not in self.kinds and not MASTER.search(k))
        if gone:
            out.append(f"States: {', '.join(map(shown, gone))} is in the first checkpoint only.")
        narrowed = sorted(
            k
            for k, types in self.kinds.items()
            if set(types) & set(NARROW) and not set(old.kinds.get(k, NARROW)) & set(NARROW)
        )
        if narrowed:
            out.append(f"States: {', '.join(map(shown, narrowed))} went from float32 to 16 bits.")
        if None not in (old.steps, self.steps) and self.steps < old.steps:  # type: ignore[operator]  # just checked
            out.append(
                f"Counter: the optimizer counted {old.steps:,} steps in the first checkpoint and "
                f"{self.steps:,} in the second: its state was begun anew in between."
            )
        return out


def kept_states(path: Path) -> Kept | None:
    """Find the optimizer state beside or within a checkpoint; None if there is none.

    A file that cannot be read safely, or whose states have no known form, is named, with the reason; it is no
    error, as the weights can still be compared.
    """
    folder = path if path.is_dir() else path.parent
    beside = [folder / name for name in FILES if (folder / name).is_file()]
    whole = [path] if path.suffix in (".pt", ".pth", ".ckpt", ".bin") and path.is_file() else []
    for file in [*whole, *beside]:
        try:
            kept = _kept(file)
        except HalfulpError as error:
            return Kept(file.name, {}, str(error))
        except Exception as error:  # states may hold anything, nested in any way
            why = shown(str(error), 200) or "no reason was given"
            return Kept(file.name, {}, f"its states are of no known form: {type(error).__name__}: {why}")
        if kept.kinds or file in beside:
            return kept
    return None


def _kept(file: Path) -> Kept:
    content = unpickled(file)
    inside = content if isinstance(content, Mapping) else {}
    state = next((inside[k] for k in WITHIN if k in inside), content)
    kinds: dict[str, dict[str, int]] = {}
    steps: list[int] = []
    copies: list[tuple[str | None, torch.Tensor]] = []
    for name, kind, x in [*_slots(state), *_apart(inside), *(_apart(state) if state is not content else ())]:
        if kind == "step" and (not isinstance(x, torch.Tensor) or x.numel() == 1):
            steps.append(_count_of(x))
        if not isinstance(x, torch.Tensor):
            continue
        dtype = str(x.dtype).removeprefix("torch.")
        kinds.setdefault(kind, {}).setdefault(dtype, 0)
        kinds[kind][dtype] += x.numel()
        if MASTER.search(kind) and x.dtype == torch.float32:
            if (stored := in_memory(kind, x, file.stat().st_size)).dtype is None:
                raise CorruptionError(f"{shown(kind)} is {stored.kind}, expected values of float32.")
            copies.append((name, x))
    return Kept(file.name, kinds, None, max(steps, default=None), copies)


def _count_of(x: Any) -> int:
    """Return a step counter."""
    if isinstance(x, torch.Tensor) and in_memory("step", x).dtype is None:
        raise CorruptionError(f"a step is {in_memory('step', x).kind}, expected a number.")
    if not math.isfinite(x):
        raise CorruptionError(f"a step is {float(x)}, expected a finite number.")
    return int(x)


def global_step(path: Path) -> int | None:
    """Return the step of a checkpoint of Hugging Face's Trainer; None for other checkpoints."""
    file = (path if path.is_dir() else path.parent) / "trainer_state.json"
    try:
        step = parsed(files.read(file, MOST_BYTES, follow=True), file, "a trainer's state").get("global_step")
    except HalfulpError:
        return None
    return step if isinstance(step, int) else None


def _slots(saved: Any) -> Iterator[tuple[str | None, str, Any]]:
    """Yield the states of torch optimizers' state dicts: name of the weight, kind, value."""
    if isinstance(saved, list | tuple):
        for each in saved:
            yield from _slots(each)
    elif isinstance(saved, Mapping) and isinstance(saved.get("state"), Mapping):
        names = _names(saved.get("param_groups"))
        for key, slot in saved["state"].items():
            if isinstance(slot, Mapping):
                name = key if isinstance(key, str) else names.get(key)
                yield from ((name, str(k), x) for k, x in slot.items() if _counts(k, x))


def _apart(saved: Any) -> Iterator[tuple[str | None, str, Any]]:
    """Yield masters and averages that a file keeps under a name of their own, as a mapping or in lists."""
    for key, entry in saved.items() if isinstance(saved, Mapping) else ():
        if isinstance(key, str) and (MASTER.search(key) or "ema" in key.lower()):
            yield from ((name, key, x) for name, x in _leaves(entry, None))


def _leaves(node: Any, name: str | None) -> Iterator[tuple[str | None, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield name, node
    elif isinstance(node, Mapping):
        for key, inside in node.items():
            yield from _leaves(inside, str(key))
    elif isinstance(node, list | tuple):
        for inside in node:
            yield from _leaves(inside, None)


def _counts(kind: Any, x: Any) -> bool:
    return isinstance(x, torch.Tensor) or (kind == "step" and isinstance(x, int | float))


def _names(groups: Any) -> dict[Any, str]:
    """By number, the names of parameters, where the groups were made of named ones."""
    names: dict[Any, str] = {}
    for group in groups if isinstance(groups, list | tuple) else ():
        if isinstance(group, Mapping):
            names.update(zip(group.get("params") or (), group.get("param_names") or (), strict=False))
    return names


def _bfloat16_only(x: torch.Tensor) -> bool:
    """Return True if no value of a float32 tensor has more digits than bfloat16 holds."""
    flat = x.contiguous().reshape(-1).view(torch.int32)
    return all(not bool((piece & 0xFFFF).any()) for piece in torch.split(flat, 1 << 20))


# ---- masters ---------------------------------------------------------------------------------------


def compare_masters(
    kept: Kept, weights: Mapping[str, Stored], pool: Executor
) -> tuple[list[Difference], list[str]]:
    """Compare masters with their weights.

    Args:
        kept: The optimizer state in the checkpoint.
        weights: The weights in the checkpoint, by name.
        pool: The threads to use.

    Returns:
        The differences under the names of the weights, and the shapes of masters that belong to no weight.
    """
    left = {name: s for name, s in weights.items() if s.size}
    rows, orphans = [], []
    for name, master in kept.copies:
        stored = in_memory(name or "", master)
        weight = left.get(name) if name in left else _recognised(stored, left)
        if weight is None or unfit(weight, stored) is not None:
            orphans.append(str(list(master.shape)))
            continue
        del left[weight.name]
        rows.append(compared(weight, stored, pool)[0])
    return rows, orphans


def _recognised(master: Stored, weights: Mapping[str, Stored]) -> Stored | None:
    """Find the weight of a master's shape: the only one, or the one that agrees with it at most values."""
    alike = [s for s in weights.values() if s.shape == master.shape and s.dtype is not None]
    if len(alike) < 2:
        return alike[0] if alike else None
    shares = [_agreement(master, s) for s in alike]
    best = int(np.argmax(shares))
    return alike[best] if shares[best] >= 0.5 else None


def _agreement(master: Stored, weight: Stored) -> float:
    """Return the share of the first values at which the master, rounded, is the weight."""
    assert weight.dtype is not None
    count = min(SAMPLE, math.prod(weight.shape))
    rounded = master.values(0, count).to(weight.dtype)
    return float((rounded.double() == weight.values(0, count).double()).double().mean())
