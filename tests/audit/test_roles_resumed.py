"""Traces of tracked states are bound to the trace that they lie in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import halfulp as hu
from halfulp import documents
from halfulp.errors import TamperingError
from halfulp.trace.schema import read_manifest


def in_folder(out: Path, steps: int = 4, before: Any = None, **options: Any) -> tuple[hu.Audit, list[Any]]:
    """A run that records its moments; ``before`` is called before every step with its number."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.GELU(), torch.nn.Linear(24, 24, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16"], model=model, out=out, states=True, part_steps=2, **options) as audit:
        for step in range(1, steps + 1):
            if before is not None:
                before(step)
            optimizer.zero_grad()
            model(torch.full((4, 24), 0.1 * step)).square().mean().backward()
            optimizer.step()
    return audit, [p.detach().clone() for p in model.parameters()]


def edited(role: Path, **changes: Any) -> None:
    """A manifest with other values, or without (None), under a digest that is right."""
    told = {**read_manifest(role / "manifest.json"), **changes}
    sealed = documents.sealed({key: value for key, value in told.items() if value is not None})
    (role / "manifest.json").write_bytes(sealed)


def test_a_role_is_bound_to_its_trace(tmp_path: Path) -> None:
    for name in ("run", "other"):
        in_folder(tmp_path / name)
    trace, place = hu.Trace.open(tmp_path / "run"), tmp_path / "run" / "roles" / "exp_avg"
    assert {role.manifest["owner"] for role in trace.roles.values()} == {trace.manifest["id"]}
    place.rename(tmp_path / "mine")
    for source, said in (
        (tmp_path / "other" / "roles" / "exp_avg", "does not belong here: its trace is"),
        (tmp_path / "run" / "roles" / "exp_avg_sq", "does not belong here: its role is 'exp_avg_sq'"),
    ):
        shutil.copytree(source, place)
        with pytest.raises(TamperingError, match=said):
            _ = trace.roles
        with pytest.raises(TamperingError, match=said):
            hu.verdict(hu.Trace.open(tmp_path / "run"))
        shutil.rmtree(place)
    (tmp_path / "mine").rename(place)
    edited(place, owner=3)
    with pytest.raises(TamperingError, match="does not belong here: its trace is 3"):
        _ = trace.roles


def test_a_role_without_its_manifest_is_damage(tmp_path: Path) -> None:
    in_folder(tmp_path / "run")
    trace = hu.Trace.open(tmp_path / "run")
    (tmp_path / "run" / "roles" / "new" / "parts").mkdir(parents=True)  # one that is just beginning
    assert sorted(trace.roles) == ["exp_avg", "exp_avg_sq"]
    (tmp_path / "run" / "roles" / "exp_avg" / "manifest.json").unlink()
    with pytest.raises(hu.CorruptionError, match=r"exp_avg has parts, but no manifest\.json"):
        _ = trace.roles


def test_a_role_of_before_is_read_and_bound_when_it_is_gone_on_with(tmp_path: Path) -> None:
    """It does not say whose it is."""
    in_folder(tmp_path / "run")
    for role in (tmp_path / "run" / "roles").iterdir():
        edited(role, owner=None)
    trace = hu.Trace.open(tmp_path / "run")
    assert [r.manifest.get("owner") for r in trace.roles.values()] == [None, None]
    in_folder(tmp_path / "run", 6, resume=True)
    assert [r.manifest.get("owner") for r in trace.roles.values()] == [trace.manifest["id"]] * 2
    assert [r.last_step for r in trace.roles.values()] == [6, 6]


def test_another_role_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stays as it is, and so does the training."""
    for name in ("run", "other"):
        in_folder(tmp_path / name)
    place = tmp_path / "run" / "roles" / "exp_avg"
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "other" / "roles" / "exp_avg", place)
    _, expected = in_folder(tmp_path / "whole", 6)
    capsys.readouterr()
    audit, weights = in_folder(tmp_path / "run", 6, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert audit.trouble is None
    assert "exp_avg does not belong here: its trace is" in capsys.readouterr().err
    assert hu.Trace.open(place).last_step == 4
    assert hu.Trace.open(tmp_path / "run").last_step == 6


@pytest.mark.parametrize("another", [False, True])
@pytest.mark.parametrize("at", [2, 4])
def test_roles_of_a_folder_that_goes(tmp_path: Path, at: int, another: bool) -> None:
    """Before they begin, or later: none is made in the old place, nor in the trace that is there by then."""
    folder = tmp_path / "run"
    _, expected = in_folder(tmp_path / "whole", 6)
    in_folder(tmp_path / "other")

    def goes(step: int) -> None:
        if step == at:
            folder.rename(tmp_path / "moved")
            if another:
                shutil.copytree(tmp_path / "other", folder)
                shutil.rmtree(folder / "roles")

    audit, weights = in_folder(folder, 6, goes)
    assert audit.lost
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert hu.Trace.open(tmp_path / "moved").last_step == (0 if at == 2 else 2)
    assert not (folder / "roles").exists()
    assert folder.exists() == another
