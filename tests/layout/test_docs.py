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
