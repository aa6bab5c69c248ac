import threading

import pytest

from dbo.errors import ConfigError, DBOError
from dbo.sm_partition import SMPartition
from tests.dbo.toy import Boom


class Setting:
    """A process-wide number of SMs, as a backend has one."""

    def __init__(self, value: int | None = None, *, refuses: int | None = None) -> None:
        self.value = value
        self.refuses = refuses

    def __call__(self, value: int | None) -> int | None:
        if value is not None and value == self.refuses:
            raise RuntimeError("refused")
        before, self.value = self.value, value
        return before


def fail(partition: SMPartition, settings: tuple[Setting, Setting]) -> None:
    with partition:
        assert tuple(setting.value for setting in settings) == (20, 112)
        raise Boom


def test_sets_and_restores_also_after_an_error() -> None:
    comm, compute = Setting(24), Setting(None)
    partition = SMPartition(comm_sms=20, total_sms=132, set_comm_sms=comm, set_compute_sms=compute)
    for _ in range(2):
        with pytest.raises(Boom):
            fail(partition, (comm, compute))
        assert (comm.value, compute.value) == (24, None)


def test_nests() -> None:
    comm, compute = Setting(), [Setting(), Setting()]
    with SMPartition(comm_sms=20, total_sms=132, set_comm_sms=comm, set_compute_sms=compute):
        with SMPartition(comm_sms=8, total_sms=132, set_comm_sms=comm, set_compute_sms=compute):
            assert [comm.value, *(c.value for c in compute)] == [8, 124, 124]
        assert [comm.value, *(c.value for c in compute)] == [20, 112, 112]
    assert [comm.value, *(c.value for c in compute)] == [None, None, None]


def test_the_same_partition_nests_in_itself() -> None:
    comm = Setting(24)
    partition = SMPartition(comm_sms=20, total_sms=132, set_comm_sms=comm)
    with partition:
        with partition:
            assert comm.value == 20
        assert comm.value == 20
    assert comm.value == 24
    entered: list[int | None] = []

    def other() -> None:
        with partition:
            entered.append(comm.value)

    thread = threading.Thread(target=other)  # the process-wide lock is free again
    thread.start()
    thread.join()
    assert entered == [20]


def test_a_setter_that_fails_leaves_nothing_set() -> None:
    comm, compute = Setting(6), Setting(refuses=112)
    partition = SMPartition(comm_sms=20, total_sms=132, set_comm_sms=comm, set_compute_sms=compute)
    with pytest.raises(RuntimeError, match="refused"), partition:
        pass
    assert comm.value == 6
    compute.refuses = None
    with partition:  # and the process-wide lock is free again
        assert compute.value == 112


def test_zero_sets_nothing() -> None:
    comm = Setting(6)
    with SMPartition(comm_sms=0, total_sms=132, set_comm_sms=comm):
        assert comm.value == 6


@pytest.mark.parametrize(
    ("comm_sms", "words"), [(132, "0 to 131"), (200, "0 to 131"), (-2, "0 to 131"), (7, "multiple of 2; use 6 or 8")]
)
def test_refuses_impossible_counts(comm_sms: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SMPartition(comm_sms=comm_sms, total_sms=132, set_comm_sms=Setting(), multiple_of=2)


def test_one_thread_at_a_time() -> None:
    partition = SMPartition(comm_sms=2, total_sms=4, set_comm_sms=Setting())
    refused: list[str] = []

    def other() -> None:
        try:
            with SMPartition(comm_sms=2, total_sms=4, set_comm_sms=Setting()):
                pass
        except DBOError as error:
            refused.append(str(error))

    with partition:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert refused
    assert "another thread" in refused[0]
