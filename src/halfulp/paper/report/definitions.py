"""The paper's tables of words: what is observed, who does what about it, and what holds how firmly.

They are tab:definitions, tab:regimes and tab:evidence-layers.

Each row names what halfulp calls it, and a value from records where there are some, so that a word can be
compared with a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from halfulp.measures.crossings import crossing
from halfulp.paper.arms import measures
from halfulp.paper.arms.bundle import Unit
from halfulp.paper.studies import matched_10k, neox_transfer
from halfulp.study.protocol import Records, Table

EXAMPLE = "e5m2-1337"
"""The unit of `matched-10k` whose numbers stand beside the definitions."""

_REGIMES: tuple[tuple[str, str, str, str, str], ...] = (
    ("mixed precision", "low-precision compute, fp32 masters", "every update is added to the finer copy",
     "none: stored weights have no dead zone", "master"),
    ("nearest write-back", "low-precision weights alone", "nothing: what is below half a gap is lost",
     "a float32 run of the same seed and schedule", "rne"),
    ("stochastic rounding, FORGE", "low-precision weights alone", "a small update moves a code by chance",
     "none: applied everywhere", "sr"),
    ("ECO", "low-precision weights alone", "the rounding error goes back through the first moment",
     "none: applied everywhere", "eco"),
    ("Kahan summation", "low-precision weights and a carry", "the rounding error is added to the next update",
     "none: applied everywhere", "kahan"),
    ("masters for some tiles", "low-precision weights, some tiles fp32", "exact bytes go where they count",
     "one source run of the regime, for many targets", "tile-master"),
    ("PULSESync", "a bf16 copy that is sent", "what does not change is not sent",
     "none: counted at every cast", ""),
    ("ULP injection (Yu)", "low-precision weights alone", "a lost update is noticed and replaced by one code",
     "none: a test at every update", ""),
    ("Quartet II, dMX", "NVFP4 training, MXFP deployment", "unbiased estimates, or a learned format by layer",
     "none: another objective", ""),
)  # fmt: skip


def definitions(records: Records | None) -> Table:
    """Tabulate what is observed, with the values of one run of `matched-10k`."""
    values: list[float | None] = [None] * 5
    where = ""
    if records is not None:
        unit = Unit(matched_10k.RUNS, records, EXAMPLE)
        seen = measures.measured(unit, "core")
        at = crossing(seen)
        values = [float(seen[-1]), at.first, at.persistent, measures.never_moved(unit, "rne"),
                  measures.loss(unit, "rne")]  # fmt: skip
        where = f" Value: nearest arm of {EXAMPLE} in matched-10k, core, last update."
    words = (
        ("coordinate freeze", "one stored value is the same before and after an update; both zeros are one",
         "frozen"),
        ("frozen fraction", "share of coordinates that an update left", "trace.frozen"),
        ("first majority crossing", "first update that left at least half", "crossing(f).first"),
        ("persistent majority crossing", "first update from which on every one left at least half",
         "crossing(f).persistent"),
        ("never-moved fraction", "share of coordinates that no update has moved so far", "never_moved"),
        ("loss plateau", "what the held-out loss does; no frozen fraction implies it", "loss"),
    )  # fmt: skip
    return Table(
        columns=("observable", "definition", "in halfulp", "value"),
        rows=[(*said, value) for said, value in zip(words, (None, *values), strict=True)],
        caption=f"What is observed, so that events of the arithmetic are not taken for their effects.{where}",
    )


def regimes(records: Records | None) -> Table:
    """Tabulate ways to live with lost updates, and the share of the gap each won back in `neox-transfer`."""
    rows = [
        (who, where, what, needs, policy, *_recovered(records, policy))
        for who, where, what, needs, policy in _REGIMES
    ]
    return Table(
        columns=("regime", "stored as", "response", "forecast it needs", "policy here", "won back, e5m2",
                 "won back, e4m3@128"),
        rows=rows,
        caption="Ways to live with lost updates. Won back: mean share of the gap over the three targets of "
        "neox-transfer; nearest has the gap itself.",
    )  # fmt: skip


def _recovered(records: Records | None, policy: str) -> Iterator[float | None]:
    runs = neox_transfer.RUNS
    for condition in runs.conditions:
        if records is None or policy not in runs.arms:
            yield None
            continue
        values = [measures.recovery(unit, policy) for unit in runs.over(records, condition)]
        known = [v for v in values if v is not None]
        yield sum(known) / len(known) if known else None


def evidence() -> Table:
    """Tabulate what holds exactly and what is an observation, and the studies that say so here."""
    return Table(
        columns=("what", "how firmly", "studies"),
        rows=(
            ("Q(q + d) == q at the stored value", "exact: an event of arithmetic, counted", "theory"),
            ("the reference's codes are the run's", "a proxy, as long as the paths agree", "margin"),
            ("frozen fraction and its onset", "forecast and held against runs, in aggregate",
             "two-layer, emulator, cnn, char-gpt, modern-transfer, source-amortized"),
            ("pathwise or calibrated uncertainty", "not supported once paths part: its gates fail",
             "margin"),
            ("crossing to loss", "a heuristic classifier of learning, no forecast of a final loss",
             "phase-diagram, phase-edge, midpoint"),
            ("scores of tiles", "first-order proxies: to be lost is not to be important",
             "tile-screen, leverage-primary, saliency-challenge, mask-reuse"),
        ),
        caption="The paper's hierarchy of evidence. Where a layer fails, the exact event below it stands.",
    )  # fmt: skip


def tables(by_study: Mapping[str, Records]) -> tuple[Table, Table, Table]:
    """All three, with numbers of the studies that are there."""
    return definitions(by_study.get("matched-10k")), regimes(by_study.get("neox-transfer")), evidence()
