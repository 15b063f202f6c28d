"""Changes as samplers take them, against plain implementations of the receiving side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import halfulp as hu
from halfulp.checkpoints import BlockFp8, Change, CheckpointWeightPatch, SparseWeightPatch

HEADS, WIDTH, RANKS = 4, 64, 2


class Runtime:
    """A sampler that writes into its own parameters: q, k and v are one tensor."""

    def __init__(self, trainer: torch.nn.Module) -> None:
        w = {n: p.detach() for n, p in trainer.named_parameters()}
        self.parameters = {"qkv.weight": torch.cat([w.pop(f"{n}.weight") for n in "qkv"]).clone()}
        self.parameters |= {n: p.clone() for n, p in w.items()}
        at = WIDTH * WIDTH
        self.names = {f"{n}.weight": ("qkv.weight", i * at) for i, n in enumerate("qkv")}

    def update(self, patches: Iterable[SparseWeightPatch]) -> None:
        for name, indices, values in patches:
            parameter = self.parameters[name]
            assert indices.dtype == torch.int32
            assert indices.dim() == values.dim() == 1
            assert values.dtype == parameter.dtype
            parameter.view(-1).index_copy_(0, indices.long(), values)


class Loader:
    """One tensor-parallel rank of a sampler, which loads checkpoints: its rows of each tensor.

    A sparse patch is a tensor of the full shape in which NaN marks what stays.
    """

    def __init__(self, trainer: torch.nn.Module, rank: int) -> None:
        self.rank = rank
        self.parameters: dict[str, torch.Tensor] = {}
        for name, p in trainer.named_parameters():
            self.parameters[name] = self.cut(p.detach()).clone()

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(RANKS)[self.rank]

    def update(self, patches: list[CheckpointWeightPatch]) -> None:
        assert len({p.indices is None for p in patches}) <= 1
        for p in patches:
            if p.indices is None:
                loaded = p.values.view(p.shape)
            else:
                assert p.indices.dtype == torch.int32
                assert p.indices.unique().numel() == p.indices.numel() == p.values.numel()
                assert p.full_shape == p.shape
                loaded = torch.full(p.shape, float("nan"), dtype=p.dtype)
                loaded.view(-1)[p.indices.long()] = p.values
            there = self.parameters[p.name.removeprefix("model.")]
            mine = self.cut(loaded)
            there.copy_(torch.where(mine.isnan(), there, mine))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.norm(self.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def training(steps: int) -> Iterable[torch.nn.Module]:
    model = Attention()
    optimizer = hu.AdamW(model.parameters(), lr=1e-5)
    yield model
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 8, WIDTH, generator=generator).bfloat16()
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        yield model


def test_fifty_chained_changes_with_one_left_out_and_one_out_of_order() -> None:
    """Both samplers hold what the trainer holds after every change; gaps and stale changes are refused."""
    steps = iter(training(50))
    model = next(steps)
    names = {n: f"model.{n}" for n, _ in model.named_parameters()}
    sync = hu.Sync(model)
    runtime, loaders = Runtime(model), [Loader(model, rank) for rank in range(RANKS)]

    def write(change: Change) -> None:
        runtime.update(change.sparse_patches(runtime.names))
        for loader in loaders:
            loader.update(change.checkpoint_patches(names))

    receiver = hu.Receiver(write, position=sync.position)
    held: Change | None = None
    sent = 0
    for number, _ in enumerate(steps):
        change = Change.from_bytes(sync.take().to_bytes())
        assert 0 < change.density < 0.6
        sent += change.payload_bytes
        if number == 20:  # this one comes late
            held = change
            continue
        if held is not None:
            with pytest.raises(hu.UsageError, match="what changed from sync 21 to 22 is missing"):
                receiver.apply(change)
            receiver.apply(held)
            held = None
        receiver.apply(change)
        with pytest.raises(hu.UsageError, match="stale, or was applied already"):
            receiver.apply(change)
        now = {n: p.detach() for n, p in model.named_parameters()}
        assert torch.equal(runtime.parameters["qkv.weight"], torch.cat([now[f"{n}.weight"] for n in "qkv"]))
        assert torch.equal(runtime.parameters["o.weight"], now["o.weight"])
        for name, p in now.items():
            assert torch.equal(torch.cat([loader.parameters[name] for loader in loaders]), p)
    assert receiver.position == sync.position
    whole = sum(2 * p.numel() for p in model.parameters())
    assert sent < 50 * whole


def test_everything_is_dense() -> None:
    model = Attention()
    sync = hu.Sync(model)
    other = Attention()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    loaders = [Loader(other, rank) for rank in range(RANKS)]
    patches = sync.full().checkpoint_patches()
    assert all(p.indices is None for p in patches)
    for loader in loaders:
        loader.update(patches)
    runtime = Runtime(other)
    runtime.update(sync.full().sparse_patches(runtime.names))
    for name, p in model.named_parameters():
        assert torch.equal(torch.cat([loader.parameters[name] for loader in loaders]), p)
    assert torch.equal(runtime.parameters["o.weight"], model.o.weight)


def test_a_sampler_that_fails_begins_again() -> None:
    x = {"w": torch.zeros(10)}
    sync = hu.Sync(x)
    calls: list[int] = []

    def write(change: Change) -> None:
        calls.append(change.number)
        if len(calls) == 1:
            raise ConnectionError("gone")

    receiver = hu.Receiver(write, position=sync.position)
    x["w"][0] = 1
    change = sync.take()
    with pytest.raises(hu.UsageError, match="only has a function"):
        receiver.apply(change, verify=True)
    with pytest.raises(ConnectionError):
        receiver.apply(change)
    with pytest.raises(hu.UsageError, match="no position yet"):
        receiver.apply(change)
    receiver.apply(sync.full())
    assert receiver.position == sync.position
    assert calls == [2, 2]


def test_what_the_formats_cannot_say_is_refused() -> None:
    x = {"w": torch.zeros(10), "n": torch.zeros(3, dtype=torch.int64)}
    sync = hu.Sync(x)
    x["n"][0] = 1
    with pytest.raises(
        hu.UsageError, match=r"'n' is torch\.int64, and sparse checkpoint patches are of floats"
    ):
        (change := sync.take()).checkpoint_patches()
    assert change.sparse_patches()[0].values.tolist() == [1]
    x["w"][4] = float("nan")
    with pytest.raises(hu.UsageError, match="'w' has new values that are NaN"):
        sync.take().checkpoint_patches()
    x["w"][4] = 1
    change = sync.take()
    wide = replace(change, parts={"w": replace(change.parts["w"], shape=(2**16, 2**16))})
    (patch,) = wide.checkpoint_patches()
    assert patch.indices is not None
    assert patch.indices.dtype == torch.int64
    with pytest.raises(hu.UsageError, match="counts places in int32"):
        wide.sparse_patches()
    with pytest.raises(hu.UsageError, match="counts places in int32"):
        change.sparse_patches({"w": ("all", 2**31 - 5)})


# ---- fp8 with scales of blocks ----------------------------------------------------------------------


def plain(w: torch.Tensor, block: int, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """Block by block, with another library's fp8."""
    import ml_dtypes

    rows, columns = (-(-n // block) for n in w.shape)
    codes, scales = np.zeros(w.shape, dtype=np.uint8), np.zeros((rows, columns), dtype=np.float32)
    values = w.float().numpy()
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            largest = np.abs(values[at]).max()
            scale = np.float32(largest) / np.float32(448) if largest else np.float32(1)
            if power_of_two:
                scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
            scales[i, j] = scale
            codes[at] = (values[at] / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scales


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (5, 129)])
def test_block_fp8_against_a_plain_loop(shape: tuple[int, int], power_of_two: bool) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    w[:3, :4] = 0
    grid = BlockFp8(power_of_two=power_of_two)
    codes, scales = grid.quantize("w", w)
    expected, factors = plain(w, 128, power_of_two)
    assert (codes.view(torch.uint8).numpy() == expected).all()
    assert (scales.numpy() == factors).all()
    step = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]] * 16
    assert bool(((grid.values(codes, scales) - w.float()).abs() <= step * (1 + 1e-6)).all())


def test_a_sampler_of_block_fp8_follows() -> None:
    """Codes and scales at the sampler are those of the trainer's weights; norms and embeddings stay bf16."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(64, 200),
            "up": torch.nn.Linear(200, 300),
            "norm": torch.nn.LayerNorm(300),
        }
    ).bfloat16()
    for grid in (BlockFp8(), BlockFp8(power_of_two=True)):
        sync = hu.Sync(model, grid)
        assert {n: x.dtype for n, x in sync.stored().items()} == {
            "embed.weight": torch.bfloat16, "up.weight": torch.float8_e4m3fn,
            "up.weight_scale_inv": torch.float32, "up.bias": torch.bfloat16,
            "norm.weight": torch.bfloat16, "norm.bias": torch.bfloat16,
        }  # fmt: skip
        copied = {n: x.clone() for n, x in sync.stored().items()}
        receiver = hu.Receiver(copied, position=sync.position)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_((torch.randn(p.shape, generator=generator) * 1e-3).to(p.dtype))
            change = Change.from_bytes(sync.take().to_bytes())
            receiver.apply(change, verify=True)
            by_name = {p.name: p for p in change.sparse_patches()}
            assert by_name["up.weight"].values.dtype == torch.float8_e4m3fn
            for n, x in sync.stored().items():
                assert torch.equal(copied[n].view(torch.uint8), x.view(torch.uint8))


def test_block_fp8_refuses_what_has_no_code() -> None:
    with pytest.raises(hu.UsageError, match="'w' has values that are not finite"):
        hu.Sync({"w": torch.full((2, 2), float("nan"))}, BlockFp8())
    with pytest.raises(hu.UsageError, match="'w_scale_inv' is a tensor of its own"):
        hu.Sync({"w": torch.ones(2, 2), "w_scale_inv": torch.ones(1)}, BlockFp8())
    assert hu.Sync({"w": torch.zeros(2, 2)}, BlockFp8()).stored()["w_scale_inv"].tolist() == [[1.0]]
