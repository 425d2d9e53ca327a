"""The typed call of mla_prefill: fields of `MlaDecodeCall`, any number of queries, both weights required."""

from __future__ import annotations

from wavecrest.errors import InvalidArgument
from wavecrest.ops._mla_decode.call import MAX_LENGTH, Checks, MlaDecodeCall


class MlaPrefillCall(MlaDecodeCall):
    """The fields of `MlaDecodeCall`; `w_uk` and `w_uv` are given. See `wavecrest.ops.mla_prefill` for the arguments."""

    __slots__ = ()


def check(call: MlaPrefillCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    for name, weight in (("w_uk", call.w_uk), ("w_uv", call.w_uv)):
        if weight is None:
            raise InvalidArgument(f"mla_prefill: {name} must be given: queries and results are not absorbed")
    Checks("mla_prefill", call).all(MAX_LENGTH)
