"""Whether a split is worth it: the policies behind `overlap`.

A file of its own because it is opinion, where `agreement` is law: a policy may decline a split that is possible, never
force one that is not. Invariant: a policy is pure and the same on every rank (see `agreement.Policy`).
"""

from dataclasses import dataclass

from dbo.agreement import BatchPlan, Policy, Reason, Vote
from dbo.config import DBOConfig

__all__ = ["Policy", "Thresholds", "make_policy"]


@dataclass(frozen=True)
class Thresholds:
    """A rank wants to split from so many tokens on: one threshold for a uniform decode, another for all else."""

    config: DBOConfig
    name: str = "thresholds"

    def vote(self, vote: Vote) -> bool:
        """Whether this rank has at least as many tokens as the threshold of its kind of step."""
        if vote.uniform_decode:
            return vote.num_tokens >= self.config.decode_token_threshold
        return vote.num_tokens >= self.config.prefill_token_threshold

    def approve(self, plan: BatchPlan) -> Reason | None:
        """No objection: thresholds are all there is."""
        return None

    def describe(self) -> str:
        """The thresholds in effect."""
        decode, prefill = self.config.decode_token_threshold, self.config.prefill_token_threshold
        return f"overlap {self.config.overlap} by {self.name} (decode {decode}, prefill {prefill} tokens)"


def make_policy(config: DBOConfig) -> Policy:
    """The policy that `config` asks for. Without a measured profile `auto` falls back to thresholds and says so."""
    return Thresholds(
        config, "thresholds, for want of a measured profile" if config.overlap == "auto" else "thresholds"
    )
