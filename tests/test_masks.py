"""Masks within an exact budget: what is chosen, what it costs, and that it survives being written down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import halfulp as hu
from halfulp import cli, files, tensors
from halfulp.errors import CorruptionError, UsageError, VersionError
from halfulp.kernels import SCORES, TILE
from halfulp.masks import MASTER_BYTES, _first_that_fit, tile_sizes


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


def test_what_is_not_a_mask(tmp_path: Path) -> None:
    good = hu.Mask(tiles={"w": torch.ones(2, dtype=torch.bool)}, sizes={"w": 1000}, score="P", budget=4000)
    good.save(tmp_path / "good")
    (tmp_path / "garbage").write_bytes(b"\0" * 100)
    (tmp_path / "short").write_bytes((tmp_path / "good").read_bytes()[:-1])
    save_file({"w": torch.ones(2)}, tmp_path / "foreign")
    replaced = (tmp_path / "good").read_bytes().replace(b'\\"w\\": 1000', b'\\"w\\": 9000')
    (tmp_path / "other sizes").write_bytes(replaced)
    files.put(tmp_path / "newer", tensors.content(good.tiles, {"halfulp.mask": '{"format": 9}'}))
    for name in ("garbage", "short", "foreign", "other sizes", "missing"):
        with pytest.raises(CorruptionError, match=name):
            hu.Mask.load(tmp_path / name)
    with pytest.raises(VersionError, match="format 9"):
        hu.Mask.load(tmp_path / "newer")


@pytest.mark.parametrize(
    ("budget", "score", "said"),
    [
        (0.1, "Q", "unknown score 'Q'"),
        (0.0, "P", "a budget is a share"),
        (1.5, "P", "a budget is a share"),
        (-1, "P", "a budget is a share"),
        (10**9, "P", "a budget is a share"),
        (True, "P", "a budget is a share"),
    ],
)
def test_bad_input(trace: hu.Trace, budget: float, score: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        hu.allocate(trace, budget, score)


def test_nothing_eligible(trace: hu.Trace) -> None:
    with pytest.raises(UsageError, match="no tensor is eligible"):
        hu.allocate(trace, 0.1, params=lambda name, shape: False)


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
    for wrong in (("--budget", "half"), ("--budget", "10%", "--score", "?")):
        assert halfulp("allocate", "runs/train", *wrong) == 2
    assert halfulp("audit", "--scores", "e5m2", "train.py") == 2


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


def test_tile_sizes() -> None:
    assert tile_sizes(768).tolist() == [768]
    assert tile_sizes(769).tolist() == [768, 1]
