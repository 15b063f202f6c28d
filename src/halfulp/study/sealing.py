"""Whose a folder is before a study is sealed in it, and what an interrupted sealing may leave there.

A folder is a study's from the moment its ledger has a first line. Before that it is somebody else's, unless
it is empty or a sealing began in it. So that this can be told, a sealing first writes a plan,
``work/sealing.json``: the size and digest of every file that it is going to make. Files appear whole, so
whatever a kill leaves, before any operation, is one of those, or half a first line of the ledger. Anything
else is refused, and nothing of it is touched: names alone do not tell, because a person's own ``study.py``,
``evidence`` or ``work`` has the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from halfulp import canonical, files
from halfulp.errors import CorruptionError, UsageError
from halfulp.study import ledger, shape
from halfulp.study.protocol import Json
from halfulp.study.store import Store, identity

Plan = dict[str, dict[str, Json]]  # size and digest, by the path from the top


@contextmanager
def taken(store: Store) -> Iterator[None]:
    """Hold the lock of a folder that is a study's, or free for one; another's is left as it is."""
    if store.holder is None:  # whoever holds the lock may be in the midst of sealing
        check_free(store)
    with files.lock(store.lock_file):
        check_free(store)
        yield


def check_free(store: Store) -> None:
    """Refuse a folder that holds anything but a study, or what an interrupted sealing left."""
    if not store.folder.is_dir() or ledger.begun(store.ledger_file):
        return
    plan = _plan(store)
    found = store.strange_work()
    ours = {store.plan_file: plan is not None, store.lock_file: _is_lock(store.lock_file)}
    found += [path.relative_to(store.folder).as_posix() for path in ours if path.exists() and not ours[path]]
    found += sorted(name for name in store.present() if not _made(store, name, plan or {}))
    if found:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UsageError(
            f"{store.folder} holds no study, but {found[0]}{others}: expected an empty folder, or one in "
            "which a sealing was interrupted. Nothing was touched. Choose another folder (--out), or move "
            "away what is there."
        )


def begin(store: Store, contents: Mapping[str, bytes]) -> None:
    """Clear away what an interrupted sealing left in a folder that is free, then plan what is to be made."""
    files.remove_tree(store.folder / "evidence")
    for path in (store.study_file, store.protocol_file, store.seal_file):
        if path.exists():
            files.remove(path)
    plan = {name: identity(content) for name, content in contents.items()}
    files.put(store.plan_file, canonical.dumps(plan), store.work)


def _plan(store: Store) -> Plan | None:
    """The plan of a sealing that was interrupted, if there is one."""
    path = store.plan_file
    try:
        plan: Plan = canonical.loads(files.read(path, shape.MOST_BYTES), path)
        shape.check(plan, shape.Each(shape.IDENTITY), str(path))
    except CorruptionError:  # it is missing, or it is not ours
        return None
    return plan


def _is_lock(path: Path) -> bool:
    """Whether a file is empty or names a process, as a lock does."""
    try:
        return (files.read(path, 20) or b"0").isdigit()
    except CorruptionError:
        return False


def _made(store: Store, name: str, plan: Plan) -> bool:
    """Whether a file or an empty folder is one that the planned sealing made."""
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
