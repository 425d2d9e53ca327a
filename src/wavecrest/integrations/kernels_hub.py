"""A Hugging Face kernels repository of wavecrest's layers, and its mapping for transformers' names.

`kernels` (the package) exchanges the forward of a model's layers by name and device. transformers' own mapping has a
kernel for ROCm for few of its names; `mapping` fills those that wavecrest has an op for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from wavecrest import __version__
from wavecrest.errors import InvalidArgument, MissingDependency
from wavecrest.records import files

__all__ = ["BACKENDS", "LAYERS", "build", "enable", "mapping"]

# of kernel-builder's edition 5: pure Python, one variant a backend
EDITION, VERSION = 5, 1
NAME, LICENSE = "wavecrest", "Apache-2.0"
BACKENDS = ("cpu", "cuda", "rocm")
LAYERS_FILE = Path(__file__).with_name("hub_layers.py")


class Layer(NamedTuple):
    """The class of `hub_layers` for one of transformers' names, and what it runs."""

    layer: str
    runs: str


# transformers' names (5.24), and the classes of the repository
LAYERS = {
    "RMSNorm": Layer("RMSNorm", "rms_norm"),
    "SwiGLUMLP": Layer("SwiGLUMLP", "silu_and_mul"),
    "GeGLUMLP": Layer("GeGLUMLP", "gelu_and_mul"),
    "rotary_pos_emb": Layer("RotaryPosEmb", "rope"),
    "NewGELU": Layer("TanhGELU", "PyTorch's gelu, in one kernel"),
    "FastGELU": Layer("TanhGELU", "PyTorch's gelu, in one kernel"),
}

INIT = '''"""wavecrest's ops as layers; see layers.py."""

try:
    import wavecrest
except ImportError as error:
    raise ImportError("these layers run wavecrest's ops: install wavecrest beside them") from error

from . import layers

__all__ = ["layers"]
'''


def build(folder: str | Path) -> Path:
    """Write a kernels repository: build.toml, the sources, and a variant each for ROCm, CUDA and the CPU.

    Args:
        folder: new or empty, or one that this function has written.

    Returns:
        The folder, for `kernels.LocalLayerRepository`.

    Raises:
        OutputError: it cannot be written.
        InvalidArgument: it holds something else.
    """
    root = Path(folder)
    if root.is_dir() and any(root.iterdir()) and not (root / "build.toml").is_file():
        raise InvalidArgument(f"{root} holds something else than a kernels repository; name a new folder")
    layers = LAYERS_FILE.read_text(encoding="utf-8")
    written = {
        "build.toml": _build_toml(),
        "README.md": _readme(),
        f"torch-ext/{NAME}/__init__.py": INIT,
        f"torch-ext/{NAME}/layers.py": layers,
    }
    for backend in BACKENDS:
        place = f"build/torch-{backend}"
        written |= {f"{place}/__init__.py": INIT, f"{place}/layers.py": layers}
        written[f"{place}/metadata.json"] = json.dumps(_metadata(backend), indent=2) + "\n"
    for name, text in written.items():
        files.prepare_folder((root / name).parent)
        files.write_text(root / name, text)
    return root


def _metadata(backend: str) -> dict[str, Any]:
    # the id is the module's name in sys.modules
    return {
        "id": f"_{NAME}_{backend}_{__version__.replace('.', '_')}",
        "name": NAME,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
    }


def _build_toml() -> str:
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    return (
        f'[general]\nname = "{NAME}"\nversion = {VERSION}\nedition = {EDITION}\nlicense = "{LICENSE}"\n'
        f'backends = [{backends}]\n\n[torch-noarch]\npyext = ["py"]\n'
    )


def _readme() -> str:
    rows = "\n".join(f"| `{name}` | `{layer}` | {runs} |" for name, (layer, runs) in LAYERS.items())
    return (
        f"---\nlicense: {LICENSE.lower()}\ntags:\n- kernels\n---\n\n# wavecrest's ops as layers\n\n"
        f"They import the installed package `wavecrest` (written by {__version__}).\n\n"
        f"| name in transformers | layer | runs |\n|---|---|---|\n{rows}\n"
    )


def mapping(folder: str | Path, devices: Iterable[str] = ("rocm",), names: Iterable[str] | None = None) -> Any:
    """The mapping for `kernels.register_kernel_mapping`, `use_kernel_mapping` and `kernelize`.

    Args:
        folder: of `build`.
        devices: "rocm", "cuda", "cpu".
        names: some of `LAYERS`; None: all of them.

    Returns:
        {name: {device: LocalLayerRepository}}

    Raises:
        InvalidArgument: there is no repository in the folder, or a name or a device is unknown.
        MissingDependency: the package kernels is not installed.
    """
    try:
        from kernels import LocalLayerRepository
    except ImportError as error:
        raise MissingDependency("kernels", "a mapping of layers", "pip install kernels") from error
    devices, names = tuple(devices), tuple(LAYERS if names is None else names)
    for what, given, known in (("names", names, tuple(LAYERS)), ("devices", devices, BACKENDS)):
        unknown = [one for one in given if one not in known]
        if unknown:
            raise InvalidArgument(f"kernels_hub: {what} are {', '.join(known)}, not {', '.join(unknown)}")
    root = Path(folder)
    if not (root / "build").is_dir():
        raise InvalidArgument(f"{root} holds no kernels repository; kernels_hub.build(folder) writes one")
    return {
        name: {device: LocalLayerRepository(repo_path=root, layer_name=LAYERS[name].layer) for device in devices}
        for name in names
    }


def enable(folder: str | Path, devices: Iterable[str] = ("rocm",), names: Iterable[str] | None = None) -> None:
    """Register `mapping` in this process, above what is registered for these names and devices."""
    found = mapping(folder, devices, names)
    from kernels import register_kernel_mapping

    register_kernel_mapping(found)
