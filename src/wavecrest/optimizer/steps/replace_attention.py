"""Attention over to `wavecrest.ops`: of transformers models with masks that are not written out, and calls of PyTorch's
scaled_dot_product_attention in other modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused, WavecrestError
from wavecrest.graphs import masks
from wavecrest.optimizer.steps.around import Around
from wavecrest.optimizer.steps.attention import _attention_owners
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, structural_copy
from wavecrest.optimizer.steps.params import RoutedOwners, RoutedSites

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wavecrest.measure.workload import Inputs
    from wavecrest.nn.attention import Call

# the implementation's name in transformers
NAME = "wavecrest"
# backends that a model with SDPA runs on already
NATIVE = ("torch", "reference")
# share of SDPA's math path that one kernel saves: the scores are neither written nor read
MATH_GAIN = 0.8


class ReplaceAttention(Step):
    """Transformers models for which dispatch chooses another backend than PyTorch's in any call of attention."""

    id = "replace_attention"
    title = "attention → wavecrest"
    level = 4
    group = "attention implementation"
    params_type = RoutedOwners
    cures = ("dense_mask", "math_attention")

    def find(self, context: StepContext) -> Found:
        """The outermost transformers models whose calls, as they are made, dispatch gives to another kernel.

        Raises:
            StepRefused: a model has no attention interface, or its own checks of the implementation turn ours down.
        """
        assert context.model is not None
        owners = _attention_owners(context.model)
        if not owners:
            return Found((), note="not a transformers model: no attention interface to switch")
        made = use_attention(structural_copy(context.model), owners)
        routes = []
        for bucket, inputs in context.workload.buckets.items():
            try:
                calls = attention_calls(made, inputs)
            except WavecrestError as error:
                return Found((), note=f"bucket {bucket}: {error}")
            routes += [{"bucket": bucket, **_row(call)} for call in calls]
        if not routes:
            return Found((), note="the model makes no call of attention through its interface")
        note = _note(routes)
        if not any(row["backend"] not in NATIVE for row in routes):
            return Found((), note=f"dispatch chooses no other kernel than PyTorch's: {note}")
        return Found(tuple(owners), {"owners": list(owners), "routes": routes}, note)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Copies of grouped heads and work on hidden keys go; how much of each there is depends on the lengths."""
        share, math = context.share("memory") + 0.5 * context.share("attention"), context.math_share()
        if math:
            basis = f"SDPA's math path is {math:.0%} of the time; {found.note}"
            return Prediction.of_saved(MATH_GAIN * math, basis)
        basis = f"copies and half of attention are {share:.0%} of the time; {found.note}"
        return Prediction.of_saved(0.6 * share, basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Set the implementation on a private copy of the configuration."""
        return use_attention(model, params["owners"])


class ReplaceSDPA(Step):
    """Modules that call scaled_dot_product_attention, where dispatch chooses another backend than PyTorch's.

    Their calls are taken over while their forward runs, as PyTorch's own functions can be; the function itself, and
    other modules that call it, stay as they are.
    """

    id = "replace_sdpa"
    title = "SDPA calls → wavecrest"
    level = 4
    params_type = RoutedSites
    cures = ("dense_mask", "math_attention")

    def find(self, context: StepContext) -> Found:
        """The modules whose own forward makes such a call, but those of transformers, which have an interface."""
        assert context.model is not None
        owners = _attention_owners(context.model)
        sites: dict[str, bool] = {}
        routes = []
        # a forward of a transformers model has no call to look for
        buckets = {} if "" in owners else context.workload.buckets
        for bucket, inputs in buckets.items():
            try:
                calls = sdpa_calls(context.model, inputs)
            except WavecrestError as error:
                return Found((), note=f"bucket {bucket}: {error}")
            for path, call in calls:
                if any(path == owner or path.startswith(f"{owner}.") for owner in owners):
                    continue
                row = {"bucket": bucket, **_row(call), "module": path}
                sites[path] = sites.get(path, False) or row["backend"] not in NATIVE
                routes.append(row)
        if not routes:
            return Found((), note="no module outside of transformers models calls scaled_dot_product_attention")
        note, routed = _note(routes), [path for path, wins in sites.items() if wins]
        if not routed:
            return Found((), note=f"dispatch chooses no other kernel than PyTorch's: {note}")
        return Found(tuple(routed), {"sites": routed, "routes": routes}, note)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """As for transformers models."""
        math = context.math_share()
        if math:
            return Prediction.of_saved(MATH_GAIN * math, f"SDPA's math path is {math:.0%} of the time; {found.note}")
        share = context.share("attention")
        return Prediction.of_saved(0.2 * share, f"attention is {share:.0%} of the time; {found.note}")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Run the forward of each site with its calls taken over."""
        for path in params["sites"]:
            module = model.get_submodule(path)
            module.forward = _Routed(module)
        return model


class _Routed(Around):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from wavecrest.nn.attention import RouteSDPA

        with RouteSDPA():
            return self.run(*args, **kwargs)


def sdpa_calls(model: nn.Module, inputs: Inputs) -> list[tuple[str, Call]]:
    """Each call of scaled_dot_product_attention in one forward as `sdpa` would make it, with the path of its module."""
    import torch

    from wavecrest.nn.attention import RouteSDPA, watching

    found: list[tuple[str, Call]] = []
    running: list[str] = []
    handles = []
    with torch.no_grad(), watching() as calls:

        class Watch(RouteSDPA):
            def __torch_function__(self, *given: Any, **more: Any) -> Any:
                before = len(calls)
                result = super().__torch_function__(*given, **more)
                found.extend((running[-1] if running else "", call) for call in calls[before:])
                return result

        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_args, path=path: running.append(path)))
            handles.append(module.register_forward_hook(lambda *_args: (running.pop(), None)[1], always_call=True))
        try:
            with Watch():
                inputs.clone().call(model)
        finally:
            for handle in handles:
                handle.remove()
    return found


def _note(routes: list[dict[str, Any]]) -> str:
    """One line that names the backend of every call."""
    lines = Counter(
        f"{row['bucket']}: {row['queries']} queries, {row['keys']} keys {row['op']} {row['backend']} ({row['reason']})"
        for row in routes
    )
    return "; ".join(f"{count} × {line}" for line, count in lines.items())


def _row(call: Call) -> dict[str, Any]:
    """A call as JSON: what runs for it, and why."""
    decision = call.decision
    return {
        "module": call.module,
        "queries": call.queries,
        "keys": call.keys,
        "op": "scaled_dot_product_attention" if decision is None else decision.op,
        "backend": "torch" if decision is None else decision.backend,
        "config": {} if decision is None or decision.config is None else dict(decision.config.kwargs),
        "source": "fallback" if decision is None else decision.source,
        "reason": call.reason,
    }


def attention_calls(model: nn.Module, inputs: Inputs) -> list[Call]:
    """The calls of our attention that an uncompiled model makes in one forward, on copies of the inputs."""
    import torch

    from wavecrest.nn.attention import watching

    with torch.no_grad(), watching() as calls:
        inputs.clone().call(model)
    return calls


def use_attention(model: nn.Module, owners: Any = None) -> nn.Module:
    """Set "wavecrest" as the attention implementation of the transformers models inside `model`, which it returns.

    Args:
        model: changed in place; `set_attn_implementation` with the former name takes it back.
        owners: paths of transformers models (the empty path: the model itself); None: the outermost.

    Raises:
        StepRefused: there is no such model, or one does not call its attention through transformers' interface.
    """
    owners = _attention_owners(model) if owners is None else owners
    return set_attention(model, owners, NAME, register_attention)


def set_attention(model: nn.Module, owners: Sequence[str], name: str, register: Callable[[], None]) -> nn.Module:
    """Set an attention implementation, which `register` makes known, of the transformers models at `owners`, in place.

    Raises:
        StepRefused: there is no such model, or one does not call its attention through transformers' interface.
    """
    if not owners:
        raise StepRefused(f"{type(model).__name__} is no transformers model: no attention interface to switch")
    modules: list[Any] = [model.get_submodule(path) for path in owners]
    parts = [one for module in modules for one in module.modules() if hasattr(one, "set_attn_implementation")]
    # all of them before any is changed
    for part in parts:
        if not getattr(type(part), "_can_set_attn_implementation", lambda: True)():
            raise StepRefused(f"{type(part).__name__} does not call attention through transformers' interface")
    for module in modules:
        masks.set_implementation(module, name, register)
    return model


def register_attention() -> None:
    """Make "wavecrest" known to transformers' attention and mask interfaces."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from wavecrest.nn.attention import attend

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(**given: Any) -> Tensor | None:
    """The mask of one forward under transformers' interface (`AttentionMaskInterface`), in the shortest form there is.

    None where the calls themselves say what is hidden, compact or of lengths (`wavecrest.nn.attention`) where queries
    see the keys up to their own or a window of them, one row where all queries see the same, else written out
    [B, 1, Sq, Sk]; the last two are added to the scores, in the model's dtype.
    """
    # versions before 5.4 describe queries by a tensor of positions
    if "q_length" not in given:
        return _by_positions(given)
    from transformers.masking_utils import bidirectional_mask_function

    if given.get("mask_function") is bidirectional_mask_function and given.get("allow_is_bidirectional_skip"):
        return _one_row(given)
    return _compact(given)


def _by_positions(given: dict[str, Any]) -> Tensor | None:
    """The mask where queries are described by their positions: None where transformers' own is, else written out."""
    import torch
    import transformers
    from transformers.masking_utils import sdpa_mask

    from wavecrest.nn.attention import as_bias, warn_written_out

    visible: Tensor | None = sdpa_mask(**given)
    if visible is None:
        return None
    warn_written_out(f"masks of transformers {transformers.__version__}, in a short form from 5.4 on")
    return as_bias(visible, given.get("dtype", torch.float32))


def _is_tracing(tensor: Any) -> bool:
    """True where values cannot be read: compiling, exporting, capturing."""
    from transformers.utils import import_utils

    return bool(import_utils.is_tracing(tensor))


def _written_out(given: dict[str, Any]) -> Tensor | None:
    import torch
    from transformers.masking_utils import sdpa_mask

    from wavecrest.nn.attention import as_bias

    visible: Tensor | None = sdpa_mask(**{**given, "allow_is_causal_skip": False})
    return None if visible is None else as_bias(visible, given.get("dtype", torch.float32))


def _one_row(given: dict[str, Any]) -> Tensor | None:
    """The mask of queries that all see the same keys: those that are no padding, inside a window where there is one."""
    import torch

    from wavecrest.nn.attention import as_bias

    padding = _padding(given, given["kv_length"])
    if given.get("local_size") is not None or given["kv_length"] == 0:
        return _written_out(given)
    if padding is None or (not _is_tracing(padding) and bool(padding.all())):
        return None
    return as_bias(padding, given.get("dtype", torch.float32))[:, None, None, :]


def _padding(given: dict[str, Any], keys: int) -> Tensor | None:
    """Which of the first `keys` keys are not padding, bool [B, keys]; None where no key is padding."""
    from transformers.masking_utils import prepare_padding_mask

    first = given.get("kv_offset", 0)
    padding: Tensor | None = prepare_padding_mask(given.get("attention_mask"), given["kv_length"], first)
    return None if padding is None else padding[:, first : first + keys].bool()


def _is_causal(given: dict[str, Any]) -> bool:
    """True if a query sees the keys up to its own, or `local_size` of them, and nothing else is hidden but padding."""
    from transformers.masking_utils import causal_mask_function

    # transformers does not allow the skip for overlays, packed sequences, and static caches in decoding
    skips, local = given.get("allow_is_causal_skip", True), given.get("local_size")
    if not skips and given["q_length"] > 1:
        return False
    if local is None:
        return given.get("mask_function", causal_mask_function) is causal_mask_function
    if not skips and not _is_window_alone(given):
        return False
    config = given.get("config")
    # the other masks with a size are those of chunks
    chunks = getattr(config, "attention_chunk_size", None)
    return chunks is None and local == getattr(config, "sliding_window", None)


def _is_window_alone(given: dict[str, Any]) -> bool:
    """True if a mask of a window is that alone, where transformers does not allow to skip it for one query."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    # a union with something else has another name, and a cut with something of the model's own is mapped by vmap
    name = sliding_window_causal_mask_function(1).__name__
    return not given.get("use_vmap", False) and getattr(given.get("mask_function"), "__name__", "") == name


def _lengths(given: dict[str, Any], end: Tensor) -> tuple[Tensor | None, str]:
    """The mask of lengths of queries whose last key is at `end` − 1 (`end`: [1]); or None, with the reason."""
    import torch

    from wavecrest.nn.attention import lengths_mask

    first, batch, local = given.get("kv_offset", 0), given["batch_size"], given.get("local_size")
    ends = end.to(torch.int32).expand(batch)
    window = -1 if local is None or local >= given["kv_length"] else local - 1
    starts, shown = None, given.get("attention_mask")
    if shown is not None:
        if _is_tracing(shown):
            return None, "an attention_mask whose values are not known while compiling"
        shown = shown[:, first : first + given["kv_length"]].bool()
        hidden = shown.logical_not().sum(-1)
        place = torch.arange(shown.shape[1], device=shown.device)
        # at the left of a sequence, and nowhere else
        left = (shown == (place >= hidden[:, None])).all() & (end <= shown.shape[1]).all()
        is_left, is_none = torch.stack((left, (hidden == 0).all())).tolist()
        if not is_left:
            return None, "padding that is not at the left"
        starts = None if is_none else hidden.to(torch.int32)
    if window >= 0 and given["q_length"] == 1:
        # for one query, a window is the same as a start of its keys
        begin = (ends - (window + 1)).clamp(min=0)
        starts, window = begin if starts is None else torch.maximum(begin, starts), -1
    return lengths_mask(ends, starts, window), ""


def _compact(given: dict[str, Any]) -> Tensor | None:
    import torch

    from wavecrest.nn.attention import compact_mask, warn_written_out
    from wavecrest.ops._flash_decoding.call import MAX_TOKENS

    first, queries, kv_length = given.get("q_offset", 0), given["q_length"], given["kv_length"]
    if not _is_causal(given):
        return _written_out(given)
    reason = ""
    # the position of a static cache is a tensor
    if isinstance(first, torch.Tensor):
        if queries <= MAX_TOKENS:
            made, reason = _lengths(given, (first + (queries - given.get("kv_offset", 0))).reshape(1))
            if made is not None:
                return made
        if queries == 1 or _is_tracing(first):
            if reason:
                warn_written_out(reason)
            return _written_out(given)
    # the last query's own key is the last that is used; a static cache has room behind it
    keys = int(first) + queries - given.get("kv_offset", 0)
    if not queries <= keys <= kv_length:
        return _written_out(given)
    padding = _padding(given, keys)
    padded = padding is not None and (_is_tracing(padding) or not bool(padding.all()))
    window = keys if given.get("local_size") is None else min(keys, given["local_size"])
    # where it may not be skipped a step's mask has one form at all positions
    skips = given.get("allow_is_causal_skip", True)
    if queries == 1 and skips and not padded and window == keys == kv_length:
        return None
    if (queries < keys or not skips) and queries <= MAX_TOKENS:
        end = torch.full((1,), keys, device=given.get("device", "cpu"))
        made, reason = _lengths(given if padded else {**given, "attention_mask": None}, end)
        if made is not None:
            return made
    if queries == 1:
        if reason:
            warn_written_out(reason)
        return _written_out(given)
    if not padded and window == keys == queries:
        return None
    return compact_mask(~padding if padded and padding is not None else None, window, keys, given.get("device", "cpu"))
