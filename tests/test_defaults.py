"""What a script sets for all of torch, its default dtype and device, changes nothing here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.writeback import WriteBackOptions, load, save

SHAPES = {"a": (40, 48), "b": (48,), "c": (7, 3, 5)}


@pytest.fixture
def put_back() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


class Plain(torch.nn.Module):
    """Parameters of a dtype on the CPU, whatever the defaults are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        for name, shape in SHAPES.items():
            values = torch.from_numpy(rng.standard_normal(shape) * 0.1).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(values))


def give_gradients(model: torch.nn.Module, step: int) -> None:
    rng = np.random.default_rng(step + 1)
    for p in model.parameters():
        p.grad = torch.from_numpy(rng.standard_normal(tuple(p.shape))).to(p.dtype)


def values(model: torch.nn.Module) -> dict[str, Any]:
    return {name: p.detach().double().numpy().tolist() for name, p in model.named_parameters()}


def wrapped(model: Plain, grid: str, policy: Any, **options: Any) -> hu.WriteBack:
    inner = torch.optim.AdamW(
        model.parameters(), lr=1e-2, fused=True
    )  # whose state is where its parameters are
    return hu.WriteBack(inner, grid, policy, model=model, **options)


GRIDS = (("bf16", "sr"), ("e4m3@16", "eco"), ("int8/row", "sr"), ("mxfp4", "kahan"), ("nvfp4", "master"))
CASES: dict[str, tuple[torch.dtype, Callable[[Plain], Any]]] = {
    "plain": (torch.float32, lambda m: torch.optim.AdamW(m.named_parameters(), lr=1e-2, fused=True)),
    "hu.AdamW": (
        torch.bfloat16,
        lambda m: hu.AdamW(m.named_parameters(), lr=1e-2, grid="bf16", policy="sr", moments="bf16"),
    ),
    "tiles": (
        torch.float32,
        lambda m: wrapped(
            m, "bf16", hu.TileMaster({"a": torch.tensor([True, False, True], device="cpu")}), params=["a"]
        ),
    ),
    **{
        f"{grid}, {policy}, {storage}, {passes} pass(es)": (
            torch.float32,
            lambda m, g=grid, p=policy, s=storage, n=passes: wrapped(
                m, g, p, storage=s, options=WriteBackOptions(one_pass=n == 1)
            ),
        )
        for grid, policy in GRIDS for storage, passes in (("container", 1), ("container", 2), ("packed", 1))
    },
}  # fmt: skip


def outcome(case: str, folder: Path) -> dict[str, Any]:
    """Three steps, saved, taken up by another and gone on with; audited, with rehearsals and states."""
    dtype, make = CASES[case]
    model = Plain(dtype)
    optimizer = make(model)
    seen = []
    plain = not isinstance(optimizer, hu.WriteBack)
    options: dict[str, Any] = {"states": True, "scores": ("e5m2", 1, 3)}
    rehearse = ["e5m2", "e5m2:sr", "int8/row:kahan"] if plain else None
    options |= {"decay": True, "expected_never_moved": True} if plain else {}
    options |= {"model": model, "out": folder / "run", "rehearse": rehearse}
    with hu.Audit(optimizer, ["bf16", "e5m2"], **options):
        for step in range(3):
            give_gradients(model, step)
            optimizer.step()
            seen.append([] if plain else [repr(row) for row in optimizer.events.rows])
    trace = hu.Trace.open(folder / "run")
    found = {
        "events": seen, "table": trace.table().to_polars().rows(), "weights": values(model),
        "roles": {name: role.table().to_polars().rows() for name, role in trace.roles.items()},
        "mask": {n: t.tolist() for n, t in hu.allocate(trace, 0.5, score="P").tiles.items()},
    }  # fmt: skip
    if plain:
        return found | {"forecast": [trace.forecast(spec).frozen().tolist() for spec in trace.rehearsals]}
    save(optimizer, folder / "state.safetensors")
    other = Plain(dtype)
    other.load_state_dict(model.state_dict())
    resumed = make(other)
    load(resumed, folder / "state.safetensors")
    other.load_state_dict(model.state_dict())
    give_gradients(other, 3)
    resumed.step()
    return found | {"resumed": values(other)}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What comes out where nothing is set; once a case."""
    return functools.cache(lambda case: repr(outcome(case, tmp_path_factory.mktemp("plain"))))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "device"),
    [(torch.float64, None), (torch.bfloat16, None), (torch.float32, "meta")],
    ids=["float64", "bfloat16", "another device"],
)
def test_defaults_change_nothing(
    case: str,
    dtype: torch.dtype,
    device: str | None,
    expected: Callable[[str], str],
    put_back: None,
    tmp_path: Path,
) -> None:
    """Weights, events, tables, masks. A device without values stands for one that this machine has not."""
    plain = expected(case)
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    assert repr(outcome(case, tmp_path)) == plain
