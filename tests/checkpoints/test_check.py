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
from halfulp.checkpoints import check_model
from halfulp.checkpoints.check_bounds import Reach, adam_bound, reach
from halfulp.checkpoints.check_model import RATES, sweep
from halfulp.checkpoints.stored_tensors import shards
from halfulp.cli import app


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


def stuck(values: Any, grid: hu.Grid, far: Reach) -> int:
    return sum(not can_move(float(v), grid, far) for v in values)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3@128", "e2m1", "int4@16", "int3@8/asym"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_every_code_of_small_grids(name: str, decay: float) -> None:
    grid = hu.grid(name)
    gap = grid.quantum
    codes = torch.tensor(grid.values(), dtype=torch.float32)
    for lr in (gap / 2, gap * 2, gap * 4, gap * 1.7, gap * 16, 1e-6):  # ties among them
        found = hu.check({"w": codes}, lr, weight_decay=decay, grid=grid)
        assert found.stuck == stuck(codes, grid, reach(lr, weight_decay=decay))
        assert found.stuck_worst == stuck(codes, grid, reach(lr, weight_decay=decay, bound="worst"))


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
        found = hu.check({"w": stored}, lr, weight_decay=decay)
        assert found.stuck == stuck(finite, hu.grid(dtype), reach(lr, weight_decay=decay))
        worst = reach(lr, weight_decay=decay, bound="worst")
        assert found.stuck_worst == stuck(finite, hu.grid(dtype), worst)
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
        bounds = (reach(rate, weight_decay=decay), reach(rate, weight_decay=decay, bound="worst"))
        expected, worst = (stuck(all_of_them, hu.grid("float32"), far) for far in bounds)
        assert 0 < worst < expected < len(all_of_them)
        held = {"w": torch.from_numpy(np.concatenate([all_of_them, [np.inf, np.nan]]).astype(np.float32))}
        found = hu.check(held, rate, weight_decay=decay)
        assert (found.stuck, found.stuck_worst, found.tensors[0].nonfinite) == (expected, worst, 2)


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


@pytest.mark.parametrize(("b1", "b2", "t"), [(0.9, 0.95, 300), (0.9, 0.999, 10_000)])
def test_the_bound_of_adam_is_reached_and_never_passed(b1: float, b2: float, t: int) -> None:
    """torch's own Adam, in float64, on the gradients for which the two sides are equal, and on others."""
    k = np.arange(t)[::-1]
    noise = np.random.default_rng(0).standard_normal(t)
    gradients = torch.tensor(np.stack([(b1 / b2) ** k, k == 0, noise, noise * (k < 9)], axis=1) + 1e-150)
    p = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([p], lr=1e-3, betas=(b1, b2), eps=0.0)
    largest = torch.zeros(4, dtype=torch.float64)
    for gradient in gradients:
        p.data.zero_()
        p.grad = gradient
        optimizer.step()
        largest = torch.maximum(largest, p.detach().abs() / 1e-3)
    bound = adam_bound(b1, b2)
    assert float(largest.max()) <= bound * (1 + 1e-9)
    assert float(largest[0]) > 0.9999 * bound
    assert reach(1e-3, bound="worst", betas=(b1, b2)).bound == bound


def test_a_step_after_999_zeros_moves_what_a_step_of_size_lr_cannot() -> None:
    """The typical bound is not the largest; the worst case holds, and the check says so beside the number."""
    p = torch.nn.Parameter(torch.ones(64))
    inner = torch.optim.AdamW([("norm.weight", p)], lr=1e-3, weight_decay=0.0)
    optimizer = hu.WriteBack(inner, "bf16", "rne", params=lambda name, p: True)
    found = hu.check({"norm.weight": p.detach().bfloat16()}, 1e-3)
    assert (found.stuck, found.stuck_worst) == (64, 0)
    for gradient in [0.0] * 999 + [1.0]:
        p.grad = torch.full((64,), gradient)
        optimizer.step()
        assert int((p != 1).sum()) == (64 if gradient else 0)  # a step of 2.5 lr
    said = str(found)
    assert (
        "100.00% of the weights cannot be moved by a step of size lr = 0.001, as adamw takes it for" in said
    )
    assert "0.00% cannot be moved by any adamw step: at most 7.27 times lr = 0.001, with betas (0.9, " in said


def test_rare_rows_are_named() -> None:
    """An embedding that is named is judged by the worst case; one that is not is pointed out."""
    held = {"embed_tokens.weight": torch.ones(8, 4).bfloat16(), "norm.weight": torch.ones(4).bfloat16()}
    found = hu.check(held, 1e-3)
    assert (found.stuck, found.stuck_worst) == (36, 0)
    assert "name it (rare=, --rare): embed_tokens.weight" in str(found)
    for rare in (["embed_tokens.weight"], ["*embed*"], "*embed*"):
        named = hu.check(held, 1e-3, rare=rare)
        assert (named.stuck, named.stuck_worst) == (4, 0)
        assert [t.rare for t in named.tensors] == [True, False]
        assert "rows that see gradients rarely, counted by that bound in both: embed_tokens.weight" in str(
            named
        )
        assert "--rare" not in str(named)
    assert named.tensors[0].half_from == pytest.approx(
        2**-9 / adam_bound(0.9, 0.999), rel=1e-12
    )  # one quotient
    with pytest.raises(hu.UsageError, match="rare='wte' names no tensor that was checked"):
        hu.check(held, 1e-3, rare=["wte"])
    for options in ({"bound": 3.0}, {"optimizer": "lion"}, {"bound": "worst"}, {"betas": (0.9, 0.8)}):
        with pytest.raises(hu.UsageError, match="it goes with bound='step'"):
            hu.check(held, 1e-3, rare=["*"], **options)  # type: ignore[arg-type]


def test_where_there_is_one_bound_it_is_said() -> None:
    held = {"w": torch.ones(8).bfloat16()}
    for options, said in (
        ({"optimizer": "lion"}, "by any lion step: lr = 0.0001, exactly."),
        ({"bound": 3.0}, "by a step of at most 3 times lr = 0.0001."),
        ({"betas": (0.9, 0.8)}, "(the largest step has no bound with betas (0.9, 0.8))."),
    ):
        found = hu.check(held, 1e-4, **options)  # type: ignore[arg-type]
        assert said in str(found)
        assert found.worst is found.stuck_worst is found.worst_share is None


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
    assert repr(found) == str(found)
    assert "100.00% of norm" in str(found)


def test_large_tensors_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    x = (torch.randn(10_001, generator=torch.Generator().manual_seed(4)) * 0.02).bfloat16()
    save_file({"x": x}, tmp_path / "x.safetensors")
    whole = hu.check(tmp_path / "x.safetensors", 1e-5).table()
    monkeypatch.setattr(check_model, "PIECE", 256)
    monkeypatch.setattr(check_model, "FOLD", 1000)
    for count in (1, 2):
        torch.set_num_threads(count)
        assert hu.check(tmp_path / "x.safetensors", 1e-5).table() == whole


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["check", *args])


def test_command_and_its_exit_code(folder: Path) -> None:
    done = run(str(folder), "--lr", "1e-6", "--json", "--fail-above", "50%")
    whole = json.loads(done.stdout)
    told = whole["result"]
    assert (done.exit_code, whole["exit"]["code"]) == (1, 1)
    assert "more than 0.5 (--fail-above)" in whole["exit"]["reason"]
    assert run(str(folder), "--lr", "1e-6").exit_code == 0
    done = run(str(folder), "--lr", "1e-6", "--fail-stuck")
    assert done.exit_code == 1
    assert "FAILED: 1 whole tensor cannot be moved, such as norm" in done.stdout
    assert run(str(folder), "--lr", "1e-2", "--fail-stuck").exit_code == 0
    assert told["stuck"] == hu.check(folder, 1e-6).stuck
    assert told["worst"]["stuck"] == hu.check(folder, 1e-6, bound="worst").stuck < told["stuck"]
    named = json.loads(run(str(folder), "--lr", "1e-6", "--rare", "a, nor*", "--json").stdout)["result"]
    assert [t["tensor"] for t in named["tensors"] if t["rare"]] == ["a", "norm"]
    done = run(str(folder), "--lr", "1e-6", "--fail-above", "100%", "--bound", "worst", "--betas", "0.9,0.95")
    assert done.exit_code == 0
    assert "1.165 times lr" in done.stdout
    for wrong in (
        ["--bound", "x"], ["--betas", "0.9"], ["--fail-above", "200%"], ["--lr", "0"], ["--rare", ""],
        ["--grid", ""],
    ):  # fmt: skip
        assert isinstance(run(str(folder), "--lr", "1e-6", *wrong).exception, hu.UsageError)
    assert "an empty name" in str(run("", "--lr", "1e-6").exception)


def test_weights_of_which_none_is_finite(tmp_path: Path) -> None:
    """No rate moves them, which JSON says as null."""
    save_file({"w": torch.full((5,), torch.nan)}, tmp_path / "w.safetensors")
    (row,) = hu.check(tmp_path / "w.safetensors", 1e-6).table()
    assert (row["nonfinite"], row["half_from"]) == (5, None)
    done = run(str(tmp_path / "w.safetensors"), "--lr", "1e-6", "--json", "--fail-above", "50%")
    told = json.loads(done.stdout, parse_constant=pytest.fail)["result"]
    assert told["tensors"][0]["half_from"] is None
    assert set(told["could_move_from"].values()) == {None}
    assert (told["share"], done.exit_code) == (None, 1)
    done = run(str(tmp_path / "w.safetensors"), "--lr", "1e-6", "--fail-above", "50%")
    assert "nan" not in done.stdout
    assert "FAILED: nothing is finite" in done.stdout
    done = run(str(tmp_path / "w.safetensors"))
    assert ("nan" in done.stdout, done.exit_code) == (False, 0)


@pytest.mark.parametrize(
    "options", [{}, {"rare": ["a"]}, {"bound": "worst"}, {"optimizer": "lion"}, {"grid": "bf16"}]
)
def test_a_sweep_is_a_check_at_every_rate(folder: Path, options: dict[str, Any]) -> None:
    """One pass answers for every rate as a check at that rate does."""
    rows = sweep(folder, **options).table()
    assert [row["lr"] for row in rows] == list(RATES)
    for row in rows:
        found = hu.check(folder, row["lr"], **options)
        assert (row["share"], row["worst_share"]) == (found.share, found.worst_share)
        for group, share in row["groups"].items():
            those = [t for t in found.tensors if t.group == group]
            assert share == sum(t.stuck for t in those) / sum(t.weights - t.nonfinite for t in those)


def test_the_command_sweeps_without_a_rate(folder: Path) -> None:
    done = run(str(folder))
    told = json.loads(run(str(folder), "--json").stdout)["result"]
    assert done.exit_code == 0
    table = [line.split() for line in done.stdout.splitlines()[2 : 3 + len(RATES)]]
    for line, row in zip(table[1:], told["rates"], strict=True):
        shares = (row["share"], row["worst_share"], *row["groups"].values())
        assert line == [f"{row['lr']:g}", *(f"{x:.1%}" for x in shares)]
    assert "optimizer = hu.AdamW(model.named_parameters(), lr=...)" in done.stdout
    assert told["fix"] == hu.check(folder, 1e-5).fix("...")
    for wrong in (["--fail-above", "50%"], ["--fail-stuck"], ["--weight-decay", "0.1"]):
        done = run(str(folder), *wrong)
        assert isinstance(done.exception, hu.UsageError)
        assert "--lr" in str(done.exception)
    with pytest.raises(hu.UsageError, match="rising order"):
        sweep(folder, (1e-3, 1e-4))


def test_the_fix_runs_as_printed() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = torch.nn.Linear(8, 8).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        lines = [line for line in hu.check(model, 1e-6).fix() if line.startswith("optimizer = ")]
        assert len(lines) == (2 if dtype == torch.bfloat16 else 1)
        for line in reversed(lines):
            names = {"hu": hu, "model": model, "optimizer": optimizer}
            exec(line, names)  # noqa: S102  # what a user would paste
            model(torch.ones(1, 8, dtype=dtype)).sum().backward()
            names["optimizer"].step()  # type: ignore[attr-defined]
    assert hu.check(torch.nn.Linear(8, 8), 1e-3).fix() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, "positive"),
        ({"optimizer": "sgd"}, "any size"),
        ({"optimizer": "muon"}, "as a matrix"),
        ({"optimizer": "adam", "weight_decay": 0.1}, "part of the gradient"),
        ({"weight_decay": -0.1}, "from 0 on"),
        ({"weight_decay": "x"}, "from 0 on"),
        ({"optimizer": None}, "not known here"),
        ({"betas": 0.9}, "two numbers"),
        ({"rare": 3}, "names or patterns"),
        ({"rare": ""}, "names or patterns"),
        ({"lr": 1e308}, "more than a float64 holds"),
        ({"lr": 10**400}, "positive number"),
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


@pytest.mark.parametrize(
    "what", [None, [torch.ones(2)], np.ones(2), "", {"w": np.ones(2)}, {1: torch.ones(2)}, torch.nn.Linear]
)
def test_what_is_no_checkpoint_is_refused(what: Any) -> None:
    for judge in (lambda: hu.check(what, 1e-6), lambda: hu.diff(what, what)):
        with pytest.raises(hu.UsageError, match="a checkpoint"):
            judge()


def test_a_model_without_values_is_refused() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    for judge in (lambda: hu.check(model, 1e-6), lambda: hu.diff(model, model)):
        with pytest.raises(hu.UsageError, match="meta float32"):
            judge()


def test_a_name_that_is_too_long_is_refused() -> None:
    for judge in (lambda: hu.check("x" * 5000, 1e-6), lambda: hu.diff("x" * 5000, "y")):
        with pytest.raises(hu.HalfulpError, match=r"cannot be read|no checkpoint"):
            judge()


def test_bad_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(hu.UsageError, match="no checkpoint"):
        hu.check(tmp_path / "none.safetensors", 1e-6)
    torch.save({"x": torch.ones(3)}, tmp_path / "pickled.safetensors")
    with pytest.raises(hu.CorruptionError, match=r"save_file"):
        hu.check(tmp_path / "pickled.safetensors", 1e-6)
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
    with pytest.raises(hu.CorruptionError, match=r"is cut short: tensor .norm. ends"):
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
