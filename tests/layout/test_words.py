"""The field's words: retired identifiers and riddles stay out; docs/glossary.md has the word to use instead."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "wavecrest"


class Word(NamedTuple):
    """A retired word, the one to use instead, and the folder or file below src/wavecrest it is retired in ("": all)."""

    old: str
    new: str
    where: str = ""


# identifiers that are gone: variables, functions, classes, parameters, attributes, keywords, names of imports
RETIRED: tuple[Word, ...] = (
    Word("_lib", "ops.common.device"),
    Word("_row_launch", "ops.rows.launch"),
    Word("_row_config", "ops.rows.config"),
    Word("_mlstm_op", "ops.mlstm.backend"),
    Word("multiply_kernel", "kernel_gemv"),
    Word("hopper_kernel", "kernel_hopper"),
    Word("torch_and_mul", "gemm_then_act"),
    Word("and_mul", "gemm_then_act"),
    Word("_row_op", "rows.backend"),
    Word("spread", "remap_xcd", "ops"),
    Word("tile_at", "swizzle_tile", "ops"),
    Word("fetch", "prefetch_l2", "ops"),
    Word("allow_next", "pdl_launch_dependents"),
    Word("await_previous", "pdl_wait"),
    Word("_supports", "refuse"),
    Word("_reserved", "opt_in"),
    Word("_unwilling", "refuse"),
    Word("multiply", "gemv", "ops/_gemm"),
    Word("columns", "head_dim", "ops/_flash_attention"),
    Word("columns", "head_dim", "ops/_flash_decoding"),
    Word("v_columns", "head_dim_v"),
    Word("queries", "seqlen_q", "ops/_flash_attention"),
    Word("top", "m_i", "ops/_flash_attention"),
    Word("top", "m_i", "ops/_flash_decoding"),
    Word("top", "m_i", "ops/_mla_decode"),
    Word("total", "l_i", "ops/_flash_attention/reference.py"),
    Word("total", "all_heads", "ops/_flash_attention/launch_hopper.py"),
    Word("total", "l_i", "ops/_flash_decoding"),
    Word("total", "l_i", "ops/_mla_decode"),
    Word("shrink", "alpha", "ops/_flash_attention"),
    Word("shrink", "alpha", "ops/_flash_decoding"),
    Word("shrink", "alpha", "ops/_mla_decode"),
    Word("finish", "epilogue", "ops/_gemm"),
    Word("codes", "quantized", "ops"),
    Word("supports", "refuse"),
    Word("Joined", "FusedProjection"),
    Word("Operands", "<Op>Call"),
    Word("joined", "fused projection", "models"),
    Word("TAKES_TAILS", "ask the registry", "models"),
    Word("_declines", "refuse"),
    Word("lanes", "workers", "tune"),
    Word("lane", "worker", "tune"),
    Word("Lane", "Worker"),
    Word("RayLane", "RayWorker"),
    Word("lanes_of", "workers_of"),
    Word("contest", "race"),
    Word("_contest", "_race"),
    Word("modelled", "proposal"),
    Word("leave_one_out", "evaluate_near_rows"),
    # `registry.record_misses` is public and stays, as do DispatchMiss and WAVECREST_MISSES
    Word("misses", "untuned_calls"),
    Word("Miss", "UntunedCall"),
    Word("Stack", "AppliedSteps"),
    Word("_operands", "the public function builds the call; _matrix_arguments and _matrix_bytes in _gemm"),
    Word("cannot_walk", "refuse_strides"),
    Word("unreadable", "refuse_dtype"),
    Word("_unreadable", "refuse_dtype"),
    Word("_unwidened", "refuse_dtype"),
    Word("described", "descriptor, has_descriptors or num_descriptors", "ops"),
    Word("described_tiles", "tile_descriptor"),
    # the field `stack` of a plan is part of its format and stays
    *(
        Word("stack", "applied", f"optimizer/{name}.py")
        for name in ("engine", "finish", "ledger", "replay", "state", "steps/applied", "trial")
    ),
    Word("trust", "admission"),
)

# identifiers that are still there: who renames one moves its line to RETIRED
PENDING: tuple[Word, ...] = (
    # kernel text, part of the hash that the compile tests go by: renamed when the kernel changes next
    Word("_row_kernel", "rows.kernel"),
    Word("_multiply", "_consume", "ops"),
    Word("total", "all_heads", "ops/_flash_attention/kernel_hopper.py"),
    # an argument of `ops.linear`, a parameter's name in files of weights, and part of keys of shipped rows
    Word("tail", "extra_rows", "ops/_gemm"),
    Word("tail", "extra_rows", "nn/linear.py"),
    # a key of configurations in shipped rows and users' databases
    Word("EARLY", "PDL and PREFETCH_STEPS"),
)

# names of files and folders (without .py) that are gone, and those that are still there
RETIRED_MODULES: tuple[Word, ...] = (
    Word("_rows", "ops/common/{launcher,layout,checks,pdl,target}"),
    Word("_lib", "ops/common/device"),
    Word("_ahead", "ops/common/warmup"),
    Word("_work", "ops/common/cost_model_work"),
    Word("_hopper", "ops/common/hopper"),
    Word("_philox", "ops/common/philox"),
    Word("_activation", "ops/common/activation"),
    Word("_quantized", "ops/common/quantized"),
    Word("_triton", "ops/common/triton"),
    Word("_packed", "ops/packed/formats"),
    Word("_gated", "ops/gated/launch"),
    Word("_row_op", "ops/rows/backend"),
    Word("_row_kernel", "ops/rows/kernel"),
    Word("_row_launch", "ops/rows/launch"),
    Word("_row_config", "ops/rows/config"),
    Word("_mlstm_op", "ops/mlstm/backend"),
    Word("_mlstm_operands", "ops/mlstm/call"),
    Word("_mlstm_reference", "ops/mlstm/reference"),
    Word("_mlstm_step", "ops/mlstm/step"),
    Word("_mlstm_recurrent", "ops/mlstm/sequence"),
    Word("_mlstm_bound", "ops/mlstm/study/bound"),
    Word("_mlstm_norm", "ops/mlstm/norm"),
    Word("_mlstm_lib", "ops/mlstm/device"),
    Word("operands", "call"),
    Word("op", "backend", "ops"),
    Word("multiply_kernel", "kernel_gemv"),
    Word("hopper_kernel", "kernel_hopper"),
    Word("and_mul", "gemm_then_act"),
    Word("passes", "optimizer/steps"),
    Word("modelled", "benchmarks/evaluate_cost_model", "tune"),
    Word("leave_one_out", "evaluate_near_rows", "tune"),
    Word("misses", "untuned_calls"),
    Word("joined", "nn/fused_block", "models"),
    Word("lanes", "workers", "tune"),
    Word("contest", "race", "tune"),
    Word("trust", "admission", "tune"),
    Word("ahead", "compile_ahead", "tune"),
)
PENDING_MODULES: tuple[Word, ...] = ()

# names of backends: text in the code, in shipped rows and in users' databases. ALIASES are the files that read old ones
RETIRED_BACKENDS: tuple[Word, ...] = (
    Word("triton_multiply", "triton_gemv"),
    Word("torch_and_mul", "gemm_then_act"),
)
PENDING_BACKENDS: tuple[Word, ...] = ()
ALIASES: tuple[str, ...] = ("records/renamed.py",)

# riddles: a reader stops at each of these, and there is a plain way to say it. `None` with a capital is Python's
RIDDLES: dict[str, str] = {
    r"\b[Ss]o many\b": "say the number, or what is counted",
    r"\b(?:is|are|was|were) none\b": "say 'there is no …', or 'is not a …'",
    r"\bof (?:theirs|ours)\b": "name whose it is",
    r"\bof which there\b": "a sentence of its own",
    r"\b[Ww]hat it is for\b": "name it",
    r"\b[Ww]hat there is\b": "name it",
    r"\b[Tt]hat which\b": "name it",
    r"\b[Nn]one of (?:its|their|our|wavecrest's) (?:business|own)\b": "say what is not concerned",
    r"\b[Nn]obody's fault\b": "say what counts as the cause",
}
ANY_RIDDLE = re.compile("|".join(RIDDLES))
# a docstring's first word: the reader wants a noun or a verb, not a clause that stands for one
OPENINGS = re.compile(r"(?:What(?!ever)|That which|Those that|Those of|One that|One of|Of|Whose|How long|So)\b")

# why a file waits. Kernels: reword them when their code changes, since they are compiled again then anyway
HASHED = "its text is part of the hash that the compile tests go by"
MESSAGE = "an error's message: change it together with the tests of it"
# folders and files not swept yet, each with the room that sweeps it or the reason; empty one by deleting its line
PENDING_FOLDERS: dict[str, str] = {
    "src/wavecrest/ops/_gemm/kernel.py": HASHED,
    "src/wavecrest/ops/common/activation.py": HASHED,
    "src/wavecrest/ops/mlstm/chunkwise/kernel.py": HASHED,
    "src/wavecrest/ops/mlstm/chunkwise/kernel_states.py": HASHED,
    "src/wavecrest/ops/rows/kernel.py": HASHED,
    "tests/compile/budgets": HASHED,
}
# pages that name the retired words because they say what replaced them, and this list of them
ABOUT_WORDS = ("docs/glossary.md", "tests/layout/test_words.py")
PROSE = ("*.py", "*.md", "*.toml", "*.yml", "*.yaml", "*.sh", "*.j2", "*.c")


# ------------------------------------------------------------------------------------------------------- identifiers


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a module defines, binds, reads or passes, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.alias):
            for part in (*node.name.split("."), *((node.asname,) if node.asname else ())):
                yield node.lineno, part


def _below(path: Path, where: str) -> bool:
    relative = path.relative_to(SRC).as_posix()
    return not where or relative == where or relative.startswith(f"{where}/")


@pytest.fixture(scope="module")
def code() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SRC.rglob("*.py"))}


def named(code: dict[Path, ast.Module], words: tuple[Word, ...]) -> dict[Word, list[str]]:
    """Where each word is an identifier."""
    found: dict[Word, list[str]] = {word: [] for word in words}
    by_old: dict[str, list[Word]] = {}
    for word in words:
        by_old.setdefault(word.old, []).append(word)
    for path, tree in code.items():
        for line, name in identifiers(tree):
            for word in by_old.get(name, ()):
                if _below(path, word.where):
                    found[word].append(f"{path.relative_to(ROOT)}:{line}")
    return found


def filed(paths: list[Path], words: tuple[Word, ...]) -> dict[Word, list[str]]:
    """Where each word is the name of a file or folder."""
    return {
        word: [
            str(path.relative_to(ROOT))
            for path in paths
            if _below(path, word.where) and word.old in path.relative_to(SRC).with_suffix("").parts
        ]
        for word in words
    }


def quoted(code: dict[Path, ast.Module], words: tuple[Word, ...]) -> dict[Word, list[str]]:
    """Where each word is a text of its own: a backend's name."""
    found: dict[Word, list[str]] = {word: [] for word in words}
    for path, tree in code.items():
        if path.relative_to(SRC).as_posix() in ALIASES:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for word in words:
                    if node.value == word.old:
                        found[word].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def _complaints(found: dict[Word, list[str]]) -> list[str]:
    return [f"{word.old} is retired, use {word.new}: {', '.join(at[:5])}" for word, at in found.items() if at]


def _gone(found: dict[Word, list[str]]) -> list[str]:
    return [f"{word.old} is gone from {word.where or 'src'}" for word, at in found.items() if not at]


def test_retired_identifiers_stay_out(code: dict[Path, ast.Module]) -> None:
    found = _complaints(named(code, RETIRED))
    assert not found, "\n".join(found)


def test_retired_module_names_stay_out(code: dict[Path, ast.Module]) -> None:
    found = _complaints(filed(list(code), RETIRED_MODULES))
    assert not found, "\n".join(found)


def test_retired_backends_stay_out(code: dict[Path, ast.Module]) -> None:
    found = _complaints(quoted(code, RETIRED_BACKENDS))
    assert not found, "\n".join(found)


def test_what_is_pending_is_still_there(code: dict[Path, ast.Module]) -> None:
    """A renamed word moves from a list of PENDING to that of RETIRED, so that it cannot come back."""
    gone = [
        *(f"PENDING: {line}" for line in _gone(named(code, PENDING))),
        *(f"PENDING_MODULES: {line}" for line in _gone(filed(list(code), PENDING_MODULES))),
        *(f"PENDING_BACKENDS: {line}" for line in _gone(quoted(code, PENDING_BACKENDS))),
    ]
    assert not gone, "move these lines to RETIRED…:\n" + "\n".join(gone)


# -------------------------------------------------------------------------------------------------------------- prose


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Comments, those on lines that follow each other as one."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] == last + 1:
            block.append(token.string.lstrip("# "))
        else:
            if block:
                yield start, " ".join(block)
            block, start = [token.string.lstrip("# ")], token.start[0]
        last = token.start[0]
    if block:
        yield start, " ".join(block)


def _plain_comments(text: str) -> bool:
    """Whether no comment can hold a riddle: nothing behind a # does. To tokenize every file takes ten seconds."""
    tails = [line.partition("#")[2] for line in text.splitlines()]
    behind = " ".join(" ".join(tail.lstrip("# ") for tail in tails).split())
    # of a line with another # it is open where its comment begins
    return not any("#" in tail.lstrip("# ") for tail in tails) and ANY_RIDDLE.search(behind) is None


def python_prose(text: str, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Docstrings, comments, and texts of more than a word, with their lines."""
    if not _plain_comments(text):
        yield from _comments(text)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def openings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """First lines of docstrings that open with a clause in place of a noun or a verb."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if OPENINGS.match(first):
                yield getattr(node, "lineno", 1), first


def page_prose(text: str) -> Iterator[tuple[int, str]]:
    """The paragraphs of a page without its blocks of code."""
    blank = re.sub(r"^```.*?^```", lambda match: "\n" * match[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", blank):
        yield line, paragraph
        line += paragraph.count("\n")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def prose(path: Path, text: str, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    if path.suffix == ".py":
        yield from python_prose(text, nodes)
    elif path.suffix == ".toml":
        yield from ((1, part) for part in _texts(tomllib.loads(text)))
        yield from ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.startswith("#"))
    else:
        yield from page_prose(text)


def riddles(path: Path) -> list[str]:
    """What a reader stumbles over in a file, each with its line and what to do."""
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    text, found = path.read_text(encoding="utf-8"), []
    nodes = list(ast.walk(ast.parse(text))) if path.suffix == ".py" else []
    for line, part in prose(path, text, nodes):
        plain = " ".join(part.split())
        found += [
            f"{name}:{line}: {match[0]!r}: {instead}"
            for pattern, instead in (RIDDLES.items() if ANY_RIDDLE.search(plain) else ())
            for match in re.finditer(pattern, plain)
        ]
    return found + [f"{name}:{line}: opens with a clause: {first!r}" for line, first in openings(nodes)]


def _swept() -> list[Path]:
    """The files whose prose is held: all but hidden folders, records and what is pending."""
    folders = ("src", "docs", "examples", "scripts", "benchmarks", "tests", ".github")
    paths = {path for folder in folders for pattern in PROSE for path in (ROOT / folder).rglob(pattern)}
    paths |= set(ROOT.glob("*.md"))
    pending = [ROOT / folder for folder in PENDING_FOLDERS]
    about = [ROOT / page for page in ABOUT_WORDS]
    return sorted(path for path in paths if path not in about and not any(path.is_relative_to(at) for at in pending))


def test_no_riddles() -> None:
    swept = _swept()
    assert len(swept) > 50, "nothing is looked at"
    found = [line for path in swept for line in riddles(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", PENDING_FOLDERS)
def test_pending_folders_still_need_it(folder: str) -> None:
    """A folder whose prose is plain is taken off the list, so that it stays plain."""
    path = ROOT / folder
    assert path.exists(), f"{folder} is no longer there: delete its line"
    paths = [path] if path.is_file() else [one for pattern in PROSE for one in path.rglob(pattern)]
    about = [ROOT / page for page in ABOUT_WORDS]
    if not any(riddles(one) for one in paths if one not in about):
        pytest.fail(f"{folder} is plain now: delete its line from PENDING_FOLDERS")


# ------------------------------------------------------------------------------------------------- the test of the test

PLANTED = '''"""What a lane is."""


def count(so_many):
    """Count."""
    # of these so many
    # are none of theirs
    if so_many is None:
        raise ValueError("a child that is not ready is none")
    return so_many
'''


def test_a_planted_riddle_is_found(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(PLANTED, encoding="utf-8")
    found = "\n".join(riddles(path))
    for wanted in ("'so many'", "'are none'", "'of theirs'", "'is none'", "opens with a clause: 'What a lane is.'"):
        assert wanted in found, found
    # the identifier, and Python's own None, are not prose
    assert found.count("planted.py") == 5, found


def test_a_planted_identifier_is_found() -> None:
    tree = ast.parse("def run(call, *, tail): return call.finish(_lib=tail)\nimport a.and_mul as b\n")
    names = [name for _, name in identifiers(tree)]
    for wanted in ("run", "call", "tail", "finish", "_lib", "and_mul", "b"):
        assert wanted in names
    path = SRC / "ops" / "_gemm" / "planted.py"
    words = (Word("tail", "extra_rows", "ops/_gemm"), Word("tail", "extra_rows", "nn"), Word("finish", "epilogue"))
    found = named({path: tree}, words)
    assert [len(found[word]) for word in words] == [2, 0, 1]
    assert filed([SRC / "ops" / "_lib.py", SRC / "ops" / "a" / "op.py"], (Word("_lib", ""), Word("op", "", "ops"))) == {
        Word("_lib", ""): ["src/wavecrest/ops/_lib.py"],
        Word("op", "", "ops"): ["src/wavecrest/ops/a/op.py"],
    }
