"""Train a small xLSTM, byte by byte, on the documentation that comes with Python.

    python examples/xlstm_train.py --steps 2500 --out xlstm_docs

The text is `pydoc_data.topics` (the language reference) and the docstrings of the standard library, both under the
PSF licence, so it is on every machine; another version of Python has another text.
"""

from __future__ import annotations

import ast
import math
import random
import sysconfig
import time
import warnings
from pathlib import Path
from pydoc_data import topics
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from wavecrest.models.xlstm import xLSTMLarge, xLSTMLargeConfig

# bytes, and one token that begins a text and so ends the one before
BOS, VOCABULARY = 256, 257
CONTEXT, BATCH, WARM_UP = 256, 8, 50
LEARNING_RATE = 4e-3


def config() -> xLSTMLargeConfig:
    """0.8 million parameters; heads of 24 and 48 columns."""
    return xLSTMLargeConfig(
        embedding_dim=144, num_heads=3, num_blocks=3, vocab_size=VOCABULARY, weight_mode="fused", bos_token_id=BOS,
        eos_token_id=BOS, pad_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip


def documents() -> list[str]:
    """The topics of Python's language reference, and the docstrings of the standard library, each a text."""
    found = [text.strip() for _, text in sorted(topics.topics.items())]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        with warnings.catch_warnings():
            # invalid escapes in old docstrings
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        texts = [ast.get_docstring(node) or "" for node in nodes]
        found += [text for text in texts if len(text) > 80]
    return found


def tokens_of(texts: list[str]) -> Tensor:
    """All texts as one row of tokens, each behind a BOS."""
    row: list[int] = []
    for text in texts:
        row += [BOS, *text.encode(), ord("\n")]
    return torch.tensor(row, dtype=torch.int64)


def loss_of(model: xLSTMLarge, batch: Tensor) -> Tensor:
    """Nats a byte; batch int64 [B, CONTEXT + 1]."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: xLSTMLarge, text: Tensor) -> float:
    """Nats a byte over a text, in rows of CONTEXT."""
    rows = text[: (len(text) - 1) // CONTEXT * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)
    losses = [float(loss_of(model, part)) * len(part) for part in rows.split(BATCH)]
    return sum(losses) / len(rows)


def main(
    steps: Annotated[int, typer.Option(help="Batches to train on.")] = 2500,
    out: Annotated[Path, typer.Option(help="A new folder for the model.")] = Path("xlstm_docs"),
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
) -> None:
    """Train, print the loss on texts that were held out, and save in bfloat16."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise typer.BadParameter(f"{out} is there already and not empty; name a new folder", param_hint="--out")
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    texts = documents()
    random.Random(seed).shuffle(texts)
    held_out, text = tokens_of(texts[: len(texts) // 50]), tokens_of(texts[len(texts) // 50 :])
    model = xLSTMLarge(config())
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {len(text):,} bytes to learn, {len(held_out):,} held out")
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    begin, running = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        # a warm-up, then a cosine down to a tenth
        rate = LEARNING_RATE * min(1.0, step / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH, 1))
        loss = loss_of(model, text[starts + torch.arange(CONTEXT + 1)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = loss.item() if step == 1 else 0.98 * running + 0.02 * loss.item()
        if step % 100 == 0:
            print(f"step {step}, {time.monotonic() - begin:.0f} s: {running:.3f} nats a byte", flush=True)
    found = evaluate(model.to(torch.bfloat16).float(), held_out)
    print(f"{step} steps; held out: {found:.3f} nats ({found / math.log(2):.3f} bits) a byte")
    model.to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    typer.run(main)
