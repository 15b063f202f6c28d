"""Packed codes: bits in order, and training as in a container, whatever modules do with weights."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same
from storage_cases import GRIDS, POLICIES, chosen
from torch.utils.checkpoint import checkpoint
from writeback_models import TWO_DIMENSIONAL, Tied, adamw, loss_of, tokens, train, written_back
from writeback_reference import gradients, weights

import halfulp as hu
from halfulp.errors import UsageError
from halfulp.writeback import WriteBackOptions
from halfulp.writeback.storage.packed import Codes, pack_bits, unpack_bits

pytestmark = pytest.mark.usefixtures("one_thread")


@given(bits=st.integers(2, 16), codes=st.lists(st.integers(0, 2**16 - 1), max_size=70))
def test_packing_loses_nothing_and_wastes_nothing(bits: int, codes: list[int]) -> None:
    """Any number of codes of 2 to 16 bits, in as few whole bytes as hold them."""
    x = torch.tensor([c % 2**bits for c in codes], dtype=torch.int64)
    packed = pack_bits(x, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == -(-len(codes) * bits // 8)
    assert torch.equal(unpack_bits(packed, bits, len(codes)).long(), x)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 16])
def test_the_order_of_bits_is_that_of_one_long_number(bits: int) -> None:
    """Code i at bit i * bits, lowest first, so that another reader needs no table."""
    x = torch.randint(0, 2**bits, (37,), generator=torch.Generator().manual_seed(bits))
    whole = sum(int(c) << (bits * i) for i, c in enumerate(x))
    assert bytes(pack_bits(x, bits).tolist()) == whole.to_bytes(-(-37 * bits // 8), "little")


def test_codes_of_another_size_are_refused() -> None:
    codes = Codes(grid=hu.grid("e4m3"), shape=(4, 4))
    codes.put(torch.ones(4, 4))
    codes.packed = codes.packed[:-1]
    with pytest.raises(hu.CorruptionError, match=r"shape \(4, 4\) take 16 bytes, but there are 15"):
        codes.get()


def assert_equal_training(grid: str, policy: str, steps: int = 5, **options: Any) -> None:
    """Losses, weights, events, moments and what the policy keeps: the same packed and in a container."""
    runs = []
    for storage in ("container", "packed"):
        model = Tied()
        opt = written_back(model, grid, chosen(policy, model), storage=storage, **options)
        losses, events = [], []
        for step in range(steps):
            losses += train(model, opt, 1, start=step)
            events.append(opt.events)
        with torch.no_grad():
            losses.append(loss_of(model, 99).item())
        runs.append((losses, events, model.state_dict(), opt.state_dict()["state"]))
    (losses, events, values, state), packed = runs[0], runs[1]
    assert packed[0] == losses
    assert packed[1] == events
    assert set(packed[2]) == set(values)
    for name, value in values.items():
        assert torch.equal(packed[2][name], value), name  # integers have one zero: its sign is not kept
    for k, entry in state.items():
        for key, value in entry.items():
            assert_same(packed[3][k][key], value, f"{key} of {k}")


@pytest.mark.parametrize("policy", POLICIES)
def test_packed_trains_as_a_container_does(policy: str) -> None:
    assert_equal_training("e4m3@16", policy)


@pytest.mark.parametrize("grid", GRIDS)
def test_packed_on_every_width(grid: str) -> None:
    assert_equal_training(grid, "sr", steps=3)


@pytest.mark.parametrize("policy", ["rne", "kahan", "master"])
@pytest.mark.parametrize("grid", ["int8", "int4/absmean", "mxfp4"])
def test_packed_with_moving_scales(grid: str, policy: str) -> None:
    """The scales that codes were made with are kept: not every rule finds them in the rounded values."""
    assert_equal_training(grid, policy)


def test_packed_dqt_whose_maximum_shrinks() -> None:
    """No weight is left at the largest code: the scale cannot be taken from the codes any more."""
    runs = []
    for storage in ("container", "packed"):
        model = torch.nn.Linear(8, 6, bias=False)
        model.load_state_dict({"weight": torch.from_numpy(weights((6, 8))).abs()})
        opt = hu.WriteBack(adamw(model, lr=5e-2), "int3/dqt", "dqt", model=model, storage=storage)
        largest = []
        for g in gradients((6, 8), 30):
            model.weight.grad = torch.from_numpy(abs(g) + 1)
            opt.step()
            largest.append(float(model.state_dict()["weight"].max()))
        runs.append((largest, model.state_dict()["weight"]))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert min(runs[0][0]) < runs[0][0][0]


@pytest.mark.parametrize("materialise", ["tensor", "all"])
def test_one_tensor_at_a_time_or_all_at_once(materialise: Any) -> None:
    """How stand-ins are handed to the optimizer does not show."""
    assert_equal_training("e4m3@16", "sr", options=WriteBackOptions(materialise=materialise))


class Attention(torch.nn.Module):
    """Its output projection is read, not called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(29, 24)
        self.layer = torch.nn.TransformerEncoderLayer(24, 2, 32, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(24, 29)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(x)))


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(29, 24)
        self.layer = torch.nn.LSTM(24, 12, batch_first=True)
        self.head = torch.nn.Linear(12, 29)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(x))[0])


class Recomputed(Tied):
    """The block is recomputed in the backward, as gradient checkpointing does."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + checkpoint(self.block, x, use_reentrant=False))

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


class Listed(torch.nn.Module):
    """Weights in containers, one in another, none of which is called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(29, 24)
        made = [torch.nn.Parameter(torch.randn(24, 24) * 0.2) for _ in range(3)]
        self.several = torch.nn.ModuleList([torch.nn.ParameterList(made[:2])])
        self.named = torch.nn.ParameterDict({"last": made[2]})
        self.head = torch.nn.Linear(24, 29)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for weight in (*self.several[0], self.named["last"]):
            hidden = torch.tanh(hidden @ weight)
        return self.head(hidden)


class Normed(Tied):
    """A hook of the module itself reads its weight before its forward does."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather have parametrizations
            torch.nn.utils.weight_norm(self.up)
        torch.nn.utils.spectral_norm(self.down)


@pytest.mark.parametrize("kind", [Attention, Recurrent, Recomputed, Listed, Normed])
def test_modules_that_use_weights_in_other_ways(kind: type[torch.nn.Module]) -> None:
    """Losses of training and evaluation are the container's."""
    runs = []
    for storage in ("container", "packed"):
        torch.manual_seed(0)
        model = kind()
        opt = written_back(model, "e4m3@16", "sr", storage=storage)
        losses = train(model, opt, 4)
        model.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                losses.append(loss_of(model, 50).item())
        model.train()
        losses += train(model, opt, 2, start=4)
        runs.append(losses)
    assert runs[0] == runs[1]


def test_gradients_accumulate_over_several_backwards() -> None:
    """Weights are dropped and decoded again in between."""
    runs = []
    for storage in ("container", "packed"):
        model = Tied()
        opt = written_back(model, storage=storage)
        for step in range(0, 6, 2):
            opt.zero_grad()
            first, second = loss_of(model, step), loss_of(model, step + 1)  # two graphs at once
            second.backward()
            first.backward()
            opt.step()
        runs.append(model.state_dict())
    assert all(torch.equal(v, runs[1][k]) for k, v in runs[0].items())


def test_between_steps_a_packed_parameter_holds_one_number() -> None:
    """Before, between and after: shape and gradient are there, memory is not; a forward leaves nothing."""
    model = Tied()
    shapes = {n: p.shape for n, p in model.named_parameters()}
    opt = written_back(model, storage="packed")

    def check() -> None:
        for name in TWO_DIMENSIONAL:
            p = model.get_parameter(name)
            assert p.untyped_storage().nbytes() == 4
            assert p.shape == shapes[name]
            assert torch.isfinite(p.detach()).all()  # decoded for whoever asks
        for slot in opt.slots:
            assert slot.shadow is not None
            assert slot.shadow.untyped_storage().nbytes() == 0
            assert slot.shadow.grad is None
            assert slot.scratch is None

    check()
    train(model, opt, 2, each=check)
    loss = loss_of(model, 5)
    check()
    loss.backward()
    check()
    assert model.up.weight.grad is not None
    assert model.up.weight.grad.shape == shapes["up.weight"]
    with torch.no_grad():
        model(tokens(3))
    check()
    assert not torch.isnan(model.state_dict()["up.weight"]).any()
    check()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))  # an embedding takes integers
    check()


def test_the_models_state_has_the_weights() -> None:
    """Of the whole model and of a part, under every name of a tied tensor; copies, not the shells."""
    model = Tied()
    opt = written_back(model, "e4m3@16", "sr", storage="packed")
    train(model, opt, 2)
    state = model.state_dict()
    assert list(state) == list(Tied().state_dict())
    assert torch.equal(state["embedding.weight"], state["head.weight"])
    for slot in opt.slots:
        assert slot.codes is not None
        assert torch.equal(state[slot.name], slot.codes.get())
    assert torch.equal(model.up.state_dict()["weight"], state["up.weight"])


def test_loading_weights_into_a_packed_model() -> None:
    """Values on the grid become codes; others are refused by name and change nothing."""
    source, model = Tied(seed=1), Tied()
    written_back(source)
    opt = written_back(model, storage="packed")
    model.load_state_dict(source.state_dict())
    assert all(torch.equal(v, source.state_dict()[k]) for k, v in model.state_dict().items())
    assert model.up.weight.untyped_storage().nbytes() == 4
    a, b = train(source, written_back(source), 2), train(model, opt, 2)
    assert a == b
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    for bad in (kept["up.weight"] + 1e-5, torch.full((40, 24), torch.nan)):
        with pytest.raises(
            hu.UsageError, match=r"'up.weight' is packed on grid e4m3@16, but 960 of 960 values"
        ):
            model.load_state_dict(kept | {"up.weight": bad})
        assert torch.equal(model.state_dict()["up.weight"], kept["up.weight"])
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(kept | {"up.weight": torch.ones(3, 3)})
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())
    train(model, opt, 1, start=2)


def test_a_packed_model_is_not_copied_whole() -> None:
    """A copy would have shells without codes: NaN, silently. It is refused; its state_dict has the values."""
    model = torch.nn.Linear(8, 8)
    hu.WriteBack(
        torch.optim.SGD(model.parameters(), lr=0.1), "e4m3@128", "rne", model=model, storage="packed"
    )
    for whole in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="not copied or pickled whole"):
            whole(model)
    assert torch.isfinite(model.state_dict()["weight"]).all()


def test_packed_numbers_of_no_dimension() -> None:
    """As a temperature: one code."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = Scaled().bfloat16()
    opt = hu.WriteBack(
        torch.optim.SGD(model.parameters(), lr=1.0), "bf16", "rne", model=model, storage="packed"
    )
    model(torch.ones(3).bfloat16()).sum().backward()
    opt.step()
    assert float(model.state_dict()["scale"]) == -1.5


def test_forwards_without_a_backward_are_freed() -> None:
    """What a node saves of its own output is no cycle."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1))

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.weight)

    model.append(Own())
    hu.WriteBack(torch.optim.SGD(model.parameters()), "e4m3", "rne", model=model, storage="packed")
    gone = []
    for _ in range(3):
        y = model(torch.ones(2, 8))
        gone.append(weakref.ref(y))
        del y
    assert [found() for found in gone] == [None] * 3


@pytest.mark.parametrize("policy", ["rne", "sr", "kahan", "master", "eco"])
def test_data_that_are_set_beside_the_codes(policy: str) -> None:
    """``p.data = values`` on the grid is where the next step starts; off the grid it is refused."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-6)
    optimizer = hu.WriteBack(adam, "e4m3@16", policy, model=model, storage="packed")

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()

    step()
    model[0].weight.data = torch.full((16, 16), 2.0)
    assert model.state_dict()["0.weight"].unique().tolist() == [2.0]
    step()
    assert model.state_dict()["0.weight"].mean().item() == pytest.approx(2.0, abs=0.01)
    with pytest.raises(hu.UsageError, match="256 of 256 values to load or set are off it"):
        model[0].weight.data = torch.full((16, 16), 0.3)
    assert model.state_dict()["0.weight"].mean().item() == pytest.approx(2.0, abs=0.01)
    model[0].weight.data = hu.grid("e4m3@16").round(torch.full((16, 16), 0.3))
    step()
    assert model.state_dict()["0.weight"].mean().item() == pytest.approx(0.3125, abs=0.002)


def test_weights_that_another_has_packed() -> None:
    model = torch.nn.Linear(16, 16)
    first, second = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    hu.WriteBack(first, "e4m3@16", "sr", model=model, storage="packed")
    with pytest.raises(hu.UsageError, match="'weight' is packed by another WriteBack: go on with that one"):
        hu.WriteBack(second, "e4m3@16", "sr", model=model, storage="packed")
