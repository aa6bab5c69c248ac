"""Starting on all ranks or on none; what options come to."""

from __future__ import annotations

import pytest

from dbo.errors import ConfigError
from launch.cli import CommandError
from launch.config import EngineOptions
from launch.session import banner, load_engine, resolve, together
from moe.config import read_config


def fail_somewhere(ctx, failing):
    """Three stages; the ranks in `failing` cannot do the second."""
    with ctx.mesh() as mesh:

        def action() -> int:
            if mesh.rank in failing:
                raise OSError(f"no disk on rank {mesh.rank}")
            return mesh.rank

        assert together(mesh, "before", lambda: mesh.rank) == mesh.rank
        try:
            return together(mesh, "stage", action)
        except CommandError as error:
            return str(error), error.exit_code


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ([], [0, 1]),
        ([1], [("rank 1: no disk on rank 1", 2)] * 2),
        ([0], [("rank 0: no disk on rank 0", 2)] * 2),
        ([0, 1], [("no disk on rank 0", 2)] * 2),
    ],
)
def test_all_ranks_hear_of_what_one_cannot_do(ranks, failing, expected):
    assert ranks(2).run(fail_somewhere, failing) == expected


def break_one(ctx, directory):
    """A bug on one rank while loading: not the user's mistake."""
    with ctx.mesh() as mesh:
        options = EngineOptions(model=directory, device="cpu")
        resolved = resolve(options, read_config(directory))
        try:
            load_engine(options, resolved, mesh, model=directory if mesh.rank == 0 else None)
        except CommandError as error:
            return str(error), error.exit_code


def test_a_failure_at_load_ends_all_ranks_with_one_message(ranks, tiny_models):
    (first, code), other = ranks(2).run(break_one, tiny_models("mixtral").directory)
    assert other == (first, code)
    assert first.startswith("rank 1: TypeError")
    assert code == 1


def test_options_that_say_auto_are_resolved(tiny_models):
    model = read_config(tiny_models("mixtral").directory)
    resolved = resolve(EngineOptions(model="m", max_num_seqs=2, block_size=8), model)
    assert str(resolved.model.dtype) == "torch.float32"
    assert (resolved.limits.max_model_len, resolved.limits.num_blocks) == (128, 2 * 16)  # no more than can be used
    block = 8 * 3 * 2 * 2 * 8 * 4
    bounded = resolve(EngineOptions(model="m", block_size=8, kv_cache_memory=5 * block), model)
    assert bounded.limits.num_blocks == 4
    assert bounded.limits.max_request_tokens == 33
    assert resolved.limits.max_num_tokens == 2 * 128  # the longest step there can be, not 8192


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"max_model_len": 129}, "--max-model-len=129"), ({"kv_cache_memory": 1000}, "two blocks of this model")],
)
def test_options_that_do_not_fit_the_model_are_refused(tiny_models, changes, words):
    with pytest.raises(ConfigError, match=words):
        resolve(EngineOptions(model="m", **changes), read_config(tiny_models("mixtral").directory))


def banner_lines(ctx, directory, changes):
    with ctx.mesh() as mesh:
        options = EngineOptions(model=directory, device="cpu", **changes)
        resolved = resolve(options, read_config(directory))
        engine = load_engine(options, resolved, mesh, model=directory)
        return banner(options, resolved, engine)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "overlap off"),
        ({"overlap": "on"}, "overlap on: 2 ubatches"),
        ({"max_model_len": 50}, "50 tokens a request"),
        ({"batch_invariant": True}, "float32, batch-invariant, all2all"),
    ],
)
def test_the_banner_says_what_runs(ranks, tiny_models, changes, words):
    lines, _ = ranks(2).run(banner_lines, tiny_models("mixtral").directory, changes)
    invariant = ", batch-invariant" * changes.get("batch_invariant", False)
    assert lines[0].startswith(f"2 ranks, cpu, mixtral float32{invariant}, all2all torch")
    assert "all2all auto -> torch" in "\n".join(lines)
    assert words in "\n".join(lines)
