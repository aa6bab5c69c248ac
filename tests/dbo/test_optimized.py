"""The protocol keeps its promises under `python -O`, where every `assert` is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.dbo.toy import without_greenlet

SCRIPT = """
from dataclasses import dataclass
import numpy as np
import torch
from dbo.agreement import Agreement, Vote
from dbo.config import DBOConfig
from dbo.errors import AgreementError, ConfigError, DBOError
from dbo.policy import make_policy
from dbo.runner import UBatchRunner
from dbo.slices import Batch, by_token, make_slices, pad_batch, ruled, split_batch
from dbo.sm_partition import SMPartition
from dbo.context import note_layer, yield_turn
from dbo.work import Comm

if __debug__:
    raise SystemExit("not optimized")

def refused(call, *words, kind=ConfigError):
    try:
        call()
    except kind as error:
        for word in words:
            if word not in str(error):
                raise SystemExit(f"{word!r} is not in {error}")
    else:
        raise SystemExit(f"accepted, expected {words}")

cpu = torch.device("cpu")
refused(lambda: UBatchRunner(0, device=cpu), "num_ubatches=0")
refused(lambda: UBatchRunner(2, device=cpu, driver="x"), "driver='x'")
refused(lambda: Comm(cpu, order="x"), "order='x'")
refused(lambda: SMPartition(comm_sms=4, total_sms=4, set_comm_sms=lambda n: n), "comm_sms=4")
refused(lambda: SMPartition(comm_sms=3, total_sms=4, set_comm_sms=lambda n: n, multiple_of=2), "comm_sms=3")
refused(lambda: DBOConfig(num_ubatches=0), "num_ubatches=0")

config = DBOConfig(overlap="on", prefill_token_threshold=0, allow_single_rank=True)
policy = make_policy(config)
refused(lambda: Agreement(None, dp_rank=0, dp_size=2, config=config, policy=policy), "need a", kind=AgreementError)
agreement = Agreement(None, dp_rank=0, dp_size=1, config=config, policy=policy)
pending = agreement.issue(Vote(num_tokens=8))
refused(lambda: agreement.issue(Vote(num_tokens=8)), "one step, one vote", kind=AgreementError)
plan = pending.result()

@dataclass
class Tokens(Batch):
    ids: torch.Tensor = ruled(by_token())

def forget():
    class Forgetful(Tokens):
        more: torch.Tensor

refused(forget, "Forgetful.more", kind=TypeError)
refused(lambda: make_slices(plan, np.array([9])), "pads to 8", kind=ValueError)
refused(lambda: make_slices(plan, np.array([8, 0])), "must be positive", kind=ValueError)
refused(lambda: pad_batch(Tokens(torch.ones(9)), 8), "more than the 8", kind=ValueError)
slices = make_slices(plan, np.array([8]))
refused(lambda: split_batch(Tokens(torch.ones(7)), slices), "pad_batch first", kind=ValueError)

def fn(item):
    k, num_yields, fails_at = item
    for n in range(num_yields):
        note_layer(n)
        if n == fails_at:
            raise ValueError(f"{k} at {n}")
        yield_turn("dispatch")
    return k

for driver in ("threads", "greenlet"):
    with UBatchRunner(3, device=cpu, driver=driver) as runner:
        refused(lambda: runner.run(fn, []), "items=0")
        for k in range(3):
            for at in range(4):
                items = [(j, 4 + j, at if j == k else None) for j in range(3)]
                try:
                    runner.run(fn, items)
                except ValueError as error:
                    if f"{k} at {at}" != str(error) or f"ubatch {k} of 3, layer {at}" not in error.__notes__[0]:
                        raise SystemExit(f"{error} {error.__notes__}")
                else:
                    raise SystemExit("no error")
                if runner.run(fn, [(j, j, None) for j in range(3)]) != [0, 1, 2]:
                    raise SystemExit("wrong result")
        try:
            runner.run(lambda x: runner.run(fn, [(0, 0, None)]), [1, 2])
        except DBOError:
            pass
        else:
            raise SystemExit("a run inside a run was accepted")
print("ok")
"""


@without_greenlet
def test_the_protocol_without_asserts() -> None:
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONOPTIMIZE": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stdout + done.stderr
