"""What of the DeepEP transports shows without a GPU: refusals, widths, the choice by phase, receive before send."""

from types import SimpleNamespace

import pytest
import torch

from dbo.errors import ConfigError
from dbo.work import Comm
from moe.all2all.base import Dispatched
from moe.all2all.deepep_ht import MAX_SMS, DeepEPHighThroughput, widened
from moe.all2all.deepep_ll import DeepEPLowLatency
from moe.all2all.deepep_phases import SMALL, DeepEPByPhase
from moe.all2all.registry import _choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def shape(**changes):
    return SimpleNamespace(**{"hidden": 2048, "num_experts": 8, "num_topk": 2, "dtype": torch.bfloat16} | changes)


def group(size=2):
    return SimpleNamespace(rank=lambda: 0, size=lambda: size)


def make(backend, device=CUDA, config=None, cap=64):
    return backend(group=group(), device=device, config=config or shape(), max_tokens_per_rank=cap)


@pytest.mark.parametrize("backend", [DeepEPHighThroughput, DeepEPLowLatency])
@pytest.mark.parametrize(
    ("device", "config", "message"),
    [
        (CPU, shape(), "--all2all torch"),
        (CUDA, shape(num_experts=9), "num_experts=9"),
        (CUDA, shape(dtype=torch.float32), "--dtype bfloat16"),
    ],
)
def test_refuses_with_a_remedy_what_the_kernels_cannot_do(backend, device, config, message):
    with pytest.raises(ConfigError, match=message):
        make(backend, device, config)


@pytest.mark.parametrize(
    ("config", "cap", "message"),
    [
        (shape(num_topk=12), 64, "num_topk=12 .* at most 11"),
        (shape(hidden=9000), 64, "hidden=9000 .* at most 8192"),
        (shape(), 2000, "max_tokens_per_rank=2000"),
    ],
)
def test_low_latency_refuses_what_its_kernels_cannot_hold(config, cap, message):
    with pytest.raises(ConfigError, match=message + ".*deepep_ht"):
        make(DeepEPLowLatency, config=config, cap=cap)


def test_rows_are_widened_only_where_they_must_be():
    x = torch.randn(3, 576)
    assert widened(x, 576) is x
    wide = widened(x, 768)
    assert torch.equal(wide[:, :576], x)
    assert not wide[:, 576:].any()


@pytest.mark.parametrize(
    ("size", "device", "config", "name"),
    [(1, CUDA, shape(), "local"), (2, CPU, shape(), "torch"), (2, CUDA, shape(num_topk=16), "torch")],
)
def test_auto_takes_what_runs_here(size, device, config, name):
    assert _choose(group(size), device, config)[0] == name


def test_small_batches_go_by_low_latency_on_all_ranks_alike():
    phases = object.__new__(DeepEPByPhase)
    phases._small = SMALL
    phases._normal, phases._low_latency = (SimpleNamespace(dispatch=lambda *_, n=n: n) for n in ("normal", "low"))

    def way(num_rows, told):
        return phases.dispatch(torch.empty(num_rows, 1), None, None, told)

    assert way(3, (3, SMALL)) == "low"
    assert way(0, (0, 0)) == "low"
    assert way(3, (3, SMALL + 1)) == "normal"
    assert way(SMALL + 2, (3, SMALL)) == "normal"  # padded to a size that does not fit
    assert way(3, None) == "normal"


class Package:
    """Stands for the package `deep_ep`: says with what its buffers are made."""

    def __init__(self):
        self.made = made = []

        class Buffer:
            num_sms = 20
            capture = staticmethod(lambda: "captured")
            set_num_sms = staticmethod(lambda num_sms: None)
            get_low_latency_rdma_size_hint = staticmethod(lambda *sizes: sizes)

            def __init__(self, group, *sizes, **options):
                made.append((group, sizes, options))

            @staticmethod
            def get_dispatch_config(ep_size):
                return SimpleNamespace(
                    get_nvl_buffer_size_hint=lambda row_bytes, ep_size: row_bytes * ep_size,
                    get_rdma_buffer_size_hint=lambda row_bytes, ep_size: 0,
                )

            get_combine_config = get_dispatch_config

        self.Buffer = Buffer


def test_both_kernels_are_made_for_the_same_ranks_and_each_for_its_batches(monkeypatch):
    package = Package()
    for module in ("deepep_ht", "deepep_ll"):
        monkeypatch.setattr(f"moe.all2all.{module}.import_deep_ep", lambda: package)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "0")
    ranks, checks = group(4), []
    phases = DeepEPByPhase(
        group=ranks,
        device=CUDA,
        config=shape(hidden=2500),
        max_tokens_per_rank=2000,
        check=lambda: checks.append("asked"),
    )
    (small_group, _, small), (large_group, large_sizes, _) = package.made
    assert small_group is large_group is phases.group is ranks
    assert small["num_rdma_bytes"] == (SMALL, 2560, 4, 8)
    assert small["num_qps_per_rank"] == 2
    assert large_sizes == (2560 * 2 * 4, 0)
    assert (phases.ep_size, phases.num_experts, phases.experts) == (4, 8, range(2))
    assert (phases.capabilities.max_in_flight, phases.capabilities.order) == (2, "early")
    assert phases.set_num_sms(24) == MAX_SMS
    phases._low_latency.comm._check()
    assert checks == ["asked"]


def high_throughput(monkeypatch, size, **options):
    """The normal kernels between so many ranks, over a package that stands for `deep_ep`."""
    package = Package()
    package.Config = lambda *settings: package.Buffer.get_dispatch_config(2)
    monkeypatch.setattr("moe.all2all.deepep_ht.import_deep_ep", lambda: package)
    config = shape(num_experts=16)
    return DeepEPHighThroughput(group=group(size), device=CUDA, config=config, max_tokens_per_rank=64, **options)


@pytest.mark.parametrize(("size", "given", "num_sms"), [(2, None, MAX_SMS), (16, None, 20), (2, 8, 8), (16, 24, 24)])
def test_messages_that_have_the_device_to_themselves_take_the_sms_that_help(monkeypatch, size, given, num_sms):
    made = high_throughput(monkeypatch, size, num_sms=given)
    assert made.set_num_sms(12) == num_sms
    assert made.set_num_sms(num_sms) == 12


@pytest.mark.parametrize(("size", "no_sync", "order"), [(2, None, "early"), (2, False, "late"), (16, None, "late")])
def test_normal_kernels_launch_late_where_they_block_the_host(monkeypatch, size, no_sync, order):
    made = high_throughput(monkeypatch, size, no_sync=no_sync)
    assert (made.capabilities.order, made.capabilities.capturable) == (order, order == "early")
    if order == "late":
        assert (made.comm.order, made.comm.stream, made.comm._make_ready()) == ("late", None, "captured")


class Buffer:
    """Stands for DeepEP's low-latency buffer: says in which order things happen."""

    def __init__(self):
        self.seen = []

    def low_latency_dispatch(self, x, topk_idx, cap, num_experts, **_):
        return x, torch.ones(1), "handle", None, self._send("dispatch")

    def low_latency_combine(self, y, topk_idx, topk_weights, handle, **_):
        return y, None, self._send("combine")

    def _send(self, name):
        number = len([seen for seen in self.seen if seen.startswith("send")])
        self.seen.append(f"send {name} {number}")
        return lambda: self.seen.append(f"receive {name} {number}")


def test_low_latency_takes_its_cap_and_not_a_row_more():
    all2all = object.__new__(DeepEPLowLatency)
    all2all._buffer, all2all.comm, all2all._receive = Buffer(), Comm(CPU, own_stream=False), None
    all2all._fp8, all2all._max_tokens, all2all.hidden, all2all._wire_hidden = False, 64, 8, 8
    all2all.ep_size, all2all.num_experts = 2, 8
    for num_tokens in (63, 64):
        routing = torch.zeros(num_tokens, 2, dtype=torch.int64), torch.ones(num_tokens, 2)
        assert all2all.dispatch(torch.ones(num_tokens, 8), *routing).result().x.shape == (num_tokens, 8)
    with pytest.raises(ValueError, match="65 tokens exceed the 64 that deepep_ll was made for"):
        all2all.dispatch(torch.ones(65, 8), torch.zeros(65, 2, dtype=torch.int64), torch.ones(65, 2))


def test_each_operation_is_received_once_and_before_the_next_is_sent():
    all2all = object.__new__(DeepEPLowLatency)
    all2all._buffer, all2all.comm, all2all._receive = Buffer(), Comm(CPU, own_stream=False), None
    all2all._fp8, all2all._max_tokens, all2all.hidden, all2all._wire_hidden = False, 64, 8, 8
    all2all.ep_size, all2all.num_experts = 2, 8
    routing = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    first, second = (all2all.dispatch(torch.ones(4, 8), *routing) for _ in range(2))
    received = first.result()
    assert isinstance(received, Dispatched)
    back = all2all.combine(received.x, received)
    second.result()
    back.result()
    assert all2all._buffer.seen == [
        "send dispatch 0",
        "receive dispatch 0",
        "send dispatch 1",
        "receive dispatch 1",
        "send combine 2",
        "receive combine 2",
    ]
