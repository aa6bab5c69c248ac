"""`calibrate`: what steps cost here, whole and overlapped, and what they are made of, in two minutes.

Its own file because it is an experiment around the engine, as `ab` is: real steps of an engine that is loaded once, of
chosen sizes instead of a workload's. In order:

    parts     a layer's attention, experts and messages, each alone (`launch.parts`)
    sizes     every size once, ascending, in every arm: warm-up, and how many sizes fit into the time there is
    rounds    every size, in random order, all arms side by side in random order, as often as time allows
    skew      one size with unequal ranks: does the largest decide, or the mean?

Invariants: every decision that depends on time is rank 0's and shared, so ranks measure the same things in the same
order; a step's time is the slowest rank's, without the wait for votes.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from dbo.agreement import BatchPlan
from dbo.config import DBOConfig
from dbo.errors import ConfigError
from dbo.policy import PROBE_OVERLAP, PROBE_WHOLE, Probes
from launch.auto import setup_of
from launch.cli import FAILED, CommandError
from launch.config import CalibrateOptions
from launch.engine import Engine, RunResult
from launch.environment import describe_environment
from launch.fit import fit_rest, measured_link, skew_of
from launch.log import set_up_logging
from launch.mesh import Mesh
from launch.parts import (
    REPEATS,
    AttentionBench,
    ExpertBench,
    MessageTimes,
    cost_of,
    measure_messages,
    phase_lens,
)
from launch.predict import Shape
from launch.profile import (
    PHASES,
    Copies,
    Cost,
    ExpertCosts,
    LayerCosts,
    Phase,
    PhaseSteps,
    Profile,
    Series,
    check_out,
    write_profile,
)
from launch.sampling import SamplingParams
from launch.scheduler import Limits, Request
from launch.session import (
    Resolved,
    banner,
    gather,
    load_engine,
    log_failure,
    model_of,
    resolve,
    shared_options,
    together,
)
from moe.sms import make_partition, takes_sms

PARTS_SHARE = 0.35  # of the time
LEAST_ROUNDS = 3
FIRST_TIME = 3.0  # times as long as the size before it: more than its tokens explain
SPLIT_ROUNDS = 3  # the arm that decides nothing
DECODE_STEPS = 4  # of each arm in one measurement
UNEVEN = 0.6  # tokens of the other ranks over rank 0's, to measure skew
COPIES: Mapping[str, Mapping[Phase, Copies]] = {
    "deepep_ll": {"prefill": "expert", "decode": "expert"},
    "deepep_ht": {"prefill": "node", "decode": "node"},
    "deepep": {"prefill": "node", "decode": "expert"},
}

Arm = Literal["whole", "split", "overlap"]


def run(options: CalibrateOptions) -> int:
    """Run the command on this rank; returns the exit code."""
    if options.shape is not None:  # a shape has no weights on disk
        options = replace(options, load_format="dummy")
    with Mesh.start(device=options.device) as mesh:
        set_up_logging(options.log_level, mesh.rank)
        mesh.peers.compare_options(shared_options(options))
        model = together(mesh, "config", lambda: model_of(options))
        resolved = together(mesh, "limits", lambda: _study(resolve(options, model)))
        grids = together(mesh, "grids", lambda: {phase: grid(phase, options, resolved.limits) for phase in PHASES})
        together(mesh, "out", lambda: check_out(options.out) if mesh.rank == 0 else None)
        source = resolved.model if options.load_format == "dummy" else Path(str(options.model))
        engine = load_engine(options, resolved, mesh, model=source)
        if mesh.rank == 0:
            for line in banner(options, resolved, engine)[:-1]:  # the last one is about thresholds
                logging.info(line)
        try:
            choices = together(mesh, "comm sms", lambda: comm_sms_choices(options, engine, resolved.dbo))
            with mesh.peers.guard():
                profile = Calibration(engine, resolved.dbo, options, grids, choices).run()
        except (ConfigError, CommandError):
            raise
        except Exception as error:
            log_failure(mesh, error)
            return FAILED
        finally:
            engine.close()
        together(mesh, "write", lambda: write_profile(profile, Path(options.out)) if mesh.rank == 0 else None)
        if mesh.rank == 0:
            print(json.dumps(profile.to_json()) if options.json else describe(profile), flush=True)
            logging.info("profile: %s", options.out)
        return 0


def _study(resolved: Resolved) -> Resolved:
    """The settings to measure with: both arms must be possible for any size, on one rank too."""
    dbo = replace(resolved.dbo, overlap="on", allow_single_rank=True, interleave=True)
    return replace(resolved, dbo=dbo)


def grid(phase: Phase, options: CalibrateOptions, limits: Limits) -> tuple[int, ...]:
    """The sizes to measure, ascending. Raises ConfigError for those that no step can have."""
    name, text, most = "--prefill-tokens", options.prefill_tokens, limits.max_num_tokens
    longest = min(options.prompt_tokens, limits.max_request_tokens)
    if phase == "decode":
        name, text = "--decode-tokens", options.decode_tokens
        most = min(limits.max_num_seqs, limits.max_num_tokens, limits.num_blocks)
    else:
        blocks_each = -(-longest // limits.block_size)
        most = min(most, limits.max_num_seqs * longest, max(limits.num_blocks // blocks_each, 1) * longest)
    least = options.num_ubatches
    if text == "auto":
        sizes = [2**i for i in range(1, 20) if (32 if phase == "prefill" else least) <= 2**i <= most]
        return tuple(sizes) or (most,)
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(name, text, "numbers such as 64,256,1024, or auto", "") from None
    if sizes[0] < least or sizes[-1] > most:
        raise ConfigError(name, text, f"{least} to {most}, what a step can hold", "see --max-num-tokens")
    return tuple(sizes)


def comm_sms_choices(options: CalibrateOptions, engine: Engine, dbo: DBOConfig) -> tuple[int, ...]:
    """The numbers of SMs to try; the settings' own where there is no choice. Raises ConfigError."""
    has_choice = engine.mesh.device.type == "cuda" and hasattr(engine.all2all, "set_num_sms")
    if not has_choice:
        return (dbo.comm_sms,)
    text = "8,16,24" if options.comm_sms == "auto" else options.comm_sms
    try:
        choices = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        choices = ()
    if not choices or any(n < 2 or n % 2 for n in choices):
        raise ConfigError("--comm-sms", text, "even numbers such as 8,16,24, or auto", "")
    return choices


class Script:
    """A `dbo.policy.Tuner` that asks for arms in a given order: one for each step of the phase that is measured."""

    def __init__(self, phase: Phase, arms: Sequence[Arm]):
        self._decode, self._arms, self._next = phase == "decode", arms, 0

    def fields(self, uniform_decode: bool) -> Mapping[str, int]:
        """See `Tuner`. Steps before and after those that count run whole."""
        arm: Arm = "whole"
        if uniform_decode == self._decode and self._next < len(self._arms):
            arm = self._arms[self._next]
            self._next += 1
        return {"probe": PROBE_WHOLE if arm == "whole" else PROBE_OVERLAP}

    def observe(self, plan: BatchPlan, step_ms: float) -> None:
        """Nothing is learnt from a measurement."""


@dataclass(frozen=True)
class Size:
    """One point of the grid; where ranks are uneven, rank 0 has `num_tokens` and the others fewer."""

    phase: Phase
    num_tokens: int
    uneven: bool = False


Key = tuple[Size, Arm, int]  # with the SMs for communication


class Calibration:
    """The measurements of one rank, together with the others'."""

    def __init__(
        self,
        engine: Engine,
        dbo: DBOConfig,
        options: CalibrateOptions,
        grids: Mapping[Phase, tuple[int, ...]],
        choices: tuple[int, ...],
    ):
        self.engine, self.mesh, self.dbo, self.options = engine, engine.mesh, dbo, options
        self.config, self.grids, self.choices = engine.model.config, dict(grids), choices
        self._texts: dict[Phase, str] = {"prefill": options.prefill_tokens, "decode": options.decode_tokens}
        self.times: dict[Key, list[float]] = defaultdict(list)
        self.notes: list[str] = []
        self._started_s = time.monotonic()
        self._num_shared = 0
        self._random = random.Random(options.seed)  # the same on all ranks
        self._bar = tqdm(total=100, unit="%", disable=self.mesh.rank != 0, file=sys.stderr, bar_format=_BAR)

    def run(self) -> Profile:
        """Collective; the profile is complete on every rank."""
        attention, experts = self._parts()
        packing, messages, per_copy = self._messages()
        estimates = self._sizes()
        self._rounds(estimates)
        uneven = self._uneven()
        self._bar.close()
        times = self._slowest()
        best = self._best_sms(times)
        steps = {phase: self._steps(phase, times, best, uneven) for phase in PHASES}
        layer = LayerCosts(
            attention=attention,
            experts=experts,
            packing=packing,
            messages=messages,
            fixed={phase: steps[phase].whole for phase in PHASES},  # until what layers take is known
            sm_tax=dict.fromkeys(PHASES, 0.0),
            dispatch_bytes=per_copy[0],
            combine_bytes=per_copy[1],
            copies=self._copies(),
        )
        shape = Shape.of(setup_of(self.engine, self.dbo).model)
        return Profile(
            origin="measured",
            setup=replace(setup_of(self.engine, self.dbo), comm_sms=best if len(self.choices) > 1 else None),
            environment=describe_environment(self.mesh.device),
            command=" ".join(["python -m launch", *sys.argv[1:]]),
            steps=steps,
            layer=fit_rest(layer, shape, steps, self.mesh.world_size, self.dbo.num_ubatches),
            comm_sms=self._by_sms(times),
            notes=tuple(self.notes),
        )

    # ------------------------------------------------------------------------------------------------ parts

    def _parts(self) -> tuple[dict[Phase, Series], tuple[ExpertCosts, ...]]:
        """On every rank at the same time; the slowest rank's medians count."""
        until_s = self._started_s + self.options.budget * PARTS_SHARE * 0.7
        attention = self._attention(until_s)
        layout = self.engine.all2all.capabilities.layout
        wanted = local_experts(self.config.num_experts, self.mesh.world_size)
        bench = ExpertBench(self.config, self.mesh.device, wanted[-1], layout)
        sizes = outside_in(spread_sizes([*self.grids["decode"], *self.grids["prefill"]], 6))
        found: dict[int, dict[int, Cost]] = {e: {} for e in wanted}
        for count, n in enumerate(sizes, start=1):
            for e in wanted:
                found[e][n] = bench.measure(e, n, until_s)
            self._progress()
            if self._late(until_s + self.options.budget * PARTS_SHARE * 0.15) and count > 1:
                break
        experts = [ExpertCosts(num_local_experts=e, costs=_series(costs)) for e, costs in found.items()]
        return attention, tuple(replace(each, costs=self._worst(each.costs)) for each in experts)

    def _attention(self, until_s: float) -> dict[Phase, Series]:
        limits, options = self.engine.limits, self.options
        context = self._context(max(self.grids["decode"]))
        slots = max(
            sum(-(-n // limits.block_size) for n in phase_lens("prefill", max(self.grids["prefill"]), self._longest())),
            max(self.grids["decode"]) * -(-(context + 1) // limits.block_size),
        )
        bench = AttentionBench(self.config, self.mesh.device, limits.block_size, slots * limits.block_size)
        found: dict[Phase, Series] = {}
        for phase in PHASES:
            costs: dict[int, Cost] = {}
            for n in outside_in(spread_sizes(halved(self.grids[phase], options.num_ubatches), 8)):
                lens = phase_lens(phase, n, self._longest())
                costs[n] = bench.measure(lens, context if phase == "decode" else 0, until_s)
                self._progress()
                if self._late(until_s) and len(costs) > 1:
                    break
            found[phase] = self._worst(_series(costs))
        return found

    def _messages(self) -> tuple[Series | None, Series | None, tuple[int, int]]:
        """Packing, messages, and bytes of a copy (dispatch, combine)."""
        config, all2all = self.config, self.engine.all2all
        itemsize = config.dtype.itemsize
        there, back = config.hidden * itemsize, config.hidden * itemsize
        if all2all.name == "torch":  # ids and weights travel with a row
            there = -(-(there + 8 * config.num_topk + 4) // 16) * 16
        if self.mesh.world_size == 1:
            return None, None, (there, back)
        limit_s = self._started_s + self.options.budget * PARTS_SHARE
        seen: dict[int, MessageTimes] = {}
        sizes = halved([*self.grids["decode"], *self.grids["prefill"]], self.options.num_ubatches)
        for n in outside_in(spread_sizes(sizes, 8)):
            began = time.monotonic()
            with make_partition(all2all, self.dbo.comm_sms, self.mesh.device):  # as while ubatches run
                seen[n] = measure_messages(all2all, config, self.mesh.device, n, REPEATS)
            self._progress()
            if self._late(limit_s - 2 * (time.monotonic() - began)) and len(seen) > 1:
                break
        mine = [{"total": each.total, "waited": each.waited} for each in seen.values()]
        everyone = self._gather("messages", mine)
        packing: dict[int, Cost] = {}
        flying: dict[int, Cost] = {}
        for i, n in enumerate(seen):
            totals = np.array([rank[i]["total"] for rank in everyone])
            if seen[n].waited is None:
                flying[n] = cost_of(totals.max(axis=0))
                continue
            waits = np.array([rank[i]["waited"] for rank in everyone])
            flying[n] = cost_of(waits.min(axis=0))  # who comes last waits for the message alone
            packing[n] = cost_of((totals - waits).max(axis=0))
        return _series(packing) if packing else None, _series(flying), (there, back)

    # ------------------------------------------------------------------------------------------------ steps

    def _sizes(self) -> dict[Size, float]:
        """Every size once in every arm; gives the seconds of each. Larger ones are left out where time is short."""
        kept: dict[Size, float] = {}
        last_s: dict[Phase, float] = {}
        full: set[Phase] = set()  # phases whose larger sizes do not fit
        sizes = sorted(
            (Size(phase, n) for phase in PHASES for n in self.grids[phase]), key=lambda s: (self._rank_of(s), s.phase)
        )

        def fits(seconds: float) -> bool:
            left_s = self._share(self.options.budget - self._elapsed_s())
            return (sum(kept.values()) + seconds) * (LEAST_ROUNDS + 1) <= left_s

        for size in sizes:
            phase = size.phase
            must = self._texts[phase] != "auto" or phase not in last_s
            if not must and (phase in full or not fits(2 * last_s[phase])):
                full.add(phase)
                continue
            took_s = self._seconds_of(size)
            if took_s > FIRST_TIME * last_s.get(phase, 0.0):  # kernels were compiled, plans made
                took_s = min(took_s, self._seconds_of(size))
            last_s[phase] = took_s
            self._progress()
            if must or fits(took_s):
                kept[size] = took_s
            else:
                full.add(phase)
        for phase in PHASES:
            sizes_kept = tuple(s.num_tokens for s in kept if s.phase == phase)
            if sizes_kept != self.grids[phase]:
                self.notes.append(
                    f"{phase}: measured up to {sizes_kept[-1]} tokens, not {self.grids[phase][-1]} (--budget)"
                )
            self.grids[phase] = sizes_kept
        return kept

    def _seconds_of(self, size: Size) -> float:
        """Measure it, for the time alone. Collective."""
        began = time.monotonic()
        self._measure(size, count=False)
        return self._share(time.monotonic() - began)

    @staticmethod
    def _rank_of(size: Size) -> float:
        """Sizes of both phases, cheap ones first: a request of decode counts as a few tokens of prefill."""
        return size.num_tokens * (8 if size.phase == "decode" else 1)

    def _rounds(self, estimates: Mapping[Size, float]) -> None:
        rounds = 0
        uneven_s = (LEAST_ROUNDS + 1) * sum(estimates[size] for size in self._to_be_uneven())
        for rounds in range(1, self.options.max_rounds + 1):
            began, order = time.monotonic(), list(estimates)
            self._random.shuffle(order)
            for size in order:
                self._measure(size, split=rounds <= SPLIT_ROUNDS)
                self._progress()
            spare_s = self.options.budget - self._elapsed_s() - uneven_s - (time.monotonic() - began)
            if rounds >= LEAST_ROUNDS and self._share(spare_s) < 0:
                break
        if self.mesh.rank == 0:
            logging.info("%d sizes, %d rounds in %.0f s", len(estimates), rounds, self._elapsed_s())

    def _to_be_uneven(self) -> list[Size]:
        """The second largest size of each phase, where it can still be cut when the other ranks have fewer tokens."""
        if self.mesh.world_size == 1:
            return []
        chosen = [Size(phase, self.grids[phase][max(len(self.grids[phase]) - 2, 0)]) for phase in PHASES]
        ubatches = self.dbo.num_ubatches
        return [s for s in chosen if s.num_tokens * UNEVEN > (-(-s.num_tokens // ubatches) + 1) * (ubatches - 1)]

    def _uneven(self) -> dict[Phase, Size]:
        """Measure sizes with unequal ranks, after one time to warm up."""
        chosen = {size.phase: replace(size, uneven=True) for size in self._to_be_uneven()}
        for repeat in range(LEAST_ROUNDS + 1):
            for size in chosen.values():
                self._measure(size, count=repeat > 0, sms=self.choices[:1])
                self._progress()
        return chosen

    def _measure(self, size: Size, *, count: bool = True, split: bool = False, sms: Sequence[int] = ()) -> None:
        """Both arms side by side, at every number of SMs, in random order."""
        for num_sms in self._shuffled(list(sms or self._choices_of(size))):
            dbo = replace(self.dbo, comm_sms=num_sms)
            pair: list[Arm] = ["whole", "overlap"]
            if size.phase == "decode":
                arms = [arm for _ in range(DECODE_STEPS) for arm in self._shuffled(pair)]
                taken = self._decode(size, dbo, ["whole", "overlap", *arms])[2:]  # two to warm up
                for arm, ms in zip(arms, taken, strict=True):
                    self._note(size, arm, num_sms, ms, count)
            else:
                for arm in self._shuffled(pair):
                    self._note(size, arm, num_sms, self._prefill(size, dbo, arm), count)
        if split and size.phase == "prefill":
            one_by_one = replace(self.dbo, interleave=False)
            self._note(size, "split", self.choices[0], self._prefill(size, one_by_one, "split"), count)

    def _choices_of(self, size: Size) -> tuple[int, ...]:
        """Numbers of SMs to measure it with: one, where its ubatches go over kernels that take none."""
        rows = -(-size.num_tokens // self.dbo.num_ubatches)
        return self.choices if takes_sms(self.engine.all2all, self.mesh.device, rows) else self.choices[:1]

    def _copies(self) -> Mapping[Phase, Copies]:
        return COPIES.get(self.engine.all2all.name, dict.fromkeys(PHASES, "rank"))

    def _note(self, size: Size, arm: Arm, num_sms: int, ms: float, count: bool) -> None:
        if count:
            self.times[size, arm, num_sms].append(ms)

    def _prefill(self, size: Size, dbo: DBOConfig, arm: Arm) -> float:
        lens = phase_lens("prefill", self._mine(size), self._longest())
        (ms,) = self._run([(n, 1) for n in lens], size, dbo, [arm])
        return ms

    def _decode(self, size: Size, dbo: DBOConfig, arms: Sequence[Arm]) -> list[float]:
        context = self._context(size.num_tokens)
        return self._run([(context, len(arms) + 1)] * self._mine(size), size, dbo, arms)

    def _run(self, requests: Sequence[tuple[int, int]], size: Size, dbo: DBOConfig, arms: Sequence[Arm]) -> list[float]:
        """Times of the steps that run `arms`. `requests`: tokens of each prompt, tokens of its answer."""
        tokens = random.Random(size.num_tokens)
        made = [
            Request(
                id=str(i),
                index=i,
                prompt_ids=[tokens.randrange(self.config.vocab_size) for _ in range(prompt)],
                params=SamplingParams(max_new_tokens=new, ignore_eos=True),
            )
            for i, (prompt, new) in enumerate(requests)
        ]
        result = self.engine.run(made, dbo, policy=Probes(dbo), tuner=Script(size.phase, arms))
        return self._times_of(result, size, arms)

    def _times_of(self, result: RunResult, size: Size, arms: Sequence[Arm]) -> list[float]:
        steps = [step for step in result.steps if (step.phase == "decode") == (size.phase == "decode")][: len(arms)]
        wrong = [
            step
            for step, arm in zip(steps, arms, strict=False)
            if step.num_tokens != self._mine(size) or (step.num_ubatches > 1) != (arm != "whole")
        ]
        if wrong or len(steps) < len(arms):
            raise ConfigError(
                f"--{size.phase}-tokens", size.num_tokens, "sizes that run as one step and can be cut",
                f"steps were {[(s.phase, s.num_tokens, s.reason) for s in (wrong or result.steps)][:4]}",
            )  # fmt: skip
        return [step.wall_ms - step.agree_ms for step in steps]

    def _mine(self, size: Size) -> int:
        return size.num_tokens if not size.uneven or self.mesh.rank == 0 else round(size.num_tokens * UNEVEN)

    def _longest(self) -> int:
        return min(self.options.prompt_tokens, self.engine.limits.max_request_tokens - 1)

    def _context(self, num_requests: int) -> int:
        """Prompts of a decode: as long as asked, but all in one step, and in the cache."""
        limits = self.engine.limits
        room = limits.num_blocks // num_requests * limits.block_size - 2 * DECODE_STEPS - 4
        longest = limits.max_request_tokens - 2 * DECODE_STEPS - 4
        return max(min(self.options.context, limits.max_num_tokens // num_requests, room, longest), 1)

    # ------------------------------------------------------------------------------------------------ results

    def _slowest(self) -> dict[Key, list[float]]:
        """The slowest rank's time of every measurement."""
        everyone = self._gather("times", list(self.times.values()))
        return {key: np.max([rank[i] for rank in everyone], axis=0).tolist() for i, key in enumerate(self.times)}

    def _best_sms(self, times: Mapping[Key, list[float]]) -> int:
        """The number of SMs with the least overlap time, each size counting alike."""
        logs: dict[int, float] = dict.fromkeys(self.choices, 0.0)
        for (size, arm, num_sms), each in times.items():
            if arm == "overlap" and not size.uneven and self._choices_of(size) == self.choices:
                logs[num_sms] += float(np.log(np.median(each)))
        return min(logs, key=lambda n: logs[n])

    def _by_sms(self, times: Mapping[Key, list[float]]) -> dict[str, dict[Phase, Series]]:
        if len(self.choices) == 1:
            return {}
        return {str(n): {phase: self._arm(phase, "overlap", times, [n]) for phase in PHASES} for n in self.choices}

    def _arm(self, phase: Phase, arm: Arm, times: Mapping[Key, list[float]], sms: Sequence[int]) -> Series:
        found: dict[int, Cost] = {}
        for n in self.grids[phase]:
            size = Size(phase, n)
            measured = [num_sms for num_sms in sms if num_sms in self._choices_of(size)] or self.choices[:1]
            every = [ms for num_sms in measured for ms in times.get((size, arm, num_sms), ())]
            if every:
                found[n] = cost_of(every)
        return _series(found)

    def _steps(
        self, phase: Phase, times: Mapping[Key, list[float]], best: int, uneven: Mapping[Phase, Size]
    ) -> PhaseSteps:
        whole = self._arm(phase, "whole", times, self.choices)  # whole does not depend on the SMs of overlap
        overlap = self._arm(phase, "overlap", times, [best])
        split = self._arm(phase, "split", times, self.choices[:1]) if phase == "prefill" else None
        skews = {"whole": 1.0, "overlap": 1.0}
        if (size := uneven.get(phase)) is not None:
            mean = size.num_tokens * (1 + UNEVEN * (self.mesh.world_size - 1)) / self.mesh.world_size
            beside = self._arm(phase, "overlap", times, self.choices[:1])  # measured with the same number of SMs
            arms: tuple[tuple[Arm, Series], ...] = (("whole", whole), ("overlap", beside))
            for arm, series in arms:
                ms = float(np.median(times[size, arm, self.choices[0]]))
                skews[arm] = skew_of(series.curve(), ms, size.num_tokens, mean)
        return PhaseSteps(
            whole=whole, overlap=overlap, split=split, whole_skew=skews["whole"], overlap_skew=skews["overlap"]
        )

    # ------------------------------------------------------------------------------------------------ ranks and time

    def _shuffled(self, items: Sequence[Any]) -> list[Any]:
        return self._random.sample(items, len(items))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _progress(self) -> None:
        share = min(100.0 * self._elapsed_s() / self.options.budget, 100.0)
        self._bar.update(max(share - self._bar.n, 0.0))

    def _share(self, value: float) -> float:
        """Rank 0's value, on every rank. Collective."""
        return float(self._gather("share", value)[0])

    def _late(self, until_s: float) -> bool:
        """Whether rank 0's clock is past `until_s` (of its own `time.monotonic`). Collective."""
        return self._share(until_s - time.monotonic()) < 0

    def _gather(self, name: str, value: Any) -> list[Any]:
        """What every rank says. Collective."""
        if self.mesh.world_size == 1:
            return [value]
        self._num_shared += 1
        return gather(self.mesh, f"calibrate/{name}/{self._num_shared}", value)

    def _worst(self, series: Series) -> Series:
        """For each size the costs of the rank with the largest median. Collective."""
        mine = [[c.median, c.low, c.high, c.n] for c in series.costs]
        everyone = self._gather("costs", mine)
        worst = [max((rank[i] for rank in everyone), key=lambda c: float(c[0])) for i in range(len(mine))]
        return replace(series, costs=tuple(Cost(median=m, low=low, high=high, n=n) for m, low, high, n in worst))


_BAR = "calibrating {percentage:3.0f}%|{bar}| {elapsed}"


def _series(costs: Mapping[int, Cost]) -> Series:
    return Series(tokens=tuple(sorted(costs)), costs=tuple(costs[n] for n in sorted(costs)))


def halved(sizes: Sequence[int], num_ubatches: int) -> list[int]:
    """The sizes and those of their ubatches, ascending."""
    return sorted({*sizes, *(-(-n // num_ubatches) for n in sizes)})


def spread_sizes(sizes: Sequence[int], count: int) -> list[int]:
    """At most `count` of the sizes, the first, the last, and evenly between."""
    every = sorted(set(sizes))
    if len(every) <= count:
        return every
    return [every[round(i * (len(every) - 1) / (count - 1))] for i in range(count)]


def outside_in(sizes: Sequence[int]) -> list[int]:
    """Smallest, largest, and then the middle of the widest gaps: wherever it is cut off, little is extrapolated."""
    order = list(dict.fromkeys([*sizes[:1], *sizes[-1:]]))
    while len(order) < len(sizes):
        placed = sorted(sizes.index(n) for n in order)
        low, high = max(pairwise(placed), key=lambda gap: gap[1] - gap[0])
        order.append(sizes[(low + high) // 2])
    return order


def local_experts(num_experts: int, ranks: int) -> list[int]:
    """Numbers of local experts to measure: powers of 2 up to half of all, and what a rank has here."""
    here = -(-num_experts // ranks)
    powers = [2**i for i in range(20) if 2**i <= max(num_experts // 2, 1)]
    return sorted({*powers, max(num_experts // 2, 1), here})


def describe(profile: Profile) -> str:
    """The profile as a table, for people."""
    setup, lines = profile.setup, []
    lines.append(
        f"{setup.model.get('family')} ({setup.fingerprint}), {setup.ranks} ranks, {setup.all2all} on {setup.device}, "
        f"{setup.num_ubatches} ubatches" + (f", {setup.comm_sms} SMs for messages" if setup.comm_sms else "")
    )
    lines.append(f"{'tokens a rank':>22} {'whole ms':>22} {'overlap ms':>22} {'whole / overlap':>16}")
    for phase, steps in (profile.steps or {}).items():
        for n, whole, overlap in zip(steps.whole.tokens, steps.whole.costs, steps.overlap.costs, strict=True):
            cells = [f"{c.median:.2f} [{c.low:.2f} .. {c.high:.2f}]" for c in (whole, overlap)]
            lines.append(f"{phase:>12} {n:>9} {cells[0]:>22} {cells[1]:>22} {whole.median / overlap.median:>15.2f}x")
    link = measured_link(profile.layer, Shape.of(setup.model), setup.ranks)
    if link is not None:
        slower = ", ".join(f"{1 + tax:.2f}x in {phase}" for phase, tax in profile.layer.sm_tax.items())
        lines.append(
            f"messages: {link.latency_us:.0f} us + bytes at {link.bandwidth_gbs:.3g} GB/s; they slow compute: {slower}"
        )
    return "\n".join([*lines, *profile.notes])
