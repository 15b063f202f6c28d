"""Every option of every torch optimizer's groups, alone and in pairs: a write-back on grid ``float32``, which
rounds nothing, is that optimizer bit for bit, in one pass or in two."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
import torch
from oracle import assert_same

import halfulp as hu
from halfulp.writeback import WriteBackOptions
from halfulp.writeback.route import why_not_group

STEPS = 3
SWITCHES = ("foreach", "fused", "maximize", "amsgrad", "nesterov", "centered", "capturable", "differentiable")
DECAY = (0.1,)
BETAS = ((0.3, 0.9), (0.0, 0.999))
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(SWITCHES, (True, False)),
    "decoupled_weight_decay": (True, False),
    "lr": (0.25, torch.tensor(0.25), 0.0),
    "weight_decay": (*DECAY, 0),
    "betas": (*BETAS, (torch.tensor(0.3), torch.tensor(0.9))),
    "eps": (1e-3,), "momentum": (0.9, 0), "dampening": (0.3,), "alpha": (0.7,), "lambd": (0.01,),
    "t0": (1.0,), "rho": (0.5,), "lr_decay": (0.2,), "initial_accumulator_value": (0.5,),
    "momentum_decay": (0.1,),
    "etas": ((0.4, 1.5),), "step_sizes": ((1e-3, 1.0),), "beta2_decay": (-0.5,), "d": (0.5,),
    "ns_coefficients": ((3.0, -4.0, 2.0),), "ns_steps": (2,), "adjust_lr_fn": ("match_rms_adamw", "original"),
    "max_iter": (2,), "max_eval": (2,), "tolerance_grad": (1e-1,), "tolerance_change": (1e-2,),
    "history_size": (1,), "line_search_fn": ("strong_wolfe",),
}  # fmt: skip
"""Values to try, by option. Some that go with one optimizer are refused by another: torch's own affair."""
OWN: dict[tuple[str, str], tuple[Any, ...]] = {("Adafactor", "eps"): ((1e-8, 1e-2),)}
REFUSED_HERE = "differentiable"
"""What a write-back refuses and torch does not: it has no gradient."""

OPTIMIZERS: dict[str, Any] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
pytestmark = pytest.mark.usefixtures("one_thread")


def options_of(name: str) -> list[tuple[str, Any]]:
    """Every option that the groups of an optimizer have, with every value to try."""
    made = list(OPTIMIZERS[name]([torch.nn.Parameter(torch.ones(2, 2))]).param_groups[0])
    return [(o, v) for o in made if o != "params" for v in OWN.get((name, o), VALUES[o])]


def choices(name: str) -> list[dict[str, Any]]:
    """No option, each alone, and each pair of different ones."""
    single = options_of(name)
    pairs = [dict(pair) for pair in combinations(single, 2) if pair[0][0] != pair[1][0]]
    return [{}, *({option: value} for option, value in single), *pairs]


class Run:
    """Two groups of an optimizer, the second one with options of its own, and some steps.

    LBFGS has one group only, SparseAdam takes sparse gradients.
    """

    def __init__(self, name: str, first: dict[str, Any], second: dict[str, Any]) -> None:
        made = torch.Generator().manual_seed(0)
        shapes = (2, 3), (5, 4)  # whole vectors of torch's fused step, and a rest
        self.sparse = name == "SparseAdam"
        self.params = [torch.nn.Parameter(torch.randn(s, generator=made)) for s in shapes]
        self.grads = [[torch.randn(s, generator=made) for s in shapes] for _ in range(STEPS)]
        groups = [
            {"params": [p], "param_names": [f"p{i}"], **copy.deepcopy(options)}
            for i, (p, options) in enumerate(zip(self.params, (first, second), strict=True))
        ]
        if name == "LBFGS":
            groups = [{**groups[1], "params": self.params, "param_names": ["p0", "p1"]}]
        self.inner = OPTIMIZERS[name](groups)

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        for grads in self.grads:

            def closure(grads: list[torch.Tensor] = grads) -> torch.Tensor:
                for p, grad in zip(self.params, grads, strict=True):
                    p.grad = (grad + p.detach()).to_sparse() if self.sparse else grad + p.detach()
                return sum((p.detach() * g).sum() for p, g in zip(self.params, grads, strict=True))  # type: ignore[return-value]  # of more than none

            optimizer.step(closure)  # type: ignore[arg-type]  # torch says float, and takes tensors


def plain(name: str, first: dict[str, Any], second: dict[str, Any]) -> Run | None:
    """Torch's own steps; nothing where torch refuses the options."""
    try:
        run = Run(name, first, second)
        run.steps(run.inner)
    except (ValueError, RuntimeError, AssertionError, TypeError, ZeroDivisionError):
        return None
    return run


def assert_equal_state(mine: Any, yours: Any, what: str) -> None:
    if isinstance(yours, torch.Tensor):
        assert_same(mine, yours, what)
    elif isinstance(yours, list):
        for x, y in zip(mine, yours, strict=True):
            assert_equal_state(x, y, what)
    else:
        assert mine == yours, what


def assert_equal_runs(ours: Run, theirs: Run, what: str) -> None:
    for p, q in zip(ours.params, theirs.params, strict=True):
        assert_same(p.detach(), q.detach(), what)
        mine, yours = ours.inner.state[p], theirs.inner.state[q]
        assert mine.keys() == yours.keys(), what
        for key, value in yours.items():
            assert_equal_state(mine[key], value, f"{what}: {key}")


def compare(name: str, first: dict[str, Any], second: dict[str, Any]) -> str:
    """Check one choice of options; how it went: in one pass, in two, or refused."""
    theirs = plain(name, first, second)
    if theirs is None:
        return "refused by torch"
    ours = Run(name, first, second)
    if any(options.get(REFUSED_HERE) for options in (first, second)):
        with pytest.raises(hu.UsageError, match="differentiable=True is not supported"):
            hu.WriteBack(ours.inner, "float32", "rne")
        return "refused here"
    opt = hu.WriteBack(ours.inner, "float32", "rne")
    ours.steps(opt)
    assert_equal_runs(ours, theirs, f"{name} {first} {second}")
    once = [chosen for chosen in opt.routes.values() if chosen.one_pass]
    return "one pass" if len(once) == len(opt.slots) else "mixed" if once else "two passes"


TRIED = {
    "ASGD": 129, "Adadelta": 113, "Adafactor": 73, "Adagrad": 129, "Adam": 263, "AdamW": 263, "Adamax": 143,
    "LBFGS": 43, "Muon": 99, "NAdam": 199, "RAdam": 179, "RMSprop": 181, "Rprop": 85, "SGD": 162,
    "SparseAdam": 39,
}  # fmt: skip
"""How many choices there are, by optimizer: another number means that torch has added something."""


def test_no_optimizer_and_no_option_is_missing() -> None:
    """Whatever torch adds should be added here."""
    assert {name: len(choices(name)) for name in sorted(OPTIMIZERS)} == TRIED


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_option_alone_and_in_pairs_is_torchs_own(name: str) -> None:
    """On float32 every choice gives torch's weights and torch's state, bit for bit, wherever torch takes it;
    the other group has no option, or is fused where this one is, so that groups are told apart."""
    found: dict[str, int] = {}
    for options in choices(name):
        first = {k: v for k, v in options.items() if k == "fused"}
        how = compare(name, first, options)
        found[how] = found.get(how, 0) + 1
    print(f"{name}: {sum(found.values())} choices of options: {found}")
    assert sum(found.values()) == TRIED[name]
    both = name in ("Adam", "AdamW", "SGD")
    assert ("one pass" in found, "mixed" in found) == (both, both)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_every_option_beside_others_is_torchs_own(name: str, fused: bool) -> None:
    """The same of pairs beside a weight decay and a momentum, of both arithmetics that torch has."""
    base = {"fused": fused, "weight_decay": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    found: dict[str, int] = {}
    for options in choices(name):
        how = compare(name, base, base | options)
        found[how] = found.get(how, 0) + 1
    print(f"{name} beside {base}: {sum(found.values())} choices of options: {found}")
    assert found["one pass"] > 0
    assert found["mixed"] > 0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("policy", ["rne", "sr", "kahan", "master", "eco"])
def test_weight_decay_is_what_the_group_says_it_is(kind: Any, decoupled: bool, policy: str) -> None:
    """One pass and two agree on a grid, for both kinds of decay in either class; the events, too."""
    runs = []
    for one_pass in (True, False):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(7, 9))
        group = {"params": [p], "param_names": ["p"], "decoupled_weight_decay": decoupled}
        inner = kind([group], lr=0.05, weight_decay=0.3, fused=True)
        opt = hu.WriteBack(inner, "bf16", policy, options=WriteBackOptions(one_pass=one_pass))
        for _ in range(STEPS):
            p.grad = torch.randn(7, 9)
            opt.step()
        assert opt.routes["p"].one_pass == one_pass
        runs.append((p.detach(), opt.events["p"]))
    assert_same(runs[0][0], runs[1][0], f"{kind.__name__} {decoupled}")
    assert runs[0][1] == runs[1][1]
    assert (runs[0][1].decay_share is not None) == decoupled


def test_an_option_that_one_pass_does_not_know_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """One that some later torch has: unless it is off, the optimizer's own step is called."""
    p = torch.nn.Parameter(torch.ones(4, 4))
    inner = torch.optim.AdamW([("p", p)], fused=True)
    inner.defaults["cautious"] = False
    opt = hu.WriteBack(inner, "bf16", "rne")
    for value, expected in ((None, None), (False, None), (True, "cautious=True, an option that one pass")):
        inner.param_groups[0]["cautious"] = value
        why = why_not_group(opt, opt.param_groups[0])
        assert why is None if expected is None else expected in str(why)
    p.grad = torch.ones(4, 4)
    opt.step()
    assert "1 of 1 tensors are stepped in two passes, which takes longer: cautious=True" in caplog.text


def test_options_are_read_at_every_step() -> None:
    """A group whose option changes in the middle of a run is stepped as torch steps it."""
    runs = []
    for write_back in (True, False):
        run = Run("Adam", {"fused": True, "weight_decay": 0.1}, {"fused": True, "weight_decay": 0.1})
        opt: Any = hu.WriteBack(run.inner, "float32", "rne") if write_back else run.inner
        for change in product(("decoupled_weight_decay", "maximize"), (True, False)):
            run.inner.param_groups[1].update([change])
            run.steps(opt)
        runs.append(run)
    assert_equal_runs(runs[0], runs[1], "changed")


def test_options_that_were_arguments() -> None:
    """They are taken for one version, with a warning that names the new spelling."""
    model = torch.nn.Linear(8, 8).bfloat16()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(
        DeprecationWarning, match=r"WriteBack\(telemetry=\.\.\.\) is now .*options=WriteBackOptions\("
    ):
        opt = hu.WriteBack(inner, "bf16", model=model, telemetry=False)  # type: ignore[call-arg]  # as before
    assert not opt.telemetry
    with pytest.raises(TypeError, match="belong inside it"):
        hu.WriteBack(inner, "bf16", model=model, telemetry=False, options=WriteBackOptions())  # type: ignore[call-arg]  # as before
    with pytest.raises(hu.UsageError, match="takes a WriteBackOptions"):
        hu.WriteBack(inner, "bf16", model=model, options={"telemetry": False})  # type: ignore[arg-type]
    with pytest.raises(hu.UsageError, match="one_pass=False forbids"):
        hu.AdamW(model.parameters(), options=WriteBackOptions(one_pass=False))


def test_what_is_no_option_is_refused() -> None:
    inner = torch.optim.SGD(torch.nn.Linear(8, 8).bfloat16().parameters(), lr=0.1)
    with pytest.raises(hu.UsageError, match=r"WriteBack has no option 'polcy'\. Did you mean policy\?"):
        hu.WriteBack(inner, "bf16", polcy="sr")  # type: ignore[call-arg]


def test_routes_say_why() -> None:
    """Torch's AdamW is moved in one pass, fused or not; others in two, with the reason."""
    model = torch.nn.Linear(8, 8)
    kinds: list[Any] = [torch.optim.AdamW, partial(torch.optim.AdamW, fused=True), torch.optim.RAdam]
    *once, two = (
        hu.WriteBack(kind(model.parameters()), "bf16", "sr", model=model).routes["weight"] for kind in kinds
    )
    assert {(one.name, one.reason) for one in once} == {("one pass", "")}
    assert two.name == "two passes, batched"
    assert "RAdam is not" in two.reason
