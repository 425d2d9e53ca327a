"""The package as somebody else gets it: built from its source archive, installed alone, used from there."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from wavecrest import __version__

hatchling = pytest.importorskip("hatchling.build", reason="hatchling, which builds the package, is not installed")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DATA = ("py.typed", "env_table.toml", "report/template.html.j2", "report/style.css", "report/page.js")

# somebody's program, which must pass the strictest type check
USER = """
from pathlib import Path

import torch
from torch import Tensor, nn

import wavecrest
from wavecrest import ops


def faster(model: nn.Module, inputs: Tensor, folder: Path) -> nn.Module:
    result = wavecrest.optimize(model, inputs, budget=60.0, out=folder)
    text: str = result.summary()
    result.plan.save(folder / "plan.json")
    loaded: wavecrest.Plan = wavecrest.Plan.load(folder / "plan.json")
    return loaded.apply(result.model) if text else result.model


def norm(x: Tensor) -> Tensor:
    try:
        return wavecrest.rms_norm(ops.rms_norm(x), (x.shape[-1],))
    except wavecrest.errors.InvalidArgument:
        return x
"""
WRONG = """
import wavecrest

result = wavecrest.optimize(3, budget="long")
result.nothing
"""


# a stranger's model and kernel
SERVE = """
import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def make(device):
    torch.manual_seed(0)
    return Tagger().eval().to(device), torch.randn(4, 32, device=device)
"""
OWN = """
import torch
import wavecrest


@wavecrest.register_kernel("silu_and_mul", arch="cpu", dtypes="float32")
def own_gate(gate, up):
    if up is None:
        gate, up = gate.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
"""


def build(source: Path, kind: str, into: Path) -> Path:
    """The archive that a front end such as `python -m build` gets from the project's build backend."""
    code = f"import sys; from hatchling import build; print(build.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(into)], cwd=source, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return into / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        # before Python 3.11.4 there is no filter
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return build(folder / f"wavecrest-{__version__}", "wheel", folder)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index",
        "--no-compile", "--target", str(folder), str(wheel),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=300)
    return folder


def use(installed: Path, *command: str, folder: Path | None = None) -> str:
    """Output of a program that finds the installed package, and not this checkout; with `folder` there, as its home."""
    mine = {} if folder is None else {"HOME": str(folder), "WAVECREST_DATABASE": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder or installed.parent,
        env=os.environ | {"PYTHONPATH": str(installed)} | mine, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_the_wheel_holds_what_the_repository_does(wheel: Path) -> None:
    """Every file of the package that git tracks, and nothing else but metadata."""
    listed = subprocess.run(["git", "ls-files", "src/wavecrest"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs a checkout")
    tracked = {
        name.removeprefix("src/") for name in listed.stdout.splitlines() if (ROOT / name).is_file()
    }  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert tracked - packed == set()
    assert {name for name in packed - tracked if not (ROOT / "src" / name).is_file()} == set()
    assert {f"wavecrest/{name}" for name in DATA} <= packed


def test_the_source_archive_is_small_and_complete(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"} <= names
    assert {name.partition("/")[0] for name in names if "/" in name} == {"src"}


def test_metadata_is_complete(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["Name"] == "wavecrest" and found["Version"] == __version__
    assert found["License-Expression"] == "Apache-2.0" and found["License-File"] == "LICENSE"
    assert found["Author"] and found["Keywords"] and found["Summary"]
    assert found["Requires-Python"] == PROJECT["requires-python"]
    classifiers = found.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert not any(line.startswith("License ::") for line in classifiers), "the license is an expression"
    assert set(found.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    # torch and triton are the user's: pip must not replace them
    needed = [line.split(";")[0] for line in found.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(needed) == len(PROJECT["dependencies"]) and not any(
        line.startswith(("torch", "triton")) for line in needed
    )
    assert found["Description-Content-Type"] == "text/markdown" and "No AMD timing" in found.get_payload()


def test_it_runs_from_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    program = installed / "bin" / "wavecrest"
    assert use(installed, str(program), "--version") == f"wavecrest {__version__}\n"
    code = """
import pathlib, wavecrest
from wavecrest import env, report
from wavecrest.dispatch.tuned import Database
from wavecrest.report import page
print(pathlib.Path(wavecrest.__file__).parent)
print(len(env.table()), len(page._asset("style.css")), len(page._asset("template.html.j2")))
from importlib import metadata
print(metadata.version("wavecrest"))
"""
    where, sizes, version = use(installed, "-c", code).splitlines()
    assert Path(where) == installed / "wavecrest" and version == __version__
    assert all(int(size) > 10 for size in sizes.split())
    rows = use(installed, str(program), "db", "check")
    assert "rows" in rows


@pytest.mark.slow
def test_a_strangers_first_hour(installed: Path, tmp_path: Path) -> None:
    """In an empty home: an own model optimized, its report and plan, an own kernel, the guide's names."""
    program = str(installed / "bin" / "wavecrest")
    (tmp_path / "serve.py").write_text(SERVE, encoding="utf-8")
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    few = ("--step", "fuse_qkv", "--budget", "5s", "--device", "cpu", "-o", "run")
    told = use(installed, program, "optimize", "serve.py:make", *few, folder=tmp_path)
    assert "Tagger: " in told and "plan and report: run/plan.json  run/report.html" in told
    assert "Tagger" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    call = ("explain", "silu_and_mul", "16", "256", "fp32", "--kernels", "own.py", "--device", "cpu")
    assert "not own_gate" in use(installed, program, *call, folder=tmp_path)
    code = """
import torch, own, wavecrest
from serve import make
print(wavecrest.check_kernel("silu_and_mul", "own_gate", device="cpu") > 5)
model, x = make("cpu")
model = wavecrest.Plan.load("run/plan.json").apply(model)
wavecrest.set_log_level("WARNING")
with torch.no_grad():
    print(tuple(wavecrest.matmul(x, x.T).shape), tuple(wavecrest.quantize(model, dtype="int8")(x).shape))
"""
    assert use(installed, "-W", "ignore", "-c", code, folder=tmp_path) == "True\n(4, 4) (4, 8)\n"


def test_a_users_program_passes_a_strict_type_check(installed: Path, tmp_path: Path) -> None:
    """Against the wheel, without the checkout's configuration; and what is wrong is found."""
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    # other packages' own sources are not what is checked, and reading them takes a minute. Nor are wavecrest's, which
    # scripts/check does: as for every installed package, errors in it are not told, and bodies of functions not read
    others = "torch.*,triton.*,transformers.*,ray.*,matplotlib.*"
    config = f"[mypy-{others}]\nfollow_imports = skip\n[mypy-wavecrest.*]\nignore_errors = True\n"
    (tmp_path / "mypy.ini").write_text(config, encoding="utf-8")
    pytest.importorskip("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "mypy.ini", "user.py", "wrong.py"],
        cwd=tmp_path, env=os.environ | {"MYPYPATH": str(installed)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line for line in lines if line.startswith("user.py")] == [], done.stdout
    assert sum(line.startswith("wrong.py") for line in lines) >= 2, done.stdout
