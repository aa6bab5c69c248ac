"""Settings of SMs and library, entered and left in any nesting, without a GPU: torch's own are stood in for."""

from types import SimpleNamespace

import pytest
import torch

from dbo.sm_partition import SMPartition
from moe import sms
from moe.all2all.deepep_phases import DeepEPByPhase

TOTAL = 132


@pytest.fixture
def state(monkeypatch):
    """What a device would have been told."""
    now = SimpleNamespace(carved=None, library="cublas", stream="caller's")

    def library(wanted=None):
        now.library = wanted or now.library
        return now.library

    streams = {}

    def stream(num_sms):
        return streams.setdefault(num_sms, SimpleNamespace(name=f"green {num_sms}", wait_stream=lambda other: None))

    caller = SimpleNamespace(name="caller's", wait_stream=lambda other: None)
    now.current = caller
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: now.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda s: setattr(now, "current", s))
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: now.carved)
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", lambda n: setattr(now, "carved", n))
    monkeypatch.setattr(sms, "total_sms", lambda _: TOTAL)
    green = sms.GreenStream()
    monkeypatch.setattr(green, "_stream", stream)
    monkeypatch.setattr(sms, "_green_stream", lambda: green)
    monkeypatch.setattr(sms, "_shared", None)
    monkeypatch.setattr(sms, "_library_before", None)
    return now


def partition(form, num_sms):
    return SMPartition(
        comm_sms=num_sms,
        total_sms=TOTAL,
        set_comm_sms=lambda n: None,
        set_compute_sms=sms.compute_setters(form, num_sms),
        multiple_of=2,
    )


def seen(now):
    return now.carved, now.library, sms.shared_sms(), now.current.name


@pytest.mark.parametrize("outer", ["shared 8", "shared 24", "carve 20", "green 12"])
@pytest.mark.parametrize("inner", ["shared 8", "shared 24", "carve 20", "green 28"])
def test_all_is_as_before_when_a_partition_is_left(outer, inner, state):
    first = seen(state)
    with partition(*read(outer)):
        before = seen(state)
        with pytest.raises(RuntimeError, match="inside"), partition(*read(inner)):
            raise RuntimeError("inside")
        assert seen(state) == before
    assert seen(state) == first == (None, "cublas", None, "caller's")


def read(text):
    form, num_sms = text.split()
    return form, int(num_sms)


def test_few_sms_for_messages_carve_products_out(state):
    with partition("shared", 8):
        assert seen(state) == (8, "cublaslt", TOTAL - 8, "caller's")
    with partition("shared", 24):
        assert seen(state) == (None, "cublas", TOTAL - 24, "caller's")


def test_a_carve_out_of_ones_own_stays(state):
    state.carved = 4
    with partition("shared", 8):
        assert (state.carved, state.library) == (8, "cublaslt")
    assert state.carved == 4


def test_small_batches_of_both_kernels_take_no_sms():
    transport = object.__new__(DeepEPByPhase)
    transport._small, transport.set_num_sms = 256, lambda n: n
    device = torch.device("cuda")
    assert [sms.takes_sms(transport, device, n) for n in (None, 257, 256)] == [True, True, False]


def test_whole_steps_get_the_sms_they_are_given_and_a_partition_puts_them_back(state):
    now = SimpleNamespace(num_sms=64)

    def set_num_sms(num_sms):
        before, now.num_sms = now.num_sms, now.num_sms if num_sms is None else num_sms
        return before

    transport, device = SimpleNamespace(set_num_sms=set_num_sms), torch.device("cuda")
    assert sms.whole_comm_sms(transport, device) == 64
    sms.set_whole_comm_sms(transport, device, 8)
    assert sms.whole_comm_sms(transport, device) == 8
    with sms.make_partition(transport, 20, device):
        assert now.num_sms == 20
    assert now.num_sms == 8
    sms.set_whole_comm_sms(transport, torch.device("cpu"), 4)
    sms.set_whole_comm_sms(SimpleNamespace(), device, 4)
    assert sms.whole_comm_sms(transport, torch.device("cpu")) is None
    assert now.num_sms == 8
