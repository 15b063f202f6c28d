"""Public names: few, found when they are asked for; and what they were called before."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import halfulp as hu
from halfulp import deprecation


def test_the_public_names_are_few_and_there() -> None:
    assert len(hu.__all__) <= 30
    assert len(set(hu.__all__)) == len(hu.__all__)
    for name in hu.__all__:
        assert getattr(hu, name) is getattr(hu, name)
        assert name in dir(hu)
    assert not set(hu.__all__) & set(deprecation.NAMES)


def test_help_needs_no_torch() -> None:
    """Nor does the package itself, until a name is used."""
    code = (
        "import sys, halfulp.cli\n"
        "assert not {'torch', 'numpy', 'numba', 'polars', 'matplotlib'} & set(sys.modules)\n"
        "import halfulp\nhalfulp.grid('bf16')\nassert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", deprecation.NAMES)
def test_an_old_name_is_the_new_one_with_a_warning(name: str) -> None:
    room = importlib.import_module(deprecation.NAMES[name])
    with pytest.warns(DeprecationWarning, match=rf"^halfulp\.{name} is now {room.__name__}\.{name};") as seen:
        assert getattr(hu, name) is getattr(room, name)
    assert seen[0].filename == __file__


@pytest.mark.parametrize("old", deprecation.MODULES)
def test_an_old_path_is_the_same_module_with_a_warning(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    vars(hu).pop(old.partition(".")[2], None)
    new = importlib.import_module(deprecation.MODULES[old])
    with pytest.warns(DeprecationWarning, match=f"^{old} is now {new.__name__};") as seen:
        assert getattr(hu, old.partition(".")[2]) is new
    assert seen[0].filename == __file__
    spec = new.__spec__
    with pytest.warns(DeprecationWarning, match=f"^{old} is now {new.__name__};") as seen:
        exec(f"import {old}", {})  # noqa: S102
    assert seen[0].filename == "<string>"
    assert sys.modules.pop(old) is new
    assert new.__spec__ is spec
    assert new.__name__ == deprecation.MODULES[old]


def test_a_module_of_an_old_package_is_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    import halfulp.checkpoints.sync as new

    monkeypatch.delitem(sys.modules, "halfulp.stored", raising=False)
    with pytest.warns(DeprecationWarning, match=r"halfulp\.stored.* is now halfulp\.checkpoints"):
        old = importlib.import_module("halfulp.stored.sync")
    assert old is new
    del sys.modules["halfulp.stored"], sys.modules["halfulp.stored.sync"]


def test_what_has_ended_says_what_to_do_instead() -> None:
    from halfulp import replay  # type: ignore[attr-defined]  # a name that is gone

    assert "replay" not in dir(hu)
    with pytest.raises(NotImplementedError, match="audit the run again with the other grids"):
        replay("runs/kept", ["e5m2"], "runs/replayed")
    with pytest.raises(hu.UsageError, match=r"Audit\(keep=True\) has ended.*audit the run again"):
        hu.Audit(None, "bf16", keep=True)


def test_what_never_was_is_no_attribute() -> None:
    assert not hasattr(hu, "Kahn")
    with pytest.raises(ModuleNotFoundError, match=r"halfulp\.gridz"):
        importlib.import_module("halfulp.gridz")
    with pytest.raises(ModuleNotFoundError), pytest.warns(DeprecationWarning, match="is now"):
        importlib.import_module("halfulp.stored.nothing")
    sys.modules.pop("halfulp.stored", None)
