"""The names of the package, in one place: `dbo.Vote` is `dbo.public.Vote`.

A file of its own because these imports load torch, which takes seconds: `dbo/__init__.py` waits for the first use of a
name, so that a command line which only needs `dbo.errors` can answer `--help` at once.
"""

from dbo.agreement import Agreement, BatchPlan, Reason, Vote
from dbo.config import DBOConfig
from dbo.context import (
    UBatchContext,
    current_ubatch,
    current_ubatch_id,
    dbo_enabled,
    maybe_run_recv_hook,
    note_layer,
    register_recv_hook,
    switch_to_comm,
    switch_to_comm_sync,
    switch_to_compute,
    switch_to_compute_sync,
    yield_and_switch_from_comm_to_compute,
    yield_and_switch_from_compute_to_comm,
    yield_turn,
)
from dbo.errors import AgreementError, ConfigError, DBOError, PeerFailed, StepTimeout, UBatchCancelled
from dbo.policy import make_policy
from dbo.runner import UBatchRunner
from dbo.slices import (
    Batch,
    UBatchSlice,
    by_request,
    by_token,
    derived,
    make_slices,
    pad_batch,
    ruled,
    shared,
    split_batch,
)
from dbo.sm_partition import SMPartition
from dbo.trace import Span, Tracer, chrome_trace, overlap_share, timeline
from dbo.work import Comm, Work

__all__ = [
    "Agreement",
    "AgreementError",
    "Batch",
    "BatchPlan",
    "Comm",
    "ConfigError",
    "DBOConfig",
    "DBOError",
    "PeerFailed",
    "Reason",
    "SMPartition",
    "Span",
    "StepTimeout",
    "Tracer",
    "UBatchCancelled",
    "UBatchContext",
    "UBatchRunner",
    "UBatchSlice",
    "Vote",
    "Work",
    "by_request",
    "by_token",
    "chrome_trace",
    "current_ubatch",
    "current_ubatch_id",
    "dbo_enabled",
    "derived",
    "make_policy",
    "make_slices",
    "maybe_run_recv_hook",
    "note_layer",
    "overlap_share",
    "pad_batch",
    "register_recv_hook",
    "ruled",
    "shared",
    "split_batch",
    "switch_to_comm",
    "switch_to_comm_sync",
    "switch_to_compute",
    "switch_to_compute_sync",
    "timeline",
    "yield_and_switch_from_comm_to_compute",
    "yield_and_switch_from_compute_to_comm",
    "yield_turn",
]
