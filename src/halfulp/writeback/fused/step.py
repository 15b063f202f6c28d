"""Make a step in one pass: find the addresses of all its tensors once, and move them in one call.

With thousands of small tensors, Python's work per tensor takes most of the time of a step. So a
:class:`Plan` keeps the addresses, and a step only checks that they still hold: a dozen comparisons of whole
lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfulp.kernels import onepass
from halfulp.kernels.plan import Array, addresses
from halfulp.kernels.reference import MODES, NEAREST
from halfulp.numbers.streams import keys_of, name_bytes
from halfulp.writeback import moments_kept
from halfulp.writeback.fused import chunked
from halfulp.writeback.policies import Kernel
from halfulp.writeback.route import in_chunks, why_not_group, why_not_optimizer
from halfulp.writeback.rules import OptimizerRule, decay_of, rule_of
from halfulp.writeback.sharding import is_sharded, local, shard_offset
from halfulp.writeback.telemetry import StepEvents, sampling

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

CONTIGUOUS = torch.Tensor.is_contiguous
KEEPS = {
    "nothing": onepass.NOTHING, "carry": onepass.CARRY, "error": onepass.ERROR, "master": onepass.MASTER,
    "remainder": onepass.REMAINDER,
}  # fmt: skip


def move(wb: WriteBack, slots: Sequence[Slot], step: int) -> None:
    """Make one step of these parameters, for which :mod:`halfulp.writeback.route` has chosen one pass."""
    (planned(wb, slots) or plan_for(wb, slots)).move(step)


def plan_for(wb: WriteBack, slots: Sequence[Slot]) -> Plan:
    """Plan steps of these parameters; the plan is kept if it can hold for more than one."""
    plan = Plan(wb, list(slots))
    wb.plans.pop(slots[0], None)
    if plan.lasting:
        wb.plans[slots[0]] = plan
    return plan


def planned(wb: WriteBack, slots: Sequence[Slot]) -> Plan | None:
    """Return the plan of an earlier step for these parameters, if nothing has changed since."""
    plan = wb.plans.get(slots[0]) if slots else None
    return plan if plan is not None and plan.slots == slots and plan.holds() else None


@dataclass(frozen=True)
class Call:
    """The tensors of a plan that one kernel call moves, by their positions in it."""

    jobs: onepass.Jobs
    slots: list[Slot]
    rows: Array
    names: list[bytes]
    places: dict[Slot, int]
    summed: list[int]
    whole: bool
    """False for one tensor of which the policy keeps parts: its kernel is given a whole for the time."""


class Plan:
    """A plan for the steps of some parameters, valid while their types and addresses do not change."""

    def __init__(self, wb: WriteBack, slots: list[Slot]) -> None:
        rule = rule_of(wb.optimizer)
        assert rule is not None
        self.wb, self.slots, self.rule = wb, slots, rule
        self._params = [slot.p for slot in slots]
        self._stepped = [slot.stepped for slot in slots]
        self._groups = [slot.place[0] for slot in slots]
        self._kinds = {g: self._kind(g) for g in dict.fromkeys(self._groups)}
        self._kernels = [_kernel(slot) for slot in slots]
        self._exact = [kernel.decay_exact for kernel in self._kernels]
        self._states, self._new = _begin_states(wb, rule, slots)
        self._keeping = [slot for slot in slots if slot.state]
        self._types = [grad.dtype for grad in self._gradients()]
        self.lasting = all(
            p.is_cpu and not is_sharded(p) and not kernel.partial
            for p, kernel in zip(self._params, self._kernels, strict=True)
        )
        self._tensors = self._memory()
        self._at = self._addresses()
        self._chunked = [i for i, slot in enumerate(slots) if in_chunks(wb, slot)]
        self._calls = self._build_calls()

    # ---- whether it holds -------------------------------------------------------------------------

    def _kind(self, group: int) -> tuple[int | None, bool, bool]:
        """Find what of a group's options decides which compiled loop moves it."""
        number = self.rule.number(self.wb.param_groups[group])
        if number is None:
            return None, False, False
        s = self._settings(group, 1, False)
        return number, onepass.small(s), s.torchs_root

    def _settings(self, group: int, t: int, exact: bool) -> onepass.Settings:
        g = self.wb.param_groups[group]
        b1, b2 = g["betas"] if "betas" in g else (g["momentum"], 0.0)
        number = self.rule.number(g)
        assert number is not None
        return onepass.Settings(
            lr=float(g["lr"]), betas=(float(b1), float(b2)), eps=float(g.get("eps", 0.0)),
            weight_decay=float(g["weight_decay"]), rule=number, t=t, decay_exact=exact,
            dampening=float(g.get("dampening", 0.0)),
            torchs_root=self.rule.counts and self.wb.like_torch and not g.get("fused"),
        )  # fmt: skip

    def _gradients(self) -> list[torch.Tensor]:
        gradients = [p.grad for p in self._params]
        assert type(None) not in set(map(type, gradients))
        return gradients  # type: ignore[return-value]  # none is None

    def _memory(self) -> list[Sequence[torch.Tensor | None]]:
        """Return every tensor that a step reads and writes, kind by kind."""
        state, slots = self.wb.optimizer.state, self.slots
        keeps = any(self.rule.kept(self.wb.param_groups[group]) for group in self._kinds)
        states = [state.get(p, {}) for p in self._stepped] if keeps else []
        kept = sorted({key for slot in self._keeping for key in slot.state})
        return [
            [slot.moved for slot in slots],
            *([s.get(key) for s in states] for key in ("step", *moments_kept.names(self.wb))),
            *([slot.state.get(key) for slot in self._keeping] for key in kept),
        ]

    def _stored(self) -> list[torch.Tensor]:
        return [slot.p if slot.codes is None else slot.codes.packed for slot in self.slots]

    def _addresses(self) -> list[Array]:
        tensors = ([x for x in kind if x is not None] for kind in self._tensors)
        return [addresses(self._stored()), *map(addresses, tensors)] if self.lasting else []

    def holds(self) -> bool:
        """Return True if the next step can use this plan."""
        wb = self.wb
        if not self.lasting or why_not_optimizer(wb) is not None:
            return False
        for group, kind in self._kinds.items():
            if why_not_group(wb, wb.param_groups[group]) is not None or self._kind(group) != kind:
                return False
        grads = [p.grad for p in self._params if p.grad is not None]
        if [g.dtype for g in grads] != self._types or {g.layout for g in grads} != {torch.strided}:
            return False
        memory = self._memory()
        if [len(kind) for kind in memory] != [len(kind) for kind in self._tensors]:
            return False
        if not all(all(map(is_, now, was)) for now, was in zip(memory, self._tensors, strict=True)):
            return False
        stored = [slot.p for slot in self.slots if slot.codes is None]
        if not all(map(CONTIGUOUS, stored)):
            return False
        return all(map(np.array_equal, self._at, self._addresses()))

    # ---- moving -----------------------------------------------------------------------------------

    def _build_calls(self) -> list[Call]:
        """Build one call for all tensors that are stored and rounded alike."""
        partial = [slot for slot, how in zip(self.slots, self._kernels, strict=True) if how.partial]
        most = max((local(slot.p).numel() for slot in partial), default=0)
        masters = torch.empty(most, dtype=torch.float32, device="cpu")  # one tensor at a time uses it
        cases: dict[Any, tuple[onepass.Case, list[int], list[onepass.Job]]] = {}
        aside = set(self._chunked)
        for i, slot in enumerate(self.slots):
            how = self._kernels[i]
            if i in aside:
                continue
            kind = number, small, torchs_root = self._kinds[self._groups[i]]
            assert number is not None
            dtype = moments_kept.dtype_of(self.wb, slot)
            job = _job(self.wb, slot, self._states[i], number, masters)
            alone = slot if how.partial else None  # a call of its own: they share the memory
            like = (slot.grid, how, kind, job.types, alone)
            if like not in cases:
                case = onepass.Case(
                    grid=slot.grid, rule=number, small=small, mode=MODES[how.mode], keeps=KEEPS[how.keeps],
                    short=not self.wb.like_torch, drawn=job.first is not None and dtype != torch.float32,
                    torchs_root=torchs_root,
                )  # fmt: skip
                cases[like] = case, [], []
            cases[like][1].append(i)
            cases[like][2].append(job)
        calls = []
        for case, rows, jobs in cases.values():
            slots = [self.slots[i] for i in rows]
            names = [name_bytes(slot.name) for slot in slots]
            places = {slot: i for i, slot in enumerate(slots)}
            summed, whole = [job.sums for job in jobs], not self._kernels[rows[0]].partial
            calls.append(Call(onepass.Jobs(case, jobs), slots, np.array(rows), names, places, summed, whole))
        return calls

    @torch.no_grad()
    def move(self, step: int) -> None:
        """Make one step."""
        for slot in self._keeping:
            slot.resync()
        settings = self._count_step()
        for i in self._chunked:
            chunked.move(self.wb, self.rule, self.slots[i], self._states[i], step, first=settings[i][1] == 1)
            self.slots[i].note_written()
        if not self._calls:
            return
        numbers = list(dict.fromkeys(settings))
        where = dict(zip(numbers, range(len(numbers)), strict=True))
        rates = np.stack([onepass.rates(self._settings(*number)) for number in numbers])
        one = len(numbers) == 1
        rows = np.repeat(rates, len(settings), axis=0) if one else rates[[where[x] for x in settings]]
        grads = self._gradients() if self.lasting else [local(grad) for grad in self._gradients()]
        if not all(map(CONTIGUOUS, grads)):
            grads = [grad.contiguous() for grad in grads]
        decays = {g: math.prod(decay_of(self.wb.optimizer, self.wb.param_groups[g])) for g in self._kinds}
        for call in self._calls:
            self._call(call, step, grads, rows, decays)

    def _call(
        self, call: Call, step: int, grads: list[torch.Tensor], rates: Array, decays: dict[int, float]
    ) -> None:
        wb, case = self.wb, call.jobs.case
        keys = np.zeros((len(call.slots), 4), dtype=np.uint32)
        if case.mode != NEAREST:
            keys[:, :2] = keys_of(wb.seed, call.names, step, 16 if case.short else 32)
        if case.drawn:
            keys[:, 2:] = keys_of(wb.seed, [name + b"\0moments" for name in call.names], step, 16)
        all_rows = len(call.slots) == len(self.slots)
        first, master = call.slots[0], None if call.whole else call.jobs.jobs[0].kept
        if master is not None:  # what is not kept is what is stored, whose master step is nearest
            master.copy_(first.values().reshape(-1))
            first.policy.spread(master, first.state)
        counted = call.jobs(
            grads if all_rows else [grads[i] for i in call.rows],
            rates if all_rows else rates[call.rows],
            keys,
        )
        if master is not None:
            first.policy.collect(master, first.state)
        noted = StepEvents(
            step=step, places=call.places, counted=counted, summed=call.summed,
            decay_rates=[decays[slot.place[0]] for slot in call.slots],
        )  # fmt: skip
        for slot in call.slots:
            slot.noted = noted
        for slot in call.slots if self._keeping else ():
            slot.note_written()

    def _count_step(self) -> list[tuple[int, int, bool]]:
        """Count this step in the optimizer's own state.

        Returns each tensor's group, which step of it this is, and whether its decay is exact.
        """
        steps: Any = repeat(2, len(self.slots))
        if "step" in self._states[0]:
            counters = [state["step"] for state in self._states]
            if all(c.dtype is torch.float32 and c.is_cpu for c in counters):
                one = torch.ones((), device="cpu")
                torch._foreach_add_(counters, one, alpha=1.0)  # ten times faster than the number
            else:
                for counter in counters:
                    counter += 1
            steps = [int(counter.item()) for counter in counters]
        elif self._new:
            steps = [1 if i in self._new else 2 for i in range(len(self.slots))]
            self._new = frozenset()
        return list(zip(self._groups, steps, self._exact, strict=True))


def _begin_states(
    wb: WriteBack, rule: OptimizerRule, slots: Sequence[Slot]
) -> tuple[list[dict[str, Any]], frozenset[int]]:
    """Return the optimizer's state of each parameter, as its first step would make it; and whose is new."""
    states, new = [], set()
    for i, slot in enumerate(slots):
        group = wb.param_groups[slot.place[0]]
        kept = rule.kept(group)
        state = wb.optimizer.state[slot.stepped] if kept else {}
        if rule.counts and "step" not in state:
            wide = not group.get("fused") and torch.get_default_dtype() == torch.float64  # as torch has it
            state["step"] = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")
        begun = [moments_kept.begin(wb, slot, state, key) for key in kept]
        if any(begun):
            new.add(i)
        states.append(state)
    return states, frozenset(new)


def _kernel(slot: Slot) -> Kernel:
    """Return how kernels make a slot's policy; the route has made sure that they can."""
    kernel = slot.policy.kernel
    assert kernel is not None
    return kernel


def _job(wb: WriteBack, slot: Slot, state: dict[str, Any], number: int, masters: torch.Tensor) -> onepass.Job:
    """Build the kernel job of a tensor; gradients, rates and keys are passed with each call."""
    assert slot.p.grad is not None
    stored = local(slot.p.detach()) if slot.codes is None else slot.codes.packed
    how, (moments, scales) = _kernel(slot), moments_kept.tensors(wb, slot, state)
    first, second = (*moments, None, None)[:2]
    size = math.prod(slot.codes.shape) if slot.codes is not None else stored.numel()
    fused = bool(wb.param_groups[slot.place[0]].get("fused"))
    end = onepass.torchs_end(number, fused=fused) if wb.like_torch else None
    kept = slot.state[how.key] if how.key else None
    if how.partial:
        kept = masters[:size]
    return onepass.Job(
        stored=stored, size=size, grad=local(slot.p.grad).new_empty(0), first=first, second=second, kept=kept,
        moved=slot.moved, offset=shard_offset(slot.p), plain=size - size % end if end else size,
        sums=sampling(size) if wb.telemetry else 0, scales=tuple(scales),
    )  # fmt: skip
