"""Rotary embeddings of transformers models over to `wavecrest.ops.rope`."""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, structural_copy
from wavecrest.optimizer.steps.params import RotarySites

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wavecrest.measure.workload import Workload
    from wavecrest.records import BucketProfile

# what transformers calls the function in the file of a model, and its arguments
NAME, ARGUMENTS = "apply_rotary_pos_emb", ["q", "k", "cos", "sin", "unsqueeze_dim"]
STYLES = ("neox", "gptj")
# of a float32 result beside the largest number in it: both sides round three products
AGREES = 1e-5
# q or k takes five kernels: ×, −, concatenation, ×, +
KERNELS = 5


@dataclass(slots=True)
class _Seen:
    """Styles of the calls of each module, by path ("" for a call that is not answered), and reasons against."""

    styles: dict[str, set[str]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


class ReplaceRotary(Step):
    """Attention modules of transformers rotate q and k with one kernel in place of ten.

    The module's class is replaced by a subclass whose forward sees another function under the name. The file of the
    model, and other modules of it, keep theirs.
    """

    id = "replace_rotary"
    title = "rotary embedding → wavecrest"
    level = 4
    params_type = RotarySites
    # q and k of a fused projection lie side by side, and are rotated by one launch
    tried_after = ("fuse_qkv",)

    def find(self, context: StepContext) -> Found:
        """Modules whose calls of the function, as the model makes them, `rope` answers too."""
        assert context.model is not None
        if context.device.kind == "cpu":
            return Found((), note="on the CPU the op runs PyTorch's own operations, so nothing would change")
        seen = _watch(context.model, context.workload)
        if not seen.styles and not seen.reasons:
            return Found((), note=f"no module calls a function {NAME}")
        note = "; ".join(dict.fromkeys(seen.reasons))
        # a module is left out where one of its calls is not answered, or its calls differ
        able = {path: styles for path, styles in seen.styles.items() if len(styles) == 1 and "" not in styles}
        if not able:
            return Found((), note=note or f"{NAME} is not called")
        ((style,), _), *_ = Counter(map(tuple, able.values())).most_common()
        sites = [path for path, styles in able.items() if styles == {style}]
        return Found(tuple(sites), {"sites": sites, "style": style}, f"left out: {note}" if note else "")

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """One kernel for q and k instead of ten, each about as long as the one that negates a half."""
        rows = [_negations(bucket) for bucket in context.profile]
        busy, idle = 1 - context.idle_share(), context.idle_share()
        count = max(len(rows), 1)
        part = busy * KERNELS * sum(share for share, _ in rows) / count
        gaps = idle * min(1.0, KERNELS * sum(launches for _, launches in rows) / count)
        saved = (part + gaps) * (1 - 1 / (2 * KERNELS))
        return Prediction.of_saved(
            saved, f"rotary embeddings are about {part:.0%} of the time, their launches {gaps:.0%}"
        )

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Give each site the function."""
        from wavecrest.nn.derived import derive

        for path in params["sites"]:
            module = model.get_submodule(path)
            if not _calls_it(module):
                raise StepRefused(f"{path} ({type(module).__name__}) does not call {NAME}")
            derive(module, _rotating, params["style"])
        return model


def _rotating(kind: type[nn.Module], style: str) -> type[nn.Module]:
    """A subclass whose forward rotates by the op."""
    from wavecrest.nn.rotary import rotate_qk

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return rotate_qk(q, k, cos, sin, heads_dim=unsqueeze_dim, style=style)

    return type(kind.__name__, (kind,), {"forward": _seeing(kind.forward, apply_rotary_pos_emb)})


def _watch(model: nn.Module, workload: Workload) -> _Seen:
    """The styles of each module's calls in one forward of every bucket, by a copy of the model."""
    import torch

    model, seen = structural_copy(model), _Seen()
    for path, module in model.named_modules():
        if _calls_it(module):
            try:
                kind = type(module)
                watched = partial(_watched, _function_of(kind), seen.styles.setdefault(path, set()), seen)
                module.__class__ = type(kind.__name__, (kind,), {"forward": _seeing(kind.forward, watched)})
            except StepRefused as error:
                seen.reasons.append(str(error))
    if seen.styles or seen.reasons:
        with torch.no_grad():
            for inputs in workload.buckets.values():
                inputs.clone().call(model)
    return seen


def _negations(bucket: BucketProfile) -> tuple[float, float]:
    """The shares of device time and of launches of the negated halves, one of five kernels for each of q and k."""
    rows = [op for op in bucket.ops if op.name == "aten::neg"]
    return sum(op.share for op in rows), sum(op.calls for op in rows) / max(bucket.launches, 1)


def _inner(function: Callable[..., Any]) -> types.FunctionType | None:
    found = inspect.unwrap(function)
    return found if isinstance(found, types.FunctionType) else None


def _calls_it(module: nn.Module) -> bool:
    forward = _inner(type(module).forward)
    return forward is not None and NAME in forward.__code__.co_names and NAME in forward.__globals__


def _function_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """The function that modules of a class call.

    Raises:
        StepRefused: it takes other arguments.
    """
    forward = _inner(kind.forward)
    assert forward is not None
    function: Callable[..., Any] = forward.__globals__[NAME]
    found = list(inspect.signature(function).parameters)
    if found != ARGUMENTS:
        raise StepRefused(f"{NAME} of {kind.__name__} takes ({', '.join(found)})")
    return function


def _seeing(function: Callable[..., Any], other: Callable[..., Any]) -> types.FunctionType:
    """A copy of a function, and of the decorators around it, that sees `other` under the name.

    Raises:
        StepRefused: a decorator does not hold the function it wraps in its closure.
    """
    assert isinstance(function, types.FunctionType)
    inner = getattr(function, "__wrapped__", None)
    cells, scope = function.__closure__, function.__globals__
    if inner is None:
        # without its name: torch.compile would look the function up in the module of that name
        scope = {name: value for name, value in scope.items() if name != "__name__"} | {NAME: other}
    else:
        copied, cells = _seeing(inner, other), cells or ()
        if not any(cell.cell_contents is inner for cell in cells):
            raise StepRefused(f"a decorator of {function.__qualname__} does not hold the function that it wraps")
        cells = tuple(types.CellType(copied) if cell.cell_contents is inner else cell for cell in cells)
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__qualname__, made.__module__ = (
        function.__kwdefaults__, function.__qualname__, function.__module__,
    )  # fmt: skip
    made.__dict__.update(function.__dict__)
    if inner is not None:
        made.__wrapped__ = copied  # type: ignore[attr-defined]
    return made


def _watched(function: Callable[..., Any], styles: set[str], seen: _Seen, *args: Any, **kwargs: Any) -> Any:
    """The call of a model's own function; notes the style in which ours answers it, or "" and why it does not."""
    result = function(*args, **kwargs)
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    try:
        styles.add(_style(function, *[given.arguments[name] for name in ARGUMENTS], result=result))
    except (StepRefused, InvalidArgument) as error:
        styles.add("")
        seen.reasons.append(str(error))
    return result


def _style(
    function: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int, *, result: Any
) -> str:
    """The style in which ours gives the same answer.

    Raises:
        StepRefused: no style does.
        InvalidArgument: `rope` does not take the call.
    """
    from wavecrest.nn.rotary import rotate_qk

    if q.ndim != 4 or heads_dim not in (1, 2):
        raise StepRefused(f"{NAME} is called with q {list(q.shape)} and unsqueeze_dim {heads_dim}")
    wide = [tensor.float() for tensor in (q, k, cos, sin)]
    right = function(*wide, heads_dim)
    for style in STYLES:
        mine = rotate_qk(*wide, heads_dim=heads_dim, style=style)
        if not all(map(_agree, mine, right)):
            continue
        dtypes = [one.dtype for one in rotate_qk(q, k, cos, sin, heads_dim=heads_dim, style=style)]
        if dtypes != [one.dtype for one in result]:
            raise StepRefused(f"{NAME} of {q.dtype} with tables of {cos.dtype} answers in {result[0].dtype}")
        return style
    raise StepRefused(f"{NAME} computes something else than a rotation of pairs")


def _agree(mine: Tensor, right: Tensor) -> bool:
    if mine.shape != right.shape:
        return False
    scale = float(right.abs().max()) if right.numel() else 0.0
    return bool(((mine - right).abs() <= AGREES * scale).all())
