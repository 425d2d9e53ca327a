"""The checks: each looks at a `Context` and yields findings; none changes anything or reads the machine itself."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator

from packaging.version import Version

from wavecrest import env
from wavecrest.doctor.aiter_tables import check_tables
from wavecrest.doctor.context import Context
from wavecrest.doctor.report import LEVELS, Finding, Level
from wavecrest.doctor.silent import SILENT
from wavecrest.records.provenance import LEAST_TRANSFORMERS

Check = Callable[[Context], Iterator[Finding]]

_HIP_VARIABLES = "https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html"
_VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
# variables that have a check of their own
_OWN_CHECK = ("HSA_OVERRIDE_GFX_VERSION", "AITER_CONFIG_GEMM_BF16")


def variables(context: Context) -> Iterator[Finding]:
    """Every variable that is set and known to the table, with its verdict."""
    explained = {name for _, _, _, names in inductor_changes(context) for name in names}
    for row in env.table():
        value = context.environment.get(row.name)
        if value is None or row.name in explained:
            continue
        elsewhere = not matters(row, context) and row.verdict != "folklore"
        if row.name in _OWN_CHECK and not elsewhere:
            continue
        level: Level = "warn" if row.warns(value) and not elsewhere else "info"
        why = row.effect if not row.risk else f"{row.effect}; risk: {row.risk}"
        action = row.advice
        if elsewhere:
            why = f"means something only on {', '.join(row.platforms)}: {row.effect}"
            action = "nothing to do here"
        meaning = f"{row.verdict}: {env.VERDICTS[row.verdict]}"
        # the value decides, not the verdict: a no-op has no effect only at its default
        if row.verdict == "no-op" and value != row.default:
            meaning = f"real at this value; the default is {row.default}"
        yield Finding(
            check="variables",
            level=level,
            what=f"{row.name}={value} ({meaning})",
            why=why,
            action=action,
            source=row.source,
        )


def matters(row: env.Variable | env.Setting, context: Context) -> bool:
    """True if a row applies to this machine; rows about the CPU apply to every machine."""
    return context.device.vendor in row.platforms or "cpu" in row.platforms


def settings(context: Context) -> Iterator[Finding]:
    """Settings outside the environment that can be read from a file and have a value without trouble."""
    for row in env.settings():
        if not row.good or not matters(row, context):
            continue
        text = context.read(row.file)
        if text is None:
            continue
        value = text.strip()
        good = value in row.good
        yield Finding(
            check="settings",
            level="ok" if good else "warn",
            what=f"{row.name} = {value}",
            why=row.effect,
            action="nothing to do" if good else row.advice,
            source=row.source,
        )


def inductor_changes(context: Context) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """(setting, value here, default, set variables that its default reads) for every setting that differs."""
    here, clean = context.inductor_here, context.inductor_clean
    if here.failure or clean.failure:
        return
    for name in sorted(here.values):
        if name not in clean.values or here.values[name] == clean.values[name]:
            continue
        readers = context.inductor_variables.get(name, ())
        yield name, here.values[name], clean.values[name], tuple(n for n in readers if n in context.environment)


def inductor(context: Context) -> Iterator[Finding]:
    """torch.compile settings that differ from those of a process with a clean environment, and the variable behind."""
    for dump in (context.inductor_here, context.inductor_clean):
        if dump.failure:
            yield Finding(
                check="inductor",
                level="warn",
                what="Inductor's settings could not be read",
                why=dump.failure,
                action="see whether `python -c 'import torch._inductor.config'` works",
                source="torch/_inductor/config.py in pytorch/pytorch",
            )
            return
    changed = False
    for name, value, default, names in inductor_changes(context):
        changed = True
        rows = [row for row in map(env.variable, names) if row is not None]
        warns = any(row.warns(context.environment[row.name]) for row in rows)
        cause = ", ".join(f"{name}={context.environment[name]}" for name in names)
        why = "; ".join(f"{row.effect}; risk: {row.risk}" if row.risk else row.effect for row in rows)
        yield Finding(
            check="inductor",
            level="warn" if warns else "info",
            what=f"torch.compile: {name} is {value}, not {default}, because of {cause or 'a variable not identified'}",
            why=why or "compiled code differs from that of a process with a clean environment",
            action="; ".join(row.advice for row in rows)
            or (f"unset {' '.join(names)} unless that is wanted" if names else "compare with `env -i`"),
            source=rows[0].source if rows else "torch/_inductor/config.py in pytorch/pytorch",
        )
    if not changed:
        yield Finding(
            check="inductor",
            level="ok",
            what="torch.compile has its default settings",
            why="no variable of this process changes Inductor's configuration",
            action="nothing to do",
            source="torch/_inductor/config.py in pytorch/pytorch",
        )


def visibility(context: Context) -> Iterator[Finding]:
    """Device-visibility variables that contradict each other, or that Ray refuses."""
    if context.device.vendor != "amd" and context.hip is None:
        return
    values = {name: context.environment[name] for name in _VISIBILITY if name in context.environment}
    if "ROCR_VISIBLE_DEVICES" in values and "HIP_VISIBLE_DEVICES" not in values:
        yield Finding(
            check="visibility",
            level="info",
            what="ROCR_VISIBLE_DEVICES is set without HIP_VISIBLE_DEVICES",
            why="Ray, and vLLM through it, raises on start and asks for HIP_VISIBLE_DEVICES",
            action="with Ray set HIP_VISIBLE_DEVICES instead; without Ray nothing to do",
            source="ray/_private/accelerators/amd_gpu.py in ray-project/ray; ray-project/ray#53737",
        )
    if "ROCR_VISIBLE_DEVICES" in values and len(values) > 1:
        others = " and ".join(name for name in values if name != "ROCR_VISIBLE_DEVICES")
        yield Finding(
            check="visibility",
            level="warn",
            what=f"ROCR_VISIBLE_DEVICES={values['ROCR_VISIBLE_DEVICES']} and {others} are set",
            why="HIP counts among the GPUs that ROCr leaves, so the same number twice can hide every GPU; Ray raises",
            action="set one of them",
            source=f"{_HIP_VARIABLES}; ROCm/ROCR-Runtime#155; ray-project/ray#53737",
        )
    hip, cuda = values.get("HIP_VISIBLE_DEVICES"), values.get("CUDA_VISIBLE_DEVICES")
    if hip is not None and cuda is not None and hip != cuda:
        yield Finding(
            check="visibility",
            level="warn",
            what=f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} contradict each other",
            why="HIP reads both, and a library may follow either",
            action="unset CUDA_VISIBLE_DEVICES, or give both the same list",
            source=_HIP_VARIABLES,
        )


def architecture(context: Context) -> Iterator[Finding]:
    """The pretended architecture of HSA_OVERRIDE_GFX_VERSION."""
    value = context.environment.get("HSA_OVERRIDE_GFX_VERSION")
    row = env.variable("HSA_OVERRIDE_GFX_VERSION")
    if value is None or row is None or context.device.vendor != "amd":
        return
    yield Finding(
        check="architecture",
        level="problem",
        what=f"HSA_OVERRIDE_GFX_VERSION={value}: the GPU shows itself as {context.device.arch}, which may not be true",
        why=f"{row.effect}; risk: {row.risk}",
        action=row.advice,
        source=row.source,
    )


def graph_replay(context: Context) -> Iterator[Finding]:
    """ROCm 7.2.0 to 7.2.3, whose graph replay returns garbage in some processes."""
    if context.hip is None:
        return
    release = context.rocm or context.hip
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:3])
    if numbers[:2] != (7, 2):
        return
    # the third number of torch.version.hip is a build, not a patch level
    known = context.rocm is not None and len(numbers) == 3
    if known and numbers[2] > 3:
        return
    yield Finding(
        check="graph_replay",
        level="problem" if known else "warn",
        what=f"ROCm {release}: replay of captured graphs may return garbage"
        if known
        else f"HIP {context.hip} is of ROCm 7.2, patch level unknown; 7.2.0 to 7.2.3 may replay graphs wrongly",
        why="reported for gfx942: about one fresh process in five gave wrong output from a graph, never in eager mode",
        action="use ROCm 7.2.4 or newer, or verify captured models in at least five fresh processes",
        source="ROCm/clr#279",
    )


def aiter_config(context: Context) -> Iterator[Finding]:
    """Tuned tables of aiter that cannot match this GPU, or that aiter would rewrite."""
    if context.device.vendor != "amd":
        return
    value = context.environment.get("AITER_CONFIG_GEMM_BF16")
    if value:
        yield from check_tables(value, context.device.arch, context.device.compute_units, context.read)


def quota(context: Context) -> float | None:
    """Processors' worth of time that the control group grants, None without a limit."""
    text = context.read("/sys/fs/cgroup/cpu.max")
    if text is None:
        pair = [context.read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
        text = " ".join(part.strip() for part in pair if part is not None)
    numbers = [int(part) for part in text.split() if part.isdecimal()]
    # "max" and, in the older files, -1 stand for no limit
    return numbers[0] / numbers[1] if len(numbers) == 2 and numbers[1] > 0 else None


def processors(context: Context) -> Iterator[Finding]:
    """Fewer processors than the machine has, and thread counts that do not fit to them."""
    allowed, limit = context.allowed_cpus, quota(context)
    usable = allowed if limit is None else min(allowed, max(1, math.ceil(limit)))
    if usable < context.cpus:
        reason = f"a control group grants {limit:g}" if limit is not None and limit < allowed else "its affinity"
        yield Finding(
            check="processors",
            level="info",
            what=f"this process may use {usable} of {context.cpus} processors ({reason})",
            why="data loading, compilation and CPU operators have less than the machine suggests",
            action="compare timings only with runs under the same limit",
            source="/sys/fs/cgroup/cpu.max, sched_getaffinity(2)",
        )
    if context.threads > usable:
        yield Finding(
            check="processors",
            level="warn",
            what=f"PyTorch uses {context.threads} threads on {usable} processors",
            why="threads that wait for a processor hold up every parallel CPU operator",
            action=f"OMP_NUM_THREADS={usable}",
            source="torch.get_num_threads",
        )
    # two threads a core are the rule, and PyTorch counts cores
    elif context.threads * 2 < usable:
        setting = context.environment.get("OMP_NUM_THREADS")
        cause = f"OMP_NUM_THREADS={setting}" if setting is not None else "the cause is not in OMP_NUM_THREADS"
        yield Finding(
            check="processors",
            level="warn" if context.device.kind == "cpu" else "info",
            what=f"PyTorch uses {context.threads} threads on {usable} processors ({cause})",
            why="CPU operators leave processors idle",
            action="unset OMP_NUM_THREADS, or set it to the number of cores",
            source="torch.get_num_threads",
        )


def compiler(context: Context) -> Iterator[Finding]:
    """A C++ compiler, which torch.compile needs on the CPU and Triton for its launchers."""
    if context.compiler is not None:
        return
    wanted = context.environment.get("CXX") or "g++"
    on_cpu = context.device.kind == "cpu"
    yield Finding(
        check="compiler",
        level="problem" if on_cpu else "warn",
        what=f"no C++ compiler: {wanted} is not on the path",
        why="torch.compile cannot compile for the CPU" if on_cpu else "host code of torch.compile cannot be compiled",
        action="install g++ (Debian: apt-get install g++), or set CXX",
        source="torch/_inductor/cpp_builder.py in pytorch/pytorch",
    )


def transformers(context: Context) -> Iterator[Finding]:
    """A version of transformers older than wavecrest is tested with."""
    version = context.packages.get("transformers")
    if version is None or Version(version) >= Version(LEAST_TRANSFORMERS):
        return
    yield Finding(
        check="transformers",
        level="warn",
        what=f"transformers {version} is older than {LEAST_TRANSFORMERS}, the first that wavecrest is tested with",
        why="quantized caches are refused, and some steps do not know its models; before 5.4 so is --generate",
        action="pip install -U transformers",
        source="docs/integrations/transformers.md#versions",
    )


CHECKS: tuple[Check, ...] = (
    compiler,
    transformers,
    architecture,
    graph_replay,
    visibility,
    settings,
    inductor,
    aiter_config,
    *SILENT,
    processors,
    variables,
)


def run_checks(context: Context, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """All findings, the worst first and otherwise in the order of the checks."""
    return in_order([finding for check in checks for finding in check(context)])


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Findings, the worst first and otherwise as they are."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))
