"""Opens every page of the built site in a headless Chromium, at the widths of a screen and of a phone, and checks it.

    python -m pip install playwright          # and a Chromium: `apt-get install chromium`
    python docs/_browse.py out/site [--chromium /usr/bin/chromium] [--shots out/shots]

A page fails if it logs an error, asks for anything that is not in the site, shows an image or a formula that did not
load, links to a page or an anchor of the site that is not there, or is wider than a phone's screen. `--shots` saves a
picture of each page, light and dark, to look at.
"""

import argparse
import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

from playwright.sync_api import Page, sync_playwright

PHONE, SCREEN = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
FOUND = """() => ({
    images: [...document.images].filter(x => x.offsetParent && !x.naturalWidth).map(x => x.src),
    formulas: [...document.querySelectorAll('.math')].filter(x => !x.querySelector('mjx-container')).length,
    wrong: [...document.querySelectorAll('mjx-merror')].map(x => x.textContent),
    links: [...document.querySelectorAll('a[href]')].map(x => x.href),
    ids: [...document.querySelectorAll('[id]')].map(x => x.id),
    width: document.documentElement.scrollWidth,
    seen: [...document.querySelectorAll('.math')].length,
    shown: [...document.images].filter(x => x.offsetParent).length,
})"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site and logs nothing."""

    def log_message(self, *args: object) -> None:
        """Does nothing."""


def main() -> int:
    """Checks all pages, prints a line for each, and returns the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--shots", type=Path)
    args = parser.parse_args()

    server = http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=args.site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://localhost:{server.server_port}/"
    pages = sorted(
        str(path.relative_to(args.site)) for path in args.site.rglob("*.html") if "_static" not in path.parts
    )
    ids: dict[str, set[str]] = {}
    links: dict[str, list[str]] = {}
    failures = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        for name in pages:
            page = browser.new_page(viewport=SCREEN)
            wrong = [*check(page, root, name)]
            found = page.evaluate(FOUND)
            ids[root + name], links[name] = set(found["ids"]), found["links"]
            if args.shots:
                save(page, args.shots / name.replace("/", "-").removesuffix(".html"))
            page.set_viewport_size(PHONE)
            if (width := page.evaluate("() => document.documentElement.scrollWidth")) > PHONE["width"]:
                wrong.append(f"{width} px wide on a phone")
            print(f"{name}: {found['seen']} formulas, {found['shown']} images {wrong or 'ok'}")
            failures += len(wrong)
            page.close()
        browser.close()

    inside = elsewhere = 0
    for name, hrefs in links.items():
        for href in set(hrefs):
            target, anchor = urldefrag(urljoin(root + name, href))
            target = target + "index.html" if target.endswith("/") else target
            if not target.startswith(root):
                elsewhere += 1
                continue
            inside += 1
            known = target in ids or (args.site / unquote(target.removeprefix(root))).is_file()
            if not known or (anchor and unquote(anchor) not in ids.get(target, {unquote(anchor)})):
                print(f"{name}: broken link to {href}")
                failures += 1
    print(f"{len(pages)} pages, {inside} links inside, {elsewhere} elsewhere (not followed), {failures} failures")
    return failures


def check(page: Page, root: str, name: str) -> Iterator[str]:
    """Opens a page, and yields what is wrong with it."""
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((root, "data:")) else errors.append(request.url))
    page.goto(root + name, wait_until="networkidle")
    page.wait_for_function(
        "() => !document.querySelector('.math') || !window.MathJax || document.querySelector('mjx-container')"
    )
    page.wait_for_timeout(300)
    found = page.evaluate(FOUND)
    yield from errors
    yield from (f"image {source} did not load" for source in found["images"])
    yield from (f"formula: {text}" for text in found["wrong"])
    if found["formulas"]:
        yield f"{found['formulas']} formulas are not rendered"


def save(page: Page, path: Path) -> None:
    """Saves the whole page, light and dark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for mode in ("light", "dark"):
        page.evaluate(
            f"() => {{document.documentElement.dataset.theme = document.documentElement.dataset.mode = '{mode}'}}"
        )
        page.wait_for_timeout(100)
        page.screenshot(path=f"{path}-{mode}.png", full_page=True)


if __name__ == "__main__":
    sys.exit(main() > 0)
