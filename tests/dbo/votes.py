"""Cases for the agreement: votes of several ranks, the plan they lead to, and an independent statement of the rule."""

import random
from collections.abc import Iterator, Sequence

from dbo.agreement import WANTS, BatchPlan, Vote, decide
from dbo.config import DBOConfig
from dbo.policy import make_policy


def config_on(**settings) -> DBOConfig:
    return DBOConfig(**{"overlap": "on", **settings})


def plan_for(votes: Sequence[Vote], config: DBOConfig, policy=None) -> BatchPlan:
    """The plan that these votes, one a rank, lead to."""
    policy = policy or make_policy(config)
    names = Vote.__dataclass_fields__
    rows = {name: tuple(int(getattr(vote, name)) for vote in votes) for name in names}
    return decide({**rows, WANTS: tuple(int(policy.vote(vote)) for vote in votes)}, config, policy)


def plan_of(num_tokens: Sequence[int], config: DBOConfig | None = None, **vote) -> BatchPlan:
    """The plan for ranks with these token counts, by default under thresholds that never object."""
    config = config or config_on(prefill_token_threshold=0, decode_token_threshold=0)
    return plan_for([Vote(num_tokens=n, **vote) for n in num_tokens], config)


def last_part_has_a_token_everywhere(num_tokens: Sequence[int], config: DBOConfig) -> bool:
    """The rule for cut="tokens", by laying out every part of every rank."""
    size = 1
    while size * config.num_ubatches < max(num_tokens) or size % config.cut_alignment:
        size += 1
    parts = [[range(n)[k * size : (k + 1) * size] for k in range(config.num_ubatches)] for n in num_tokens]
    return all(len(part) > 0 for rank in parts for part in rank)


def random_run(seed: int, num_ranks: int, max_steps: int, config: DBOConfig, cap: int = 1024) -> list[list[Vote]]:
    """Votes of a whole run, [step][rank]: telling token counts, and every rank finishing at a step of its own."""
    rng = random.Random(seed)
    decode, prefill = config.decode_token_threshold, config.prefill_token_threshold
    telling = [0, 1, cap, *(t + d for t in (decode, prefill) for d in (-1, 0, 1))]
    finish = [rng.randint(1, max_steps) for _ in range(num_ranks)]

    def step_votes(step: int) -> Iterator[Vote]:
        alike = rng.random() < 0.6  # else nearly no step of many ranks would split
        common = rng.choice(telling[1:])
        uniform = rng.random() < 0.5
        for rank in range(num_ranks):
            if step >= finish[rank]:
                yield Vote(num_tokens=0, graph_mode=2, finished=True)
                continue
            n = common if alike else rng.choice(telling)
            yield Vote(
                num_tokens=n,
                num_tokens_padded=n + rng.choice([0, 0, 5]),
                uniform_decode=uniform if alike else rng.random() < 0.5,
                can_cut=rng.random() < 0.95,
                graph_mode=rng.choice([0, 1, 2, 2]),
                num_rows=rng.randint(0, 3),
            )

    return [list(step_votes(step)) for step in range(max(finish) + 1)]
