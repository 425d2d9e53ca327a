"""Every error wavecrest raises on purpose.

WavecrestError                     exit code
├── UserError                      1   the call, the file or the workload is wrong; the message says what to do
│   ├── InvalidArgument            1   an op or function got an argument outside its contract (also a ValueError)
│   ├── WorkloadError              1   the workload cannot be loaded or run
│   ├── CheckpointError            1   a model's folder is incomplete, damaged or of another model
│   ├── OutputError                1   a result cannot be written where asked
│   ├── RecordError                1   a result file is damaged, foreign or newer than this version
│   ├── PlanError                  1   a plan file is damaged, foreign or newer than this version
│   ├── BundleError                1   a proof bundle is damaged, foreign or newer than this version
│   └── TableError                 1   a table of measured rows is damaged, or made for other columns
├── Refused                        2   the work was understood and declined, with the reason
│   ├── PlanMismatch               2   the plan belongs to another machine or another model
│   ├── StepRefused                2   one optimization step declines (recorded as a verdict, never lost)
│   ├── QualityNotMet              2   a quantized model is further from the original than it may be
│   ├── Unsupported                2   a backend does not take this call
│   │   └── KernelRefused          2   a user's kernel is not for this call, or broke the op's contract; names the case
│   └── UnsupportedInstruction     2   the emulator has no meaning for an instruction, which the message names
├── Regression                     2   a check that guards speed or numerics failed
├── EmulationError                 2   machine code went wrong in the emulator; the message names the instruction
│   ├── OutOfBounds                2   it accessed memory outside of what it was given
│   └── HazardFound                2   it misses a wait or a barrier, or uses a value that nothing wrote
└── EnvironmentProblem             3   the machine lacks something: a device, a compiler, a package
    ├── DeviceFailed               3   the GPU failed, and this process cannot use it any more; a new one can go on
    ├── ClockError                 3   times cannot be trusted; the message says which clock and why
    ├── MissingDependency          3   an optional package is not installed; the message names the command
    └── RankFailed                 3   another process of a job over several GPUs failed, or ended
"""

from __future__ import annotations


class WavecrestError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class UserError(WavecrestError):
    """The call, the file or the workload is wrong."""


class InvalidArgument(UserError, ValueError):
    """An argument is outside the documented contract."""


class WorkloadError(UserError):
    """The workload cannot be loaded or run."""


class CheckpointError(UserError):
    """A model's folder is incomplete, damaged or of another model."""


class OutputError(UserError):
    """A result cannot be written where asked."""


class RecordError(UserError):
    """A result file is damaged, foreign or newer than this version."""


class PlanError(UserError):
    """A plan file is damaged, foreign or newer than this version."""


class BundleError(UserError):
    """A proof bundle is damaged, foreign or newer than this version."""


class TableError(UserError):
    """A table of measured rows is damaged, or made for other columns."""


class Refused(WavecrestError):
    """Understood and declined."""

    exit_code = 2


class PlanMismatch(Refused):
    """The plan belongs to another machine or another model."""


class StepRefused(Refused):
    """One optimization step declines; the reason becomes its verdict."""


class QualityNotMet(Refused):
    """No layer can be quantized within the limit on a model's quality; the model is as it was."""


class Unsupported(Refused):
    """A backend does not take this call."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class KernelRefused(Unsupported):
    """A user's kernel does not run a call: it is not declared for it, or a check found it wrong."""


class UnsupportedInstruction(Refused):
    """The emulator has no meaning for an instruction of a kernel."""


class Regression(WavecrestError):
    """A check that guards speed or numerics failed."""

    exit_code = 2


class EmulationError(WavecrestError):
    """Machine code went wrong in the emulator: a trap, a jump out of the code, an endless loop."""

    exit_code = 2


class OutOfBounds(EmulationError):
    """A kernel accessed memory outside of its arguments."""


class HazardFound(EmulationError):
    """Machine code misses a wait or a barrier, or uses what nothing wrote; the result may be right all the same."""


class EnvironmentProblem(WavecrestError):
    """The machine lacks something the command needs."""

    exit_code = 3


class DeviceFailed(EnvironmentProblem):
    """The GPU failed while this process used it: no more work runs on it here. A new process can go on."""


class ClockError(EnvironmentProblem):
    """Times cannot be trusted: a clock was replaced, clocks disagree, or work runs on after the timed call."""


class MissingDependency(EnvironmentProblem):
    """An optional package is not installed."""

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        super().__init__(f"{needed_for} needs the package {package}; install it with: {install}")
        self.package = package


class RankFailed(EnvironmentProblem):
    """Another process of a job over several GPUs failed or ended; the message has its rank and its error, if known."""


class PlanWarning(UserWarning):
    """A plan was applied, but not exactly as it was made; the text says what differs."""


class LayoutWarning(UserWarning):
    """Tensors are read in a layout that they are likely not in; the text says how to name theirs."""


class CompileWarning(UserWarning):
    """A model that should run compiled runs in eager; the text says why."""


class ShapeWarning(UserWarning):
    """A call has a shape that nothing is compiled for; the text says which, what runs instead, and what to do."""


class InterpreterWarning(UserWarning):
    """Kernels run in Triton's interpreter, which gets values of a type wrong; the text says of which."""


class OutputWarning(UserWarning):
    """A run has its result, but a file of it is missing; the text says which, and why."""
