"""When an update is lost where scales move with the data: one definition, by code, wherever it is asked."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.make_format_4 import MOVING, shares
from safetensors.torch import load_file
from torch.nn import functional

import halfulp as hu
from halfulp import kernels
from halfulp.demo import corpus
from halfulp.demo.model import LetterModel, Size
from halfulp.kernels.reference import rule_of_stored
from halfulp.report.page import page

GRIDS = ("int8", "int8/row", "int4/g16", "int4/absmean/row", "int3/dqt", "mxfp8_e4m3", "mxfp4", "nvfp4")
FOURTH = Path(__file__).parents[1] / "fixtures" / "format_4"


def step_of(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights, proposals, and what nearest rounding stores before and after, with both scales."""
    generator, g = torch.Generator().manual_seed(seed), hu.grid(name)
    w = torch.randn(24, 80, generator=generator) * 0.05
    w[3] = 0
    d = torch.randn(24, 80, generator=generator) * 0.002
    d[torch.rand(24, 80, generator=generator) < 0.2] = 0
    now = g.scales(w)
    q = g.round(w, scale=now)
    z = q + d
    assert g.scaling is not None
    then = g.scales(q if g.scaling.from_old else z)
    return {"w": w, "d": d, "q": q, "z": z, "r": g.round(z, scale=then), "now": now, "then": then}


def code(name: str, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes; that of -0 is that of 0."""
    return hu.grid(name).encode(x + 0.0, scale=scale)


def unchanged(name: str, s: dict[str, torch.Tensor]) -> torch.Tensor:
    """The definition, spelled out: the code stays, or the value does, or nothing was asked."""
    stays = code(name, s["q"], s["now"]) == code(name, s["r"], s["then"])
    return stays | (s["q"] == s["r"]) | (s["d"] == 0)


@pytest.mark.parametrize("name", GRIDS)
def test_an_audit_counts_by_code(name: str) -> None:
    s = step_of(name)
    expected, idle, still = unchanged(name, s), s["d"] == 0, s["q"] == s["r"]
    moved = torch.zeros((1, s["w"].numel() // 8), dtype=torch.uint8)
    counts = kernels.audit(s["w"], s["d"], [name], moved=moved).counts.sum(dim=0)[0]
    found = dict(zip(kernels.AUDIT_COUNTS, counts.tolist(), strict=True))
    assert found["frozen"] == found["never_moved"] == int(expected.sum())
    assert found["frozen"] - int(idle.sum()) == int((expected & ~idle).sum())  # lost, exactly
    assert found["dragged"] == int((expected & ~still).sum())
    assert found["frozen"] - found["dragged"] == int(still.sum())  # what decoded values alone would say
    score = kernels.score(s["w"], torch.ones_like(s["w"]), s["d"], name)
    assert int(score[:, kernels.SCORES.index("F")].sum()) == int(expected.sum())


@pytest.mark.parametrize("name", [n for n in GRIDS if "absmean" not in n])
def test_events_and_write_backs_agree(name: str) -> None:
    """Of stored values: the same coordinates, whether one asks for events, writes back, or writes packed."""
    s = step_of(name)
    expected = unchanged(name, s)
    assert torch.equal(hu.frozen(s["q"], s["d"], name), expected | (s["z"] == s["q"]))
    moved = torch.zeros(s["q"].numel() // 8, dtype=torch.uint8)
    made = kernels.write_back(s["q"], s["z"].clone(), name, moved=moved)
    assert torch.equal(made.out, s["r"])
    frozen, zero, *_ = made.counts.sum(dim=0).tolist()
    assert frozen == int((expected | (s["z"] == s["q"])).sum())
    assert zero == int((s["z"] == s["q"]).sum())


def test_the_mean_of_stored_values_is_not_their_scale() -> None:
    """Under absmean, their largest magnitude tells what they are stored with."""
    name = "int4/absmean/row"
    s = step_of(name)
    g = hu.grid(name)
    assert not torch.equal(g.scales(s["q"]), s["now"])
    assert torch.equal(kernels.scales(s["q"], rule_of_stored(g)), s["now"])
    counts = kernels.write_back(s["q"], s["z"].clone(), name).counts.sum(dim=0).tolist()
    assert counts[0] == int((unchanged(name, s) | (s["z"] == s["q"])).sum())


def test_what_is_dragged_is_not_an_update() -> None:
    """By hand: the largest weight of a row moves its scale by 1%, and with it the values of the others."""
    w = torch.tensor([[127.0, 40.0, 32.0, 10.0, 0.0]])
    d = torch.tensor([[1.27, 0.1, 0.0, 0.8, 0.1]])
    found = kernels.audit(w, d, ["int8/row"])
    assert found.shared[0].tolist() == [1, 0]
    counts = dict(zip(kernels.AUDIT_COUNTS, found.counts[0, 0].tolist(), strict=True))
    # 127 keeps its code (its value grows with its scale), 40, 32 and 0 too; 10 becomes 11.
    assert (counts["frozen"], counts["dragged"]) == (4, 3)
    assert hu.frozen(w, d, "int8/row").tolist() == [[True, True, True, False, True]]


def test_a_code_that_changes_for_the_same_value_is_no_update() -> None:
    """A block's largest value falls below a power of two: its exponent moves, and every code with it."""
    w = torch.full((1, 32), 0.25)
    w[0, 0] = 1.0
    d = torch.zeros(1, 32)
    d[0, 0], d[0, 1] = -0.01, 1e-4
    g = hu.grid("mxfp8_e4m3")
    assert not torch.equal(g.scales(w), g.scales(w + d))
    assert int(kernels.audit(w, d, [g]).counts[:, 0, 0].sum()) == 31
    assert hu.frozen(w, d, g).sum() == 31


def test_dead_zones_are_told_by_code() -> None:
    """deadzone-sr draws where nearest loses an update, also where the scale drags what is stored."""
    s, stream = step_of("int8/row"), hu.Stream(seed=1, name="w", step=1)
    drawn = hu.grid("int8/row").round(s["z"], stream, scale=s["then"])
    lost = unchanged("int8/row", s) & (s["z"] != s["q"])
    made = kernels.write_back(s["q"], s["z"].clone(), "int8/row", "deadzone", stream).out
    assert torch.equal(made, torch.where(lost, drawn, s["r"]))
    assert not torch.equal(made, s["r"])


@pytest.mark.parametrize("policy", ["rne", "sr", "master"])
@pytest.mark.parametrize("grid", ["int8/row", "int4/g16", "mxfp8_e4m3", "nvfp4"])
def test_a_run_tells_by_its_codes(grid: str, policy: str) -> None:
    """A step reports the same however weights are stored; with nearest, what the packed codes say."""
    told: dict[str, list[Any]] = {}
    for storage in ("container", "packed"):
        torch.manual_seed(0)
        net = torch.nn.Linear(64, 32, bias=False)
        opt = hu.WriteBack(torch.optim.AdamW(net.parameters(), lr=1e-3), grid, policy, model=net,
                           storage=storage, seed=1)  # fmt: skip
        told[storage] = []
        for _ in range(4):
            opt.zero_grad()
            net(torch.randn(8, 64)).square().mean().backward()
            slot = opt.slots[0]
            before = slot.codes and (slot.codes.get().clone(), slot.codes.scales.clone())
            opt.step()
            row = opt.events.rows[0]
            told[storage].append((row.frozen, row.zero_proposal, row.never_moved))
            if policy == "rne" and slot.codes and before:
                after, scales = slot.codes.get(), slot.codes.scales
                stays = code(grid, before[0], before[1]) == code(grid, after, scales)
                assert row.zero_proposal == 0
                assert row.frozen == int((stays | (before[0] == after)).sum())
    assert told["container"] == told["packed"]


# ---- traces -----------------------------------------------------------------------------------------------


class Given(torch.optim.Optimizer):
    """Makes the steps of a run of which all weights are known."""

    def __init__(self, kept: list[dict[str, torch.Tensor]]) -> None:
        whole = {name: torch.cat([part[name] for part in kept]) for name in kept[0]}
        ids = range(len(whole) // 2)
        self.left = [
            [(whole[f"{i}.before"][k], whole[f"{i}.after"][k]) for i in ids]
            for k in range(len(whole["0.before"]))
        ]
        super().__init__([torch.nn.Parameter(before.clone()) for before, _ in self.left[0]], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, (before, after) in zip(self.param_groups[0]["params"], self.left.pop(0), strict=True):
            assert torch.equal(p, before)
            p.copy_(after)


def test_a_trace_says_which_definition_it_has(tmp_path: Path) -> None:
    """Today's by code, without a word; one of before by decoded value, in words."""
    old = hu.Trace.open(FOURTH / "moving")
    assert shares(old) == json.loads((FOURTH / "moving.json").read_text())
    assert old.lost_by == "value"
    said = old.older_counts
    assert said is not None
    assert "int8/row, mxfp8_e4m3" in said
    assert said in hu.verdict(old).text(verbose=True)
    assert "took weights on int8/row" in page([FOURTH / "moving"])
    assert hu.Trace.open(FOURTH / "trace").older_counts is None  # no scale moves there
    assert "older" not in hu.verdict(hu.Trace.open(FOURTH / "trace")).text(verbose=True)

    given = Given([load_file(file) for file in sorted(FOURTH.glob("moving/parts/*/kept.safetensors"))])
    with hu.Audit(given, MOVING, out=tmp_path / "again"):
        while given.left:
            given.step()
    again = hu.Trace.open(tmp_path / "again")
    assert again.last_step == 5
    assert (again.lost_by, again.older_counts) == ("code", None)
    assert again.manifest["lost"] == "code"
    for grid in MOVING:
        by_value = again.series("frozen", grid) - again.series("dragged", grid)
        assert by_value.tolist() == pytest.approx(old.frozen(grid).tolist(), abs=1e-15)
    assert again.frozen("int8/row").min() > old.frozen("int8/row").max() + 0.1


# ---- what it is for --------------------------------------------------------------------------------------

COMPARED = ("bf16", "int8/row", "int4/g16", "e4m3@128", "mxfp8_e4m3")
CLEARLY, MEASURABLY = 0.05, 0.03
"""Of updates lost; in nats, several times what evaluations of such runs differ by between seeds."""
CONTEXT, BATCH, UPDATES, RATE = 32, 12, 150, 8e-4


def trained(tokens: torch.Tensor, letters: int, grid: str | None = None, trace: Path | None = None) -> float:
    """A small decoder on Python's help texts, stored on a grid or audited: its loss on text held out."""
    torch.manual_seed(0)
    net = LetterModel(Size(layers=2, width=64, context=CONTEXT, batch=BATCH, updates=UPDATES), letters)
    with torch.no_grad():  # larger weights have larger gaps: everything is lost in fewer updates
        for p in net.parameters():
            p.mul_(4 if p.dim() > 1 else 1)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.1)
    if grid is not None:
        optimizer = hu.WriteBack(optimizer, grid, "rne", model=net)
    cut = len(tokens) * 9 // 10

    def batch(size: int, first: int, last: int, generator: torch.Generator) -> torch.Tensor:
        at = torch.randint(first, last - CONTEXT, (size, 1), generator=generator)
        return tokens[at + torch.arange(CONTEXT + 1)]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    generator = torch.Generator().manual_seed(1)
    audit = nullcontext() if trace is None else hu.Audit(optimizer, COMPARED, model=net, out=trace, every=10)
    with audit:
        for update in range(UPDATES):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (update + 1) / 15) * (1 - 0.9 * update / UPDATES)
            optimizer.zero_grad()
            loss(batch(BATCH, 0, cut, generator)).backward()
            optimizer.step()
    with torch.no_grad():
        return float(loss(batch(256, cut, len(tokens), torch.Generator().manual_seed(2))))


def test_no_format_that_costs_more_is_said_to_lose_clearly_less(tmp_path: Path) -> None:
    """What one audited run says of five grids, against what nearest write-back really costs on each."""
    text, letters = corpus()
    tokens = torch.from_numpy(text.astype("int64"))
    plain = trained(tokens, letters, trace=tmp_path / "trace")
    cost = {grid: trained(tokens, letters, grid) - plain for grid in COMPARED}
    trace = hu.Trace.open(tmp_path / "trace")
    lost = {grid: float(trace.frozen(grid, "all-2d").mean()) for grid in COMPARED}
    for dear, cheap in permutations(COMPARED, 2):
        if cost[dear] > cost[cheap] + MEASURABLY:
            assert lost[dear] > lost[cheap] - CLEARLY, (dear, cheap, cost, lost)
    assert cost["int8/row"] > cost["bf16"] + MEASURABLY  # decoded values say it the other way round
    by_value = trace.series("frozen", "int8/row", "all-2d") - trace.series("dragged", "int8/row", "all-2d")
    assert by_value.mean() < lost["bf16"] - CLEARLY
