"""One tensor under audit: where its values are, which are looked at, and what is followed over steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.kernels import TILE, tiles_of
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream
from halfulp.writeback.sharding import is_sharded, local, reduce_sum, shard_offset, unsupported_moving
from halfulp.writeback.storage.native_weight import NativeCodes
from halfulp.writeback.storage.packed import Codes

if TYPE_CHECKING:
    from halfulp.audit.meter.counts import Batch

SAMPLING = -2
"""The step number of the stream that chooses tiles."""
FOLLOWED = ("moved", "stay", "scores")


@dataclass(eq=False)
class Watched:
    """One tensor under audit."""

    id: int
    name: str
    group: str
    tensor: torch.Tensor
    grids: list[Grid]
    stored: str
    """The grid or dtype that the weights are stored on."""
    copy: str | None = None
    """The narrower dtype of the model's own copy, if this is a master of it."""
    codes: Codes | NativeCodes | None = None
    """The codes that hold the values, if the parameter is an empty shell."""
    tiles: torch.Tensor | None = None
    short: bool = False
    """True if the last of these tiles is incomplete."""
    recorded: int = 0
    """Number of recorded coordinates, over all ranks."""
    before: torch.Tensor | None = None
    takes_part: bool = False
    """True if it is known to take part in the step, as it had a gradient when that began."""
    given: torch.Tensor | None = None
    """That gradient, kept for scoring because the step may drop it."""
    moved: torch.Tensor | None = None
    stay: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    batch: Batch | None = None
    """The batch in which it is audited together with others."""
    rehearsed: bool = False
    shown: torch.Tensor | None = None
    """The model's own copy, if this is a master of it."""

    def __post_init__(self) -> None:
        self.began_as = self.kind
        """The kind of tensor for which this state was created."""

    @property
    def kind(self) -> tuple[torch.dtype, torch.Size, torch.device]:
        """Return what tensors of one batch must share: dtype, shape and device."""
        return self.tensor.dtype, self.tensor.shape, self.tensor.device

    @property
    def altered(self) -> bool:
        """True if it has become another kind of tensor during the run, as by ``model.bfloat16()``."""
        return self.codes is None and self.kind != self.began_as

    @cached_property
    def sharded(self) -> bool:
        """Return True if this rank holds only a part of the tensor."""
        return is_sharded(self.tensor)

    def choose(self, share: float | None, seed: int) -> None:
        """Look at a share of the tiles, chosen by the tensor's name; at all of them by default."""
        if share is not None and share < 1:
            total = tiles_of(local(self.tensor).numel())
            order = np.argsort(Stream(seed=seed, name=self.name, step=SAMPLING).words(total), kind="stable")
            chosen = np.sort(order[: max(1, round(total * share))])
            self.tiles = torch.from_numpy(chosen).to(self.tensor.device)
            self.short = bool((chosen + 1 > local(self.tensor).numel() // TILE).any())
        here = self.values()
        self.recorded = here.numel()
        if self.sharded:
            count = torch.tensor(here.numel(), dtype=torch.float64, device=here.device)
            self.recorded = int(reduce_sum(count, self.tensor))

    def values(self) -> torch.Tensor:
        """Return the weights that are audited: all of those on this rank, or the sampled tiles."""
        x = self.tensor.detach()
        if self.codes is not None:
            x = self.codes.get().to(x.dtype)
        elif self.sharded:
            x = local(x)
        return x if self.tiles is None else sampled(x, self.tiles, self.short)

    def whole(self) -> torch.Tensor:
        """Return the audited weights of an unsharded CPU tensor without codes: all unless sampled."""
        x = self.tensor
        return x if self.tiles is None else sampled(x.detach(), self.tiles, self.short)

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient of the same weights, in their dtype; None if a step moved them without one."""
        own = gradient_of(self.tensor)
        given = self.given if own is None else own
        if given is None:
            return None
        g = local(given.detach())
        g = (g.to_dense() if g.is_sparse else g).to(self.tensor.dtype)
        return g if self.tiles is None else sampled(g, self.tiles, self.short)

    def set_aside(self) -> None:
        """Keep the weights as they are before a step."""
        values = self.values()
        if self.before is None or self.before.shape != values.shape:
            self.before = torch.empty_like(values, memory_format=torch.contiguous_format)
        self.before.copy_(values)

    def changed(self) -> bool:
        """Return True if a weight on this rank differs, by its bits, from what was set aside."""
        assert self.before is not None
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self.before.element_size()]
        return not torch.equal(self.values().view(bits), self.before.view(bits))

    def follow(self, *, moved: bool, stay: bool, scores: int | None, saved: dict[str, torch.Tensor]) -> None:
        """Begin, or take up from a resumed trace, what is followed; ``scores``: the size of a tile."""
        here, g = self.values(), len(self.grids)
        n, work = here.numel(), torch.float64 if here.dtype == torch.float64 else torch.float32
        if moved and self.moved is None:
            bits = torch.zeros((g, (n + 7) // 8), dtype=torch.uint8, device="cpu")
            self.moved = self._taken(saved, "moved", bits).to(here.device)
        if stay and self.stay is None:
            self.stay = self._taken(saved, "stay", torch.ones((g, n), dtype=work, device="cpu"))
        if scores is not None and self.scores is None and self.tensor.dim() >= 2:
            shape = (tiles_of(n, scores), len(kernels.SCORES))
            self.scores = self._taken(saved, "scores", torch.zeros(shape, dtype=torch.float64, device="cpu"))

    def _taken(self, saved: dict[str, torch.Tensor], what: str, fresh: torch.Tensor) -> torch.Tensor:
        key = f"{self.id}.{what}"
        if key not in saved:
            return fresh
        check_saved(saved[key], fresh, f"{what} of {self.name!r}")
        return saved.pop(key)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a resumed audit needs."""
        values = [(what, getattr(self, what)) for what in FOLLOWED]
        return {f"{self.id}.{what}": x.contiguous().cpu() for what, x in values if x is not None}

    def inventory(self) -> dict[str, Any]:
        """Return the entry of this tensor in the manifest."""
        return {
            "id": self.id,
            "name": self.name,
            "group": self.group,
            "shape": list(self.tensor.shape),
            "numel": self.tensor.numel(),
            "recorded": self.recorded,
            "dtype": str(self.tensor.dtype).removeprefix("torch."),
            "stored": self.stored,
            **({} if self.copy is None else {"copy": self.copy}),
            **({"rehearsed": True} if self.rehearsed else {}),
            "device": self.tensor.device.type,
        }


def check_saved(saved: torch.Tensor, fresh: torch.Tensor, what: str) -> None:
    """Refuse what a trace saved of another tensor."""
    if saved.shape != fresh.shape or saved.dtype != fresh.dtype:
        raise UsageError(
            f"cannot resume: {what} was recorded as {saved.dtype} of {tuple(saved.shape)}, but here it is "
            f"{fresh.dtype} of {tuple(fresh.shape)}. Is it the same model?"
        )


def sampled(x: torch.Tensor, tiles: torch.Tensor, short: bool) -> torch.Tensor:
    """Return the coordinates of chosen tiles; ``short``: the last one is not a whole tile."""
    flat = x.reshape(-1)
    whole = flat.numel() // TILE
    rows = flat[: whole * TILE].view(whole, TILE)
    if not short:
        return rows[tiles].reshape(-1)
    return torch.cat([rows[tiles[:-1]].reshape(-1), flat[whole * TILE :]])


def gradient_of(p: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's gradient; Megatron has one of another dtype in ``decoupled_grad``."""
    return getattr(p, "decoupled_grad", None) if p.grad is None else p.grad


def check_shard(x: torch.Tensor, grids: list[Grid]) -> None:
    """Refuse a grid whose scales a shard cannot tell."""
    for g in grids:
        unsupported_moving(x, g)
        if is_sharded(x) and g.scaling is not None and g.scaling.moves:
            shard_offset(x)  # rows must be whole
