"""A contract catches each failure of the public threads, rebuilt small, and leaves its sound twin alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

import halfulp as hu
from halfulp.contract import ContractError, ContractWarning, Terms, require
from halfulp.errors import UsageError


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)).to(
        dtype
    )


def train(model: torch.nn.Module, optimizer: Any, steps: int = 1) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


class MasterSGD(torch.optim.Optimizer):
    """SGD on float32 masters of bfloat16 weights, as many frameworks have their own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "master" not in state:
                    state["master"] = p.detach().float().clone()
                    state["count"] = 0
                state["count"] += 1
                state["master"].sub_(p.grad.float(), alpha=group["lr"])
                p.copy_(state["master"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():  # torch casts what is as large as a parameter to its dtype
            if "master" in state:
                state["master"] = state["master"].float()


class CastMasterSGD(MasterSGD):
    """The same without a care for torch, which casts states of a weight's shape to the weight's dtype."""

    load_state_dict = torch.optim.Optimizer.load_state_dict


def resumed(kind: type[MasterSGD]) -> None:
    model = net(torch.bfloat16)
    first = kind(model.parameters(), lr=1e-3)
    train(model, first, 3)
    saved = copy.deepcopy(first.state_dict())
    again = kind(model.parameters(), lr=1e-3)
    require(again, model=model, masters="master")
    again.load_state_dict(saved)
    if kind is MasterSGD:  # a framework that keeps them through a resume
        for i, p in enumerate(model.parameters()):
            again.state[p]["master"] = saved["state"][i]["master"]
    train(model, again)


def plain_sgd_masters(dropped: bool) -> None:
    model = net(torch.bfloat16)
    first = MasterSGD(model.parameters(), lr=1e-3)
    train(model, first, 3)
    saved = copy.deepcopy(first.state_dict())
    for i, p in enumerate(model.parameters()):
        saved["state"][i]["master"] = first.state[p]["master"].clone()
        if dropped:
            del saved["state"][i]["master"]
    again = MasterSGD(model.parameters(), lr=1e-3)
    contract = require(again, model=model, masters="master")
    again.load_state_dict(saved)
    for i, p in enumerate(model.parameters()):  # as a framework that keeps its masters through a resume
        if not dropped:
            again.state[p]["master"] = saved["state"][i]["master"]
    train(model, again)
    contract.release()


def sharded(upcast_first: bool) -> None:
    """FSDP2: parameters keep the dtype that they were sharded in, whatever is loaded into them later."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = net(torch.bfloat16)
        raised = {name: x.float() for name, x in model.state_dict().items()}
        if upcast_first:
            model.float()
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=mixed)
        set_model_state_dict(model, raised, options=StateDictOptions(full_state_dict=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        require(optimizer, model=model, weights="float32", arrives=0.99)
        train(model, optimizer)
    finally:
        dist.destroy_process_group()


def loaded_in(dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    require(optimizer, model=model, weights="float32")
    train(model, optimizer)


def upcast(works: bool) -> None:
    """An upcast that makes a new model, which nobody trains."""
    model = net(torch.bfloat16)
    raised = copy.deepcopy(model).float()
    model = raised if works else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    require(optimizer, model=model, weights="float32", states="float32")
    train(model, optimizer)


def counter(dtype: torch.dtype) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    require(optimizer, model=model, states="float32", every=1)
    train(model, optimizer)
    for state in optimizer.state.values():
        state["step"] = state["step"].to(dtype)
    train(model, optimizer)


def second_moment(dtype: torch.dtype) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    require(optimizer, model=model, states="float32", every=2)
    train(model, optimizer, 2)
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].to(dtype)
    if dtype == torch.bfloat16:
        with pytest.raises(ContractError, match=r"states: exp_avg_sq of 0\.weight: in bfloat16"):
            optimizer.step()
        raise ContractError("noticed before the step")
    train(model, optimizer)


def average(dtype: torch.dtype) -> None:
    model, ema = net(), net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    require(optimizer, model=model, also={"ema": ema}, states="float32")
    train(model, optimizer)


def arrives(sound: bool, policy: str = "sr") -> None:
    model = net(torch.bfloat16)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-5)
    optimizer = hu.WriteBack(plain, "bf16", policy, model=model) if sound else plain
    require(optimizer, model=model, arrives=0.9)
    train(model, optimizer, 2)


def stuck_gain(sound: bool) -> None:
    model = net(torch.bfloat16)
    rate = 1e-2 if sound else 1e-6
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0)
    require(optimizer, model=model, moving="1.weight", every=2, patience=4)
    train(model, optimizer, 8)


CASES: dict[str, tuple[Callable[[], None], Callable[[], None], str]] = {
    "masters dropped on resume": (
        lambda: plain_sgd_masters(True), lambda: plain_sgd_masters(False), "0.weight: no state 'master'",
    ),
    "masters cast on resume": (
        lambda: resumed(CastMasterSGD), lambda: resumed(MasterSGD), "the master 'master' is bfloat16",
    ),
    "an upcast of FSDP2 that does nothing": (
        lambda: sharded(False), lambda: sharded(True), "0.weight: updated in bfloat16",
    ),
    "bf16 loaded by default": (
        lambda: loaded_in(torch.bfloat16), lambda: loaded_in(torch.float32), "0.weight: updated in bfloat16",
    ),
    "an upcast that does nothing": (lambda: upcast(False), lambda: upcast(True), "updated in bfloat16"),
    "a counter in bfloat16": (
        lambda: counter(torch.bfloat16), lambda: counter(torch.float32), "a counter stops at 256",
    ),
    "a second moment in bfloat16": (
        lambda: second_moment(torch.bfloat16), lambda: second_moment(torch.float32), "noticed before",
    ),
    "an average in bfloat16": (
        lambda: average(torch.bfloat16), lambda: average(torch.float32), "ema.0.weight: kept in bfloat16",
    ),
    "updates that do not arrive": (lambda: arrives(False), lambda: arrives(True), "is required"),
    "gains at their start": (lambda: stuck_gain(False), lambda: stuck_gain(True), "1.weight: not changed"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_failure_is_caught_and_its_sound_twin_is_not(case: str) -> None:
    fails, holds, said = CASES[case]
    with pytest.raises(ContractError) as caught:
        fails()
    assert said in str(caught.value)
    holds()


@pytest.mark.parametrize("policy", ["sr", "kahan", "master", "deadzone-sr"])
def test_policies_that_keep_updates_satisfy_it(policy: str) -> None:
    arrives(True, policy)


def test_nearest_does_not() -> None:
    with pytest.raises(ContractError, match="of the proposed change was written"):
        arrives(True, "rne")


def test_masters_of_a_write_back() -> None:
    for policy, holds in (("master", True), ("sr", False)):
        model = net(torch.bfloat16)
        optimizer = hu.WriteBack(torch.optim.AdamW(model.parameters(), lr=1e-3), "bf16", policy, model=model)
        require(optimizer, model=model, masters=True, weights="float32", states="float32")
        if holds:
            train(model, optimizer)
        else:
            with pytest.raises(ContractError, match="stored as bf16 by sr, with no float32 master"):
                train(model, optimizer)


def test_the_shadow_is_the_float32_step() -> None:
    """What a float32 step would write of bfloat16 weights is what torch writes in float32."""
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    twin = net(torch.bfloat16).float()
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)
    contract = require(optimizer, model=model, arrives=1e-9, every=1)
    train(model, optimizer, 3)
    with torch.no_grad():
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.copy_(p)
            other.state[q] = {k: v.float().clone() for k, v in optimizer.state[p].items()}
    before = [p.detach().float().clone() for p in model.parameters()]
    train(model, optimizer)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        q.grad = p.grad.float()
    other.step()
    written = torch.cat(
        [(p.detach().float() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
    )
    proposed = torch.cat([(q.detach() - b).flatten() for q, b in zip(twin.parameters(), before, strict=True)])
    share = float(written.double() @ proposed.double() / (proposed.double() @ proposed.double()))
    assert contract.arrival is not None
    assert contract.arrival.share == pytest.approx(share, rel=1e-12)  # sums in another order


def test_the_run_is_not_touched() -> None:
    """Weights, states and global hooks are those of a run without a contract."""
    results = []
    for held in (False, True):
        model = net(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if held:
            require(optimizer, model=model, arrives=1e-9, moving="*", states="bfloat16", every=1)
        fired: list[Any] = []
        handle = register_optimizer_step_pre_hook(lambda o, *_, f=fired: f.append(o))
        try:
            train(model, optimizer, 5)
        finally:
            handle.remove()
        assert fired == [optimizer] * 5
        results.append(
            [*model.state_dict().values(), *(x for s in optimizer.state.values() for x in s.values())]
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_it_is_checked_at_first_after_loads_and_every_few_steps() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    contract = require(optimizer, model=model, weights="float32", every=4)
    train(model, optimizer, 4)
    assert contract.checked == 1
    train(model, optimizer)
    assert contract.checked == 2
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer)
    assert contract.checked == 3
    model.load_state_dict(model.state_dict())
    train(model, optimizer)
    assert contract.checked == 4
    contract.release()
    train(model, optimizer, 9)
    assert contract.checked == 4


def test_a_step_that_proposes_nothing_is_not_the_first_observed_one() -> None:
    """A warmup that begins at a rate of 0 does not put the check off until the next one is due."""
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    contract = require(optimizer, model=model, arrives=0.9)
    train(model, optimizer, 3)
    assert contract.arrival is None
    optimizer.param_groups[0]["lr"] = 1e-5
    with pytest.raises(ContractError, match="of the proposed change was written"):
        train(model, optimizer)
    assert len(contract.failures) == 1


def test_terms_from_a_file(tmp_path: Path) -> None:
    terms = Terms(weights="float32", arrives=0.99, moving=("*norm*",), every=10)
    toml, other = tmp_path / "contract.toml", tmp_path / "contract.json"
    toml.write_text('weights = "float32"\narrives = 0.99\nmoving = ["*norm*"]\nevery = 10\n')
    other.write_text('{"weights": "float32", "arrives": 0.99, "moving": "*norm*", "every": 10}')
    assert Terms.load(toml) == Terms.load(other) == terms
    for text, said in (
        ("arrives = ", "cannot be read as a contract"),
        ("arrive = 0.9", "has no term"),
        ("", "needs terms"),
    ):
        toml.write_text(text)
        with pytest.raises(UsageError, match=said):
            Terms.load(toml)
    for text, said in (
        ("[1]", "not a JSON object"),
        ('{"arrives": 0.99, "arrives": 0.01}', "the key arrives is there twice"),
    ):
        other.write_text(text)
        with pytest.raises(UsageError, match=said):
            Terms.load(other)
    toml.write_text("a = " + "[" * 3000)
    for path in (toml, tmp_path, tmp_path / "none.toml"):
        with pytest.raises(UsageError, match="cannot be read as a contract"):
            Terms.load(path)


def test_a_file_that_nests_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "contract.toml"
    path.write_text("a=" + "[" * 3000)
    with pytest.raises(UsageError, match=r"contract\.toml cannot be read as a contract"):
        Terms.load(path)


def test_a_file_is_named_where_its_terms_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "contract.toml"
    path.write_text("arrive = 0.99")
    with pytest.raises(UsageError, match=r"contract\.toml: .*'arrive'\. Did you mean arrives\?"):
        Terms.load(path)


def test_terms_take_the_spellings_that_grids_and_shares_have() -> None:
    given = Terms.of({"weights": "fp32", "states": torch.bfloat16, "arrives": "99%"})
    assert (given.weights, given.states, given.arrives) == ("float32", "bfloat16", 0.99)


def test_a_pattern_that_fits_no_parameter_is_a_breach() -> None:
    """Otherwise a typing error would be a term that always holds."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    require(optimizer, model=model, moving=["*weight", "*nrom*"])
    with pytest.raises(
        ContractError, match=r"'\*nrom\*': no trained parameter has such a name; there are 0\.weight"
    ):
        train(model, optimizer)


def test_the_summary_says_what_was_judged_and_what_was_not() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    contract = require(optimizer, model=model, weights="float32", moving="*", every=1, patience=2)
    train(model, optimizer)
    assert contract.summary() == (
        "held at 1 checked step: weights=float32; "
        "moving was not judged, which takes more than 2 steps (patience)"
    )
    train(model, optimizer, 2)
    assert contract.summary() == "held at 3 checked steps: weights=float32, moving=*"


def test_the_fix_has_the_rate_before_the_schedule() -> None:
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 100)
    require(optimizer, model=model, weights="float32")
    with pytest.raises(ContractError, match=r"hu\.AdamW\(model\.named_parameters\(\), lr=0\.001\)"):
        train(model, optimizer)


def test_it_warns_once() -> None:
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    require(optimizer, model=model, weights="float32", every=1, action="warn")
    with pytest.warns(ContractWarning, match="updated in bfloat16"):
        train(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 3)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({}, "needs terms"), ({"weights": "int8"}, "must be one of"), ({"arrives": 1.5}, "share above 0"),
        ({"arrives": True}, "share above 0"), ({"moving": [3]}, "patterns"), ({"masters": ""}, "of a state"),
        ({"weights": "float32", "every": 0}, "whole number"), ({"weigths": "float32"}, "has no term"),
    ],
)  # fmt: skip
def test_terms_without_meaning_are_refused(terms: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Terms.of(terms)


def test_what_cannot_be_measured_is_refused() -> None:
    model = net(torch.bfloat16)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    require(optimizer, model=model, arrives=0.9)
    with pytest.raises(UsageError, match="cannot be measured for Adafactor"):
        train(model, optimizer)
    with pytest.raises(UsageError, match="takes torch optimizers"):
        require(model, weights="float32")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least one torch optimizer"):
        require([], weights="float32")
    also: Any
    for also in ("ema", 3, torch.ones(2), {"ema": torch.ones(2)}):
        with pytest.raises(UsageError, match="also maps names to torch modules"):
            require(optimizer, weights="float32", also=also)


def look_up(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train on the same two rows of an embedding."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()


def test_tensors_with_sparse_gradients_are_left_out_and_named() -> None:
    """The other tensors are measured as without them, and the training goes on."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(10, 4, sparse=True).bfloat16()
    model = torch.nn.Sequential(table, torch.nn.Linear(4, 4).bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    contract = require(optimizer, model=model, arrives=0.5, action="warn")
    with pytest.warns(ContractWarning) as caught:
        look_up(model, optimizer, 3)
    said = [str(w.message) for w in caught]
    assert sum("arrives was not measured for 0.weight, whose gradient is sparse" in s for s in said) == 1
    assert any("of the proposed change was written" in s for s in said)  # of the other layer's
    assert contract.unmeasured == {"0.weight"}
    assert contract.summary().endswith("not measured for 0.weight, whose gradient is sparse")


def test_a_model_of_sparse_gradients_alone_is_checked_now_and_then() -> None:
    table = torch.nn.Embedding(10, 4, sparse=True).bfloat16()
    optimizer = torch.optim.SGD(table.parameters(), lr=1e-6)
    with require(optimizer, model=table, arrives=0.5) as contract, pytest.warns(ContractWarning):
        look_up(table, optimizer, 3)
    assert (contract.checked, contract.arrival) == (1, None)


def test_a_checkpoint_in_bfloat16_is_loaded_in_bfloat16(tmp_path: Path) -> None:
    """As transformers does today; with dtype=float32 the contract holds."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    for options, holds in (({}, False), ({"dtype": torch.float32}, True)):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        require(optimizer, model=model, weights="float32")
        ids = torch.arange(8)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        if holds:
            optimizer.step()
        else:
            with pytest.raises(ContractError, match=r"embed_tokens\.weight: updated in bfloat16"):
                optimizer.step()
