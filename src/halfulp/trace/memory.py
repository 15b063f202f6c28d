"""Keep a recording in memory, and read it as a trace."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from halfulp import documents
from halfulp.errors import RESTORE, CorruptionError, TamperingError, UsageError
from halfulp.tensors import raw
from halfulp.trace import columns
from halfulp.trace.columns import SCHEMAS, Columns
from halfulp.trace.recorded import Recorded
from halfulp.trace.schema import LOSSES, tables_of
from halfulp.trace.writer import check_same

_MANIFEST, _TABLE, _STATE = "manifest", "table.", "state."
_DIGEST = "sha256_of_tensors"
_SAVED = "the saved memory"


@dataclass
class Memory:
    """Keep the rows of an audit in this process: ``Audit(out=Memory())`` writes to no folder.

    For a run that saves and resumes itself, :meth:`save` returns everything as tensors, and an audit
    continues with ``Memory.loaded(tensors)``, ``resume=True`` and ``first_step=``.

    >>> from halfulp.audit import Audit
    >>> model, memory = torch.nn.Linear(8, 8), Memory()
    >>> opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    >>> with Audit(opt, "bf16", model=model, out=memory):
    ...     _ = model(torch.ones(1, 8)).sum().backward()
    ...     opt.step()
    >>> memory.trace.frozen("bf16").shape
    (1,)
    """

    manifest: dict[str, Any] = field(default_factory=dict)
    parts: list[dict[str, Columns]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    last_step: int = 0
    roles: dict[str, Memory] = field(default_factory=dict)
    """Recordings of tracked states beside the weights; :meth:`save` does not include them."""

    def begin(self, manifest: dict[str, Any]) -> Memory:
        """Begin recording, or continue it under the settings that it was begun with."""
        if self.manifest:
            check_same("this memory", self.manifest, manifest)
        self.manifest = self.manifest or manifest
        return self

    @property
    def count(self) -> int:
        """The number of parts so far."""
        return len(self.parts)

    def check(self) -> None:
        """Do nothing: there is no folder that could be moved."""

    def write_manifest(self) -> None:
        """Do nothing: the manifest is already kept."""

    def commit(self, tables: dict[str, Columns], state: dict[str, torch.Tensor], *, last_step: int) -> None:
        """Keep the steps since the last part."""
        self.parts.append(tables)
        self.state = {name: value.clone() for name, value in state.items()}
        self.last_step = last_step

    def load_state(self) -> dict[str, torch.Tensor]:
        """Return the state that a resumed recording needs."""
        return dict(self.state)

    def discard_if_empty(self) -> bool:
        """Return True if nothing was recorded; there is no folder to remove."""
        return not self.parts

    def note_trouble(self, what: str) -> None:
        """Do nothing: there is no disk that could fail."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    @property
    def trace(self) -> MemoryTrace:
        """The recording so far, for reading."""
        roles = {name: memory.trace for name, memory in self.roles.items() if memory.parts}
        return MemoryTrace(self.manifest, tuple(self.parts), self.state, roles)

    # ---- saving ----

    def save(self) -> dict[str, torch.Tensor]:
        """Return everything as tensors: each column of a table, the state, and the manifest with digests."""
        saved: dict[str, torch.Tensor] = {}
        if self.parts:
            for name in dict.fromkeys(name for part in self.parts for name in part):
                whole = columns.concat([part[name] for part in self.parts if name in part])
                saved |= {_TABLE + key: t for key, t in columns.packed({name: whole}).items()}
        saved |= {_STATE + name: value for name, value in self.state.items()}
        stated = {**self.manifest, "last_step": self.last_step, _DIGEST: _digest(saved)}
        return {_MANIFEST: _bytes(documents.sealed(stated)), **saved}

    @classmethod
    def loaded(cls, tensors: Mapping[str, torch.Tensor]) -> Memory:
        """Restore a memory from the tensors that :meth:`save` returned.

        Args:
            tensors: The tensors by name.

        Raises:
            CorruptionError: If they are not the tensors of a memory, or are damaged.
            TamperingError: If they are not what was saved.
        """
        if _MANIFEST not in tensors:
            raise CorruptionError(
                f"{_SAVED} is no recording: it has no {_MANIFEST}, which Memory.save gives."
            )
        manifest = documents.parsed(bytes(raw(tensors[_MANIFEST])), _SAVED, "the manifest of a recording")
        last = documents.Fields(manifest, _SAVED).whole("last_step")
        if documents.DIGEST in manifest:  # which earlier releases did not state
            documents.check_digest(manifest, _SAVED)
            saved = {n: t for n, t in tensors.items() if n.startswith((_TABLE, _STATE))}
            if _digest(saved) != manifest[_DIGEST]:
                raise TamperingError(
                    f"{_SAVED} is not what it was: the SHA-256 of its tensors differs. {RESTORE}"
                )
        manifest = {k: v for k, v in manifest.items() if k not in ("last_step", _DIGEST, documents.DIGEST)}
        tables = {n.removeprefix(_TABLE): t.clone() for n, t in tensors.items() if n.startswith(_TABLE)}
        part = {
            table: columns.unpacked(tables, table, tuple(schema), _SAVED)
            for table, schema in SCHEMAS.items()
            if f"{table}/step" in tables
        }
        state = {n.removeprefix(_STATE): t.clone() for n, t in tensors.items() if n.startswith(_STATE)}
        return cls(manifest, [part] if part else [], state, last)


@dataclass(frozen=True)
class MemoryTrace(Recorded):
    """A recording in memory that is read like a trace."""

    manifest: dict[str, Any]
    parts: tuple[dict[str, Columns], ...]
    followed: dict[str, torch.Tensor]
    beside: dict[str, MemoryTrace] = field(default_factory=dict)

    @property
    def roles(self) -> dict[str, MemoryTrace]:
        """Return the traces of optimizer states, gradients and copies."""
        return self.beside

    @property
    def where(self) -> str:
        """Name the trace in messages."""
        return "this memory"

    @property
    def recorded(self) -> bool:
        """Return True if a step was recorded."""
        return bool(self.parts)

    def scan(self, table: str = "grids", *names: str) -> Columns:
        """Return a table, or the named columns of it."""
        known = (*tables_of(self.manifest), LOSSES)
        if table not in known or not self.parts:
            raise UsageError(
                f"{self.where} has {', '.join(known) if self.parts else 'no step'}, not {table!r}."
            )
        tables = [part[table] for part in self.parts if table in part] or [columns.empty(table)]
        return columns.concat([t.select(*names) if names else t for t in tables])

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that rehearsals are resumed from."""
        return self.followed


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of tensors: their names, types, shapes and bytes."""
    running = hashlib.sha256()
    for name, t in sorted(tensors.items()):
        running.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
        running.update(raw(t))
    return running.hexdigest()


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
