"""The generated pages are what scripts/docs would write now."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("docs_generate", str(ROOT / "docs" / "generate.py"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "page", ["env.md", "cli.md", "emulation.md", "speed.md", "triton_versions.md", "tuned.md", "zoo.md"]
)
def test_page_is_up_to_date(generator: ModuleType, page: str) -> None:
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == generator.PAGES[page](), "run scripts/docs"


def test_the_rate_of_a_product_is_by_the_bytes_of_b(generator: ModuleType) -> None:
    for kind, size in (
        ("bf16", 2.0), ("fp32", 4.0), ("weight int4", 0.5), ("weight fp8", 1.0), ("uint8 norm", 0.5),
        ("bf16 b=uint8 form=int4 group=128", 0.5), ("bf16 b=int8 form=plain", 1.0),
    ):  # fmt: skip
        assert generator._rate(f"1x1000x4000 {kind}", 1.0) == f"{4000 * size:,.0f} GB/s", kind
    # N is the result's, or that of b where the case says gated
    assert generator._rate("1x1000x4000 bf16 activation=silu_and_mul", 1.0) == "16,000 GB/s"
    assert generator._rate("1x1000x4000 uint8 gated", 1.0) == "2,000 GB/s"
    assert generator._rate("100x1000x4000 bf16 activation=silu_and_mul", 1.0) == "1,600 TFLOP/s"


def test_columns_of_the_speed_page_are_by_what_limits_a_case(generator: ModuleType) -> None:
    case = {
        "case": "2x4", "us": 8.0, "ci": [7.0, 9.0], "backend": "triton", "copy_us": 4.0, "percent_of_copy": 40.0,
        "peers": {"eager": [16.0, None], "torch": [None, None]},
    }  # fmt: skip
    arithmetic = {**case, "case": "64x64", "tflops": 500.4, "percent_of_peak": 51.2, "peers": {}}
    run = {"op": "toy", "summary": [], "record": "machine/a.jsonl.gz@123", "peers": {}}

    def page(cases: list[dict[str, object]], **fields: object) -> list[str]:
        lines: list[str] = "\n".join(generator._op_speed({**run, **fields}, cases)).splitlines()
        return [lines[2], *lines[4:]]

    plot = "![toy by case](plots/toy.svg)"
    assert page([case, {"case": "none", "problem": "a"}]) == [
        "| case | ours, µs | % of copy | % of equal copy | eager |", "| 2x4 | 8.00 | 40 | 50 | 2.00× |", plot,
    ]  # fmt: skip
    # a peer that was asked for and has no time keeps its column
    assert page([case], peers={"torch": "2.13"})[:2] == [
        "| case | ours, µs | % of copy | % of equal copy | torch | eager |", "| 2x4 | 8.00 | 40 | 50 | – | 2.00× |"
    ]  # fmt: skip
    assert page([{**case, "tokens": 4}], sizes="BxS") == [
        "| BxS | ours, µs | runs | µs a token | eager |", "| 2x4 | 8.00 | `triton` | 2.00 [1.75, 2.25] | 2.00× |"
    ]  # fmt: skip
    assert page([arithmetic]) == ["| case | ours, µs | TFLOP/s | % of peak |", "| 64x64 | 8.00 | 500 | 51 |"]
    assert page([case, arithmetic]) == [
        "| case | ours, µs | TFLOP/s | % of peak | % of copy | % of equal copy | eager |",
        "| 2x4 | 8.00 | – | – | 40 | 50 | 2.00× |",
        "| 64x64 | 8.00 | 500 | 51 | 40 | 50 | – |",
        plot,
    ]


def test_every_variable_and_setting_is_in_the_page(generator: ModuleType) -> None:
    from wavecrest import env

    page = generator.env_page()
    for row in (*env.table(), *env.settings()):
        assert f"| `{row.name}` |" in page


def test_every_command_and_option_is_in_the_page(generator: ModuleType) -> None:
    import typer

    from wavecrest.cli.main import app

    page = generator.cli_page()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        section = page.split(f"\n## wavecrest {name}\n", 1)[1].split("\n## ", 1)[0]
        assert command.help.split()[0] in section
        for parameter in command.params:
            wanted = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or parameter.name]
            assert all(f"`{one}" in section or one.upper() in section for one in wanted), (name, parameter.name)
