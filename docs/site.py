"""The documentation site: which page stands where, and what differs between a page here and in the repository.

mkdocs calls the functions named `on_…`. Pages of the repository outside of docs/, and the reference, are made when the
site is built. A link that leads out of the site (to a record, a test) becomes its text: the site has no public host.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
# page of the site -> file of the repository outside of docs/
OUTSIDE = {
    "start.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmark_scripts.md": "benchmarks/README.md",
}
# page of the reference -> title, names it describes
REFERENCE: dict[str, tuple[str, tuple[str, ...]]] = {
    "reference/optimize.md": (
        "Optimizing a model",
        (
            "optimizer.api.optimize", "optimizer.api.OptimizeResult", "optimizer.plan.Plan", "optimizer.routed.route",
            "measure.workload.Workload", "measure.workload.Buckets",
        ),
    ),
    "reference/quantize.md": (
        "Quantizing a model",
        (
            "quantizer.api.quantize", "quantizer.api.load_quantized", "quantizer.result.Quantized",
            "quantizer.report.QuantizeReport", "quantizer.quality.Quality",
        ),
    ),
    "reference/functional.md": ("Functions", ("nn.functional",)),
    "reference/nn.md": ("Modules", ("nn",)),
    "reference/settings.md": ("Settings", ("settings",)),
    "reference/dispatch.md": (
        "Dispatch",
        (
            "dispatch.registry.coverage", "dispatch.registry.names", "dispatch.registry.get",
            "dispatch.registry.pin_tuned", "dispatch.registry.strict", "dispatch.registry.record_misses",
            "dispatch.decision.Decision", "dispatch.op.Op",
        ),
    ),
    "reference/kernels.md": ("Your own kernels", ("backends.user.register_kernel", "backends.user.check_kernel")),
    "reference/guides.md": ("Names of published guides", ("compat.aiter", "compat.xlstm")),
    "reference/integrations.md": (
        "Integrations",
        (
            "integrations.compile_backend.wavecrest", "integrations.compile_backend.last_report",
            "integrations.compile_backend.reports", "integrations.compile_backend.Report",
            "integrations.transformers.enable", "integrations.transformers.use_attention",
            "integrations.transformers.patch_transformers_xlstm", "integrations.generate.of",
            "integrations.generate.Generation", "integrations.kernels_hub.build", "integrations.kernels_hub.enable",
            "integrations.kernels_hub.mapping", "integrations.diffusers.optimize_pipeline",
            "integrations.diffusers.Optimized", "integrations.export.export", "integrations.torchao.convert",
            "integrations.torchao.packed", "integrations.compressed_tensors.load", "integrations.mxfp4.load",
            "integrations.quark.load", "integrations.tirex.patch_tirex",
            "integrations.distributed.parallelize", "integrations.distributed.optimize",
            "integrations.distributed.apply",
            "integrations.distributed.ParallelResult", "integrations.distributed.on_rank_zero",
            "integrations.distributed.gather_local", "integrations.ray.workers_of", "integrations.vllm.register",
            "integrations.sglang.register",
        ),
    ),
    "reference/machine.md": (
        "The machine",
        ("hardware.detect", "hardware.Device", "hardware.Arch", "env.table", "env.Variable", "env.get"),
    ),
    "reference/errors.md": ("Errors and warnings", ("errors",)),
}  # fmt: skip
OPS_REFERENCE = "reference/ops.md"
# by user, in the order of tabs; a name with a star takes what no other entry names
NAVIGATION: dict[str, tuple[str, ...]] = {
    "Start": ("index.md", "start.md", "usage.md", "settings.md", "troubleshooting.md", "glossary.md"),
    "Serve a model": (
        "proof.md", "attacks.md", "results.md", "zoo.md", "attention.md", "quantize.md", "packed_weights.md",
        "integrations/*", "compat.md", "guides.md",
    ),
    "Tune a machine": (
        "tuning.md", "database.md", "env.md", "benchmarks.md", "speed.md", "tuned.md", "cost_model.md",
        "benchmark_scripts.md",
    ),
    "Write a kernel": ("your_kernel.md", "architecture.md", "contributing.md"),
    "xLSTM": ("xlstm.md",),
    "AMD evidence": ("isa.md", "triton_versions.md", "emulation.md", "facts.md"),
    "Ops": ("ops/*",),
    "Reference": ("cli.md", "reference/*", "changelog.md", "*"),
}  # fmt: skip
# titles in the navigation that are not the page's heading
TITLES = {"start.md": "Install and first run", "your_kernel.md": "Your own kernel"}
_FENCE = re.compile(r"^ *```")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def pages() -> list[str]:
    """All pages of the site, those that are made included."""
    found = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md"))]
    return sorted({*found, *OUTSIDE, *REFERENCE, OPS_REFERENCE})


def navigation() -> list[dict[str, list[Any]]]:
    """The navigation: every page once, in the first entry that names it, under its heading or `TITLES`."""
    known = pages()
    named = {name for names in NAVIGATION.values() for name in names if "*" not in name}
    rest = [page for page in known if page not in named]
    tabs: dict[str, list[str]] = {title: [] for title in NAVIGATION}
    for title, names in NAVIGATION.items():
        for name in names:
            if "*" not in name:
                tabs[title] += [name] if name in known else []
                continue
            taken = [page for page in rest if page.startswith(name.removesuffix("*"))]
            tabs[title] += taken
            rest = [page for page in rest if page not in taken]
    return [
        {title: [{TITLES[page]: page} if page in TITLES else page for page in found]}
        for title, found in tabs.items()
        if found
    ]


def on_config(config: Any) -> Any:
    """Navigation by user."""
    config.nav = navigation()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, (title, names) in REFERENCE.items():
        files.append(File.generated(config, page, content=_reference(title, names)))
    ops = ROOT / "src" / "wavecrest" / "ops" / "__init__.py"
    exported = next(
        ast.literal_eval(node.value)
        for node in ast.parse(ops.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    functions = tuple(f"ops.{name}" for name in sorted(exported) if name.islower())
    files.append(File.generated(config, OPS_REFERENCE, content=_reference("Ops", functions)))
    return files


def _reference(title: str, names: tuple[str, ...]) -> str:
    return f"# {title}\n\n" + "\n\n".join(f"::: wavecrest.{name}" for name in names) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page as the site needs it: links that lead somewhere, lists as Python-Markdown reads them, and its plot."""
    name = page.file.src_uri
    if name in REFERENCE or name == OPS_REFERENCE:
        return markdown
    text = _indented(_linked(markdown, name))
    plot = DOCS / "plots" / f"{Path(name).stem}.svg"
    if name.startswith("ops/") and plot.is_file():
        text += (
            f"\n\n## Measured\n\n![Times beside peers](../plots/{plot.name}){{ .plot }}\n\nFrom [speed](../speed.md).\n"
        )
    return text


def _linked(markdown: str, name: str) -> str:
    """Links made to fit: of a page that lies elsewhere here, to one that does, or to none."""
    folder = posixpath.dirname(OUTSIDE.get(name, f"docs/{name}"))
    back = {source: page for page, source in OUTSIDE.items()}

    def fit(match: re.Match[str]) -> str:
        label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        real = posixpath.normpath(posixpath.join(folder, path))
        here = back.get(real) or (real.removeprefix("docs/") if real.startswith("docs/") else "")
        if not here or not (here in OUTSIDE or (DOCS / here).is_file()):
            return label
        return f"[{label}]({posixpath.relpath(here, posixpath.dirname(name) or '.')}{hash_sign}{anchor})"

    lines, fenced = [], False
    for line in markdown.splitlines():
        fenced = fenced != bool(_FENCE.match(line))
        lines.append(line if fenced else _LINK.sub(fit, line))
    return "\n".join(lines)


def _indented(markdown: str) -> str:
    """Markdown with lists after an empty line, and with all parts of an item indented by four."""
    # what else is said behind the language is for the tests
    markdown = re.sub(r"^( *```\w+) .*$", r"\1", markdown, flags=re.MULTILINE)
    lines: list[str] = []
    in_list = fenced = False
    extra = 0
    for line in markdown.splitlines():
        space = len(line) - len(line.lstrip(" "))
        if fenced:
            lines.append(" " * extra + line if line.strip() else line)
            fenced = not _FENCE.match(line)
            continue
        item = re.match(r" *(?:[-*]|\d+\.) ", line)
        if line.strip() and not item and space == 0:
            in_list = False
        if item and not in_list:
            if lines and lines[-1].strip():
                lines.append("")
            in_list = True
        deeper = 4 * max(1, space // 2 if space % 2 == 0 else space // 3) if space else 0
        extra = deeper - space if in_list and space else 0
        fenced = bool(_FENCE.match(line))
        lines.append(" " * extra + line)
    return "\n".join(lines) + "\n"
