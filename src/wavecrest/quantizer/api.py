"""`wavecrest.quantize`: a model's linear layers and its cache in 8 or 4 bits, by measured error, and back again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument, QualityNotMet
from wavecrest.measure import numerics
from wavecrest.models.xlstm.network import xLSTMNetwork
from wavecrest.nn import Experts, Linear
from wavecrest.ops import PackedWeight
from wavecrest.ops.packed.formats import GROUPS
from wavecrest.quantizer import calibrate, choose, layers, place, saved, smooth
from wavecrest.quantizer import quality as _quality
from wavecrest.quantizer.calibrate import Observed, Seen
from wavecrest.quantizer.changes import Changes, install
from wavecrest.quantizer.layers import SCHEMES, Found, Site
from wavecrest.quantizer.quality import Limits, Original, Quality
from wavecrest.quantizer.report import CALIBRATION, RANDOM, CacheRow, LayerRow, QuantizeReport
from wavecrest.quantizer.result import Quantized
from wavecrest.quantizer.smooth import Group

__all__ = ["load_quantized", "quantize"]

ACTIVATIONS = ("dynamic", "static")


def quantize(
    model: nn.Module,
    format: str | Sequence[str] | None = "int8",
    *,
    kv_cache: str | None = None,
    dtype: str | None = None,
    calibration: Any = None,
    evaluation: Any = None,
    keep: Iterable[str] = (),
    quality: str | float | Mapping[str, Any] | None = None,
    max_error: float | None = None,
    group: int | None = None,
    smooth: float | None = 0.5,
    activations: str = "dynamic",
    only_faster: bool = False,
) -> Quantized:
    """Quantize a model's linear layers, in place and until `restore()`.

    Each layer takes the first of the formats in which its error is within `max_error`; with `quality` those with the
    largest errors then give way until the whole model is within the limit. For inference: there are no gradients.

    >>> quantized = wavecrest.quantize(model, "w8a8-int8", calibration=inputs, quality="0.5%")
    >>> print(quantized.report)

    Args:
        model: a module with its weights; it runs in eval mode meanwhile.
        format: "int8", "fp8", "int4" or "mxfp4" (weights alone), "w8a8-int8" or "w8a8-fp8" (weights and activations);
            or several of them in order of preference. None: no layer is quantized, the key-value cache alone.
        kv_cache: format of the key-value caches that `Quantized.cache` makes for a transformers model: "fp8", "int8" or
            "int4"; None: none. With inputs the model is then judged through such a cache, by itself too.
        dtype: another word for a single `format`, as `quantize(model, dtype="int8")`.
        calibration: inputs as for `wavecrest.optimize`, or a list of several. Without them errors are measured on
            random inputs, and the model's answers are not compared.
        evaluation: other inputs, which the model's answers are compared on; None: those of calibration.
        keep: patterns of layers that keep their precision, as "*.mlp.down_proj", of a path or its last name. Logits,
            embeddings, routers, and layers tied to an embedding are kept unless a pattern "!PATTERN" names them.
        quality: the most that perplexity may rise, on the given tokens and by the logits' divergence; for a model
            without logits the largest relative error: "0.5%" or 0.005. Or limits by name: kl, perplexity, relative and
            worst at most, top1 at least.
        max_error: largest relative error of a layer's output; None: a limit of the format's own.
        group: columns that share a scale, 32, 64 or 128, of int4 (None: 128) and int8 (None: all).
        smooth: 0 to 1, the part of the activations' peaks that W8A8 moves from a norm into the layers behind it where
            that lowers their error and changes no bit of the model before; None: nothing is moved.
        activations: "dynamic", a scale for each row, or "static", one from calibration, for W8A8.
        only_faster: quantize only layers that are proven faster on this device, on rows as in calibration.

    Returns:
        The quantized model with its report.

    Raises:
        InvalidArgument: an argument is outside this, the model has no such layer or is on the meta device, or a weight
            holds NaN or infinity.
        WorkloadError: the inputs cannot be used.
        Unsupported: `kv_cache` is asked for, and the model's attention does not read such caches.
        MissingDependency: `kv_cache` is asked for, and transformers is not installed.
        QualityNotMet: no layer, or no cache, can be quantized within the limits. On every error the model is as it was.
    """
    if dtype is not None and format != "int8":
        raise InvalidArgument(f"quantize: dtype={dtype!r} and format={format!r} say the same; give one of them")
    if format is None and (kv_cache is None or dtype is not None or tuple(keep)):
        raise InvalidArgument("quantize: format=None quantizes no layer: give kv_cache, and neither dtype nor keep")
    wanted = format if dtype is None else dtype
    names = () if wanted is None else layers.schemes(wanted)
    limits = _quality.limits(quality)
    _check_options(names, calibration, evaluation, limits, max_error, group, smooth, activations, only_faster)
    _check_model(model)
    through = None if kv_cache is None else place.cache_module().ThroughCache(model, kv_cache)
    found = layers.find(model, keep) if names else Found([], {})
    changes = Changes()
    with ExitStack() as stack:
        try:
            workload = judged = None
            if calibration is not None:
                workload = judged = calibrate.workload_of(model, calibration, "calibration")
                stack.callback(workload.restore_modes)
            if evaluation is not None:
                judged = calibrate.workload_of(model, evaluation, "evaluation")
                stack.callback(judged.restore_modes)
            run = _Run(model, found, names, changes, max_error, group, activations == "static")
            run.original = None if judged is None else Original(judged)
            inputs = "" if judged is None else "calibration" if evaluation is None else "evaluation"
            if through is not None:
                run.judge_cache(through, limits)
            if not names:
                return run.cache_alone(limits, inputs)
            if workload is not None:
                flow = smooth is not None and any(SCHEMES[name].activations for name in names)
                run.observed = calibrate.observe(workload, found.sites, flow=flow)
                found.leave(run.observed.readers)
                if flow:
                    assert smooth is not None
                    run.move_scales(smooth)
            run.measure_errors(workload.device if workload is not None and only_faster else None)
            choice, reached = run.choose(limits)
            return run.result(choice, reached, limits, inputs)
        except BaseException:
            changes.undo()
            raise


def load_quantized(model: nn.Module, path: str | Path, *, device: torch.device | str | None = None) -> Quantized:
    """Load what `Quantized.save` wrote into a model of the same structure: quantized layers and all other weights.

    Args:
        model: not quantized; its weights may be on the meta device, where they take no memory.
        path: the file.
        device: where the weights go; None: where the model's are, the CPU for those on the meta device.

    Returns:
        The model with its layers' formats; `restore()` puts its own weights back. Errors are not in the file's report.

    Raises:
        CheckpointError: the file is missing, damaged, newer than this version, or of another model, which is as it was.
        MissingDependency: safetensors is not installed.
    """
    before = bytes_of(model)
    content = saved.read(Path(path))
    changes = saved.place(model, content, str(path), device)
    return loaded(model, content.formats, changes, before, content.kv_cache)


def loaded(
    model: nn.Module,
    formats: dict[str, str],
    changes: Changes,
    before: int,
    kv_cache: str | None = None,
    left: Mapping[str, str] | None = None,
) -> Quantized:
    """The result for a model whose weights came quantized, of `before` bytes before; `left`: why layers are not."""
    rows = []
    # the dtype that experts stand for is the model's
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.bfloat16)
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            rows.append(LayerRow(path, formats.get(path), "", module.numel * dtype.itemsize, module.bytes_))
            continue
        if path not in formats and not isinstance(module, nn.Linear | Linear):
            continue
        weight = module.get_parameter("weight")
        full = weight.numel() * weight.element_size()
        reason = "" if left is None else left.get(path, "")
        rows.append(LayerRow(path, formats.get(path), reason, full, _stored_bytes(weight)))
    cache = None if kv_cache is None else CacheRow(kv_cache)
    report = QuantizeReport(type(model).__name__, tuple(rows), before, bytes_of(model), kv_cache=cache)
    return Quantized(model, formats, report, changes, kv_cache)


def _check_options(
    names: Sequence[str],
    calibration: Any,
    evaluation: Any,
    limits: Limits | None,
    max_error: float | None,
    group: int | None,
    smooth: float | None,
    activations: str,
    only_faster: bool,
) -> None:
    if max_error is not None and not 0 < max_error < math.inf:
        raise InvalidArgument(f"quantize: max_error is a share above 0, such as 0.05, not {max_error!r}")
    grouped = [name for name in names if not SCHEMES[name].activations and SCHEMES[name].weight in ("int8", "int4")]
    if group is not None and (group not in GROUPS or not grouped):
        raise InvalidArgument(
            f"quantize: group is {', '.join(map(str, GROUPS))} columns of int4 or int8, not {group!r} of {list(names)}"
        )
    if smooth is not None and not 0 <= smooth <= 1:
        raise InvalidArgument(f"quantize: smooth is a number from 0 to 1, or None, not {smooth!r}")
    if activations not in ACTIVATIONS:
        raise InvalidArgument(f"quantize: activations takes {', '.join(ACTIVATIONS)}, not {activations!r}")
    if calibration is None and (activations == "static" or only_faster):
        what = "only_faster" if only_faster else 'activations="static"'
        raise InvalidArgument(f"quantize: {what} needs calibration inputs, which say what the layers get")
    if limits is not None and calibration is None and evaluation is None:
        raise InvalidArgument("quantize: quality needs inputs to compare the model on: calibration or evaluation")


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"quantize takes a torch.nn.Module, not a {type(model).__name__}")
    meta = next((name for name, one in (*model.named_parameters(), *model.named_buffers()) if one.is_meta), None)
    if meta is not None:
        raise InvalidArgument(f"quantize: {meta} is on the meta device and has no values; load the weights first")
    if any(isinstance(module, xLSTMNetwork) for module in model.modules()):
        raise InvalidArgument(
            "quantize: an xLSTMLarge is quantized by wavecrest.models.xlstm.quantize, or as it is loaded by "
            "from_pretrained(quantize=…)"
        )


class _Run:
    """A call of `quantize`: what is known of the layers, and the choice."""

    def __init__(
        self,
        model: nn.Module,
        found: Found,
        names: Sequence[str],
        changes: Changes,
        max_error: float | None,
        group: int | None,
        static: bool,
    ) -> None:
        self._model, self._found, self._names, self._changes = model, found, names, changes
        self._max_error, self._group, self._static = max_error, group, static
        self.original: Original | None = None
        self.observed = Observed()
        self._groups: list[Group] = []
        self._stay: dict[str, str] = {}
        # by path: formats within the limit with their errors; and the row of each layer, as far as it is known
        self._errors: dict[str, list[tuple[str, float]]] = {}
        self._rows: dict[tuple[str, str], LayerRow] = {}
        self._refused: dict[str, LayerRow] = {}
        self._users = Counter(id(site.parameter) for site in found.sites)
        self._shared: dict[tuple[int, str], PackedWeight] = {}
        self._before = bytes_of(model)
        # asked for: what runs the model over the key-value cache, and its row
        self._through: Any = None
        self._cache: CacheRow | None = None

    def judge_cache(self, through: Any, limits: Limits | None) -> None:
        """Take a key-value cache, through which the model is judged from here on.

        Args:
            through: `kv_cache.ThroughCache`.
            limits: that the model in its own precision must meet with it.

        Raises:
            QualityNotMet: it does not.
        """
        self._through, quality = through, None
        if self.original is not None:
            quality = self.original.compare(through)
            problems = [] if limits is None else limits.broken(quality)
            if problems:
                raise QualityNotMet(
                    f"quantize: the key-value cache alone is not within the limits ({'; '.join(problems)}); allow "
                    "more, or name another format of kv_cache, such as int8"
                )
        self._cache = through.row(quality)

    def cache_alone(self, limits: Limits | None, inputs: str) -> Quantized:
        """The result where no layer is quantized."""
        assert self._cache is not None
        reached = self._cache.quality
        held = {} if limits is None or reached is None else limits.of(reached)
        name, size = type(self._model).__name__, self._before
        report = QuantizeReport(name, (), size, size, quality=reached, limits=held, inputs=inputs, kv_cache=self._cache)
        return Quantized(self._model, {}, report, self._changes, self._cache.format)

    def move_scales(self, alpha: float) -> None:
        """Find the norms whose scales can move into their layers, and keep those that lower the layers' error."""
        found, self._stay = smooth.groups(self._model, self.observed, alpha)
        name = next(one for one in self._names if SCHEMES[one].activations)
        for group in found:
            plain = self._squared_error(group, name)
            smooth.apply(group)
            moved = self._squared_error(group, name)
            if moved < plain:
                self._groups.append(group)
            else:
                smooth.withdraw(group)
                self._stay[group.path] = "its layers have no smaller error with them moved"
        if not self._groups or self.original is None:
            return
        # with all layers in their own precision, so that nothing but the migration can differ
        kept = dict.fromkeys((site.path for site in self._found.sites), None)
        install(self._changes, self._model, self._found.sites, self._groups, kept, all_groups=True)
        off = self.original.compare()
        self._changes.undo()
        dtype = str(self._groups[0].module.get_parameter("weight").dtype).removeprefix("torch.")
        if off.finite and off.relative <= numerics.tolerance("model", dtype).relative:
            return
        for group in self._groups:
            smooth.withdraw(group)
            self._stay[group.path] = f"the model's answers move by {off.relative:.2g} with them moved"
        self._groups.clear()

    def _squared_error(self, group: Group, name: str) -> float:
        total = 0.0
        for site in group.sites:
            rows, peak, _ = self._inputs(site)
            total += choose.error(site, name, self._packed(site, name), rows, peak) ** 2
        return total

    def _inputs(self, site: Site) -> tuple[Tensor, float | None, str]:
        """Rows of a layer's input, their peak if scales are fixed, and what they are."""
        seen = self._seen(site)
        if seen is None:
            return choose.random_rows(site), None, RANDOM
        return seen.rows, float(seen.peaks.amax()) if self._static else None, CALIBRATION

    def _seen(self, site: Site) -> Seen | None:
        """Inputs of a layer in calibration, divided as its weight is multiplied; None: it had no input."""
        seen = self.observed.seen.get(site.path)
        if seen is None or site.smoothed is None:
            return seen
        factors = site.smoothed
        return Seen(seen.rows / factors.to(seen.rows.dtype), seen.peaks / factors, seen.most_rows)

    def _packed(self, site: Site, name: str) -> PackedWeight:
        """A layer's weight in a format; layers that share theirs get one parameter."""
        key = (id(site.parameter), name)
        found = self._shared.get(key)
        if found is None:
            made: Any = nn.Parameter(site.packed(name, self._group), requires_grad=False)
            found = made
            if self._users[key[0]] > 1:
                self._shared[key] = made
        return found

    def measure_errors(self, timed_on: str | None) -> None:
        """Pack every layer in every format, and keep those within the limits.

        Args:
            timed_on: the device on which layers are timed; None: they are not.
        """
        for site in self._found.sites:
            self._errors[site.path] = []
            for name in self._names:
                row, made = self._measure(site, name, timed_on)
                if made is None:
                    self._refused.setdefault(site.path, row)
                    continue
                site.made[name] = made
                self._rows[site.path, name] = row
                assert row.error is not None
                self._errors[site.path].append((name, row.error))

    def _measure(self, site: Site, name: str, timed_on: str | None) -> tuple[LayerRow, nn.Module | None]:
        """A layer's row for a format, and the layer in it, or None if it keeps its precision."""
        size = site.bytes_
        if self._static and SCHEMES[name].activations and self._seen(site) is None:
            reason = f"{name}: calibration did not reach it, so its activations have no fixed scale"
            return LayerRow(site.path, None, reason, size, size), None
        weight = self._packed(site, name)
        rows, peak, kind = self._inputs(site)
        error = choose.error(site, name, weight, rows, peak)
        limit = SCHEMES[name].max_error if self._max_error is None else self._max_error
        if not error <= limit:
            reason = f"{name}: error above the limit of {limit:g} (max_error)"
            return LayerRow(site.path, None, reason, size, size, error, kind), None
        made = site.make(name, weight, peak)
        speed, ci = None, None
        seen = self._seen(site)
        if timed_on is not None:
            if seen is None:
                reason = f"{name}: calibration did not reach it, so that it was not timed"
                return LayerRow(site.path, None, reason, size, size, error, kind), None
            speed, ci = choose.speedup(site.module, made, seen, timed_on)
            if ci.low <= 1:
                reason = f"{name}: not proven faster at {seen.most_rows} rows"
                return LayerRow(site.path, None, reason, size, size, error, kind, speed, ci), None
        return LayerRow(site.path, name, "", size, weight.bytes_, error, kind, speed, ci), made

    def choose(self, limits: Limits | None) -> tuple[dict[str, str | None], Quality | None]:
        """The choice that is within the limits, put into the model; and the model beside the original."""
        choices = choose.order(self._errors)
        if not any(choices[0].values()):
            row = min(self._refused.values(), key=lambda one: math.inf if one.error is None else one.error)
            found = "" if row.error is None else f", its error is {row.error:.3g}"
            raise QualityNotMet(
                f"quantize: no layer is within the limits; {row.path} is closest: {row.reason}{found}. Give "
                "calibration inputs, a larger max_error or another format"
            )
        if self.original is None:
            self._install(choices[0])
            return choices[0], None
        tried: dict[int, Quality] = {}
        problems: list[str] = []

        def meets(choice: Mapping[str, str | None]) -> bool:
            assert self.original is not None
            self._install(choice)
            found = tried[id(choice)] = self.original.compare(self._through)
            problems[:] = [] if limits is None else limits.broken(found)
            return not problems

        if limits is None:
            meets(choices[0])
            return choices[0], tried[id(choices[0])]
        at = choose.first_within(choices, meets)
        if not any(choices[at].values()):
            meets(choices[-2])
            raise QualityNotMet(
                f"quantize: the limits are not met with one layer quantized ({'; '.join(problems)}); allow more, name "
                "another format, or leave the model as it is"
            )
        self._install(choices[at])
        return choices[at], tried[id(choices[at])]

    def _install(self, choice: Mapping[str, str | None]) -> None:
        install(self._changes, self._model, self._found.sites, self._groups, choice)

    def result(
        self, choice: Mapping[str, str | None], reached: Quality | None, limits: Limits | None, inputs: str
    ) -> Quantized:
        """The quantized model with its report."""
        rows = []
        formats: dict[str, str] = {}
        for site in self._found.sites:
            rows.append(self._row(site, choice[site.path]))
            name = choice[site.path]
            if name is not None:
                formats |= dict.fromkeys(site.paths, name)
            for other in [one for one in site.made if one != name]:
                del site.made[other]
        for path, reason in self._found.kept.items():
            weight = self._model.get_submodule(path).get_parameter("weight")
            size = _stored_bytes(weight)
            rows.append(LayerRow(path, None, reason, size, size))
        order = {path: at for at, (path, _) in enumerate(self._model.named_modules(remove_duplicate=False))}
        report = QuantizeReport(
            model=type(self._model).__name__,
            layers=tuple(sorted(rows, key=lambda row: order[row.path])),
            bytes_before=self._before,
            bytes_after=bytes_of(self._model),
            smoothed=tuple(group.path for group in self._groups if any(choice[one.path] for one in group.sites)),
            not_smoothed=self._stay,
            quality=reached,
            limits={} if limits is None or reached is None else limits.of(reached),
            inputs=inputs,
            kv_cache=self._cache,
        )
        kv_cache = None if self._cache is None else self._cache.format
        return Quantized(self._model, formats, report, self._changes, kv_cache)

    def _row(self, site: Site, name: str | None) -> LayerRow:
        refused = self._refused.get(site.path)
        if name is not None:
            row = self._rows[site.path, name]
            if name != self._names[0]:
                before = [one for one, _ in self._errors[site.path]]
                gave_way = before.index(name) > 0
                why = "gave way to the limit on quality" if gave_way or refused is None else refused.reason
                row = replace(row, reason=why)
            return row
        measured = self._errors[site.path]
        if not measured:
            assert refused is not None
            return refused
        last, error = measured[-1]
        kept = self._rows[site.path, last]
        reason = f"{last}: gave way to the limit on quality"
        size = site.bytes_
        return LayerRow(site.path, None, reason, size, size, error, kept.inputs, kept.speedup, kept.ci)


def _stored_bytes(tensor: Tensor) -> int:
    return tensor.bytes_ if isinstance(tensor, PackedWeight) else tensor.numel() * tensor.element_size()


def bytes_of(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    return sum(_stored_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))
