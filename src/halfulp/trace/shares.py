"""Say which share of the updates was lost, by one definition for traces, pages and the live view."""

from __future__ import annotations

import numpy as np

from halfulp.trace.columns import Array


def lost_share(frozen: Array, zero: Array, bad: Array, numel: Array) -> Array:
    """Return the share of updates that is lost.

    This is *the* share of halfulp: in a verdict, on a page, in ``Trace.frozen``, in ``audit.latest`` and in
    every logger. An update is a finite proposal other than zero; it is lost if the stored code stays.
    Where there was no update there is no share: such a step is part of no average.

    Args:
        frozen: Counts of coordinates that are frozen.
        zero: Of those whose proposal is zero, see :func:`known_zero`.
        bad: Of those that are not finite.
        numel: Of all.

    Returns:
        The shares; NaN where there was no update.

    >>> lost_share(
    ...     np.array([9, 10, 2, 0]), np.array([8, 10, 0, 0]), np.array([0, 0, 6, 10]), np.array([10] * 4)
    ... )
    array([0.5, nan, 0.5, nan])
    """
    updates = numel - zero - bad
    lost = np.maximum(frozen - zero, 0)
    return np.where(updates > 0, lost / np.maximum(updates, 1), np.nan)


def known_zero(unchanged: Array, known: Array, rates: Array, movable: Array) -> Array:
    """Return how many proposals of a tensor's step are known to be zero.

    If weights are stored on a grid and only their change is seen, a lost update looks like no update, unless
    the whole tensor stayed at a learning rate of 0, which multiplies the decay as well.

    Args:
        unchanged: Counts of changes of zero.
        known: Whether proposals of the tensor are known.
        rates: Its learning rates; NaN if unknown.
        movable: Counts of its finite coordinates.

    >>> counts = np.array([3, 3, 8, 8])
    >>> known_zero(
    ...     counts, np.array([True, False, False, False]), np.array([0.1, 0, 0.1, 0]), np.array([8] * 4)
    ... )
    array([3, 0, 0, 8])
    """
    return np.where(known | ((rates == 0) & (unchanged == movable)), unchanged, 0)
