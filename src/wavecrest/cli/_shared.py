"""What every command shares: the consoles, the options that repeat, and the printing of JSON."""

from __future__ import annotations

from typing import Annotated

import pydantic
import typer
from rich.console import Console

from wavecrest.errors import InvalidArgument

# results go to stdout, everything about the work in progress to stderr
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:N (ROCm devices too). Default: the GPU if there is one.")
]
WorkloadArgument = Annotated[
    str | None,
    typer.Argument(metavar="W", help="file.py:function or package.module:function returning (model, inputs)."),
]
HfOption = Annotated[
    str | None, typer.Option("--hf", metavar="DIR", help="A local Hugging Face model folder, instead of W.")
]


def print_json(model: pydantic.BaseModel) -> None:
    """A record as JSON on standard output."""
    out.print_json(model.model_dump_json())


def spec_of(workload: str | None, hf: str | None) -> str:
    """The one workload spec of a command line.

    Raises:
        InvalidArgument: neither or both were given.
    """
    if (workload is None) == (hf is None):
        raise InvalidArgument("give one workload: file.py:function, package.module:function, or --hf DIR")
    return workload if workload is not None else f"hf:{hf}"
