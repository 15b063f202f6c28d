"""The page in a browser: it draws, answers the pointer and the keys, complains of nothing and asks nobody."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_traces import HOSTILE, inventory, synthetic

from halfulp.report.document import write
from halfulp.report.page import page

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the browser test needs playwright: pip install 'halfulp[browser]'"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the browser test needs a Chromium on the PATH")

ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
GRIDS = ["fp16", "bf16", "e5m2", "e4m3@128"]

Open = Callable[..., Any]


class Watched:
    """A page, what it wrote to the console and what it asked for."""

    def __init__(self, context: Any, file: Path) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page = context.new_page()
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self.said.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-drawn]", timeout=20_000)
        self.file = file

    def quiet(self) -> None:
        """Nothing on the console, and no request but the page itself."""
        assert self.said == []
        assert self.asked == [self.file.as_uri()]

    def hover(self, chart: str, x: float, y: float) -> str:
        """Point at a place of a chart, as shares of its width and height; what is read out."""
        over = self.page.locator(f"{chart} .u-over").first
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        self.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        return str(self.page.locator(f"{chart} .readout").first.inner_text())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("pages")
    synthetic(top / "plain", steps=90, layers=2, grids=GRIDS)
    synthetic(top / "other", steps=700, layers=10, grids=GRIDS[1:], seed=1)  # bins, and layers as rows
    named = [(n, HOSTILE[-1 - i] if i % 2 else "mlp", (8, 8)) for i, n in enumerate(HOSTILE)]
    run = {"name": HOSTILE[0], "script": HOSTILE[1], HOSTILE[2]: HOSTILE[3]}
    synthetic(top / "hostile", listed=inventory(named), grids=GRIDS[:2], run=run)
    pages = {"plain": ["plain"], "two": ["plain", "other"], "hostile": ["hostile"]}
    return {k: write(page([top / n for n in names]), top / f"{k}.html") for k, names in pages.items()}


@pytest.fixture
def opened(browser: Any, files: dict[str, Path]) -> Iterator[Open]:
    contexts = []

    def open_page(name: str, **options: Any) -> Watched:
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}, **options))
        return Watched(contexts[-1], files[name])

    yield open_page
    for context in contexts:
        context.close()


def test_it_answers_the_pointer_and_the_controls(opened: Open) -> None:
    w = opened("plain")
    assert w.page.locator("canvas").count() == 1
    assert re.fullmatch(r"step \d+", w.hover("#when", 0.5, 0.5))
    values = w.page.locator("#when .key-value").all_inner_texts()
    assert len(values) == len(GRIDS)
    assert all(value.endswith("%") for value in values)

    w.page.locator("summary", has_text="Tensors that lose most").click()
    w.page.select_option("#grid", label="fp16")
    assert w.page.locator("[data-grid]:visible").evaluate_all("all => all.map(n => n.dataset.grid)") == [
        "fp16"
    ]

    drawn = w.page.locator("#when canvas").evaluate("c => c.toDataURL()")
    for change in (
        lambda: w.page.select_option("#scope", label="norm"),
        lambda: w.page.select_option("#measure", "never_moved"),
        lambda: w.page.check("#log"),
        lambda: w.page.locator("#when .key").first.click(),
    ):
        change()
        again = w.page.locator("#when canvas").evaluate("c => c.toDataURL()")
        assert again != drawn
        drawn = again
    assert w.page.locator("#when .key").first.get_attribute("aria-pressed") == "false"
    w.quiet()


def test_it_answers_the_keys(opened: Open) -> None:
    w = opened("plain")
    w.page.focus("#when .plot")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):
        w.page.keyboard.press(key)
    assert w.page.locator("#when .readout").inner_text() == "step 2"
    w.quiet()


def test_runs_side_by_side_and_on_one_grid(opened: Open) -> None:
    w = opened("two")
    assert w.page.locator("#when .panel").count() == 2
    left, right = (w.page.locator("#when .panel").nth(i).bounding_box() for i in (0, 1))
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] < right["x"]
    w.page.select_option("#lines", "runs")
    assert w.page.locator("#when .panel").count() == 1
    assert w.page.locator("#when .key-name").all_inner_texts() == ["plain", "other"]
    w.page.select_option("#grid", label="fp16")
    assert "fp16 was not audited in this run" in w.page.locator(".tree").nth(1).inner_text()
    assert w.page.locator(".tree").nth(0).locator("g").count()
    w.quiet()


@pytest.mark.parametrize("name", ["plain", "two", "hostile"])
def test_it_fits_a_phone(opened: Open, name: str) -> None:
    w = opened(name)
    w.page.set_viewport_size({"width": 390, "height": 844})
    w.page.wait_for_timeout(400)  # the charts are drawn again when the width has settled
    assert w.page.evaluate("document.documentElement.scrollWidth") == 390
    assert w.page.locator("#when canvas").first.bounding_box()["width"] <= 390
    w.quiet()


def test_the_model_answers_the_pointer_and_the_keys(opened: Open) -> None:
    """A click looks into a module, a button goes back; arrows walk, Enter and Escape do as a click does."""
    w = opened("plain")
    items, readout = w.page.locator(".tree g"), w.page.locator(".tree .readout")
    everything = items.count()
    assert everything > 20
    labels = [items.nth(i).get_attribute("aria-label") for i in range(everything)]
    assert labels[0].startswith("the model: ")
    place = next(i for i, said in enumerate(labels) if said.startswith("h: "))
    items.nth(place).click(force=True)
    assert readout.inner_text().startswith("h: ")
    assert items.first.get_attribute("aria-label").startswith("h: ")
    w.page.keyboard.press("ArrowDown")
    assert readout.inner_text().startswith("h.0: ")
    w.page.keyboard.press("ArrowRight")
    assert readout.inner_text().startswith("h.1: ")
    w.page.keyboard.press("Enter")
    assert items.first.get_attribute("aria-label").startswith("h.1: ")
    w.page.keyboard.press("Escape")
    assert items.first.get_attribute("aria-label").startswith("h: ")
    w.page.locator(".tree button").click()
    assert items.count() == everything
    w.page.select_option("#grid", label="e4m3@128")
    assert "lost on e4m3@128" in readout.inner_text()
    w.quiet()


def test_the_fix_is_copied(opened: Open) -> None:
    w = opened("plain")
    button = w.page.locator("button.copy")
    assert button.get_attribute("data-copy").startswith("import halfulp as hu\noptimizer = hu.WriteBack(")
    button.click()
    # The page's own policy would refuse a function to wait for.
    sync_api.expect(button).to_have_text("Copied")
    w.quiet()


def test_dark_and_paper(opened: Open) -> None:
    """Dark follows the system; paper is light whatever the system says."""
    colour = "getComputedStyle(document.body).backgroundColor"
    dark, light = opened("plain", color_scheme="dark"), opened("plain", color_scheme="light")
    assert dark.page.evaluate(colour) != light.page.evaluate(colour)
    dark.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert dark.page.evaluate(colour) == light.page.evaluate(colour)
    dark.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert dark.page.evaluate(colour) != light.page.evaluate(colour)
    dark.quiet()


def test_hostile_names_do_nothing(opened: Open) -> None:
    w = opened("hostile")
    for x in (0.2, 0.9):
        w.hover("#when", x, 0.5)
    for item in w.page.locator(".tree g").all():
        item.focus()
    w.page.select_option("#grid", index=1)
    for i in range(w.page.locator("#scope option").count()):
        w.page.select_option("#scope", index=i)
    assert "owned" not in w.page.title().replace("document.title='owned'", "")
    w.quiet()


def test_the_policy_stops_what_escaping_would_miss(opened: Open) -> None:
    """A script, a handler and a picture that somehow got into the page do not run and do not load."""
    w = opened("plain")
    w.page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "document.title = 'owned'";
            document.body.append(script);
            const holder = document.createElement("div");
            holder.innerHTML = "<img src='https://example.invalid/x' onerror=\\"document.title='owned'\\">";
            document.body.append(holder);
        }"""
    )
    w.page.wait_for_timeout(200)
    assert "owned" not in w.page.title()
    assert w.said
    assert all("Content Security Policy" in line for line in w.said)


def test_marks_are_drawn(browser: Any, files: dict[str, Path]) -> None:
    """A first majority is a disc of a real size, at a real place, for every grid that has one."""
    context = browser.new_context()
    context.add_init_script(
        "window.discs = [];"
        "const pen = CanvasRenderingContext2D.prototype, arc = pen.arc;"
        "pen.arc = function (...a) { window.discs.push(a); arc.apply(this, a); };"
    )
    watched = Watched(context, files["plain"])
    text = watched.page.locator("script[type='application/json']").first.text_content()
    run = json.loads(text)["runs"][0]
    marked = [mark for mark in run["marks"][run["scope"]] if mark is not None]
    discs = watched.page.evaluate("window.discs")
    assert marked
    assert len(discs) >= len(marked)
    assert all(None not in disc[:3] and disc[2] > 1 for disc in discs)  # NaN comes as null
    context.close()
