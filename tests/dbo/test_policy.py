"""Thresholds: which of the two counts, on which side of it; and what `auto` does without a profile."""

import pytest

from dbo.agreement import Reason, Vote
from dbo.config import DBOConfig
from dbo.policy import Thresholds, make_policy
from tests.dbo.votes import config_on, plan_for, plan_of


@pytest.mark.parametrize("uniform_decode", [True, False])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("threshold", ["decode", "prefill"])
def test_each_threshold_holds_for_its_own_kind_of_step(uniform_decode, offset, threshold):
    config = DBOConfig(decode_token_threshold=32, prefill_token_threshold=512)
    num_tokens = {"decode": 32, "prefill": 512}[threshold] + offset
    wants = Thresholds(config).vote(Vote(num_tokens=num_tokens, uniform_decode=uniform_decode))
    assert wants == (num_tokens >= (32 if uniform_decode else 512))


@pytest.mark.parametrize("uniform_decode", [True, False])
def test_one_rank_below_its_threshold_keeps_all_from_splitting(uniform_decode):
    config = config_on(decode_token_threshold=40, prefill_token_threshold=40)
    plan = plan_of([40, 39], config, uniform_decode=uniform_decode)
    assert (plan.should_ubatch, plan.reason, plan.reason_rank) == (False, Reason.BELOW_THRESHOLD, 1)
    assert f"on rank 1 (39 tokens, {'decode' if uniform_decode else 'prefill'} threshold 40)" in plan.explain()
    assert plan_of([40, 40], config, uniform_decode=uniform_decode).should_ubatch


def test_a_rank_that_decodes_beside_one_that_prefills_is_held_to_its_own_threshold():
    config = config_on(decode_token_threshold=32, prefill_token_threshold=512)
    votes = [Vote(num_tokens=512), Vote(num_tokens=500, uniform_decode=True)]
    assert plan_for(votes, config).should_ubatch
    assert not plan_for([Vote(num_tokens=511), votes[1]], config).should_ubatch


def test_auto_without_a_profile_says_that_it_goes_by_thresholds():
    auto = DBOConfig(overlap="auto")
    assert "auto by thresholds, for want of a measured profile" in make_policy(auto).describe()
    assert plan_of([600, 600], auto).should_ubatch
    assert "overlap on by thresholds (decode 32, prefill 512 tokens)" in make_policy(config_on()).describe()


def test_a_policy_can_decline_a_split_that_is_possible_and_its_reason_is_the_plan_s():
    class TooDear(Thresholds):
        def approve(self, plan):
            assert plan.should_ubatch
            return Reason.NOT_PROFITABLE if sum(plan.num_tokens_per_rank) < 100 else None

    config = config_on(prefill_token_threshold=0)
    dear = plan_for([Vote(num_tokens=40, graph_mode=1)] * 2, config, TooDear(config))
    assert (dear.num_ubatches, dear.reason, dear.num_tokens_padded) == (1, Reason.NOT_PROFITABLE, 40)
    assert "not profitable" in dear.explain()
    assert plan_for([Vote(num_tokens=60)] * 2, config, TooDear(config)).should_ubatch
