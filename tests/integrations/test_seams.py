"""Seams of frameworks whose optimizers need CUDA, read in their sources and tried with FAKES.

Nothing here runs DeepSpeed, Megatron or TransformerEngine. Each fake has the layout of tensors, the order of
copies and the names that the source has (TransformerEngine d0067d0, Megatron-LM d98e8a6, DeepSpeed edaa722),
and arithmetic of its own. What the fakes cannot show is that the real kernels do the same.
"""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
import torch

import halfulp as hu

STEPS = 12
LR = 1e-4


class FakeFusedAdam(torch.optim.Optimizer):
    """FAKE of TransformerEngine's ``FusedAdam``: ``state["master_param"]`` has masters or their low bits."""

    def __init__(
        self, params: Any, *, master_weights: bool, store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": LR})
        self.master_weights, self.remainders = master_weights, store_param_remainders
        self.decoupled = use_decoupled_grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                grad = (p.decoupled_grad if self.decoupled else p.grad).float()
                self._move(p, self.state[p] or self._begun(p), grad, group)

    def _begun(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[p]
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, dtype=torch.float32) for _ in range(2))
        if self.master_weights:
            kept = torch.zeros_like(p, dtype=torch.int16) if self.remainders else p.float().clone()
            state["master_param"] = kept
        return state

    def _move(self, p: torch.Tensor, state: dict[str, torch.Tensor], grad: torch.Tensor, group: Any) -> None:
        m, v, t = state["exp_avg"].lerp_(grad, 0.1), state["exp_avg_sq"], group["step"]
        v.mul_(0.999).addcmul_(grad, grad, value=0.001)
        change = group["lr"] * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        if not self.master_weights:
            p.copy_(p.float() - change)
        elif self.remainders:
            high = p.view(torch.int16).to(torch.int32) << 16
            bits = ((high + state["master_param"]).view(torch.float32) - change).view(torch.int32)
            high = (bits + 0x8000) >> 16 << 16
            p.copy_(high.view(torch.float32))
            state["master_param"].copy_(bits - high)
        else:
            p.copy_(state["master_param"].sub_(change))


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.GELU(), torch.nn.Linear(48, 24))
    return made.bfloat16()


def backward(net: torch.nn.Module, step: int) -> None:
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).bfloat16()
    net.zero_grad()
    (net(x) - x).float().square().mean().backward()


# ---- TransformerEngine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("remainders", [False, True])
def test_fused_adam_with_masters_loses_nothing(remainders: bool) -> None:
    """Most stored values stay, and the verdict says what keeps the updates, not that they are lost."""
    net, memory = model(), hu.Memory()
    opt = FakeFusedAdam(net.parameters(), master_weights=True, store_param_remainders=remainders)
    with hu.Audit(opt, "bf16", model=net, out=memory):
        for step in range(STEPS):
            backward(net, step)
            opt.step()
    answer = hu.verdict(memory.trace)
    assert memory.trace.frozen("bf16").min() > 0.5
    assert answer.headline.startswith("Nothing lost: FakeFusedAdam's master_param keeps what bf16 does not")
    assert answer.fix is None


def test_fused_adam_without_masters_loses() -> None:
    net, memory = model(), hu.Memory()
    opt = FakeFusedAdam(net.parameters(), master_weights=False)
    with hu.Audit(opt, "bf16", model=net, out=memory):
        for step in range(STEPS):
            backward(net, step)
            opt.step()
    answer = hu.verdict(memory.trace)
    assert answer.headline.startswith("This run LOST")
    assert answer.fix is not None
    assert "WriteBack" in "".join(answer.fix.code)


# ---- Megatron --------------------------------------------------------------------------------------------


class FakeDistributedOptimizer:
    """FAKE of Megatron's ``DistributedOptimizer`` on a rank that holds the second half of each parameter."""

    def __init__(self, net: torch.nn.Module, *, precision_aware: bool) -> None:
        self.net, self.precision_aware = net, precision_aware
        self.model_params = list(net.parameters())
        self.shard_float16 = [p.detach().view(-1)[p.numel() // 2 :] for p in self.model_params]
        stepped = self.shard_float16
        if not precision_aware:
            stepped = self.shard_fp32_from_float16 = [s.clone().float() for s in self.shard_float16]
        self.optimizer: torch.optim.Optimizer = (
            FakeFusedAdam(stepped, master_weights=True, store_param_remainders=True, use_decoupled_grad=True)
            if precision_aware
            else torch.optim.AdamW(stepped, lr=LR)
        )

    def step(self) -> None:
        for i, p in enumerate(self.model_params):
            assert p.grad is not None
            grad = p.grad.view(-1)[p.numel() // 2 :]  # its main_grad
            if self.precision_aware:
                self.shard_float16[i].decoupled_grad = grad.float()  # type: ignore[attr-defined]  # as Megatron
            else:
                self.shard_fp32_from_float16[i].grad = grad.float()
        self.optimizer.step()
        if not self.precision_aware:
            for main, shard in zip(self.shard_fp32_from_float16, self.shard_float16, strict=True):
                shard.copy_(main)


def test_megatron_shards_are_casts() -> None:
    """``shard_fp32_from_float16_groups`` and ``shard_float16_groups``; counts equal a comparison of bits."""
    net, memory = model(), hu.Memory()
    opt = FakeDistributedOptimizer(net, precision_aware=False)
    stayed = []
    with hu.CastAudit(opt.shard_fp32_from_float16, opt.shard_float16, "bf16", out=memory):
        for step in range(STEPS):
            backward(net, step)
            before = [s.clone() for s in opt.shard_float16]
            opt.step()
            stayed.append(sum(int((a == b).sum()) for a, b in zip(before, opt.shard_float16, strict=True)))
    rows = memory.trace.table().to_polars().group_by("step", maintain_order=True).agg(pl.col("frozen").sum())
    assert rows["frozen"].to_list() == stayed
    assert "the main parameters keep" in str(hu.verdict(memory.trace))


def test_megatron_precision_aware_shards_are_seen() -> None:
    """Their gradient is in ``decoupled_grad``, and their masters are in the inner optimizer."""
    net, memory = model(), hu.Memory()
    opt = FakeDistributedOptimizer(net, precision_aware=True)
    stayed = []
    with hu.Audit(opt.optimizer, "bf16", out=memory):
        for step in range(STEPS):
            backward(net, step)
            before = [s.clone() for s in opt.shard_float16]
            opt.step()
            stayed.append(sum(int((a == b).sum()) for a, b in zip(before, opt.shard_float16, strict=True)))
    rows = memory.trace.table().to_polars().group_by("step", maintain_order=True).agg(pl.col("frozen").sum())
    assert rows["frozen"].to_list() == stayed
    assert "FakeFusedAdam's master_param keeps" in hu.verdict(memory.trace).headline


# ---- DeepSpeed -------------------------------------------------------------------------------------------


class FakeZero3:
    """FAKE of DeepSpeed's stage 3: sub-groups of flat tensors, stepped one after the other.

    With ``bf16_master_weights_and_grads`` a sub-group's main tensor *is* its flat bfloat16 partition.
    """

    def __init__(self, net: torch.nn.Module, *, bf16_masters: bool) -> None:
        self.params = [own for layer in net.children() if (own := list(layer.parameters()))]
        self.flat = [torch.cat([p.detach().view(-1) for p in group]) for group in self.params]
        self.main = self.flat if bf16_masters else [x.float() for x in self.flat]
        for x in self.main:
            x.requires_grad_()
        self.optimizer = torch.optim.AdamW(self.main, lr=LR)
        self.optimizer.param_groups[0]["params"] = []

    @torch.no_grad()
    def step(self) -> None:
        for group, flat, main in zip(self.params, self.flat, self.main, strict=True):
            main.grad = torch.cat([p.grad.view(-1) for p in group]).to(main.dtype)
            self.optimizer.param_groups[0]["params"] = [main]
            self.optimizer.step()
            self.optimizer.param_groups[0]["params"] = []
            if flat is not main:
                flat.copy_(main)
            at = 0
            for p in group:  # gathered again for the next forward
                p.copy_(flat[at : at + p.numel()].view_as(p))
                at += p.numel()


def test_zero_3_is_cast_by_sub_groups() -> None:
    """One step of the engine is one step of the optimizer for each sub-group."""
    net, memory = model(), hu.Memory()
    engine = FakeZero3(net, bf16_masters=False)
    stayed = []
    with hu.CastAudit(engine.main, engine.flat, "bf16", out=memory):
        for step in range(STEPS):
            backward(net, step)
            before = [x.clone() for x in engine.flat]
            engine.step()
            stayed.append(sum(int((a == b).sum()) for a, b in zip(before, engine.flat, strict=True)))
    assert memory.trace.table().to_polars()["frozen"].sum() == sum(stayed)
    assert "the main parameters keep" in str(hu.verdict(memory.trace))


def test_zero_3_with_bf16_masters_loses() -> None:
    """``bf16_master_weights_and_grads``: the audit sees the flat tensors, and each sub-group is a step."""
    net, memory = model(), hu.Memory()
    engine = FakeZero3(net, bf16_masters=True)
    with hu.Audit(engine.optimizer, "bf16", out=memory):
        for step in range(STEPS):
            backward(net, step)
            engine.step()
    assert memory.trace.steps.tolist() == [*range(1, 2 * STEPS + 1)]
    assert hu.verdict(memory.trace).headline.startswith("This run LOST")


# ---- Optimizers that keep the rest themselves, as they are -----------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("package", "name", "options", "state"),
    [
        ("optimi", "AdamW", {}, "AdamW's kahan_comp"),
        ("pytorch_optimizer", "StableAdamW", {}, "StableAdamW's kahan_comp"),
        ("heavyball", "AdamW", {"param_ecc": "bf16+8"}, "AdamW's param::ecc"),
    ],
)
def test_a_state_that_keeps_the_rest_is_no_loss(
    package: str, name: str, options: dict[str, Any], state: str
) -> None:
    """Real packages, not fakes."""
    net, memory = model(), hu.Memory()
    opt = getattr(pytest.importorskip(package), name)(net.parameters(), lr=LR, **options)
    with hu.Audit(opt, "bf16", model=net, out=memory):
        for step in range(STEPS):
            backward(net, step)
            opt.step()
    assert hu.verdict(memory.trace).headline.startswith(
        f"Nothing lost: {state} keeps what bf16 does not hold"
    )
