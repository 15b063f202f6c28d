"""How tensors get their names."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_reference import (
    batches,
    made,
)

import halfulp as hu
from halfulp.audit.sources import names


def found_names(optimizer: torch.optim.Optimizer, **options: Any) -> list[str]:
    """The names that an audit gives to the tensors of an optimizer."""
    with hu.Audit(optimizer, ["bf16"], **options) as audit:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        optimizer.step()
    return [w.name for w in audit.watched.values()]


class Holder:
    """A trainer that keeps its model as an attribute."""

    def __init__(self) -> None:
        self.network = made("mlp")
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)

    def run(self) -> list[str]:
        with hu.Audit(self.optimizer, ["bf16"]) as audit:
            self.network.loss(batches()).backward()
            self.optimizer.step()
        return [w.name for w in audit.watched.values()]


PLAIN = [
    "fc1.weight", "fc1.bias", "norm.weight", "norm.bias", "fc2.weight", "fc2.bias", "rms.weight",
    "head.weight", "head.bias",
]  # fmt: skip


def test_names_from_the_model_that_was_given() -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert found_names(optimizer, model=model) == PLAIN


def test_wrappers_leave_no_mark_on_names() -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert found_names(optimizer, model=torch.compile(model)) == PLAIN
    assert found_names(optimizer, model=torch.nn.DataParallel(torch.compile(model))) == PLAIN
    model.fc1 = torch.compile(model.fc1)
    assert found_names(optimizer, model=model) == PLAIN
    nested = torch.nn.ModuleDict({"module": model})  # a child that somebody calls module
    assert found_names(optimizer, model=nested) == [f"module.{n}" for n in PLAIN]


def test_names_from_the_frames_around_the_step() -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert found_names(optimizer) == PLAIN
    assert Holder().run() == PLAIN


def test_frames_may_hold_anything() -> None:
    """Dead proxies and objects that raise when they are looked at."""
    import weakref

    class Unlookable:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("do not look")

    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone, strange = weakref.proxy(Holder()), Unlookable()
    assert found_names(optimizer) == PLAIN
    assert (gone, strange) is not None


def test_names_of_the_optimizer_come_before_those_of_frames() -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD([(f"mine/{n}", p) for n, p in model.named_parameters()], lr=0.1)
    assert found_names(optimizer) == [f"mine/{n}" for n in PLAIN]
    assert found_names(optimizer, model=model) == PLAIN


def test_names_by_place_when_there_are_no_others() -> None:
    loose = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD([{"params": [p]} for p in loose], lr=0.1)
    assert found_names(optimizer, model=torch.nn.Linear(1, 1)) == ["0.0", "1.0"]


def test_names_that_two_models_share_stay_apart(tmp_path: Path) -> None:
    models = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with hu.Audit(optimizers, ["bf16"], model=models, out=tmp_path / "trace"):
        for m, o in zip(models, optimizers, strict=True):
            m(torch.ones(1, 3)).sum().backward()
            o.step()
    names = [t["name"] for t in hu.Trace.open(tmp_path / "trace").tensors]
    assert names == ["weight", "bias", "weight#2", "bias#2"]


def test_two_models_that_nobody_named_are_called_like_their_variables(tmp_path: Path) -> None:
    """All names of the second, also those that the first does not have."""
    critic, generator = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator)]
    with hu.Audit(None, ["bf16"], out=tmp_path / "trace"):
        for _ in range(2):
            for o in optimizers:
                generator(critic(torch.ones(1, 3))).sum().backward()
                o.step()
    names = [t["name"] for t in hu.Trace.open(tmp_path / "trace").tensors]
    assert names == ["weight", "generator.weight", "generator.bias"]


def stepped() -> None:
    """A step that nobody has seen before, so that variables are looked at."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_what_a_function_deletes_is_freed() -> None:
    """Its variables are looked at for names, and nothing keeps them."""

    def train() -> list[bool]:
        big, shared = torch.zeros(1000), torch.zeros(1000)
        alive = [weakref.ref(big), weakref.ref(shared)]
        size = (lambda: shared.numel())()  # noqa: F821  # it is one of both functions, until it is deleted
        stepped()
        assert size == big.numel() == shared.numel()
        del big, shared
        return [ref() is not None for ref in alive]

    with hu.Audit(None, ["bf16"], states="find"):
        assert train() == [False, False]


def test_what_a_function_asks_of_its_own_variables_stays() -> None:
    """``locals()`` that it holds, and up to Python 3.12 names that ``exec`` made, are as without an audit."""

    def train() -> tuple[dict[str, Any], Any, list[str]]:
        first = 1
        exec("made = 5")  # noqa: S102  # a script may
        held = locals()
        stepped()
        return dict(held), locals().get("made"), sorted(locals())

    plain = train()
    with hu.Audit(None, ["bf16"], states="find"):
        kept, made, names = train()
    assert kept["first"] == 1
    assert (made, names) == plain[1:]

    def again() -> Any:
        exec("made = 5")  # noqa: S102  # a script may
        stepped()
        return locals().get("made")

    without = again()
    with hu.Audit(None, ["bf16"], states="find"):
        assert again() == without


def test_naming_looks_at_every_parameter_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 10,000 tensors took a minute to name: each was looked up among all, anew for each."""
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(200))
    looks, hashed = 0, torch.Tensor.__hash__

    def counted(x: torch.Tensor) -> int:
        nonlocal looks
        looks += 1
        return hashed(x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(torch.Tensor, "__hash__", counted)
    names.name_parameters(optimizer, [model])
    assert looks < 20 * 200
