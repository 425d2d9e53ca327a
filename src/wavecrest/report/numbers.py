"""How the report writes numbers: a fixed number of figures, a sign people read, never a bare NaN."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from markupsafe import Markup, escape

from wavecrest.measure.timing import Interval

DASH = "–"
NOT_FINITE = "not finite"
# JSON has no infinity: the accuracy gate stores an error that is infinite or NaN as this
STORED_INFINITY = 1e300
# a number and its unit, and an option: a line that ends inside of one reads as something else
_UNIT = re.compile(r"(?<=\d) (?=(?:%|[nµm]?s|min|[kKMGT]i?B|[GT]FLOP/s)(?!\w))")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def finite(value: float) -> bool:
    """False for NaN, infinity and what stands for them in a record."""
    return math.isfinite(value) and abs(value) < STORED_INFINITY


def significant(value: float | None, figures: int = 3) -> str:
    """`figures` significant figures without an exponent where it reads well: 41.8, 0.0231, 1.2e-07."""
    if value is None:
        return DASH
    if not finite(value):
        return NOT_FINITE
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.{figures - 1}e}"))))
    if -4 <= exponent < 7:
        return f"{value:,.{max(0, figures - 1 - exponent)}f}"
    return f"{value:.{figures - 1}e}"


def ms(value: float | None) -> str:
    """A time in ms, without the unit."""
    return significant(value, 4 if value is not None and abs(value) >= 1000 else 3)


def ratio(value: float | None, decimals: int = 3) -> str:
    """A speed-up: 1.310×."""
    if value is None:
        return DASH
    return f"{value:.{decimals}f}×" if finite(value) else NOT_FINITE


def interval(ci: Interval | None, decimals: int = 3) -> str:
    """A 95 % interval: [1.290, 1.330]."""
    return DASH if ci is None else f"[{ci.low:.{decimals}f}, {ci.high:.{decimals}f}]"


def headline_decimals(value: float, ci: Interval) -> int:
    """Two decimals where they show the size of the gain, three where the gain or the interval is narrow."""
    return 3 if abs(value - 1) < 0.05 or ci.high - ci.low < 0.01 else 2


def percent(share: float | None, decimals: int = 1) -> str:
    """A share of one as percent: 61.2 %."""
    if share is None:
        return DASH
    return f"{share * 100:.{decimals}f} %" if math.isfinite(share) else NOT_FINITE


def error(value: float | None) -> str:
    """An error, in scientific notation: 1.23e-03."""
    if value is None:
        return DASH
    if not finite(value):
        return NOT_FINITE
    return "0" if value == 0 else f"{value:.2e}"


def is_nan(value: float) -> bool:
    """Whether an error is not a number."""
    return math.isnan(value)


def error_share(error_value: float, limit: float) -> str:
    """Error as a share of its limit: 52 %; where the limit is zero the error itself."""
    if not (finite(error_value) and finite(limit)):
        return NOT_FINITE
    if limit == 0:
        return "0" if error_value == 0 else f"{error_value:.1e} (limit 0)"
    return f"{significant(error_value / limit * 100, 2)} %"


def count(value: int) -> str:
    """A count with thousands separators."""
    return f"{value:,}"


def large(value: float) -> str:
    """A large count in words of the field: 8.03 billion."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"


def memory(size: int | None) -> str:
    """Bytes in binary units: 12.4 GiB."""
    if size is None:
        return DASH
    power = min(4, (max(1, abs(size)).bit_length() - 1) // 10)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{size:,} {unit}" if power == 0 else f"{significant(size / 1024**power)} {unit}"


def seconds(value: float) -> str:
    """A duration: 48 s, 12 min 5 s, 1 h 5 min."""
    if value < 0.1:
        return "under 0.1 s"
    if value < 60:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def date(iso: str) -> str:
    """An ISO time as "2026-07-14 10:22 UTC"; text that is not a time comes back as it is."""
    try:
        moment = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M}"
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def prose(text: str) -> Markup:
    """A sentence for the page, in which a number stays beside its unit, and an option on one line."""
    kept = _UNIT.sub("\u00a0", str(escape(text)))
    return Markup(_OPTION.sub(r'<span class="whole">\g<0></span>', kept))
