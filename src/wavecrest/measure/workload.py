"""A workload: a model, named buckets of example inputs, and how to judge an answer.

Written as `file.py:function` or `package.module:function`, or a Hugging Face model folder (`--hf`, see
integrations.transformers). The function returns `(model, inputs)` or a `Workload`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from wavecrest import INSTALL_TORCH, hardware
from wavecrest.errors import MissingDependency, WavecrestError, WorkloadError
from wavecrest.measure.ranges import BATCH, LENGTH, Ranges, shape_of
from wavecrest.measure.tree import iter_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

# prefix of a spec -> loader, by name: layers above may provide ways of loading without being imported here
LOADERS = {
    "hf": "wavecrest.integrations.transformers:load_folder",
    "generate": "wavecrest.integrations.generate:load",
}
# the prefixes after which a spec names a folder, and no function
FOLDERS = ("hf",)

# a quality check: (original model, candidate) -> named checks; both are called exactly as the model is
QualityFn = Callable[[Callable[..., Any], Callable[..., Any]], "list[Quality]"]


@dataclass(frozen=True, slots=True)
class Quality:
    """One end-to-end check of the optimized model against the original, in the workload's own terms."""

    name: str
    value: float
    limit: float
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one call of the model."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a model with these inputs.

        Raises:
            WorkloadError: it calls sys.exit.
        """
        try:
            return function(*self.args, **self.kwargs)
        except SystemExit as error:
            raise WorkloadError(f"the model calls sys.exit({error.code!r}); a model must return") from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor inside, with a path such as "args[0]" or "input_ids"."""
        for index, value in enumerate(self.args):
            yield from iter_tensors(f"args[{index}]", value, set())
        for name, value in self.kwargs.items():
            yield from iter_tensors(name, value, set())

    def snapshot(self) -> list[Tensor]:
        """Copies of every tensor inside, in the order of `tensors`."""
        return [tensor.detach().clone() for _, tensor in self.tensors()]

    def restore(self, values: list[Tensor]) -> None:
        """Write values back into the tensors inside, at their own addresses."""
        for (_, tensor), value in zip(self.tensors(), values, strict=True):
            tensor.detach().copy_(value)

    def clone(self) -> Inputs:
        """A copy that shares no tensor with this one, so that a call that writes into its inputs leaves these alone."""
        return copy.deepcopy(self)


class Buckets(dict[str, Any]):
    """Named shapes of example inputs: `Buckets(b1=(x1,), b16={"input_ids": x16})`.

    Each value is what a single example input may be: a tensor, a tuple or list of positional arguments, or a dict of
    keyword arguments.

    Instead of shapes, ranges of them: `Buckets(example={"input_ids": …, "attention_mask": …}, batch=(1, 64),
    length=(1, 4096))`. The model is optimized at the ends and in the middle, and served within the ranges by padding.
    """


@dataclass(slots=True)
class Workload:
    """A model with example inputs, which the commands measure and optimize.

    Attributes:
        model: the module, in eval mode, on the device of its inputs.
        buckets: named example inputs, each an `Inputs` or what `Buckets` takes; a speed-up counts over all of them.
        quality: optional end-to-end check in the workload's own terms, run by optimize and verify.
        spec: how to load it again in another process ("file.py:function", "--hf DIR"), or None for a model in memory.
        name: what reports call it.
        reset: optional; called with the bucket's name before every call, outside the timed region. For inputs that a
            call changes, such as the write position of a key-value cache.
        load_seconds: how long `load` took; of a model in memory, how long its copy for child processes took, 0 before.
        load_bytes: memory of the GPU that `load` took at its peak; 0 on a CPU, and for a model in memory.
        in_training: names of modules that were in training mode when they were given; `restore_modes` puts them back.
        ranges: batches and lengths that are served, beyond those of the buckets; None: the buckets alone.
        copied: the folder of a copy for child processes (`measure.copies`), or None.
    """

    model: nn.Module
    buckets: dict[str, Inputs]
    quality: QualityFn | None = None
    spec: str | None = None
    name: str = "model"
    reset: Callable[[str], None] | None = None
    load_seconds: float = 0.0
    load_bytes: int = field(init=False, default=0)
    in_training: list[str] = field(init=False, default_factory=list)
    copied: Path | None = field(init=False, default=None)
    ranges: Ranges | None = None

    def __post_init__(self) -> None:
        import torch

        if not isinstance(self.model, torch.nn.Module):
            raise WorkloadError(
                f"the workload's model is a {type(self.model).__name__}, not a torch.nn.Module; "
                "return the module itself, not its output or a function"
            )
        if not self.buckets:
            raise WorkloadError("the workload has no example inputs; give at least one bucket")
        self.buckets = {str(bucket): _as_inputs(example) for bucket, example in self.buckets.items()}
        for bucket, inputs in self.buckets.items():
            _check_bucket(bucket, inputs)
        self._check_device()
        self.in_training = [name for name, module in self.model.named_modules() if module.training]
        self.model.eval()

    def restore_modes(self) -> None:
        """Training mode as it was when the model was given."""
        wanted = set(self.in_training)
        for name, module in self.model.named_modules():
            module.training = name in wanted

    @property
    def device(self) -> str:
        """The torch device name of the model's parameters (of the inputs, for a model without any)."""
        for tensor in self._state():
            return str(tensor.device)
        for inputs in self.buckets.values():
            for _, tensor in inputs.tensors():
                return str(tensor.device)
        return "cpu"

    @property
    def dtype(self) -> str:
        """The floating dtype of most parameters, without the "torch." prefix."""
        counts: dict[str, int] = {}
        for parameter in self._state():
            if parameter.is_floating_point():
                name = str(parameter.dtype).removeprefix("torch.")
                counts[name] = counts.get(name, 0) + parameter.numel()
        return max(counts, key=lambda name: counts[name]) if counts else "float32"

    def _state(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()

    def _check_device(self) -> None:
        devices = {str(tensor.device) for tensor in self._state()}
        if len(devices) > 1:
            raise WorkloadError(f"the model is spread over {', '.join(sorted(devices))}; one device is supported")
        home = next(iter(devices), None)
        for bucket, inputs in self.buckets.items():
            for path, tensor in inputs.tensors():
                # zero-dimensional CPU tensors mix with any device
                if home is not None and str(tensor.device) != home and tensor.ndim > 0:
                    raise WorkloadError(
                        f"bucket {bucket}: {path} is on {tensor.device} but the model is on {home}; "
                        "move both to one device in the workload function"
                    )

    def run(self, bucket: str, function: Callable[..., Any] | None = None) -> Any:
        """Reset the bucket's inputs and call `function` (the model, if None) with them, without gradients."""
        call = Call(self, bucket, function)
        call.prepare()
        return call()


class InputSets(Protocol):
    """Several inputs of one bucket; `current` is for the next call (`rotation.Rotation`)."""

    current: Inputs


@dataclass(slots=True)
class Call:
    """One call of a bucket, as the timer takes it: `prepare` runs before it and is not timed.

    Attributes:
        function: called with the inputs; None takes the workload's model.
        sets: where the inputs come from; None takes the workload's own.
    """

    workload: Workload
    bucket: str
    function: Callable[..., Any] | None = None
    sets: InputSets | None = None

    def prepare(self) -> None:
        """Reset the inputs, and tell inductor's graph trees that earlier outputs may be overwritten."""
        begin_step()
        if self.workload.reset is not None:
            self.workload.reset(self.bucket)

    def __call__(self) -> Any:
        """The timed part."""
        import torch

        function = self.workload.model if self.function is None else self.function
        inputs = self.workload.buckets[self.bucket] if self.sets is None else self.sets.current
        with torch.no_grad():
            return inputs.call(function)


def begin_step() -> None:
    """Tell inductor's graph trees that outputs of earlier calls may be overwritten.

    A process that has not loaded them has no tree; `torch.compiler.cudagraph_mark_step_begin` would load all of
    inductor, which took 40 % of the time of a child that measures one side and compiles nothing.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.mark_step_begin()


def from_example(model: nn.Module, example: Any, *, spec: str | None = None, name: str | None = None) -> Workload:
    """A workload from a module and its example inputs: a tensor, a tuple or list, a dict, an `Inputs` or `Buckets`."""
    found = _ranges(example)
    if found is not None:
        ranges, one = found
        made = {bucket: Inputs((), kwargs) for bucket, kwargs in ranges.examples(one).items()}
        return Workload(model, made, spec=spec, name=name or type(model).__name__, ranges=ranges)
    if isinstance(example, Buckets):
        buckets = {str(key): _as_inputs(value) for key, value in example.items()}
    else:
        buckets = {"default": _as_inputs(example)}
    return Workload(model, buckets, spec=spec, name=name or type(model).__name__)


def _ranges(example: Any) -> tuple[Ranges, Mapping[str, Any]] | None:
    """The declared ranges and the example of `Buckets`; None where it has no ranges.

    Raises:
        WorkloadError: a range has no example of keyword arguments beside it, or more than one.
    """
    if not isinstance(example, Buckets):
        return None
    spans = {name: value for name, value in example.items() if name in (BATCH, LENGTH) and _is_span(value)}
    if not spans:
        return None
    rest = [value for name, value in example.items() if name not in spans]
    if len(rest) != 1 or not isinstance(rest[0], Mapping):
        raise WorkloadError(
            "ranges of shapes take one example beside them, a dict of keyword arguments: "
            'wavecrest.Buckets(example={"input_ids": …, "attention_mask": …}, batch=(1, 64), length=(1, 4096))'
        )
    own = shape_of(rest[0]) or (1, 1)
    return Ranges(spans.get(BATCH, (own[0], own[0])), spans.get(LENGTH, (own[1], own[1]))), rest[0]


def _is_span(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(one) is int for one in value)


def load(spec: str, *, device: str | None = None) -> Workload:
    """Load `file.py:function`, `package.module:function`, `hf:DIR` or `generate:file.py:function`.

    Args:
        spec: the workload; `hf:DIR` is a local Hugging Face model folder, `generate:` greedy generation.
        device: torch device name to build it on. A function with a parameter named `device` receives it; one without
            must build the model there by itself.

    Raises:
        WorkloadError: no such file, module or function, the function raised, it returned something else than
            `(model, inputs)` or a `Workload`, or it built the model on another device.
    """
    begin, held = time.perf_counter(), _start_peak(device)
    try:
        spec.encode()
    except UnicodeEncodeError:
        # records name the workload, and are UTF-8
        raise WorkloadError(f"the workload {spec!a} has a name that is no UTF-8; rename it") from None
    if "\0" in spec:
        raise WorkloadError(f"the workload {spec!a} has a null byte in its name, which no file has")
    prefix, _, rest = spec.partition(":")
    if prefix in LOADERS:
        module_name, _, loader = LOADERS[prefix].partition(":")
        made: Any = getattr(importlib.import_module(module_name), loader)(rest, device=device)
    else:
        made = call_factory(spec, device)
    if isinstance(made, Workload):
        workload = made
        workload.spec = spec
    elif isinstance(made, tuple) and len(made) == 2:
        # reports call it by its class
        workload = from_example(made[0], made[1], spec=spec)
    else:
        raise WorkloadError(f"{spec} returned {type(made).__name__}; it must return (model, inputs) or a Workload")
    if device is not None and not _same_device(workload.device, device):
        raise WorkloadError(
            f"{spec} built its model on {workload.device}, but {device} was asked for; "
            "give the function a parameter named device and build on it"
        )
    workload.load_seconds = time.perf_counter() - begin
    if held is not None:
        workload.load_bytes = _peak(workload.device) - held
    return workload


def _start_peak(device: str | None) -> int | None:
    """Bytes that this process holds on a GPU, whose peak is counted from now on; None without one."""
    if device is None or not device.startswith("cuda"):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_reserved(device))


def _peak(device: str) -> int:
    import torch

    return int(torch.cuda.max_memory_reserved(device))


def _same_device(have: str, want: str) -> bool:
    def normal(name: str) -> str:
        return "cuda:0" if name == "cuda" else name

    return normal(have) == normal(want)


def source_of(spec: str) -> Path | None:
    """The file of a loaded workload's function, or the folder of a Hugging Face model; None if it has none."""
    prefix, _, rest = spec.partition(":")
    if prefix in FOLDERS:
        return Path(rest).resolve()
    target = (rest if prefix in LOADERS else spec).rpartition(":")[0]
    if target.endswith(".py"):
        return Path(target).resolve()
    file = getattr(sys.modules.get(target), "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None


def load_function(spec: str) -> Callable[..., Any]:
    """The function that `file.py:function` or `package.module:function` names.

    Raises:
        WorkloadError: it is written otherwise, or there is no such file, module or function.
    """
    target, separator, name = spec.rpartition(":")
    if not separator or not target or not name:
        raise WorkloadError(f"a workload is written file.py:function or package.module:function, not {spec!r}")
    function: Any = getattr(_load_module(target), name, None)
    if function is None:
        raise WorkloadError(f"{target} has no function {name!r}")
    if not callable(function):
        raise WorkloadError(f"{spec}: {name} is not a function")
    return function  # type: ignore[no-any-return]


def call_factory(spec: str, device: str | None) -> Any:
    """Call the function that a spec names, with the device if it has a parameter of that name; returns its result.

    Raises:
        WorkloadError: there is no such function, or it raised.
    """
    factory = load_function(spec)
    try:
        takes_device = "device" in inspect.signature(factory).parameters
        return factory(device=device or _default_device()) if takes_device else factory()
    except WavecrestError:
        raise
    except SystemExit as error:
        raise WorkloadError(f"{spec} calls sys.exit({error.code!r}); it must return (model, inputs)") from error
    except Exception as error:
        raise WorkloadError(f"{spec} raised {type(error).__name__}: {_first_line(error)}") from error


def _default_device() -> str:
    return hardware.detect().torch_name


def _load_module(target: str) -> Any:
    if target.endswith(".py"):
        path = Path(target).resolve()
        if not path.is_file():
            raise WorkloadError(f"no file {target}")
        module_spec = importlib.util.spec_from_file_location(f"wavecrest_workload_{path.stem}", path)
        if module_spec is None or module_spec.loader is None:
            raise WorkloadError(f"{target} is not a Python file")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_spec.name] = module
        with _importing(target), _on_path(path.parent):
            module_spec.loader.exec_module(module)
        return module
    with _importing(target), _on_path(Path.cwd()):
        return importlib.import_module(target)


@contextmanager
def _importing(target: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise MissingDependency("torch", f"the workload {target}", INSTALL_TORCH) from error
        raise WorkloadError(f"importing {target} failed: {_first_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"importing {target} raised {type(error).__name__}: {_first_line(error)}") from error


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "(no message)"


def _as_inputs(example: Any) -> Inputs:
    import torch

    if isinstance(example, Inputs):
        return example
    if isinstance(example, torch.Tensor):
        return Inputs((example,))
    if isinstance(example, Mapping):
        return Inputs((), dict(example))
    if isinstance(example, tuple | list):
        return Inputs(tuple(example))
    raise WorkloadError(
        f"example inputs are a {type(example).__name__}; give a tensor, a tuple, a dict of keyword arguments, "
        "or wavecrest.Buckets(name=inputs, …)"
    )


def _check_bucket(bucket: str, inputs: Inputs) -> None:
    tensors = list(inputs.tensors())
    if not tensors:
        raise WorkloadError(f"bucket {bucket}: there is no tensor in the example inputs")
    for path, tensor in tensors:
        if tensor.numel() == 0 and tensor.ndim > 0:
            raise WorkloadError(f"bucket {bucket}: {path} is empty (shape {tuple(tensor.shape)})")
