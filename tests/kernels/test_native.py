"""The C++ kernels at every target that this processor runs, and what serves without them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onepass_cases import CASES, Case

import halfulp as hu
from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.kernels import native, onepass, reference
from halfulp.kernels.native import build

GRIDS = ("bf16", "e5m2", "e4m3@128", "m3", "int4@16/asym")
MOVING = ("mxfp4", "int4", "int3/dqt")
TARGETS = [*build.targets(), "off"]


def forced(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Have everything from here on done by a target."""
    monkeypatch.setenv("HALFULP_NATIVE", target)
    native.library.cache_clear()


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every target that runs here, and the reference in their place."""
    forced(monkeypatch, request.param)
    try:
        native.library()
    except UsageError:
        pytest.skip("this processor is older")
    yield request.param
    monkeypatch.undo()
    native.library.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_one_pass(target: str, name: str) -> None:
    """Steps of every kind, against the reference; a length that fills neither a tile nor a vector."""
    given, options = CASES[name]
    case = Case(*given, **{**options, "n": 2 * 768 + 331})
    for t in (1, 2):
        case.step(t, evil=t == 2)


def draw(n: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights over many binades and proposals, with what is not finite among them."""
    rng = np.random.default_rng(seed)
    w = torch.from_numpy(rng.standard_normal(n) * np.exp2(rng.integers(-20, 4, n))).to(dtype)
    d = torch.from_numpy(rng.standard_normal(n) * np.exp2(rng.integers(-30, 0, n))).to(dtype)
    for x in (w, d):
        x[torch.from_numpy(rng.integers(0, n, 4))] = torch.tensor([np.nan, np.inf, 0, -0.0]).to(dtype)
    return w, d


def everything(n: int, first: int, dtype: torch.dtype) -> list[Any]:
    """What the kernels make of a stretch that begins anywhere in memory."""
    w, d = (x[first:] for x in draw(n + first, dtype, seed=n))
    moved = torch.zeros((len(GRIDS), (n + 7) // 8), dtype=torch.uint8)
    stay = torch.ones((len(GRIDS), n), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    found = kernels.audit(w, d, GRIDS, moved=moved, stay=stay)
    made = [found.counts, found.shared, found.sums, found.phase, found.expected, moved, stay]
    made.append(torch.nan_to_num(found.arrived))
    stream = hu.Stream(seed=1, name="w", offset=first)
    for grid in (*GRIDS, *MOVING[: 1 if dtype == torch.bfloat16 else 3]):
        made += [kernels.round(w, grid), kernels.round(w, grid, stream)]
        q = kernels.round(torch.nan_to_num(w, 0, 1, -1), grid)
        made.append(q)
        if grid in GRIDS:
            made.append(kernels.decode(kernels.encode(q, grid), grid, dtype=dtype))
        else:
            found = kernels.audit(w, d, [grid])
            made += [found.counts, torch.nan_to_num(found.arrived), kernels.scales(w, grid)]
        made.append(kernels.score(w, d, d, grid, tile=100))
        for mode in ("nearest", "stochastic", "deadzone"):
            bits, carry = torch.zeros((n + 7) // 8, dtype=torch.uint8), None
            if dtype != torch.bfloat16:
                carry = torch.full((n,), 1e-4, dtype=dtype)
                made.append(carry)
            written = kernels.write_back(q, q + d, grid, mode, stream, moved=bits, sums=2, carry=carry)
            made += [written.out, written.counts, written.sums, bits]
    return [x.view(torch.int16) if x.dtype == torch.bfloat16 else x for x in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("n", "first"), [(1, 0), (767, 1), (768, 3), (1537, 5)])
def test_lengths_and_offsets(
    monkeypatch: pytest.MonkeyPatch, target: str, n: int, first: int, dtype: torch.dtype
) -> None:
    """Every target gives what the reference gives, whatever the length and the place in memory."""
    found = everything(n, first, dtype)
    forced(monkeypatch, "off")
    for a, b in zip(found, everything(n, first, dtype), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()


def at_the_end(dtype: torch.dtype) -> list[Any]:
    """What the kernels make of values in the last gaps of bfloat16, and of proposals that leave the range."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0x7F7D0000, 0x7F800000, 2000, dtype=np.uint32) | rng.integers(0, 2, 2000) << 31
    w = torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())
    made = []
    for grid in ("bf16", "m3"):
        found = kernels.audit(w.to(dtype), w.roll(1).to(dtype), [grid])
        made += [found.counts, torch.nan_to_num(found.arrived)]
    stream, settings = hu.Stream(seed=2, name="w", bits=16), onepass.Settings(lr=1.0, rule=onepass.SGD)
    q = kernels.round(w, "bf16")
    for mode in (reference.NEAREST, reference.STOCHASTIC, reference.DEADZONE):
        stored, m = q.clone(), torch.zeros_like(w)
        made += onepass.step(
            stored, q - w, m, None, hu.grid("bf16"), settings, onepass.Policy(mode, stream=stream), sums=1
        )
        made += [stored, m]
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_end_of_the_range(monkeypatch: pytest.MonkeyPatch, target: str, dtype: torch.dtype) -> None:
    """Codes at the ends are counted, and a sum that overflows is not rounded, as in the reference."""
    found = at_the_end(dtype)
    assert any(int(x[:, 2].sum()) for x in found if x.dtype == torch.int32 and x.ndim == 2)
    forced(monkeypatch, "off")
    for a, b in zip(found, at_the_end(dtype), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()


def test_a_target_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names those that run here."""
    forced(monkeypatch, "v9")
    with pytest.raises(UsageError, match="HALFULP_NATIVE=v9: this processor runs"):
        native.library()
    native.library.cache_clear()


def test_without_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reference serves, and it is said once what that costs and how to mend it."""
    native.library.cache_clear()
    monkeypatch.setattr(build, "library_name", lambda: "halfulp-none.so")
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x = torch.tensor([0.3, 1.9, -700.0])
    with caplog.at_level(logging.WARNING, logger="halfulp"):
        found = [kernels.audit(x, x * 1e-3, ["bf16", "e4m3"]).counts for _ in range(2)]
    assert torch.equal(*found)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "times slower" in said
    assert "pip install ziglang" in said
    assert "NumPy reference" in native.described()
    native.library.cache_clear()


def test_the_name_follows_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library is not used once a file that it is made from has changed."""
    for source in build.HERE.iterdir():
        if source.is_file():
            (tmp_path / source.name).write_bytes(source.read_bytes())
    here = build.library_name()
    monkeypatch.setattr(build, "HERE", tmp_path)
    assert build.library_name() == here
    names = {here}
    for source in sorted(tmp_path.glob("*.[hc]*")):
        source.write_text(source.read_text() + "// changed\n")
        names.add(build.library_name())
    assert len(names) == 1 + len(list(tmp_path.glob("*.[hc]*")))


@pytest.mark.parametrize("home", [True, False])
def test_a_read_only_file_system(
    home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It refuses with another error than a folder of somebody else's: the user's cache serves, or it is said
    which variable names a folder."""
    package = tmp_path / "package"
    package.touch()  # a file refuses everybody, the superuser too, and not with a PermissionError
    monkeypatch.setattr(native, "__file__", str(package / "__init__.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache" if home else package))
    monkeypatch.setattr(build, "build", lambda folder: folder / build.library_name())
    if home:
        assert native._file().parent == tmp_path / "cache" / "halfulp" / "native"
        return
    native.library.cache_clear()
    with caplog.at_level(logging.WARNING, logger="halfulp"):
        assert native.library() is None
    assert "set XDG_CACHE_HOME" in caplog.text
    native.library.cache_clear()


COPIED = """
import halfulp.kernels.native as native
print(native.library().name)
"""


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A change of the sources in a read-only package is compiled into the user's cache. (A file in the place
    of the folder refuses everybody, the superuser too.)"""
    place = Path(build.__file__).parent / "built" / build.library_name()
    cache = tmp_path / "cache" / "halfulp" / "native"
    cache.mkdir(parents=True)
    (cache / place.name).write_bytes(place.read_bytes())
    package = tmp_path / "src" / "halfulp"
    package.mkdir(parents=True)
    for source in Path(hu.__file__).parent.iterdir():
        if source.name != "kernels":
            (package / source.name).symlink_to(source)
    (package / "kernels").mkdir()
    for source in (Path(hu.__file__).parent / "kernels").iterdir():
        if source.name != "native":
            (package / "kernels" / source.name).symlink_to(source)
    (package / "kernels" / "native").mkdir()
    for source in Path(build.__file__).parent.iterdir():
        if source.is_file():
            (package / "kernels" / "native" / source.name).write_bytes(source.read_bytes())
    (package / "kernels" / "native" / "built").touch()
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", COPIED], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() in build.targets()
