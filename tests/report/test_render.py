"""The report says what the record says: every step and reason, escaped, self-contained, and no claim beyond it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from wavecrest import records, report
from wavecrest.errors import OutputError
from wavecrest.measure.timing import Interval
from wavecrest.records import BucketError, GateBucket, GateSummary, OptimizeRecord, QualityResult, provenance
from wavecrest.report import breakdown, histograms, numbers, proof, roofline, svg, waterfall, words

Sample = Callable[[str], OptimizeRecord]
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """The page's text, attributes and unclosed elements; the text of script and style is kept apart."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_elements_are_balanced(record: OptimizeRecord) -> None:
    page = Page(report.render(record))
    assert not page.open
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {attributes["href"] for tag, attributes in page.elements if tag == "a"}
    assert all(link and link.removeprefix("#") in ids for link in links)


def test_every_step_appears_with_its_reason(record: OptimizeRecord) -> None:
    html = report.render(record)
    page = Page(html)
    rows = [a for tag, a in page.elements if tag == "tbody" and "data-step" in a]
    # what was tried first, what was skipped folded below
    in_order = sorted(record.steps, key=lambda step: step.verdict == "skipped")
    assert [(a["data-step"], a["data-attempt"], a["data-verdict"]) for a in rows] == [
        (step.id, str(step.attempt), step.verdict) for step in in_order
    ]
    for step in record.steps:
        # once in the table; what was tried and not kept is listed again with its reason
        assert page.text.count(squeezed(step.reason)) >= (1 if step.verdict in ("kept", "skipped") else 2)
        assert squeezed(step.title) in page.text
        for site in step.sites:
            assert site in page.text


def test_tables_hold_the_numbers(sample: Sample) -> None:
    record = sample("full")
    text = Page(report.render(record)).text
    assert record.result is not None
    for speed in [*record.result.speed, *(speed for step in record.steps for speed in step.speed)]:
        assert f"{speed.ratio:.3f}×" in text
        assert f"[{speed.ci.low:.3f}, {speed.ci.high:.3f}]" in text
    for check in record.result.numerics:
        assert f"{check.error:.2e} {check.own:.2e} {check.limit:.2e} {check.error / check.limit * 100:.0f} %" in text
    for item in record.breaks:
        assert f"{item.file}:{item.line} {item.reason}" in text
    for row in record.coverage:
        assert row.key in text
        assert row.reason in text
        assert all(why in text for why in row.refused.values())
    for name, value in record.header.environment.items():
        assert f"{name} {value}" in text
    for expected in (record.header.command, "wavecrest verify llama.py:make --plan RUN/plan.json", *record.notes):
        assert expected in text
    for fact in (
        "gfx942",
        "304 compute units",
        "hip 7.2.1",
        "2.13.0+rocm7.2",
        "commit 3f9c2ab",
        "8.03 billion",
        "bfloat16",
    ):
        assert fact in text
    assert "2026-03-02 09:41 UTC" in text
    assert "measured on Sample Accelerator" in text


def test_profile_numbers_and_names_are_there(sample: Sample) -> None:
    record = sample("full")
    text = Page(report.render(record)).text
    assert "GEMM 22.0 61.0 % 64 19.2 72.0 % 64" in text
    # a category gone after the run took no time; it is not unknown
    assert "norm 2.17 6.0 % 64 0 0.0 % 0" in text
    assert "idle 5.70 13.6 %" in text
    assert "4.0 % of the time is “other”: 2 names" in text
    assert "__amd_rocclr_fillBufferAligned" in text


def test_hostile_names_stay_text(sample: Sample) -> None:
    html = report.render(sample("full"))
    page = Page(html)
    assert len(page.scripts) == 2
    assert 'attention of <script>alert("x & y")</script>' in page.text
    assert "alert(" not in page.scripts[1][1]
    assert "k is not a multiple of 64 & <padded>" in page.text
    assert not [tag for tag, _ in page.elements if tag in ("module", "padded", "b>")]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_hostile_json_cannot_leave_its_element(sample: Sample) -> None:
    record = sample("full")
    record.notes = ["</script><script>alert(1)</script>", "<!--<script>", "line\u2028end & more"]
    page = Page(report.render(record))
    attributes, text = page.scripts[0]
    assert attributes["type"] == "application/json"
    assert json.loads(text)["notes"] == record.notes
    assert not set("<>&\u2028") & set(text)


def test_embedded_record_is_the_record(record: OptimizeRecord) -> None:
    _, text = Page(report.render(record)).scripts[0]
    assert json.loads(text) == json.loads(record.model_dump_json())


def test_nothing_is_fetched(record: OptimizeRecord) -> None:
    html = report.render(record)
    page = Page(html)
    for tag, attributes in page.elements:
        for name in ("src", "href", "data", "action", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, name, value)
    without_record = html.replace(page.scripts[0][1], "")
    assert not re.search(r"https?://|@import|url\((?!#)", without_record)


def test_content_security_policy_allows_exactly_the_script(sample: Sample) -> None:
    page = Page(report.render(sample("full")))
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1][1].encode()).digest()).decode()
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


# -- what is claimed -------------------------------------------------------------------------------------------------


def test_headline_of_a_gain(sample: Sample) -> None:
    record = sample("full")
    assert record.result is not None
    record.result.ratio, record.result.ci = 1.31, Interval(1.29, 1.33)
    head = words.headline(record)
    assert (head.title, head.interval, head.tone) == ("Faster by 1.31×", "[1.29, 1.33]", "good")
    assert "Faster by 1.31×" in Page(report.render(record)).text


def test_the_first_line_has_the_class_and_milliseconds(sample: Sample) -> None:
    record = sample("full")
    assert record.result is not None
    record.result.ratio, record.result.ci = 1.31, Interval(1.29, 1.33)
    for row, base, new in zip(record.result.speed, (42.06, 7.4), (29.34, 0.5678), strict=True):
        row.base_ms, row.new_ms = base, new
    assert words.first_line(record) == (
        "LlamaForCausalLM: prefill b1 s2048 42.1 ms → 29.3 ms, decode b16 7.40 ms → 0.568 ms, "
        "faster by 1.31× [1.29, 1.33]"
    )
    record.result = None
    assert words.first_line(record).endswith("ms, interrupted") and "→" not in words.first_line(record)
    assert record.baseline[0].bucket in words.times(record)[0]
    many = sample("many buckets")
    assert words.times(many)[-1].startswith("and ") and len(words.times(many)) == words.MOST_TIMES + 1


def test_the_first_line_claims_no_gain_on_a_red_gate(sample: Sample) -> None:
    record = sample("full")
    assert record.result is not None
    record.result.quality.append(QualityResult(name="perplexity", value=99, limit=9, passed=False))
    assert "→" not in words.first_line(record) and words.first_line(record).endswith("accuracy check failed")


def test_summary_counts_the_last_attempt_of_a_step(sample: Sample) -> None:
    text = words.summary(sample("full"))
    assert "Of 7 steps 3 were kept, 1 was reverted, 2 were refused and 1 was skipped." in text
    assert "29.3 ms instead of 42.1 ms on prefill b1 s2048" in text


@pytest.mark.parametrize("where", ["numerics", "quality"])
def test_no_speed_up_on_a_red_gate(sample: Sample, where: str) -> None:
    record = sample("full")
    assert record.result is not None
    if where == "numerics":
        record.result.numerics.append(
            BucketError(bucket="b", output="loss", error=1.0, own=0.1, limit=0.2, passed=False)
        )
    else:
        record.result.quality.append(QualityResult(name="perplexity", value=99, limit=9, passed=False))
    head = words.headline(record)
    assert head.title == "Accuracy check failed"
    assert ("loss" if where == "numerics" else "perplexity") in head.meaning
    assert "×" not in head.title + head.interval + words.summary(record)
    assert "failed" in words.summary(record)


def test_interval_that_reaches_one_is_not_faster(sample: Sample) -> None:
    record = sample("full")
    assert record.result is not None
    record.result.ratio, record.result.ci = 1.05, Interval(0.99, 1.1)
    assert words.headline(record).title == "Not proven faster"


def test_optimal_without_a_final_model_claims_no_ratio(sample: Sample) -> None:
    record = sample("already optimal")
    head = words.headline(record)
    assert (head.title, head.interval) == ("Already optimal", "")
    assert "1.000×" not in words.headline(record).meaning + words.summary(record)
    assert "The model itself is unchanged" in words.summary(record)


def test_optimal_with_a_kept_environment_does_not_deny_it(sample: Sample) -> None:
    record = sample("already optimal")
    record.steps[0].verdict, record.steps[0].title = "kept", "environment"
    meaning = words.headline(record).meaning
    assert "No step" not in meaning
    assert "timed in fresh processes: environment (see its reason)" in meaning


def test_undecided_says_that_steps_are_left(sample: Sample) -> None:
    record = sample("already optimal")
    assert record.result is not None
    record.result.verdict = "undecided"
    head = words.headline(record)
    assert (head.title, head.interval) == ("Undecided", "")
    assert "Not every step could be tried" in head.meaning
    assert "optimal" not in Page(report.render(record)).text


def test_optimal_although_steps_were_kept_says_so(sample: Sample) -> None:
    record = sample("full")
    assert record.result is not None
    record.result.verdict, record.result.ratio, record.result.ci = "already optimal", 1.004, Interval(0.996, 1.012)
    head = words.headline(record)
    assert head.interval == "1.004× [0.996, 1.012]"
    assert "kept one by one" in head.meaning


def test_interrupted_claims_nothing(sample: Sample) -> None:
    record = sample("interrupted")
    head = words.headline(record)
    assert head.title == "Interrupted"
    assert "no overall speed-up is claimed" in head.meaning
    assert "Faster" not in Page(report.render(record)).text


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("measured", "measured on Sample Accelerator"),
        ("compiled", "compiled for gfx942, not timed"),
        ("emulated", "emulated gfx942, not timed on hardware"),
        ("model", "cost model of gfx942, not measured"),
    ],
)
def test_evidence_is_labelled(sample: Sample, kind: provenance.Evidence, expected: str) -> None:
    record = sample("full")
    record.header.evidence = kind
    assert expected in Page(report.render(record)).text


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("llama.py:make", "wavecrest verify llama.py:make --plan RUN/plan.json"),
        ("my models/a.py:make", "wavecrest verify 'my models/a.py:make' --plan RUN/plan.json"),
        ("--hf my models/llama", "wavecrest verify --hf 'my models/llama' --plan RUN/plan.json"),
        (None, None),
    ],
    ids=["file", "space in file", "folder", "in memory"],
)
def test_commands_can_be_pasted(sample: Sample, spec: str | None, expected: str | None) -> None:
    record = sample("full")
    record.spec = spec
    verify = [command for _, command in words.commands(record) if " verify " in command]
    assert verify == ([expected] if expected else [])


# -- plots -----------------------------------------------------------------------------------------------------------


def _x(cell: str, class_: str) -> list[float]:
    return [float(x) for x in re.findall(rf'x1?="([\d.]+)%"[^>]*class="{class_}"', cell)]


def test_waterfall_follows_what_was_kept(sample: Sample) -> None:
    panel = waterfall.panels(sample("full"))[0]
    assert panel.buckets == ("prefill b1 s2048", "decode b16")
    assert [row.kind for row in panel.rows] == [
        "end", "skipped", "kept", "kept", "reverted", "tie", "refused", "kept", "refused", "end",
    ]  # fmt: skip
    cells = {index: row.cells[0][1] for index, row in enumerate(panel.rows)}
    # the thin line leaves a kept step at its new time and stays where it is at a reverted one
    kept, reverted = _x(cells[3], "link"), _x(cells[4], "link")
    assert kept[0] > kept[1]
    assert reverted[0] == reverted[1] == kept[1]
    assert "not timed" in cells[6]
    assert 'class="bar-reverted"' in cells[4]
    assert 'class="bar-tie"' in cells[5]


def test_many_skipped_steps_are_named_once(sample: Sample) -> None:
    record = sample("full")
    skipped = record.steps[0]
    record.steps = [
        *(skipped.model_copy(update={"id": f"s{index}", "title": f"variant {index}"}) for index in range(9)),
        *record.steps[1:],
    ]
    panel = waterfall.panels(record)[0]
    assert not [row for row in panel.rows if row.kind == "skipped"]
    assert panel.left_out == 9
    html = report.render(record)
    assert "9 skipped steps are not drawn" in Page(html).text
    # each in a table that is folded, and nowhere else
    assert html.count(skipped.reason) == html.split('<details class="skipped">')[1].count(skipped.reason)
    assert Page(html).text.count(skipped.reason) == 9


def test_waterfall_whiskers_are_the_interval(sample: Sample) -> None:
    record = sample("full")
    speed = record.steps[1].speed[0]
    speed.base_ms, speed.new_ms, speed.ratio, speed.ci = 40.0, 20.0, 2.0, Interval(1.6, 2.5)
    cell = waterfall.panels(record)[0].rows[2].cells[0][1]
    line = re.search(r'x1="([\d.]+)%" x2="([\d.]+)%" y1="14" y2="14" class="whisker"', cell)
    bar = re.search(r'x="([\d.]+)%" width="([\d.]+)%"[^>]*class="bar-kept"', cell)
    assert line is not None
    assert bar is not None
    per_ms = float(bar[2]) / 20.0
    # 40 / 2.5 = 16 ms and 40 / 1.6 = 25 ms
    assert float(line[1]) == pytest.approx(16 * per_ms, abs=0.02)
    assert float(line[2]) == pytest.approx(25 * per_ms, abs=0.02)


def test_waterfall_keeps_its_scale_when_a_step_is_far_slower(sample: Sample) -> None:
    record = sample("full")
    record.steps[3].speed[0].new_ms = 4000.0
    panel = waterfall.panels(record)[0]
    first = re.search(r'width="([\d.]+)%"[^>]*class="bar-original"', panel.rows[0].cells[0][1])
    assert first is not None
    assert float(first[1]) > 50
    assert "4,000 ›" in panel.rows[4].cells[0][1]


def test_unstable_baseline_gives_no_number(sample: Sample) -> None:
    panel = waterfall.panels(sample("many buckets"))[0]
    unstable = panel.rows[0].cells[1][1]
    assert ">unstable<" in unstable
    assert 'class="bar-unstable"' in unstable


def test_where_the_original_was_measured_alone_the_page_says_so(sample: Sample) -> None:
    record = sample("full")
    assert record.result is not None
    record.result.speed[0].note = "original measured alone; interleaved it took <23.2> ms"
    assert "original measured alone; interleaved it took &lt;23.2&gt; ms" in report.render(record)


def test_every_bucket_has_a_waterfall(sample: Sample) -> None:
    record = sample("many buckets")
    shown = [bucket for panel in waterfall.panels(record) for bucket in panel.buckets]
    assert shown[:7] == [bench.bucket for bench in record.baseline]
    assert len(shown) == len(set(shown)) == 9


def test_category_bar_is_as_long_as_its_share(sample: Sample) -> None:
    panel = breakdown.time_panels(sample("full"))[0]
    widths = {name: [float(width) for width in re.findall(r'width="([\d.]+)%"', bar)] for name, _, bar in panel.bars}
    assert sum(widths["before"]) == pytest.approx(100, abs=0.1)
    # 29.0 ms after against 41.8 ms before
    assert sum(widths["after"]) == pytest.approx(100 * 29.0 / 41.8, abs=0.1)
    assert widths["before"][0] == pytest.approx(100 * 0.61 * 36.1 / 41.8, abs=0.1)


def test_cpu_profile_says_why_there_is_no_idle(sample: Sample) -> None:
    record = sample("full")
    for profile in [*record.profile_before, *record.profile_after]:
        profile.idle_ms = None
    text = Page(report.render(record)).text
    assert "No idle time is shown: on the CPU" in text


def test_a_profile_that_was_not_taken_has_no_columns(sample: Sample) -> None:
    record = sample("full")
    assert "After, ms" in report.render(record).partition('id="time"')[2].partition("Roofline")[0]
    before = report.render(record.model_copy(update={"profile_after": []}))
    table = before.partition('id="time"')[2].partition("</table>")[0]
    assert "Before, ms" in table and "After" not in table
    heads, rows = table.partition("</thead>")[::2]
    row = rows.partition("</tr>")[0]
    assert heads.count("</th>") == row.count("</th>") + row.count("</td>") == 4


def test_roofline_reads_the_peaks_back(sample: Sample) -> None:
    panel = roofline.panels(sample("full"))[0]
    assert panel.plot is not None
    # the sample profile was made with these two
    assert "memory roof 5,300 GB/s" in panel.plot
    assert "compute roof 1,307 TFLOP/s" in panel.plot or "compute roof 1,310 TFLOP/s" in panel.plot
    assert panel.unit == "TFLOP/s"
    assert panel.plot.count('class="point') == 12 + 9
    assert "38 % of the roofline" in panel.plot
    assert "2 of 23 rows" in panel.note


def test_roofline_without_costs_says_why(sample: Sample) -> None:
    record = sample("full")
    for profile in [*record.profile_before, *record.profile_after]:
        for op in profile.ops:
            op.flops = op.bytes = None
    panel = roofline.panels(record)[0]
    assert panel.plot is None
    assert panel.missing in Page(report.render(record)).text
    assert "known cost" in panel.missing


@pytest.mark.parametrize(
    ("bound", "roofs"), [("compute", ["compute"]), ("memory", ["memory"])], ids=["no memory roof", "no compute roof"]
)
def test_roofline_with_one_kind_of_roof(sample: Sample, bound: str, roofs: list[str]) -> None:
    """Where every operation known is of one bound only that peak can be read back."""
    record = sample("full")
    for profile in (*record.profile_before, *record.profile_after):
        for op in profile.ops:
            if op.bound != bound:
                op.roofline_percent = op.bound = None
    plot = roofline.panels(record)[0].plot
    assert plot is not None and [kind for kind in ("memory", "compute") if f"{kind} roof" in plot] == roofs


def test_roofline_without_peaks_draws_no_roof(sample: Sample) -> None:
    record = sample("full")
    for profile in [*record.profile_before, *record.profile_after]:
        for op in profile.ops:
            op.roofline_percent = op.bound = None
    panel = roofline.panels(record)[0]
    assert panel.plot is not None
    assert 'class="roof"' not in panel.plot
    assert "No roof is drawn" in panel.note


def test_histograms_show_kept_steps_and_the_end_first(sample: Sample) -> None:
    main, rest = histograms.split(sample("full"))
    assert [(item.title, item.bucket) for item in main[-2:]] == [
        ("Final measurement", "prefill b1 s2048"),
        ("Final measurement", "decode b16"),
    ]
    assert "linear layers by table, attempt 2" in {item.title for item in main}
    assert rest[0].title == "environment X=1"
    assert {"linear layers by table (tie)"} <= {item.title for item in rest}


def test_histogram_counts_every_sample_once() -> None:
    scale = svg.Scale(1.0, 2.0)
    values = [0.5, 1.0, 1.5, 1.5, 2.0, 99.0]
    counts = histograms._counts(values, scale)
    assert sum(counts) == len(values)
    assert (counts[0], counts[-1]) == (2, 2)


@pytest.mark.parametrize("values", [[3.0] * 8, [0.0, 0.0, 0.0], [1.0]], ids=["constant", "zero", "single"])
def test_histogram_of_equal_times(values: list[float]) -> None:
    samples = records.Samples(step="result", attempt=1, bucket="b", base=values, new=values)
    low, high = histograms._range(values)
    assert low < values[0] < high
    assert "Final" in histograms._histogram(samples, "Final").title


# -- numbers and scales ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"), (0.0, "0"), (41.84, "41.8"), (0.02314, "0.0231"), (9.996, "10.0"), (123456.0, "123,456"),
        (1.5e-7, "1.50e-07"), (float("nan"), "not finite"), (float("-inf"), "not finite"), (1e300, "not finite"),
    ],
)  # fmt: skip
def test_significant(value: float | None, expected: str) -> None:
    assert numbers.significant(value) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1.00 KiB"), (205_520_896_000, "191 GiB"), (3 << 40, "3.00 TiB")],
)
def test_memory(size: int, expected: str) -> None:
    assert numbers.memory(size) == expected


@pytest.mark.parametrize(
    ("error", "limit", "expected"),
    [
        (0.2, 0.4, "50 %"),
        (0.2, 0.1, "200 %"),
        (1e-9, 1e-4, "0.0010 %"),
        (0.0, 0.0, "0"),
        (1e-3, 0.0, "1.0e-03 (limit 0)"),
        (float("nan"), 0.1, "not finite"),
    ],
)
def test_error_share(error: float, limit: float, expected: str) -> None:
    assert numbers.error_share(error, limit) == expected


def _check(error: float, limit: float) -> BucketError:
    return BucketError(bucket="b", output="o", error=error, own=0.1, limit=limit, passed=error <= limit)


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ([], "–"),
        ([_check(0.3, 3.0), _check(0.2, 0.25)], "80 %"),
        ([_check(0.9, 0.91), _check(1e-3, 0.0)], "1.0e-03 (limit 0)"),
        ([_check(0.5, 0.4), _check(float("nan"), 0.2), _check(9.0, 0.2)], "not finite"),
        ([_check(float("nan"), 0.2), _check(9.0, 0.2)], "not finite"),
        ([_check(0.0, 0.0)], "0"),
    ],
    ids=["none", "nearest to its limit", "failed first", "nan in the middle", "nan first", "exact"],
)
def test_worst_error(checks: list[BucketError], expected: str) -> None:
    assert proof.worst_error(checks) == expected


GATE = GateSummary(
    seed=4711,
    rules=["accuracy", "padding", "shapes", "timing"],
    buckets=[
        GateBucket(bucket="b1", values=["example", "noise"], shapes=["batch 3"]),
        GateBucket(
            bucket="b16",
            values=["example"],
            notes=["no noise: the reference outputs are large or slow", "these shapes only"],
        ),
    ],
    checks=7,
    calls=1312,
    leaves=84,
    timed=26,
    seconds=12.5,
    notes=[],
    not_run={"padding": "no input is a <mask>"},
)


def test_the_page_says_how_it_was_proven(sample: Sample) -> None:
    record = sample("full")
    assert record.result is not None
    record.gate, record.seconds, record.resolution = GATE, 125.0, {"prefill": 0.0123}
    record.result.unit, record.result.drift = "processes", -0.031
    for row in record.result.speed:
        row.blocks = 4
    text = Page(report.render(record)).text
    for part in (
        "Resolution prefill 1.2 %: one model against itself",
        "4 fresh processes a side that alternate; the interval is over pairs of processes",
        "Drift of the host -3.1 %",
        "Rules 3 of 4 run for every candidate",
        "7 models, 1,312 calls, 84 outputs against their limits, 26 answers of timed calls",
        "Values of b1 example, noise, also batch 3",
        "Values of b16 example, these shapes only; no noise: the reference outputs are large or slow",
        "Seed 4711",
        "12.5 s, 10 % of the run",
        "Not run: padding no input is a <mask>",
    ):
        assert part in text, part
    lines = proof.lines(record)
    assert lines[0].startswith("accuracy gate: 3 of 4 rules; 7 models") and "seed 4711" in lines[0]
    assert lines[-1] == "accuracy gate, rules not run for some model: padding; the report has the reason of each"


def test_one_process_is_shown_without_an_interval(sample: Sample) -> None:
    record = sample("full")
    assert record.result is not None
    record.result.unit, record.result.ratio, record.result.ci = "phases", 1.31, Interval(1.291, 1.334)
    head = words.headline(record)
    assert (head.title, head.interval) == ("Faster by 1.31×", "") and "one process" in head.meaning
    page = report.render(record)
    speed = page[page.index('<section id="speed">') : page.index("Baseline: shapes")]
    assert "Phases a side" in speed and "[" not in re.sub(r"<[^>]*>", "", speed)


def test_an_undecided_run_gives_its_reason(sample: Sample) -> None:
    record = sample("already optimal")
    assert record.result is not None
    record.result.verdict, record.result.reason = "undecided", "every step was refused (2): no copy"
    assert words.headline(record).meaning.endswith("Undecided: every step was refused (2): no copy.")


def test_records_of_before_have_no_gate(sample: Sample) -> None:
    record = sample("full")
    assert record.gate is None and proof.gate(record) == [] == proof.lines(record)
    assert "has no account of the accuracy gate" in Page(report.render(record)).text


@pytest.mark.parametrize(
    ("value", "expected"),
    [(4e-5, "under 0.1 s"), (41.23, "41.2 s"), (725, "12 min 5 s"), (3900, "1 h 5 min"), (60, "1 min")],
)
def test_seconds(value: float, expected: str) -> None:
    assert numbers.seconds(value) == expected


def test_numbers_stay_beside_their_units_and_options_in_one_line() -> None:
    assert numbers.prose("by 2 % in 3.5 ms, 4 steps <b>") == "by 2\u00a0% in 3.5\u00a0ms, 4 steps &lt;b&gt;"
    assert numbers.prose("more --budget-x, a--b") == 'more <span class="whole">--budget-x</span>, a--b'


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (svg.Scale(0, 43), [0, 10, 20, 30, 40]),
        (svg.Scale(31.2, 33.1), [31.5, 32, 32.5, 33]),
        (svg.Scale(0.05, 2000, log=True), [0.1, 1, 10, 100, 1000]),
    ],
    ids=["zero", "offset", "log"],
)
def test_ticks_are_round(scale: svg.Scale, expected: list[float]) -> None:
    assert scale.ticks() == pytest.approx(expected)


def test_svg_escapes_text_and_attributes() -> None:
    made = svg.tag("text", "<a & b>", class_='x"y', dx=None, font_size=1.5)
    assert made == '<text class="x&#34;y" font-size="1.5">&lt;a &amp; b&gt;</text>'


def test_write_says_what_is_wrong(sample: Sample, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        report.write(sample("minimal"), tmp_path / "missing" / "report.html")
    report.write(sample("minimal"), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
