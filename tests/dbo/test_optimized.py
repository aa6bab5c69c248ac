"""The protocol keeps its promises under `python -O`, where every `assert` is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.dbo.toy import without_greenlet

SCRIPT = """
import torch
from dbo.config import DBOConfig
from dbo.errors import ConfigError, DBOError
from dbo.runner import UBatchRunner
from dbo.sm_partition import SMPartition
from dbo.context import note_layer, yield_turn
from dbo.work import Comm

if __debug__:
    raise SystemExit("not optimized")

def refused(call, *words):
    try:
        call()
    except ConfigError as error:
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
