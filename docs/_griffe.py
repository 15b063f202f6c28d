"""Docstrings as Markdown: examples become code, Sphinx's roles plain code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r":\w+:(`+)~?")


class Markdown(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """What griffe calls for everything that it finds."""
        if obj.docstring is not None:
            text = ROLE.sub(r"\1", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
