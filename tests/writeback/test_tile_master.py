"""Masters of some tiles: of any size, taken out and put back, of a shard."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import halfulp as hu
from halfulp.errors import UsageError
from halfulp.writeback.policies.tile_master import put_tiles, take_tiles

TILES = [1, 5, 96, 100, 768, 1000, 10_000]


def test_masters_of_small_tiles_are_masters() -> None:
    """With all tiles chosen, whatever their size, training is that of full masters, bit for bit."""

    def trained(policy: object) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Linear(30, 41)
        opt = hu.WriteBack(torch.optim.AdamW(model.parameters(), lr=1e-3), "e5m2", policy, model=model)
        for _ in range(4):
            opt.zero_grad()
            model(torch.randn(8, 30)).square().sum().backward()
            opt.step()
        return [p.detach().clone() for p in model.parameters()]

    full = trained("master")
    for tile in TILES:
        every = {"weight": torch.ones(-(-1230 // tile), dtype=torch.bool)}
        assert all(map(torch.equal, trained(hu.TileMaster(every, tile=tile)), full))


@pytest.mark.parametrize("tile", TILES)
def test_taken_and_put_back(tile: int) -> None:
    """Chosen tiles of any size, against plain slices."""
    x = torch.arange(2345.0)
    tiles = (torch.arange(-(-2345 // tile)) % 3 != 1).nonzero().flatten()
    expected = torch.cat([x[i * tile : (i + 1) * tile] for i in tiles.tolist()])
    assert torch.equal(take_tiles(x, tiles, expected.numel(), tile), expected)
    y = x.clone()
    put_tiles(y, tiles, -expected, tile)
    for i in range(-(-2345 // tile)):
        part = slice(i * tile, (i + 1) * tile)
        assert torch.equal(y[part], -x[part] if i in tiles.tolist() else x[part])


@pytest.mark.parametrize("start_from", ["code", "raw"])
def test_masters_of_a_shard_are_part_of_the_whole_tensors(start_from: str) -> None:
    """Wherever it is cut: where its masters begin, what the optimizer is given, what becomes of them."""
    raw, tile = torch.arange(100.0) / 7, 8
    code, after = raw.round(), torch.linspace(5, 6, 100)
    policy = hu.TileMaster({"w": torch.arange(13) % 2 == 0}, tile=tile, start_from=start_from)
    chosen = torch.arange(100) // tile % 2 == 0
    for a, b in ((0, 100), (0, 3), (3, 30), (17, 92), (95, 100)):
        mine = policy if (a, b) == (0, 100) else replace(policy, shard=(a, 100))
        state = mine.start(raw[a:b], code[a:b], "w")
        started = raw if start_from == "raw" else code
        assert torch.equal(state["master"], started[a:b][chosen[a:b]])
        p = code[a:b].clone()
        mine.before(p, p, state)
        assert torch.equal(p, torch.where(chosen, started, code)[a:b])
        step = SimpleNamespace(state=state, z=after[a:b].clone(), write=lambda: None)
        mine.after(step)
        assert torch.equal(state["master"], after[a:b][chosen[a:b]])
    with pytest.raises(UsageError, match="must be 7 booleans"):
        replace(policy, shard=(0, 50)).start(raw[:30], code[:30], "w")
