"""Where the time goes: one bar of categories before and one after, on the same scale, idle time shown."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from wavecrest.records import BucketProfile, CategoryTime, OptimizeRecord
from wavecrest.report import numbers, svg

# colours of the categories, by position; the last is for "other" alone
CATEGORY_COLOURS = 8
OTHER = "other"


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """One category of one bucket, before and after; None where the bucket was not profiled."""

    category: str
    colour: int
    before: CategoryTime | None
    after: CategoryTime | None


@dataclass(frozen=True, slots=True)
class TimePanel:
    """Where one bucket's time goes, before and after."""

    bucket: str
    bars: tuple[tuple[str, str, Markup], ...]
    axis: Markup
    rows: tuple[CategoryRow, ...]
    before: BucketProfile | None
    after: BucketProfile | None

    @property
    def idle(self) -> bool:
        """True if idle time was measured (a GPU profile)."""
        return any(profile is not None and profile.idle_ms is not None for profile in (self.before, self.after))

    @property
    def other(self) -> list[str]:
        """Names that no category took."""
        names = [name for profile in (self.before, self.after) if profile for name in profile.uncategorized]
        return list(dict.fromkeys(names))

    @property
    def other_share(self) -> float | None:
        """Share of "other" in the newest profile."""
        profile = self.after or self.before
        return None if profile is None else sum(c.share for c in profile.categories if c.category == OTHER)


def colours(record: OptimizeRecord) -> dict[str, int]:
    """One colour number a category for the whole report; "other" always has the last."""
    names: dict[str, float] = {}
    for profile in [*record.profile_before, *record.profile_after]:
        for category in profile.categories:
            names[category.category] = names.get(category.category, 0.0) + category.ms
    ordered = sorted((name for name in names if name != OTHER), key=lambda name: -names[name])
    numbered = {name: index % CATEGORY_COLOURS for index, name in enumerate(ordered)}
    return numbered | ({OTHER: CATEGORY_COLOURS} if OTHER in names else {})


def time_panels(record: OptimizeRecord) -> list[TimePanel]:
    """Category bars of every profiled bucket."""
    before = {profile.bucket: profile for profile in record.profile_before}
    after = {profile.bucket: profile for profile in record.profile_after}
    palette = colours(record)
    return [_time_panel(bucket, before.get(bucket), after.get(bucket), palette) for bucket in {**before, **after}]


def _time_panel(
    bucket: str, before: BucketProfile | None, after: BucketProfile | None, palette: dict[str, int]
) -> TimePanel:
    profiles = [(name, profile) for name, profile in (("before", before), ("after", after)) if profile is not None]
    scale = svg.Scale(0.0, max((_total(profile) for _, profile in profiles), default=1.0) or 1.0)
    bars = tuple(
        (name, f"{numbers.ms(_total(profile))} ms", _category_bar(bucket, name, profile, palette, scale))
        for name, profile in profiles
    )
    ticks = [svg.tag("text", f"{tick:g}", x=scale.at(tick), y=14, class_="tick mid") for tick in scale.ticks()]
    axis = svg.drawing(*ticks, height=20, label="axis in ms", class_="axis")
    return TimePanel(bucket, bars, axis, _category_rows(before, after, palette), before, after)


def _total(profile: BucketProfile) -> float:
    return sum(category.ms for category in profile.categories) + (profile.idle_ms or 0.0)


def _category_bar(bucket: str, name: str, profile: BucketProfile, palette: dict[str, int], scale: svg.Scale) -> Markup:
    parts = []
    position = 0.0
    total = _total(profile) or 1.0
    segments = [
        (c.category, c.ms, f"cat-{palette[c.category]}", f"{c.calls:,} calls") for c in _sorted(profile, palette)
    ]
    if profile.idle_ms:
        segments.append(("idle", profile.idle_ms, "cat-idle", "no kernel running"))
    for label, time, class_, detail in segments:
        text = f"{label}, {name}: {numbers.ms(time)} ms, {numbers.percent(time / total)}, {detail}"
        x, width = scale.at(position), scale.width(position, position + time)
        parts.append(svg.tag("rect", svg.title(text), x=x, width=width, y=1, height=30, class_=f"segment {class_}"))
        # names stand in the bar only where they fit: a phone shows about 40 characters, a desk over 100
        room = scale.share(time) / (len(label) + 2)
        if room > 1 / 100:
            class_ = "segment-label" if room > 1 / 40 else "segment-label roomy"
            parts.append(svg.tag("text", label, x=x, dx=8, y=21, class_=class_))
        position += time
    return svg.drawing(*parts, height=32, label=f"{bucket} {name}: " + ", ".join(s[0] for s in segments))


def _sorted(profile: BucketProfile, palette: dict[str, int]) -> list[CategoryTime]:
    order = list(palette)
    return sorted(profile.categories, key=lambda category: order.index(category.category))


def _category_rows(
    before: BucketProfile | None, after: BucketProfile | None, palette: dict[str, int]
) -> tuple[CategoryRow, ...]:
    rows = []
    for name, colour in palette.items():
        old, new = _find(before, name), _find(after, name)
        if any(category is not None and category.calls for category in (old, new)):
            rows.append(CategoryRow(name, colour, old, new))
    return tuple(rows)


def _find(profile: BucketProfile | None, name: str) -> CategoryTime | None:
    if profile is None:
        return None
    # a category that a profile does not name took no time there
    nothing = CategoryTime(category=name, ms=0.0, share=0.0, calls=0)
    return next((category for category in profile.categories if category.category == name), nothing)
