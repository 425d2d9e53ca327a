"""The rules of the accuracy gate by name, and the refusal that names the one that was broken."""

from __future__ import annotations

from wavecrest.errors import StepRefused

# name -> what the rule holds a candidate to
RULES: dict[str, str] = {
    "leaves": "every value of the output is compared; one that cannot be is a refusal",
    "structure": "the same outputs, in containers of the same types",
    "type": "tensors of the same class, dtype, device and layout",
    "sharing": "no output shares memory with inputs, weights or itself where the original's does not",
    "accuracy": "errors within twice the original's own, or the floor of the dtype",
    "elements": "no larger share of elements far off their own value than the original's errors explain",
    "top-1": "the same most likely token",
    "state": "the same tensors of inputs, parameters and buffers are written, with the same values",
    "determinism": "the original gives the same answer twice",
    "dependence": "the original answers something, and not the same on all inputs tried",
    "variation": "right on other values than the example's: noise, other token ids",
    "twins": "right on values that differ from the last ones in their interior alone",
    "padding": "right where masks have padding",
    "edges": "right for large values, zero rows and the ends of integer ranges",
    "shapes": "right for shapes that no bucket has",
    "seeds": "the values tried are drawn anew for each run",
    "repeat": "right in every one of many calls",
    "pointers": "right after values change in place without PyTorch's version counter",
    "addresses": "right for new tensors at new addresses",
    "held": "an answer stays what it is after later calls",
    "owned": "an answer is the caller's: what is written into it changes no later answer",
    "poison": "right where freed memory holds NaN, and no earlier answer",
    "thread": "right in another thread, with nothing of the gate on the call stack",
    "concurrent": "right when two threads call at the same time",
    "keyword": "right when arguments are passed by name",
    "gradients": "right with gradients enabled",
    "process": "torch's functions, global settings and the classes of the model stay as they are",
    "model": "the user's model and example inputs stay as they are",
    "timing": "the calls that were timed gave the right answers, on values drawn anew for each",
}
ALL_RULES = frozenset(RULES)
# by the kind of values
RULE_OF_KIND = {"noise": "variation", "twins": "twins", "padding": "padding", "edges": "edges"}


class RuleBroken(StepRefused):
    """A candidate broke a rule of the gate.

    Attributes:
        rule: a key of RULES.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{message} (rule: {rule})")
        self.rule = rule
