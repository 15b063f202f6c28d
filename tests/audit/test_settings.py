"""The options of an audit in groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import halfulp as hu
from halfulp.audit import Measure, Recording


def trained(**options: object) -> hu.Memory:
    torch.manual_seed(0)
    model, memory = torch.nn.Linear(64, 64), hu.Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with hu.Audit(optimizer, "bf16", model=model, out=memory, **options):
        for _ in range(3):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
    return memory


def test_a_group_says_the_same_as_its_fields() -> None:
    grouped = trained(measure=Measure(sample=0.5, seed=3), recording=Recording(describe={"by": "me"}))
    single = trained(sample=0.5, seed=3, describe={"by": "me"})
    for key in ("options", "run", "tensors"):
        assert grouped.manifest[key] == single.manifest[key]
    assert (grouped.trace.frozen("bf16") == single.trace.frozen("bf16")).all()


def test_a_field_that_is_given_twice_is_the_single_one() -> None:
    found = trained(measure=Measure(sample=0.5, never_moved=False), sample=0.25).manifest["options"]
    assert (found["sample"], found["never_moved"]) == (0.25, False)


def test_what_is_no_option_is_refused() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(hu.UsageError, match=r"Audit has no option 'sampel'\. Did you mean sample\?"):
        hu.Audit(optimizer, "bf16", sampel=0.1)
    wrong: Any = 3
    with pytest.raises(hu.UsageError, match=r"measure= takes a halfulp\.audit\.Measure, not 3"):
        hu.Audit(optimizer, "bf16", measure=wrong)
    with pytest.raises(hu.UsageError, match=r"recording= takes a halfulp\.audit\.Recording, not 3"):
        hu.Audit(optimizer, "bf16", recording=wrong)
    with pytest.raises(hu.UsageError, match="sample= takes a share"):
        Measure(sample=2.0)
    with pytest.raises(hu.UsageError, match="part_steps= takes a whole number"):
        Recording(part_steps=0)


@pytest.mark.parametrize(
    ("dtype", "grids"),
    [(torch.float32, ["bf16", "fp16", "e5m2", "e4m3@128"]), (torch.bfloat16, ["bf16", "e5m2", "e4m3@128"])],
)
def test_without_grids_those_of_the_command_that_the_weights_can_hold(
    dtype: torch.dtype, grids: list[str], tmp_path: Path
) -> None:
    parameter = torch.nn.Parameter(torch.ones(8, 8, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=1e-6)
    with hu.Audit(optimizer, out=tmp_path / "run"):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert hu.Trace.open(tmp_path / "run").grids == grids
