"""Examine stored values: which of them one step can change, and which of them changed.

Everything here reads stored values alone and needs no run. :func:`check` reads one checkpoint before any
training, and :func:`sweep` does so for several learning rates; :func:`diff` compares two checkpoints;
:class:`Sync` compares a trainer's current values with those of the last sync.
"""

from halfulp.checkpoints.check_model import check, sweep
from halfulp.checkpoints.check_result import Check, Sweep
from halfulp.checkpoints.diff_checkpoints import Diff, diff
from halfulp.checkpoints.diff_tensors import Difference
from halfulp.checkpoints.sync.block_fp8 import BlockFp8
from halfulp.checkpoints.sync.changes import Change, Part, join, join_positions
from halfulp.checkpoints.sync.patches import CheckpointWeightPatch, SparseWeightPatch
from halfulp.checkpoints.sync.receiving import Receiver
from halfulp.checkpoints.sync.tracker import Sync

__all__ = [
    "BlockFp8", "Change", "Check", "CheckpointWeightPatch", "Diff", "Difference", "Part", "Receiver",
    "SparseWeightPatch", "Sweep", "Sync", "check", "diff", "join", "join_positions", "sweep",
]  # fmt: skip
