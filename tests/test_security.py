"""Nothing that comes from the network or from a checkpoint is ever unpickled, evaluated or handed to a shell."""

from __future__ import annotations

import ast

from tests.test_architecture import FILES, ROOT, imports

UNPICKLING = {
    "torch.load",
    "torch.package",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
ARRAYS = {"np.load", "numpy.load"}  # harmless only without allow_pickle


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def wrong_with(name: str, call: ast.Call) -> bool:
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return (
        any(name == bad or name.endswith(f".{bad}") for bad in UNPICKLING)
        or (name in ARRAYS and keywords.get("allow_pickle", "False") != "False")
        or name in {"eval", "exec", "os.system", "os.popen"}
        or keywords.get("shell", "False") != "False"
    )


def test_product_code_unpickles_and_evaluates_nothing() -> None:
    wrong = []
    for path in FILES:
        if found := set(imports(path)) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}:
            wrong.append((str(path.relative_to(ROOT)), found))
        for name, call in calls(ast.parse(path.read_text(encoding="utf-8"))):
            if wrong_with(name, call):
                wrong.append((f"{path.relative_to(ROOT)}:{call.lineno}", name))
    assert not wrong


def test_the_check_sees_what_it_looks_for() -> None:
    program = "torch.load(f)\ndist.all_gather_object(a, b)\nnp.load(f, allow_pickle=True)\nrun(x, shell=True)"
    assert [wrong_with(*call) for call in calls(ast.parse(program))] == [True] * 4
    assert not any(wrong_with(*call) for call in calls(ast.parse("np.load(f)\nmodel.eval()\nload_file(f)")))
