"""What each step did, for a file (`--metrics`) and for Prometheus (`--metrics-port`).

Its own file because a run is the same without it. Rank 0 alone watches: the votes of a step already tell it what every
rank had to do, so metrics add no message between ranks and no wait for a device.

A step costs a few additions and a line into a buffer. Text is made when Prometheus asks, in the thread that answers, so
a slow reader holds up nobody. Neither a full disk nor a lost reader ends a run.

    comm_share   the part of a step in which rank 0's host stood still for messages of the all2all; messages that
                 travel behind compute do not count. Measured where the host waits (gloo); unknown on CUDA, where the
                 device does. Waiting for the other ranks' votes is apart: agree_ms.
"""

from __future__ import annotations

import json
import logging
import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dbo.agreement import BatchPlan
from dbo.errors import ConfigError
from launch.config import GenerateOptions
from launch.engine import StepRecord

if TYPE_CHECKING:
    from prometheus_client.core import Metric

FLUSH_S = 1.0
BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Sink(Protocol):
    """Takes what steps did. All calls come from the engine's thread but `flush`, which a signal may call."""

    def step(self, record: StepRecord, plan: BatchPlan) -> None:
        """A step is done."""

    def flush(self) -> None:
        """Bring everything where it should be."""

    def close(self) -> None:
        """The run is over."""


def open_sinks(options: GenerateOptions, rank: int, num_blocks: int) -> list[Sink]:
    """What the options ask for; nothing on ranks other than 0. Raises ConfigError for what cannot be opened.

    num_blocks: what a rank's KV cache may hold, the same on all ranks.
    """
    sinks: list[Sink] = []
    if rank == 0 and options.metrics is not None:
        file = Path(options.metrics)
        if file.resolve() in (Path(options.prompts).resolve(), Path(options.output).resolve()):
            raise ConfigError("--metrics", options.metrics, "another file than --prompts and --output", "")
        sinks.append(JsonLines(file, num_blocks, append=options.resume))
    if rank == 0 and options.metrics_port is not None:
        sinks.append(Endpoint(options.metrics_host, options.metrics_port, num_blocks))
    return sinks


def step_row(number: int, record: StepRecord, plan: BatchPlan, num_blocks: int) -> dict[str, Any]:
    """What `--metrics` says about one step; shares are 0 to 1, `kv_use` is that of the fullest rank."""
    return {
        "time": round(time.time(), 3),
        "step": number,
        "phase": record.phase,
        "tokens": record.num_tokens_of_all,
        "tokens_per_s": round(record.num_tokens_of_all / record.wall_ms * 1e3, 1),
        "step_ms": round(record.wall_ms, 3),
        "agree_ms": round(record.agree_ms, 3),
        "num_ubatches": record.num_ubatches,
        "reason": record.reason,
        "reason_rank": plan.reason_rank,
        "padding_share": round(padding_share(record), 4),
        "kv_use": round(max(plan.votes["num_kv_blocks"]) / num_blocks, 4),
        "comm_share": None if record.wait_ms is None else round(record.wait_ms / record.wall_ms, 4),
        "running": sum(plan.votes["num_running"]),
        "waiting": sum(plan.votes["num_waiting"]),
    }


def padding_share(record: StepRecord) -> float:
    """The part of the rows that all ranks compute which is padding."""
    rows = record.num_rows_of_all
    return 1 - record.num_tokens_of_all / rows if rows else 0.0


class JsonLines:
    """One JSON object a step, written out every `FLUSH_S`. Gives up, and says so, when the file cannot be written."""

    def __init__(self, file: Path, num_blocks: int, *, append: bool = False):
        try:
            self._out = file.open("a" if append else "w", encoding="utf-8")
        except OSError as error:
            raise ConfigError("--metrics", str(file), "a file that can be written", error.strerror or "") from None
        self._file, self._num_blocks = file, num_blocks
        self._num_steps = 0
        self._flushed_s = time.monotonic()
        self._failed = False

    def step(self, record: StepRecord, plan: BatchPlan) -> None:
        """See `Sink`."""
        if self._failed:
            return
        try:
            self._out.write(json.dumps(step_row(self._num_steps, record, plan, self._num_blocks)) + "\n")
        except OSError as error:  # a full buffer is written out by itself
            self._give_up(error)
        self._num_steps += 1
        if time.monotonic() - self._flushed_s > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """See `Sink`."""
        self._flushed_s = time.monotonic()
        try:
            self._out.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """See `Sink`."""
        self.flush()
        with suppress(OSError):  # `flush` has said so
            self._out.close()

    def _give_up(self, error: OSError) -> None:
        if not self._failed:
            logging.warning("no more metrics: %s: %s", self._file, error.strerror)
        self._failed = True


class Totals:
    """Sums over the steps of a run, and the last step: a `Collector` of prometheus_client.

    `add` is called by the engine, `collect` by the threads that answer; without a lock, so that they cannot hold a step
    up. A number of one step may be seen before another of the same step.
    """

    def __init__(self, num_blocks: int):
        self._num_blocks = num_blocks
        self._steps: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._padding_rows = 0
        self._agree_s = self._wait_s = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._buckets: dict[str, list[int]] = {}
        self._num_split = 0
        self._last: tuple[StepRecord, BatchPlan] | None = None

    def add(self, record: StepRecord, plan: BatchPlan) -> None:
        """Count a step."""
        phase, seconds = record.phase, record.wall_ms / 1e3
        if phase not in self._buckets:
            self._buckets[phase] = [0] * (len(BUCKETS_S) + 1)
        self._buckets[phase][bisect_left(BUCKETS_S, seconds)] += 1
        self._seconds[phase] += seconds
        self._steps[phase, record.reason] += 1
        self._tokens[phase] += record.num_tokens_of_all
        self._padding_rows += record.num_rows_of_all - record.num_tokens_of_all
        self._agree_s += record.agree_ms / 1e3
        self._wait_s += (record.wait_ms or 0.0) / 1e3
        self._num_split += record.num_ubatches > 1
        self._last = record, plan

    def collect(self) -> Iterator[Metric]:
        """All metrics, as prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        steps = CounterMetricFamily("dbo_steps", "Steps, by phase and by why they were split or not", labels=_BY_REASON)
        for key, count in dict(self._steps).items():
            steps.add_metric(key, count)
        yield steps
        tokens = CounterMetricFamily("dbo_tokens", "Tokens computed by all ranks", labels=["phase"])
        for phase, count in dict(self._tokens).items():
            tokens.add_metric([phase], count)
        yield tokens
        histogram = HistogramMetricFamily("dbo_step_seconds", "Duration of a step", labels=["phase"])
        for phase, counts in dict(self._buckets).items():
            histogram.add_metric([phase], _cumulative(counts), self._seconds[phase])
        yield histogram
        yield CounterMetricFamily("dbo_padding_rows", "Rows of padding computed by all ranks", self._padding_rows)
        yield CounterMetricFamily("dbo_agree_seconds", "Rank 0 waiting for the votes of the others", self._agree_s)
        yield CounterMetricFamily("dbo_message_wait_seconds", "Rank 0's host waiting for messages", self._wait_s)
        total = sum(dict(self._steps).values())
        yield GaugeMetricFamily("dbo_split_share", "Part of all steps that was split", self._num_split / max(total, 1))
        if self._last is not None:
            yield from self._of_last_step(*self._last, GaugeMetricFamily)

    def _of_last_step(self, record: StepRecord, plan: BatchPlan, gauge: type[Any]) -> Iterator[Metric]:
        share = math.nan if record.wait_ms is None else record.wait_ms / record.wall_ms
        rate = record.num_tokens_of_all / record.wall_ms * 1e3
        yield gauge("dbo_tokens_per_second", "Tokens of all ranks in the last step, per second of it", rate)
        yield gauge("dbo_padding_share", "Part of the last step's rows that was padding", padding_share(record))
        yield gauge("dbo_comm_share", "Part of the last step in which rank 0's host waited for messages", share)
        use = gauge("dbo_kv_use", "Part of a rank's KV cache in use", labels=["rank"])
        requests = gauge("dbo_requests", "Requests of a rank", labels=["rank", "state"])
        for rank, blocks in enumerate(plan.votes["num_kv_blocks"]):
            use.add_metric([str(rank)], blocks / self._num_blocks)
            requests.add_metric([str(rank), "running"], plan.votes["num_running"][rank])
            requests.add_metric([str(rank), "waiting"], plan.votes["num_waiting"][rank])
        yield use
        yield requests


_BY_REASON = ["phase", "reason"]


def _cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Counts by bucket -> (upper bound, how many are not above it), as Prometheus wants a histogram."""
    bounds, sums, total = [*map(str, BUCKETS_S), "+Inf"], [], 0
    for count in counts:
        total += count
        sums.append(total)
    return list(zip(bounds, sums, strict=True))


class Endpoint:
    """An HTTP server at `host`:`port` (0 = any free port) that answers every GET with the metrics as Prometheus reads
    them. Raises ConfigError when it cannot be opened. It has no password: beyond the loopback, everybody can read it.
    """

    def __init__(self, host: str, port: int, num_blocks: int):
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            remedy = "pip install prometheus-client, or write a file with --metrics"
            raise ConfigError("--metrics-port", port, "it needs the package prometheus-client", remedy) from None
        self._totals = Totals(num_blocks)
        registry = CollectorRegistry()
        registry.register(self._totals)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ConfigError("--metrics-port", port, f"a free port of {host} ({why})", "choose another one") from None
        self.port = int(self._server.server_port)
        logging.info("metrics at http://%s:%d/metrics", host, self.port)

    def step(self, record: StepRecord, plan: BatchPlan) -> None:
        """See `Sink`."""
        self._totals.add(record, plan)

    def flush(self) -> None:
        """See `Sink`. Nothing is kept back."""

    def close(self) -> None:
        """See `Sink`. A reader who has not finished is left behind."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
