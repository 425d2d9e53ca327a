"""The documentation site: every page stands in the navigation, and what is built needs nothing from a network."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the extra docs is not installed: no {', '.join(MISSING)}")
# what a browser loads by itself
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Links(HTMLParser):
    """The ids of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.add(str(found["id"]))
        if tag == "a" and found.get("name"):
            self.ids.add(str(found["name"]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        target = found.get(LOADS.get(tag, ""))
        # `canonical` and the like name a page and load nothing
        if target and (tag != "link" or found.get("rel") in ("stylesheet", "icon", "preload", "modulepreload")):
            self.loads.append(target)


def problems(folder: Path) -> list[str]:
    """Links of a site that lead nowhere, and what its pages load from elsewhere."""
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        # a server shows it for any address
        if path.name == "404.html":
            continue
        for target in [*page.links, *page.loads]:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                if target in page.loads and url.scheme != "data":
                    found.append(f"{path.name} loads {target}")
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file():
                found.append(f"{path.name}: {target}: no such file")
            elif url.fragment and file in pages and unquote(url.fragment) not in pages[file].ids:
                found.append(f"{path.name}: {target}: no such place")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def source() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def test_every_page_is_in_the_navigation_once(source: ModuleType) -> None:
    shown = [page for tab in source.navigation() for pages in tab.values() for page in pages]
    assert sorted(page if isinstance(page, str) else next(iter(page.values())) for page in shown) == source.pages()


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_a_network(site: Path) -> None:
    assert problems(site) == []


def test_the_reference_has_what_is_public(site: Path) -> None:
    import wavecrest

    ids = set().union(*(Links(path.read_text(encoding="utf-8")).ids for path in (site / "reference").glob("*.html")))
    for name, module in wavecrest._LAZY.items():
        # a module has its public functions there
        place = f"{module}." if module == f"wavecrest.{name}" or name == "registry" else f"{module}.{name}"
        assert place in ids or (place.endswith(".") and any(one.startswith(place) for one in ids)), name
    assert ids >= {f"wavecrest.ops.{name}" for name in wavecrest.ops.__all__ if name.islower()}


def test_pages_of_ops_show_their_plot(site: Path) -> None:
    for plot in (ROOT / "docs" / "plots").glob("*.svg"):
        assert f"plots/{plot.name}" in (site / "ops" / f"{plot.stem}.html").read_text(encoding="utf-8")


def test_problems_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">x</a><a href="b.html#there">x</a><a href="c.html">x</a><a href="https://x.org/">x</a>'
        '<script src="https://x.org/s.js"></script><img src="data:,">'
    )
    assert problems(tmp_path) == [
        "a.html: b.html#there: no such place", "a.html: c.html: no such file", "a.html loads https://x.org/s.js",
    ]  # fmt: skip


def test_markdown_is_fitted_to_the_site(source: ModuleType) -> None:
    text = "See [usage](docs/usage.md#plans), [one](evidence/x.log), [b](benchmarks/README.md), [c](https://x.org).\n"
    assert (
        source._linked(text, "start.md")
        == "See [usage](usage.md#plans), one, [b](benchmark_scripts.md), [c](https://x.org)."
    )
    assert source._linked("[h](../index.md#ops) `[a](b.md)`", "ops/gemm.md").startswith("[h](../index.md#ops)")
    assert source._indented("a\n- b\n  more\n  - c\n\n  ```sh\n  d\n  ```\ne") == (
        "a\n\n- b\n    more\n    - c\n\n    ```sh\n    d\n    ```\ne\n"
    )
