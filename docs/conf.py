"""The site: `python -m pip install -e '.[docs]' && python -m sphinx -W --keep-going -b html docs out/site`."""

import re
import tomllib
import zlib
from pathlib import Path

import shrewjax
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

HERE = Path(__file__).parent
assert Path(shrewjax.__file__).is_relative_to(HERE.parent), (
    "The site documents the package of its own checkout"
)

project = "shrewjax"
copyright = "the shrewjax authors"
release = version = shrewjax.__version__
settings = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
(status,) = (
    name.rpartition(" - ")[2].lower()
    for name in settings["classifiers"]
    if name.startswith("Development Status")
)

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # the pages load nothing from elsewhere
    "sphinx_copybutton",
]
exclude_patterns = ["_*", "api/_*"]
nitpicky = True
# Backticks in docstrings name arguments and fields as well as functions. Names that Sphinx finds become links.
default_role = "py:obj"
# "int32 ()" beside a field is read as a type. Types of private modules have no page.
nitpick_ignore_regex = [
    ("py:obj", "(?s).*"),
    ("py:exc", ".*"),
    ("py:class", r"(?!jax|optax|shrewjax).*|shrewjax\._.*"),
]

# Docstrings
autosummary_generate = False  # the pages of `api` have the docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
napoleon_use_ivar = True

# Pages
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = ">>> "

html_theme = "sphinx_book_theme"
html_title = "shrewjax"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_context = {"default_mode": "auto"}
html_domain_indices = False
html_css_files = ["site.css"]
html_theme_options = {
    "logo": {"text": f"shrewjax {release} ({status})"},
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "navbar_persistent": [],
    "footer_content_items": "copyright",
    "use_download_button": False,
    "use_fullscreen_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}

# Links to other projects' pages. The inventories are written here, because a build should not depend on the network.
PROJECTS = {
    "python": "https://docs.python.org/3",
    "jax": "https://docs.jax.dev/en/latest",
    "optax": "https://optax.readthedocs.io/en/latest",
}
PAGES = {
    "library/typing.html": "typing.Any typing.Literal",
    "library/collections.abc.html": " ".join(
        f"collections.abc.{name}"
        for name in (
            "Callable",
            "Collection",
            "Hashable",
            "Iterable",
            "Iterator",
            "Sequence",
        )
    ),
    "library/exceptions.html": "ValueError AssertionError",
    "library/stdtypes.html": "dict tuple str list",
    "library/functions.html": "int float bool",
    "library/constants.html": "None",
    "library/fractions.html": "fractions.Fraction",
    **{
        f"_autosummary/jax.{name}.html": f"jax.{name}"
        for name in (
            "Array",
            "grad",
            "value_and_grad",
            "jit",
            "vmap",
            "pmap",
            "shard_map",
        )
    },
    "jax.sharding.html": "jax.sharding.PartitionSpec jax.sharding.NamedSharding",
    "api/transformations.html": "optax.GradientTransformation optax.GradientTransformationExtraArgs optax.clip"
    " optax.clip_by_global_norm optax.adaptive_grad_clip",
    "api/optimizer_wrappers.html": "optax.MultiSteps optax.apply_if_finite",
    "api/apply_updates.html": "optax.apply_updates",
}
# Sphinx finds these types under the names of the modules that define them.
DEFINED_AS = {
    "jax.Array": "jax.jaxlib._jax.Array",
    "jax.sharding.PartitionSpec": "jax.P",
    "optax.GradientTransformation": "optax._src.base.GradientTransformation",
    "optax.GradientTransformationExtraArgs": "optax._src.base.GradientTransformationExtraArgs",
}


def inventory(project: str) -> str:
    """Writes the part of a project's inventory that these pages use, in Sphinx's format, and returns its path."""
    lines = [
        f"{found} py:class 1 {page}#{name} -"
        for page, names in PAGES.items()
        for name in names.split()
        if (name.split(".")[0] if name.startswith(("jax.", "optax.")) else "python")
        == project
        for found in (name, DEFINED_AS.get(name))
        if found
    ]
    path = HERE / "_build" / f"{project}.inv"
    path.parent.mkdir(exist_ok=True)
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# compressed using zlib\n"
    path.write_bytes(head.encode() + zlib.compress("\n".join(lines).encode()))
    return str(path)


intersphinx_mapping = {
    project: (url, (inventory(project),)) for project, url in PROJECTS.items()
}


FIGURE = r'<img alt="(?P<text>[^"]*)" src="[^"]*figures/(?P<name>\w+)-light.svg">'


class WhatGitHubReads(SphinxTransform):
    """Turns HTML that the pages have for GitHub into what the site has for the same.

    A `<picture>` shows `figures/NAME-light.svg` or `figures/NAME-dark.svg`, as the page is. If there are figures
    `NAME_stacked` as well, a phone shows those. Otherwise a wide figure scrolls there. A comment `<!-- index: a, b -->`
    is an entry of the index.
    """

    default_priority = 200

    def apply(self) -> None:
        """Replaces each."""
        for html in [*self.document.findall(nodes.raw)]:
            if found := re.search(FIGURE, html.astext()):
                html.replace_self(picture(found["name"], found["text"]))
            elif found := re.fullmatch(r"<!-- index: (.*) -->", html.astext().strip()):
                html.replace_self(self.entries(found[1].split(", ")))

    def entries(self, names: list[str]) -> list[nodes.Node]:
        """Returns entries of these names, and the place to which they lead."""
        name = f"index-{self.document.settings.env.new_serialno('index')}"
        target = nodes.target("", "", ids=[name])
        self.document.note_explicit_target(target)
        found = [("single", entry, name, "main", None) for entry in names]
        return [addnodes.index(entries=found), target]


def picture(name: str, text: str) -> nodes.container:
    """Returns a figure's images in a box. The theme hides those of the other mode, our style sheet those too wide."""
    widths = {name: "wide", f"{name}_stacked": "narrow"}
    if not (HERE / "figures" / f"{name}_stacked-light.svg").exists():
        drawn = (HERE / "figures" / f"{name}-light.svg").read_text()
        points = float(re.search(r'<svg [^>]*width="([\d.]+)pt"', drawn)[1])
        widths = {name: "scrolls" if points > 400 else "whole"}
    images = (
        nodes.image(
            "",
            uri=f"/figures/{stem}-{mode}.svg",
            alt=text,
            classes=[f"only-{mode}", width],
        )
        for stem, width in widths.items()
        for mode in ("light", "dark")
    )
    return nodes.container("", *images, classes=["picture"])


# The site has pages of these files, with what they include.
PAGE_OF = {
    "CHANGELOG": "/changes",
    "CONTRIBUTING": "/contributing",
    "tests/README": "/internals/tests",
}


def link_pages(_: Sphinx, __: str, source: list[str]) -> None:
    """Makes a link to one of these files a link to its page."""
    files = "|".join(PAGE_OF)
    source[0] = re.sub(
        rf"\]\((?:\.\./)+({files})\.md",
        lambda link: f"]({PAGE_OF[link[1]]}.md",
        source[0],
    )


def link_names(_: Sphinx, doctree: nodes.document) -> None:
    """Makes code that begins with a public name, such as `accumulate(tx, 4)`, a link to the reference.

    Code with a word of more than 30 characters gets the class "long", for our style sheet.
    """
    for code in [*doctree.findall(nodes.literal)]:
        if max(map(len, code.astext().split()), default=0) > 30:
            code["classes"].append("long")
        found = re.match(r"(?:shrewjax\.)?(\w+)(?=$|\()", code.astext())
        if (name := found and found[1]) in shrewjax.__all__ and isinstance(
            code.parent, nodes.paragraph | nodes.list_item | nodes.entry
        ):
            link = addnodes.pending_xref(
                "",
                refdomain="py",
                reftype="obj",
                reftarget=f"shrewjax.{name}",
                refexplicit=True,
            )
            code.replace_self(link)
            link += code


def setup(app: Sphinx) -> None:
    """Connects the above to Sphinx."""
    app.add_transform(WhatGitHubReads)
    app.connect("source-read", link_pages)
    app.connect("doctree-read", link_names)
