"""The page in a real browser: it renders without an error or a request, and fits a phone and a desk."""

from __future__ import annotations

import html as html_module
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from wavecrest import report
from wavecrest.records import OptimizeRecord

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome in PATH")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--disable-dev-shm-usage",
    # the outer page reads the frame
    "--allow-file-access-from-files",
)  # fmt: skip
Sample = Callable[[str], OptimizeRecord]


def dump(html: str, folder: Path, width: int) -> tuple[str, dict[str, str]]:
    """The DOM after the page's script, and the data attributes that the script left on the root.

    The page stands in a frame of `width` px, since a browser's own window does not get as narrow as a phone.
    """
    assert BROWSER is not None
    (folder / "report.html").write_text(html, encoding="utf-8")
    outer = folder / "outer.html"
    outer.write_text(
        f"""<!doctype html><iframe src="report.html#selftest" style="width:{width}px;height:900px;border:0"></iframe>
        <script>addEventListener("load", () => {{
          const inner = document.querySelector("iframe").contentDocument.documentElement;
          Object.assign(document.documentElement.dataset, inner.dataset);
          const copy = document.createElement("pre");
          copy.textContent = inner.outerHTML;
          document.body.replaceChildren(copy);
        }})</script>""",
        encoding="utf-8",
    )
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--window-size=1600,1000", "--dump-dom",
         outer.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    root = re.search(r"<html[^>]*>", done.stdout)
    assert root is not None
    copy = done.stdout[done.stdout.index("<pre>") + 5 : done.stdout.rindex("</pre>")]
    return html_module.unescape(copy), dict(re.findall(r'data-(\w+)="([^"]*)"', root[0]))


@pytest.mark.parametrize("width", [360, 768, 1440])
@pytest.mark.parametrize("name", ["full", "many buckets"])
def test_page_fits_and_runs(sample: Sample, tmp_path: Path, name: str, width: int) -> None:
    record = sample(name)
    dom, data = dump(report.render(record), tmp_path, width)
    assert data.get("error") is None
    assert data["ready"] == "1"
    assert data["width"] == str(width)
    assert data["overflow"] == "0"
    assert data["json"] == "optimize"
    rows = re.findall(r'<tbody class="step" data-step="(\w+)" data-attempt="(\d)" data-verdict="(\w+)"', dom)
    # what was tried first, what was skipped folded below
    in_order = sorted(record.steps, key=lambda step: step.verdict == "skipped")
    assert rows == [(step.id, str(step.attempt), step.verdict) for step in in_order]
    assert dom.count("<script") == 2
    body = dom[dom.index("<body") : dom.index("<script")]
    # the script moved the plots' hover text to labels
    assert "<title>" not in body
    assert re.search(r'aria-label="[^"]*38 % of the roofline', body)


@pytest.mark.parametrize("name", ["already optimal", "interrupted", "minimal"])
def test_sparse_records_run(sample: Sample, tmp_path: Path, name: str) -> None:
    _, data = dump(report.render(sample(name)), tmp_path, 360)
    assert (data.get("error"), data["ready"], data["overflow"]) == (None, "1", "0")


def test_policy_blocks_what_is_not_ours(sample: Sample, tmp_path: Path) -> None:
    """A script and a request planted in the page do nothing, and the page's error record names the request."""
    planted = '<img src="https://example.invalid/a.png"><script>document.documentElement.dataset.planted = "1"</script>'
    html = report.render(sample("minimal")).replace("</body>", planted + "</body>")
    _, data = dump(html, tmp_path, 800)
    assert "planted" not in data
    assert "blocked https://example.invalid/a.png" in data["error"]


def test_overflow_is_noticed(sample: Sample, tmp_path: Path) -> None:
    """The check of the tests above can fail: an element wider than the window shows as overflow."""
    html = report.render(sample("minimal")).replace("<main>", '<div style="width:900px">wide</div><main>')
    _, data = dump(html, tmp_path, 360)
    assert data["overflow"] == "540"
