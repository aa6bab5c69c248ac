from __future__ import annotations

import contextvars
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from dbo.context import current_ubatch, current_ubatch_id, note_layer, yield_turn
from dbo.errors import ConfigError, DBOError, StepTimeout, UBatchCancelled
from dbo.runner import UBatchRunner
from dbo.trace import Tracer
from dbo.work import Comm
from tests.dbo.toy import CPU, KINDS, LABELS, NUM_LAYERS, Boom, Toy, assert_right, both_drivers, expected, items, points

all_sizes = pytest.mark.parametrize("num", [2, 3, 4, 8])


@pytest.fixture
def make() -> Iterator[Callable[..., UBatchRunner]]:
    made: list[UBatchRunner] = []

    def make(num: int, driver: str, **options: Any) -> UBatchRunner:
        made.append(UBatchRunner(num, device=CPU, driver=driver, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@both_drivers
@all_sizes
def test_same_bits_whatever_the_order(make: Callable[..., UBatchRunner], driver: str, num: int) -> None:
    runner = make(num, driver)
    for interleave in (True, False):
        for count in (num, 1):
            got = runner.run(Toy(), items(count), interleave=interleave)
            assert all(torch.equal(a, b) for a, b in zip(got, expected(count), strict=True))


@both_drivers
def test_turns_go_round_in_order(make: Callable[..., UBatchRunner], driver: str) -> None:
    log: list[tuple[int, int]] = []

    def fn(num_yields: int) -> int:
        for n in range(num_yields):
            log.append((n, current_ubatch_id()))
            yield_turn("here")
        return num_yields

    runner = make(3, driver)
    assert runner.run(fn, [2, 2, 2]) == [2, 2, 2]
    assert log == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    log.clear()
    assert runner.run(fn, [2, 2, 2], interleave=False) == [2, 2, 2]
    assert log == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


@both_drivers
@pytest.mark.parametrize("yields", [[4, 6], [6, 4], [0, 5], [5, 0], [0, 0], [3, 0, 5, 1], [1, 7, 0]])
def test_unequal_yields_and_early_returns(make: Callable[..., UBatchRunner], driver: str, yields: list[int]) -> None:
    seen: list[int] = []

    def fn(num_yields: int) -> int:
        for _ in range(num_yields):
            yield_turn("here")
            seen.append(current_ubatch_id())
        return num_yields

    assert make(len(yields), driver).run(fn, yields) == yields
    assert [seen.count(k) for k in range(len(yields))] == yields


@both_drivers
@pytest.mark.parametrize("num", [1, 3])
def test_a_model_may_return_anything(make: Callable[..., UBatchRunner], driver: str, num: int) -> None:
    """One result a ubatch, the very object: nothing is unpacked, copied, merged or mistaken for a list of results."""

    class Output(NamedTuple):
        hidden: torch.Tensor
        aux: dict[str, Any]

    runner, one = make(3, driver), torch.ones(2)
    for made in (one, (one, one), [one], {"hidden": one}, Output(one, {"losses": [one]}), iter([one]), None):

        def fn(k: int, made: Any = made) -> Any:
            yield_turn("here")
            return made

        got = runner.run(fn, range(num))
        assert type(got) is list
        assert len(got) == num
        assert all(result is made for result in got)


@both_drivers
@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("order", ["early", "late"])
def test_an_error_at_every_point(make: Callable[..., UBatchRunner], driver: str, num: int, order: str) -> None:
    runner = make(num, driver, rank=3)
    for ubatch in range(num):
        for layer, label, kind in points():
            toy = Toy(comm=Comm(CPU, order=order))  # type: ignore[arg-type]

            def inject(*here: Any, at: tuple[Any, ...] = (ubatch, layer, label, kind)) -> None:
                if here == at:
                    raise Boom(str(at))

            toy.inject = inject
            with pytest.raises(Boom, match=f"{ubatch}, {layer}, '{label}', '{kind}'") as caught:
                runner.run(toy, items(num))
            (note,) = caught.value.__notes__
            assert note.startswith(f"rank 3, ubatch {ubatch} of {num}, layer {layer}, ")
            assert note.endswith(_last_yield_point(order, layer, label, kind))
            assert not toy.entered, "a finally block did not run"
            assert current_ubatch() is None
    assert_right(runner, num)


def _last_yield_point(order: str, layer: int, label: str, kind: str) -> str:
    yielded = kind == "finish" or (kind == "launch" and order == "late")
    before = layer * 2 + LABELS.index(label) + yielded
    return f"last yield point {LABELS[(before - 1) % 2]!r}" if before else "no yield point yet"


@both_drivers
def test_the_runner_works_after_every_error(make: Callable[..., UBatchRunner], driver: str) -> None:
    runner = make(2, driver)
    for error in (Boom(), KeyboardInterrupt(), SystemExit(3), GeneratorExit()):

        def fn(x: int, error: BaseException = error) -> None:
            yield_turn("here")
            if x:
                raise error

        with pytest.raises(type(error)) as caught:
            runner.run(fn, [0, 1])
        assert caught.value is error
        assert_right(runner, 2)


@both_drivers
def test_the_first_error_wins_and_later_ones_are_noted(make: Callable[..., UBatchRunner], driver: str) -> None:
    def fn(k: int) -> None:
        try:
            yield_turn("here")
            if k == 0:
                raise Boom("first")
        finally:
            if k == 1:
                raise ValueError("second")

    with pytest.raises(Boom, match="first") as caught:
        make(2, driver).run(fn, [0, 1])
    where, stopping = caught.value.__notes__
    assert "ubatch 0 of 2" in where
    assert "while stopping" in stopping
    assert "ubatch 1 of 2" in stopping
    assert "second" in stopping


class _Unspeakable(Exception):
    def __repr__(self) -> str:
        raise ValueError("no words")

    def add_note(self, note: str) -> None:
        raise ValueError("no notes")


@both_drivers
@pytest.mark.parametrize("first", [Boom, _Unspeakable])
def test_an_error_that_cannot_be_described_stops_no_unwinding(
    make: Callable[..., UBatchRunner], driver: str, first: type[Exception]
) -> None:
    def fn(k: int) -> None:
        try:
            yield_turn("here")
            raise first
        finally:
            if k == 1:
                raise _Unspeakable

    runner = make(2, driver, step_timeout_s=5)
    with pytest.raises(first) as caught:
        runner.run(fn, [0, 1])
    where, stopping = caught.value.__notes__
    assert "ubatch 0 of 2" in where
    assert stopping.endswith("_Unspeakable")
    assert_right(runner, 2)


@both_drivers
def test_siblings_see_a_cancellation_that_model_code_cannot_swallow(
    make: Callable[..., UBatchRunner], driver: str
) -> None:
    seen: list[str] = []

    def fn(k: int) -> None:
        if k == 0:
            yield_turn("here")
            raise Boom
        for _ in range(3):
            try:
                yield_turn("there")
            except Exception:
                seen.append("swallowed")
            except UBatchCancelled:
                seen.append("cancelled")  # and goes on: the next yield stops it again

    with pytest.raises(Boom):
        make(2, driver).run(fn, [0, 1])
    assert seen == ["cancelled"] * 3


@both_drivers
def test_a_ubatch_that_had_not_started_does_not_start(make: Callable[..., UBatchRunner], driver: str) -> None:
    started: list[int] = []

    def fn(k: int) -> None:
        started.append(k)
        raise Boom

    with pytest.raises(Boom):
        make(3, driver).run(fn, [0, 1, 2])
    assert started == [0]


@both_drivers
@pytest.mark.parametrize("where", ["compute", "wait"])
def test_ctrl_c_in_the_caller(make: Callable[..., UBatchRunner], driver: str, where: str) -> None:
    """A signal arrives while the caller is parked (threads) or computes (greenlets): everybody stops, in order."""
    comm, ended = Comm(CPU), []

    def fn(k: int) -> None:
        try:
            for n in range(2000):
                note_layer(n)
                if k == 0 and n == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                if where == "wait":
                    comm.wait_host(_FakeWork(after_s=0.001))  # type: ignore[arg-type]
                else:
                    time.sleep(0.001)
                yield_turn("here")
        finally:
            ended.append(k)

    runner = make(2, driver)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a shell started us with `&`
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            runner.run(fn, [0, 1])
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 2
    assert sorted(ended) == [0, 1]
    assert "ubatch 0 of 2" in caught.value.__notes__[0]
    assert_right(runner, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that hits a callback of the gc
@both_drivers
def test_an_interrupt_at_any_moment(make: Callable[..., UBatchRunner], driver: str) -> None:
    """Also between two ubatches, in the code of the runner and the driver themselves: no step is half done after it."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupt

    def fn(k: int) -> int:
        yield_turn("here")
        return k

    runner, rng, outcomes = make(3, driver), random.Random(0), {"interrupted": 0, "done": 0}
    before = signal.signal(signal.SIGALRM, interrupt)
    start = time.monotonic()
    try:
        while time.monotonic() < start + (1.5 if min(outcomes.values()) > 10 else 30):  # a busy host needs longer
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 3e-4))
                got = runner.run(fn, [0, 1, 2])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                outcomes["interrupted"] += 1
                assert_right(runner, 3)
            else:
                outcomes["done"] += 1
                assert got == [0, 1, 2]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert min(outcomes.values()) > 10


class _FakeWork:
    """Stands for a gloo collective that takes `after_s`."""

    def __init__(self, *, after_s: float) -> None:
        self._end = time.monotonic() + after_s

    def is_completed(self) -> bool:
        return time.monotonic() >= self._end

    def wait(self, limit: Any = None) -> bool:
        left = self._end - time.monotonic()
        if limit is not None and left > limit.total_seconds():
            time.sleep(limit.total_seconds())
            raise RuntimeError("Operation timed out!")
        time.sleep(max(0.0, left))
        return True


@both_drivers
def test_a_wait_that_never_ends_runs_into_the_step_limit(make: Callable[..., UBatchRunner], driver: str) -> None:
    comm, ended = Comm(CPU), []

    def fn(k: int) -> None:
        try:
            note_layer(5 + k)
            yield_turn("dispatch")
            if k == 1:
                comm.wait_host(_FakeWork(after_s=60))  # type: ignore[arg-type]
            yield_turn("combine")
        finally:
            ended.append(k)

    runner = make(2, driver, step_timeout_s=0.2, rank=1)
    start = time.monotonic()
    with pytest.raises(StepTimeout) as caught:
        runner.run(fn, [0, 1])
    assert time.monotonic() - start < 2
    assert sorted(ended) == [0, 1]
    told = str(caught.value) + "".join(caught.value.__notes__)
    assert "rank 1" in told
    assert "ubatch 0 of 2, layer 5, last yield point 'combine'" in told
    assert "ubatch 1 of 2, layer 6, last yield point 'dispatch'" in told
    assert_right(runner, 2)


@both_drivers
def test_compute_that_takes_too_long_is_stopped_at_its_next_yield(
    make: Callable[..., UBatchRunner], driver: str
) -> None:
    def fn(k: int) -> None:
        for n in range(1000):
            note_layer(n)
            time.sleep(0.01)
            yield_turn("here")

    runner = make(2, driver, step_timeout_s=0.1)
    start = time.monotonic()
    with pytest.raises(StepTimeout) as caught:
        runner.run(fn, [0, 1])
    assert time.monotonic() - start < 2
    assert "last yield point 'here'" in str(caught.value) + "".join(caught.value.__notes__)
    assert_right(runner, 2)


def test_a_thread_that_does_not_come_back(make: Callable[..., UBatchRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller is told within the limit; the runner refuses work while the ubatch is out, and works afterwards."""
    monkeypatch.setattr("dbo.runner._UNWIND_S", 0.1)
    come_back = threading.Event()

    def fn(k: int) -> None:
        yield_turn("dispatch")
        if k == 0:
            come_back.wait(20)
        yield_turn("combine")

    runner = make(2, "threads", step_timeout_s=0.1)
    with pytest.raises(StepTimeout):
        runner.run(fn, [0, 1])
    with pytest.raises(DBOError, match="has not come back yet: rank 0: ubatch 0 of 2"):
        runner.run(fn, [0, 1])
    come_back.set()
    deadline = time.monotonic() + 5
    while not runner._driver.settle(0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert_right(runner, 2)


def test_a_thread_that_comes_back_after_the_runner_was_closed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbo.runner._UNWIND_S", 0.1)
    before, come_back = threading.active_count(), threading.Event()

    def fn(k: int) -> None:
        yield_turn("dispatch")
        come_back.wait(20)

    with (
        pytest.raises(StepTimeout),
        UBatchRunner(3, device=CPU, driver="threads", step_timeout_s=0.1) as runner,
    ):
        runner.run(fn, [0, 1, 2])
    come_back.set()
    deadline = time.monotonic() + 5
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@both_drivers
def test_refusals(make: Callable[..., UBatchRunner], driver: str) -> None:
    runner, other = make(2, driver), make(2, driver)
    with pytest.raises(DBOError, match="a run inside a run") as caught:
        runner.run(lambda x: runner.run(lambda y: y, [1, 2]), [1, 2])
    assert "ubatch 0 of 2" in caught.value.__notes__[0]
    with pytest.raises(DBOError, match="a run inside a run"):
        runner.run(lambda x: other.run(lambda y: y, [1, 2]), [1, 2])
    for wrong in ([], [1, 2, 3]):
        with pytest.raises(ConfigError, match="1 to 2"):
            runner.run(lambda x: x, wrong)
    assert_right(runner, 2)
    assert_right(other, 2)
    runner.close()
    runner.close()
    with pytest.raises(DBOError, match="closed"):
        runner.run(lambda x: x, [1])


def test_refuses_wrong_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="num_ubatches=0"):
        UBatchRunner(0, device=CPU)
    with pytest.raises(ConfigError, match=r"driver='fibres'.*threads or greenlet"):
        UBatchRunner(2, device=CPU, driver="fibres")  # type: ignore[arg-type]
    for limit_s in (-1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=f"step_timeout_s={limit_s}"):
            UBatchRunner(2, device=CPU, step_timeout_s=limit_s)
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(DBOError, match="pip install greenlet"):
        UBatchRunner(2, device=CPU, driver="greenlet")


_variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def _thread_local_state() -> dict[str, Any]:
    import torch._dynamo.config

    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "num threads": torch.get_num_threads(),
        "variable": _variable.get(),
        "function modes": _get_current_function_mode_stack(),
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "compiler": torch._dynamo.config.cache_size_limit,
        "product": (torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")).dtype,
    }


def _compiler_patch() -> AbstractContextManager[Any]:
    import torch._dynamo.config

    return torch._dynamo.config.patch(cache_size_limit=3)


def _compiler_configuration_is_the_process() -> bool:
    import torch._dynamo.config

    seen: list[int] = []
    with _compiler_patch():
        thread = threading.Thread(target=lambda: seen.append(torch._dynamo.config.cache_size_limit))
        thread.start()
        thread.join()
    return seen == [3]


@contextmanager
def _autocast_that_is_off() -> Iterator[None]:
    """No effect until somebody turns it on."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", before)


class _CountingFunctions(TorchFunctionMode):
    """Counts calls of functions of torch, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


class _CountingOperators(TorchDispatchMode):
    """Counts operators, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


_STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "device": lambda: torch.device("meta"),
    "compiler": _compiler_patch,
    "function mode": _CountingFunctions,
    "dispatch mode": _CountingOperators,
    "fake tensors": FakeTensorMode,
}
_CALLERS = _STATES | {"autocast that is off": _autocast_that_is_off}


@both_drivers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("outer", _CALLERS)
def test_ubatches_have_the_callers_state(make: Callable[..., UBatchRunner], driver: str, outer: str) -> None:
    runner = make(2, driver)

    def fn(k: int) -> list[dict[str, Any]]:
        before = _thread_local_state()
        yield_turn("here")
        return [before, _thread_local_state()]

    token = _variable.set("the caller's")
    torch.set_default_dtype(torch.float64)
    try:
        with _CALLERS[outer]():
            state = _thread_local_state()
            assert runner.run(fn, [0, 1]) == [[state, state], [state, state]]
        state = _thread_local_state()
        assert runner.run(fn, [0, 1]) == [[state, state], [state, state]]
    finally:
        _variable.reset(token)
        torch.set_default_dtype(torch.float32)


@both_drivers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inner", _STATES)
@pytest.mark.parametrize("outer", ["plain", "inference", "autocast", "device", "dispatch mode", "fake tensors"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_state_that_spans_a_yield_stays_in_its_ubatch(
    make: Callable[..., UBatchRunner], driver: str, outer: str, inner: str, fails: bool
) -> None:
    if inner == "compiler" and _compiler_configuration_is_the_process():
        pytest.skip("this torch keeps the compiler's configuration for the whole process")
    runner = make(3, driver)

    def fn(k: int) -> bool:
        base = _thread_local_state()
        yield_turn("a")
        with _STATES[inner]() if k == 0 else torch.no_grad() if k == 2 else nullcontext():
            _variable.set(f"of ubatch {k}")
            mine = _thread_local_state()
            for _ in range(3):
                yield_turn("b")
                assert _thread_local_state() == mine
        assert _thread_local_state() == base | {"variable": f"of ubatch {k}"}
        if fails and k == 1:
            raise Boom
        return True

    with _STATES[outer]():
        before = _thread_local_state()
        if fails:
            with pytest.raises(Boom):
                runner.run(fn, [0, 1, 2])
        else:
            assert runner.run(fn, [0, 1, 2]) == [True] * 3
        assert _thread_local_state() == before


@both_drivers
@pytest.mark.parametrize("mode", [_CountingFunctions, _CountingOperators])
def test_a_mode_of_the_caller_sees_what_its_ubatches_do(
    make: Callable[..., UBatchRunner], driver: str, mode: type[_CountingFunctions | _CountingOperators]
) -> None:
    runner, toy, inputs = make(3, driver), Toy(), items(3)
    with mode() as alone:
        for x in inputs:
            toy(x)
    for interleave in (True, False):
        with mode() as seen:
            runner.run(toy, inputs, interleave=interleave)
        runner.run(toy, inputs)  # it is not on any more
        assert seen.num_calls == alone.num_calls > 0


@both_drivers
def test_a_mode_of_one_ubatch_does_not_see_its_siblings(make: Callable[..., UBatchRunner], driver: str) -> None:
    modes = [_CountingOperators() for _ in range(3)]

    def fn(k: int) -> None:
        x = torch.ones(2)
        with modes[k]:
            for _ in range(k + 1):
                x = x + 1
                yield_turn("here")

    make(3, driver).run(fn, [0, 1, 2])
    assert [mode.num_calls for mode in modes] == [1, 2, 3]


@both_drivers
def test_flops_are_counted_and_fake_tensors_stay_fake(make: Callable[..., UBatchRunner], driver: str) -> None:
    runner, layer = make(2, driver), torch.nn.Linear(8, 4, bias=False)

    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            y = layer(x)
            yield_turn("here")
        return y

    with FlopCounterMode(display=False) as counter:
        runner.run(fn, [torch.ones(3, 8), torch.ones(5, 8)])
    assert counter.get_total_flops() == 2 * (3 + 5) * 2 * 8 * 4
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = runner.run(lambda k: (yield_turn("here"), torch.ones(k, 2) + 1)[1], [3, 5])
    assert [(type(y), y.shape) for y in made] == [(FakeTensor, (3, 2)), (FakeTensor, (5, 2))]


@both_drivers
@pytest.mark.parametrize("fails", [False, True])
def test_a_state_that_is_set_outright_ends_with_its_ubatch(
    make: Callable[..., UBatchRunner], driver: str, fails: bool
) -> None:
    runner = make(2, driver)

    def fn(k: int) -> bool:
        seen = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        if fails and k == 1:
            raise Boom
        return seen

    for _ in range(2):
        if fails:
            with pytest.raises(Boom):
                runner.run(fn, [0, 1])
        else:
            assert runner.run(fn, [0, 1]) == [True, True]
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")


@both_drivers
def test_two_runners_in_one_process(make: Callable[..., UBatchRunner], driver: str) -> None:
    runners = [make(n, driver) for n in (2, 3)]
    for _ in range(3):
        for runner in runners:
            assert_right(runner, runner.num_ubatches)


@both_drivers
def test_two_runners_in_two_threads(driver: str) -> None:
    errors: list[BaseException] = []

    def use(num: int) -> None:
        try:
            with UBatchRunner(num, device=CPU, driver=driver) as runner:  # type: ignore[arg-type]
                for _ in range(30):
                    assert_right(runner, num)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(n,)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@both_drivers
def test_called_from_other_threads_than_before(make: Callable[..., UBatchRunner], driver: str) -> None:
    runner, num_right = make(2, driver), [0]

    def use() -> None:
        assert_right(runner, 2)
        num_right[0] += 1

    use()
    for _ in range(5):  # one after another, so that they get the same number from the system
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    use()
    assert num_right == [7]


@both_drivers
def test_one_step_at_a_time_whoever_asks(make: Callable[..., UBatchRunner], driver: str) -> None:
    runner, right, wrong = make(2, driver, step_timeout_s=5), [0], []

    def fn(k: int) -> int:
        yield_turn("here")
        return k

    def use() -> None:
        for _ in range(500):
            try:
                assert runner.run(fn, [0, 1]) == [0, 1]
                right[0] += 1
            except DBOError as error:
                if "one step at a time" not in str(error):
                    wrong.append(repr(error))
            except BaseException as error:
                wrong.append(repr(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert right[0] > 0
    assert_right(runner, 2)


@both_drivers
def test_a_runner_is_not_closed_under_its_step(make: Callable[..., UBatchRunner], driver: str) -> None:
    runner = make(2, driver)
    with pytest.raises(DBOError, match="cannot be closed while it runs") as caught:
        runner.run(lambda k: runner.close(), [0, 1])
    assert "ubatch 0 of 2" in caught.value.__notes__[0]
    assert_right(runner, 2)


def test_a_limit_beyond_what_the_system_can_wait(make: Callable[..., UBatchRunner]) -> None:
    assert_right(make(2, "threads", step_timeout_s=1e12), 2)


@both_drivers
def test_a_dropped_runner_ends_its_threads(driver: str) -> None:
    before = threading.active_count()
    runner = UBatchRunner(4, device=CPU, driver=driver)  # type: ignore[arg-type]
    assert_right(runner, 4)
    del runner
    gc.collect()
    assert threading.active_count() == before


@both_drivers
@pytest.mark.parametrize("order", ["early", "late"])
def test_launch_comes_before_the_siblings_compute_ends(
    make: Callable[..., UBatchRunner], driver: str, order: str
) -> None:
    """Early: ubatch 0 has launched before ubatch 1 computes. Late: its ready point was taken before, at least."""
    toy = Toy()
    toy.comm = Comm(CPU, order=order, make_ready=lambda: toy.log.append(("ready", current_ubatch_id())))  # type: ignore[arg-type]
    tracer = Tracer(CPU)
    make(2, driver, tracer=tracer).run(toy, items(2))
    first = ("launch" if order == "early" else "ready", 0)
    assert [entry[:2] for entry in toy.log].index(first) < [entry[:2] for entry in toy.log].index(("compute", 1))
    sent = next(s for s in tracer.spans() if s.lane == "comm" and s.ubatch == 0)
    sibling = next(s for s in tracer.spans() if s.lane == "compute" and s.ubatch == 1)
    assert (sent.t0 < sibling.t1) is (order == "early")
    assert (sent.t1 > sibling.t1) is True


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@both_drivers
@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_errors_leak_nothing(make: Callable[..., UBatchRunner], driver: str, count: int) -> None:
    runner, rng = make(4, driver), random.Random(count)

    def once() -> None:
        num, at = rng.randint(2, 4), (rng.randrange(NUM_LAYERS), rng.choice(LABELS), rng.choice(KINDS))
        victim = rng.randrange(num)

        def inject(ubatch: int, *here: Any) -> None:
            if ubatch == victim and here == at:
                raise rng.choice([Boom, KeyboardInterrupt, SystemExit])

        with pytest.raises((Boom, KeyboardInterrupt, SystemExit)):
            runner.run(Toy(inject=inject), [torch.ones(4096) for _ in range(num)])
        assert_right(runner, num)

    for _ in range(50):
        once()
    gc.collect()
    threads, files, memory = threading.active_count(), _num_files(), _resident_bytes()
    for _ in range(count):
        once()
    gc.collect()
    assert threading.active_count() == threads
    assert _num_files() == files
    assert _resident_bytes() - memory < 5 << 20


@both_drivers
def test_a_failed_step_keeps_no_tensor(make: Callable[..., UBatchRunner], driver: str) -> None:
    runner, kept = make(2, driver), []

    def fn(x: torch.Tensor) -> None:
        y = x + 1
        kept.append(weakref.ref(y))
        yield_turn("here")
        raise Boom

    with pytest.raises(Boom):
        runner.run(fn, items(2))
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
