"""Check every link of the built site and of the Markdown files beside it: ``python docs/links.py site``.

mkdocs checks the links that it writes from Markdown. This reads the pages as they are served, so that links
of generated pages, of HTML and of the API reference are checked too, and the README, which is no page of the
site. Only links inside the project: nothing is fetched.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent


class _Page(HTMLParser):
    """The links of a page, and the places in it that others may link to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is not None and name in ("id", "name"):
                self.anchors.add(value)
            elif value is not None and name in ("href", "src"):
                self.links.append(value)


def broken_in_site(site: Path) -> list[str]:
    """List the links of a built site whose file or place does not exist."""
    pages = {file: _Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    broken = []
    for file, page in pages.items():
        if file.name == "404.html":  # its links begin at the address of the site, which is not known here
            continue
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file.resolve()
            target = target / "index.html" if target.is_dir() else target
            place = unquote(parts.fragment)
            there = pages.get(site / target.relative_to(site.resolve())) if target.suffix == ".html" else None
            if not target.is_file() or (place and there is not None and place not in there.anchors):
                broken.append(f"{file.relative_to(site)}: {link}")
    return broken


def broken_in_sources(root: Path) -> list[str]:
    """List the links of the Markdown files of a folder whose file or heading does not exist."""
    broken = []
    for file in sorted(root.glob("*.md")):
        for link in re.findall(
            r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", file.read_text(), flags=re.M | re.S)
        ):
            parts = urlsplit(link)
            target = root / unquote(parts.path) if parts.path else file
            if parts.scheme:
                continue
            if not target.exists() or (parts.fragment and parts.fragment not in headings(target)):
                broken.append(f"{file.name}: {link}")
    return broken


def headings(file: Path) -> set[str]:
    """Return the places that GitHub gives to the headings of a Markdown file."""
    found = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if file.suffix == ".md" else []
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


if __name__ == "__main__":
    failed = [*broken_in_site(Path(sys.argv[1])), *broken_in_sources(ROOT)]
    print("\n".join(failed) or "All links lead somewhere.")
    sys.exit(bool(failed))
