"""Write-back once more, the obvious way: one tensor, NumPy, a policy a line.

:class:`AdamW` and :class:`Momentum` are torch's single-tensor loops in torch's order of operations.
NumPy's float32 is torch's float32 in every operation but four: the compiler may fuse torch's multiply-adds
(``lerp``, ``addcmul``, ``add`` with ``alpha``) and a vendor's library may take its square roots. The
last bit of those is the machine's, so they are asked of torch, one call for one operation. :class:`Twin` is a
stored tensor with its policy; of halfulp it uses the reference rounding and the stream, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import halfulp as hu
from halfulp.kernels import reference
from halfulp.writeback import ECO, Master

Array = np.ndarray
real = np.float32


def torch_op(operation: Any, *arrays: Array, **options: Any) -> Array:
    """One torch operation on arrays."""
    made = (torch.from_numpy(np.array(a)) if isinstance(a, np.ndarray) else a for a in arrays)
    return operation(*made, **options).numpy()


@dataclass
class AdamW:
    """Loshchilov and Hutter's, with the first moment where ECO writes."""

    lr: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    t: int = 0
    m: Array = field(default_factory=lambda: np.zeros((), real))
    v: Array = field(default_factory=lambda: np.zeros((), real))

    def torch(self, parameters: Any) -> torch.optim.Optimizer:
        """The same from torch."""
        return torch.optim.AdamW(
            parameters, self.lr, self.betas, self.eps, self.weight_decay, foreach=False, fused=False
        )

    def step(self, p: Array, g: Array) -> Array:
        """What the optimizer makes of p."""
        (b1, b2), self.t = self.betas, self.t + 1
        if self.t == 1:
            self.m, self.v = np.zeros_like(p), np.zeros_like(p)
        p = p * real(1 - self.lr * self.weight_decay)
        self.m = torch_op(torch.lerp, self.m, g, 1 - b1)
        self.v = torch_op(torch.addcmul, self.v * real(b2), g, g, value=1 - b2)
        denominator = torch_op(torch.sqrt, self.v) / real((1 - b2**self.t) ** 0.5) + real(self.eps)
        return p + real(-self.lr / (1 - b1**self.t)) * self.m / denominator

    def feed_back(self, e: Array, decay_exact: bool = False) -> None:
        """m + (c1 / lr) (1 - 1 / b1) D e, with D = sqrt(v) / sqrt(1 - b2**t) + eps; all of it NumPy's."""
        if self.lr == 0:
            return
        (b1, b2), c1 = self.betas, 1 - self.betas[0] ** self.t
        d = np.sqrt(self.v) / real((1 - b2**self.t) ** 0.5) + real(self.eps)
        factor = c1 / self.lr * (1 - 1 / b1) * (1 - self.lr * self.weight_decay if decay_exact else 1.0)
        self.m = self.m + d * e * real(factor)

    def moments(self) -> dict[str, Array]:
        return {"exp_avg": self.m, "exp_avg_sq": self.v}


@dataclass
class Momentum:
    """SGD with momentum; weight decay is part of the gradient. With a power of two for every constant no
    product is rounded, so that fused and separate operations agree and all of it is NumPy's."""

    lr: float = 2.0**-8
    momentum: float = 0.5
    weight_decay: float = 2.0**-4
    m: Array | None = None

    def torch(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters, self.lr, self.momentum, weight_decay=self.weight_decay, foreach=False, fused=False
        )

    def add(self, a: Array, b: Array, alpha: float) -> Array:
        if np.log2(abs(alpha)) % 1 == 0:
            return a + real(alpha) * b
        return torch_op(torch.add, a, b, alpha=alpha)

    def step(self, p: Array, g: Array) -> Array:
        if self.weight_decay:
            g = self.add(g, p, self.weight_decay)
        self.m = g.copy() if self.m is None else self.m * real(self.momentum) + g
        return self.add(p, self.m, -self.lr)

    def feed_back(self, e: Array, decay_exact: bool = False) -> None:
        """m + (1 / lr) (1 - 1 / b) e."""
        assert not decay_exact
        if self.lr == 0:
            return
        assert self.m is not None
        self.m = self.add(self.m, e, 1 / self.lr * (1 - 1 / self.momentum))

    def moments(self) -> dict[str, Array]:
        assert self.m is not None
        return {"momentum_buffer": self.m}


OPTIMIZERS = {"adamw": AdamW, "momentum": Momentum}


class Twin:
    """One stored tensor under a policy."""

    def __init__(
        self,
        w: Array,
        grid: str,
        policy: Any,
        optimizer: AdamW | Momentum,
        *,
        name: str = "weight",
        seed: int = 0,
    ) -> None:
        self.grid, self.policy, self.optimizer = hu.grid(grid), policy, optimizer
        self.name, self.seed, self.steps = name, seed, 0
        self.q = reference.round(w, self.grid)
        self.moved = np.zeros(w.shape, bool)
        self.carry = np.zeros_like(w)
        raw = getattr(policy, "start_from", "code") == "raw"
        self.master = w.copy() if raw else self.q.copy()
        self.has_master = np.full(w.shape, policy == "master" or isinstance(policy, Master))
        if isinstance(policy, hu.TileMaster):
            self.has_master = np.repeat(policy.mask[name].numpy(), reference.TILE)[: w.size].reshape(w.shape)

    def round(self, z: Array, stochastic: bool = False) -> Array:
        """Q(z); a moving grid takes its scale from z."""
        stream = hu.Stream(seed=self.seed, name=self.name, step=self.steps)
        mode = reference.STOCHASTIC if stochastic else reference.NEAREST
        return reference.round(z, self.grid, mode, stream if stochastic else None)

    def error(self, z: Array, stored: Array) -> Array:
        """What was not written; beyond the ends of the range nothing is kept."""
        top = np.abs(z) >= self.largest(z)
        return np.where(top & (np.abs(z) >= np.abs(stored)), real(0), z - stored)

    def largest(self, z: Array) -> Array:
        g = self.grid.within(z.dtype)
        scale = 1.0
        if g.scaling is not None:
            scale = reference.scales(z, g)[reference.segment_ids(z.shape, g.scaling)].reshape(z.shape)
        return np.asarray(g.largest * scale)

    def code(self, x: Array, scaled_by: Array) -> Array:
        """The nearest element over the scale that some values give; a grid without scales has its values."""
        g = self.grid.within(x.dtype)
        if g.scaling is None:
            return x
        scale = reference.scales(scaled_by, g)
        each = scale[reference.segment_ids(x.shape, g.scaling)].reshape(x.shape)
        return reference.round(x, g, scale=scale).astype(np.float64) / each

    def frozen(self, z: Array, stored: Array) -> Array:
        """Where nothing of a proposal was written."""
        same = (stored == self.q) | (z == self.q)
        return same | (self.code(self.q, self.q) == self.code(stored, z))

    def step(self, g: Array) -> dict[str, int]:
        """One step; the counts that ``opt.events`` should have."""
        q, policy = self.q, self.policy
        self.steps += 1
        z = self.optimizer.step(np.where(self.has_master, self.master, q), g)
        self.master = z
        if policy == "sr":
            stored = self.round(z, stochastic=True)
        elif policy == "deadzone-sr":
            nearest = self.round(z)
            stored = np.where(self.frozen(z, nearest) & (z != q), self.round(z, stochastic=True), nearest)
        elif policy == "kahan":
            z = z + self.carry
            stored = self.round(z)
            self.carry = self.error(z, stored)
        elif policy == "eco" or isinstance(policy, ECO):
            stored = self.round(z, stochastic=getattr(policy, "rounding", "nearest") == "stochastic")
            self.optimizer.feed_back(self.error(z, stored), getattr(policy, "decay_exact", False))
        else:  # nearest, of a proposal that may come from a master
            stored = self.round(z)
        frozen = self.frozen(z, stored)
        self.q = stored
        self.moved |= ~frozen
        return {
            "frozen": int(frozen.sum()),
            "zero_proposal": int((z == q).sum()),
            "endpoint": int((np.abs(stored) == self.largest(z)).sum()),
            "nonfinite": 0,
            "never_moved": int((~self.moved).sum()),
        }

    def kept(self) -> dict[str, Array]:
        """What the policy keeps between steps."""
        if self.policy == "kahan":
            return {"carry": self.carry}
        if isinstance(self.policy, hu.TileMaster):
            tiles = np.flatnonzero(self.policy.mask[self.name].numpy()).astype(np.int32)
            return {"master": self.master[self.has_master], "tiles": tiles}
        return {"master": self.master} if self.has_master.any() else {}


def weights(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Weights over many binades, zero and both signs."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 1, shape))
    w.reshape(-1)[:3] = 0.0, -0.0, 1.0
    return w.astype(real)


def gradients(shape: tuple[int, ...], steps: int, seed: int = 1) -> list[Array]:
    """Gradients with a common part, so that errors add up, and coordinates that get none."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(shape)
    quiet = rng.random(shape) < 0.05
    draw = (np.where(quiet, 0.0, 0.3 * rng.standard_normal(shape) + common) for _ in range(steps))
    return [g.astype(real) for g in draw]
