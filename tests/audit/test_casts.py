"""Casts from main parameters: counted as the reference counts them, and nothing is copied or touched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit.test_ranks import environment
from audit_reference import made

import halfulp as hu
from halfulp.audit.sources import casts
from halfulp.kernels import TILE, reference
from halfulp.report.page import page

STEPS = 4
GRIDS = ["bf16", "e5m2", "int4/g32", "e4m3@128", "int8/row", "int3/dqt", "nvfp4"]


class Masters:
    """Hand-written mixed precision: float32 main parameters, copies of a narrower dtype or coarser grid."""

    def __init__(self, dtype: torch.dtype, on: str | None = None, lr: float = 1e-3) -> None:
        self.model = made("gpt").to(dtype)
        self.on = None if on is None else hu.grid(on)
        self.main = {n: p.detach().float().clone() for n, p in self.model.named_parameters()}
        self.opt = torch.optim.AdamW([m for n, m in self.main.items() if n != "unused"], lr=lr)
        self.stages: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
        """Stored values and the main ones that are cast next."""
        self.cast()

    def cast(self) -> None:
        with torch.no_grad():
            for n, p in self.model.named_parameters():
                p.copy_(self.main[n] if self.on is None else self.on.round(self.main[n]))

    def train(self, look: Callable[[], None] = lambda: None) -> None:
        torch.manual_seed(0)
        for _ in range(STEPS):
            for name, m in self.main.items():
                m.grad = None if name == "unused" else torch.randn_like(m) * 10.0 ** torch.randint(-4, 1, ())
            self.opt.step()
            look()
            named = dict(self.model.named_parameters())
            self.stages.append({n: (named[n].detach().clone(), m.clone()) for n, m in self.main.items()})
            self.cast()


def counts(stages: Any, grid: str, home: str) -> dict[tuple[int, str], dict[str, int]]:
    """By the reference kernel, from copies of everything."""
    g, found = hu.grid(grid), {}
    bits: dict[str, np.ndarray] = {}
    for step, stage in enumerate(stages, 1):
        for name, (q, z) in stage.items():
            if name == "unused":
                continue
            stored = q.float().numpy()
            if grid != home:
                stored = reference.round(stored, g.within(np.float32))
            moved = bits.setdefault(name, np.zeros((stored.size + 7) // 8, dtype=np.uint8))
            _, out = reference.write_back(stored, z.numpy(), g, moved=moved)
            frozen, zero, endpoint, bad, never = out["counts"].sum(axis=0).tolist()
            found[step, name] = {
                "frozen": frozen, "endpoint": endpoint, "never_moved": never, "zero": zero, "bad": bad,
            }  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("dtype", "on", "home"),
    [(torch.bfloat16, None, "bf16"), (torch.float16, None, "fp16"), (torch.bfloat16, "e4m3@128", "e4m3@128"),
     (torch.float32, "int8/row", "int8/row")],
)  # fmt: skip
def test_every_count_is_that_of_the_reference(
    dtype: torch.dtype, on: str | None, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every grid, tensors of several pieces included; the run is the one without an audit."""
    monkeypatch.setattr(casts, "CHUNK", 2 * TILE)
    plain, run, memory = Masters(dtype, on), Masters(dtype, on), hu.Memory()
    plain.train()
    grids = list(dict.fromkeys([home, *(GRIDS if home == "bf16" else GRIDS[:3])]))
    with hu.CastAudit(run.main, run.model, grids, stored_on=on, out=memory) as cast:
        run.train()
    for a, b in zip(plain.stages, run.stages, strict=True):
        assert all(torch.equal(x, y) for n in a for x, y in zip(a[n], b[n], strict=True))
    table = memory.trace.table().to_polars()
    assert set(table["tensor"]) == set(run.main) - {"unused"}
    shares = []
    for grid in grids:
        rows = {(r["step"], r["tensor"]): r for r in table.filter(grid=grid).iter_rows(named=True)}
        expected = counts(run.stages, grid, home)
        assert rows.keys() == expected.keys()
        for key, row in expected.items():
            for c in ("frozen", "endpoint", "never_moved"):
                assert rows[key][c] == row[c], (grid, key, c)
        shares.append(memory.trace.frozen(grid).mean())
    assert any(0.02 < x < 0.98 for x in shares), shares
    assert memory.trace.tensors[0]["stored"] == home
    bits = sum(len(grids) * -(-m.numel() // 8) for n, m in run.main.items() if n != "unused")
    most = max(m.numel() for m in run.main.values())  # a scale that moves is taken from a whole tensor
    assert bits < cast.bytes <= bits + 4 * max(2 * TILE, most)


def test_realised_is_what_the_bits_of_the_copies_say(tmp_path: Path) -> None:
    """On the grid that is stored, the event is that the cast left the bits (or the sign of a zero) alone."""
    run = Masters(torch.bfloat16, lr=1e-4)
    with hu.CastAudit(run.main, run.model, out=tmp_path / "cast") as cast:
        run.train()
    run.stages.append({n: (p.detach(), p.detach()) for n, p in run.model.named_parameters()})
    trace = hu.Trace.open(tmp_path / "cast")
    for name in (t["name"] for t in trace.tensors):
        same = [
            float((run.stages[i][name][0] == run.stages[i + 1][name][0]).double().mean())
            for i in range(STEPS)
        ]
        assert trace.frozen("bf16", name).tolist() == same
    assert cast.bytes <= trace.numel("all") / 8 + 4 * casts.CHUNK + len(run.main)
    said = hu.verdict(trace).text(verbose=True)
    assert "bf16: a cast left" in said
    assert (
        "Masters are there" not in said
    )  # the model is among the variables here; that it is a copy is known
    assert "the main parameters keep" in said
    assert "would keep them" not in said
    assert "bf16" in page([tmp_path / "cast"])
    with pytest.raises(hu.UsageError, match="only traces of weights with a recorded step"):
        trace.frozen("bf16", by="symmetric")


def test_looks_by_hand_and_views_of_flat_memory() -> None:
    """DeepSpeed's layout: one flat main tensor that the optimizer steps, copies of pieces of it. The pieces
    of one that requires a gradient are no leaves."""
    torch.manual_seed(0)
    flat = torch.randn(40 * 24 + 24, requires_grad=True)
    opt = torch.optim.SGD([flat], lr=1e-3)
    main = {"w": flat[: 40 * 24].view(40, 24), "b": flat[40 * 24 :]}
    assert not main["b"].is_leaf
    stored = {n: m.detach().bfloat16() for n, m in main.items()}
    hooked, by_hand = hu.Memory(), hu.Memory()
    with (
        torch.no_grad(),
        hu.CastAudit(main, stored, "bf16", out=hooked),
        hu.CastAudit({n: m.clone() for n, m in main.items()}, stored, "bf16", out=by_hand) as other,
    ):
        for _ in range(3):
            flat.grad = torch.randn_like(flat)
            opt.step()
            for n, (m, _) in other.pairs.items():
                m.copy_(main[n])
            other.look(lr=1e-3)
            for n, q in stored.items():
                q.copy_(main[n])
    assert hooked.trace.table().equals(by_hand.trace.table())
    assert hooked.trace.scan("tensors").to_polars()["lr"].to_list() == [1e-3] * 6
    assert 0 < hooked.trace.frozen("bf16")[-1] < 1


def test_not_finite_and_looks_that_come_too_late(capsys: pytest.CaptureFixture[str]) -> None:
    main, memory = torch.tensor([1.0, 2.0, torch.nan, 4.0, torch.inf]), hu.Memory()
    stored = main.bfloat16()
    stored[1] = torch.nan
    with hu.CastAudit([main], [stored], out=memory) as cast:
        cast.look()
        main[0] = 1.5
        cast.look()
    found = memory.trace.scan("tensors").to_polars()
    assert found["nonfinite"].to_list() == [3, 3]
    assert found["proposal_sq"].to_list() == [0.0, 0.25]
    assert memory.trace.table().to_polars()["frozen"].to_list() == [2, 1]
    assert not capsys.readouterr().err
    main, memory = torch.ones(3), hu.Memory()
    with hu.CastAudit([main], [main.bfloat16()], out=memory) as cast:
        cast.look()
    assert "between the step and the cast" in capsys.readouterr().err


def test_what_does_not_pair_up_is_refused() -> None:
    a, b = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
    for main, stored, said in (
        ([a], [b, b], "1 and 2"),
        ({"x": a}, {"y": b}, "without a partner: \\['x', 'y'\\]"),
        ([a], [torch.ones(4).bfloat16()], "one shape"),
        ([b], [a], "no wider"),
        ([a], [a], "two tensors"),
        ([a], [a.view(3)], "two tensors"),
        ([], [], "no tensors"),
    ):
        with pytest.raises(hu.UsageError, match=said):
            hu.CastAudit(main, stored, "bf16")
    with pytest.raises(hu.UsageError, match="pass grids="):
        hu.CastAudit([a, a.clone()], [b, a.half()])


def test_ranks_that_hold_shards_leave_the_trace_of_one_process(tmp_path: Path) -> None:
    """Every rank looks at its own; counts are summed, and so are squares, in another order."""
    program = Path(__file__).parents[1] / "casts_ranks.py"
    started = [
        subprocess.Popen(
            [sys.executable, program, tmp_path, str(rank), str(world)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
        )
        for world in (1, 2)
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=600)[0].decode() for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0] * 3, "\n".join(said)
    one, two = (hu.Trace.open(tmp_path / f"world{world}") for world in (1, 2))
    assert one.tensors == two.tensors
    assert one.table().equals(two.table())
    assert one.steps.tolist() == [1, 3, 5]
    assert 0 < one.frozen("bf16").mean() < 1
    a, b = (t.scan("tensors").to_polars().sort("step", "tensor") for t in (one, two))
    sums = ["weight_sq", "proposal_sq"]
    assert a.drop(sums).equals(b.drop(sums))
    np.testing.assert_allclose(a.select(sums).to_numpy(), b.select(sums).to_numpy(), rtol=1e-12)
