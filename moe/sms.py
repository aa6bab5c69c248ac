"""How many multiprocessors compute kernels may use, and the partition between them and the all2all.

Its own file because the settings are torch's and our kernels' own. There are three ways:

    carve       torch's carve-out (cuBLASLt, grouped products; the Triton kernels here size their grids by it): the SMs
                of the all2all stay free also while it has nothing to do
    green       a stream whose kernels run on a fixed set of SMs, in whole units of 8; nothing else gets in the way
    shared      compute uses all SMs and gives them up soon: the longest of our kernels runs a program a tile instead
                of programs that hold their SMs, so DeepEP's kernels, of higher priority, are let in as tiles end; with
                few SMs for the all2all, which is then busy nearly always, torch's products are carved out beside

A library's product launches as many blocks as there are SMs, and each walks its share of the tiles: if DeepEP holds
some SMs, the blocks that found no room begin when the others end, and the product takes twice as long. A carve-out
mends that and costs SMs when no message is under way; only cuBLASLt's products heed it. DeepEP launches clusters of two
neighbours, which wait where the free SMs are single ones, so a carve-out of few SMs delays it. Measured on H200s
(benchmarks/results): shared is the fastest nearly everywhere.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from dbo.sm_partition import Setter, SMPartition
from moe.all2all.base import All2All

_UNIT = 8  # SMs in which a green context is cut
_FEW = 16  # SMs of an all2all that is busy less than half of the time


@functools.cache
def total_sms(device_index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def compute_sms(device: torch.device) -> int:
    """Multiprocessors that a compute kernel may fill now; on the CPU a small number, for Triton's interpreter."""
    if device.type != "cuda":
        return 4
    index = torch.cuda.current_device() if device.index is None else device.index
    return total_sms(index) - (torch._C._get_sm_carveout_experimental() or 0)


def set_compute_sms(num_sms: int | None) -> int | None:
    """A `dbo.sm_partition.Setter`: leave `num_sms` of the current device to compute (None = all); returns what was in
    force.
    """
    total = total_sms(torch.cuda.current_device())
    before = torch._C._get_sm_carveout_experimental()
    carved = None if num_sms is None or num_sms >= total else total - num_sms
    _prefer_cublaslt(carved is not None)
    torch._C._set_sm_carveout_experimental(carved)
    return None if before is None else total - before


_library_before: Any = None


def _prefer_cublaslt(preferred: bool) -> None:
    """While it is: plain products by cuBLASLt, which heeds a carve-out, as cuBLAS does not; then as it was."""
    global _library_before
    library = torch.backends.cuda.preferred_blas_library
    if preferred and _library_before is None:
        _library_before = library()
        library("cublaslt")
    elif not preferred and _library_before is not None:
        library(_library_before)
        _library_before = None


_shared: int | None = None


def shared_sms() -> int | None:
    """SMs that kernels may hold for long while the rest is shared; None = compute has all SMs to itself."""
    return _shared


def share_sms(num_sms: int | None) -> int | None:
    """A `dbo.sm_partition.Setter` for `shared_sms`."""
    global _shared
    before, _shared = _shared, num_sms
    return before


class GreenStream:
    """A `dbo.sm_partition.Setter`: while a number is in force, the current stream is one that runs on so many SMs, in
    whole units of 8, and `compute_sms` is that number (a persistent grid of more would run in two waves). What was
    queued on the stream before is waited for, and the other way round at the end.
    """

    def __init__(self) -> None:
        self._num_sms: int | None = None
        self._caller: torch.cuda.Stream | None = None
        self._carved: int | None = None  # what was in force for the caller
        self._streams: dict[int, tuple[Any, torch.cuda.Stream]] = {}  # with the contexts, which must outlive them

    def __call__(self, num_sms: int | None) -> int | None:
        """Put `num_sms` (None = the caller's own stream) into force; gives what was."""
        before, self._num_sms = self._num_sms, num_sms
        current = torch.cuda.current_stream()
        whole_units = None if num_sms is None else num_sms // _UNIT * _UNIT
        carved = set_compute_sms(self._carved if whole_units is None else whole_units)
        if before is None:
            self._caller, self._carved = current, carved
        chosen = self._caller if whole_units is None else self._stream(whole_units)
        if chosen is not None and chosen != current:
            chosen.wait_stream(current)
            torch.cuda.set_stream(chosen)
        return before

    def _stream(self, num_sms: int) -> torch.cuda.Stream:
        if num_sms not in self._streams:
            from torch.cuda.green_contexts import GreenContext

            context: Any = GreenContext.create(num_sms=num_sms, device_id=torch.cuda.current_device())
            self._streams[num_sms] = context, context.Stream()
        return self._streams[num_sms][1]


@functools.cache
def _green_stream() -> GreenStream:
    """The process's one: making a green context takes milliseconds."""
    return GreenStream()


def takes_sms(all2all: All2All, device: torch.device, num_tokens: int | None = None) -> bool:
    """Whether the transport runs on a number of SMs that somebody must choose; for (u)batches of at most `num_tokens`
    a rank, if given.
    """
    if device.type != "cuda" or not hasattr(all2all, "set_num_sms"):
        return False
    uses_sms = getattr(all2all, "uses_sms", None)
    return num_tokens is None or uses_sms is None or bool(uses_sms(num_tokens))


def whole_comm_sms(all2all: All2All, device: torch.device) -> int | None:
    """SMs of the transport where no partition says otherwise; None where it takes no number."""
    if not takes_sms(all2all, device):
        return None
    in_force: int = all2all.set_num_sms(None)  # type: ignore[attr-defined]
    return in_force


def set_whole_comm_sms(all2all: All2All, device: torch.device, num_sms: int) -> None:
    """Let the transport run on so many SMs where no partition says otherwise; nothing where it takes no number."""
    if takes_sms(all2all, device):
        all2all.set_num_sms(num_sms)  # type: ignore[attr-defined]


Form = Literal["shared", "carve", "green"]


def compute_setters(form: Form, comm_sms: int) -> list[Setter]:
    """What puts a number of SMs for compute into force beside so many for the all2all, in any form, for partitions of
    one's own (`SMPartition`)."""
    if form == "shared":
        return [share_sms, set_compute_sms] if comm_sms < _FEW else [share_sms]
    return [set_compute_sms if form == "carve" else _green_stream()]


def make_partition(
    all2all: All2All, comm_sms: int, device: torch.device, num_tokens: int | None = None
) -> AbstractContextManager[object]:
    """What to enter around a run of ubatches, of at most `num_tokens` a rank: `comm_sms` for the all2all, shared with
    compute; nothing where the all2all uses no fixed number of SMs. Raises ConfigError for a number it cannot take.
    """
    if not takes_sms(all2all, device, num_tokens):
        return nullcontext()
    set_comm_sms: Setter = all2all.set_num_sms  # type: ignore[attr-defined]
    return SMPartition(
        comm_sms=comm_sms,
        total_sms=total_sms(torch.cuda.current_device()),
        set_comm_sms=set_comm_sms,
        set_compute_sms=compute_setters("shared", comm_sms),
        multiple_of=2,
    )
