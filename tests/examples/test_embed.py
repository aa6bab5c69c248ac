from pathlib import Path

from tests.ranks import launch_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "embed.py"


def test_the_example_runs_and_splits() -> None:
    done = launch_ranks(2, [str(EXAMPLE)], timeout=100)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        told = [line for line in done.stdout.splitlines() if f"rank {rank}: " in line and "tokens: " in line]
        assert len(told) == 4
        assert sum("tokens: split in 2" in line for line in told) == 2


def test_the_example_fits_on_one_page() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
