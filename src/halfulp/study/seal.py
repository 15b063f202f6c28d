"""Seal a study in a folder, or check that everything there is still what was sealed.

A seal fixes the protocol, the code, the data and the environment, each by its digest; `loading` says what
they are. A sealed study refuses to go on when any of them differs, and says which. The other files of the
package are noted with their digests, and so is the state of a git tree, flagged when it is dirty; they decide
nothing.

A folder belongs to a study from the moment its ledger has a first line. Before that it belongs to somebody
else, unless it is empty or a sealing began in it. To make this visible, a sealing first writes a plan,
``work/sealing.json``: the size and digest of every file that it is going to make. Files appear whole, so
whatever a kill leaves at any point is one of those files, or half a first line of the ledger. Anything else
is refused and not touched. Names alone are not enough to decide, because a user's own ``study.py``,
``evidence`` or ``work`` has the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from halfulp import canonical, files
from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.study import ledger, provenance
from halfulp.study.declaration import FORMAT, IDENTITY, MOST_BYTES, Protocol, changes, check, each
from halfulp.study.evidence import Declared, Identity, Used, open_study
from halfulp.study.gates import SCOPES, condition
from halfulp.study.ledger import Ledger
from halfulp.study.loading import Source
from halfulp.study.protocol import Json
from halfulp.study.store import EXPORTED, Binding, Store, identity
from halfulp.study.validate import validate
from halfulp.text import count, plain

WIDTH, TABLE = 100, 120
"""The widths of a line and of a table; in a wider table, each cell becomes a paragraph."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.,@/+-]*")

Plan = dict[str, dict[str, Json]]  # size and digest, by the path from the top


@dataclass
class OpenStudy:
    """A study that is open for writing, with its lock held and all its files checked."""

    source: Source
    store: Store
    ledger: Ledger
    sealed: dict[str, Json]
    protocol: Protocol
    binding: Binding
    hashed: Mapping[str, Json]
    """The data sets, as `provenance.hash_data` hashed them when the study was opened."""
    attempts: dict[tuple[str, str], int] = field(default_factory=dict)  # of this run


def open_or_seal(
    source: Source, scale: str, out: Path, deviation: str, given: Mapping[str, Path]
) -> OpenStudy:
    """Seal the folder if it is new; otherwise check that everything is still what was sealed."""
    store = Store(out)
    protocol = Protocol.of(source.study, scale)
    events = ledger.reopen(store.ledger_file)
    if not events.events:
        return _seal(source, store, protocol, events, given)
    sealed = store.read_seal(events.seal)
    hashed = provenance.hash_data(protocol.data, source.folder)
    now = make(source, protocol, sealed.get("evidence", {}), hashed, whole="noted" not in sealed)
    changed = _refuse_changes(out, sealed, store.read_protocol(sealed), now, protocol)
    for name, used in _gather(protocol.evidence, given)[0].items() if given else ():
        if used != sealed["evidence"][name]:
            raise TamperingError(f"{given[name]} is not the evidence {name} that {out} was sealed with.")
    study = OpenStudy(source, store, events, sealed, protocol, Binding.of(protocol, sealed), hashed)
    if changed and events.closed is None:
        _deviate(study, changed, provenance.code_digest(now), deviation)
    _check_files(study)
    return study


def _seal(
    source: Source, store: Store, protocol: Protocol, events: Ledger, given: Mapping[str, Path]
) -> OpenStudy:
    evidence, copies = _gather(protocol.evidence, given)
    hashed = provenance.hash_data(protocol.data, source.folder)
    now = make(source, protocol, evidence, hashed)
    content = canonical.dumps(now)
    contents = {f"evidence/{name}": copy for name, copy in copies.items()}
    contents |= {} if source.content is None else {store.study_file.name: source.content}
    contents |= {store.protocol_file.name: protocol.bytes, store.seal_file.name: content}
    _begin(store, contents)
    files.put_all([(store.folder / name, contents[name]) for name in contents], store.work)
    events.append({"event": "sealed", "seal": canonical.sha256(content)})
    files.remove(store.plan_file)
    return OpenStudy(source, store, events, now, protocol, Binding.of(protocol, now), hashed)


def _deviate(study: OpenStudy, changed: dict[str, list[str]], code: str, reason: str) -> None:
    """Refuse other code or another machine than the sealed, or record it for ever."""
    lines = [line for part in changed.values() for line in part]
    known = study.ledger.deviations[-1] if study.ledger.deviations else None
    if not (known and known["changes"] == lines):
        if not reason.strip():
            raise TamperingError(
                f"{study.store.folder} was sealed with another {' and '.join(changed)}; changed since:\n"
                f"{provenance.listed(lines)}\n"
                "Put it back, or seal anew in a folder of its own (--out). To go on all the same, say why "
                "with --deviation: the ledger will hold it, and the label will not be promoted."
            )
        study.ledger.append({"event": "deviation", "reason": plain(reason), "changes": lines, "code": code})
    study.binding = Binding.of(study.protocol, study.sealed, code)


def _check_files(study: OpenStudy) -> None:
    """Refuse a folder that lacks what the ledger names; a record that it does not name is removed."""
    store, events = study.store, study.ledger
    strange = store.strange_work(study.protocol)
    if strange and events.closed is None:
        raise _strange(store, strange[0])
    for name in sorted(open_study(store.folder).extra_files() - set(EXPORTED)):
        if events.closed is None and store.is_unfinished(name, study.protocol):
            files.remove_any(store.folder / name)
        else:
            raise _strange(store, name)


def _strange(store: Store, name: str) -> CorruptionError:
    return CorruptionError(
        f"{store.folder / name} does not belong to the study. Move it away, then run again."
    )


def _gather(
    declared: Sequence[Declared], given: Mapping[str, Path]
) -> tuple[dict[str, Identity], dict[str, bytes]]:
    """Validate the studies given as evidence; return what the seal says of them, and the files to copy."""
    unknown = sorted(set(given) - {one["name"] for one in declared})
    if unknown:
        raise UsageError(f"The study declares no evidence {unknown[0][:120]!a}.")
    identities, copies = {}, {}
    for one in declared:
        name = one["name"]
        if name not in given:
            raise UsageError(
                f"The study needs evidence {name}, a closed study {one['study']} ({one['scale']}): "
                f"--evidence {name}=FOLDER."
            )
        page = validate(given[name])
        if page.exit_code:
            raise UsageError(f"{given[name]} is no evidence, because it is not valid: {page.problems[0]}")
        used = Used(given[name], one)
        identities[name] = used.identity
        for path in used.paths:
            copies[f"{name}/{path.relative_to(used.store.folder).as_posix()}"] = files.read(path)
    return identities, copies


# ---- the content of a seal ----


def make(
    source: Source, protocol: Protocol, evidence: Mapping[str, Json], hashed: Mapping[str, Json], *,
    whole: bool = False,
) -> dict[str, Json]:  # fmt: skip
    """Make the content of seal.json for a study as it is now; `whole`: as the first release wrote it."""
    behind = None if whole else provenance.code(source)
    return {
        "format": FORMAT, "study": protocol.study, "scale": protocol.scale, "protocol": protocol.digest,
        "code": provenance.whole_code(source) if behind is None else behind,
        "data": {name: {"bytes": one["bytes"], "sha256": one["sha256"]} for name, one in hashed.items()},
        "environment": provenance.environment(),
        "git": {
            "package": provenance.git_state(provenance.PACKAGE),
            "study": provenance.git_state(source.folder / source.name) if source.folder else None,
        },
        **({"noted": provenance.noted(behind)} if behind is not None else {}),
        **({"evidence": dict(evidence)} if protocol.evidence else {}),
    }  # fmt: skip


def _refuse_changes(
    out: Path, sealed: dict[str, Json], sealed_protocol: Protocol, now: dict[str, Json], protocol: Protocol
) -> dict[str, list[str]]:
    """Refuse a protocol, data or study file that is not the sealed one; return what else changed."""
    changed = provenance.compare(sealed, now)
    fatal = list(changes(sealed_protocol.content, protocol.content, "protocol")) + changed.pop("data", [])
    own = [line for line in changed.get("code", []) if line.startswith("code.study")]
    if fatal or own:
        raise TamperingError(
            f"{out} was sealed with another study than this one; changed since:\n"
            f"{provenance.listed(fatal + own)}\n"
            "A sealed study does not change. Put it back, or seal the new one in a folder of its own (--out)."
        )
    return changed


def facts(seal: Mapping[str, Json]) -> Iterator[str]:
    """Yield the seal in a few lines."""
    env, digest = seal["environment"], provenance.code_digest(seal)
    package = f"{len(seal['code']['package'])} files"
    yield f"code         halfulp {provenance.version(seal)}, {package}, sha256 {digest}"
    for name, one in seal.get("evidence", {}).items():
        yield f"evidence     {name}: {one['study']} ({one['scale']}), closed sha256 {one['closed']}"
    for part, state in seal["git"].items():
        if state is not None:
            yield f"git          {part}: {state['commit'][:12]}{', DIRTY' if state['dirty'] else ''}"
    for name, one in seal["data"].items():
        yield f"data         {name}, {one['bytes']} bytes, sha256 {one['sha256']}"
    libraries = ", ".join(f"{k} {v}" for k, v in env["libraries"].items() if v)
    yield f"environment  {env['python']}, {libraries}, {env['platform']}, {env['cpu']}"


# ---- a protocol in words ----


def in_words(protocol: Protocol) -> Iterator[str]:
    """Yield all of a protocol, line by line; what cells share is said once."""
    content = protocol.content
    yield f"{content['study']} ({content['scale']})"
    yield ""
    yield f"question     {plain(content['question'])}"
    yield f"units        {plain(content['units'])}"
    for claim in content["not_claimed"]:
        yield f"not claimed  {plain(claim)}"
    for part, values in _parts(content["config"]):
        yield from _packed(f"config       {part}: " if part else "config       ", _listed(values))
    for name in content["data"]:
        yield f"data         {plain(name)}"
    for one in protocol.evidence:
        uses = ", ".join(plain(text) for key in ("records", "attached", "estimands") for text in one[key])
        closed = f"; closed until stage {one['after']} is sealed" if "after" in one else ""
        yield f"evidence     {one['name']}: study {one['study']} ({one['scale']}), of which {uses}{closed}"
    yield f"threads      {content['threads']} a worker process"
    yield f"retries      {content['retries']}"
    for stage in content["stages"]:
        yield ""
        reads = f", reads {', '.join(stage['reads'])}" if stage["reads"] else ""
        gates = f", only if {' and '.join(stage['only_if'])} passed" if "only_if" in stage else ""
        cells = f"{count(len(stage['cells']), 'cell')} by {plain(stage['run'])}"
        clocks = ", holds clocks" if stage.get("clocks") else ""
        yield f"stage {stage['name']}: {stage['kind']}, {cells}{reads}{plain(gates)}{clocks}"
        yield from (f"  {line}".rstrip() for line in _cells(stage["cells"]))
    yield ""
    for estimand in content["estimands"]:
        args = "".join(f", {plain(k)}={_value(v)}" for k, v in estimand.get("args", {}).items())
        yield f"estimand {estimand['name']}: {plain(estimand['what'])} ({plain(estimand['compute'])}{args})"
    for gate in content["gates"]:
        why = f" ({plain(gate['why'])})" if gate["why"] else ""
        comparison = f"{gate['comparison']} {canonical.number(gate['threshold'])}"
        yield f"gate {gate['name']}: {gate['estimand']} {comparison}, {SCOPES[gate['scope']]}{why}"
    for rule in protocol.rules:
        says = f" ({plain(rule.says)})" if rule.says else ""
        yield f"label {plain(rule.label)}{says}: {plain(condition(rule))}"
    yield ""
    yield f"protocol sha256 {protocol.digest}"


def _cells(cells: Sequence[Mapping[str, Json]]) -> Iterator[str]:
    """List cells with their configs: first what all of them share, then a table of what differs."""
    flat = {cell["name"]: _leaves(cell["config"]) for cell in cells}
    keys = list(dict.fromkeys(key for config in flat.values() for key in config))
    shared = [key for key in keys if len({config.get(key) for config in flat.values()}) == 1]
    columns = [key for key in keys if key not in shared]
    first = next(iter(flat.values()))
    yield from _packed("all  " if len(cells) > 1 else "", _listed({key: first[key] for key in shared}))
    table = [["cell", *columns]]
    table += [[name, *(config.get(key, "-") for key in columns)] for name, config in flat.items()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if columns and sum(widths) + 2 * len(columns) <= TABLE:
        for row in table:
            yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        return
    for name, config in flat.items():
        own = {key: config[key] for key in columns if key in config}
        yield from _packed(f"{name}  ", _listed(own) or [""])


def _listed(values: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def _packed(start: str, items: Sequence[str]) -> Iterator[str]:
    """Put items side by side, as many as fit on a line."""
    line = start
    for i, item in enumerate(items):
        if i and len(line) + len(item) > WIDTH:
            yield line.rstrip()
            line = " " * len(start)
        line += f"{item}  "
    if items:
        yield line.rstrip()


def _parts(config: Mapping[str, Json], name: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every mapping in a config by its dotted name, with the values that are no mappings."""
    inside = {key: value for key, value in config.items() if isinstance(value, Mapping) and value}
    own = {plain(key): _value(value) for key, value in config.items() if key not in inside}
    if own:
        yield name, own
    for key, value in inside.items():
        yield from _parts(value, f"{name}.{plain(key)}".lstrip("."))


def _leaves(config: Mapping[str, Json], above: str = "") -> dict[str, str]:
    """Flatten nested mappings to dotted names, so that only what differs inside one is shown of it."""
    leaves: dict[str, str] = {}
    for key, value in config.items():
        name = f"{above}{plain(key)}"
        if isinstance(value, Mapping) and value:
            leaves |= _leaves(value, f"{name}.")
        else:
            leaves[name] = _value(value)
    return leaves


def _value(value: Json) -> str:
    """Write text without its quotation marks, where it cannot be taken for something else."""
    if isinstance(value, str) and _WORD.fullmatch(value) and value not in ("true", "false", "null"):
        return value
    return plain(canonical.dumps(value).decode())


# ---- whose a folder is ----


@contextmanager
def lock_folder(store: Store) -> Iterator[None]:
    """Hold the lock of a folder that is a study's or free for one; any other folder is left unchanged."""
    if store.holder is None:  # whoever holds the lock may be in the midst of sealing
        _check_free(store)
    with files.lock(store.lock_file):
        _check_free(store)
        yield


def _check_free(store: Store) -> None:
    """Refuse a folder that holds anything but a study, or what an interrupted sealing left."""
    if not store.folder.is_dir() or ledger.begun(store.ledger_file):
        return
    plan = _plan(store)
    foreign = store.strange_work()
    ours = {store.plan_file: plan is not None, store.lock_file: _is_lock(store.lock_file)}
    not_ours = [path for path in ours if path.exists() and not ours[path]]
    foreign += [path.relative_to(store.folder).as_posix() for path in not_ours]
    foreign += sorted(name for name in store.present() if not _made(store, name, plan or {}))
    if foreign:
        others = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise UsageError(
            f"{store.folder} holds no study, but {foreign[0]}{others}: expected an empty folder, or one in "
            "which a sealing was interrupted. Nothing was touched. Choose another folder (--out), or move "
            "away what is there."
        )


def _begin(store: Store, contents: Mapping[str, bytes]) -> None:
    """Clear away what an interrupted sealing left in a folder that is free, then plan what is to be made."""
    files.remove_tree(store.folder / "evidence")
    for path in (store.study_file, store.protocol_file, store.seal_file):
        if path.exists():
            files.remove(path)
    plan = {name: identity(content) for name, content in contents.items()}
    files.put(store.plan_file, canonical.dumps(plan), store.work)


def _plan(store: Store) -> Plan | None:
    """Read the plan of a sealing that was interrupted, if there is one."""
    path = store.plan_file
    try:
        plan: Plan = canonical.loads(files.read(path, MOST_BYTES), path)
        check(plan, each(IDENTITY), str(path))
    except CorruptionError:  # it is missing, or it is not ours
        return None
    return plan


def _is_lock(path: Path) -> bool:
    """Return True if a file is empty or names a process, as a lock does."""
    try:
        return (files.read(path, 20) or b"0").isdigit()
    except CorruptionError:
        return False


def _made(store: Store, name: str, plan: Plan) -> bool:
    """Return True if a file or an empty folder is one that the planned sealing made."""
    path = store.folder / name
    if path == store.ledger_file:
        return bool(plan) and ledger.torn(path)
    if name.endswith("/"):
        return any(planned.startswith(name) for planned in plan)
    if name not in plan:
        return False
    try:
        return bool(files.sha256(path, plan[name]["bytes"]) == plan[name]["sha256"])
    except CorruptionError:  # of another size, or no file
        return False
