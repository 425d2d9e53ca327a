"""The accuracy gate: no step is measured for speed before it gives the right answers.

| file | holds |
|---|---|
| `gate` | `Gate`: prepared from the original, it checks candidates |
| `prepare` | right answers of the original in one bucket, for values and shapes that it can answer |
| `rules` | the rules by name; `RuleBroken` |
| `site` | inputs of one shape with their right answers, and the state that a call writes |
| `leaves` | every value of an answer, types, shared memory |
| `accuracy` | errors against limits, and the reasons for the limits |
| `inputs` | values and shapes beside the example's |
| `reference` | the original in higher precision |
| `behaviour` | many calls, other threads, new addresses, answers held |
| `process` | torch's functions and global settings stay as they are |
| `untouched` | the user's model stays as it is |
| `watch` | answers of the calls that were timed |
| `snapshot` | bits of tensors, to compare and to put back |
"""

from wavecrest.optimizer.gate.gate import Gate, failures
from wavecrest.optimizer.gate.rules import ALL_RULES, RULES, RuleBroken

__all__ = ["ALL_RULES", "RULES", "Gate", "RuleBroken", "failures"]
