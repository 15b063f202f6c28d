"""A recording that stays in memory: what ``Audit(out=Memory())`` writes to instead of a folder.

``memory.trace`` is read like a trace that was opened. For a run that saves and resumes itself,
:meth:`Memory.save` gives everything as tensors, and an audit goes on with ``Memory.loaded(tensors)``,
``resume=True`` and ``first_step=``.

>>> model = torch.nn.Linear(8, 8)
>>> opt = torch.optim.SGD(model.parameters(), lr=1e-6)
>>> memory = Memory()
>>> from halfulp.audit import Audit
>>> with Audit(opt, "bf16", model=model, out=memory):
...     _ = model(torch.ones(1, 8)).sum().backward()
...     opt.step()
>>> memory.trace.frozen("bf16").shape
(1,)
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import torch

from halfulp.errors import UsageError
from halfulp.trace import parquet
from halfulp.trace.reading import SCHEMAS
from halfulp.trace.recorded import Recorded
from halfulp.trace.schema import LOSSES, tables_of
from halfulp.trace.writing import check_same

_MANIFEST, _TABLE, _STATE = "manifest", "table.", "state."


@dataclass
class Memory:
    """Where an audit's rows go, in this process."""

    manifest: dict[str, Any] = field(default_factory=dict)
    parts: list[dict[str, pl.DataFrame]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    last_step: int = 0
    roles: dict[str, Memory] = field(default_factory=dict)
    """Of what accumulates beside the weights; :meth:`save` leaves them out."""

    def begin(self, manifest: dict[str, Any]) -> Memory:
        """Take up recording, under the settings that it was begun with."""
        if self.manifest:
            check_same("this memory", self.manifest, manifest)
        self.manifest = self.manifest or manifest
        return self

    @property
    def count(self) -> int:
        """Parts so far."""
        return len(self.parts)

    def check(self) -> None:
        """There is no folder that could be moved."""

    def write_manifest(self) -> None:
        """It is kept as it is."""

    def commit(
        self,
        tables: dict[str, pl.DataFrame],
        state: dict[str, torch.Tensor],
        kept: dict[str, torch.Tensor] | None = None,
        *,
        last_step: int,
    ) -> None:
        """Keep the steps since the last part."""
        self.parts.append(tables)
        self.state = {name: value.clone() for name, value in state.items()}
        self.last_step = last_step

    def load_state(self) -> dict[str, torch.Tensor]:
        """What a resumed recording needs."""
        return dict(self.state)

    def discard_if_empty(self) -> bool:
        """There is no folder to remove."""
        return not self.parts

    def note_trouble(self, what: str) -> None:
        """There is no disk that could refuse."""

    def close(self) -> None:
        """There is nothing to let go of."""

    @property
    def trace(self) -> MemoryTrace:
        """What was recorded, to be read."""
        roles = {name: memory.trace for name, memory in self.roles.items() if memory.parts}
        return MemoryTrace(self.manifest, tuple(self.parts), self.state, roles)

    # ---- saving ----

    def save(self) -> dict[str, torch.Tensor]:
        """Everything, as tensors: the tables as the bytes of Parquet files."""
        made = {_MANIFEST: _bytes(json.dumps({**self.manifest, "last_step": self.last_step}).encode())}
        if self.parts:
            for name in dict.fromkeys(name for part in self.parts for name in part):
                buffer = io.BytesIO()
                found = [part[name] for part in self.parts if name in part]
                pl.concat(found, how="diagonal").write_parquet(buffer)
                made[_TABLE + name] = _bytes(buffer.getvalue())
        return {**made, **{_STATE + name: value for name, value in self.state.items()}}

    @classmethod
    def loaded(cls, tensors: Mapping[str, torch.Tensor]) -> Memory:
        """What :meth:`save` gave."""
        manifest = json.loads(bytes(tensors[_MANIFEST].numpy()))
        last = manifest.pop("last_step")
        tables = {n: tensors[_TABLE + n] for n in SCHEMAS if _TABLE + n in tensors}
        part = {name: parquet.read(bytes(t.numpy()), f"the table {name}") for name, t in tables.items()}
        state = {n.removeprefix(_STATE): t.clone() for n, t in tensors.items() if n.startswith(_STATE)}
        return cls(manifest, [part] if part else [], state, last)


@dataclass(frozen=True)
class MemoryTrace(Recorded):
    """A recording in memory, to be read like a trace."""

    manifest: dict[str, Any]
    parts: tuple[dict[str, pl.DataFrame], ...]
    followed: dict[str, torch.Tensor]
    beside: dict[str, MemoryTrace] = field(default_factory=dict)

    @property
    def roles(self) -> dict[str, MemoryTrace]:
        return self.beside

    @property
    def where(self) -> str:
        return "this memory"

    @property
    def recorded(self) -> bool:
        return bool(self.parts)

    def scan(self, table: str = "grids") -> pl.LazyFrame:
        known = (*tables_of(self.manifest), LOSSES)
        if table not in known or not self.parts:
            raise UsageError(
                f"{self.where} has {', '.join(known) if self.parts else 'no step'}, not {table!r}."
            )
        empty = pl.DataFrame(schema=SCHEMAS[table])
        found = (part[table] for part in self.parts if table in part)
        return pl.concat([empty, *found], how="diagonal").lazy()  # older ones lack columns

    def state(self) -> dict[str, torch.Tensor]:
        return self.followed


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
