"""Validation: nothing is trusted but the seal and the raw records.

The folder is read with every digest checked (`reading`), its inventory is taken (no file too many or too
few), and its result is computed again from the records with the sealed gates and rules. What is damaged is
named and is an error (exit code 3).

What validation cannot do by itself is tell a study from one that was forged as a whole. For that it
must be given something from outside: a digest that was published at seal or close, or a public key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from halfulp.errors import CorruptionError, TamperingError
from halfulp.study import loading, result
from halfulp.study import seal as seals
from halfulp.study.declaration import Protocol, changes
from halfulp.study.export import EXPORTED, check_statement
from halfulp.study.ledger import Ledger
from halfulp.study.page import Validation, counted
from halfulp.study.protocol import Json
from halfulp.study.reading import Opened, open_study
from halfulp.study.store import Store
from halfulp.text import count

# On another processor or with other libraries, sums of the same numbers are taken in another order. A sum of
# 1e5 doubles is then off by at most about 1e5 * 2**-53 = 1.1e-11 of the sum of magnitudes. Relative to the
# estimand's largest value, so that one near zero may differ by what the others do.
ROUNDING = 1e-10


def validate(
    folder: Path,
    *,
    expect: str = "",
    strict_code: bool = False,
    code: bool = True,
    replay: Sequence[str] | None = None,
    data_folder: Path | None = None,
    public_key: Path | None = None,
    workers: int | None = None,
) -> Validation:
    """Check a study's folder. `replay` names cells to run again; an empty list means all."""
    running = Store(folder).holder
    opened = open_study(folder)
    store, events, sealed, protocol = opened.store, opened.events, opened.sealed, opened.protocol
    records = opened.by_cell
    page = Validation(study=protocol.study, scale=protocol.scale)
    if expect or public_key is None:
        _expect(expect, events, page)
    _check_inventory(opened, page)
    if public_key is not None or any((folder / name).exists() for name in EXPORTED):
        page.authenticated.append(check_statement(folder, public_key))
    page.authenticated += counted(protocol, sealed, events, records)
    if opened.result is None:
        done = f"{len(events.records)} of {sum(len(s.cells) for s in protocol.stages)} cells have records"
        by = f"; process {running} is running it now" if running else ""
        page.problems.append(f"incomplete: {done}, the study is not closed{by}. Run it again to go on.")
        return page
    _check_result(opened, opened.result, page, code=code, strict=strict_code)
    if replay is not None:
        from halfulp.study.replay import replay_cells

        replay_cells(store, sealed, protocol, events, records, page, replay, data_folder, workers)
    else:
        page.not_checked.append("that the cells give these records: no cell was run again (--replay does)")
    return page


def _expect(expect: str, events: Ledger, page: Validation) -> None:
    if not expect:
        page.not_checked.append(
            "that this is the study that was published: give the digest printed at seal or close (--expect)"
        )
    elif events.closed is not None and expect == events.closed["digest"]:
        page.authenticated.append("the closing digest is the expected one: history, records and result")
    elif expect == events.seal:
        page.authenticated.append("the seal's digest is the expected one: protocol, code, data, environment")
        page.not_checked.append("records and result against an outside digest: the seal came before them")
    else:
        raise TamperingError(
            f"{events.path.parent} is not the expected study: neither its seal ({events.seal}) nor its "
            f"closing digest ({events.closed['digest'] if events.closed else 'none'}) is {expect[:80]!a}."
        )


def _check_inventory(opened: Opened, page: Validation) -> None:
    store, events = opened.store, opened.events
    present, expected = store.present(), opened.files
    present -= set(EXPORTED) if events.closed else set()  # checked with the statement
    missing, extra = sorted(expected - present), sorted(present - expected)
    if missing:
        raise CorruptionError(f"{store.folder / missing[0]} is missing, but the ledger names it.")
    leftover = [name for name in extra if name.startswith(("records/", "attached/", "seals/"))]
    if events.closed is None and extra == leftover:
        if leftover:
            page.not_checked.append(
                f"{count(len(leftover), 'file')} that an interrupted run left and the ledger does not name"
            )
    elif events.closed is None and "result.json" in extra:
        raise CorruptionError(
            f"{store.result_file} is there, but {store.ledger_file} does not say that the study was closed: "
            "it was shortened, or the run was stopped at its last step. Run the study again to close it."
        )
    elif extra:
        raise CorruptionError(f"{store.folder / extra[0]!s} does not belong to the study: no event names it.")
    for name in store.strange_work(opened.protocol) if events.closed else ():
        raise CorruptionError(f"{store.folder / name} does not belong to the study, which is closed.")


def _check_result(
    opened: Opened, stored: dict[str, Json], page: Validation, *, code: bool, strict: bool
) -> None:
    """Compute the result again; the stored one must be what follows from the records."""
    store, events, sealed, protocol = opened.store, opened.events, opened.sealed, opened.protocol
    page.label, page.scientific_result = stored["label"], stored["scientific_result"]
    page.says = stored.get("says", "")
    strange = sorted(set(stored["estimands"]) ^ set(protocol.estimands))
    if strange:
        known = "declares" if strange[0] in protocol.estimands else "does not declare"
        raise TamperingError(
            f"{store.result_file} does not follow from the records: its estimands are not those of the "
            f"protocol, which {known} {strange[0]}."
        )
    if not code:
        again = result.assemble(protocol, events, sealed.get("evidence", {}), stored["estimands"])
        _same_result(store, stored, again, moved=False)
        page.recomputed.append("gates and label, from the estimands that result.json states")
        page.problems.append(
            "estimands were not recomputed from the records, because no code was run (--no-code)"
        )
        return
    try:
        source = loading.load_sealed(sealed["code"]["study"], store.study_file)
        moved = _compare_code(sealed, source, protocol, page, strict)
        numbers = result.values(source.study, protocol, opened.records)
    except (Exception, SystemExit) as error:  # of the study's own code, which may have moved on
        raise RecomputationError(
            f"{store.result_file} cannot be recomputed by this halfulp: {type(error).__name__}: {error}"
        ) from error
    again = result.assemble(protocol, events, sealed.get("evidence", {}), numbers)
    rounded = _same_result(store, stored, again, moved=moved)
    values = count(sum(len(units) for units in again["estimands"].values()), "value")
    how = (
        f"; {rounded} of them agree only to {ROUNDING:g}, on other code or hardware"
        if rounded
        else ", bit for bit"
    )
    page.recomputed.append(f"{values} of {count(len(again['estimands']), 'estimand')}{how}")
    page.recomputed.append(
        f"{count(len(again['gates']), 'gate')} and the label, with the sealed thresholds and rules"
    )


def _compare_code(
    sealed: Mapping[str, Json], source: loading.Source, protocol: Protocol, page: Validation, strict: bool
) -> bool:
    """State how code and environment differ from the sealed ones."""
    now = {
        "code": seals.as_sealed(sealed, source),
        "data": sealed["data"],
        "environment": seals.environment(),
    }
    found = seals.compare(dict(sealed), now)
    try:
        declared = Protocol.of(source.study, protocol.scale)
        redeclared = list(changes(protocol.content, declared.content))
    except (Exception, SystemExit) as error:  # of the study's own code, which may have moved on
        redeclared = [f"it cannot be declared: {type(error).__name__}: {error}"]
    if "code" in found:
        page.not_checked.append(
            f"the sealed code itself: this halfulp differs in {count(len(found['code']), 'place')}, "
            f"{found['code'][0]} ..."
        )
        if strict:
            page.problems.append("the code is not the sealed code (--strict-code)")
    else:
        page.authenticated.append("the code that recomputes is the sealed code, file by file")
    if redeclared and (
        strict or not found
    ):  # what runs is what was sealed, so it must declare what was sealed
        page.problems.append(
            f"the sealed protocol is not what the code declares: {redeclared[0]}"
            + (" (--strict-code)" if found else "")
        )
    elif redeclared:
        page.not_checked.append(
            f"the study as the code declares it today, which differs: {redeclared[0]} ..."
        )
    if "environment" in found:
        page.not_checked.append(
            f"the sealed environment, which is not this one: {found['environment'][0]} ..."
        )
    return bool(found)


def _same_result(store: Store, stored: dict[str, Json], again: dict[str, Json], *, moved: bool) -> int:
    """How many values differ by rounding alone (`moved`: on other code or hardware); more is an error."""
    rounded = 0

    def near(old: float | None, new: float | None, scale: float) -> bool:
        return moved and old is not None and new is not None and abs(old - new) <= ROUNDING * scale

    different = list(changes({k: stored[k] for k in stored if k not in ("estimands", "gates")},
                             {k: again[k] for k in again if k not in ("estimands", "gates")}))  # fmt: skip
    for name, units in again["estimands"].items():
        before = stored["estimands"].get(name, {})
        scale = max((abs(value) for value in units.values() if value is not None), default=0.0)
        if set(before) != set(units):
            different.append(f"estimands.{name}: the units differ")
            continue
        for unit, value in units.items():
            if near(before[unit], value, scale):
                rounded += before[unit] != value
            elif before[unit] != value:
                different.append(f"estimands.{name}.{unit}: stored {before[unit]}, recomputed {value}")
        for old, new in zip(stored["gates"], again["gates"], strict=False):
            same = old["value"] == new["value"] or near(old["value"], new["value"], scale)
            if new["estimand"] == name and not same:
                different.append(f"gates.{new['name']}: stored {old['value']}, recomputed {new['value']}")
    decided = [[{k: g[k] for k in g if k != "value"} for g in r["gates"]] for r in (stored, again)]
    if decided[0] != decided[1]:
        different.append("gates: the decisions differ")
    if different:
        why = "other code or another environment than the sealed" if moved else "the sealed code"
        error = f"{store.result_file} does not follow from the records, by {why}: {different[0]}."
        raise RecomputationError(error) if moved else TamperingError(error)
    return rounded


class RecomputationError(CorruptionError):
    """Records are intact, but code that moved on computes something else from them."""

    exit_code = 1
