"""Define the contract of a policy, and one tensor at one step as a policy sees it.

A policy declares everything about itself in its own file: its name, its options, the state that it keeps and
what that costs, the kernels that implement it, and the words that reports use for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.kernels import Written
from halfulp.kernels.reference import rule_of_stored
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream

State = dict[str, torch.Tensor]
Keeps = Literal["nothing", "carry", "error", "master", "remainder"]


@dataclass(kw_only=True)
class Step:
    """One tensor at one step, as a policy sees it."""

    name: str
    grid: Grid
    stream: Stream
    q: torch.Tensor
    z: torch.Tensor
    state: State
    moved: torch.Tensor | None
    sums: int
    decay: float
    """Learning rate times decoupled weight decay."""
    group: dict[str, Any]
    """The optimizer's parameter group."""
    moments: dict[str, Any]
    """The optimizer's own state of this parameter."""
    keep_scales: bool
    scales: torch.Tensor | None = None
    """With ``keep_scales``, the scales that a moving grid was rounded with, which packed codes need."""
    queue: kernels.Queue = field(default_factory=list)
    """The kernel calls that are still pending."""

    def write(self, mode: kernels.Mode = "nearest", **options: Any) -> Written:
        """Queue the fused kernel that writes the next stored values over ``z``.

        It runs after all policies have been called, or in :meth:`finish`.

        Args:
            mode: How to round: ``nearest``, ``stochastic`` or ``deadzone``.
            **options: Further options of :func:`halfulp.kernels.write_back`, such as ``carry``.

        Returns:
            The counts; their numbers are there once the kernel has run.
        """
        stored = None
        if self.keep_scales and self.grid.scaling is not None:
            self.scales = kernels.scales(self._scale_source(**options), self.grid)
            stored = kernels.scales(self.q, rule_of_stored(self.grid))
        written, work = kernels.prepare(
            self.q, self.z, self.grid, mode, self.stream, moved=self.moved, sums=self.sums,
            scale=kernels.Scales(self.scales, stored), **options,
        )  # fmt: skip
        self.queue += work
        return written

    def finish(self) -> None:
        """Run the pending kernel calls."""
        while self.queue:  # an interrupted call is made again: it leaves on the grid what is on it
            self.queue[0]()
            del self.queue[0]

    def _scale_source(self, carry: torch.Tensor | kernels.Carry | None = None) -> torch.Tensor:
        """Return the values from which the kernel takes the scales."""
        if self.grid.scaling is not None and self.grid.scaling.from_old:
            return self.q
        rest, add = carry if isinstance(carry, kernels.Carry) else (carry, True)
        if rest is None or not add:
            return self.z
        return torch.where(torch.isfinite(self.z + rest), self.z + rest, self.z)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The kernel settings of a policy: how to round, and what to do with the remainder."""

    mode: kernels.Mode = "nearest"
    keeps: Keeps = "nothing"
    """The name of the state that the policy keeps; ``error`` is added to the first moment instead."""
    dtype: torch.dtype = torch.float32
    """The type of a carry."""
    decay_exact: bool = False
    """Multiply the error by 1 - lr * weight_decay."""
    partial: bool = False
    """True if only parts of a tensor are kept; ``spread`` and ``collect`` then handle the whole tensor."""

    @property
    def key(self) -> str | None:
        """The key of the kept tensor in the policy's state, or None."""
        return None if self.keeps in ("nothing", "error") else self.keeps

    @property
    def batched(self) -> bool:
        """True if the write-back is a single kernel call, so that tensors can share one."""
        return self.keeps in ("nothing", "carry")


@dataclass(frozen=True)
class Policy:
    """The contract of a policy: nearest write-back by default, with hooks that a subclass overrides.

    A subclass sets ``name`` and overrides ``after``, which writes the next stored values over ``step.z``. Its
    options are the fields of a frozen dataclass.

    Raises:
        UsageError: If an option is given a value that it does not accept.

    >>> import halfulp as hu
    >>> class Doubled(Policy):
    ...     name = "doubled"
    ...
    ...     def after(self, step):
    ...         step.z.add_(step.z - step.q)
    ...         return step.write()
    >>> model = torch.nn.Linear(2, 2)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.25)
    >>> opt = hu.WriteBack(sgd, "bf16", Doubled(), model=model)
    >>> before = model.weight.detach().clone()
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> opt.step()
    >>> bool((model.weight < before - 0.4).all())
    True
    """

    name: ClassVar[str] = "policy"
    words: ClassVar[str] = ""
    """A readable name for people who do not know the short one."""
    stochastic: ClassVar[bool] = False
    """True if the policy draws random numbers, so that the tensor's name matters."""
    precise: ClassVar[bool] = True
    """True if the policy needs an optimizer that computes in float32 or wider to preserve updates."""
    kernel: ClassVar[Kernel | None] = None
    """Kernel settings for one pass, batches and rehearsals; None if only :meth:`after` implements it."""
    bytes_kept: ClassVar[float] = 0.0
    """Bytes per weight that the policy keeps beside the code, by default."""
    offers: ClassVar[tuple[tuple[str, float], ...]] = ()
    """The names that a verdict recommends, each with its bytes per weight beside the code."""
    why_kept: ClassVar[str] = "what is not written is carried to the next step"
    """Why an unchanged code is not a lost update."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Keys of state that follows from the options; it is not sharded, and a loaded copy must equal it."""

    def __init_subclass__(cls) -> None:
        """Drop an inherited kernel, which does not implement what the subclass changes."""
        super().__init_subclass__()
        if "kernel" not in cls.__dict__:
            cls.kernel = None

    def __post_init__(self) -> None:
        for name, allowed in self.options().items():
            value = getattr(self, name)
            if not any(type(value) is type(a) and value == a for a in allowed.values()):
                raise UsageError(
                    f"{type(self).__name__}({name}=...) takes {' or '.join(allowed)}, not {value!r}."
                )

    @classmethod
    def options(cls) -> dict[str, dict[str, Any]]:
        """Return the options that a name can carry, each with its allowed values by printed form."""
        return _options(cls)  # type: ignore[arg-type]  # a class can be hashed

    @property
    def spec(self) -> str:
        """The name with its options, for saved state and reports."""
        texts = []
        for name, allowed in self.options().items():
            value = getattr(self, name)
            texts.append(f"{name}={next(text for text, option in allowed.items() if option == value)}")
        return f"{self.name}({','.join(texts)})" if texts else self.name

    # ---- before a run ---------------------------------------------------------------------------

    def check(self, grid: Grid, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Refuse an unsupported grid or optimizer before anything is changed.

        Args:
            grid: The grid of the parameter.
            optimizer: The wrapped optimizer.
            group: The parameter group.

        Raises:
            UsageError: If the policy does not support the combination.
        """

    def check_storage(self, dtype: torch.dtype, storage: str) -> None:
        """Refuse an unsupported parameter type or storage.

        Raises:
            UsageError: If the policy does not support it.
        """

    def on_shard(self, offset: int, numel: int) -> Policy:
        """Return the policy for a shard that begins at ``offset`` of a tensor of ``numel`` coordinates."""
        return self

    def projection(self, grid: Grid) -> Grid:
        """Return the grid that the first codes are rounded to."""
        return grid

    def start(self, raw: torch.Tensor, projected: torch.Tensor, name: str) -> State:
        """Return the tensors that this policy keeps for one parameter.

        Args:
            raw: The values before projection.
            projected: The first stored values.
            name: The name of the parameter.
        """
        return {}

    # ---- a step ---------------------------------------------------------------------------------

    def resync(self, q: torch.Tensor, state: State, grid: Grid) -> None:
        """Reset state that does not belong to ``q``, such as after the user has assigned weights."""

    def before(self, q: torch.Tensor, p: torch.Tensor, state: State) -> None:
        """Change the values that the optimizer moves; ``p`` equals ``q`` on entry."""

    def after(self, step: Step) -> Written:
        """Write the next stored values over ``step.z``."""
        return step.write()

    def spread(self, whole: torch.Tensor, state: State) -> None:
        """Write a partial state into a whole tensor of stored values."""

    def collect(self, whole: torch.Tensor, state: State) -> None:
        """Read a partial state from a whole tensor."""

    # ---- a saved state --------------------------------------------------------------------------

    def misfits(self, q: torch.Tensor, state: State, grid: Grid) -> tuple[torch.Tensor, str] | None:
        """Find where state is inconsistent with the stored values ``q``, and say what is wrong."""
        return None

    def to_shards(self, state: State, like: torch.Tensor) -> State:
        """Return state in the shape of a shard, as torch's checkpoints need it."""
        return state

    def from_shards(self, key: str, value: torch.Tensor, state: State) -> torch.Tensor:
        """Invert :meth:`to_shards` for one tensor of the state."""
        return value


@cache
def _options(kind: type[Policy]) -> dict[str, dict[str, Any]]:
    hints = get_type_hints(kind) if fields(kind) else {}
    options = {f.name: _allowed(hints[f.name], f.default) for f in fields(kind)}
    return {name: allowed for name, allowed in options.items() if allowed}


def _allowed(hint: Any, default: Any) -> dict[str, Any]:
    """Return the allowed values of an option by printed form; empty if it is not printed."""
    if isinstance(default, torch.dtype):
        return {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16)}
    if isinstance(default, bool):
        return {str(value): value for value in (False, True)}
    return {value: value for value in get_args(hint) if isinstance(value, str)}
