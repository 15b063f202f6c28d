"""Masks within an exact budget: what is chosen, and what it costs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfulp as hu
from halfulp import cli
from halfulp.allocation.masks import (
    MASTER_BYTES,
    _first_that_fit,
    choose,
    drawn,
    tile_sizes,
    whole_tensors,
)
from halfulp.errors import UsageError
from halfulp.kernels import SCORES, TILE


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> hu.Trace:
    """Two matrices, one with a short last tile, and a bias, scored over three of five steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.GELU(), torch.nn.Linear(100, 48))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    out = tmp_path_factory.mktemp("scored") / "trace"
    with hu.Audit(optimizer, ["e5m2"], model=model, out=out, scores=("e5m2", 2, 4)):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
    return hu.Trace.open(out)


def ranked(trace: hu.Trace, score: str) -> list[tuple[float, str, int, int]]:
    """(mean score, tensor, tile, coordinates), best first: the obvious way."""
    rows = []
    for t in trace.tensors:
        if len(t["shape"]) < 2:
            continue
        sums = trace.scores()[t["name"]][:, SCORES.index(score)]
        for i, total in enumerate(sums):
            n = min(TILE, t["numel"] - i * TILE)
            rows.append((total / n, t["name"], i, n))
    return sorted(rows, key=lambda r: -r[0])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("budget", [0.1, 0.5, 1.0, 5000])
def test_the_best_tiles_that_fit(trace: hu.Trace, score: str, budget: float) -> None:
    """Tile after tile from the best down, each if it still fits; no byte above the budget."""
    mask = hu.allocate(trace, budget, score)
    assert mask.blanket_bytes == MASTER_BYTES * (64 * 100 + 100 * 48)
    assert mask.budget == (budget if isinstance(budget, int) else int(budget * mask.blanket_bytes))
    left, wanted = mask.budget, set()
    for _, name, tile, n in ranked(trace, score):
        if MASTER_BYTES * n <= left:
            left -= MASTER_BYTES * n
            wanted.add((name, tile))
    assert {(name, i) for name, t in mask.tiles.items() for i in t.nonzero().flatten().tolist()} == wanted
    assert mask.payload_bytes == mask.budget - left <= mask.budget


def test_tiles_of_equal_score_in_order() -> None:
    order = np.argsort(-np.zeros(10), kind="stable")
    chosen = _first_that_fit(order, np.full(10, 4 * TILE), 3 * 4 * TILE + 100)
    assert chosen.nonzero()[0].tolist() == [0, 1, 2]


@given(st.lists(st.integers(1, TILE), min_size=1, max_size=40), st.integers(1, 40 * 4 * TILE))
def test_nothing_more_would_fit(sizes: list[int], spend: int) -> None:
    """Whatever the sizes of tiles: the budget is kept, and no tile that was passed over fits what is left."""
    costs = MASTER_BYTES * np.array(sizes)
    chosen = _first_that_fit(np.arange(len(sizes)), costs, spend)
    left = spend - int(costs[chosen].sum())
    assert left >= 0
    assert (costs[~chosen] > left).all()


def test_the_budget_of_the_paper() -> None:
    """161,920 whole tiles: 10% are 16,192 tiles and 49,741,824 bytes, 20% are 32,384 and 99,483,648."""
    costs = np.full(161_920, MASTER_BYTES * TILE)
    for share, tiles, size in ((0.1, 16_192, 49_741_824), (0.2, 32_384, 99_483_648)):
        spend = int(round(share * int(costs.sum()), 6))
        assert spend == size
        assert _first_that_fit(np.arange(161_920), costs, spend).sum() == tiles


def test_random_masks_are_controls(trace: hu.Trace) -> None:
    one, same, other = (hu.allocate(trace, 0.5, "random", seed=s).tiles for s in (1, 1, 2))
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert any(not torch.equal(one[n], other[n]) for n in one)


def test_saved_loaded_and_used(trace: hu.Trace, tmp_path: Path) -> None:
    """A mask comes back as it was, and its policy keeps exactly its payload."""
    mask = hu.allocate(trace, 0.25)
    mask.save(tmp_path / "mask.safetensors")
    back = hu.Mask.load(tmp_path / "mask.safetensors")
    assert (back.sizes, back.score, back.budget) == (mask.sizes, "P", mask.budget)
    assert all(torch.equal(back.tiles[n], mask.tiles[n]) for n in mask.tiles)
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.GELU(), torch.nn.Linear(100, 48))
    opt = hu.WriteBack(torch.optim.AdamW(model.parameters()), "e5m2", back.policy(), model=model)
    masters = sum(slot.state["master"].nbytes for slot in opt.slots)
    assert masters == mask.payload_bytes
    model(torch.randn(2, 64)).sum().backward()
    opt.step()


@pytest.mark.parametrize(
    ("budget", "score", "said"),
    [
        (0.1, "Q", "unknown score 'Q'"),
        (0.0, "P", "a budget is a share"),
        (1.5, "P", "a budget is a share"),
        (-1, "P", "a budget is a share"),
        (10**9, "P", "a budget is a share"),
        (True, "P", "a budget is a share"),
        ("10%", "P", "a budget is a share"),
        (None, "P", "a budget is a share"),
    ],
)
def test_bad_input(trace: hu.Trace, budget: Any, score: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        hu.allocate(trace, budget, score)


def test_numpy_numbers_are_shares_and_bytes_too(trace: hu.Trace) -> None:
    half = hu.allocate(trace, 0.5, "P")
    for budget in (np.float32(0.5), np.int64(half.budget)):
        assert hu.allocate(trace, budget, "P").budget == half.budget  # type: ignore[arg-type]


def test_nothing_eligible(trace: hu.Trace) -> None:
    with pytest.raises(UsageError, match="no tensor is eligible"):
        hu.allocate(trace, 0.1, params=lambda name, shape: False)


def test_a_seed_that_nothing_draws_from(trace: hu.Trace) -> None:
    with pytest.raises(UsageError, match="a seed goes with the score random; P draws nothing"):
        hu.allocate(trace, 0.5, "P", seed=5)


def test_scores_of_steps_that_the_run_did_not_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mask of sums that were never taken would be arbitrary; one of a part of them is said to be."""

    def run(name: str, first: int, last: int, every: int = 1) -> hu.Trace:
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        scores, out = ("bf16", first, last), tmp_path / name
        with hu.Audit(optimizer, "bf16", model=model, out=out, scores=scores, every=every):
            for _ in range(3):
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
        return hu.Trace.open(out)

    with pytest.raises(
        UsageError, match=r"over steps 5-9, of which none .* has 3 audited steps, 1-3\. Record"
    ):
        hu.allocate(run("none", 5, 9), 0.6)
    with pytest.raises(UsageError, match=r"steps 2-2, of which none was audited"):
        hu.allocate(run("between", 2, 2, every=2), 0.6)
    capsys.readouterr()
    assert hu.allocate(run("part", 3, 9), 0.6)
    assert "steps 3-9, of which only 1 of 7 were audited" in capsys.readouterr().err
    assert hu.allocate(run("whole", 1, 4, every=2), 0.6)
    assert capsys.readouterr().err == ""


TILES = [1, 5, 96, 100, 768, 1000, 10_000]


def scored(out: Path, tile: int, **options: object) -> hu.Trace:
    """A matrix of 64 by 100 and one of 100 by 48, scored by tiles of a size."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.GELU(), torch.nn.Linear(100, 48))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["e5m2"], model=model, out=out, scores=("e5m2", 1, 2, tile), **options):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
    return hu.Trace.open(out)


@pytest.mark.parametrize("tile", TILES)
def test_tiles_of_any_size(tile: int, tmp_path: Path) -> None:
    """From scores to masters: as brute force chooses, within the budget, and to the byte what is kept."""
    trace = scored(tmp_path / "trace", tile)
    assert trace.tile == tile
    fine = scored(tmp_path / "fine", 1).scores()
    for name, sums in trace.scores().items():
        parts = [fine[name][i : i + tile].sum(axis=0) for i in range(0, len(fine[name]), tile)]
        np.testing.assert_allclose(sums, parts, rtol=1e-12)  # sums in another order, of positive numbers
    mask = hu.allocate(trace, 0.9)
    rows = []
    for t in trace.tensors:
        if len(t["shape"]) == 2:
            sums = trace.scores()[t["name"]][:, SCORES.index("P")]
            lengths = [min(tile, t["numel"] - i * tile) for i in range(len(sums))]
            rows += [(s / n, t["name"], i, n) for i, (s, n) in enumerate(zip(sums, lengths, strict=True))]
    left, wanted = mask.budget, set()
    for _, name, i, n in sorted(rows, key=lambda r: -r[0]):
        if MASTER_BYTES * n <= left:
            left -= MASTER_BYTES * n
            wanted.add((name, i))
    assert {(name, i) for name, t in mask.tiles.items() for i in t.nonzero().flatten().tolist()} == wanted
    assert mask.payload_bytes == mask.budget - left <= mask.budget
    assert (mask.shuffled(1).payload_bytes, mask.shuffled(1).tile) == (mask.payload_bytes, tile)

    mask.save(tmp_path / "mask")
    back = hu.Mask.load(tmp_path / "mask")
    assert (back.tile, back.payload_bytes) == (tile, mask.payload_bytes)
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.GELU(), torch.nn.Linear(100, 48))
    opt = hu.WriteBack(torch.optim.AdamW(model.parameters()), "e5m2", back.policy(), model=model)
    for _ in range(2):
        model(torch.randn(2, 64)).sum().backward()
        opt.step()
    assert sum(slot.state["master"].nbytes for slot in opt.slots) == mask.payload_bytes
    chosen = sum(int(t.sum()) for t in mask.tiles.values())
    assert opt.bytes().policy == mask.payload_bytes + 4 * chosen, "which tiles were chosen: four bytes each"
    assert (f",tile={tile})" in opt.slots[0].policy.spec) == (tile != TILE)


def test_a_budget_below_one_tile(trace: hu.Trace, tmp_path: Path) -> None:
    """It buys nothing: the smallest that buys something is said."""
    with pytest.raises(UsageError, match="smallest take 768 bytes"):  # 4,800 = 6 * 768 + 192 coordinates
        hu.allocate(trace, 100)
    small = scored(tmp_path / "small", 96)
    with pytest.raises(UsageError, match=r"a budget of 0\.001 is 44 bytes.*256 bytes.*96 weights"):
        hu.allocate(small, 0.001)
    assert hu.allocate(small, 256).payload_bytes == 256


def test_tiles_that_do_not_go_together(tmp_path: Path) -> None:
    """Another size is refused when a trace is resumed, a mask misread, or a sample asked for."""
    scored(tmp_path / "trace", 96)
    with pytest.raises(UsageError, match=r"96.*not.*100"):
        scored(tmp_path / "trace", 100, resume=True)
    with pytest.raises(UsageError, match="sample= takes tiles of 768 only"):
        scored(tmp_path / "sampled", 96, sample=0.5)
    for wrong in (("e5m2", 1), ("e5m2", 2, 1), ("e5m2", 1, 2, 0), "e5m2:1-2", ("e5m2", 1, 2.0)):
        with pytest.raises(UsageError, match=r"scores=|a tile is"):
            hu.Audit(None, ["e5m2"], scores=wrong)
    model = torch.nn.Linear(64, 64)
    policy = hu.TileMaster({"weight": torch.ones(6, dtype=torch.bool)}, tile=96)
    with pytest.raises(UsageError, match=r"tiles of 96 for 4096 weights.*tiles of another size"):
        hu.WriteBack(torch.optim.SGD(model.parameters()), "e5m2", policy, model=model)


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script is audited with scores, and tiles are chosen from its trace."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import torch\ntorch.manual_seed(0)\nm = torch.nn.Linear(64, 64)\n"
        "o = torch.optim.AdamW(m.parameters())\n"
        "for _ in range(3):\n    o.zero_grad(); m(torch.randn(4, 64)).sum().backward(); o.step()\n"
    )

    def halfulp(*args: str) -> int:
        monkeypatch.setattr("sys.argv", ["halfulp", *args])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0)

    assert halfulp("audit", "--grids", "e5m2", "--scores", "e5m2:1-3", "train.py") == 0
    capsys.readouterr()
    assert halfulp("allocate", "runs/train", "--budget", "50%", "-o", "m") == 0
    assert "of 8,192 bytes" in capsys.readouterr().out
    assert hu.Mask.load("m").payload_bytes <= 8192
    assert halfulp("allocate", "runs/train", "--budget", "50%", "--shuffle", "3", "-o", "control") == 0
    assert "by score P shuffled" in capsys.readouterr().out
    assert hu.Mask.load("control").payload_bytes == hu.Mask.load("m").payload_bytes
    assert halfulp("audit", "--grids", "e5m2", "--scores", "e5m2:1-3", "--tile", "64", "train.py") == 0
    capsys.readouterr()
    assert halfulp("allocate", "runs/train-2", "--budget", "1%", "-o", "rows") == 2
    assert "take 256 bytes" in capsys.readouterr().err
    assert halfulp("allocate", "runs/train-2", "--budget", "10%", "-o", "rows") == 0
    assert "in tiles of 64" in capsys.readouterr().out
    assert hu.Mask.load("rows").tile == 64
    for wrong in (("--budget", "half"), ("--budget", "10%", "--score", "?")):
        assert halfulp("allocate", "runs/train", *wrong) == 2
    assert halfulp("audit", "--scores", "e5m2", "train.py") == 2
    assert halfulp("allocate", "runs/train", "--budget", "10%", "--seed", "5") == 2
    capsys.readouterr()
    assert halfulp("audit", "--scores", "e5m2:5-9", "train.py") == 0
    assert "steps 5-9, of which none was audited" in capsys.readouterr().err


def test_controls_are_shuffled_within_tensors() -> None:
    """As many tiles of each tensor, a short last one where it was; a function of the seed."""
    sizes = {"a": 40 * TILE + 5, "b": 3 * TILE}
    tiles = {"a": torch.arange(41) % 5 == 0, "b": torch.ones(3, dtype=torch.bool)}
    mask = hu.Mask(tiles=tiles, sizes=sizes, score="P", budget=10**6)
    one, same, other = (mask.shuffled(seed) for seed in (1, 1, 2))
    for name in sizes:
        assert one.payload(name) == mask.payload(name)
        assert torch.equal(one.tiles[name], same.tiles[name])
    assert not torch.equal(one.tiles["a"], tiles["a"])
    assert not torch.equal(one.tiles["a"], other.tiles["a"])
    assert all(bool(m.tiles["a"][40]) == bool(tiles["a"][40]) for m in (one, other))
    drawn = np.mean([mask.shuffled(s).tiles["a"][:40].numpy() for s in range(400)], axis=0)
    assert abs(drawn - 0.2).max() < 0.09


def chosen(mask: hu.Mask) -> set[tuple[str, int]]:
    return {(name, i) for name, t in mask.tiles.items() for i in t.nonzero().flatten().tolist()}


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_no_other_choice_is_better(ranks: list[int], budget: int, tensors: int, last: int) -> None:
    """Against every subset, ties included: within the budget, the one whose best tiles come first.

    Where tiles are equal that is also a largest sum. The order of tensors decides nothing.
    """
    parts = [ranks[i::tensors] for i in range(tensors) if ranks[i::tensors]]
    names = [f"t{i}" for i in range(len(parts))]
    sizes = {n: 10 * len(part) for n, part in zip(names, parts, strict=True)}
    sizes[names[-1]] -= 10 - last  # the last tile may be short
    means = {n: np.array(part, dtype=np.float64) for n, part in zip(names, parts, strict=True)}
    spend = MASTER_BYTES * 10 * budget
    if spend > MASTER_BYTES * sum(sizes.values()):
        return
    mask = choose(means, sizes, spend, "P", tile=10)
    tiles = sorted((-float(means[n][i]), n, i) for n in names for i in range(len(means[n])))
    cost = {(n, i): MASTER_BYTES * int(tile_sizes(sizes[n], 10)[i]) for _, n, i in tiles}
    within = [
        pick
        for pick in itertools.product((True, False), repeat=len(tiles))
        if sum(cost[n, i] for (_, n, i), taken in zip(tiles, pick, strict=True) if taken) <= spend
    ]
    best = max(within)  # True before False, from the first tile by rank on
    assert chosen(mask) == {(n, i) for (_, n, i), taken in zip(tiles, best, strict=True) if taken}
    if last == 10:
        total = sum(means[n][i] for n, i in chosen(mask))
        assert total == max(
            sum(-r for (r, _, _), taken in zip(tiles, pick, strict=True) if taken) for pick in within
        )
    turned = dict(reversed(sizes.items()))
    assert chosen(choose({n: means[n] for n in turned}, turned, spend, "P", tile=10)) == chosen(mask)


def test_budgets_are_nested() -> None:
    """A larger budget keeps the tiles of a smaller one if asked, a short tile that filled it included."""
    sizes = {"a": 20, "b": 13}
    means = {"a": np.array([3.0, 2.0]), "b": np.array([1.0, 0.5])}
    small, large = 4 * 13, 4 * 20
    assert not chosen(choose(means, sizes, small, "P", 10)) <= chosen(choose(means, sizes, large, "P", 10))
    first = choose(means, sizes, small, "P", 10)
    second = choose(means, sizes, large, "P", 10, keep=first)
    third = choose(means, sizes, 1.0, "P", 10, keep=second)
    assert chosen(first) == {("a", 0), ("b", 1)}
    assert chosen(first) <= chosen(second) <= chosen(third)
    assert [m.budget for m in (first, second)] == [small, large]
    assert all(m.payload_bytes <= m.budget for m in (first, second, third))


def test_random_tiles_of_one_tensor() -> None:
    sizes = {"wte": 4096, "mlp": 8192}
    within = drawn(sizes, 0.1, 3, tile=64, within="wte")
    assert within.payload_bytes == MASTER_BYTES * 64 * (12288 // 640)
    assert not bool(within.tiles["mlp"].any())
    everywhere = drawn(sizes, 0.1, 3, tile=64)
    assert everywhere.payload_bytes == within.payload_bytes
    assert bool(everywhere.tiles["mlp"].any())
    turned = drawn(dict(reversed(sizes.items())), 0.1, 3, tile=64)
    assert all(torch.equal(turned.tiles[n], everywhere.tiles[n]) for n in sizes)
    with pytest.raises(UsageError, match="more than masters for all of 'wte' take: 16,384"):
        drawn(sizes, 0.5, 3, tile=64, within="wte")
    with pytest.raises(UsageError, match="no tensor 'wpe'"):
        drawn(sizes, 0.1, 3, within="wpe")


def test_whole_tensors_overshoot_as_in_the_paper() -> None:
    """Until the share is reached: 0.258 and 0.715 of GPT-2 in the paper, because the last one is whole."""
    sizes = {"a": 100, "b": 300, "c": 600}
    ranks = {"a": 0.9, "b": 0.5, "c": 0.7}
    for share, taken in ((0.05, {"a"}), (0.1, {"a"}), (0.11, {"a", "c"}), (0.71, {"a", "b", "c"})):
        mask = whole_tensors(ranks, sizes, share, "risk", tile=50)
        assert {n for n, t in mask.tiles.items() if bool(t.all())} == taken
        assert mask.budget == mask.payload_bytes == MASTER_BYTES * sum(sizes[n] for n in taken)
    anti = whole_tensors({n: -r for n, r in ranks.items()}, sizes, 0.25, "anti", tile=50)
    assert {n for n, t in anti.tiles.items() if bool(t.all())} == {"b"}
    with pytest.raises(UsageError, match=r"less than a share of 0\.5"):
        whole_tensors({"a": 1.0, "b": 0.0}, sizes, 0.5, "risk")
    with pytest.raises(UsageError, match="above 0 and up to"):
        whole_tensors(ranks, sizes, 0.0, "risk")
