"""Steps from CUDA graphs, whole and overlapped, against the same steps run eagerly; a program for torchrun.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.graphs prefill --tokens 4096,8192 --sms 8,16,24 --out FILE
    torchrun --nproc-per-node 2 -m benchmarks.gpu.graphs steps --tokens 2048,8192 --out FILE
    torchrun --nproc-per-node 2 -m benchmarks.gpu.graphs decode --tokens 1,8,64,256 --out FILE

Qwen3-30B-A3B shapes, random weights. `prefill`: 6 layers, prompts of random lengths that fill the step exactly, the
normal kernels of DeepEP; both arms FULL and PIECEWISE at each number of SMs, eager overlap beside them. `steps`: 12
layers with embedding and head, FULL at the best of those numbers. `decode`: 12 layers without head, contexts of 64 to
264 tokens, the low-latency kernels, FULL, with the floor: bytes that a step must read over the measured bandwidth, and
one message's round trip a layer.

The gate: what every graph leaves equals, bit by bit, the eager run of the same parts with the same layout of attention,
also after other steps ran in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.setup import BLOCK, GREEN_BELOW, LONGEST, SHORTEST, Bench, Times, make_parser, numbers, random_model
from benchmarks.gpu.summary import NIC_SMS, Figure, of_sustained, passed, plain, ratio, single
from dbo.agreement import BatchPlan, Reason
from dbo.config import DBOConfig
from dbo.graphs.backend import GraphBackend
from dbo.graphs.cuda import CudaGraphs
from dbo.graphs.descriptor import BatchDescriptor, step_context
from dbo.graphs.mode import CUDAGraphMode
from dbo.graphs.ubatches import UBatchStep, prepare
from dbo.graphs.wrapper import CUDAGraphWrapper, GraphPool, set_cudagraph_capturing_enabled
from dbo.runner import UBatchRunner
from dbo.slices import make_slices
from dbo.workspace import Workspace
from launch.graphs import TOKENS_PER_REQUEST
from launch.inputs import GraphInputs
from launch.sampling import SamplingParams
from launch.scheduler import Chunk, Limits, Request, Schedule
from moe.batch import ForwardBatch
from moe.graphs import make_capturable
from moe.kv_cache import KVCache

AHEAD_MS = 80
LONG = 8192  # tokens a step from which power is looked at


def schedule_of(lengths: Sequence[tuple[int, int]], rank: int) -> Schedule:
    """A request for each (tokens in its cache, new tokens), with blocks of its own."""
    chunks, used = [], 0
    for index, (computed, new) in enumerate(lengths):
        total = computed + new
        ids = np.random.default_rng((rank, index)).integers(0, 256, total).tolist()
        request = Request(id=str(index), index=index, prompt_ids=ids, params=SamplingParams(max_new_tokens=1))
        blocks = array("i", range(used, used + -(-total // BLOCK)))
        used += len(blocks)
        chunks.append(Chunk(request, computed, new, True, blocks))
    return Schedule(tuple(chunks), foreseeable=True, num_ended=0)


def random_prompts(num_tokens: int, rank: int) -> list[tuple[int, int]]:
    """Prompts of 256 to 2048 tokens, shorter where that is more than half a step, that make up `num_tokens`."""
    longest, rng, found, left = min(2048, max(num_tokens // 2, 4)), np.random.default_rng(rank), [], num_tokens
    while left:
        length = min(left, int(rng.integers(max(longest // 8, 1), longest + 1)))
        found.append((0, length))
        left -= length
    return found


class Steps:
    """One step's worth of requests under every form: whole or in two ubatches, eager, FULL or PIECEWISE."""

    def __init__(
        self,
        bench: Bench,
        model: Any,
        lengths: Sequence[tuple[int, int]],
        *,
        head: bool = False,
        driver: str | None = None,
        interleave: bool = True,
    ) -> None:
        driver = driver or bench.args.driver
        self.bench, self.model, self.mesh = bench, model, bench.mesh
        self.schedule = schedule_of(lengths, bench.mesh.rank)
        self.num_tokens = self.schedule.num_tokens
        self.decode = self.schedule.uniform_decode
        num_blocks = sum(len(chunk.blocks) for chunk in self.schedule.chunks)
        longest = max(computed + new for computed, new in lengths)
        limits = Limits(
            max_num_tokens=self.num_tokens,
            max_num_seqs=len(lengths),
            max_model_len=-(-longest // BLOCK) * BLOCK,
            block_size=BLOCK,
            num_blocks=num_blocks,
        )
        self.kv = KVCache(model.config, num_blocks, BLOCK, model.config.dtype, self.mesh.device)
        self.inputs = {  # arms run in turns, and each finds its own inputs in place
            num: GraphInputs(
                limits,
                self.mesh.device,
                self.mesh.peers.check,
                num_tokens=self.num_tokens + 2,
                num_ubatches=num,
                num_ranks=self.mesh.world_size,
            )
            for num in (1, 2)
        }
        self.runner = UBatchRunner(2, device=self.mesh.device, driver=driver)  # type: ignore[arg-type]
        mode = "relaxed" if driver == "threads" else "thread_local"
        self.pool = GraphPool(backend_of(bench), mode=mode)  # type: ignore[arg-type]
        self.step = UBatchStep(self._model, self.runner, interleave=interleave)
        ends = np.cumsum(self.schedule.query_lens, dtype=np.int64) - 1
        self.last = torch.from_numpy(ends).to(self.mesh.device) if head else None
        with self.pool.stream():
            prepare(self.runner, [self.pool.backend.current_stream()], self.mesh.device)

    def _model(self, part: ForwardBatch) -> Tensor:
        return self.model(part, self.kv)

    def _forward(self, parts: list[ForwardBatch]) -> Tensor:
        hidden = self.step(parts)
        if self.model.offloader is not None:
            self.model.offloader.join_after_forward()
        return hidden if self.last is None else self.model.compute_logits(hidden[self.last])

    def onload(self) -> None:
        """Before a forward: offloaded weights as it must find them."""
        if self.model.offloader is not None:
            self.model.offloader.sync_prev_onload()

    @cached_property
    def most_requests(self) -> int:
        """Of any rank: they must lay out attention alike only on one rank, so each takes its own."""
        return max(len(self.schedule.chunks), -(-self.num_tokens // TOKENS_PER_REQUEST))

    def descriptor(self, mode: CUDAGraphMode, num_ubatches: int, num_tokens: int | None = None) -> BatchDescriptor:
        """The shape of all requests, or that of so many tokens."""
        tokens = -(-(num_tokens or self.num_tokens) // num_ubatches) * num_ubatches
        requests = tokens if self.decode else self.most_requests + 1
        exact = BatchDescriptor(
            num_tokens=tokens, num_requests=requests, uniform_decode=self.decode, num_ubatches=num_ubatches
        )
        return exact.relaxed() if mode is CUDAGraphMode.PIECEWISE else exact

    def parts(
        self,
        mode: CUDAGraphMode,
        num_ubatches: int,
        schedule: Schedule | None = None,
        num_tokens: int | None = None,
    ) -> list[ForwardBatch]:
        """The inputs, filled as the engine fills them; of another schedule, if given, in the shape of `num_tokens`."""
        schedule, shape = schedule or self.schedule, self.descriptor(mode, num_ubatches, num_tokens)
        ranks = self.mesh.world_size
        plan = BatchPlan(
            config=DBOConfig(overlap="on"),
            votes={"num_tokens": (schedule.num_tokens,) * ranks, "uniform_decode": (int(self.decode),) * ranks},
            reason=Reason.SPLIT,
            reason_rank=None,
            num_ubatches=num_ubatches,
            num_tokens_padded=shape.num_tokens,
        )
        slices = make_slices(plan, schedule.query_lens, seq_lens=schedule.seq_lens)
        return self.inputs[num_ubatches].build(schedule, slices, shape)

    def capture(self, mode: CUDAGraphMode, num: int, hold: Callable[[], AbstractContextManager[object]]) -> Arm:
        """Warm up, capture, and compare a replay with the eager run."""
        with self.pool.stream(), hold():
            parts = self.parts(mode, num)
            self.onload()
            eager = self._forward(parts).clone()
            arm = Arm(self, mode, num, hold)
            with set_cudagraph_capturing_enabled(), step_context(mode, arm.descriptor):
                arm.wrapped(parts)
        self._forward(self.parts(mode, 3 - num))  # something else in between
        arm.fill()
        arm.equal = self.bench.all_agree(torch.equal(arm()[: self.num_tokens], eager[: self.num_tokens]))
        return arm

    def eager(self, num: int, hold: Callable[[], AbstractContextManager[object]]) -> Callable[[], Tensor]:
        """The same requests without a graph, attention as an eager step has it."""
        parts = self.parts(CUDAGraphMode.PIECEWISE, num)

        def run() -> Tensor:
            with hold():
                self.onload()
                return self._forward(parts)

        return run

    def clear(self) -> None:
        """Give up the graphs: the next number of SMs needs others."""
        self.pool.clear_all_graphs()

    def close(self) -> None:
        self.clear()
        self.runner.close()


class Arm:
    """A captured step: a call replays it. A wrapper of its own, since arms of one shape differ in their partition."""

    equal = False

    def __init__(self, steps: Steps, mode: CUDAGraphMode, num: int, hold: Callable[[], AbstractContextManager[object]]):
        self.steps, self.mode, self.num = steps, mode, num
        self.hold = hold if mode is CUDAGraphMode.PIECEWISE else nullcontext  # in force for what runs between graphs
        self.descriptor = steps.descriptor(mode, num)
        self.wrapped = CUDAGraphWrapper(steps._forward, steps.pool)
        self.fill()

    def fill(self) -> None:
        """Put the inputs in place."""
        self.input = self.steps.parts(self.mode, self.num)

    def __call__(self) -> Tensor:
        with self.steps.pool.stream(), self.hold(), step_context(self.mode, self.descriptor):
            self.steps.onload()
            return self.wrapped(self.input)


def backend_of(bench: Bench) -> GraphBackend:
    if not bench.args.rehearse:
        return CudaGraphs(bench.mesh.device)
    from tests.dbo.graphs.emulator import Emulator

    return Emulator()


def modes(bench: Bench) -> list[CUDAGraphMode]:
    """A CPU has no attention that can be captured."""
    return [CUDAGraphMode.PIECEWISE] if bench.args.rehearse else [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE]


def watching(steps: Steps) -> AbstractContextManager[Any]:
    """What the emulator needs in a rehearsal."""
    return getattr(steps.pool.backend, "watching", nullcontext)()


def holders(bench: Bench, all2all: Any, num_sms: int) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Name, ubatches and partition of every arm at one number of SMs."""
    yield "whole", 1, lambda: bench.partition(all2all, num_sms)
    for form in ("carve", "green", "shared") if num_sms < GREEN_BELOW else ("carve", "shared"):
        yield f"overlap_{form}", 2, lambda form=form: bench.partition(all2all, num_sms, form)


def prefill_size(num_tokens: int, bench: Bench, model: Any, all2all: Any, *, head: bool) -> dict[str, Any]:
    rows = bench.rows(num_tokens)
    steps = Steps(bench, model, random_prompts(rows, bench.mesh.rank), head=head)
    found: dict[str, Any] = {"num_tokens": num_tokens, "sms": {}, "sustained": {}, "gates": {"passed": True}}
    layers = model.config.num_layers
    for num_sms in bench.args.sms:
        arms: dict[str, Callable[[], object]] = {}
        with watching(steps):
            for name, num, hold in holders(bench, all2all, num_sms):
                for mode in modes(bench):
                    arm = steps.capture(mode, num, hold)
                    found["gates"]["passed"] &= arm.equal
                    if not arm.equal:
                        bench.say("GATE FAILED", num_tokens, num_sms, name, mode.name)
                    arms[f"{name}_{mode.name.lower()}"] = arm
                arms[f"{name}_eager"] = steps.eager(num, hold)
        at = found["sms"][str(num_sms)] = {}
        with steps.pool.stream():  # as the engine runs
            measured = bench.time_arms(arms)
        for name, times in measured.items():
            at[name] = {**times.figure(), "host_ms": times.host, "host_ms_per_layer": times.host / layers}
            if times.quiet_ms:
                at[name]["host_quiet_ms_per_layer"] = float(np.median(times.quiet_ms)) / layers
        if num_tokens >= LONG:
            with steps.pool.stream():
                found["sustained"][str(num_sms)] = sustained(arms, measured, bench, layers)
        shown = {name: round(arm["value"], 2) for name, arm in at.items()}
        bench.say(num_tokens, num_sms, shown, found["sustained"].get(str(num_sms), ""))
        steps.clear()
    steps.close()
    return found


def sustained(
    arms: dict[str, Callable[[], object]], measured: dict[str, Times], bench: Bench, num_layers: int
) -> dict[str, dict[str, float]]:
    """Whole and the fastest overlap, FULL, without pauses."""
    mode = modes(bench)[0].name.lower()
    overlaps = [name for name in arms if name.startswith("overlap_") and name.endswith(mode)]
    chosen = {"whole": f"whole_{mode}", "overlap": min(overlaps, key=lambda name: measured[name].median)}
    return bench.sustain(
        {name: arms[arm] for name, arm in chosen.items()},
        {name: measured[arm] for name, arm in chosen.items()},
        num_layers,
    )


def decode_size(num_tokens: int, bench: Bench, model: Any, all2all: Any) -> dict[str, Any]:
    rng = np.random.default_rng(bench.mesh.rank)
    lengths = [(int(n) - 1, 1) for n in rng.integers(SHORTEST, LONGEST + 1, num_tokens)]
    steps = Steps(bench, model, lengths)
    for layer in range(model.config.num_layers):
        for cache in steps.kv.layer(layer):
            cache.normal_()
    mode = modes(bench)[0]
    found: dict[str, Any] = {"num_tokens": num_tokens, "arms": {}, "gates": {"passed": True}}
    arms: dict[str, Callable[[], object]] = {}
    with watching(steps):
        for name, num in (("whole", 1), ("overlap", 2))[: 1 + (num_tokens > 1)]:
            arm = steps.capture(mode, num, nullcontext)
            found["gates"]["passed"] &= arm.equal
            arms |= {f"{name}_graph": arm, f"{name}_eager": steps.eager(num, nullcontext)}
    with steps.pool.stream():  # as the engine runs
        measured = bench.time_arms(arms)
    for name, times in measured.items():
        found["arms"][name] = {**times.figure(), "host_ms": times.host}
        if name.endswith("_graph"):
            ahead = bench.clock.device_ms(arms[name], rounds=min(7, bench.rounds), ahead_ms=AHEAD_MS, meet=bench.meet)
            found["arms"][name]["device_ms"] = ahead
    found["floor"] = floor(bench, model, all2all, steps, num_tokens)
    shown = {name: f"{a['value']:.2f} ms, host {a['host_ms'] * 1e3:.0f} us" for name, a in found["arms"].items()}
    bench.say(num_tokens, shown, found["floor"], found["gates"])
    steps.close()
    return found


def floor(bench: Bench, model: Any, all2all: Any, steps: Steps, num_tokens: int) -> dict[str, float]:
    """What a step cannot be faster than: the bytes of the experts hit, the other weights and the KV cache over the
    bandwidth of this device, and a message's round trip for each layer."""
    config, hit = model.config, list[int]()
    itemsize = config.dtype.itemsize
    experts = [layer.experts for layer in model.moe_layers]

    def counting(inner: Any) -> Callable[[Any], Any]:
        def call(received: Any) -> Any:
            counts = received.num_tokens_per_expert
            if counts is None:
                hit.append(len(received.topk_idx.unique()) - int((received.topk_idx < 0).any()))
            else:
                hit.append(int((torch.as_tensor(counts) > 0).sum()))
            return inner(received)

        return call

    for layer in model.moe_layers:
        layer.experts = counting(layer.experts)
    steps.eager(1, nullcontext)()
    for layer, inner in zip(model.moe_layers, experts, strict=True):
        layer.experts = inner
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    num_bytes = sum(hit) * 3 * config.hidden * config.expert_width * itemsize
    num_bytes += config.num_layers * config.hidden * (heads + config.num_experts) * itemsize
    keys = int(steps.schedule.seq_lens.sum())
    num_bytes += config.num_layers * keys * 2 * config.num_kv_heads * config.head_dim * itemsize
    bandwidth, trip = read_bandwidth(bench), round_trip_ms(bench, all2all, config, num_tokens)
    return {
        "experts_hit_a_layer": sum(hit) / max(len(hit), 1),
        "read_ms": num_bytes / bandwidth,
        "round_trip_ms": trip,
        "floor_ms": num_bytes / bandwidth + config.num_layers * trip,
    }


def read_bandwidth(bench: Bench) -> float:
    """Bytes a millisecond, of memory larger than the cache: the fastest of two reductions and a copy."""
    data = torch.ones(1 << (20 if bench.args.rehearse else 30), dtype=torch.bfloat16, device=bench.mesh.device)
    words, other = data.view(torch.float32), torch.empty_like(data)
    ways = {"sum": (lambda: words.sum(), 1), "rows": (lambda: words.view(-1, 4096).amax(1), 1)}
    ways["copy"] = (lambda: other.copy_(data), 2)
    return max(times * data.nbytes / bench.clock.device_ms(way, rounds=5, ahead_ms=5) for way, times in ways.values())


def round_trip_ms(bench: Bench, all2all: Any, config: Any, num_tokens: int) -> float:
    """Dispatch and combine alone, many of them, from the device's own clock."""
    device = bench.mesh.device
    x = torch.randn(num_tokens, config.hidden, dtype=config.dtype, device=device)
    idx = torch.rand(num_tokens, config.num_experts, device=device).topk(config.num_topk)[1]
    weights = torch.ones(idx.shape, device=device)
    times = 10

    def run() -> None:
        for _ in range(times):
            sent = all2all.dispatch(x, idx, weights, (num_tokens,) * bench.mesh.world_size).wait()
            all2all.combine(sent.x, sent).wait()

    return bench.clock.device_ms(run, rounds=5, ahead_ms=AHEAD_MS, meet=bench.meet) / times


# ------------------------------------------------------------------ figures, for summary.json


def of_prefill(sizes: list[dict[str, Any]]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for size in passed(sizes):
        n, by_sms = size["num_tokens"], size["sms"]
        for mode in ("full", "piecewise"):
            found = {sms: best(arms, mode) for sms, arms in by_sms.items() if f"whole_{mode}" in arms}
            name = "graph" if mode == "full" else "piecewise"
            if NIC_SMS in found:
                figures[f"{name}_overlap_speedup_nic_{n}"] = ratio(*found[NIC_SMS])
            if found:
                whole, overlap = (min((pair[k] for pair in found.values()), key=value) for k in (0, 1))
                figures[f"{name}_overlap_speedup_best_{n}"] = ratio(whole, overlap)
                figures[f"host_ms_per_layer_overlap_{mode}_{n}"] = single(overlap["host_ms_per_layer"], "ms")
                if "host_quiet_ms_per_layer" in overlap:
                    figures[f"host_ms_per_layer_overlap_{mode}_{n}_quiet"] = single(
                        overlap["host_quiet_ms_per_layer"], "ms"
                    )
                eager = min((best(arms, "eager")[1] for arms in by_sms.values()), key=value)
                figures[f"{name}_overlap_over_eager_overlap_{n}"] = ratio(eager, overlap)
        nic = by_sms.get(NIC_SMS, {})
        if "whole_full" in nic and "whole_piecewise" in nic:
            figures[f"piecewise_over_full_{n}"] = ratio(best(nic, "piecewise")[1], best(nic, "full")[1])
        figures |= {f"graph_{name}": figure for name, figure in of_sustained(n, size.get("sustained", {})).items()}
    return figures


def of_steps(sizes: list[dict[str, Any]]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for size in passed(sizes):
        pairs = [best(arms, "full") for arms in size["sms"].values() if "whole_full" in arms]
        for k, arm in enumerate(("whole", "overlap")):
            if pairs:
                figures[f"prefill_graph_ms_{arm}_{size['num_tokens']}"] = plain(min((p[k] for p in pairs), key=value))
    return figures


def of_decode(sizes: list[dict[str, Any]]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for size in passed(sizes):
        n, arms = size["num_tokens"], size["arms"]
        for arm in ("whole", "overlap"):
            if f"{arm}_graph" in arms:
                figures[f"decode_graph_ms_{arm}_{n}"] = single(arms[f"{arm}_graph"]["device_ms"], "ms")
                figures[f"decode_graph_step_ms_{arm}_{n}"] = plain(arms[f"{arm}_graph"])
                figures[f"decode_graph_host_us_{arm}_{n}"] = single(arms[f"{arm}_graph"]["host_ms"] * 1e3, "us")
        figures[f"decode_graph_speedup_over_eager_{n}"] = ratio(arms["whole_eager"], arms["whole_graph"])
        over = arms["whole_graph"]["device_ms"] / size["floor"]["floor_ms"]
        figures[f"decode_graph_over_floor_{n}"] = single(over, "1")
    return figures


FIGURES = {"prefill": of_prefill, "steps": of_steps, "decode": of_decode}


def value(figure: Figure) -> float:
    return float(figure["value"])


def best(arms: dict[str, Figure], mode: str) -> tuple[Figure, Figure]:
    """Whole, and the fastest form of overlap."""
    overlaps = [arm for name, arm in arms.items() if name.startswith("overlap_") and name.endswith(mode)]
    return arms[f"whole_{mode}"], min(overlaps, key=value)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=("prefill", "steps", "decode"))
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--tokens", type=numbers)
    parser.add_argument("--sms", type=numbers, default=[8, 16, 24, 32, 48])
    parser.add_argument("--driver", choices=("threads", "greenlet"), default="greenlet")
    args = parser.parse_args()
    decode = args.what == "decode"
    sizes = args.tokens or ([1, 8, 32, 64, 128, 256] if decode else [2048, 4096, 8192, 16384])
    with Bench.start(args) as bench:
        config = bench.shape("qwen3-30b-a3b", args.num_layers or (6 if args.what == "prefill" else 12))
        make = bench.low_latency if decode else bench.high_throughput
        all2all = make(config, max(sizes) if decode else bench.rows(max(sizes)))
        model = random_model(config, all2all, bench.mesh.device)
        make_capturable(model, Workspace(bench.mesh.device, 2))
        found = []
        for num_tokens in sizes:
            if decode:
                found.append(decode_size(num_tokens, bench, model, all2all))
            else:
                found.append(prefill_size(num_tokens, bench, model, all2all, head=args.what == "steps"))
            bench.write({"what": args.what, "sizes": found, "figures": FIGURES[args.what](found)})
        all2all.close()


if __name__ == "__main__":
    main()
