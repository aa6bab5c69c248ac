"""`--batch-invariant`: the bits of every hidden state and logit, whatever the batch, its cut, chunks and padding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.cli import CommandError
from launch.config import EngineOptions
from launch.mesh import Mesh
from launch.session import resolve
from tests.launch.invariant_cases import MODEL, MODELS, Seen, Setting, on_ranks, run_setting
from tests.launch.test_engine import spread
from tests.launch.tiny import prompts

ON = {"overlap": "on"}
LARGE = {"max_num_tokens": 256, "max_num_seqs": 16}
BLOCK = 4 * 3 * 2 * 2 * 16 * 4  # bytes: tokens, layers, keys and values, heads, head_dim, float32

SETTINGS = {
    "off": Setting(arm={"overlap": "off"}),
    "on": Setting(arm=ON),
    "on, greenlets": Setting(arm={**ON, "driver": "greenlet"}),
    "on, 3 ubatches": Setting(arm={**ON, "num_ubatches": 3}),
    "on, by requests": Setting(arm={**ON, "cut": "requests"}),
    "on, balanced": Setting(arm={**ON, "cut": "balanced"}),
    "split": Setting(arm={**ON, "interleave": False}),
    "one at a time": Setting(arm={"overlap": "off"}, options={"max_num_seqs": 1}),
    "short chunks": Setting(arm={"overlap": "off"}, options={"max_num_tokens": 5}),
    "short chunks, on": Setting(arm=ON, options={"max_num_tokens": 7}),
    "large batches": Setting(arm={"overlap": "off"}, options=LARGE),
    "large batches, on": Setting(arm=ON, options=LARGE),
    "computed again": Setting(arm={"overlap": "off"}, options={"kv_cache_memory": 13 * BLOCK}),
    "graphs": Setting(arm={"overlap": "off"}, graphs=(1, 4, 9, 16, 32)),
    "graphs, on": Setting(arm=ON, graphs=(4, 16, 32)),
}


def check(name: str, seen: Seen, expected: Seen) -> None:
    assert seen.bits.keys() == expected.bits.keys(), name
    different = [place for place, bits in seen.bits.items() if bits != expected.bits[place]]
    assert not different, (name, len(different), min(different))
    assert seen.answers == expected.answers, name
    assert (seen.num_split > 0) == (SETTINGS[name].arm["overlap"] == "on"), name
    assert (seen.num_graphs > 0) == bool(SETTINGS[name].graphs), name
    if name == "computed again":
        assert seen.num_preemptions > 0


@pytest.mark.parametrize("model", MODELS)
def test_one_rank(model: str) -> None:
    """Dense layers and shared experts, drawn tokens and greedy ones."""
    requests, seen = list(enumerate(prompts(8))), {}
    names = list(SETTINGS) if model == "float32" else ["off", "on", "short chunks", "large batches, on", "graphs"]
    further = {"offload_layers": 3} if model == "offloaded" else {}
    for name in names:
        setting = replace(SETTINGS[name], options={**SETTINGS[name].options, **further})
        with Mesh.start(device="cpu", environment={}) as mesh:
            seen[name] = run_setting(mesh, MODELS[model], requests, setting)
        check(name, seen[name], seen["off"])
    assert len({bits for (_, _, what), bits in seen["off"].bits.items() if what == "hidden"}) > 100


def test_two_ranks(ranks) -> None:
    """The requests of a rank are the other's, or all of them one rank's: nothing depends on that either."""
    texts = prompts(8)
    even, uneven = spread(texts, [4, 4]), spread(texts, [7, 1])
    shares = {
        "off": even,
        "on": even[::-1],
        "on, greenlets": even,
        "on, 3 ubatches": even[::-1],
        "short chunks, on": even,
        "large batches": uneven,
        "one at a time": spread(texts, [0, 8]),
        "graphs, on": even[::-1],
    }
    cases = [(SETTINGS[name], share) for name, share in shares.items()]
    by_rank = ranks(2).run(on_ranks, "float32", cases, timeout=240)
    merged = [
        Seen(a.answers | b.answers, a.bits | b.bits, a.num_split, a.num_graphs, a.num_preemptions)
        for a, b in zip(*by_rank, strict=True)
    ]
    for name, seen in zip(shares, merged, strict=True):
        check(name, seen, merged[0])


def test_the_option_reaches_the_model() -> None:
    for asked in (False, True):
        options = EngineOptions(model="m", batch_invariant=asked)
        assert resolve(options, MODEL).model.batch_invariant == asked


def test_transports_that_go_by_batch_size_are_refused() -> None:
    setting = Setting(arm={"overlap": "off"}, options={"all2all": "deepep"})
    with (
        Mesh.start(device="cpu", environment={}) as mesh,
        pytest.raises(CommandError, match=r"all2all='deepep' .*\(--batch-invariant\); use deepep_ht, or deepep_ll"),
    ):
        run_setting(mesh, MODEL, [(0, [1, 2])], setting)
