"""Bad arguments and failing policies: a HalfulpError that names what is wrong, and nothing changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from writeback_models import Tied, adamw, masks, train, values, written_back

import halfulp as hu
from halfulp.errors import VersionError
from halfulp.writeback import Kahan, WriteBackOptions
from halfulp.writeback.policies import Step

GRID = "e4m3@16"
pytestmark = pytest.mark.usefixtures("one_thread")


def with_parameter(p: torch.nn.Parameter) -> torch.nn.Module:
    model = torch.nn.Module()
    model.odd = p
    return model


MAKING: dict[str, tuple[Callable[[], Any], str]] = {
    "a WriteBack around a WriteBack": (
        lambda: hu.WriteBack(written_back(m := Tied()), GRID, model=m),
        "a WriteBack already",
    ),
    "no optimizer": (lambda: hu.WriteBack(Tied(), GRID), "wraps a torch optimizer, not Tied"),
    "the class of an optimizer": (
        lambda: hu.WriteBack(torch.optim.SGD, GRID),  # type: ignore[arg-type]
        "wraps a torch optimizer, not type. Make one first",
    ),
    "a module for its parameters": (
        lambda: hu.AdamW(Tied(), lr=1e-3),
        r"takes parameters, not the module \(Tied\): AdamW\(model.named_par",
    ),
    "the dots of a printed fix": (
        lambda: hu.SGD(Tied().parameters(), lr=...),
        "lr must be a number, such as 1e-5, not Ellipsis",  # type: ignore[arg-type]
    ),
    "text for a rate": (
        lambda: hu.Lion(Tied().parameters(), lr="1e-5"),
        "lr must be a number, such as 1e-5, not '1e-5'",  # type: ignore[arg-type]
    ),
    "no number for a decay": (
        lambda: hu.AdamW(Tied().parameters(), weight_decay="0.1"),  # type: ignore[arg-type]
        "AdamW: weight_decay must be a number, such as 1e-5, not '0.1'",
    ),
    "one beta": (
        lambda: hu.Lion(Tied().parameters(), betas=0.9),  # type: ignore[arg-type]
        r"Lion: betas must be a pair of numbers, such as \(0.9, 0.999\), not 0.9",
    ),
    "nothing for parameters": (lambda: hu.AdamW(None), r"takes parameters, not NoneType: AdamW\(model"),
    "parameters that are used up": (lambda: hu.AdamW(iter(())), "no parameters: an empty list, or a gen"),
    "a group without parameters": (
        lambda: hu.WriteBack(torch.optim.SGD([{"params": []}]), GRID),
        "the optimizer has no parameters",
    ),
    "no model for native weights": (
        lambda: hu.native(None),  # type: ignore[arg-type]
        r"native takes a torch\.nn\.Module, not NoneType",
    ),
    "an unknown grid": (lambda: written_back(Tied(), "e9m9"), "unknown grid 'e9m9'"),
    "an unknown policy": (lambda: written_back(Tied(), GRID, "magic"), "unknown policy 'magic'"),
    "an unknown projection": (lambda: written_back(Tied(), project="up"), "project must be one of.*'up'"),
    "an unknown storage": (lambda: written_back(Tied(), storage="disk"), "storage must be one of.*'disk'"),
    "an unknown rule for the non-finite": (
        lambda: written_back(Tied(), options=WriteBackOptions(nonfinite="ignore")),
        "nonfinite must be one of.*'ignore'",
    ),
    "packed without a model": (
        lambda: hu.WriteBack(adamw(Tied()), GRID, "rne", storage="packed"),
        "storage='packed'.*model=",
    ),
    "integers": (  # which cannot be trained
        lambda: written_back(
            with_parameter(torch.nn.Parameter(torch.ones(4, 4, dtype=torch.int32), requires_grad=False)),
            params=["odd"],
        ),
        "no parameter to write back",
    ),
    "complex numbers": (
        lambda: written_back(with_parameter(torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64)))),
        "parameter 'odd': complex64 cannot hold grid values",
    ),
    "float8 parameters": (
        lambda: written_back(
            with_parameter(torch.nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn))), params=["odd"]
        ),
        "parameter 'odd': float8_e4m3fn cannot hold grid values",
    ),
    "weights that are not finite": (
        lambda: written_back(with_parameter(torch.nn.Parameter(torch.full((2, 2), torch.inf)))),
        r"parameter 'odd' has 4 value\(s\) that are not finite",
    ),
    "weights off the grid with project='none'": (
        lambda: written_back(with_parameter(torch.nn.Parameter(torch.tensor([[1.0, 1.01]]))), project="none"),
        "parameter 'odd' is not on grid e4m3@16: 1 of 2 values",
    ),
    "dqt on another grid": (lambda: written_back(Tied(), GRID, "dqt"), f"int3/dqt, not {GRID}"),
    "a mask of another model": (
        lambda: written_back(Tied(), GRID, hu.TileMaster({"wte": torch.ones(3).bool()})),
        "no entry for 'embedding.weight'.*It knows wte",
    ),
    "an empty mask": (lambda: written_back(Tied(), GRID, hu.TileMaster({})), "no entry.*It knows nothing"),
    "a mask of another size": (
        lambda: written_back(
            Tied(), GRID, hu.TileMaster(masks(Tied()) | {"up.weight": torch.ones(9).bool()})
        ),
        "the mask of 'up.weight' must be 2 booleans.*but it is 9",
    ),
    "a mask of numbers": (
        lambda: written_back(Tied(), GRID, hu.TileMaster(masks(Tied()) | {"up.weight": torch.ones(2)})),
        "the mask of 'up.weight' must be 2 booleans.*torch.float32",
    ),
}


@pytest.mark.parametrize("kind", MAKING)
def test_making_one(kind: str) -> None:
    make, match = MAKING[kind]
    with pytest.raises(hu.UsageError, match=match):
        make()


def test_a_failure_leaves_the_model_and_the_optimizer_alone() -> None:
    """The last tensor is bad: the first has not been projected, and the optimizer still works by itself."""
    model = Tied()
    with torch.no_grad():
        model.down.weight[0, 0] = torch.nan
    before, base = values(model), adamw(model)
    for storage in ("container", "packed"):
        with pytest.raises(hu.UsageError, match=r"'down.weight'"):
            hu.WriteBack(base, GRID, "sr", model=model, storage=storage)
    assert all(torch.equal(p, before[n]) or n == "down.weight" for n, p in model.named_parameters())
    with torch.no_grad():
        model.down.weight[0, 0] = 0.0
    train(model, base, 1)


def test_weights_on_the_grid_need_no_projection() -> None:
    model = Tied()
    written_back(model)
    before = values(model)
    written_back(model, project="none")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("call", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copying_one(call: Callable[[Any], Any]) -> None:
    """torch would copy moments and groups only, and the copy would write nothing back."""
    with pytest.raises(hu.UsageError, match="not copied or pickled"):
        call(written_back(Tied()))


@pytest.mark.parametrize("storage", ["container", "packed"])
def test_a_policy_that_fails(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are called when every policy has been: weights that were to be written are as they were."""
    model = Tied()
    options = WriteBackOptions(materialise="all", one_pass=False)
    opt = written_back(model, GRID, "master", storage=storage, options=options)
    train(model, opt, 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    write = Step.write

    def fail(step: Step, *args: Any, **options: Any) -> Any:
        if step.name == opt.slots[-1].name:
            raise RuntimeError("injected")
        return write(step, *args, **options)

    monkeypatch.setattr(Step, "write", fail)
    with pytest.raises(RuntimeError, match="injected"):
        train(model, opt, 1)
    monkeypatch.undo()
    after = model.state_dict()
    assert all(torch.equal(after[s.name], before[s.name]) for s in opt.slots)
    assert opt.steps == 2
    train(model, opt, 1)


def test_every_error_is_a_halfulp_error() -> None:
    """One root, and UsageError is a ValueError, too."""
    assert issubclass(hu.UsageError, hu.HalfulpError)
    assert issubclass(hu.UsageError, ValueError)
    assert issubclass(hu.CorruptionError, hu.HalfulpError)
    assert issubclass(VersionError, hu.HalfulpError)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *[({"seed": seed}, r"seed=\.\.\.\) takes an int") for seed in (1.5, "3", True, None, float("nan"))],
        *[({"policy": p}, "a policy is a name such as 'kahan'") for p in (None, 5, Kahan)],
        *[({"params": chosen}, "params= takes a list of names") for chosen in (5, "weight")],
        ({"params": [torch.ones(2)]}, "params= takes the names of parameters, .* not Tensor"),
        ({"params": iter(())}, "no parameter to write back: params= is an empty list, or a generator"),
        ({"params": len}, "takes a function of name and parameter.*too many"),
        *[({"model": model}, r"model= takes a torch\.nn\.Module") for model in (5, "m")],
    ],
)  # fmt: skip
def test_arguments_of_another_kind(options: dict[str, Any], said: str) -> None:
    model = torch.nn.Linear(4, 4)
    settings: dict[str, Any] = {"grid": GRID, "policy": "rne", **options}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hu.UsageError, match=said):
        hu.WriteBack(adamw(model), **settings)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_how_stand_ins_are_made_is_checked() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(hu.UsageError, match="materialise must be one of tensor, all, not 'some'"):
        hu.WriteBack(adamw(model), GRID, "rne", model=model, options=WriteBackOptions(materialise="some"))
