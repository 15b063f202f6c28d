"""What a step cannot move, against rational arithmetic on every code; files, shards and bad ones."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import halfulp as hu
from halfulp.cli import app
from halfulp.stored import checking
from halfulp.stored.bounds import Reach, adam_bound, reach
from halfulp.stored.checkpoints import shards


def nearest(z: Fraction, values: list[Fraction], odd: list[bool]) -> int:
    """The place of the nearest value, ties to even, saturating; by looking at all of them."""
    return min(range(len(values)), key=lambda i: (abs(values[i] - z), odd[i]))


def can_move(x: float, grid: hu.Grid, far: Reach) -> bool:
    """Whether some step within the bound changes a code: both ends, by brute force."""
    q = Fraction(x)
    below, above = (float(t) for t in grid.neighbours(torch.tensor([x], dtype=torch.float64)))
    around = [v for v in (below, x, above) if np.isfinite(v)]
    index = [round(abs(v) / grid.quantum) for v in around]
    if not grid.integer:
        index = [int(grid.within(torch.float64).encode(torch.tensor([abs(v)], dtype=torch.float64)))
                 for v in around]  # fmt: skip
    odd = [i % 2 == 1 for i in index]
    shrunk = q - Fraction(far.lr) * Fraction(far.decay) * q
    step = Fraction(far.lr) * Fraction(far.bound)
    values = [Fraction(v) for v in around]
    return any(around[nearest(z, values, odd)] != x for z in (shrunk - step, shrunk + step))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3@128", "e2m1", "int4@16", "int3@8/asym"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_every_code_of_small_grids(name: str, decay: float) -> None:
    grid = hu.grid(name)
    gap = grid.quantum
    codes = torch.tensor(grid.values(), dtype=torch.float32)
    for lr in (gap / 2, gap * 2, gap * 4, gap * 1.7, gap * 16, 1e-6):  # ties among them
        far = reach(lr, weight_decay=decay)
        expected = sum(not can_move(float(v), grid, far) for v in codes)
        assert hu.check({"w": codes}, lr, weight_decay=decay, grid=grid).stuck == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_codes_as_they_are_stored(dtype: torch.dtype, decay: float) -> None:
    """Every code once: a stride of them by brute force, the non-finite ones apart."""
    size = dtype.itemsize
    codes = torch.arange(1 << 8 * size).to(torch.uint8 if size == 1 else torch.int16)
    stored = codes.view(dtype)[:: 1 if size == 1 else 211]
    values = stored.double()
    finite = values[torch.isfinite(values)]
    for lr in (1e-6, 2.0**-10, 3e-4):
        far = reach(lr, weight_decay=decay)
        found = hu.check({"w": stored}, lr, weight_decay=decay)
        assert found.stuck == sum(not can_move(float(v), hu.grid(dtype), far) for v in finite)
        assert found.tensors[0].nonfinite == len(values) - len(finite)
        assert found.weights == len(values)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_float32_on_its_own_grid(decay: float) -> None:
    """Powers of two and their neighbours, ties, odd and even ones, and values around the decisive binade."""
    lr = 2.0**-25
    some = np.random.default_rng(0).standard_normal(400).astype(np.float32)
    powers = np.float32(2.0) ** np.arange(-8, 8, dtype=np.float32)
    near = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(99))])
    zero = np.array([0.0, -0.0, 1e-45, 1e-38], np.float32)
    all_of_them = np.concatenate([some, near, near + np.float32(2**-20), zero])
    for rate in (lr, lr * 1.3, lr / 2, 3 * lr):
        far = reach(rate, weight_decay=decay)
        expected = sum(not can_move(float(v), hu.grid("float32"), far) for v in all_of_them)
        assert 0 < expected < len(all_of_them)
        held = {"w": torch.from_numpy(np.concatenate([all_of_them, [np.inf, np.nan]]).astype(np.float32))}
        found = hu.check(held, rate, weight_decay=decay)
        assert (found.stuck, found.tensors[0].nonfinite) == (expected, 2)


def test_float32_rounded_to_a_grid_is_that_of_its_codes() -> None:
    w = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 0.02
    on = {"w": w.bfloat16()}
    assert hu.check({"w": w}, 3e-5, grid="bf16").stuck == hu.check(on, 3e-5).stuck
    assert hu.check({"w": w}, 1e-3, grid="e4m3@128").stuck == hu.check(
        {"w": hu.grid("e4m3@128").round(w)}, 1e-3, grid="e4m3@128"
    ).stuck  # fmt: skip


def test_what_is_stuck_is_frozen_and_what_is_not_can_move() -> None:
    """The event itself, at both ends of the bound."""
    w = (torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 0.05).bfloat16()
    lr = 1.1e-4
    both = torch.ones(4000, dtype=torch.bool)
    for sign in (-1, 1):
        both &= hu.frozen(w.float(), torch.full((4000,), sign * lr), "bf16")
    assert hu.check({"w": w}, lr).stuck == int(both.sum())


def test_the_rate_from_which_on_half_of_the_weights_move() -> None:
    w = {"w": (torch.randn(999, generator=torch.Generator().manual_seed(2)) * 0.02).bfloat16()}
    rate = hu.check(w, 1e-6).rate_for(0.5)
    assert hu.check(w, rate * 1.000001).share <= 0.5 < hu.check(w, rate * 0.999999).share


def test_the_bound_of_adam_is_reached_and_never_passed() -> None:
    """torch's own Adam, in float64, on the gradients for which the two sides are equal, and on others."""
    b1, b2, t = 0.9, 0.95, 200
    k = np.arange(t)[::-1]
    gradients = {
        "worst": (b1 / b2) ** k,
        "noise": np.random.default_rng(0).standard_normal(t),
        "spike": (np.arange(t) == t - 1).astype(float),
    }
    for name, g in gradients.items():
        p = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        opt = torch.optim.Adam([p], lr=1e-3, betas=(b1, b2), eps=0.0)
        largest = 0.0
        for x in g[g.nonzero()[0][0] :] if name != "spike" else g + 1e-30:
            before = p.item()
            p.grad = torch.tensor([float(x)], dtype=torch.float64)
            opt.step()
            largest = max(largest, abs(p.item() - before) / 1e-3)
        assert largest <= adam_bound(b1, b2) * (1 + 1e-9)
        assert name != "worst" or largest > 0.9999 * adam_bound(b1, b2)
    assert reach(1e-3, bound="worst", betas=(b1, b2)).bound == adam_bound(b1, b2)


def test_scaled_fp8_has_the_gaps_of_its_scale() -> None:
    codes = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).to(torch.float8_e4m3fn)
    one = {"w": codes, "w_scale_inv": torch.tensor(0.5)}
    found = hu.check(one, 0.02)  # half gaps of half: .03125, .0625 ... and below the powers of two half of it
    assert (found.stuck, len(found.tensors)) == (3, 1)
    blocks = {"w": codes, "w_scale_inv": torch.ones(1, 2), "n": torch.ones(3).bfloat16()}
    assert "every block" in hu.check(blocks, 0.02).skipped["w"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    g = torch.Generator().manual_seed(3)
    first = {"a": (torch.randn(300, 7, generator=g) * 0.02).bfloat16(), "norm": torch.ones(64).bfloat16()}
    second = {"b": torch.randn(1000, generator=g), "ids": torch.arange(5)}
    save_file(first, tmp_path / "model-1.safetensors")
    save_file(second, tmp_path / "model-2.safetensors")
    index = {
        "weight_map": dict.fromkeys(first, "model-1.safetensors")
        | dict.fromkeys(second, "model-2.safetensors")
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_files_shards_and_memory_say_the_same(folder: Path, threads: None) -> None:
    held = {}
    for path in shards(folder):
        held |= load_file(path)
    in_memory = hu.check(held, 1e-6)
    for count in (1, 2):
        torch.set_num_threads(count)
        for place in (folder, folder / "model.safetensors.index.json"):
            found = hu.check(place, 1e-6)
            assert sorted(found.table(), key=str) == sorted(in_memory.table(), key=str)
    assert found.skipped == {"ids": "int64 is not a type of weights that is known here"}
    assert "&lt;" not in found._repr_html_()
    assert "100.00% of norm" in str(found)


def test_large_tensors_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    x = (torch.randn(10_001, generator=torch.Generator().manual_seed(4)) * 0.02).bfloat16()
    save_file({"x": x}, tmp_path / "x.safetensors")
    whole = hu.check(tmp_path / "x.safetensors", 1e-5).table()
    monkeypatch.setattr(checking, "PIECE", 256)
    monkeypatch.setattr(checking, "FOLD", 1000)
    for count in (1, 2):
        torch.set_num_threads(count)
        assert hu.check(tmp_path / "x.safetensors", 1e-5).table() == whole


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["check", *args])


def test_command_and_its_exit_code(folder: Path) -> None:
    done = run(str(folder), "--lr", "1e-6", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 1
    assert told["stuck"] == hu.check(folder, 1e-6).stuck
    done = run(str(folder), "--lr", "1e-6", "--fail-above", "100%", "--bound", "worst", "--betas", "0.9,0.95")
    assert done.exit_code == 0
    assert "1.165 times lr" in done.stdout
    for wrong in (["--bound", "x"], ["--betas", "0.9"], ["--fail-above", "200%"], ["--lr", "0"]):
        assert isinstance(run(str(folder), "--lr", "1e-6", *wrong).exception, hu.UsageError)


def test_weights_of_which_none_is_finite(tmp_path: Path) -> None:
    """No rate moves them, which JSON says as null."""
    save_file({"w": torch.full((5,), torch.nan)}, tmp_path / "w.safetensors")
    (row,) = hu.check(tmp_path / "w.safetensors", 1e-6).table()
    assert (row["nonfinite"], row["half_from"]) == (5, None)
    done = run(str(tmp_path / "w.safetensors"), "--lr", "1e-6", "--json")
    told = json.loads(done.stdout, parse_constant=pytest.fail)
    assert told["tensors"][0]["half_from"] is None
    assert set(told["could_move_from"].values()) == {None}
    assert (told["share"], told["failed"], done.exit_code) == (None, True, 1)
    done = run(str(tmp_path / "w.safetensors"), "--lr", "1e-6")
    assert "nan" not in done.stdout
    assert "FAILED: nothing is finite" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, "positive"),
        ({"optimizer": "sgd"}, "any size"),
        ({"optimizer": "muon"}, "as a matrix"),
        ({"optimizer": "adam", "weight_decay": 0.1}, "part of the gradient"),
        ({"weight_decay": -0.1}, "from 0 on"),
        ({"bound": "most"}, "step, worst or a number"),
        ({"bound": 0.0}, "positive"),
        ({"bound": "worst", "betas": (0.99, 0.9)}, "has no bound"),
        ({"bound": "worst", "betas": (0.9, 1.0)}, "below 1"),
        ({"grid": "nvfp4"}, "move with the data"),
        ({"grid": "m20"}, "at most 16"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(hu.UsageError, match=said):
        hu.check({"w": torch.ones(3)}, **{"lr": 1e-6, **options})  # type: ignore[arg-type]


def test_bad_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(hu.UsageError, match="no checkpoint"):
        hu.check(tmp_path / "none.safetensors", 1e-6)
    torch.save({"x": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(hu.CorruptionError, match=r"save_file"):
        hu.check(tmp_path / "model.pt", 1e-6)
    with pytest.raises(hu.UsageError, match="nothing to check"):
        hu.check({"ids": torch.arange(3)}, 1e-6)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(hu.UsageError, match="holds no"):
        hu.check(empty, 1e-6)
    index = folder / "model.safetensors.index.json"
    (folder / "other.safetensors.index.json").write_text(index.read_text())
    with pytest.raises(hu.UsageError, match="2 checkpoints"):
        hu.check(folder, 1e-6)
    for text, said in (
        ('{"weight_map": {}}', "names no files"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not a file beside it"),
        ('{"weight_map": {"zz": "model-1.safetensors"}}', "do not hold"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "is missing"),
    ):
        index.write_text(text)
        with pytest.raises(hu.CorruptionError, match=said):
            hu.check(index, 1e-6)
    cut = folder / "model-1.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(hu.CorruptionError, match="two places in the file"):
        hu.check(cut, 1e-6)


def test_types_that_are_not_known_are_said_and_passed_over(tmp_path: Path) -> None:
    """A file may hold types that torch has no name for."""
    header = {
        "w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "s": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [4, 8]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = torch.ones(2).bfloat16().view(torch.uint8).numpy().tobytes() + b"\x7f" * 4
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    found = hu.check(tmp_path / "x.safetensors", 1e-6)
    assert found.stuck == 2
    assert "F8_E8M0" in found.skipped["s"]
