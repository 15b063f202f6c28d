"""Where weights live: packed codes train as containers do, bit for bit, and the bytes are those reported."""

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
from torch.utils.checkpoint import checkpoint
from writeback_models import TWO_DIMENSIONAL, Tied, adamw, loss_of, masks, tokens, train, written_back
from writeback_reference import gradients, weights

import halfulp as hu
from halfulp.errors import UsageError
from halfulp.writeback import Kahan, Master, WriteBackOptions
from halfulp.writeback.slot import Slot
from halfulp.writeback.storage.packed import Codes, pack_bits, unpack_bits

POLICIES: dict[str, Any] = {
    "rne": "rne",
    "sr": "sr",
    "deadzone-sr": "deadzone-sr",
    "eco": "eco",
    "kahan": "kahan",
    "kahan in bfloat16": Kahan(torch.bfloat16),
    "master": "master",
    "master from raw": Master("raw"),
    "some tiles": "some tiles",
}
# one of every width: 2 to 8 bits, the odd ones above, 16; and scales of every kind
GRIDS = [
    "int2@4",
    "int3@8",
    "e2m1@4",
    "int5@16",
    "e2m3@16",
    "int7@64",
    "e4m3@16",
    "m0",
    "m1",
    "m2",
    "m3",
    "m4",
    "m5",
    "m6",
    "bf16",
    "fp16",
    "int8",
    "int4/absmean",
    "int8/row",
    "int4/g128",
    "mxfp8_e4m3",
    "mxfp4",
    "nvfp4",
]


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    """Small tensors: two threads would only wait for each other."""
    torch.set_num_threads(1)


def chosen(policy: str, model: torch.nn.Module) -> Any:
    return hu.TileMaster(masks(model)) if policy == "some tiles" else POLICIES[policy]


# ---- bits -------------------------------------------------------------------------------------------


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


# ---- packed and container are one ---------------------------------------------------------------------


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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grid", ["e4m3@16", "m3"])
def test_native_steps_as_a_float32_container_does(grid: str, dtype: torch.dtype, policy: str) -> None:
    """Given the same gradients. The parameter has the narrow type, the optimizer works in float32."""
    shape = (30, 40)
    runs = []
    for storage, kind in (("container", torch.float32), ("native", dtype)):
        model = torch.nn.Linear(40, 30, bias=False).to(kind)
        model.load_state_dict({"weight": torch.from_numpy(weights(shape)).to(dtype)})
        rule = chosen(policy, model)
        # m3 takes its range from the parameter's type
        named = hu.grid(grid).within(dtype)
        opt = hu.WriteBack(adamw(model), named, rule, model=model, storage=storage)
        assert model.weight.dtype == kind
        for g in gradients(shape, 8):
            model.weight.grad = torch.from_numpy(g).to(dtype).to(kind)
            opt.step()
        runs.append((model.weight.detach().float(), opt.events, opt.slots[0].kept_tensors()))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    for key, value in runs[0][2].items():
        assert_same(runs[1][2][key], value, key)


def test_native_bf16_model_trains() -> None:
    """A bf16 model with its own type as grid: weights move under sr and their dtype stays."""
    model = Tied().to(torch.bfloat16)
    opt = written_back(model, "bf16", "sr", storage="native")
    losses = train(model, opt, 20)
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert opt.events.never_moved < 0.1


# ---- modules -----------------------------------------------------------------------------------------


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


# ---- bytes --------------------------------------------------------------------------------------------


def live_bytes(opt: hu.WriteBack) -> int:
    """Storage behind every tensor that can be reached from a write-back, except what the caller made: the
    optimizer, the model with its gradients, and a mask."""
    outside = ("optimizer", "_model", "_groups", "defaults", "_handles", "mask")
    found: dict[int, int] = {}
    seen: set[int] = set()
    queue: list[Any] = [v for k, v in vars(opt).items() if k not in outside]
    while queue:
        x = queue.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            queue += [*x.keys(), *x.values()]
        elif isinstance(x, list | tuple):
            queue += x
        elif type(x).__module__.startswith("halfulp") and hasattr(x, "__dict__"):
            queue += [v for k, v in vars(x).items() if k not in outside]
    for state in opt.optimizer.state.values():
        for moment in state.values():
            found.pop(moment.untyped_storage()._cdata, None)
    return sum(found.values())


@pytest.mark.parametrize("storage", ["container", "native", "packed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_persistent_bytes_are_those_alive(policy: str, storage: str) -> None:
    """Parameters, codes, what the policy keeps, telemetry and scratch: to the byte."""
    model = Tied().to(torch.bfloat16 if storage == "native" else torch.float32)
    opt = written_back(model, "e4m3@16", chosen(policy, model), storage=storage)
    before = opt.bytes()
    train(model, opt, 2)
    assert opt.bytes() == before  # known before the first step
    assert before.persistent == live_bytes(opt)
    assert before.parameters == sum(model.get_parameter(n).numel() for n in TWO_DIMENSIONAL)


@pytest.mark.parametrize("grid", GRIDS)
def test_packed_bytes_of_every_grid(grid: str) -> None:
    """Codes take their bits, rounded up to bytes for each tensor, and the scales what they take."""
    model = Tied()
    opt = written_back(model, grid, "sr", storage="packed", options=WriteBackOptions(telemetry=False))
    train(model, opt, 1)
    assert opt.bytes().persistent == live_bytes(opt)
    bits = hu.grid(grid).within(torch.float32).bits
    scales = sum(8 * g.segments(tuple(s.p.shape)) for s in opt.slots if (g := s.grid.scaling) is not None)
    codes = sum(-(-s.p.numel() * bits // 8) for s in opt.slots)
    assert opt.bytes().weights == codes + scales + 4 * len(opt.slots)


def test_what_policies_cost() -> None:
    """Bytes a parameter, as the documentation has them."""
    cost = {}
    for policy in POLICIES:
        model = torch.nn.Linear(768, 64, bias=False)
        mask = hu.TileMaster({"weight": torch.arange(64) < 16})
        opt = hu.WriteBack(
            adamw(model), "e4m3", mask if policy == "some tiles" else POLICIES[policy], model=model
        )
        cost[policy] = opt.bytes().per_parameter()["policy"]
    tiles = 16 * 4 / (768 * 64)  # their numbers
    assert cost == {
        "rne": 0, "sr": 0, "deadzone-sr": 0, "eco": 0, "kahan": 4, "kahan in bfloat16": 2, "master": 4,
        "master from raw": 4, "some tiles": 1 + tiles,
    }  # fmt: skip


def test_a_container_keeps_the_place_of_stored_values() -> None:
    """Between steps in two passes, in two bytes; other storage frees it."""
    for dtype in (torch.float32, torch.bfloat16):
        model = Tied().to(dtype)
        opt = written_back(model, options=WriteBackOptions(one_pass=False))
        train(model, opt, 3)
        assert opt.bytes().persistent == live_bytes(opt)
        assert opt.bytes().scratch == (2 * opt.bytes().parameters if dtype == torch.float32 else 0)


def test_values_off_the_grid_are_set_aside_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored values take two bytes during a step; what somebody put between them takes four."""
    runs = []
    for halved in (True, False):
        model = Tied()
        opt = written_back(model, "e4m3@16", "kahan", options=WriteBackOptions(one_pass=False))
        if not halved:
            monkeypatch.setattr(Slot, "aside", torch.float32)
        train(model, opt, 2)
        assert [s.scratch.dtype == torch.bfloat16 for s in opt.slots if s.scratch is not None] == [halved] * 3
        model.up.weight.data.add_(2.0**-12)
        model.up.weight.grad[0, 0] = torch.nan  # so that one of them is put back
        opt.step()
        assert model.up.weight[0, 0].item() % 2.0**-11 == 2.0**-12
        train(model, opt, 1)
        runs.append((model.state_dict(), opt.events))
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(v, runs[1][0][k]) for k, v in runs[0][0].items())


# ---- what does not fit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "storage", "grid", "policy", "match"),
    [
        (torch.float32, "native", "bf16", "sr", "'embedding.weight'.*bfloat16 or float16"),
        (torch.bfloat16, "native", "m10", "sr", "'embedding.weight'.*m10 does not fit bfloat16"),
        (torch.bfloat16, "native", "fp16", "sr", "'embedding.weight'.*fp16 does not fit bfloat16"),
        (torch.bfloat16, "native", "int8", "sr", "'embedding.weight': grid int8 does not fit bfloat16"),
        (torch.float16, "native", "int2", "sr", "'embedding.weight'.*cannot hold the values of grid int2"),
        (torch.float16, "native", "mxfp4", "sr", "'embedding.weight'.*cannot hold the values of grid mxfp4"),
        (torch.float16, "packed", "int2", "sr", "'embedding.weight'.*cannot hold the values of grid int2"),
        (torch.float32, "packed", "m10", "sr", "'embedding.weight'.*19 bits, so nothing can be packed"),
        (
            torch.bfloat16,
            "container",
            "e4m3",
            "kahan",
            "'embedding.weight'.*'kahan'.*float32.*storage='native'",
        ),
        (torch.bfloat16, "container", "e4m3", "master", "'embedding.weight'.*'master'.*storage='native'"),
        (torch.float16, "container", "e4m3", "eco", "'embedding.weight'.*'eco'.*storage='native'"),
    ],
)
def test_what_does_not_fit(dtype: torch.dtype, storage: Any, grid: str, policy: str, match: str) -> None:
    """Said when the write-back is made, with the parameter's name, not found out in a wrong weight."""
    model = Tied().to(dtype)
    with pytest.raises(hu.UsageError, match=match):
        written_back(model, grid, policy, storage=storage)


@pytest.mark.parametrize("grid", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_native_bf16_with_block_scales(grid: str) -> None:
    """A block format's element times its scale is exact in bfloat16."""
    model = Tied().to(torch.bfloat16)
    opt = written_back(model, grid, "rne", storage="native")
    train(model, opt, 3)
    for name in TWO_DIMENSIONAL:
        w = model.get_parameter(name).detach().float()
        assert torch.equal(hu.grid(grid).round(w), w)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", ["rne", "sr", "deadzone-sr"])
def test_other_containers(dtype: torch.dtype, policy: str) -> None:
    """Parameters of other types hold grid values, too; the optimizer then works in that type."""
    model = Tied().to(dtype)
    opt = written_back(model, "e4m3@16", policy)
    train(model, opt, 3)
    for name in TWO_DIMENSIONAL:
        w = model.get_parameter(name).detach()
        assert w.dtype == dtype
        assert torch.equal(hu.grid("e4m3@16").round(w), w)


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
