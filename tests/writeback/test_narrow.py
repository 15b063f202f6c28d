"""Parameters that are themselves bfloat16 or float16: by default a step is computed in float32."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_same
from writeback_models import TWO_DIMENSIONAL, Tied, adamw, loss_of, masks, train, values, written_back

import halfulp as hu
from halfulp.writeback import WriteBackOptions, load, save

RATE, STEPS = 1e-5, 50
POLICIES = ("rne", "sr", "deadzone-sr", "eco", "kahan", "master")
pytestmark = pytest.mark.usefixtures("one_thread")


def narrow(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    return Tied().to(dtype)


def run(policy: str | None, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Any]:
    """Weights after 50 steps at a rate of fine-tuning, and the share that no step has moved."""
    model = narrow(dtype)
    start = values(model)
    opt: Any = adamw(model, lr=RATE)
    if policy is not None:
        grid = "bf16" if dtype == torch.bfloat16 else "fp16"
        opt = hu.WriteBack(opt, grid, policy, model=model, seed=3, **options)
    train(model, opt, STEPS)
    same = sum(int((model.get_parameter(n) == start[n]).sum()) for n in TWO_DIMENSIONAL)
    count = sum(start[n].numel() for n in TWO_DIMENSIONAL)
    state = {} if policy is None else opt.state_dict()["state"]
    return {"weights": values(model), "still": same / count, "state": state, "opt": opt}


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    return {"plain": run(None), **{policy: run(policy) for policy in POLICIES}}


# ---- the case that people come for ------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_default_is_native(runs: dict[str, dict[str, Any]], policy: str) -> None:
    """Weights, moments and what the policy keeps: those of storage='native', bit for bit."""
    found, expected = runs[policy], run(policy, storage="native")
    for name, value in expected["weights"].items():
        assert_same(found["weights"][name], value, name)
    for k, entry in expected["state"].items():
        for key, value in entry.items():
            assert_same(found["state"][k][key], value, f"{key} of {k}")
    assert found["opt"].events == expected["opt"].events
    assert found["opt"].bytes() == expected["opt"].bytes()


def test_weights_move_that_the_plain_run_leaves(runs: dict[str, dict[str, Any]]) -> None:
    """At rate 1e-5 a bfloat16 model hardly moves; rounding what float32 proposes at random moves it."""
    still = {name: found["still"] for name, found in runs.items()}
    assert still["plain"] > 0.95
    assert still["rne"] > 0.95
    for policy in ("sr", "deadzone-sr", "kahan", "master"):
        assert still[policy] < 0.7, policy
    assert still["eco"] < still["rne"]
    weights = [runs[name]["weights"]["up.weight"] for name in ("plain", "sr", "deadzone-sr", "kahan")]
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


@pytest.mark.parametrize("policy", ["sr", "master"])
def test_float16(policy: str) -> None:
    """All of its tensors: AdamW in float16 divides by an epsilon that float16 has not, norms included."""
    every = {"params": lambda name, p: True}
    found, native = run(policy, torch.float16, **every), run(policy, torch.float16, storage="native", **every)
    nearest = run("rne", torch.float16, **every)
    assert found["still"] < 0.8 * nearest["still"]
    for name, value in native["weights"].items():
        assert_same(found["weights"][name], value, name)
        assert value.dtype == torch.float16
        assert torch.isfinite(value).all()


def test_the_moments_are_float32(runs: dict[str, dict[str, Any]]) -> None:
    """That is what it costs: four bytes for each, where the parameter's own type would take two."""
    opt = runs["sr"]["opt"]
    for slot in opt.slots:
        moments = opt.optimizer.state[slot.shadow]
        assert {moments[k].dtype for k in ("exp_avg", "exp_avg_sq")} == {torch.float32}
        assert slot.p.dtype == torch.bfloat16
    assert opt.bytes().per_parameter()["weights"] == 2
    assert opt.bytes().scratch == 0


# ---- models of several types -----------------------------------------------------------------------


class Mixed(Tied):
    """A bfloat16 matrix between float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down.to(torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        inner = torch.tanh(self.norm(self.up(x))).to(torch.bfloat16)
        return self.head(x + self.down(inner).float())


def mixed(policy: Any = "sr", **options: Any) -> tuple[torch.nn.Module, hu.WriteBack]:
    model = Mixed()
    rule = hu.TileMaster(masks(model)) if policy == "some tiles" else policy
    return model, written_back(model, "e4m3@16", rule, **options)


@pytest.mark.parametrize("policy", ["sr", "kahan", "master", "eco", "some tiles"])
@pytest.mark.parametrize("materialise", ["tensor", "all"])
def test_each_parameter_by_its_own_type(policy: str, materialise: Any) -> None:
    """The float32 ones are those of a float32 model given the same gradients, the bfloat16 one native's."""
    model, opt = mixed(policy, options=WriteBackOptions(materialise=materialise, one_pass=False))
    assert [(s.name, s.storage) for s in opt.slots] == [
        ("embedding.weight", "container"), ("up.weight", "container"), ("down.weight", "native"),
    ]  # fmt: skip
    alone = {}
    for name, storage in (("up.weight", "container"), ("down.weight", "native")):
        other = Mixed()
        p = other.get_parameter(name)
        rule = hu.TileMaster(masks(other)) if policy == "some tiles" else policy
        inner = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        alone[name] = (p, hu.WriteBack(inner, "e4m3@16", rule, model=other, storage=storage))
    for step in range(4):
        opt.zero_grad()
        loss_of(model, step).backward()
        for name, (p, single) in alone.items():
            p.grad = model.get_parameter(name).grad.clone()
            single.step()
        opt.step()
    for name, (p, _) in alone.items():
        assert_same(model.get_parameter(name).detach(), p.detach(), name)
    assert len(opt.events.rows) == 3
    by_hand = 2 * opt.slots[2].p.numel() + 4 * sum(s.p.numel() for s in opt.slots[:2])
    assert opt.bytes().weights == by_hand
    assert opt.bytes().scratch == 2 * sum(s.p.numel() for s in opt.slots[:2])


@pytest.mark.parametrize("way", ["dictionary", "file"])
def test_a_state_of_several_types(way: str, tmp_path: Any) -> None:
    """It says where each parameter is stored, and goes on bit for bit."""
    whole, resumed = mixed("kahan"), mixed("kahan")
    train(*whole, 3)
    resumed[0].load_state_dict(copy.deepcopy(whole[0].state_dict()))
    line = json.loads(whole[1].state_dict()["param_groups"][0]["halfulp"])
    assert list(line["storage"].values()) == ["container", "container", "native"]
    if way == "file":
        save(whole[1], tmp_path / "state.safetensors")
        load(resumed[1], tmp_path / "state.safetensors")
    else:
        resumed[1].load_state_dict(copy.deepcopy(whole[1].state_dict()))
    assert train(*whole, 3, start=3) == train(*resumed, 3, start=3)
    for name, value in whole[0].state_dict().items():
        assert_same(resumed[0].state_dict()[name], value, name)


@pytest.mark.parametrize(("dtype", "word"), [(torch.float32, "container"), (torch.bfloat16, "native")])
def test_states_saved_with_the_storage_in_words(dtype: torch.dtype, word: Any) -> None:
    """A state says container or native where all parameters are; by default or by request is the same."""
    model = narrow(dtype)
    opt = written_back(model, storage=word)
    train(model, opt, 2)
    state = copy.deepcopy(opt.state_dict())
    assert json.loads(state["param_groups"][0]["halfulp"])["storage"] == word
    other = narrow(dtype)
    other.load_state_dict(model.state_dict())
    default = written_back(other)
    default.load_state_dict(state)
    assert train(model, opt, 2, start=2) == train(other, default, 2, start=2)


def test_a_state_of_narrow_containers_is_another_run() -> None:
    model = narrow()
    opt = written_back(model, "e4m3@16", "rne", storage="container")
    train(model, opt, 1)
    with pytest.raises(
        hu.UsageError, match=r"'embedding.weight'\): the state has storage 'container'.*native"
    ):
        written_back(model, "e4m3@16", "rne").load_state_dict(opt.state_dict())


# ---- what would be nothing is refused ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", ["sr", "deadzone-sr", "eco", "kahan", "master"])
def test_a_narrow_container_is_refused(policy: str, dtype: torch.dtype) -> None:
    """The optimizer has rounded before the policy sees anything."""
    model = narrow(dtype)
    before = values(model)
    with pytest.raises(hu.UsageError, match=rf"'embedding.weight': policy '{policy}'.*leave storage= out"):
        written_back(model, "e4m3@16", policy, storage="container")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_nearest_in_a_narrow_container_is_the_plain_run() -> None:
    """With telemetry, and nothing else."""
    plain, wrapped = run(None), run("rne", storage="container")
    for name, value in plain["weights"].items():
        assert_same(wrapped["weights"][name], value, name)
    assert wrapped["opt"].events.never_moved == pytest.approx(plain["still"], abs=0.05)


def test_native_does_not_take_float32() -> None:
    with pytest.raises(hu.UsageError, match=r"'embedding.weight'.*not torch.float32.*Leave storage= out"):
        mixed(storage="native")


def test_lbfgs_does_not_take_narrow_parameters() -> None:
    model = narrow()
    with pytest.raises(hu.UsageError, match=r"LBFGS.*torch.bfloat16 needs storage='native'.*float32 param"):
        hu.WriteBack(torch.optim.LBFGS(model.parameters()), "bf16", "rne", model=model)


# ---- what the optimizer had -------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_moments_that_are_there_already(name: str) -> None:
    """They go on in float32, with the step that they were at; nothing is lost, and nothing starts anew."""
    model = narrow()
    base = MAKERS[name](model.parameters())
    train(model, base, 3)
    before = {n: dict(base.state[p]) for n, p in model.named_parameters()}
    order = [len(v) for v in base.state.values()]
    opt = hu.WriteBack(base, "bf16", "sr", model=model)
    assert [len(v) for v in base.state.values()] == order
    for slot in opt.slots:
        state = base.state[slot.shadow]
        assert set(state) == set(before[slot.name])
        for key, old in before[slot.name].items():
            if isinstance(old, torch.Tensor) and old.dtype == torch.bfloat16:
                assert state[key].dtype == torch.float32
                assert_same(state[key], old.float(), key)
            else:
                assert state[key] is old
    assert not any(slot.p in base.state for slot in opt.slots)
    train(model, opt, 2, start=3)
    if "step" in before["up.weight"]:
        assert float(base.state[opt.slots[1].shadow]["step"]) == 5
    other = narrow()
    again = hu.WriteBack(MAKERS[name](other.parameters()), "bf16", "sr", model=other)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert train(model, opt, 2, start=5) == train(other, again, 2, start=5)


def test_packed_keeps_moments_too() -> None:
    """A float32 parameter that becomes codes has a stand-in as well."""
    runs = []
    for storage in ("container", "packed"):
        model = Tied()
        base = adamw(model)
        train(model, base, 2)
        opt = hu.WriteBack(base, "e4m3@16", "sr", model=model, storage=storage)
        train(model, opt, 2, start=2)
        runs.append(model.state_dict())
    assert all(torch.equal(v, runs[1][k]) for k, v in runs[0].items())


def test_packed_masters_of_narrow_parameters_are_float32() -> None:
    model = narrow()
    opt = written_back(model, "e4m3@16", "master", storage="packed")
    assert {s.state["master"].dtype for s in opt.slots} == {torch.float32}
    train(model, opt, 2)
    assert not torch.equal(opt.slots[0].state["master"], opt.slots[0].state["master"].bfloat16().float())


def test_a_narrow_group_added_later() -> None:
    """The first stand-in comes with it; a scheduler and both sets of groups go on together."""
    model = Mixed()
    base = torch.optim.AdamW([model.up.weight], lr=1e-2)
    opt = hu.WriteBack(base, "e4m3@16", "sr", model=model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    assert opt.param_groups is base.param_groups
    train(model, opt, 1)
    schedule.step()
    opt.add_param_group({"params": [model.down.weight]})
    schedule.base_lrs.append(1e-2)
    assert opt.param_groups[1]["params"][0] is model.down.weight
    assert base.param_groups[1]["params"][0] is opt.slots[1].shadow
    used = []
    base.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
    train(model, opt, 1, start=1)
    opt.param_groups[0]["lr"] = 3e-3
    train(model, opt, 1, start=2)
    assert sorted(set(used)) == [3e-3, 5e-3]
    assert model.down.weight.dtype == torch.bfloat16
    assert len(opt.events.rows) == 2


def test_an_audit_sees_what_is_stored() -> None:
    """The codes of the bfloat16 parameters before and after, not the float32 that the step had."""
    model = narrow()
    opt = hu.WriteBack(adamw(model, lr=RATE), "bf16", "sr", model=model)
    seen: list[dict[str, Any]] = []
    with hu.Audit(opt, ["bf16"], model=model, listeners=[seen.append]):
        train(model, opt, 3)
        share = opt.events.frozen
    assert seen[-1]["frozen"]["bf16"] == pytest.approx(share)
    assert share < 1
