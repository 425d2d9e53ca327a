"""From logits to tokens: the largest, or a draw after temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen.

    A draw is the index of the largest p / e, with e of an exponential distribution for each token: it has the
    distribution p (the race of exponential clocks, from which the Gumbel trick comes) and needs nothing of the host,
    so that a captured graph can hold it, with e filled in before each replay.

    Attributes:
        temperature: the logits are divided by it; 0: the largest is taken.
        top_k: only the k largest can be drawn; 0: all.
        top_p: only the fewest tokens, largest first, whose probabilities add up to p can be drawn; 1: all. The
            probabilities are those of the tokens that `top_k` leaves.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        numbers = {"temperature": self.temperature, "top_p": self.top_p}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidArgument(f"generate: {name} must be a number, got {value!r}")
        if not 0 <= self.temperature < float("inf"):
            raise InvalidArgument(f"generate: temperature must be a number from 0 on, got {self.temperature!r}")
        if type(self.top_k) is not int or self.top_k < 0:
            raise InvalidArgument(f"generate: top_k must be a whole number, 0 for all tokens, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument(f"generate: top_p must be above 0 and at most 1, got {self.top_p!r}")
        if self.greedy and (self.top_k or self.top_p < 1):
            raise InvalidArgument("generate: top_k and top_p are of draws; set a temperature above 0")

    @property
    def greedy(self) -> bool:
        """True if nothing is drawn."""
        return self.temperature == 0

    def noise(self, logits: Tensor) -> Tensor | None:
        """Memory for what a draw from logits [B, V] needs: float32 [B, candidates]; None where nothing is drawn."""
        if self.greedy:
            return None
        vocabulary = logits.shape[-1]
        count = min(self.top_k, vocabulary) if self.top_k else vocabulary
        return torch.empty(logits.shape[0], count, dtype=torch.float32, device=logits.device)

    def pick(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Tokens int64 [B] from logits float32 [B, V] and `noise`, filled by `exponential_`."""
        if noise is None:
            return logits.argmax(-1)
        # 0 is an exponential draw too (once in 2^24), and 0 / 0 would beat every token
        noise = noise.clamp_min(1e-30)
        scaled = logits / self.temperature
        if not self.top_k and self.top_p == 1:
            return (scaled.softmax(-1) / noise).argmax(-1)
        values, tokens = scaled.topk(noise.shape[1], dim=-1)
        probabilities = values.softmax(-1)
        # the sum of those before: the first one stays whatever top_p is
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        chosen = (probabilities / noise).argmax(-1, keepdim=True)
        return tokens.gather(-1, chosen).squeeze(-1)
