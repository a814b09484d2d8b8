"""A page as a headless Chromium shows it."""

import json
import os
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Told after all pictures were decoded; what is wider than its place counts unless it scrolls there.
# `smallest` is the smallest text in pixels, `canvases` are the widths of what scripts drew.
LOOK = """
<script>
addEventListener("load", () => {
  const auto = (e) => getComputedStyle(e).overflowX === "auto";
  const scrolls = (e) => e && (auto(e) || scrolls(e.parentElement));
  const shown = [...document.querySelectorAll("main *")];
  const wide = shown.filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e));
  const cut = shown.filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth
    && !scrolls(e) && getComputedStyle(e).display !== "inline");
  const named = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const sizes = shown.filter((e) => named(e) && e.getClientRects().length)
    .map((e) => parseFloat(getComputedStyle(e).fontSize));
  const found = {
    width: innerWidth,
    page: document.documentElement.scrollWidth,
    beyond: wide.map((e) => e.tagName + " " + e.textContent.trim().slice(0, 60)),
    wide: [...wide, ...cut].map((e) => e.tagName + " " + e.textContent.trim().slice(0, 60)),
    pictures: [...document.images].map((i) => [i.alt, i.naturalWidth, i.clientWidth]),
    smallest: Math.min(...sizes),
    canvases: [...document.querySelectorAll("canvas")].map((c) => c.width),
    text: document.body.innerText,
  };
  parent.document.getElementById("told").textContent = JSON.stringify(found);
});
</script>
"""


def look(page: Path, width: int, folder: Path) -> dict:
    """What is seen of a page in a window so wide: see `LOOK`.

    Args:
        page: a file of HTML.
        width: of the window, in CSS pixels.
        folder: for a copy of the page and the browser's own files.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        text = "no Chromium to look at pages with: apt-get install chromium"
        pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)
    # In a frame, since a window of Chromium is never narrower than 500 pixels.
    told = page.read_text().replace("</body>", LOOK + "</body>")
    # Style sheets and images that lie beside the page are found from the copy, too.
    held = escape(told.replace("<head>", f'<head><base href="{page.parent.as_uri()}/">'))
    frame = f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{held}"></iframe>'
    copy = folder / f"looked_at_{width}.html"
    copy.write_text(f'<!doctype html><meta charset="utf-8"><pre id="told"></pre>{frame}')
    done = subprocess.run(
        [
            *(program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000"),
            *("--virtual-time-budget=5000", "--dump-dom", copy.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = re.search(r'<pre id="told">(.+?)</pre>', done.stdout, re.DOTALL)
    assert told, done.stderr[-500:]
    return json.loads(unescape(told[1]))


def check_fits(seen: dict) -> None:
    """Checks that nothing is wider than its place, and that no text is too small to read."""
    assert seen["page"] <= seen["width"] and seen["wide"] == []
    assert seen["smallest"] >= 11
