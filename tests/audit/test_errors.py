"""What an audit refuses, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_reference import (
    made,
    train,
)

import halfulp as hu

FLAGS = ("decay", "never_moved", "expected_never_moved", "resume")


@pytest.mark.parametrize(
    ("grids", "options", "said"),
    [
        ([], {}, "at least one grid"),
        (["bf16", "e5m2", "bf16"], {}, r"\['bf16'\] repeat"),
        (["bf17"], {}, "unknown grid 'bf17'"),
        (["bf16 e5m2"], {}, "unknown grid 'bf16 e5m2': separate several names with commas"),
        ([3], {}, "a grid is a name or a torch dtype, such as 'bf16', not int"),
        (["bf16"], {"every": 0}, "at least 1"),
        (["bf16"], {"first_step": 0}, "at least 1"),
        (["bf16"], {"part_steps": 0}, "at least 1"),
        (["bf16"], {"sample": 0.0}, "above 0 and at most 1"),
        (["bf16"], {"sample": 1.5}, "above 0 and at most 1"),
        (["int8"], {"sample": 0.5}, "scale follows whole tensors"),
        (["bf16"], {"scores": ("int8", 1, 2), "sample": 0.5}, "scale follows whole tensors"),
        (["bf16"], {"scores": ("nothing", 1, 2)}, "unknown grid 'nothing'"),
        (["bf16"], {"scores": ("bf16", 3, 2)}, f"1 <= first <= last <= {2**53 - 1}; found first=3, last=2"),
        (["bf16"], {"scores": ("bf16", 1, 10**23)}, f"found first=1, last={10**23}"),
        (["bf16"], {"scores": ("bf16", 1, 2, 10**23)}, f"tiles of at most {2**53 - 1} weights"),
        (["bf16"], {"unfit": "ignore"}, "raise or drop"),
        (["bf16"], {"exists": "ignore"}, "number or raise"),
        (5, {}, "takes a grid, such as 'bf16', or several, not 5"),
        (["bf16"], {"every": 2.0}, "every= takes a whole number, .* not 2.0"),
        (["bf16"], {"every": "2"}, "every= takes a whole number, .* not '2'"),
        (["bf16"], {"every": True}, "every= takes a whole number, .* not True"),
        (["bf16"], {"every": 2**53}, "at most 9007199254740991"),
        (["bf16"], {"out": "a" * 300}, "out= cannot be 'aaa"),
        (["bf16"], {"out": "a\0b"}, "embedded null byte"),
        (["bf16"], {"also": {"ema": 5}}, "takes a module or tensors, not 5"),
        (["bf16"], {"first_step": 1.0}, "first_step= takes a whole number"),
        (["bf16"], {"part_steps": 2.5}, "part_steps= takes a whole number"),
        (["bf16"], {"part_seconds": "x"}, "part_seconds= takes a number of seconds"),
        (["bf16"], {"part_seconds": -1}, "part_seconds= takes a number of seconds"),
        (["bf16"], {"sample": "x"}, "above 0 and at most 1, not 'x'"),
        (["bf16"], {"sample": True}, "above 0 and at most 1, not True"),
        *((["bf16"], {name: 1}, f"{name}= takes True or False, not 1") for name in FLAGS),
        (["bf16"], {"states": "all"}, "True, False or 'find', not 'all'"),
        (["bf16"], {"states": 1}, "states= takes True or False, not 1"),
        (["bf16"], {"also": 5}, "also= takes copies by name"),
        (["bf16"], {"describe": 5}, "describe= takes what the manifest says"),
        (["bf16"], {"seed": 1.5}, "seed= takes a whole number of .* not 1.5"),
        (["bf16"], {"seed": "1"}, "seed= takes a whole number of .* not '1'"),
        (["bf16"], {"seed": -(10**98)}, "at most 98 digits"),
        (["bf16"], {"out": 5}, "out= takes a folder"),
        (["bf16"], {"model": 3}, "model= takes a torch.nn.Module, several, or None, not 3"),
        (["bf16"], {"model": [3]}, "not list of int"),
        (["bf16"], {"groups": 5}, "groups= takes a function, not 5"),
        (["bf16"], {"params": 5}, "params= takes a function, not 5"),
        (["bf16"], {"listeners": 5}, "listeners= takes a list of functions, not 5"),
        (["bf16"], {"listeners": [5]}, "listeners= takes a list of functions, .* not 5"),
        (["bf16"], {"rehearse": 5}, "rehearse= takes specs .* not 5"),
        (["bf16"], {"rehearse": (5, "e4m3", "sr")}, "a name of its own is text"),
    ],
)
def test_what_an_audit_refuses(grids: Any, options: dict[str, Any], said: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(hu.UsageError, match=said):
        hu.Audit(optimizer, grids, **options)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (5, "not 5"),
        ([5], "not list of int"),
        (torch.nn.Linear(2, 2).parameters(), "not generator of Parameter"),
        (torch.nn.Linear(2, 2), r"not a module \(Linear\)"),
        ("adam", "not str of str"),
        ([], r"not \[\]"),
    ],
)
def test_what_is_no_optimizer(given: Any, said: str) -> None:
    with pytest.raises(hu.UsageError, match=f"takes a torch optimizer, several, or None .* {said}"):
        hu.Audit(given, "bf16")


def test_numbers_of_numpy_are_taken(tmp_path: Path) -> None:
    """And what is recorded with them, and with the largest seed, can be opened."""
    p = torch.nn.Parameter(torch.ones(3000))
    options: dict[str, Any] = {
        "every": np.int64(1), "first_step": np.int32(1), "part_steps": np.int64(2), "sample": np.float32(0.5),
        "never_moved": np.bool_(True), "part_seconds": np.float64(30),
    }  # fmt: skip
    for name, seed in (("small", np.int64(3)), ("large", 1 - 10**98)):
        optimizer = torch.optim.SGD([p], lr=0.1)
        with hu.Audit([optimizer], "bf16", out=tmp_path / name, seed=seed, **options):
            p.grad = torch.ones(3000)
            optimizer.step()
        found = hu.Trace.open(tmp_path / name).manifest
        assert (found["every"], found["options"]["sample"]) == (1, 0.5)
        assert int(found["options"]["seed"]) == seed


def test_an_optimizer_in_a_wrapper_that_passes_on() -> None:
    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    p, memory = torch.nn.Parameter(torch.ones(3)), hu.Memory()
    wrapped: Any = Wrapper(torch.optim.SGD([p], lr=0.1))
    with hu.Audit(wrapped, "bf16", out=memory):
        p.grad = torch.ones(3)
        wrapped.step()
    assert memory.trace.steps.tolist() == [1]


def test_one_grid_need_not_be_a_list() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    assert [g.name for g in hu.Audit(optimizer, "bf16").grids] == ["bf16"]
    assert [g.name for g in hu.Audit(optimizer, torch.float16).grids] == ["float16"]


def test_nothing_to_train(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3), requires_grad=False)], lr=0.1)
    with pytest.raises(hu.UsageError, match="no trainable parameters"):
        hu.Audit(optimizer, ["bf16"], out=tmp_path / "trace").start()
    assert not (tmp_path / "trace").exists()


def test_an_audit_runs_once(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    audit = hu.Audit(optimizer, ["bf16"], out=tmp_path / "trace")
    with audit, pytest.raises(hu.UsageError, match="can be started only once"):
        audit.start()
    with pytest.raises(hu.UsageError, match="can be started only once"):
        audit.start()


def test_an_audit_that_nobody_stops(tmp_path: Path) -> None:
    """What is still open when the process ends is written then; an audit that was stopped is let go."""
    model = torch.nn.Linear(8, 8)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    audit = hu.Audit(opt, "bf16", model=model, out=tmp_path / "open").start()
    model(torch.ones(1, 8)).sum().backward()
    opt.step()
    at_exit = audit._steps.hooks._forgotten
    assert at_exit is not None
    assert not hu.Trace.open(tmp_path / "open").recorded
    at_exit()
    assert hu.Trace.open(tmp_path / "open").steps.tolist() == [1]
    assert audit._steps.hooks._forgotten is None


def test_a_cell_that_runs_twice_leaves_two_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second is numbered, and said to be; resume= goes on with the first all the same."""
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for expected in ("run", "run-2", "run-3"):
        with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "run") as audit:
            train(model, optimizer, 2, audit=audit)
        assert audit.out == tmp_path / expected
        said = capsys.readouterr().err
        assert (f"run holds a trace already; this one goes to {tmp_path / expected}" in said) == (
            expected != "run"
        )
    options = {"model": model, "out": tmp_path / "run", "resume": True, "first_step": 3}
    with hu.Audit(optimizer, ["bf16"], **options) as audit:
        train(model, optimizer, 1, audit=audit)
    assert hu.Trace.open(tmp_path / "run").steps.tolist() == [1, 2, 3]
    assert hu.Trace.open(tmp_path / "run-2").steps.tolist() == [1, 2]


def test_folders_that_are_not_for_a_trace(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("do not lose me")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("full", "is not an empty folder and holds no trace"),
        ("file", "is a file, expected"),
    ):
        with pytest.raises(hu.UsageError, match=f"{name} {said}"):
            hu.Audit(optimizer, ["bf16"], out=tmp_path / name).start()
    assert (tmp_path / "full" / "thesis.tex").read_text() == "do not lose me"
    with hu.Audit(optimizer, ["bf16"], out=tmp_path / "empty"):
        pass
    assert hu.Trace.open(tmp_path / "empty").parts == ()


def test_a_grid_that_the_weights_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for by name it is refused, with the parameter's name; or left out, if that was allowed."""
    model = made("mlp").bfloat16()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = hu.Audit(optimizer, ["bf16", "fp16", "e5m2"], model=model)
    with (
        audit,
        pytest.raises(hu.UsageError, match=r"parameter 'fc1\.weight': grid fp16 does not fit bfloat16"),
    ):
        optimizer.step()
    options = {"model": model, "out": tmp_path / "trace", "unfit": "drop", "resume": True}
    for step in (1, 2):
        with hu.Audit(optimizer, ["bf16", "fp16", "e5m2"], **options, first_step=step):
            optimizer.step()
    assert capsys.readouterr().err == ""  # no weight holds fp16, so nothing is missing
    trace = hu.Trace.open(tmp_path / "trace")
    assert trace.grids == ["bf16", "e5m2"]
    assert trace.steps.tolist() == [1, 2]


def test_a_grid_that_some_of_the_weights_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """It is left out for all of them, which is said."""
    model = made("mlp")
    model.fc1.bfloat16()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.Audit(optimizer, ["bf16", "fp16"], model=model, unfit="drop"):
        optimizer.step()
    assert "fp16 left out of the whole run, because some weights are bfloat16" in capsys.readouterr().err


def test_a_loss_is_one_real_number() -> None:
    """And the one that it was when it was told: the script may write to its own."""
    model, memory = torch.nn.Linear(4, 4), hu.Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.Audit(optimizer, ["bf16"], model=model, out=memory) as audit:
        for wrong in (torch.ones(2), torch.tensor(1j)):
            with pytest.raises(hu.UsageError, match="takes a loss that is one real number, not a "):
                audit.log(wrong)
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        audit.log(loss)
        told = loss.item()
        loss.detach().mul_(1000)
        optimizer.step()
    assert memory.trace.scan("run").to_polars()["loss"].to_list() == [told]


def odd_tensors() -> dict[str, torch.nn.Parameter]:
    return {
        "meta": torch.nn.Parameter(torch.empty(3, 3, device="meta")),
        "sparse_coo": torch.nn.Parameter(torch.eye(3).to_sparse()),
        "complex64": torch.nn.Parameter(torch.ones(3, 3, dtype=torch.complex64)),
        "without a shape": next(torch.nn.LazyLinear(4).parameters()),
    }


@pytest.mark.parametrize("kind", ["meta", "sparse_coo", "complex64"])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_tensors_that_have_no_numbers_to_look_at(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are left out, and that is said; the training goes on. One that is still to get its shape waits."""
    model, lazy = torch.nn.Linear(4, 4), torch.nn.LazyLinear(4)
    odd = torch.nn.Parameter(odd_tensors()[kind])
    optimizer = torch.optim.SGD([*model.parameters(), odd, *lazy.parameters()], lr=0.1)
    with hu.Audit(optimizer, ["bf16"], model=torch.nn.Sequential(model, lazy), states=True) as audit:
        for step in range(3):
            optimizer.zero_grad()
            y = model(torch.ones(2, 4))
            (lazy(y) if step else y).sum().backward()
            optimizer.step()
    assert sorted(w.name for w in audit.watched.values()) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert f"halfulp: '0.2' ({kind}) left out" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["meta", "sparse_coo", "without a shape"])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_no_write_back_of_such(kind: str) -> None:
    optimizer = torch.optim.SGD([("w", odd_tensors()[kind])], lr=0.1)
    with pytest.raises(hu.UsageError, match=f"parameter 'w': {kind}.*expected real numbers in plain memory"):
        hu.WriteBack(optimizer, "bf16", "rne", params=lambda _name, _p: True)
