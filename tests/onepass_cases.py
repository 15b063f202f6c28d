"""Single tensors, stepped by the reference of one-pass steps and by a kernel side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import onepass, onepass_reference, reference
from halfulp.kernels.plan import plan_for
from halfulp.kernels.reference import DEADZONE, NEAREST, STOCHASTIC
from halfulp.numbers.streams import Stream
from halfulp.writeback.storage.packed import pack_bits, unpack_bits

real = np.float32
SIZE = 768 * 2 + 101


def patterns(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x).view(np.int16).copy()).view(torch.bfloat16)


def flat(x: torch.Tensor) -> Any:
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


class Case:
    """One tensor, stepped by the reference and by the kernel side by side."""

    def __init__(
        self, grid: str, storage: str, mode: int, keeps: int = onepass.NOTHING, **options: Any
    ) -> None:
        self.rng = np.random.default_rng(0)
        self.grid = plan_for(hu.grid(grid), torch.float32).grid
        self.mode, self.keeps, self.options = mode, keeps, options
        self.n, self.offset = options.get("n", SIZE), options.get("offset", 0)
        self.q = reference.round((self.rng.standard_normal(self.n) * 0.02).astype(real), self.grid)
        kind = options.get("moments", np.float32)
        self.m, self.v = np.zeros(self.n, kind), np.zeros(self.n, kind)
        if options.get("rule", onepass.ADAMW) >= onepass.SGD:
            self.v = None
        if options.get("rule") == onepass.PLAIN:
            self.m = None
        self.kept = None
        if keeps == onepass.MASTER:
            self.kept = self.q.copy()
        elif keeps in (onepass.CARRY, onepass.REMAINDER):
            self.kept = np.zeros(self.n, options.get("kept", real))
        self.moved = np.zeros((self.n + 7) // 8, np.uint8)
        self.fast = self._copies(storage)

    def _copies(self, storage: str) -> dict[str, Any]:
        stored = torch.from_numpy(self.q.copy())
        if storage == "bfloat16":
            stored = stored.bfloat16()
        elif storage in ("codes", "packed"):
            stored = kernels.encode(stored, self.grid)
            stored = pack_bits(stored, self.grid.bits) if storage == "packed" else stored
        made = {"m": self.m, "v": self.v, "kept": self.kept, "moved": self.moved}
        copies = {
            k: None if x is None else patterns(x) if x.dtype == np.uint16 else torch.from_numpy(x.copy())
            for k, x in made.items()
        }
        return {"stored": stored, **copies}

    def gradient(self, evil: bool) -> Any:
        g = (self.rng.standard_normal(self.n) * 1e-3).astype(real)
        if evil:
            for value, count in ((np.nan, 5), (np.inf, 3), (3e25, 3), (0, 30)):
                g[self.rng.integers(0, self.n, count)] = value
        return g

    def step(self, t: int, evil: bool = False) -> None:
        g = torch.from_numpy(self.gradient(evil))
        if self.options.get("narrow"):
            g = g.bfloat16()
        betas = (self.options.get("beta", 0.9), 0.999)
        s = onepass.Settings(
            lr=6e-4, betas=betas, weight_decay=0.1, rule=self.options.get("rule", onepass.ADAMW), t=t,
            dampening=self.options.get("dampening", 0.0), torchs_root=self.options.get("torchs_root", False),
        )  # fmt: skip
        bits = self.options.get("bits", 16)
        stream = Stream(seed=3, name="w", step=t, offset=self.offset, bits=bits)
        drawing = None
        if self.m is not None and self.m.dtype == np.uint16:
            drawing = Stream(seed=3, name="moments", step=t, offset=self.offset, bits=16)
        plain = (
            self.n if s.torchs_root else self.n - self.n % 8
        )  # of torch's own, only fused steps have an end
        policy = onepass.Policy(self.mode, self.keeps, self.kept, stream, drawing)
        self.q, self.m, self.v, found = onepass_reference.step(
            self.q, g.float().numpy(), self.m, self.v, self.grid, s, policy, plain=plain, moved=self.moved
        )
        f = self.fast
        policy = policy._replace(kept=f["kept"], stream=stream if self.mode != NEAREST else None)
        counts, sums = onepass.step(
            f["stored"], g, f["m"], f["v"], self.grid, s, policy, plain=plain, moved=f["moved"], sums=1
        )
        values = f["stored"]
        if values.numel() < self.n:
            assert int(values[-1]) < 2 ** (self.n * self.grid.bits % 8 or 8)  # behind the last code, zeros
            values = unpack_bits(values, self.grid.bits, self.n)
        values = kernels.decode(values, self.grid) if values.dtype == torch.uint8 else values.float()
        for name, a, b in (
            ("weights", self.q, values.numpy()), ("first", self.m, None if f["m"] is None else flat(f["m"])),
            ("second", self.v, None if f["v"] is None else flat(f["v"])),
            ("kept", self.kept, None if f["kept"] is None else flat(f["kept"])),
            ("moved", self.moved, f["moved"].numpy()), ("counts", found["counts"], counts.numpy()),
            ("sums", found["sums"], sums.numpy()),
        ):  # fmt: skip
            if a is not None:
                np.testing.assert_array_equal(a, b, err_msg=f"{name} at step {t}")


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "bf16 sr, bf16 moments": (("bf16", "bfloat16", STOCHASTIC), {"moments": np.uint16, "narrow": True}),
    "bf16 sr, bf16 moments, a shard": (
        ("bf16", "bfloat16", STOCHASTIC), {"moments": np.uint16, "narrow": True, "offset": 37},
    ),
    "bf16 sr, draws of 32": (("bf16", "float32", STOCHASTIC), {"bits": 32}),
    "bf16 sr, draws of 32, a shard": (("bf16", "float32", STOCHASTIC), {"bits": 32, "offset": 37}),
    "bf16 rne": (("bf16", "bfloat16", NEAREST), {}),
    "bf16 rne, beta1 below a half": (("bf16", "bfloat16", NEAREST), {"beta": 0.3}),
    "e4m3 sr codes, bf16 moments": (("e4m3@128", "codes", STOCHASTIC), {"moments": np.uint16}),
    "e5m2 sr codes, bf16 moments": (("e5m2", "codes", STOCHASTIC), {"moments": np.uint16}),
    "e2m1 sr, packed, many tiles": (
        ("e2m1@32", "packed", STOCHASTIC), {"moments": np.uint16, "n": 768 * 65 + 101, "offset": 37},
    ),
    "e3m2 sr, packed": (("e3m2@64", "packed", STOCHASTIC), {"moments": np.uint16}),
    "e4m3 deadzone": (("e4m3@128", "float32", DEADZONE), {"bits": 32}),
    "int4 codes": (("int4@64", "codes", NEAREST), {}),
    "int3, packed": (("int3@32", "packed", NEAREST), {}),
    "kahan": (("bf16", "float32", NEAREST, onepass.CARRY), {}),
    "kahan, bf16 carry": (("bf16", "bfloat16", NEAREST, onepass.CARRY), {"kept": np.uint16}),
    "eco on e4m3": (("e4m3@128", "float32", NEAREST, onepass.ERROR), {}),
    "master, Adam": (("bf16", "float32", NEAREST, onepass.MASTER), {"rule": onepass.ADAM}),
    "remainder16": (("bf16", "bfloat16", NEAREST, onepass.REMAINDER), {"kept": np.int16}),
    "remainder8": (("bf16", "bfloat16", STOCHASTIC, onepass.REMAINDER), {"kept": np.int8}),
    "SGD, sr, bf16 moment, a shard": (
        ("bf16", "bfloat16", STOCHASTIC),
        {"rule": onepass.SGD, "moments": np.uint16, "offset": 37, "dampening": 0.3},
    ),
    "SGD, eco on e4m3": (("e4m3@128", "float32", NEAREST, onepass.ERROR), {"rule": onepass.SGD}),
    "Nesterov, kahan": (("bf16", "float32", NEAREST, onepass.CARRY), {"rule": onepass.NESTEROV}),
    "SGD without momentum, a shard": (
        ("bf16", "bfloat16", STOCHASTIC), {"rule": onepass.PLAIN, "narrow": True, "offset": 37, "beta": 0.0},
    ),
    "SGD without momentum, packed": (
        ("int3@32", "packed", NEAREST), {"rule": onepass.PLAIN, "beta": 0.0},
    ),
    "torch's root": (("bf16", "float32", STOCHASTIC), {"torchs_root": True, "bits": 32}),
    "torch's root, Adam, kahan": (
        ("bf16", "bfloat16", NEAREST, onepass.CARRY),
        {"torchs_root": True, "rule": onepass.ADAM, "kept": np.uint16, "narrow": True, "beta": 0.3},
    ),
    "torch's root, remainder8": (
        ("bf16", "bfloat16", STOCHASTIC, onepass.REMAINDER), {"torchs_root": True, "kept": np.int8},
    ),
    "Lion, sr, bf16 moment": (
        ("bf16", "bfloat16", STOCHASTIC), {"rule": onepass.LION, "moments": np.uint16, "narrow": True},
    ),
    "Lion, remainder16": (
        ("bf16", "bfloat16", NEAREST, onepass.REMAINDER), {"rule": onepass.LION, "kept": np.int16},
    ),
}  # fmt: skip
