"""A profile that nobody measured: costs derived from a model's sizes and a device's raw speeds, and labelled so.

Its own file because it is the one place with hardware figures, each with its source, and because a derived profile must
never be mistaken for a measured one (`origin` is "derived", `steps` is missing, `auto` refuses it).

The rule: a part takes the longer of its bytes over the memory bandwidth and its operations over the rate of its kind of
product, plus a fixed time for each kernel. That is a floor: real kernels are slower, more so when small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dbo.errors import ConfigError
from launch.profile import Cost, ExpertCosts, LayerCosts, Profile, Series, Setup, fingerprint
from moe.config import ModelConfig, named_shape

PREFILL_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
EXPERT_TOKENS = tuple(sorted({*PREFILL_TOKENS, *DECODE_TOKENS}))
UNCERTAIN = 0.3  # of a floor: from below to above, as low and high of every cost


@dataclass(frozen=True, kw_only=True)
class Device:
    """Raw speeds of one GPU."""

    name: str
    memory_gbs: float  # reading weights
    dense_tflops: float  # bf16 products
    grouped_tflops: float  # bf16, of experts
    attention_tflops: float
    fp8_factor: float  # how much faster products of 8-bit numbers are
    kernel_us: float  # what a kernel of a graph takes beside its work
    tile_rows: int  # rows an expert's product is rounded up to
    sms: int
    host_ms: float  # of a step, that no graph hides


DEVICES = {
    # Measured for this project on an H200: 604 MB of expert weights read in 149 us; 8192 x 7168 x 8192 in bf16 at 784
    # TFLOP/s; grouped products of 64 experts at 568. Assumed: attention as fast as those, 8-bit products twice as
    # fast as 16-bit ones (the ratio of the data sheet), 4 us a kernel, 1 ms of host time a step.
    "h200": Device(
        name="h200", memory_gbs=4054, dense_tflops=784, grouped_tflops=568, attention_tflops=568, fp8_factor=2.0,
        kernel_us=4.0, tile_rows=64, sms=132, host_ms=1.0,
    ),
}  # fmt: skip

HT_SMS = 20  # of DeepEP's normal kernels, which carry prefill
LL_KERNEL_US = 10.0  # DeepEP's low-latency dispatch and combine at 128 tokens take 43 us, 26 of them for the bytes


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One layer and one step in parameters, bytes and operations."""

    attention_params: float  # of the projections, router and shared expert
    weight_bytes: float  # of one parameter
    kv_bytes: float  # of one token of context in one layer
    decode_ops: float  # of attention, for one query and one token of context
    prefill_ops: float
    attention_kernels: int
    dispatch_bytes: int
    combine_bytes: int
    step_bytes: float  # read once a step: head, dense layers


def sizes_of(shape: str, model: ModelConfig) -> Sizes:
    """From the model's sizes; DeepSeek-V3's own attention and 8-bit weights are put in by hand (its technical report,
    section 4.2), since the runtime's shape of that name has another attention."""
    c = model
    if shape == "deepseek-v3":
        heads, nope, rope, rank, q_rank, value = 128, 128, 64, 512, 1536, 128
        projections = (
            c.hidden * q_rank + q_rank * heads * (nope + rope) + c.hidden * (rank + rope)
            + rank * heads * (nope + value) + heads * value * c.hidden
        )  # fmt: skip
        shared = 3 * c.hidden * 2048
        return Sizes(
            attention_params=projections + shared + c.hidden * c.num_experts,
            weight_bytes=1,
            kv_bytes=2 * (rank + rope),
            decode_ops=2 * heads * (rank + rope + rank),
            prefill_ops=2 * heads * (nope + rope + value),
            attention_kernels=18,
            dispatch_bytes=c.hidden + c.hidden // 128 * 4,
            combine_bytes=2 * c.hidden,
            step_bytes=2 * 129280 * c.hidden + 3 * 3 * c.hidden * 18432,
        )
    heads = c.num_heads * c.head_dim
    return Sizes(
        attention_params=c.hidden * (2 * heads + 2 * c.num_kv_heads * c.head_dim + c.num_experts)
        + 3 * c.hidden * c.shared_expert_width,
        weight_bytes=c.dtype.itemsize,
        kv_bytes=2 * c.num_kv_heads * c.head_dim * c.dtype.itemsize,
        decode_ops=4 * heads,
        prefill_ops=4 * heads,
        attention_kernels=8,
        dispatch_bytes=c.hidden * c.dtype.itemsize,
        combine_bytes=c.hidden * c.dtype.itemsize,
        step_bytes=c.vocab_size * c.hidden * c.dtype.itemsize,
    )


def derive(shape: str, hardware: str, *, context: int, prompt_tokens: int, command: str) -> Profile:
    """The profile of a named shape on a named device. Raises ConfigError for unknown names."""
    if hardware not in DEVICES:
        raise ConfigError("--hardware", hardware, ", ".join(DEVICES), "")
    device, model = DEVICES[hardware], named_shape(shape)
    sizes = sizes_of(shape, model)
    parts = _Parts(device, model, sizes)
    most = max(model.num_experts // 2, 1)
    counts = sorted({2**i for i in range(20) if 2**i <= most} | {most})
    return Profile(
        origin="derived",
        setup=Setup(
            model=fingerprint(model),
            ranks=1,
            device=f"{hardware} (derived)",
            all2all="deepep",
            num_ubatches=2,
            driver="greenlet",
            cut="tokens",
            comm_sms=None,
        ),
        environment={"derived": f"from figures of {hardware}; nothing was measured"},
        command=command,
        steps=None,
        layer=LayerCosts(
            attention={
                "prefill": _series(PREFILL_TOKENS, lambda n: parts.attention_us(n, prompt_tokens, decode=False)),
                "decode": _series(DECODE_TOKENS, lambda n: parts.attention_us(n, context, decode=True)),
            },
            experts=tuple(
                ExpertCosts(num_local_experts=e, costs=_series(EXPERT_TOKENS, partial(parts.experts_us, e)))
                for e in counts
            ),
            packing=None,
            messages=None,
            fixed=dict.fromkeys(("prefill", "decode"), _series((1,), lambda _: parts.step_us())),
            sm_tax={"prefill": HT_SMS / (device.sms - HT_SMS), "decode": 0.0},
            dispatch_bytes=sizes.dispatch_bytes,
            combine_bytes=sizes.combine_bytes,
            copies={"prefill": "node", "decode": "expert"},
            min_latency_us=LL_KERNEL_US,
        ),
        notes=(
            f"derived, not measured: {shape} on {hardware}, {context} tokens of context in decode, prompts of "
            f"{prompt_tokens} tokens; decode over low-latency kernels (a copy of a token to every expert it chose), "
            f"prefill over normal ones (a copy to every node, {HT_SMS} SMs)",
        ),
    )


class _Parts:
    """Times in us on one device."""

    def __init__(self, device: Device, model: ModelConfig, sizes: Sizes):
        self._device, self._model, self._sizes = device, model, sizes
        fast = device.fp8_factor if sizes.weight_bytes == 1 else 1.0
        self._dense, self._grouped = device.dense_tflops * fast, device.grouped_tflops * fast

    def attention_us(self, num_tokens: float, length: int, *, decode: bool) -> float:
        """Projections and shared expert, then attention over `length` tokens (prefill: half of them, in the mean)."""
        s = self._sizes
        projections = self._longer(
            s.attention_params * s.weight_bytes, 2 * s.attention_params * num_tokens, self._dense
        )
        seen = num_tokens * length if decode else num_tokens * length / 2
        kv_bytes = seen * s.kv_bytes if decode else num_tokens * s.kv_bytes
        attention = self._longer(
            kv_bytes, seen * (s.decode_ops if decode else s.prefill_ops), self._device.attention_tflops
        )
        sending = self._messages_us(num_tokens) if decode else 0.0
        return projections + attention + sending + s.attention_kernels * self._device.kernel_us

    def _messages_us(self, num_tokens: float) -> float:
        """The low-latency kernels that send and receive: they fill the device while they run, so compute waits."""
        moved = 2 * num_tokens * self._model.num_topk * (self._sizes.dispatch_bytes + self._sizes.combine_bytes)
        return moved / (self._device.memory_gbs * 1e3) + 4 * self._device.kernel_us

    def experts_us(self, num_local_experts: int, num_tokens: float) -> float:
        """Two grouped products and what lies between, over the rows that arrive."""
        c, tile = self._model, self._device.tile_rows
        rows = num_tokens * c.num_topk
        padded = num_local_experts * math.ceil(rows / num_local_experts / tile) * tile
        params = 3 * c.hidden * c.expert_width
        moved = rows * (c.hidden * 3 + c.expert_width * 6)  # in, out and between, 8 or 16 bits each
        weights = min(num_local_experts, rows) * params * self._sizes.weight_bytes
        return self._longer(weights + moved, 2 * params * padded, self._grouped) + 4 * self._device.kernel_us

    def step_us(self) -> float:
        """What a step has beside its layers."""
        return self._sizes.step_bytes / (self._device.memory_gbs * 1e3) + self._device.host_ms * 1e3

    def _longer(self, num_bytes: float, operations: float, tflops: float) -> float:
        return max(num_bytes / (self._device.memory_gbs * 1e3), operations / (tflops * 1e6))


def _series(tokens: tuple[int, ...], cost_us: Callable[[int], float]) -> Series:
    def cost(n: int) -> Cost:
        ms = cost_us(n) / 1e3
        return Cost(median=ms, low=ms * (1 - UNCERTAIN), high=ms * (1 + UNCERTAIN), n=1)

    return Series(tokens=tokens, costs=tuple(cost(n) for n in tokens))
