"""See the batches that DataLoaders give a script's training, and cut them to their first sequences.

That makes a twin of any script that draws its batches from a ``torch.utils.data.DataLoader``, whatever its
arguments are: it makes as many updates, on parts of the same batches in the same order. Batches are left
whole inside the script's own evaluation and wherever gradients are off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from halfulp.errors import UsageError
from halfulp.pilots.rungs import first, size


class TrainingBatches:
    """While it is entered, training batches are counted, and cut where a twin is made.

    Args:
        part: How many sequences of each are kept; None for all.
        evaluating: Whether the script evaluates just now.
    """

    def __init__(self, part: int | None, evaluating: Callable[[], bool]) -> None:
        self.part, self.evaluating = part, evaluating
        self.largest, self.cut = 0, 0
        """Sequences of the largest batch, and how many batches were cut."""
        self._iter = DataLoader.__iter__

    def __enter__(self) -> Self:
        plain = self._iter

        def batches(loader: DataLoader[Any]) -> Iterator[Any]:
            # What begins to iterate draws random numbers: here that is now, and in a generator later.
            return (self._seen(loader, batch) for batch in plain(loader))

        DataLoader.__iter__ = batches  # type: ignore[assignment, method-assign]  # put back on exit
        return self

    def __exit__(self, *_: object) -> None:
        DataLoader.__iter__ = self._iter  # type: ignore[method-assign]  # what was there

    def _seen(self, loader: DataLoader[Any], batch: Any) -> Any:
        if self.evaluating() or not torch.is_grad_enabled() or loader.batch_sampler is None:
            return batch
        try:
            count = size(batch)
        except UsageError:
            return batch
        if loader.batch_size is not None and count > loader.batch_size:
            return batch  # its first dimension is something else
        self.largest = max(self.largest, count)
        if self.part is None or count <= self.part:
            return batch
        self.cut += 1
        return first(batch, self.part)
