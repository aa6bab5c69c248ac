"""Profiles for tests: small, with round numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.profile import Cost, ExpertCosts, LayerCosts, PhaseSteps, Profile, Series, Setup


def series(points: Mapping[int, float], spread: float = 0.1) -> Series:
    """Medians by tokens, with `spread` to either side."""
    costs = tuple(Cost(median=ms, low=ms * (1 - spread), high=ms * (1 + spread), n=5) for ms in points.values())
    return Series(tokens=tuple(points), costs=costs)


def flat(ms: float) -> Series:
    return series({1: ms})


RANK = {"prefill": "rank", "decode": "rank"}


def layer(**changes) -> LayerCosts:
    """40 us of attention, 20 of experts, messages of 1000 bytes a copy, 1 ms beside layers."""
    return LayerCosts(
        **{
            "attention": {"prefill": flat(0.040), "decode": flat(0.040)},
            "experts": tuple(ExpertCosts(num_local_experts=e, costs=flat(0.020)) for e in (1, 2, 4)),
            "packing": None,
            "messages": None,
            "fixed": {"prefill": flat(1.0), "decode": flat(1.0)},
            "sm_tax": {"prefill": 0.0, "decode": 0.0},
            "dispatch_bytes": 1000,
            "combine_bytes": 1000,
            "copies": {"prefill": "expert", "decode": "expert"},
            **changes,
        }
    )


def steps(whole: Mapping[int, float], overlap: Mapping[int, float], **more) -> PhaseSteps:
    return PhaseSteps(whole=series(whole), overlap=series(overlap), **more)


MODEL = {"family": "mixtral", "num_layers": 4, "num_experts": 8, "num_topk": 2, "hidden": 500, "dense_layers": []}


def profile(
    *, model: Mapping[str, object] = MODEL, environment: Mapping[str, str] | None = None, notes: Sequence[str] = (),
    prefill: PhaseSteps | None = None, decode: PhaseSteps | None = None, layer_costs: LayerCosts | None = None, **setup,
) -> Profile:  # fmt: skip
    """Prefill pays from some 100 tokens on, decode never."""
    made = {"ranks": 2, "device": "cpu", "all2all": "torch", "num_ubatches": 2, "driver": "threads", "cut": "tokens"}
    return Profile(
        origin="measured",
        setup=Setup(model=model, **{**made, "comm_sms": None, **setup}),
        environment=environment or {"host": "a", "torch": "2"},
        command="launch calibrate",
        steps={
            "prefill": prefill or steps({16: 10.0, 256: 160.0}, {16: 40.0, 256: 100.0}, whole_skew=0.5),
            "decode": decode or steps({2: 5.0, 64: 20.0}, {2: 9.0, 64: 25.0}),
        },
        layer=layer_costs or layer(),
        notes=tuple(notes),
    )
