"""The example model: trained weights that are read from the repository and write on."""

from __future__ import annotations

import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from torch.nn import functional as F

from tests.models.xlstm_harness import DEVICE
from wavecrest.models.xlstm import quantize, xLSTMLarge

EXAMPLES = Path(__file__).parents[2] / "examples"
# no sentence of the documentation
TEXT = "If the argument is not a number, the method raises an exception and returns the value of the object instead."


def _loss(model: xLSTMLarge) -> float:
    row = torch.tensor([[model.config.bos_token_id, *TEXT.encode()]], device=DEVICE)
    with torch.no_grad():
        logits = model(row[:, :-1], return_last_states=False)
    return float(F.cross_entropy(logits[0], row[0, 1:]))


def test_it_has_learned() -> None:
    model = xLSTMLarge.from_pretrained(EXAMPLES / "xlstm_docs", device=DEVICE, dtype=torch.float32)
    loss = _loss(model)
    # 0.79 where it was trained; a table of letters reaches about 2.9 on English
    assert loss == pytest.approx(0.79, abs=0.02)
    # 0.0004 more where it was trained
    assert _loss(quantize(model, "int8")) == pytest.approx(loss, abs=0.01)


def test_training_begins_where_it_can_save(tmp_path: Path) -> None:
    train = runpy.run_path(str(EXAMPLES / "xlstm_train.py"))["main"]
    assert not (EXAMPLES.parent / inspect.signature(train).parameters["out"].default).exists()
    (tmp_path / "mine").touch()
    for out in (tmp_path, tmp_path / "mine"):
        with pytest.raises(typer.BadParameter, match="is there already and not empty; name a new folder"):
            train(steps=1, out=out, seed=0)


@pytest.mark.slow
def test_the_example_writes_on() -> None:
    command = [sys.executable, str(EXAMPLES / "xlstm_generate.py"), "The function returns", "--length", "60"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The function returns") and len(done.stdout) > 40
    letters = sum(char.isalpha() or char.isspace() for char in done.stdout) / len(done.stdout)
    assert letters > 0.7, done.stdout
