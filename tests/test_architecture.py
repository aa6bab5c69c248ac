"""The direction of imports, and that importing does nothing: `launch -> moe -> dbo -> torch`."""

import ast
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = ("dbo", "moe", "launch")  # each may import itself and what stands before it
OPTIONAL = {"deep_ep", "greenlet", "prometheus_client", "triton", "transformers", "gguf"}
DBO_MAY_IMPORT = {"torch", "numpy", "greenlet", "dbo", *sys.stdlib_module_names}
FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
MODULES = sorted(
    module.name for layer in LAYERS for module in pkgutil.walk_packages([str(ROOT / layer)], prefix=f"{layer}.")
)


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """First parts of the names of all modules that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in _executed_at_import(tree) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield path.relative_to(ROOT).parts[0] if node.level else str(node.module).partition(".")[0]


def _executed_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Statements outside functions and outside `if TYPE_CHECKING`; a `try` around an import makes it optional."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Try):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _executed_at_import(child)


def test_the_walk_sees_the_code() -> None:
    assert {"dbo.errors", "moe.upcycle", "launch.upcycle_command"} <= set(MODULES)
    assert "dbo" in imports(ROOT / "moe/dense.py")
    assert "gguf" in imports(ROOT / "moe/dense.py")
    assert "gguf" not in imports(ROOT / "moe/dense.py", top_level_only=True)


def test_imports_point_downwards() -> None:
    wrong = {}
    for path in FILES:
        layer = path.relative_to(ROOT).parts[0]
        found = set(imports(path))
        above = found & {*LAYERS[LAYERS.index(layer) + 1 :], "tests", "examples", "benchmarks"}
        foreign = found - DBO_MAY_IMPORT if layer == "dbo" else set()
        if above | foreign:
            wrong[str(path.relative_to(ROOT))] = above | foreign
    assert not wrong


def test_optional_packages_are_imported_when_used() -> None:
    wrong = {}
    for path in FILES:
        # A Triton kernel is a decorated function; its callers import its file when they use it.
        optional = OPTIONAL - ({"triton"} if path.is_relative_to(ROOT / "moe/kernels") else set())
        if found := set(imports(path, top_level_only=True)) & optional:
            wrong[str(path.relative_to(ROOT))] = found
    assert not wrong


def test_imports_are_pure() -> None:
    """All modules in one process: silent, without new threads, process groups, CUDA, signals or settings of torch."""
    program = """
import importlib, json, os, signal, sys, threading
import torch, torch.distributed as dist
def state():
    return {
        "threads": threading.active_count(),
        "groups": dist.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "environment": dict(os.environ),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "cores": torch.get_num_threads(),
        "switch": sys.getswitchinterval(),
    }
before = state()
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
after = state()
assert after == before, (before, after)
optional = sorted({"deep_ep", "transformers", "gguf"} & set(sys.modules))
assert not optional, optional
"""
    without = ("launch.__main__", *(() if importlib.util.find_spec("triton") else ("moe.kernels.",)))
    modules = [name for name in MODULES if not name.startswith(without)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, json.dumps(modules)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
