import pytest

from tests.ranks import launch_ranks

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize(
    ("backend", "option"),
    [
        ("torch", None),
        ("deepep_ht", None),
        ("deepep_ht", "fp8"),
        ("deepep_ht", "sync"),
        ("deepep_ll", None),
        ("deepep_ll", "fp8"),
        ("deepep", None),
    ],
)
def test_conformance(backend: str, option: str | None) -> None:
    if backend != "torch":
        pytest.importorskip("deep_ep")
    argv = ["-m", "tests.moe.gpu.conformance", f"{backend}:{option}" if option else backend]
    finished = launch_ranks(2, argv, timeout=180)
    assert finished.returncode == 0, finished.stdout + finished.stderr
