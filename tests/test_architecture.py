"""ARCHITECTURE.md names what is there, and every room."""

from __future__ import annotations

import re

from environments import ROOT
from test_imports import ORDER

PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "halfulp"


def test_every_path_on_the_page_is_there() -> None:
    paths = [name for name in re.findall(r"`([\w./]+)`", PAGE) if name.endswith(("/", ".py", ".cpp", ".md"))]
    assert len(paths) > 30
    known = [p for p in paths if "NAME" not in p]
    assert [p for p in known if not (ROOT / p).exists() and not (SOURCE / p).exists()] == []
    links = re.findall(r"\]\(([\w./]+)\)", PAGE)
    assert links
    assert [p for p in links if not (ROOT / p).exists()] == []


def test_every_room_is_on_the_page() -> None:
    rooms = {name for names in ORDER for name in names if (SOURCE / name).is_dir()}
    assert sorted(room for room in rooms if f"`{room}/`" not in PAGE) == []


def test_it_is_one_page() -> None:
    assert len(PAGE.splitlines()) < 100
