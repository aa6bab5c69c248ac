"""Numbers that are not measured but follow from measurements: the link, the rest of a step, the tax, the skew.

Its own file because these fits are mathematics on finished curves, for `calibrate` to store and `plan` to use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from dbo.policy import Curve
from launch.predict import Cluster, Link, Predictor, Shape, fit_link, remote_copies
from launch.profile import PHASES, Cost, LayerCosts, Phase, PhaseSteps, Series


def skew_of(curve: Curve, ms: float, largest: float, mean: float) -> float:
    """Where between mean (0) and largest (1) the size lies that costs `ms`: by bisection, within 0 to 1."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if curve.at(middle * largest + (1 - middle) * mean) < ms:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 3)


def measured_link(layer: LayerCosts, shape: Shape, ranks: int) -> Link | None:
    """Latency and payload bandwidth of the link that messages were measured on; None for one rank."""
    if layer.messages is None or ranks < 2:
        return None
    local = Link(name="measured", bandwidth_gbs=1.0, latency_us=0.0)
    cluster = Cluster(ep=ranks, gpus_per_node=ranks, link=local, node_link=local)
    copies = sum(remote_copies(shape, cluster, layer.copies["prefill"]))
    both = (layer.dispatch_bytes + layer.combine_bytes) / 2
    num_bytes = [n * copies * both for n in layer.messages.tokens]  # of one message
    return fit_link("measured", num_bytes, [cost.median * 1e3 / 2 for cost in layer.messages.costs])


def fit_rest(
    layer: LayerCosts, shape: Shape, steps: Mapping[Phase, PhaseSteps], ranks: int, num_ubatches: int
) -> LayerCosts:
    """What parts do not explain: the rest of whole steps (`fixed`), and from overlapped ones how much messages slow
    compute down (`sm_tax`)."""
    link = measured_link(layer, shape, ranks) or Link(name="none", bandwidth_gbs=1e6, latency_us=0.0)
    cluster = Cluster(ep=ranks, gpus_per_node=ranks, link=link, node_link=link)

    def predictor(costs: LayerCosts) -> Predictor:
        return Predictor(shape=shape, costs=costs, measured_ranks=ranks, cluster=cluster)

    nothing = Cost(median=1e-9, low=1e-9, high=1e-9, n=1)
    bare = replace(layer, fixed={phase: Series(tokens=(1,), costs=(nothing,)) for phase in PHASES})

    def rest(phase: Phase) -> Series:
        whole = steps[phase].whole
        costs = []
        for n, cost in zip(whole.tokens, whole.costs, strict=True):
            left = max(cost.median - predictor(bare).whole_ms(phase, n), 0.01 * cost.median)
            scale = left / cost.median
            costs.append(Cost(median=left, low=cost.low * scale, high=cost.high * scale, n=cost.n))
        return Series(tokens=whole.tokens, costs=tuple(costs))

    fixed: dict[Phase, Series] = {phase: rest(phase) for phase in PHASES}
    complete = replace(layer, fixed=fixed)
    if ranks < 2:
        return complete

    def error(phase: Phase, tax: float) -> float:
        taxed = predictor(replace(complete, sm_tax=dict.fromkeys(PHASES, tax)))
        overlap = steps[phase].overlap
        return sum(
            math.log(taxed.overlap_ms(phase, n, num_ubatches) / cost.median) ** 2
            for n, cost in zip(overlap.tokens, overlap.costs, strict=True)
        )

    taxes = [i / 50 for i in range(101)]
    return replace(complete, sm_tax={phase: min(taxes, key=partial(error, phase)) for phase in PHASES})
