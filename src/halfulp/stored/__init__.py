"""Stored values at rest: which of them one step can reach, and which of them changed.

Both look at codes alone, not at a run: :mod:`~halfulp.stored.checking` at those in a checkpoint, before any
training; :mod:`~halfulp.stored.sync` at those that a trainer holds now and held at the last sync.
"""

from halfulp.stored.checking import Check, check
from halfulp.stored.sync import Change, Part, Sync

__all__ = ["Change", "Check", "Part", "Sync", "check"]
