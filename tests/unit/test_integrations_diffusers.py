"""A pipeline's modules are found by watching a call, optimized one by one, put in place, and taken out again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument, WorkloadError
from wavecrest.integrations import diffusers as integration
from wavecrest.measure.bootstrap import Interval
from wavecrest.measure.timing import Paired
from wavecrest.measure.workload import Workload
from wavecrest.optimizer.options import Options
from wavecrest.optimizer.steps import structural_copy


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, t: int = 0, *, scale: Tensor) -> tuple[Tensor]:
        return (self.linear(x) * scale + t,)


class AutoEncoder(nn.Module):
    """Called by another method, as a VAE is."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.conv = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8)), nn.Linear(4, 4)

    def decode(self, x: Tensor) -> Tensor:
        result: Tensor = self.decoder(self.conv(x))
        return result


class Pipeline:
    def __init__(self) -> None:
        self.unet, self.vae, self.text, self.scheduler = Denoiser().eval(), AutoEncoder().eval(), nn.Linear(2, 2), 3

    @property
    def components(self) -> dict[str, Any]:
        return {"unet": self.unet, "vae": self.vae, "text": self.text, "scheduler": self.scheduler}

    def __call__(self, steps: int = 3) -> Tensor:
        x = torch.ones(1, 4)
        with torch.no_grad():
            for step in range(steps):
                (x,) = self.unet(x if step else x.repeat(2, 1), step, scale=torch.tensor(0.5))
            return self.vae.decode(x)


Runs = list[tuple[Workload, Options, Path | None]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Runs of the ladder that were asked for; each gives a copy whose answers are the same."""
    found: Runs = []

    def run(workload: Workload, options: Options, *, out: Path | None, progress: Any) -> Any:
        found.append((workload, options, out))
        if workload.name == "vae.decoder" and options.level == 1:
            raise WorkloadError("planted")
        return SimpleNamespace(model=structural_copy(workload.model), summary=lambda: f"made {workload.name}")

    def measure(base: Any, new: Any, **_more: Any) -> Paired:
        base(), new()
        return Paired((30.0,), (10.0,), 3.0, Interval(2.5, 3.5), "host wall")

    monkeypatch.setattr(integration.api, "run", run)
    monkeypatch.setattr(integration.timing, "measure_pair", measure)
    return found


def test_modules_are_found_and_put_in_place(runs: Runs, tmp_path: Path) -> None:
    pipeline = Pipeline()
    unet, decoder, want = pipeline.unet, pipeline.vae.decoder, pipeline()
    found = integration.optimize_pipeline(pipeline, {"steps": 3}, budget=40.0, out=tmp_path / "out")
    assert [(part.path, part.calls) for part in found.parts] == [("unet", 3), ("vae.decoder", 1)]
    (workload, options, out), _ = runs
    # the first call has another batch, the two others the same shapes
    assert list(workload.buckets) == ["2x4"] and options.budget == 20.0 and out == tmp_path / "out" / "unet"
    assert pipeline.unet is not unet and pipeline.vae.decoder is not decoder and pipeline.text.training
    assert torch.equal(pipeline(), want)
    text = (tmp_path / "out" / "pipeline.txt").read_text()
    assert text == found.summary() + "\n" and "30.0 ms → 10.0 ms, 3.00× [2.50, 3.50]" in text and "made unet" in text
    found.undo()
    found.undo()
    assert pipeline.unet is unet and pipeline.vae.decoder is decoder


def test_the_examples_are_those_of_the_call(runs: Runs) -> None:
    integration.optimize_pipeline(Pipeline(), {"steps": 1})
    (example,) = runs[0][0].buckets.values()
    assert example.args[0].shape == (2, 4) and example.args[1] == 0 and example.kwargs["scale"] == 0.5


def test_a_module_that_cannot_be_optimized_stays_and_says_why(runs: Runs) -> None:
    pipeline = Pipeline()
    decoder = pipeline.vae.decoder
    found = integration.optimize_pipeline(pipeline, {}, level=1)
    assert pipeline.vae.decoder is decoder and found.parts[1].note == "not optimized: planted"
    assert "planted" in found.summary()


def test_a_pipeline_that_fails_at_the_end_is_as_it_was(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(base: Any, new: Any, **_more: Any) -> Paired:
        new()
        raise RuntimeError("planted")

    monkeypatch.setattr(integration.timing, "measure_pair", fail)
    pipeline = Pipeline()
    unet, decoder = pipeline.unet, pipeline.vae.decoder
    with pytest.raises(RuntimeError, match="planted"):
        integration.optimize_pipeline(pipeline, {})
    assert pipeline.unet is unet and pipeline.vae.decoder is decoder


def test_what_is_refused(runs: Runs) -> None:
    with pytest.raises(InvalidArgument, match="takes a pipeline"):
        integration.optimize_pipeline(nn.Linear(2, 2), {})
    pipeline = Pipeline()
    pipeline.unet.linear._hf_hook = object()  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match="accelerate moves unet"):
        integration.optimize_pipeline(pipeline, {})
    pipeline = Pipeline()
    pipeline.__class__ = type("Idle", (Pipeline,), {"__call__": lambda self: None})
    with pytest.raises(InvalidArgument, match="runs no module of Idle"):
        integration.optimize_pipeline(pipeline, {})
    assert not runs


def test_a_pipeline_of_diffusers(runs: Runs) -> None:
    diffusers = pytest.importorskip("diffusers", reason="needs the package diffusers")
    pipeline = tiny(diffusers)
    given = {"prompt_embeds": torch.randn(1, 4, 16), "negative_prompt_embeds": torch.randn(1, 4, 16)}
    given |= {"num_inference_steps": 2, "output_type": "np", "height": 16, "width": 16}

    def image() -> Any:
        return pipeline(**given, generator=torch.Generator().manual_seed(0)).images

    unet, want = pipeline.unet, image()
    found = integration.optimize_pipeline(pipeline, given)
    assert [(part.path, part.calls) for part in found.parts] == [("vae.decoder", 1), ("unet", 2)]
    assert pipeline.unet is not unet and (image() == want).all()
    assert pipeline.config.unet == ("diffusers", "UNet2DConditionModel")
    found.undo()
    assert pipeline.unet is unet


def tiny(diffusers: Any) -> Any:
    """Stable Diffusion with random weights and without a text encoder, which takes embeddings."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8, norm_num_groups=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=[8, 16], in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2, latent_channels=4, norm_num_groups=4,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae,
        None,
        None,
        unet,
        diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        None,
        None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
