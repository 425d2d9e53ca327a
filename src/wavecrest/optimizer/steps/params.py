"""The parameters that steps take from a plan file, as schemas: a plan is data, so an unknown or wrong one is refused.

A field that names modules of the model has the type `Modules`; the paths are looked up before the step is applied.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

# dotted paths of modules; "" is the model itself
Modules = list[str]
# the most of any setting of a configuration: tiles have some thousand elements
MOST_SETTING = 1 << 16
# a cell of a file of lines: no comma, no quote, no line end
Line = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:+ -]{1,100}$")]


class Params(pydantic.BaseModel):
    """Base of the schemas: no unknown keys, no conversions."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    def modules(self) -> list[str]:
        """Paths of the modules that the parameters name."""
        return []


class Sites(Params):
    """The modules that a step replaces or changes."""

    sites: Annotated[Modules, Field(min_length=1)]

    def modules(self) -> list[str]:
        """The sites."""
        return self.sites


class PackedSites(Sites):
    """MultiheadAttention modules, and those among them whose weights nothing reads."""

    unread: Modules = Field(default_factory=list)


class RoutedSites(Sites):
    """Sites, and what dispatch decided for each of their calls, for people."""

    routes: list[dict[str, Any]] = Field(default_factory=list)


class QuantizedLayers(Params):
    """The format of each layer by path, and the quality that the quantized model is held to (`steps.quantize`)."""

    formats: Annotated[dict[str, str], Field(min_length=1)]
    quality: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    def modules(self) -> list[str]:
        """The layers."""
        return list(self.formats)


class RotarySites(Sites):
    """Attention modules, and which columns of their q and k are a pair."""

    style: Literal["neox", "gptj"]


class Owners(Params):
    """The transformers models whose attention implementation is set."""

    owners: Annotated[Modules, Field(min_length=1)]

    def modules(self) -> list[str]:
        """The owners."""
        return self.owners


class SDPAOwners(Owners):
    """Owners that get SDPA. transformers takes any name, and loads code for one with a slash."""

    implementation: Literal["sdpa"]


class PackGQAOwners(Owners):
    """Owners that get the packed heads of wavecrest."""

    implementation: Literal["wavecrest_pack_gqa"]


class UnpaddedStacks(Sites):
    """Stacks of encoder layers, the transformers models they are in, and the masks whose padding is left out."""

    owners: Annotated[Modules, Field(min_length=1)]
    masks: Literal["any", "right"]

    def modules(self) -> list[str]:
        """The stacks and owners."""
        return [*self.sites, *self.owners]


class RoutedOwners(Owners):
    """Owners, and what dispatch decided for each of their calls, for people."""

    routes: list[dict[str, Any]] = Field(default_factory=list)


class Groups(Params):
    """Linear layers that become one GEMM."""

    groups: Annotated[list[Annotated[Modules, Field(min_length=2)]], Field(min_length=1)]

    def modules(self) -> list[str]:
        """The layers of all groups."""
        return [path for group in self.groups for path in group]


class Folded(Params):
    """[layer, norm]: batch norms, and the layers whose weights take them in."""

    pairs: Annotated[list[Annotated[Modules, Field(min_length=2, max_length=2)]], Field(min_length=1)]

    def modules(self) -> list[str]:
        """The layers and norms."""
        return [path for pair in self.pairs for path in pair]


class Readers(Params):
    """[norm, reader]: RMS norms, and the layers that compute them."""

    pairs: Annotated[list[Annotated[Modules, Field(min_length=2, max_length=2)]], Field(min_length=1)]

    def modules(self) -> list[str]:
        """The norms and layers."""
        return [path for pair in self.pairs for path in pair]


class Masks(Params):
    """Models whose masks are not written out while they are traced (`graphs.masks`), and the root's padding mask."""

    masks: Modules = Field(default_factory=list)
    padding: Literal["", "attention_mask"] = ""

    def modules(self) -> list[str]:
        """The models."""
        return self.masks


class CompilePreset(Masks):
    """A preset of `graphs.inductor`; and the ids of steps whose place it takes (`Step.instead_of`)."""

    preset: str
    instead_of: list[str] = Field(default_factory=list)


class PrecisionName(Params):
    """A precision of `steps.precision`."""

    precision: Literal["tf32", "bf16", "fp16"]


class SDPABackendName(Params):
    """A backend of scaled_dot_product_attention."""

    backend: Literal["flash", "cudnn", "efficient", "math"]


class FoldedPreset(CompilePreset):
    """The same, and the batch norms that are folded first: [layer, norm]."""

    pairs: list[Annotated[Modules, Field(min_length=2, max_length=2)]] = Field(default_factory=list)

    def modules(self) -> list[str]:
        """The models, layers and norms."""
        return [*super().modules(), *(path for pair in self.pairs for path in pair)]


class CaptureBuckets(Masks):
    """The buckets that are captured, and how what is not compiled yet is compiled first."""

    buckets: Annotated[list[str], Field(min_length=1)]
    compile: Literal["", "default"]


class TunedFile(Params):
    """A result file of TunableOp: [name, value] of its validators; [operator, sizes, solution, ms] of its GEMMs."""

    validators: Annotated[list[Annotated[list[Line], Field(min_length=2, max_length=2)]], Field(min_length=1)]
    rows: Annotated[list[Annotated[list[Line], Field(min_length=4, max_length=4)]], Field(min_length=1)]


class Launch(Params):
    """The key of a GEMM's calls, and the backend and configuration that they run on."""

    key: Annotated[list[int | str | bool | None], Field(min_length=1)]
    backend: str
    config: dict[str, Annotated[int, Field(ge=0, le=MOST_SETTING)]] = Field(default_factory=dict)


class Launches(Params):
    """Backends and configurations of GEMMs."""

    rows: Annotated[list[Launch], Field(min_length=1)]


class Candidates(Params):
    """Variables that were tried, and those that helped; they are set before import, not by the step."""

    candidates: list[Any]
    set: dict[str, str] = Field(default_factory=dict)


class FusedPreset(CompilePreset):
    """The same, the backend of gemm for each linear layer with an activation (`graphs.activations.name_of`), and that
    of flash_attention for attention that is written out (`graphs.attention.name_of`).
    """

    backends: dict[str, str] = Field(default_factory=dict)
    attentions: dict[str, str] = Field(default_factory=dict)


class LinearBackend(Params):
    """A linear layer, the module and the name of the activation that it takes in ("" for none), its backend, and the
    `precision` of its float32 products.
    """

    linear: str
    module: str
    activation: Literal["", "gelu", "gelu_tanh", "relu", "silu"]
    backend: str
    precision: Literal["ieee", "tf32x3"] = "ieee"


class EncoderSites(Sites):
    """TransformerEncoder modules and their layers, and the backends of gemm that linear layers inside run on."""

    layers: list[LinearBackend] = Field(default_factory=list)

    def modules(self) -> list[str]:
        """The sites, and the linear layers, which are there before the sites are replaced."""
        return [*self.sites, *(row.linear for row in self.layers)]


class LinearBackends(Params):
    """Linear layers and the backends of gemm that they run on."""

    layers: Annotated[list[LinearBackend], Field(min_length=1)]

    def modules(self) -> list[str]:
        """The layers and activations."""
        return [path for row in self.layers for path in (row.linear, row.module) if path]
