"""Weight sync: the stored values that changed since the last sync, sent and applied exactly.

The trainer has a :class:`~halfulp.Sync`, which takes a :class:`~halfulp.checkpoints.Change`; the copy has a
:class:`~halfulp.Receiver`, which applies it.
"""

from halfulp.checkpoints.sync.tracker import Sync

__all__ = ["Sync"]
