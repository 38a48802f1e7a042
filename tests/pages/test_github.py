"""Each page that the README leads to reads right on GitHub, which knows Markdown and nothing of the site's.

markdown-it parses a page as GitHub does, but for alerts and links to issues.
"""

import functools
import itertools
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent.parent
GITHUB = MarkdownIt("commonmark").enable(["table", "strikethrough"])
SHOWN_AS_CODE = re.compile(r"^ *(:::|% |\(\S+\)=)|\{[a-z][\w:-]*\}`|^\[\[", re.MULTILINE)


@functools.cache
def tokens(text):
    """A page's blocks, and what stands inside of them."""
    return [token for block in GITHUB.parse(text) for token in (block, *(block.children or ()))]


def links(text):
    """What a page links to and shows, by Markdown or by HTML, with its text: None for an image of HTML."""
    found, open_link = [], None
    for token in tokens(text):
        if token.type in ("link_open", "image"):
            open_link = [token.attrs.get("href") or token.attrs["src"], token.content]
            found.append(open_link)
        elif token.type in ("text", "code_inline") and open_link:
            open_link[1] += token.content
        elif token.type == "link_close":
            open_link = None
        elif token.type in ("html_block", "html_inline"):
            found += [[link, None] for link in re.findall(r'(?:href|src|srcset)="([^"]+)"', token.content)]
    return found


def anchors(text):
    """The names that GitHub gives to the headings of a page."""
    blocks, names = GITHUB.parse(text), []
    for opening, heading in itertools.pairwise(blocks):
        if opening.type == "heading_open":
            plain = "".join(part.content for part in heading.children)
            name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            names.append(f"{name}-{names.count(name)}" if name in names else name)
    return set(names)


def mistakes(path):
    """What of a page is lost on GitHub."""
    text = path.read_text()
    found = ["front matter, which is shown as a table"] if text.startswith("---\n") else []
    for token in tokens(text):
        if token.type == "fence" and token.info.startswith("{"):
            found.append(f"the directive {token.info}")
        elif token.type == "text" and SHOWN_AS_CODE.search(token.content):
            found.append(f"the site's markup {token.content!r}")
    roles = re.findall(r"\{[a-z][\w:-]*\}`[^`]+`", re.sub(r"(?ms)^(`{3,}).*?^\1", "", text))
    return found + [f"the role {role}" for role in roles] + dead_links(path)


def dead_links(path):
    """Links of a page without a text, a file or a heading."""
    text, found = path.read_text(), []
    for link, shown in links(text):
        file, _, anchor = link.partition("#")
        if shown is not None and not shown.strip():
            found.append(f"no text for {link}")
        if re.match(r"https?:|mailto:", link):
            continue
        target = path.parent / file if file else path
        if not target.exists():
            found.append(f"no file {link}")
        elif target.suffix == ".md" and anchor and anchor not in anchors(target.read_text()):
            found.append(f"no heading {link}")
    return found


def reached():
    """The pages to which the README leads, with itself."""
    pages, new = [], [ROOT / "README.md"]
    while new:
        page = new.pop()
        pages.append(page)
        files = {(page.parent / link.partition("#")[0]).resolve() for link, _ in links(page.read_text())}
        new += sorted(file for file in files if file.suffix == ".md" and file.exists() and file not in (*pages, *new))
    return sorted(pages)


@pytest.mark.parametrize("page", reached(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_loses_nothing_on_github(page):
    assert mistakes(page) == []


def test_links_of_pages_that_only_the_site_shows_are_right_on_github_too():
    others = set((ROOT / "docs").rglob("*.md")) - set(reached())
    assert {path.name: dead for path in others if (dead := dead_links(path))} == {}


def test_the_readme_leads_to_every_page_but_those_of_the_site_alone():
    of_the_site = {"index", "changes", "contributing", "internals/tests"}
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    led_to = {path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/") for path in reached()}
    assert {page for page in pages - led_to if not page.startswith("api/")} == of_the_site


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("See [](README.md).", "no text for README.md"),
        ("See [this](missing.md).", "no file missing.md"),
        ("See [this](README.md#missing).", "no heading README.md#missing"),
        ("```{picture} name\nA text\n```", "the directive {picture} name"),
        (":::{dropdown} A title\nText\n:::", "the site's markup ':::{dropdown} A title'"),
        ("A role: {ref}`a name`.", "the role {ref}`a name`"),
        ("A label:\n\n(label)=\n", "the site's markup '(label)='"),
        ("---\na: b\n---\n", "front matter, which is shown as a table"),
        ('<picture><img src="missing.svg"></picture>', "no file missing.svg"),
    ],
)
def test_what_is_lost_on_github_is_found(tmp_path, text, mistake):
    (tmp_path / "README.md").write_text("# Title\n")
    (tmp_path / "page.md").write_text(text)
    assert mistake in mistakes(tmp_path / "page.md")


def words(path):
    """The words outside of code."""
    return len(re.sub(r"(?ms)^(`{3,}).*?^\1$", "", path.read_text()).split())


def test_pages_are_short():
    """Those of users outside of code, and all with their code. `test_docs.py` has the README's own limit."""
    docs = ROOT / "docs"
    guides = {path.name: words(path) for path in (docs / "guide").iterdir()}
    assert {name: count for name, count in guides.items() if count > 800} == {}
    others = {path.name: words(path) for path in [ROOT / "README.md", *docs.glob("*.md")]}
    assert sum((guides | others).values()) <= 10_800, guides | others
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs.rglob("*.md")]
    assert sum(len(path.read_text().split()) for path in pages) <= 20_500
