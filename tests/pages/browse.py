"""Opens every page of the built site in a headless Chromium, at the widths of a screen and of a phone, and checks it.

    python -m pip install playwright          # and a Chromium: `apt-get install chromium`
    python tests/pages/browse.py out/site [--chromium /usr/bin/chromium] [--shots out/shots]

A page fails if it logs an error, asks for anything that is not in the site, shows an image or a formula that did not
load, or a backslash in a formula, has other headings than its source, or a heading inside a code box, shows removed
lines of a diff that are not red or added ones that are not green, links to a page or an anchor of the site that is not
there, or is wider than a phone's screen. Some words have to lead a search to the page that answers. `--shots` saves
four pictures of each page: on a screen and on a phone, light and dark.
"""

import argparse
import functools
import http.server
import re
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).parent.parent.parent / "docs"
PHONE, SCREEN = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
# The first result of a search for these words is that page.
SEARCHES = {
    "donate": "guide/windows.html",
    "dropout": "guide/flax.html",
    "equinox": "guide/equinox.html",
    "learning rate": "guide/windows.html",
    "padding": "guide/windows.html",
    "schedule": "guide/windows.html",
}
# Lists the parts of a page. Its images are those that it shows in this mode, light or dark.
FOUND = """mode => {
    Object.assign(document.documentElement.dataset, {theme: mode, mode: mode});
    const all = selector => [...document.querySelectorAll(selector)];
    const images = all('img').filter(x => x.offsetParent);
    return {
        images: images.length,
        missing: images.filter(x => !x.naturalWidth).map(x => x.src),
        formulas: all('.math').length,
        wrong: all('mjx-merror, mjx-c.mjx-c5C').map(x => x.textContent || 'a backslash'),
        links: all('a[href]').map(x => x.href),
        ids: all('[id]').map(x => x.id),
        headings: all('article :is(h1, h2, h3)').map(x =>
            x.innerText.replace(/#$/, '').replace(/\\u2019/g, "'").trim()),
        inCode: all('pre').map(x => x.innerText).filter(x => /^## /m.test(x)),
        diffs: all('.highlight :is(.gd, .gi)').map(x => [x.className, getComputedStyle(x).color]),
    };
}"""
FORMULAS = "() => [...document.querySelectorAll('.math')].every(x => x.querySelector('mjx-container'))"
WIDTH = "() => document.documentElement.scrollWidth"


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
    if not pages:
        print(f"{args.site} has no page. Build the site there first")
        return 1
    ids: dict[str, set[str]] = {}
    links: dict[str, set[str]] = {}
    failures = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        for name in pages:
            page = browser.new_page(viewport=SCREEN)
            wrong = opened(page, root, name)
            for mode in ("light", "dark"):
                found = page.evaluate(FOUND, mode)
                wrong += [f"image {source} did not load" for source in found["missing"]]
                wrong += [f"formula: {text}" for text in found["wrong"]]
                wrong += [f"a line {of} of a diff is {color}" for of, color in found["diffs"] if not tells(of, color)]
                for width, size in (("", SCREEN), ("phone-", PHONE)):
                    if args.shots:
                        page.set_viewport_size(size)
                        page.wait_for_timeout(500)  # the menus slide away
                        file = name.replace("/", "-").replace(".html", f"-{width}{mode}.png")
                        page.screenshot(path=args.shots / file, full_page=True)  # makes the folder
                page.set_viewport_size(SCREEN)
            expected = headings_of(name)
            if expected is not None and found["headings"] != expected:
                wrong.append(f"headings {found['headings']}, but the source has {expected}")
            wrong += [f"a heading in a code box: {text[:80]!r}" for text in found["inCode"]]
            ids[root + name], links[name] = set(found["ids"]), set(found["links"])
            page.set_viewport_size(PHONE)
            if (width := page.evaluate(WIDTH)) > PHONE["width"]:
                wrong.append(f"{width} px wide on a phone")
            print(f"{name}: {found['formulas']} formulas, {found['images']} images: {wrong or 'ok'}")
            failures += len(wrong)
            page.close()
        page = browser.new_page()
        for words, name in SEARCHES.items():
            page.goto(f"{root}search.html?q={words}")
            found = page.locator("#search-results li a").first.get_attribute("href")
            if not found.startswith(name):
                print(f"a search for {words!r} leads to {found}, not to {name}")
                failures += 1
        browser.close()

    inside = elsewhere = 0
    for name, hrefs in links.items():
        for href in hrefs:
            target, anchor = urldefrag(urljoin(root + name, href))
            target = target + "index.html" if target.endswith("/") else target
            if not target.startswith(root):
                elsewhere += 1
                continue
            inside += 1
            exists = target in ids or (args.site / unquote(target.removeprefix(root))).is_file()
            if not exists or (anchor and target in ids and unquote(anchor) not in ids[target]):
                print(f"{name}: broken link to {href}")
                failures += 1
    print(f"{len(pages)} pages, {inside} links inside, {elsewhere} elsewhere (not followed), {failures} failures")
    return failures


def tells(of: str, color: str) -> bool:
    """Returns whether the color of a diff's line says what it is: more red than green if it is removed, or less."""
    red, green, *_ = map(int, re.findall(r"\d+", color))
    return red > green if of == "gd" else green > red


def headings_of(name: str) -> list[str] | None:
    """Returns the headings of the source of a page, with those of the files that it includes; None without a source."""
    source = DOCS / name.replace(".html", ".md")
    if not source.exists():
        return None  # the index of names, or the search
    text = re.sub(r"```{include} (\S+)\n(.*?)```", functools.partial(included, source), source.read_text(), flags=re.S)
    without_code = re.sub(r"(?m)^(```+|:::+)(?!{grid).*?^\1$", "", text, flags=re.S)
    found = re.findall(r"(?m)^#{1,3} (.*)", without_code)
    return [re.sub(r"`|\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("\\", "") for heading in found]


def included(source: Path, directive: re.Match[str]) -> str:
    """Returns the part of a file that the directive `include` shows."""
    text = (source.parent / directive[1]).read_text()
    options = {key: value.strip('"') for key, value in re.findall(r":([\w-]+): (.*)", directive[2])}
    text = text.partition(options["start-after"])[2] if "start-after" in options else text
    return text.partition(options["end-before"])[0] if "end-before" in options else text


def opened(page: Page, root: str, name: str) -> list[str]:
    """Opens a page, waits for its formulas, and returns the errors that it logs and what it asks for elsewhere."""
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((root, "data:")) else errors.append(request.url))
    page.goto(root + name, wait_until="networkidle")
    page.wait_for_function(FORMULAS)  # raises after half a minute
    return errors


if __name__ == "__main__":
    sys.exit(main() > 0)
