"""What an audit costs: time and bytes beside the training it watches, and the kernel alone as models grow.

The run is the paper's character model (4 layers, 4 heads, width 128, context 128, 65 characters, batch 32,
AdamW). Audited and plain steps alternate in one process, so that drift of the machine hits both alike. Two
measures: the time inside the audit's hooks over the time of a plain step (medians), and, hooks or not, how
much longer an audited step takes than the plain one after it (median and quartiles over pairs; on a busy
machine the first is the steadier). Rehearsals follow every step, so the time inside hooks is taken off plain
ones. Writing a part to disk falls on neither: it is timed on its own and spread over the thirty seconds
between two parts. Bytes are those that the audit keeps between steps. A bfloat16 model is audited on its own
grid; its step is slower, for this is a CPU. Casts are from float32 main parameters to bfloat16 ones, which
the model computes with.

What a small step pays is told apart: a network of twenty small tensors whose step takes microseconds, and
the memory that the process takes more, with the library that counts.

On a machine that others use as well, a wall clock says nothing: ``--clock processor`` takes the time that the
one thread was running for everything, training and audit.

    python benchmarks/audit.py [--clock wall|processor] [--steps 120] [--sizes 1e6,1e7,1e8] [--only WORDS]
        [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from kernels import EIGHT, OUT, environment
from torch import nn

import halfulp as hu
from halfulp import kernels

LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY, BATCH = 4, 4, 128, 128, 65, 32
PART_SECONDS = 30.0
CLOCKS = {"wall": time.perf_counter, "processor": time.thread_time}
GRIDS = [g.name for g in EIGHT]
REHEARSED = ["e4m3@128", "e5m2", "e4m3@128:sr"]

SETTINGS: dict[str, dict[str, Any]] = {
    "8 grids": {},
    "8 grids, expected share as well": {"expected_never_moved": True},
    "8 grids, coordinates not followed": {"never_moved": False},
    "8 grids, a quarter of the tiles": {"sample": 0.25},
    "1 grid": {"grids": GRIDS[:1]},
    "8 grids and 3 rehearsals": {"rehearse": REHEARSED},
    "1 grid and states": {"grids": GRIDS[:1], "states": True},
    "8 grids and states": {"states": True},
    "bfloat16 weights, bf16": {"grids": ["bf16"], "dtype": torch.bfloat16},
    "bfloat16 weights, bf16 and states": {"grids": ["bf16"], "dtype": torch.bfloat16, "states": True},
    "casts to bfloat16, bf16": {"grids": ["bf16"], "dtype": torch.bfloat16, "casts": True},
    "8 grids and 3 rehearsals, one bound": {"rehearse": hu.Rehearse(REHEARSED, bounds=["point"])},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    """GPT-2's layout with the embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH, bias=False)
        for p in self.parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids[:, :-1]) + self.wpe(torch.arange(ids.shape[1] - 1))
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


# ---- beside training ------------------------------------------------------------------------------------


def overhead(name: str, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Audited and plain steps in turn."""
    torch.manual_seed(0)
    options = {"grids": GRIDS, "dtype": torch.float32, "casts": False, **settings}
    model, casts = Decoder().to(options.pop("dtype")), options.pop("casts")
    params = list(model.parameters())
    main = [p.detach().float() for p in params] if casts else params
    optimizer = torch.optim.AdamW(main, lr=6e-4, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        common = {"out": Path(folder) / "trace", "every": 2, "part_steps": 10**9, "part_seconds": 1e9}
        grids = options.pop("grids")
        audit = (
            hu.CastAudit(main, model, grids, **common)
            if casts
            else hu.Audit(optimizer, grids, model=model, **common, **options)
        )
        audit.start()
        seconds, inside = [], []
        for _ in range(2 * (steps + 3)):
            ids = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
            start, hooks = time.perf_counter(), audit.seconds
            model.zero_grad()
            loss = model.loss(ids)
            loss.backward()
            audit.log(loss)
            if casts:
                for m, p in zip(main, params, strict=True):
                    m.grad = p.grad.float()
            optimizer.step()
            if casts:
                with torch.no_grad():
                    torch._foreach_copy_(params, main)
            seconds.append(time.perf_counter() - start)
            inside.append(audit.seconds - hooks)
        start = time.perf_counter()
        audit.stop()
        commit = time.perf_counter() - start
    audited, plain = np.array(seconds[6::2]), np.array(seconds[7::2]) - np.array(inside[7::2])
    # ^ the first three pairs compile and warm up
    within, share = float(np.median(inside[6::2])), audited / plain - 1
    tracked, rehearsing = getattr(audit, "tracked", None), getattr(audit, "rehearsing", None)
    held = sum(kept(a) for a in (audit, *(() if tracked is None else tracked.tracks.values())))
    held += 0 if rehearsing is None else rehearsing.payload_bytes
    numel = sum(p.numel() for p in model.parameters())
    return {
        "setting": name,
        "parameters": numel,
        "pairs": len(share),
        "plain_ms": 1e3 * float(np.median(plain)),
        "audited_ms": 1e3 * float(np.median(audited)),
        "hooks_ms": 1e3 * within,
        "overhead": within / float(np.median(plain)),
        "paired": float(np.median(share)),
        "paired_quartiles": [float(q) for q in np.percentile(share, (25, 75))],
        "commit_ms": 1e3 * commit,
        "commit_share": commit / PART_SECONDS,
        "bytes_per_parameter": held / numel,
    }


def kept(audit: Any) -> int:
    """Bytes between steps; a batch of small tensors also keeps room for its counts, by tiles, and with
    rehearsals the weights as a step left them."""
    if isinstance(audit, hu.CastAudit):
        return audit.bytes
    found = [(w.before, w.moved, w.stay, w.scores) for w in audit.pipeline.watched.values()]
    beside = sum(b.nbytes for b in audit.pipeline.meter.batches)
    return beside + sum(t.nbytes for ts in found for t in ts if t is not None)


# ---- small steps ---------------------------------------------------------------------------------------

SMALL = {"SGD, 1 grid": ("SGD", GRIDS[:1], False), "SGD, 4 grids": ("SGD", GRIDS[:4], False),
         "AdamW, 4 grids and states": ("AdamW", GRIDS[:4], "find")}  # fmt: skip


def small(name: str, steps: int = 2000) -> dict[str, Any]:
    """Ten layers of 32 x 32 on one thread: a plain step and an audited one, medians."""
    kind, grids, states = SMALL[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(10)))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-6)
    for p in model.parameters():
        p.grad = torch.randn_like(p)

    def step() -> float:
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)

    step()
    plain, before = step(), resident()
    folder = tempfile.mkdtemp()
    with hu.Audit(optimizer, grids, model=model, out=Path(folder) / "trace", states=states):
        optimizer.step()
        audited = step()
        more = resident() - before
    shutil.rmtree(folder)
    return {"setting": name, "plain_ms": plain, "audited_ms": audited, "resident_mb": more}


def resident() -> float:
    """Megabytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


# ---- the kernel alone -------------------------------------------------------------------------------------


def cost(size: int) -> list[dict[str, Any]]:
    """Eight grids on one tensor: counts only, and with what an audit follows."""
    made = torch.Generator().manual_seed(size)
    before = torch.randn(size, generator=made).mul_(0.02)
    after = torch.randn(size, generator=made).mul_(2e-5).add_(before)
    moved = torch.zeros((len(EIGHT), (size + 7) // 8), dtype=torch.uint8)
    stay = torch.ones((len(EIGHT), size)) if size < 10**8 else None  # 3 GB
    rows = []
    for what, followed in (
        ("counts", {}),
        ("as audited by default", {"moved": moved}),
        ("with the expected share", {"moved": moved, "stay": stay}),
    ):
        if None in followed.values():
            continue
        times = []
        for _ in range(max(5, min(50, int(2e8 / size)))):
            start = time.perf_counter()
            kernels.audit(before, after, EIGHT, after=True, **followed)
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times[1:])
        rows.append({"what": what, "size": size, "seconds": seconds, "ns": 1e9 * seconds / size})
    return rows


def markdown(
    env: dict[str, Any], runs: list[dict[str, Any]], costs: list[dict[str, Any]], steps: list[dict[str, Any]]
) -> str:
    lines = []
    if runs:
        lines = [
            f"Every step of the character model ({runs[0]['parameters']:,} parameters) audited:",
            "",
            "| audit | plain step | hooks | overhead | paired (quartiles) | 30 s parts | bytes per weight |",
            "|---|--:|--:|--:|--:|--:|--:|",
        ]
    for r in runs:
        low, high = r["paired_quartiles"]
        lines.append(
            f"| {r['setting']} | {r['plain_ms']:.1f} ms | {r['hooks_ms']:.1f} ms | {r['overhead']:.1%} "
            f"| {r['paired']:.1%} ({low:.1%} to {high:.1%}) | {r['commit_share']:.2%} "
            f"| {r['bytes_per_parameter']:.1f} |"
        )
    if steps:
        lines += ["", "Steps of twenty small tensors:", "", "| audit | plain | audited | more | memory |"]
        lines.append("|---|--:|--:|--:|--:|")
    for r in steps:
        more = r["audited_ms"] - r["plain_ms"]
        lines.append(
            f"| {r['setting']} | {r['plain_ms']:.3f} ms | {r['audited_ms']:.3f} ms | {more:.3f} ms "
            f"| {r['resident_mb']:.0f} MB |"
        )
    sizes = sorted({c["size"] for c in costs})
    if costs:
        named = " | ".join(f"{s:.0e}".replace("e+0", "e") for s in sizes)
        lines += ["", "The kernel alone, 8 grids, nanoseconds a coordinate:", "", f"| | {named} |"]
        lines.append(f"|---|{'--:|' * len(sizes)}")
    for what in dict.fromkeys(c["what"] for c in costs):
        by_size = {c["size"]: c["ns"] for c in costs if c["what"] == what}
        shown = [f"{by_size[s]:.2f}" if s in by_size else "-" for s in sizes]
        lines.append(f"| {what} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", "; ".join(f"{k}: {v}" for k, v in env.items()) + "."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what time is; processor: one thread")
    parser.add_argument("--steps", type=int, default=120, help="pairs of steps")
    parser.add_argument("--sizes", default="1e6,1e7,1e8", help="coordinates; 1e8 takes 1 GB")
    parser.add_argument("--only", default="", help="settings whose name has this in it")
    parser.add_argument("--json", type=Path, default=OUT / "audit.json", help="results; a .md goes beside it")
    options = parser.parse_args()
    if options.clock == "processor":
        torch.set_num_threads(1)
    env = {**environment(), "clock": options.clock}
    with mock.patch("time.perf_counter", CLOCKS[options.clock]):  # the audit's own clock, too
        sizes = [int(float(s)) for s in options.sizes.split(",") if s]
        runs, costs = measured(options.steps, sizes, options.only)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        steps = [small(name) for name in SMALL if options.only in f"small {name}"]
        torch.set_num_threads(threads)
    table = markdown(env, runs, costs, steps)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"environment": env, "runs": runs, "small": steps, "kernel": costs}, indent=1) + "\n"
    )
    options.json.with_suffix(".md").write_text(table)
    print("\n" + table, flush=True)
    print(f"wrote {options.json} and {options.json.with_suffix('.md')}")


def measured(steps: int, sizes: list[int], only: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every setting with these words in its name beside training, and the kernel alone."""
    runs = []
    for name, settings in ((n, s) for n, s in SETTINGS.items() if only in n):
        print(f"training, {name}", flush=True)
        runs.append(overhead(name, settings, steps))
    costs = []
    for size in sizes:
        print(f"the kernel, {size:,} coordinates", flush=True)
        costs += cost(size)
    return runs, costs


if __name__ == "__main__":
    main()
