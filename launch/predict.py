"""The planner's model: from the costs of one layer's parts to a step on any number of ranks.

Its own file because it is mathematics alone: no files, no options, no ranks. `docs/plan.md` says it in words.

    message        latency + bytes / bandwidth, over the slower of the two ways (inside a node, between nodes)
    bytes          copies of a token that leave the rank, by the routing of chance, times bytes of one
    compute        measured curves: attention over tokens, experts over tokens and local experts
    imbalance      the busiest rank has more than the mean: by chance, and by a stated factor
    whole          layers x (attention, dispatch, experts, combine, one after the other) + the rest of the step
    overlap        two lanes: compute in turns, messages one after the other, compute slowed by the tax meanwhile

Times are in us inside a layer and in ms for a step; sizes in bytes; bandwidths in GB/s (10**9 bytes a second) of one
rank, each way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dbo.errors import ConfigError
from launch.profile import Copies, LayerCosts, Phase, Series

SIMULATED_LAYERS = 6  # a pipeline is in its stride well before; later layers take as long as the last of these


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects ranks: payload bandwidth of one rank each way, and the latency of one message."""

    name: str
    bandwidth_gbs: float
    latency_us: float

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth_gbs < math.inf and 0 <= self.latency_us < math.inf):
            raise ConfigError("link", self.name, "a bandwidth above 0 and a latency of 0 or more", "")

    def time_us(self, num_bytes: float) -> float:
        """One message, or many that leave together."""
        return self.latency_us + self.transfer_us(num_bytes)

    def transfer_us(self, num_bytes: float) -> float:
        """The part of it in which the link is taken."""
        return num_bytes / (self.bandwidth_gbs * 1e3)


PRESETS = {
    # Nominal bandwidth, the share of it that all-to-all payload gets, latency. The shares: NCCL's all-to-all over
    # NVLink 4 reaches 283 of 450 GB/s on an H200 (benchmarks of this project), DeepEP's README gives 43 to 46 of
    # 50 GB/s for its low-latency kernels over 400 Gb/s InfiniBand.
    "nvlink4": Link(name="nvlink4", bandwidth_gbs=450 * 0.63, latency_us=4.0),
    "nvlink5": Link(name="nvlink5", bandwidth_gbs=900 * 0.63, latency_us=4.0),
    "200gb": Link(name="200gb", bandwidth_gbs=25 * 0.9, latency_us=10.0),
    "400gb": Link(name="400gb", bandwidth_gbs=50 * 0.9, latency_us=10.0),
    "800gb": Link(name="800gb", bandwidth_gbs=100 * 0.9, latency_us=10.0),
}


def parse_link(text: str, measured: Link | None, option: str = "--link") -> Link:
    """A preset, `measured`, or `GB/s,us`. Raises ConfigError."""
    if text == "measured":
        if measured is None:
            raise ConfigError(option, text, "a profile measured on two ranks or more", "name a preset or GB/s,us")
        return measured
    if text in PRESETS:
        return PRESETS[text]
    try:
        bandwidth, latency = (float(part) for part in text.split(","))
        return Link(name=text, bandwidth_gbs=bandwidth, latency_us=latency)
    except (ValueError, ConfigError):
        allowed = f"measured, {', '.join(PRESETS)}, or GB/s,us such as 45,10"
        raise ConfigError(option, text, allowed, "") from None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the maths must know of a model."""

    num_layers: int
    num_dense_layers: int
    num_experts: int
    num_topk: int

    @classmethod
    def of(cls, model: Mapping[str, object]) -> Shape:
        """From the sizes in a profile."""

        def integer(name: str) -> int:
            value = model.get(name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"model.{name}", value, "a whole number from 1", "the profile is damaged")
            return value

        dense = model.get("dense_layers") or []
        return cls(
            num_layers=integer("num_layers"),
            num_dense_layers=len(dense) if isinstance(dense, list) else 0,
            num_experts=integer("num_experts"),
            num_topk=integer("num_topk"),
        )

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - self.num_dense_layers


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where to predict for."""

    ep: int
    gpus_per_node: int
    link: Link  # between nodes
    node_link: Link  # inside one
    redundant_experts: int = 0
    imbalance: float = 1.0

    def num_local_experts(self, num_experts: int) -> int:
        """Experts on the rank with most. Raises ConfigError for more ranks than experts."""
        total = num_experts + self.redundant_experts
        if self.ep > total:
            raise ConfigError(
                "--ep", self.ep, f"up to {total} ranks, one expert each",
                f"state copies: --redundant-experts {self.ep - num_experts}",
            )  # fmt: skip
        return -(-total // self.ep)


def chance_of_copy(num_experts: int, num_local_experts: int, num_topk: int) -> float:
    """That a token which chooses `num_topk` of `num_experts` evenly has one among `num_local_experts`."""
    missed = 1.0
    for i in range(num_topk):
        missed *= max(num_experts - num_local_experts - i, 0) / max(num_experts - i, 1)
    return 1.0 - missed


def remote_copies(shape: Shape, cluster: Cluster, copies: Copies) -> tuple[float, float]:
    """Copies of one token that leave its rank: (inside the node, to other nodes)."""
    total = shape.num_experts + cluster.redundant_experts
    ranks, per_node = cluster.ep, min(cluster.ep, cluster.gpus_per_node)
    near, far = per_node - 1, ranks - per_node
    if copies == "expert":
        return shape.num_topk * near / ranks, shape.num_topk * far / ranks
    to_rank = chance_of_copy(total, cluster.num_local_experts(shape.num_experts), shape.num_topk)
    if copies == "rank" or not far:
        return near * to_rank, far * to_rank
    # One copy to each node that is chosen, passed on inside it.
    num_nodes = ranks / per_node
    to_node = chance_of_copy(total, min(round(total / num_nodes), total), shape.num_topk)
    return (near + far) * to_rank, (num_nodes - 1) * to_node


def busiest(shape: Shape, cluster: Cluster, num_tokens: float) -> float:
    """Load of the busiest rank over the mean: chance (of rows that fall on ranks evenly), times the stated factor."""
    rows = num_tokens * shape.num_topk  # a rank's, in the mean
    spread = math.sqrt((1 - 1 / cluster.ep) / rows)
    return cluster.imbalance * (1 + spread * math.sqrt(2 * math.log(cluster.ep)))


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """One layer of one (u)batch, in us: what the lanes do, in order."""

    attention: float
    dispatch: float  # the link is taken
    experts: float
    combine: float  # the link is taken
    latency: float  # of each of the two messages, beside that

    @property
    def whole(self) -> float:
        """One after the other."""
        return self.attention + self.dispatch + self.experts + self.combine + 2 * self.latency


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Step times of one model with measured parts, on one cluster."""

    shape: Shape
    costs: LayerCosts
    measured_ranks: int
    cluster: Cluster

    def layer(self, phase: Phase, num_tokens: float) -> LayerTimes:
        """One layer over so many tokens of each rank."""
        load = busiest(self.shape, self.cluster, num_tokens)
        near, far = remote_copies(self.shape, self.cluster, self.costs.copies[phase])
        packing = self._packing_us(phase, num_tokens, near + far)

        def taken(bytes_per_copy: int) -> float:
            return max(
                self.cluster.node_link.transfer_us(num_tokens * near * bytes_per_copy * load),
                self.cluster.link.transfer_us(num_tokens * far * bytes_per_copy * load),
            )

        slowest = self.cluster.link if far else self.cluster.node_link
        return LayerTimes(
            attention=_us(self.costs.attention[phase], num_tokens) + packing / 2,
            dispatch=taken(self.costs.dispatch_bytes),
            experts=self._experts_us(num_tokens * load) + packing / 2,
            combine=taken(self.costs.combine_bytes),
            latency=slowest.latency_us + self.costs.min_latency_us,
        )

    def whole_ms(self, phase: Phase, num_tokens: float) -> float:
        """A step of so many tokens on every rank, as one batch."""
        layer = self.layer(phase, num_tokens)
        dense = _us(self.costs.attention[phase], num_tokens)
        layers = self.shape.num_moe_layers * layer.whole + self.shape.num_dense_layers * dense
        return layers / 1e3 + self._fixed_ms(phase, num_tokens)

    def overlap_ms(self, phase: Phase, num_tokens: float, num_ubatches: int = 2) -> float:
        """The same as so many ubatches that take turns."""
        part = num_tokens / num_ubatches
        layer = self.layer(phase, part)
        dense = _us(self.costs.attention[phase], part) * num_ubatches
        moe = overlapped_us(layer, self.shape.num_moe_layers, num_ubatches, self.costs.sm_tax[phase])
        return (moe + self.shape.num_dense_layers * dense) / 1e3 + self._fixed_ms(phase, num_tokens)

    def crossover(self, phase: Phase, tokens: Sequence[int], num_ubatches: int = 2) -> float | None:
        """Fewest tokens a rank from which on overlap is at least as fast, up to the last of `tokens`; None = never."""
        fine = np.unique(np.geomspace(max(tokens[0], num_ubatches), tokens[-1], 200).round()).astype(int).tolist()
        wins = [self.overlap_ms(phase, n, num_ubatches) <= self.whole_ms(phase, n) for n in fine]
        if not wins[-1]:
            return None
        last_loss = max((i for i, win in enumerate(wins) if not win), default=-1)
        return float(fine[last_loss + 1])

    def scaled(self, scale: Mapping[str, float]) -> Predictor:
        """The same with parts that are dearer or cheaper than thought: for uncertainty. Keys: `compute`, `bandwidth`,
        `latency`, `imbalance`, `tax`."""
        costs, cluster, compute = self.costs, self.cluster, scale["compute"]
        link, node_link = (
            Link(
                name=each.name,
                bandwidth_gbs=each.bandwidth_gbs * scale["bandwidth"],
                latency_us=each.latency_us * scale["latency"],
            )
            for each in (cluster.link, cluster.node_link)
        )
        return replace(
            self,
            costs=replace(
                costs,
                attention={phase: _scaled(series, compute) for phase, series in costs.attention.items()},
                experts=tuple(replace(each, costs=_scaled(each.costs, compute)) for each in costs.experts),
                sm_tax={phase: tax * scale["tax"] for phase, tax in costs.sm_tax.items()},
                min_latency_us=costs.min_latency_us * scale["latency"],
            ),
            cluster=replace(
                cluster, link=link, node_link=node_link, imbalance=max(cluster.imbalance * scale["imbalance"], 1.0)
            ),
        )

    def _fixed_ms(self, phase: Phase, num_tokens: float) -> float:
        return self.costs.fixed[phase].curve().at(num_tokens)

    def _packing_us(self, phase: Phase, num_tokens: float, copies: float) -> float:
        """Rows packed grow with the copies that leave."""
        if self.costs.packing is None:
            return 0.0
        there = replace(self.cluster, ep=max(self.measured_ranks, 2), redundant_experts=0)
        measured = sum(remote_copies(self.shape, there, self.costs.copies[phase]))
        return _us(self.costs.packing, num_tokens) * copies / measured

    def _experts_us(self, num_tokens: float) -> float:
        """Between measured numbers of local experts: a straight line. Never outside."""
        wanted, experts = self.cluster.num_local_experts(self.shape.num_experts), self.costs.experts
        if wanted <= experts[0].num_local_experts:
            return _us(experts[0].costs, num_tokens)
        for low, high in pairwise(experts):
            if wanted <= high.num_local_experts:
                share = (wanted - low.num_local_experts) / (high.num_local_experts - low.num_local_experts)
                return (1 - share) * _us(low.costs, num_tokens) + share * _us(high.costs, num_tokens)
        most = experts[-1].num_local_experts
        if wanted > most:
            raise ConfigError(
                "--ep", self.cluster.ep, f"more ranks: they need {wanted} experts each, measured were {most} at most",
                "calibrate on a device with room for more, or predict for more ranks",
            )  # fmt: skip
        return _us(experts[-1].costs, num_tokens)


def overlapped_us(layer: LayerTimes, num_layers: int, num_ubatches: int, tax: float) -> float:
    """Layers of `num_ubatches` ubatches of equal cost on two lanes, in us.

    Compute passes from ubatch to ubatch at each message, as `dbo.runner` does; messages take the link in the order in
    which they were sent and arrive a latency after that. While a message has the link, compute is slowed by `tax`.
    """
    busy = _Lanes(num_ubatches, tax)
    ends = [busy.layer(layer) for _ in range(min(num_layers, SIMULATED_LAYERS))]
    if num_layers <= SIMULATED_LAYERS:
        return ends[-1] if ends else 0.0
    return ends[-1] + (num_layers - SIMULATED_LAYERS) * (ends[-1] - ends[-2])


class _Lanes:
    """When each lane is free and each ubatch's last message has come."""

    def __init__(self, num_ubatches: int, tax: float):
        self._arrived = [0.0] * num_ubatches
        self._compute = self._link = 0.0
        self._tax = tax

    def layer(self, layer: LayerTimes) -> float:
        """Run one layer of every ubatch; gives the time when the last message of it has come."""
        for compute, message in ((layer.attention, layer.dispatch), (layer.experts, layer.combine)):
            for ubatch, arrived in enumerate(self._arrived):
                start = max(self._compute, arrived)
                self._compute = start + self._taxed(start, compute)
                self._link = max(self._link, self._compute) + message
                self._arrived[ubatch] = self._link + layer.latency
        return max(self._arrived)

    def _taxed(self, start: float, compute: float) -> float:
        """As long as the link is taken, compute advances 1 / (1 + tax) as fast."""
        slow = max(self._link - start, 0.0)
        done = slow / (1 + self._tax)
        return compute * (1 + self._tax) if done >= compute else slow + compute - done


def fit_link(name: str, num_bytes: Sequence[float], times_us: Sequence[float]) -> Link:
    """Latency and bandwidth of the line through measured messages, each weighed by its own size (relative errors).

    Neither is below 0: where noise says so, it counts as 0, and the other is fitted alone. Raises ConfigError for fewer
    than two sizes.
    """
    x, y = np.asarray(num_bytes, dtype=np.float64), np.asarray(times_us, dtype=np.float64)
    if len(np.unique(x)) < 2:
        raise ConfigError("messages", len(x), "two sizes or more", "")
    rows = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones_like(y), rcond=None)
    if latency < 0:
        latency, per_byte = 0.0, np.sum(x / y) / np.sum((x / y) ** 2)
    elif per_byte <= 0:
        latency, per_byte = np.sum(1 / y) / np.sum(1 / y**2), 1e-9
    return Link(name=name, bandwidth_gbs=1e-3 / float(per_byte), latency_us=float(latency))


def _us(series: Series, num_tokens: float) -> float:
    return series.curve().at(num_tokens) * 1e3


def _scaled(series: Series, factor: float) -> Series:
    costs = tuple(replace(c, median=c.median * factor, low=c.low * factor, high=c.high * factor) for c in series.costs)
    return replace(series, costs=costs)
