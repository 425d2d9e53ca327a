"""benchmarks/zoo: every model builds, answers and depends on its parts; peers, bounds, records and the page."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.parts import Report
from benchmarks.zoo import __main__ as runner
from benchmarks.zoo import measure, page, peers, weights
from benchmarks.zoo.peers import Peer
from benchmarks.zoo.registry import Entry, Size, entries
from torch import nn

from wavecrest.errors import InvalidArgument, MissingDependency, WorkloadError
from wavecrest.measure import workload
from wavecrest.measure.tree import iter_tensors
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer.plan import Plan
from wavecrest.records import Cause, Ceilings, OptimizeRecord, StepOutcome, files

ROOT = Path(__file__).parents[2]
ENTRIES = list(entries().values())
# seconds on a CPU beyond the others: the structure of a deep network cannot be made small
SLOW = ("efficientnet-b0",)


def built(entry: Entry) -> Workload:
    try:
        importlib.import_module(entry.library)
    # a torchvision made for another torch raises what it likes
    except Exception as error:
        pytest.skip(f"{entry.library} cannot be imported: {type(error).__name__}: {error}")
    return entry.workload("cpu", tiny=True)


def answer(made: Workload) -> list[torch.Tensor]:
    (bucket,) = made.buckets
    with torch.no_grad():
        found = [tensor for _, tensor in iter_tensors("", made.run(bucket), set()) if tensor.is_floating_point()]
    return [tensor.clone() for tensor in found]


def marked(entry: Entry) -> Any:
    return pytest.param(entry, id=entry.name, marks=[pytest.mark.slow] if entry.name in SLOW else [])


@pytest.mark.parametrize("entry", [marked(entry) for entry in ENTRIES])
def test_a_model_builds_and_its_answer_depends_on_its_input(entry: Entry) -> None:
    made = built(entry)
    first = answer(made)
    assert first and all(bool(torch.isfinite(tensor).all()) for tensor in first)
    # the same call gives the same answer: a cache is put back before each
    assert all(map(torch.equal, answer(made), first))
    (inputs,) = made.buckets.values()
    name, tensor = next((name, one) for name, one in inputs.tensors() if one.ndim > 1)
    with torch.no_grad():
        tensor.copy_(tensor.flip(0, 1) if tensor.shape[1] > 1 else tensor + 1)
    changed = max(float((a - b).norm() / b.norm()) for a, b in zip(answer(made), first, strict=True))
    assert changed > 1e-4, f"{name} has no effect"


@pytest.mark.parametrize("entry", [marked(entry) for entry in ENTRIES])
def test_no_parameter_is_constant(entry: Entry) -> None:
    constant = [
        name
        for name, tensor in built(entry).model.named_parameters()
        if tensor.numel() > 1 and bool((tensor == tensor.reshape(-1)[0]).all())
    ]
    assert constant == []


def test_there_are_the_models_that_people_run() -> None:
    names = {entry.name for entry in ENTRIES}
    assert len(names) >= 24 and names >= set(page.SEEDS)
    assert sum(entry.cpu is not None for entry in ENTRIES) >= 6
    assert {entry.library for entry in ENTRIES} == {"torchvision", "timm", "transformers", "torch", "diffusers"}
    # transformers' own code of xLSTM raises in 16 bits
    assert [entry.name for entry in ENTRIES if entry.gpu.dtype == "float32"] == ["xlstm-small"]
    assert all(entry.about for entry in ENTRIES)


def test_a_model_is_a_workload_of_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    entry = entries()["mlp"]
    assert workload.load("benchmarks.zoo.workloads:mlp", device="cpu").spec == entry.spec()
    # `swin-tiny` is a whole name, and has a tiny variant
    for one in entries().values():
        for tiny in (False, True):
            assert callable(workload.load_function(one.spec(tiny=tiny)))
    tiny = workload.load(entry.spec(tiny=True), device="cpu")
    assert tiny.name == "mlp" and answer(tiny)[0].shape == entry.tiny[:2]
    with pytest.raises(WorkloadError, match="no function 'melp'"):
        workload.load("benchmarks.zoo.workloads:melp")


def test_weights_are_the_same_in_every_process() -> None:
    a, b = (entries()["lstm"].workload("cpu", tiny=True) for _ in range(2))
    assert all(map(torch.equal, answer(a), answer(b)))


def test_what_cannot_be_built_says_why() -> None:
    with pytest.raises(InvalidArgument, match="llama-8b-decode has no size for a CPU"):
        entries()["llama-8b-decode"].workload("cpu")
    absent = Entry("a", "no_such_library", "rows", Size(1, 1), Size(1, 1), None, False, lambda _site: (nn.ReLU(), 1))
    with pytest.raises(MissingDependency, match="no_such_library"):
        absent.workload("cpu", tiny=True)


def test_counts_are_of_tokens_or_of_items() -> None:
    known = entries()
    assert known["llama-8b-prefill"].count(Size(2, 100)) == 200 and known["llama-8b-decode"].count(Size(2, 100)) == 2


# --- weights


class Blocks(nn.Module):
    """Residual blocks with batch norms: the sum of squares doubles a block where statistics are not fitted."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_batch_norms_get_the_statistics_of_their_input() -> None:
    torch.manual_seed(0)
    made = from_example(Blocks(40), torch.randn(4, 8, 6, 6))
    for block in made.model.blocks:  # type: ignore[union-attr]
        block[0].weight.data.mul_(3)  # type: ignore[index, union-attr]
    before = float(answer(made)[0].std())
    weights.fit_statistics(made)
    assert before > 1e6 and float(answer(made)[0].std()) < 100
    assert not made.model.blocks[0][1].training  # type: ignore[index, union-attr]


def test_parts_without_effect_get_one() -> None:
    layer = nn.Module()
    layer.head, layer.scale = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(1e-6 * torch.ones(8))
    layer.norm, layer.kept = nn.Parameter(torch.ones(8)), nn.Parameter(torch.arange(8.0))
    weights.vary(layer)
    head, scale, norm = (getattr(layer, name).detach() for name in ("head", "scale", "norm"))
    assert 0 < head.std() < 0.1 and scale.mean() > 0.1 and abs(float(norm.mean()) - 1) < 0.2
    assert norm.std() > 0 and torch.equal(layer.kept, torch.arange(8.0))


# --- one model


class Told(Report):
    """A report that keeps what it is told."""

    def __init__(self, done: tuple[str, ...] = (), died: tuple[str, ...] = ()) -> None:
        super().__init__(-1, died, done)
        self.messages: list[dict[str, Any]] = []

    def _write(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [one["row"] for one in self.messages if "row" in one]


def linear() -> Workload:
    torch.manual_seed(0)
    return from_example(nn.Linear(16, 16).eval(), torch.randn(4, 16))


def beside(peer: Peer, *, limit: float = math.inf, ours: bool = True) -> dict[str, Any]:
    made = linear()
    return measure.compared(peer, made, made.model if ours else None, answer(made), seconds=0.02, limit=limit)


def test_a_peer_that_is_right_has_times() -> None:
    row = beside(Peer("eager", lambda made: made.model))
    assert row["error"] == 0 and row["ms"] > 0 and len(row["samples"]) == len(row["ours_samples"]) == row["blocks"]
    assert row["ratio_ci"][0] <= row["ratio"] <= row["ratio_ci"][1] and row["beside"] == "wavecrest"
    assert beside(Peer("eager", lambda made: made.model), ours=False)["beside"] == "eager"


def test_a_peer_that_is_wrong_has_none() -> None:
    row = beside(Peer("twice", lambda made: lambda x: 2 * made.model(x)))
    assert "differs from eager's by 1" in row["problem"] and "ms" not in row
    row = beside(Peer("more", lambda made: lambda x: (made.model(x), x)))
    assert "differs from eager's by inf" in row["problem"]


def test_a_peer_is_right_where_eager_is_as_far_from_higher_precision() -> None:
    """A difference of two large numbers, of which bfloat16 keeps two digits."""

    class Cancels(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 100.0) - 100.0

    made = from_example(Cancels().bfloat16(), torch.randn(64, dtype=torch.bfloat16))
    for factor, is_right in ((1.0, True), (9.0, False)):
        peer = Peer("other", lambda made, factor=factor: lambda x: factor * x)
        found = measure.compared(peer, made, None, answer(made), seconds=0.02, limit=5.0)
        assert ("ms" in found) == is_right and (found.get("error", 1.0) > measure.MOST_ERROR)


def test_a_peer_that_raises_or_takes_too_long_says_so() -> None:
    def slow(_made: Workload) -> Any:
        time.sleep(5)

    begin = time.perf_counter()
    assert beside(Peer("slow", slow), limit=0.2)["problem"] == "TookTooLong: not ready after 0 s"
    assert time.perf_counter() - begin < 3 and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

    def fails(_made: Workload) -> Any:
        raise RuntimeError("no such mode\nmore")

    assert beside(Peer("fails", fails))["problem"] == "RuntimeError: no such mode"


def test_the_bound_is_of_products_or_of_weights() -> None:
    made = from_example(nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64)), torch.zeros(2, 8, dtype=torch.int64))
    work = 2 * 16 * 64 * 64
    size = 4 * (64 * 64 + 64) + 8 * 16
    row = measure.bound(made, Ceilings(source="", bandwidth=1.0, peak={"float32": 1e-3}))
    assert (row["flops"], row["bytes"], row["limit"]) == (work, size, "compute")
    assert row["ms"] == pytest.approx(work / 1e-3 / 1e12 * 1e3, rel=1e-4)
    row = measure.bound(made, Ceilings(source="", bandwidth=1e-3, peak={"float32": 1.0}))
    assert row["limit"] == "memory" and row["ms"] == pytest.approx(size / 1e-3 / 1e9 * 1e3, rel=1e-4)


class Shared(nn.Module):
    """Four heads of queries that share two of keys and values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = x.unflatten(-1, (4, 8)).transpose(1, 2), x[..., :16].unflatten(-1, (2, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)


class Grouped(nn.Module):
    """Sixteen tokens, of which an expert has five and another eleven."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x[0], self.weight, offs=torch.tensor([5, 16], dtype=torch.int32))


@pytest.mark.parametrize(
    ("model", "flops"),
    [
        # four projections and two wide layers for each of 2 x 16 tokens, and all pairs of tokens twice
        (nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2 * 32 * 8 * 32 * 32 + 4 * 2 * 16 * 16 * 32),
        (nn.LSTM(32, 16, batch_first=True, bidirectional=True), 2 * 32 * 2 * 4 * 16 * (32 + 16)),
        (Shared(), 4 * 2 * 16 * 16 * 32),
        (Grouped(), 2 * 16 * 32 * 8),
    ],
    ids=["encoder", "lstm", "shared", "grouped"],
)
def test_flops_of_fused_layers_are_counted(model: nn.Module, flops: int) -> None:
    made = from_example(model, torch.zeros(2, 16, 32))
    assert measure.bound(made, Ceilings(source="", bandwidth=1.0, peak={"float32": 1.0}))["flops"] == flops


def test_networks_of_images_are_known() -> None:
    assert peers.is_convolutional(Blocks(peers.CONVOLUTIONS)) and not peers.is_convolutional(Blocks(1))
    model = Blocks(8).eval()
    x = torch.randn(2, 8, 6, 6)
    changed = peers.ChannelsLast(model)
    assert torch.allclose(changed(x=x), model(x), atol=1e-5)
    assert changed(x).is_contiguous(memory_format=torch.channels_last)
    assert model.blocks[0][0].weight.data_ptr() != changed.inner.blocks[0][0].weight.data_ptr()  # type: ignore[index, union-attr]


def test_searches_are_on_request() -> None:
    assert [peer.name for peer in peers.peers("cpu", slow=False)] == ["eager", "compile", "by hand"]
    assert [peer.name for peer in peers.peers("cuda:0", slow=True)][-2:] == ["by hand", "max-autotune"]


@pytest.mark.gpu
def test_a_graph_by_hand_gives_the_answer_of_other_inputs() -> None:
    made = from_example(nn.Linear(16, 16, device="cuda").eval(), torch.randn(4, 16, device="cuda"))
    with torch.no_grad():
        graphed, x = peers.by_hand(made), torch.randn(4, 16, device="cuda")
        assert torch.equal(graphed(x), made.model(x))


def test_a_part_that_died_goes_on_with_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wavecrest's run is not made again where a peer ended the process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(measure.api, "run", lambda *_a, **_k: pytest.fail("it was run again"))
    args = argparse.Namespace(device="cpu", tiny=True, scratch=str(tmp_path), budget=1.0, seconds=0.02, autotune=0.0)
    args.command = "made up"
    told = Told(done=("model", "bound", "wavecrest", "eager"), died=("compile",))
    measure.measure(entries()["mlp"], told, args)
    assert [row["case"] for row in told.rows] == ["by hand"]
    # the plan is lost with the scratch folder here, so the peer stands beside eager, and the page shows no ratio
    assert told.rows[0]["beside"] == "eager"


# --- figures and the page


def row(case: str, ms: float, ours: float, **more: Any) -> dict[str, Any]:
    ratio = ms / ours
    return {
        "case": case, "ms": ms, "ours_ms": ours, "ratio": ratio, "ratio_ci": [0.9 * ratio, 1.1 * ratio],
        "beside": "wavecrest", **more,
    }  # fmt: skip


MODEL = {
    "case": "model", "batch": 4, "length": 8, "dtype": "float32", "library": "torch", "about": "", "unit": "rows",
    "count": 4, "parameters": 10, "tiny": False, "load_s": 0.1,
}  # fmt: skip
STEP = {
    "title": "fuse QKV", "attempt": 1, "verdict": "reverted", "reason": "slower; gemm 1.0 → 2.0 ms",
    "causes": ["gemm 1.0 → 2.0 ms", "gaps | 3 %"], "ratio": 0.5, "predicted": 1.1, "seconds": 3.0,
}  # fmt: skip
OURS = {
    "case": "wavecrest", "budget": 90.0, "seconds": 88.0, "verdict": "faster", "reason": "", "ratio": 2.0,
    "unit": "processes", "kept": ["compile default"], "environment": {"A": "1"}, "notes": [],
    "steps": [STEP, {**STEP, "title": "pack heads", "verdict": "skipped", "causes": [], "ratio": None}],
}  # fmt: skip
GOOD = [MODEL, {"case": "bound", "ms": 1.0}, OURS, row("eager", 4.0, 2.0), row("compile", 3.0, 2.0)]


def test_the_fastest_peer_is_the_one_to_beat() -> None:
    found = measure.summary(GOOD)
    assert (found["best"], found["best_ms"], found["ratio"], found["eager_ratio"]) == ("compile", 3.0, 1.5, 2.0)
    assert found["rate"] == 2000.0 and found["bound_percent"] == 50.0
    assert measure.summary(GOOD[:3]) == {}
    assert measure.summary([MODEL, row("eager", 4.0, 2.0, beside="eager")]) == {}


def header() -> dict[str, Any]:
    return {
        "created": "2026-12-01T00:00:00+00:00", "command": "python -m benchmarks.zoo", "commit": "abc1234",
        "device": {"name": "A Machine"}, "versions": {"torch": "2.13", "triton": "3.6", "transformers": "5"},
    }  # fmt: skip


def record(folder: Path, name: str, *runs: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    files.write_document(folder / name, {"samples": "full", "runs": list(runs)})


def test_the_page_shows_the_newest_run_that_was_done(tmp_path: Path) -> None:
    done = {"part": "bert-base", "ended": "done", "seconds": 9.0, "summary": None, "rows": GOOD, "header": header()}
    late = {**done, "ended": "stopped after 9 s", "rows": [MODEL]}
    record(tmp_path / "machine", "2026-12-01_zoo_models.jsonl.gz", done, {**late, "part": "mlp"})
    record(tmp_path / "machine", "2026-12-02_zoo_models.jsonl.gz", late)
    text = page.page("generated", tmp_path)
    assert (
        "| `bert-base` | 4.000 | 3.000 | 2.000 | 2,000 rows/s | 1.50× [1.35, 1.65] compile | 50 | 88 | [12-01]" in text
    )
    assert "| `mlp` | stopped after 9 s |" in text and "Geometric mean over 1 model: 1.50×" in text
    assert "| bert-base | 4 | 1,000 rows/s | 1,333 rows/s (compile) | 2,000 rows/s | 2.00× |" in text
    assert "in force: compile default, A=1." in text and "- no time for: pack heads" in text
    assert "- reverted fuse QKV 0.500× (1.10× predicted): slower; gemm 1.0 → 2.0 ms; gaps \\| 3 %" in text
    # both runs are of one record, which is listed once
    name, head = "2026-12-01_zoo_models", header()
    assert text.count(f"[12-01](../evidence/machine/{name}.jsonl.gz) |") == 1 and "2026-12-02" not in text
    listed = f"[`{name}`](../evidence/machine/{name}.jsonl.gz) | {head['commit']} | `{head['command']}` |"
    assert text.count(listed) == 1 and "(#records-on-machine)" in text and "## Records on machine\n" in text


def test_a_run_that_was_stopped_counts_by_the_cases_it_has(tmp_path: Path) -> None:
    """Behind its last peer it is as good as done; without a peer its best may not be the best, so no mean has it."""
    done = {"part": "bert-base", "ended": "done", "seconds": 9.0, "summary": None, "rows": GOOD, "header": header()}
    fast = [{**row, "seconds": 77.0} if row["case"] == "wavecrest" else row for row in GOOD]
    some = [row for row in GOOD if row["case"] != "compile"]
    record(tmp_path / "machine", "2026-12-01_zoo_models.jsonl.gz", done)
    record(
        tmp_path / "machine", "2026-12-02_zoo_models.jsonl.gz",
        {**done, "ended": "stopped after 9 s", "rows": fast},
        {**done, "part": "mlp", "ended": "stopped after 9 s", "rows": some},
    )  # fmt: skip
    text = page.page("generated", tmp_path)
    assert "1.50× [1.35, 1.65] compile | 50 | 77 |" in text and "2026-12-01_zoo" not in text
    assert "Geometric mean over 1 model: 1.50× the best peer (1.50–1.50); 0 below 0.98. 1 not counted, as time" in text


def test_small_and_large_budgets_are_beside_each_other(tmp_path: Path) -> None:
    def run(ms: float, budget: float, created: str, ended: str = "done") -> dict[str, Any]:
        rows = [{**row, "budget": budget} if row["case"] == "wavecrest" else {**row} for row in GOOD]
        for row in rows:
            if "ours_ms" in row:
                row["ours_ms"] = ms
        made = {**header(), "created": created}
        return {"part": "bert-base", "ended": ended, "seconds": 9.0, "summary": None, "rows": rows, "header": made}

    small, large = run(4.0, 90.0, "2026-12-01T01"), run(3.0, 300.0, "2026-12-01T02")
    record(tmp_path / "machine", "2026-12-01_zoo_a.jsonl.gz", small)
    assert "| a small budget |" not in page.page("generated", tmp_path)
    record(tmp_path / "machine", "2026-12-01_zoo_b.jsonl.gz", large, run(5.0, 200.0, "2026-12-01T03"))
    commit = small["header"]["commit"]
    expected = f"| `bert-base` | 4.000 ms | 90 s, {commit} | 3.000 ms | 300 s, {commit} | 75% |"
    assert expected in page.page("generated", tmp_path)


def test_eager_alone_is_no_rival(tmp_path: Path) -> None:
    """A peer whose answer is another's leaves eager alone; the line is shown, and no mean has it."""
    done = {"part": "bert-base", "ended": "done", "seconds": 9.0, "summary": None, "rows": GOOD, "header": header()}
    alone = [{"case": "compile", "problem": "its answer differs"} if row["case"] == "compile" else row for row in GOOD]
    record(tmp_path / "machine", "2026-12-01_zoo_models.jsonl.gz", done, {**done, "part": "mlp", "rows": alone})
    text = page.page("generated", tmp_path)
    assert "| `mlp` | 4.000 | – |" in text and "Geometric mean over 1 model: 1.50×" in text
    assert "1 not counted, as time ran out or no peer but eager has a time." in text


def test_a_failed_run_is_shown_with_its_reason(tmp_path: Path) -> None:
    rows = [MODEL, {"case": "wavecrest", "problem": "OutOfMemoryError: no room", "seconds": 1.0}]
    run = {"part": "mlp", "ended": "done", "seconds": 9.0, "summary": None, "rows": rows, "header": header()}
    record(tmp_path / "machine", "2026-12-01_zoo_models.jsonl.gz", run)
    text = page.page("generated", tmp_path)
    assert "| `mlp` | OutOfMemoryError: no room |" in text and "No result: OutOfMemoryError: no room." in text


# --- the command


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["--models", "mpl", "--out", "x.json"])
    assert "no model 'mpl'; there are" in capsys.readouterr().err


def test_done_models_are_left_alone_and_missing_libraries_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, started = tmp_path / "zoo.json", []
    out.write_text(json.dumps({"samples": "full", "runs": [{"part": "mlp", "ended": "done"}]}))
    monkeypatch.setattr(runner.parts, "run_all", lambda found, *_rest: started.extend(found) or 0)
    monkeypatch.setattr(Entry, "missing", property(lambda self: "timm is not installed" * (self.library == "timm")))
    assert runner.main(["--models", "mlp,lstm,swin-tiny", "--out", str(out), "--budget", "90s"]) == 1
    assert [(part.name, part.limit) for part in started] == [("lstm", 90 * runner.SHARE + runner.BESIDE)]
    assert json.loads(out.read_text())["runs"][1]["ended"] == "not started: timm is not installed"
    assert runner.main(["--models", "mlp", "--out", str(out), "--again"]) == 0 and started[-1].name == "mlp"


@pytest.mark.slow
def test_what_a_run_kept_and_the_causes_of_what_it_did_not_can_be_written() -> None:
    cause = Cause(kind="launch_gaps", text="launch gaps 31 %")
    lost = StepOutcome(id="a", title="A", level=1, verdict="reverted", reason="slower", causes=[cause], ratio=0.5)
    none = StepOutcome(id="b", title="B", level=1, verdict="skipped", reason="nothing to change")
    record = OptimizeRecord.model_construct(result=None, steps=[lost, none], notes=["n"])
    told = json.loads(json.dumps(measure.outcome(record, Plan.model_construct(steps=[], environment=[]))))
    assert [step["causes"] for step in told["steps"]] == [["launch gaps 31 %"]]
    assert (told["verdict"], told["kept"], told["notes"]) == ("interrupted", [], ["n"])


@pytest.mark.slow
def test_a_model_from_the_command_to_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    # as a user's CPU runs it: candidates for linear layers are not timed in Triton's interpreter
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out = tmp_path / "zoo.json"
    given = ["--models", "mlp", "--tiny", "--device", "cpu", "--budget", "2s", "--seconds", "0.05", "--out", str(out)]
    # the command of a record is this process's
    monkeypatch.setattr(sys, "argv", ["benchmarks/zoo/__main__.py", *given])
    assert runner.main(given) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["ended"] == "done" and run["summary"]["best"] in ("eager", "compile", "by hand")
    assert run["header"]["command"].startswith("python -m benchmarks.zoo --models mlp --tiny")
    assert [row["case"] for row in run["rows"]] == ["model", "bound", "wavecrest", "eager", "compile", "by hand"]
