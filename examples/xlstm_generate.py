"""Write on with a small xLSTM that was trained on the documentation of Python (see `xlstm_train.py`).

python examples/xlstm_generate.py "The with statement"
python examples/xlstm_generate.py "Return a list of" --temperature 0 --quantize int8
"""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Annotated

import torch
import typer

from wavecrest.models.xlstm import xLSTMLarge

MODEL = Path(__file__).parent / "xlstm_docs"


def main(
    prompt: Annotated[str, typer.Argument(help="What the text begins with.")] = "The with statement",
    length: Annotated[int, typer.Option(help="Bytes to write at most.")] = 300,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte each time.")] = 0.6,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    quantize: Annotated[str | None, typer.Option(help="int8, fp8 or int4: weights in fewer bits.")] = None,
) -> None:
    """Print the prompt and what the model writes behind it, byte by byte."""
    model = xLSTMLarge.from_pretrained(MODEL, quantize=quantize)
    device = model.embedding.weight.device
    tokens = torch.tensor([list(prompt.encode())], dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print(prompt, end="", flush=True)
    for token in model.stream(tokens, length, temperature=temperature, generator=generator):
        # the token that begins a text is no byte; it ends this one
        if int(token) < 256:
            print(decoder.decode(bytes([int(token)])), end="", flush=True)
    print()


if __name__ == "__main__":
    typer.run(main)
