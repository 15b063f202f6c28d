"""Gradients that accumulate over micro-batches: what a buffer loses of them, also in a resumed run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_reference import assert_same_tables
from word_model import Words

import halfulp as hu


def accumulate(
    dtype: torch.dtype, micro: int = 4, to_none: bool = True, steps: int = 4, **options: Any
) -> tuple[list[dict[str, tuple[torch.Tensor, torch.Tensor]]], hu.Memory, list[torch.Tensor]]:
    """Train on micro-batches: buffers before every accumulation with what is added, and all weights."""
    model = Words().to(dtype)
    opt, memory = torch.optim.AdamW(model.parameters(), lr=1e-3), hu.Memory()
    audit = hu.Audit(opt, ["bf16"], model=model, out=memory, **options) if options else None
    if audit is not None:
        audit.start()
    seen: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
    for step in range(1, steps + 1):
        opt.zero_grad(set_to_none=to_none)
        for i in range(micro):
            old = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            torch.manual_seed(10 * step + i)
            loss = model(torch.randint(0, 60, (3,))) * 10.0 ** (-i)
            apart = torch.autograd.grad(
                loss, list(model.parameters()), retain_graph=True, allow_unused=True
            )  # nothing is added here, although hooks are called
            loss.backward()
            names = [n for n, _ in model.named_parameters()]
            found = {
                n: (old[n], g)
                for n, g in zip(names, apart, strict=True)
                if g is not None and old[n] is not None and old[n].any()
            }
            if found and step > 1:  # tensors are known from the first step on
                seen.append(found)
        torch.autograd.grad(model(torch.tensor([1, 2])), model.head.weight)  # and never added
        opt.step()
    if audit is not None:
        audit.stop()
    return seen, memory, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("to_none", [True, False])
def test_contributions_that_a_buffer_loses(dtype: torch.dtype, to_none: bool) -> None:
    """Every count is that of adding by hand, zeros of unused rows apart; the run is the one without."""
    seen, memory, ended = accumulate(dtype, to_none=to_none, states=True)
    _, _, plain = accumulate(dtype, to_none=to_none)
    assert all(torch.equal(a, b) for a, b in zip(ended, plain, strict=True))
    trace = memory.trace.roles["grad"]
    assert trace.manifest["run"] == {"role": "grad", "proposals": "known"}
    assert trace.steps.tolist() == list(range(1, len(seen) + 1)) == list(range(1, 10))
    grid, table = hu.grid("bf16"), trace.table().to_polars()
    zeros = {r["step"]: {} for r in table.iter_rows(named=True)}
    names = {t["id"]: t["name"] for t in trace.tensors}
    for r in trace.scan("tensors").to_polars().iter_rows(named=True):
        zeros[r["step"]][names[r["tensor"]]] = r["zero_proposal"]
    for step, found in enumerate(seen, 1):
        rows = {r["tensor"]: r for r in table.filter(step=step).iter_rows(named=True)}
        assert rows.keys() == found.keys() == {"words.weight", "head.weight", "head.bias"}
        for name, (buffer, g) in found.items():
            q = grid.round(buffer)
            assert rows[name]["frozen"] == int((grid.round(q + g) == q).sum())
            assert zeros[step][name] == int((g == 0).sum())
    assert zeros[1]["words.weight"] >= 24 * 57  # three rows a micro-batch
    lost = hu.verdict(memory.trace)
    line = next(line for line in lost.details if line.startswith("grad"))
    assert line.startswith(f"grad (3 tensors, {str(dtype)[6:]}), 9 accumulations: ")
    assert ("would be lost" in line) == (dtype == torch.float32)
    assert 0.1 < float(line.split("accumulations: ")[1].split("%")[0]) / 100 < 0.9


def test_one_batch_a_step_accumulates_nothing() -> None:
    _, memory, _ = accumulate(torch.bfloat16, micro=1, states=True)
    assert sorted(memory.trace.roles) == ["exp_avg", "exp_avg_sq"]


def test_hooks_go_with_the_audit_and_are_not_there_without() -> None:
    model = Words().bfloat16()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for states in (False, True):
        with hu.Audit(opt, ["bf16"], model=model, out=hu.Memory(), states=states):
            model(torch.tensor([1])).backward()
            opt.step()
            assert all(bool(p._backward_hooks) == states for p in model.parameters())
        assert not any(p._backward_hooks for p in model.parameters())
    assert copy.deepcopy(model) is not model


Saved = tuple[dict[str, Any], dict[str, Any]]


def in_parts(
    out: Path, first: int, last: int, saved: Saved | None = None, *, stops: bool = True, **options: Any
) -> Saved:
    """Train on two micro-batches a step, from one step to another, and what a checkpoint then holds."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if saved is not None:
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
    options = {"resume": True, "states": True, "part_seconds": 1e6, **options}
    audit = hu.Audit(opt, ["bf16"], model=model, out=out, **options).start()
    for step in range(first, last + 1):
        opt.zero_grad()
        for i in range(3):
            torch.manual_seed(10 * step + i)
            model(torch.randn(4, 16)).square().mean().backward()
        opt.step()
    if stops:
        audit.stop()
    else:  # killed
        audit._steps.hooks.detach()
        for one in (audit, *audit.tracked.tracks.values()):
            one.pipeline.sink.close()
    return copy.deepcopy((model.state_dict(), opt.state_dict()))


def test_roles_that_are_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a checkpoint, or by running the same steps again: as without an interruption. The accumulations
    of a process's first step are not seen, for the tensors are not known yet."""
    in_parts(tmp_path / "whole", 1, 10)
    saved = in_parts(tmp_path / "checkpoint", 1, 5)
    in_parts(tmp_path / "checkpoint", 6, 10, saved)
    said = capsys.readouterr().err
    assert said.count("taken for step 6") == said.count("taken for") == 1
    in_parts(tmp_path / "again", 1, 5)
    in_parts(tmp_path / "again", 1, 10)
    whole, checkpoint, again = (
        hu.Trace.open(tmp_path / name).roles for name in ("whole", "checkpoint", "again")
    )
    assert whole["exp_avg"].steps.tolist() == list(range(2, 11))
    assert whole["grad"].steps.tolist() == list(range(1, 19))
    for role in ("exp_avg", "exp_avg_sq"):
        assert_same_tables(checkpoint[role], whole[role])
        assert_same_tables(again[role], whole[role])
    assert_same_tables(again["grad"], whole["grad"])
    assert checkpoint["grad"].steps.tolist() == list(range(1, 17))
    frozen = whole["grad"].frozen("bf16").tolist()
    assert checkpoint["grad"].frozen("bf16").tolist() == frozen[:8] + frozen[10:]


@pytest.mark.parametrize("part_steps", [3, 4])
def test_accumulations_are_written_part_by_part_and_taken_up_in_the_midst_of_a_step(
    part_steps: int, tmp_path: Path
) -> None:
    """A killed run keeps the parts that were whole, and goes on after the last accumulation in them."""
    in_parts(tmp_path / "whole", 1, 10)
    in_parts(tmp_path / "killed", 1, 6, stops=False, part_steps=part_steps)
    held = hu.Trace.open(tmp_path / "killed").roles["grad"].last_step
    assert held == 9 // part_steps * part_steps
    in_parts(tmp_path / "killed", 1, 10, part_steps=part_steps)
    whole = hu.Trace.open(tmp_path / "whole").roles["grad"]
    assert_same_tables(hu.Trace.open(tmp_path / "killed").roles["grad"], whole)


# ---- what the optimizer holds ----------------------------------------------------------------------------
