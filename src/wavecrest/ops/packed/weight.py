"""Packed weights: a weight [N, K] in the layout and precision that a kernel reads, with its format.

A layout kept as an attribute beside a tensor is lost by `nn.Parameter`, `.to()` or `state_dict`, and the next kernel
computes wrong numbers without an error. A `PackedWeight` carries format, scales and group through all of these, and
every torch function that would take the stored values for the weight itself is refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.ops.packed import formats as _packed
from wavecrest.ops.packed.formats import DTYPES, FORMATS, STORED
from wavecrest.records import decode

_ADVICE = "use wavecrest.ops.linear, or .unpack()"
# properties that weights must share to be joined, as well as K and the parts
_ALIKE = attrgetter("format", "group", "dtype", "device", "stored.dtype")
_aten = torch.ops.aten


class PackedWeight(Tensor):
    """A weight [N, K] in a packed format; shape, dtype and device are those of the weight it stands for.

    Made by `pack` and `PackedWeight.from_parts`. docs/packed_weights.md has the layouts.

    Attributes:
        format: one of FORMATS.
        stored: the stored values: [N, K], or uint8 [N, Kp / 2] for int4 and mxfp4 (Kp: K, up to a multiple of 64).
        scale: float32, uint8 (e8m0) for mxfp4, or None for values that are not quantized.
        zero: uint8 of the scale's shape, the zero points of asymmetric int4, or None.
        group: columns of K that share a scale; K for one scale a row, and without a scale.
    """

    format: str
    stored: Tensor
    scale: Tensor | None
    zero: Tensor | None
    group: int

    # torch functions reach __torch_dispatch__ as aten ops; there is nothing to add before
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *_args: Any, **_kwargs: Any) -> PackedWeight:
        """Refused: parts that nobody checked would be wrong numbers later."""
        raise InvalidArgument("PackedWeight is made by pack(weight, format) or PackedWeight.from_parts(...)")

    @staticmethod
    def from_parts(
        format: str,
        stored: Tensor,
        *,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        group: int | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> PackedWeight:
        """A packed weight from values that are in their format already; shapes, dtypes and devices are checked.

        The tensors are taken as they are, and copied only where they are not contiguous. Their values are not looked
        at: in int4 those beyond K should be the zero point, in mxfp4 0, as `pack` has them.

        Args:
            format: one of FORMATS.
            stored: plain, shuffled: [N, K]; int8: int8 [N, K]; int4, mxfp4: uint8 [N, Kp / 2]; fp8, fp8_block: an
                8-bit floating-point type [N, K].
            scale: float32 [N, 1], [N, ceil(K / group)] (int8, int4) or [ceil(N / 128), ceil(K / 128)] (fp8_block);
                uint8 [N, ceil(K / 32)], e8m0, for mxfp4; None where values are not quantized.
            zero: int4 only: uint8 of the scale's shape, or None for 8.
            group: int8, int4: 32, 64 or 128 columns of K that share a scale; None: all K, which int4 does not have.
                mxfp4: 32, or None.
            shape: (N, K); int4 and mxfp4 need it where K is not a multiple of 64.
            dtype: the floating-point type the weight stands for; None: that of `stored` where it is not quantized.

        Returns:
            The packed weight.

        Raises:
            InvalidArgument: a shape, dtype, device or name is outside this.
        """
        if format not in FORMATS:
            raise InvalidArgument(f"packed weight: format is {', '.join(FORMATS)}, not {format!r}")
        if any(isinstance(part, PackedWeight) for part in (stored, scale, zero)):
            raise InvalidArgument("packed weight: the parts are plain tensors; one of them is a packed weight")
        if not isinstance(stored, Tensor) or stored.ndim != 2 or stored.dtype not in STORED[format]:
            types = _packed.names(STORED[format])
            raise InvalidArgument(
                f"packed weight: {format} stores [rows, columns] of {types}, not {_packed.named(stored)}"
            )
        n, k = _packed.shape_of(format, stored, shape)
        dtype = _packed.dtype_of(format, stored.dtype, dtype)
        group = _packed.group_of(format, stored.dtype, k, group)
        _packed.check_divisible(format, n, k)
        wanted = _packed.scale_shape(format, stored.dtype, (n, k), group)
        _packed.check_part("scale", scale, _packed.scale_dtype(format), wanted, stored)
        if zero is not None:
            _packed.check_part("zero", zero, torch.uint8, wanted if format == "int4" else None, stored)
        scale, zero = (None if part is None else part.detach().contiguous() for part in (scale, zero))
        return _build(format, stored.detach().contiguous(), scale, zero, group, (n, k), dtype)

    def unpack(self) -> Tensor:
        """The weight [N, K] in its dtype: plain and shuffled values bit by bit, else `dequantize_float32` rounded once.

        For the plain format it is the stored tensor itself, not a copy.
        """
        if self.scale is not None:
            return self.dequantize_float32().to(self.dtype)
        return _packed.unshuffled(self.stored) if self.format == "shuffled" else self.stored

    def dequantize_float32(self) -> Tensor:
        """The weight [N, K] in float32: value · scale, or (value − zero) · scale for int4."""
        if self.scale is None:
            return self.unpack().float()
        if self.format == "mxfp4":
            values = _packed.e2m1_values(_packed.nibbles(self.stored)[:, : self.shape[1]])
            return values * _packed.expanded(_packed.e8m0_values(self.scale), self.shape, 1, self.group)
        if self.format == "int4":
            values = _packed.nibbles(self.stored)[:, : self.shape[1]].float()
            if self.zero is None:
                values = values - _packed.INT4_ZERO
            else:
                values = values - _packed.expanded(self.zero.float(), self.shape, 1, self.group)
        else:
            values = (_packed.unshuffled(self.stored) if self.format == "shuffled" else self.stored).float()
        rows = _packed.BLOCK if self.format == "fp8_block" else 1
        return values * _packed.expanded(self.scale, self.shape, rows, self.group)

    @property
    def bytes_(self) -> int:
        """Bytes of values, scales and zero points (`nbytes` is what the weight it stands for would take)."""
        return sum(part.numel() * part.element_size() for part in self._parts().values())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Format, sizes, dtype and device, without the values."""
        return f"PackedWeight({_described(self)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, int, torch.dtype]]:
        """The names of the tensors inside, and the rest; for torch.compile."""
        return list(self._parts()), (self.format, self.group, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[str, int, torch.dtype], size: Any, _stride: Any
    ) -> PackedWeight:
        """The inverse of `__tensor_flatten__`."""
        format, group, dtype = context
        return _build(format, inner["stored"], inner.get("scale"), inner.get("zero"), group, size, dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The few ops that keep a weight's values and layout; all others are refused."""
        kwargs = kwargs or {}
        if func in _COMPOSITE:
            return func.decompose(*args, **kwargs)
        handler = _HANDLERS.get(func)
        given = args[0] if func is _aten.cat.default else args[:1]
        if handler is None or not all(isinstance(one, PackedWeight) for one in given):
            raise _refusal(func, args, kwargs)
        out = handler(func, *args, **kwargs)
        return return_and_correct_aliasing(func, args, kwargs, out)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """A copy with its own tensors; of a parameter, a parameter."""
        copied = self._map(lambda part: copy.deepcopy(part, memo))
        return _as_parameter(copied) if isinstance(self, nn.Parameter) else copied

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """For pickle, copy and torch.save: the parts, which are checked again when they are loaded."""
        # as bytes: torch 2.13 writes pickles of 8-bit floating-point tensors that it cannot read
        stored = self.stored.view(torch.uint8) if self.stored.dtype in _packed.FP8 else self.stored
        about = (self.stored.dtype, self.group, tuple(self.shape), self.dtype, isinstance(self, nn.Parameter))
        return _restored, (self.format, stored, self.scale, self.zero, *about)

    # torch's own would exchange size and device, and leave the stored values behind
    @property
    def data(self) -> Tensor:
        """The same weight, no parameter."""
        return self.detach()

    @data.setter
    def data(self, _value: Any) -> NoReturn:
        raise Unsupported("the data of a packed weight cannot be replaced: give the module a new nn.Parameter")

    # a gradient would never arrive: kernels read the stored values
    @property
    def requires_grad(self) -> bool:
        """False: packed weights are for inference."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> PackedWeight:
        """Refused unless False."""
        if requires_grad:
            raise Unsupported("a packed weight takes no gradient: use nn.Parameter(weight, requires_grad=False)")
        return self

    def data_ptr(self) -> NoReturn:
        """Refused: torch's own is a null pointer, and a kernel must know the format."""
        raise Unsupported(f"a packed weight ({_described(self)}) has no memory of its own: {_ADVICE}")

    def __dlpack__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused, as data_ptr is."""
        self.data_ptr()

    def _typed_storage(self) -> NoReturn:
        raise Unsupported(
            f"a packed weight ({_described(self)}) has no storage: for safetensors, save to_plain(state_dict)"
        )

    def is_shared(self) -> bool:
        """True if the parts are in memory shared between processes."""
        return all(part.is_shared() for part in self._parts().values())  # type: ignore[no-untyped-call]

    def share_memory_(self) -> PackedWeight:
        """Move the parts to memory shared between processes."""
        for part in self._parts().values():
            part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def _parts(self) -> dict[str, Tensor]:
        found = {"stored": self.stored, "scale": self.scale, "zero": self.zero}
        return {name: part for name, part in found.items() if part is not None}

    def _map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> PackedWeight:
        scale, zero = (None if part is None else function(part) for part in (self.scale, self.zero))
        return _build(self.format, function(self.stored), scale, zero, self.group, self.shape, dtype or self.dtype)


def pack(
    weight: Tensor,
    format: str,
    *,
    group: int | None = None,
    dtype: torch.dtype | None = None,
    symmetric: bool = True,
) -> PackedWeight:
    """Pack a weight [N, K]: lay it out anew, or round it to 8 or 4 bits with scales.

    A scale is max |w| / largest of its row, group or block (largest: 127, 7 for int4, or that of the 8-bit
    floating-point type), no less than 2^-126, and 1 where all weights are 0. Quantized values are round(w / scale),
    ties to even. Asymmetric int4: scale = (max − min) / 15 over the group's weights and 0, zero = round(−min / scale).
    mxfp4: scale = 2^(⌊log2(max |w|)⌋ − 2), no less than 2^-127; values beyond 6 scales become that (OCP MX v1.0, 6.3).

    Args:
        weight: [N, K], float32, float16, bfloat16 or float64, any strides. The plain format shares the memory of a
            contiguous one.
        format: one of FORMATS. shuffled takes N in multiples of 16 and K in multiples of 32.
        group: columns of K that share a scale: 32, 64 or 128 for int4 (None: 128), int8 and shuffled int8 (None: all);
            32 for mxfp4.
        dtype: what is stored: an 8-bit floating-point type for fp8 and fp8_block (None: float8_e4m3fn); int8 or such a
            type for shuffled (None: the weight's own).
        symmetric: False, for int4: with zero points.

    Returns:
        The packed weight, with the weight's dtype and device.

    Raises:
        InvalidArgument: an argument is outside this, or a weight to be quantized holds NaN or infinity.
    """
    if format not in FORMATS:
        raise InvalidArgument(f"pack: format is {', '.join(FORMATS)}, not {format!r}")
    if isinstance(weight, PackedWeight):
        raise InvalidArgument(f"pack: the weight is packed already ({_described(weight)}); pack weight.unpack()")
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.dtype not in DTYPES:
        raise InvalidArgument(f"pack: takes a weight [N, K] of {_packed.names(DTYPES)}, got {_packed.named(weight)}")
    if not symmetric and format != "int4":
        raise InvalidArgument(f"pack: only int4 has zero points; {format} takes symmetric=True")
    weight = weight.detach()
    n, k = int(weight.shape[0]), int(weight.shape[1])
    keeps = format in ("plain", "shuffled")
    target = dtype if dtype is not None else weight.dtype if keeps else STORED[format][0]
    if target not in STORED[format] or (target in DTYPES and target != weight.dtype):
        raise InvalidArgument(f"pack: {format} does not store {target} for a weight of {weight.dtype}")
    group = _packed.group_of(format, target, k, 128 if format == "int4" and group is None else group)
    _packed.check_divisible(format, n, k)
    stored, scale, zero = weight, None, None
    if target not in DTYPES:
        stored, scale, zero = _packed.quantized(weight, format, target, group, symmetric)
    if format == "shuffled":
        stored = _packed.shuffled(stored)
    return PackedWeight.from_parts(
        format, stored, scale=scale, zero=zero, group=group, shape=(n, k), dtype=weight.dtype
    )


def mxfp4_of_pairs(pairs: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    """An mxfp4 weight from one whose bytes hold neighbouring columns, the even one in the low 4 bits.

    That is how checkpoints have it: `weight_packed` and `weight_scale` of compressed-tensors (mxfp4-pack-quantized),
    `weight` and `weight_scale` of AMD Quark, and an expert of gpt-oss's `_blocks` and `_scales`.

    Args:
        pairs: uint8 [N, K / 2], or [N, K / 32, 16] as in gpt-oss.
        scale: [N, K / 32], e8m0: uint8 or float8_e8m0fnu.
        dtype: what the weight stands for.

    Returns:
        The weight [N, K], value by value.

    Raises:
        InvalidArgument: a shape or dtype is outside this.
    """
    if not isinstance(pairs, Tensor) or pairs.dtype != torch.uint8 or pairs.ndim not in (2, 3):
        raise InvalidArgument(
            f"mxfp4_of_pairs: pairs are uint8 [N, K / 2] or [N, K / 32, 16], got {_packed.named(pairs)}"
        )
    values = _packed.nibbles_of_pairs(pairs.detach().flatten(1))
    n, k = int(values.shape[0]), int(values.shape[1])
    if k % _packed.MX_GROUP or not isinstance(scale, Tensor) or tuple(scale.shape) != (n, k // _packed.MX_GROUP):
        raise InvalidArgument(
            f"mxfp4_of_pairs: [N, K] is {[n, k]}, K in multiples of {_packed.MX_GROUP}, with scales "
            f"{[n, k // _packed.MX_GROUP]}, got {_packed.named(scale)}"
        )
    if scale.dtype == getattr(torch, "float8_e8m0fnu", None):
        scale = scale.view(torch.uint8)
    stored = _packed.nibble_bytes(values)
    return PackedWeight.from_parts("mxfp4", stored, scale=scale, shape=(n, k), dtype=dtype)


# suffixes that to_plain appends to a name
_METADATA, _PARTS = "packed_weight", ("stored", "scale", "zero")
_VERSION = 1


def to_plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict for file formats that know only plain tensors (safetensors); `from_plain` is the inverse.

    A packed weight `name` becomes `name.packed_weight` (uint8: JSON with version, format, shape, dtype, group and
    parts), `name.stored` and, where it has them, `name.scale` and `name.zero`. All else is passed on.

    Raises:
        InvalidArgument: another tensor has one of these names.
    """
    plain = {name: value for name, value in state_dict.items() if not isinstance(value, PackedWeight)}
    for name, weight in state_dict.items():
        if not isinstance(weight, PackedWeight):
            continue
        parts = weight._parts()
        about = {
            "version": _VERSION,
            "format": weight.format,
            "shape": list(weight.shape),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "group": weight.group,
            "parts": list(parts),
        }
        for part in (_METADATA, *_PARTS):
            if f"{name}.{part}" in plain:
                raise InvalidArgument(f"to_plain: {name}.{part} would be a part of {name}; rename one of the two")
        plain[f"{name}.{_METADATA}"] = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
        plain.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
    return plain


def from_plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that `to_plain` was given, with its packed weights; their parts are checked.

    Raises:
        InvalidArgument: a part is missing or does not fit, or the metadata is damaged or newer than this version.
    """
    packed = {name.removesuffix(f".{_METADATA}") for name in state_dict if name.endswith(f".{_METADATA}")}
    taken = {f"{name}.{part}" for name in packed for part in (_METADATA, *_PARTS)}
    found = {name: value for name, value in state_dict.items() if name not in taken}
    for name in sorted(packed):
        about = _metadata(name, state_dict[f"{name}.{_METADATA}"])
        parts = {part: state_dict[f"{name}.{part}"] for part in _PARTS if f"{name}.{part}" in state_dict}
        # a zero point that is lost would leave a valid weight, of other values
        if list(parts) != about["parts"]:
            raise InvalidArgument(
                f"from_plain: {name} was saved as {', '.join(map(str, about['parts']))}; there is {', '.join(parts)}"
            )
        dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
        try:
            found[name] = PackedWeight.from_parts(
                about["format"], **parts, group=about["group"], shape=about["shape"], dtype=dtypes.get(about["dtype"])
            )
        except InvalidArgument as error:
            raise InvalidArgument(f"from_plain: {name}: {error}") from error
    return found


def _metadata(name: str, tensor: Any) -> dict[str, Any]:
    """The description of a weight that to_plain wrote; InvalidArgument if it is damaged or of another version."""
    wanted = {"format": str, "shape": list, "dtype": str, "group": int, "parts": list}
    damaged = f"from_plain: {name}.{_METADATA} is damaged; save the weights again"
    try:
        about = decode.json_of(bytes(tensor.tolist()))
        version = about["version"]
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{damaged} ({error})") from error
    if version != _VERSION:
        raise InvalidArgument(f"from_plain: {name} has version {version}, this package reads {_VERSION}; update it")
    if not all(isinstance(about.get(key), kind) for key, kind in wanted.items()):
        raise InvalidArgument(f"{damaged} ({about})")
    checked: dict[str, Any] = about
    return checked


def refuse_other_formats(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    _strict: bool,
    _missing: list[str],
    _unexpected: list[str],
    _errors: list[str],
) -> None:
    """For `module.register_load_state_dict_pre_hook`: also assign=True may not change a packed weight's format.

    Without assign, torch copies into the parameter, which refuses another format by itself.

    Raises:
        InvalidArgument: another format; nothing of the module is loaded, where an error that torch collects would
            come after the weights were put in place.
    """
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, weight in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if isinstance(weight, PackedWeight) and prefix + name in state_dict:
            reason = _mismatch(weight, state_dict[prefix + name])
            if reason is not None:
                raise InvalidArgument(f"{prefix}{name}: {reason}")


def _build(
    format: str,
    stored: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    group: int,
    shape: Any,
    dtype: torch.dtype,
) -> PackedWeight:
    """The wrapper around parts that fit."""
    weight: PackedWeight = Tensor._make_wrapper_subclass(PackedWeight, shape, dtype=dtype, device=stored.device)
    weight.format, weight.stored, weight.scale, weight.zero, weight.group = format, stored, scale, zero, group
    return weight


def _as_parameter(weight: PackedWeight) -> PackedWeight:
    parameter: Any = nn.Parameter(weight, requires_grad=False)
    found: PackedWeight = parameter
    return found


def _restored(
    format: str,
    stored: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    stored_dtype: torch.dtype,
    group: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    parameter: bool,
) -> Any:
    """Make the weight again from its parts; `__reduce_ex__` names this function."""
    if stored_dtype in _packed.FP8:
        stored = stored.view(stored_dtype)
    weight = PackedWeight.from_parts(format, stored, scale=scale, zero=zero, group=group, shape=shape, dtype=dtype)
    return _as_parameter(weight) if parameter else weight


# torch.load(weights_only=True) calls only what is listed; this checks what it is given and runs nothing else
torch.serialization.add_safe_globals([_restored])


def _described(weight: PackedWeight) -> str:
    zero = ", asymmetric" if weight.zero is not None else ""
    types = _packed.names([weight.stored.dtype])
    return f"{weight.format}, shape={list(weight.shape)}, stored={types}, group={weight.group}{zero}"


def _mismatch(weight: PackedWeight, other: Any) -> str | None:
    """Why the values of `other` cannot take the place of a weight's, or None."""
    if not isinstance(other, PackedWeight):
        return f"a packed weight ({_described(weight)}) takes a packed one, not {_packed.named(other)}; pack it first"
    same = weight.shape == other.shape and (weight.format, weight.group) == (other.format, other.group)
    same = same and (weight.zero is None) == (other.zero is None)
    # values that are not quantized are converted, as between plain tensors
    converts = weight.scale is None and other.scale is None
    if same and (converts or weight.stored.dtype == other.stored.dtype):
        return None
    return f"a packed weight ({_described(weight)}) cannot take values of ({_described(other)}); pack both alike"


def _refusal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Unsupported:
    flat = torch.utils._pytree.tree_leaves((args, kwargs))
    weight = next(value for value in flat if isinstance(value, PackedWeight))
    name = f"{func.namespace}.{func.overloadpacket.__name__}"
    # F.linear and x @ w.T arrive as this
    hint = " (a transpose, also F.linear's)" if func is _aten.t.default else ""
    return Unsupported(f"{name}{hint} does not take a packed weight ({_described(weight)}): {_ADVICE}")


def _keep(func: Any, weight: PackedWeight, **kwargs: Any) -> PackedWeight:
    return weight._map(lambda part: func(part, **kwargs))


def _same_view(func: Any, weight: PackedWeight, *args: Any) -> PackedWeight:
    """A view with the weight's own sizes and strides, which torch.compile makes of results that alias an input."""
    own = (tuple(weight.shape), weight.stride())
    if any(tuple(given) != kept for given, kept in zip(args[:2], own, strict=False)) or any(args[2:]):
        raise _refusal(func, (weight, *args), {})
    return weight._map(_aten.alias.default)


def _rows(func: Any, weight: PackedWeight, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """`weight[start:end]`, a view, where no scale and no tile has rows on both sides of a cut."""
    begin, stop, _ = slice(start, end).indices(len(weight))
    unit = _packed.ROWS_TOGETHER.get(weight.format, 1)
    if dim != 0 or step != 1 or stop <= begin or begin % unit or (stop % unit and stop != len(weight)):
        raise _refusal(func, (weight,), {})
    parts = {}
    for name, part in weight._parts().items():
        # a scale of fp8_block is that of 128 rows
        rows = 1 if len(part) == len(weight) else unit
        parts[name] = func(part, 0, begin // rows, -(-stop // rows))
    return _of_parts(weight, parts, stop - begin)


def _cat(func: Any, weights: Sequence[PackedWeight], dim: int = 0) -> PackedWeight:
    """Weights of one format, rows after rows; as with `_rows`, all but the last must end with a scale and a tile."""
    first, kinds = weights[0], {(*_ALIKE(one), one.shape[1], *one._parts()) for one in weights}
    unit = _packed.ROWS_TOGETHER.get(first.format, 1)
    if dim != 0 or any(len(one) % unit for one in weights[:-1]) or len(kinds) > 1:
        raise _refusal(func, tuple(weights), {})
    parts = {name: func([one._parts()[name] for one in weights]) for name in first._parts()}
    return _of_parts(first, parts, sum(map(len, weights)))


def _of_parts(like: PackedWeight, parts: dict[str, Tensor], rows: int) -> PackedWeight:
    stored, scale, zero = parts["stored"], parts.get("scale"), parts.get("zero")
    return _build(like.format, stored, scale, zero, like.group, (rows, like.shape[1]), like.dtype)


def _convert(func: Any, weight: PackedWeight, *, dtype: torch.dtype | None = None, **kwargs: Any) -> PackedWeight:
    """A copy on another device or with another dtype; quantized values, scales and zero points keep theirs."""
    dtype = dtype or weight.dtype
    if dtype not in DTYPES:
        raise InvalidArgument(
            f"a packed weight ({_described(weight)}) stands for {_packed.names(DTYPES)}, not {dtype}; pack it anew"
        )
    if kwargs.get("layout") not in (None, torch.strided):
        raise Unsupported(f"a packed weight ({_described(weight)}) has no layout {kwargs['layout']}: {_ADVICE}")
    if weight.scale is not None:
        return weight._map(lambda part: func(part, **kwargs), dtype)
    if dtype not in STORED[weight.format]:
        raise Unsupported(f"{weight.format} does not store {dtype}: pack weight.unpack().to({dtype}) in another format")
    return weight._map(lambda part: func(part, dtype=dtype, **kwargs), dtype)


def _copy(func: Any, weight: PackedWeight, source: Any, non_blocking: bool = False) -> PackedWeight:
    """`weight.copy_(source)`, which is how load_state_dict fills a parameter."""
    reason = _mismatch(weight, source)
    if reason is not None:
        raise InvalidArgument(reason)
    given = source._parts()
    for name, part in weight._parts().items():
        func(part, given[name], non_blocking)
    return weight


_HANDLERS: dict[Any, Callable[..., PackedWeight]] = {
    _aten.alias.default: _keep,
    _aten.as_strided.default: _same_view,
    _aten.cat.default: _cat,
    _aten.clone.default: _keep,
    _aten.copy_.default: _copy,
    _aten.detach.default: _keep,
    _aten.empty_like.default: _convert,
    _aten.slice.Tensor: _rows,
    _aten._to_copy.default: _convert,
    _aten.view.default: _same_view,
}
# under inference_mode these arrive whole
_COMPOSITE = {
    _aten._has_compatible_shallow_copy_type.default,
    _aten.to.device,
    _aten.to.dtype,
    _aten.to.dtype_layout,
    _aten.to.other,
    _aten.type_as.default,
}
