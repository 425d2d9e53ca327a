"""Diffusers' pipelines: the modules that one call runs are optimized, each behind its own gate, and put in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from wavecrest.errors import InvalidArgument, WavecrestError
from wavecrest.measure import timing
from wavecrest.measure.bootstrap import Interval
from wavecrest.measure.workload import Inputs, Workload
from wavecrest.optimizer import api
from wavecrest.optimizer.options import MAX_LEVEL, Options, Progress
from wavecrest.records import files

# shapes that a module is optimized for at most
MOST_SHAPES = 8

__all__ = ["Optimized", "Part", "optimize_pipeline"]


@dataclass(frozen=True, slots=True)
class Part:
    """A module of the pipeline.

    Attributes:
        path: such as "unet" or "vae.decoder".
        calls: how many calls one call of the pipeline makes of it.
        result: of its run; None where it was not optimized.
        note: why it was not, or "".
    """

    path: str
    calls: int
    result: api.OptimizeResult | None
    note: str = ""


@dataclass(slots=True)
class Optimized:
    """A pipeline with optimized modules in their places; `undo()` puts the original ones back.

    Attributes:
        pipeline: the pipeline, changed in place.
        parts: its modules.
        before_ms, after_ms: of one call of the pipeline, interleaved; `ratio` and `ci` are over blocks of one process.
    """

    pipeline: Any
    parts: list[Part]
    before_ms: float
    after_ms: float
    ratio: float
    ci: Interval
    _original: dict[str, nn.Module]

    def undo(self) -> None:
        """Put the original modules back; a second time does nothing."""
        original, self._original = self._original, {}
        for path, module in original.items():
            _put(self.pipeline, path, module)

    def summary(self) -> str:
        """The pipeline's times, and the verdict of each module, as lines of text."""
        lines = [
            f"{type(self.pipeline).__name__}: {self.before_ms:.1f} ms → {self.after_ms:.1f} ms, {self.ratio:.2f}× "
            f"[{self.ci.low:.2f}, {self.ci.high:.2f}] (one process)"
        ]
        for part in self.parts:
            told = part.note if part.result is None else part.result.summary().replace("\n", "\n  ")
            lines.append(f"{part.path} ({part.calls} calls): {told}")
        return "\n".join(lines)


def optimize_pipeline(
    pipeline: Any,
    call: Mapping[str, Any],
    *,
    level: int = MAX_LEVEL,
    min_gain: float = 0.02,
    budget: float = 1800.0,
    precision: str | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    seconds: float = 10.0,
) -> Optimized:
    """Optimize the modules of a pipeline in place, each one held to the accuracy gate and measured by itself.

    One call of the pipeline is watched: the components that it calls, or of a component that it calls by another
    method (the VAE's `decode`) the children, are the modules. Each shape that a module is called with is a bucket. At
    the end the whole call is timed, the original modules in turns with the optimized ones.

    Args:
        pipeline: of diffusers, on the device it serves on; anything with `components` and `__call__` is taken.
        call: keyword arguments of a typical call, such as {"prompt": …, "num_inference_steps": 4}.
        level, min_gain, precision: as for `wavecrest.optimize`.
        budget: seconds, shared by the modules alike.
        out: folder for pipeline.txt and a run's folder for each module; None keeps everything in memory.
        progress: is told what runs.
        seconds: for timing the whole call.

    Raises:
        InvalidArgument: this is no pipeline, no module of it is called, or accelerate moves its modules around.
        OutputError: the folder cannot be written.
    """
    components = getattr(pipeline, "components", None)
    if not isinstance(components, Mapping) or not callable(pipeline):
        raise InvalidArgument(f"optimize_pipeline takes a pipeline of diffusers, not {type(pipeline).__name__}")
    modules = {name: module for name, module in components.items() if isinstance(module, nn.Module)}
    moved = sorted(
        name for name, module in modules.items() if any(hasattr(one, "_hf_hook") for one in module.modules())
    )
    if moved:
        raise InvalidArgument(
            f"accelerate moves {', '.join(moved)} at each call; optimize the pipeline before it is offloaded, on one "
            "device"
        )
    seen = _watch(modules, lambda: pipeline(**call))
    if not seen:
        raise InvalidArgument(f"the call runs no module of {type(pipeline).__name__} that could be optimized")
    folder = None if out is None else files.prepare_folder(Path(out))
    options = Options(level=level, min_gain=min_gain, budget=budget / len(seen), precision=precision)
    parts = [_optimized(path, found, options, folder, progress) for path, found in seen.items()]
    made = {part.path: part.result.model for part in parts if part.result is not None}
    original = {path: seen[path].module for path in made}

    def run(models: Mapping[str, nn.Module]) -> None:
        for path, module in models.items():
            _put(pipeline, path, module)
        pipeline(**call)

    tensors = (tensor for found in seen.values() for tensor in (*found.module.parameters(), *found.module.buffers()))
    device = str(next((tensor.device for tensor in tensors), "cpu"))
    if progress is not None:
        progress.phase("the whole pipeline")
    try:
        pair = timing.measure_pair(lambda: run(original), lambda: run(made), device=device, seconds=seconds)
    except BaseException:
        for path, module in original.items():
            _put(pipeline, path, module)
        raise
    for path, module in made.items():
        _put(pipeline, path, module)
    found = Optimized(pipeline, parts, pair.base_ms, pair.new_ms, pair.ratio, pair.ci, original)
    if folder is not None:
        files.write_text(folder / "pipeline.txt", found.summary() + "\n")
    return found


@dataclass(slots=True)
class _Seen:
    """The calls of a module while one call of the pipeline was watched: an example of each shape."""

    module: nn.Module
    calls: int = 0
    examples: dict[tuple[Any, ...], Inputs] = field(default_factory=dict)

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call, and keep a copy of its inputs where their shapes are new."""
        self.calls += 1
        given = Inputs(args, kwargs)
        key = tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in given.tensors())
        if key not in self.examples and len(self.examples) < MOST_SHAPES:
            self.examples[key] = given.clone()

    def buckets(self) -> dict[str, Inputs]:
        """The examples by the shape of their first tensor, numbered where that is the same."""
        found: dict[str, Inputs] = {}
        for key, example in self.examples.items():
            name = "x".join(map(str, key[0][1])) if key else "call"
            found[name if name not in found else f"{name}-{len(found)}"] = example
        return found


def _watch(modules: Mapping[str, nn.Module], call: Callable[[], Any]) -> dict[str, _Seen]:
    """The components that a call of the pipeline calls, or else their children that it does, by path."""
    seen: dict[str, _Seen] = {}
    handles = []
    for name, component in modules.items():
        # a layer alone (the VAE's convolution of 1×1) is not worth a run
        children = ((f"{name}.{key}", one) for key, one in component.named_children() if list(one.children()))
        for path, module in ((name, component), *children):
            found = seen[path] = _Seen(module)
            handles.append(
                module.register_forward_pre_hook(
                    lambda _module, args, kwargs, found=found: found.add(args, kwargs), with_kwargs=True
                )
            )
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    called = {path: found for path, found in seen.items() if found.calls}
    return {path: found for path, found in called.items() if "." not in path or path.partition(".")[0] not in called}


def _optimized(path: str, found: _Seen, options: Options, folder: Path | None, progress: Progress | None) -> Part:
    try:
        workload = Workload(found.module, found.buckets(), name=path)
        try:
            result = api.run(workload, options, out=None if folder is None else folder / path, progress=progress)
        finally:
            workload.restore_modes()
    except WavecrestError as error:
        return Part(path, found.calls, None, f"not optimized: {error}")
    return Part(path, found.calls, result)


def _put(pipeline: Any, path: str, module: nn.Module) -> None:
    name, _, child = path.partition(".")
    if child:
        setattr(getattr(pipeline, name), child, module)
    else:
        # past diffusers' own, which would write the class of the optimized module into the pipeline's configuration
        object.__setattr__(pipeline, name, module)
