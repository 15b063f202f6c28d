"""Traces on disk: what they say, and what names cannot do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from audit_reference import made, train
from kept_weights import KeptWeights
from safetensors import safe_open
from safetensors.torch import load_file

import halfulp as hu
from halfulp import canonical
from halfulp.text import shown
from halfulp.trace import TABLES
from halfulp.trace.columns import ABSENT, OPTIONAL, SCHEMAS

GRIDS = ["bf16", "e4m3@128"]


def test_the_files_of_a_trace(recorded: Path) -> None:
    """The layout that the documentation gives; state in the newest part only; nothing left aside."""
    files = sorted(str(p.relative_to(recorded)) for p in recorded.rglob("*") if p.is_file())
    each = ["part.json", "tables.safetensors"]
    expected = [f"parts/{i:06d}/{name}" for i in range(4) for name in each]
    assert files == sorted([*expected, "state/000003.safetensors", "manifest.json"])
    assert not [p for p in recorded.rglob("*") if p.suffix in (".pkl", ".pt", ".npy")]


def test_tables_open_without_halfulp(recorded: Path) -> None:
    """With the safetensors library alone; whole numbers are whole."""
    parts = [load_file(file) for file in sorted(recorded.glob("parts/*/tables.safetensors"))]
    for table, schema in SCHEMAS.items():
        for name, kind in schema.items() if table in TABLES else ():
            for found in (part[f"{table}/{name}"] for part in parts if name not in ABSENT):
                assert found.dim() == 1
                assert found.is_floating_point() == (kind is np.float64 and name not in OPTIONAL)
    assert torch.cat([part["run/step"] for part in parts]).tolist() == list(range(1, 8))
    assert all(len(part["grids/step"]) == len(GRIDS) * len(part["tensors/step"]) for part in parts)
    assert not any("grids/frozen_decay" in part for part in parts)  # nobody asked for it


def test_reading_needs_no_pandas(recorded: Path) -> None:
    """Nor anything else that is not a dependency."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('pandas', 'polars', 'pyarrow'))\n"
        "import halfulp as hu\n"
        f"t = hu.Trace.open({str(recorded)!r})\n"
        "print(len(t.table()), t.frozen('bf16').shape, len(t.scores()) > 0)"
    )
    place = {**os.environ, "PYTHONPATH": str(Path(hu.__file__).parent.parent)}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=place, check=True, timeout=120
    ).stdout.split()
    assert said[1:] == ["(7,)", "True"]


def test_the_manifest(recorded: Path) -> None:
    manifest = json.loads((recorded / "manifest.json").read_text())
    assert manifest["kind"] == "halfulp.trace"
    assert manifest["format"] == 5
    assert len(manifest["id"]) == 32
    assert manifest.pop("sha256") == canonical.digest(manifest)
    assert manifest["halfulp"] == hu.__version__
    assert manifest["grids"] == GRIDS
    assert manifest["every"] == 1
    assert manifest["options"] == {
        "sample": None, "decay": False, "never_moved": True, "expected_never_moved": True, "keep": False,
        "rehearse": None,
        "scores": ["e4m3", 1, 5], "seed": 0,
    }  # fmt: skip
    assert manifest["tensors"][0] == {
        "id": 0, "name": "unused", "group": "other", "shape": [7], "numel": 7, "recorded": 7,
        "dtype": "float32", "stored": "float32", "device": "cpu",
    }  # fmt: skip
    assert [o["class"] for o in manifest["optimizers"]] == ["AdamW"]
    assert manifest["optimizers"][0]["defaults"]["lr"] == "0.001"
    assert set(manifest["environment"]) == {"python", "torch", "numpy", "machine", "threads"}
    assert manifest["run"].pop("caller")["framework"] == "loop"
    assert manifest["run"] == {"note": "seven steps"}


def test_series_are_shares_of_coordinates(recorded: Path) -> None:
    trace = hu.Trace.open(recorded)
    table = trace.table().to_polars()
    for grid in GRIDS:
        for scope, names in (
            ("all", None),
            ("embedding", ["wte.weight", "wpe.weight"]),
            ("h.0.mlp.0.weight", ["h.0.mlp.0.weight"]),
        ):
            rows = table.filter(pl.col("grid") == grid)
            if names is not None:
                rows = rows.filter(pl.col("tensor").is_in(names))
            steps = [rows.filter(pl.col("step") == s) for s in range(1, 8)]
            for column, series in (
                ("frozen", trace.frozen(grid, scope)),
                ("symmetric", trace.frozen(grid, scope, by="symmetric")),
                ("never_moved", trace.never_moved(grid, scope)),
                ("expected", trace.expected_never_moved(grid, scope)),
                ("endpoint", trace.series("endpoint", grid, scope)),
            ):
                expected = [s[column].sum() / s["numel"].sum() for s in steps]
                np.testing.assert_allclose(series, expected, rtol=1e-14)  # one sum, perhaps in another order
            phase = [s["phase"].sum() / s["numel"].sum() / 65536 for s in steps]
            np.testing.assert_allclose(trace.frozen(grid, scope, by="phase"), phase, rtol=1e-14)
    assert (
        trace.numel("all") == table.filter(pl.col("step") == 1, pl.col("grid") == "bf16")["numel"].sum() + 7
    )
    assert set(table.columns) >= {"step", "tensor", "group", "grid", "numel", "frozen", "frozen_fraction"}
    assert trace.last_step == 7
    assert trace.steps_of("all-2d").tolist() == trace.steps.tolist() == list(range(1, 8))


def test_rho_and_the_update_ratio(recorded: Path) -> None:
    from halfulp.measures.forecasts import scalar_rho_map

    trace = hu.Trace.open(recorded)
    tensors = trace.scan("tensors").to_polars()
    sums = tensors.group_by("step").agg(pl.col("proposal_sq", "weight_sq").sum()).sort("step")
    ratio = np.sqrt(sums["proposal_sq"].to_numpy() / sums["weight_sq"].to_numpy())
    np.testing.assert_allclose(trace.update_ratio(), ratio, rtol=1e-14)
    np.testing.assert_array_equal(trace.frozen("bf16", by="rho"), scalar_rho_map(trace.update_ratio() * 256))


def test_how_much_of_the_update_arrives(recorded: Path) -> None:
    """<u, d> / |d|**2 and the cosine of u and d, brute force in float64 on the same run, made again."""
    trace = hu.Trace.open(recorded)
    model = made("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = KeptWeights(model, optimizer)
    train(model, optimizer, 7)
    for grid in GRIDS:
        for scope in ("all", "h.0.mlp.0.weight"):
            names = [t["name"] for t in trace.tensors if t["id"] in trace.ids(scope)]
            gains, cosines = trace.gain(grid, scope), trace.cosine(grid, scope)
            assert len(gains) == len(cosines) == len(kept.steps) == 7
            for at, step in enumerate(kept.steps):
                dot = written = proposed = 0.0
                for w, after in (step[name] for name in names if name in step):
                    q = hu.grid(grid).round(w)
                    u = (hu.grid(grid).round(q + (after - w)) - q).double()
                    d = (after - w).double()
                    dot, written = dot + float((u * d).sum()), written + float((u * u).sum())
                    proposed += float((d * d).sum())
                # Products and 16 of them are added in float32: 5 roundings of 2**-24, and then float64.
                assert gains[at] == pytest.approx(dot / proposed, rel=1e-6, abs=1e-9)
                if written:
                    assert cosines[at] == pytest.approx(dot / (written * proposed) ** 0.5, rel=1e-6)
    assert len({round(float(trace.gain(g).mean()), 3) for g in GRIDS}) > 1
    with pytest.raises(hu.UsageError, match="was not recorded"):
        trace.gain("fp16")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t: t.frozen("fp16"), "grid 'fp16' was not recorded; this trace has bf16, e4m3@128"),
        (lambda t: t.frozen("bf16", "layers"), "nothing in scope 'layers'"),
        (lambda t: t.frozen("bf16", by="guess"), "not 'guess'"),
        (lambda t: t.scan("masks"), "tables grids, tensors, run, losses, not 'masks'"),
        (lambda t: t.series("loss", "bf16"), "not 'loss'"),
    ],
)
def test_questions_that_a_trace_cannot_answer(recorded: Path, call: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(hu.UsageError, match=said):
        call(hu.Trace.open(recorded))


def test_no_step_yet(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with hu.Audit(optimizer, ["bf16"], out=tmp_path / "trace"):
        trace = hu.Trace.open(tmp_path / "trace")
    assert trace.parts == ()
    assert trace.last_step == 0
    assert hu.verdict(trace).lines == ("No step was recorded.",)
    with pytest.raises(hu.UsageError, match="holds no complete part yet"):
        trace.table().to_polars()
    with pytest.raises(hu.UsageError, match="nothing in scope"):
        trace.frozen("bf16")


def test_a_trace_can_be_read_while_it_grows(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []

    def look(summary: dict[str, Any]) -> None:
        trace = hu.Trace.open(tmp_path / "trace")
        seen.append(len(trace.frozen("bf16")) if trace.parts else 0)

    with hu.Audit(
        optimizer, ["bf16"], model=model, out=tmp_path / "trace", part_steps=2, listeners=[look]
    ) as audit:
        train(model, optimizer, 6, audit=audit)
    assert seen == [0, 0, 2, 2, 4, 4]


# ---- damage ----------------------------------------------------------------------------------------------


HOSTILE = [
    "../../../outside", "/etc/passwd", "a\x1b[31mred\x1b[0m", "line\nbreak", "carriage\rreturn", "bell\x07",
    "\u202egnp.exe", "zero\u200bwidth", "nul\x00byte", "lone\udc80surrogate", "x" * 5000, "__metadata__", "",
    "[bold]markup[/bold]", "{braces} %s", "'; DROP TABLE grids; --", "\u7e70\u308a\u8fd4\u3057",
]  # fmt: skip


def test_hostile_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Names reach no file name and no key; they come back as they were, and reach a terminal escaped."""
    from rich.console import Console

    loose = [(name, torch.nn.Parameter(torch.full((3, 4), 1.0))) for name in HOSTILE]
    optimizer = torch.optim.SGD(loose, lr=1e-6)
    folder = tmp_path / "inside" / "trace"
    with hu.Audit(optimizer, ["bf16"], out=folder, scores=("bf16", 1, 1), sample=0.5):
        for _, p in loose:
            p.grad = torch.ones_like(p)
        optimizer.step()
    trace = hu.Trace.open(folder)
    names = [t["name"] for t in trace.tensors]
    assert names == [n if n != "lone\udc80surrogate" else r"lone\udc80surrogate" for n in HOSTILE]
    assert set(trace.table().to_polars()["tensor"]) == set(names)
    assert set(trace.scores()) == set(names)
    for name in names:
        assert trace.frozen("bf16", name).tolist() == [1.0] or name == ""
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.name for p in files} == {
        "manifest.json", "part.json", "tables.safetensors", "000000.safetensors",
    }  # fmt: skip
    for file in (f for f in files if f.suffix == ".safetensors"):
        with safe_open(str(file), framework="pt") as opened:
            assert all(re.sub("[._/]", "", key).isalnum() for key in opened.keys())  # noqa: SIM118
    console = Console(stderr=True, force_terminal=True)
    for line in hu.verdict(trace).lines:
        console.print(line, highlight=False, markup=False)
    with pytest.raises(hu.UsageError) as caught:
        trace.frozen("bf16", "\x1b[31m no such tensor")
    print(caught.value)
    out, err = capfd.readouterr()
    for character in ("\x1b[31m", "\x07", "\r", "\u202e", "\u200b", "\x00"):
        assert character not in out + err, repr(character)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformer.h.0.attn.weight", "transformer.h.0.attn.weight"),
        ("a\x1b]0;title\x07b", r"a\x1b]0;title\x07b"),
        ("\u202eabc", r"\u202eabc"),
        ("a\nb\tc\rd\x85\u2028e", r"a\nb\tc\rd\x85\u2028e"),
        ("lone\udc80", r"lone\udc80"),
        ("\u00e9\u7e70", "\u00e9\u7e70"),
        ("y" * 100, "y" * 59 + "\u2026"),
    ],
)
def test_names_for_a_terminal(name: str, expected: str) -> None:
    assert shown(name) == expected


# ---- kill -9 ---------------------------------------------------------------------------------------------
