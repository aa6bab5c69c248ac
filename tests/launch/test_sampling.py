"""Sampling depends on the request alone, and keeps to top-k and top-p."""

from __future__ import annotations

import pytest
import torch

from launch.sampling import SamplingParams, request_seed, sample, top_logprobs, uniform


def draw(logits: torch.Tensor, n: int, **params) -> torch.Tensor:
    """`n` samples from one row of logits."""
    return sample(logits.expand(n, -1), [SamplingParams(seed=5, **params)] * n, list(range(n)))


def test_greedy_takes_the_largest():
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    assert sample(logits, [SamplingParams()] * 7, [3] * 7).tolist() == logits.argmax(-1).tolist()


def test_frequencies_follow_the_probabilities_at_a_temperature():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    counts = draw((probs.log() * 2), 20000, temperature=2.0).bincount(minlength=4) / 20000
    assert torch.allclose(counts, probs, atol=0.015)


def test_top_k_and_top_p_bound_what_can_be_drawn():
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    assert set(draw(logits, 500, temperature=1.0, top_k=2).tolist()) == {1, 3}
    assert set(draw(logits, 500, temperature=1.0, top_p=0.8).tolist()) == {1, 3}
    assert set(draw(logits, 500, temperature=1.0, top_p=0.81).tolist()) == {1, 2, 3}
    assert set(draw(logits, 50, temperature=1.0, top_p=1e-9).tolist()) == {1}
    assert set(draw(logits, 50, temperature=1.0, top_k=1).tolist()) == {1}
    # top-p counts within what top-k left: 0.5 / 0.8 of the mass lies on token 1
    assert set(draw(logits, 500, temperature=1.0, top_k=2, top_p=0.6).tolist()) == {1}


def test_a_request_samples_the_same_in_any_batch_and_order():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 100, generator=generator)
    params = [SamplingParams(temperature=i % 3 * 0.7, seed=i, top_k=i) for i in range(8)]
    positions = list(range(10, 18))
    together = sample(logits, params, positions).tolist()
    alone = [sample(logits[i : i + 1], [params[i]], [positions[i]]).item() for i in range(8)]
    order = [3, 1, 7, 0, 6, 2, 5, 4]
    shuffled = sample(logits[order], [params[i] for i in order], [positions[i] for i in order]).tolist()
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_seed_and_position_change_the_draw():
    logits = torch.zeros(1, 1000)
    params = SamplingParams(temperature=1.0, seed=1)
    by_position = {sample(logits, [params], [n]).item() for n in range(20)}
    by_seed = {sample(logits, [SamplingParams(temperature=1.0, seed=s)], [0]).item() for s in range(20)}
    assert len(by_position) > 15
    assert len(by_seed) > 15


def test_the_generator_is_uniform_and_fixed():
    numbers = torch.tensor([uniform(s, n) for s in range(100) for n in range(100)])
    assert 0 <= numbers.min() < 0.001 < 0.999 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert len(numbers.unique()) > 9990
    assert uniform(1, 0) != uniform(0, 1)
    assert request_seed(0, "a") != request_seed(0, "b") != request_seed(1, "b")


def test_logprobs_are_the_models_own():
    logits = torch.tensor([[0.1, 2.0, 1.0]])
    (row,) = top_logprobs(logits, torch.tensor([2]), 2)
    expected = logits.log_softmax(-1)[0].tolist()
    assert row.token_id == 2
    assert row.logprob == pytest.approx(expected[2])
    assert [i for i, _ in row.top] == [1, 2]
    (row,) = top_logprobs(logits, torch.tensor([2]), 0)
    assert row.top == ()


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-7])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = torch.tensor([0.5, 30.0, -2.0, 29.9])
    assert set(draw(logits, 50, temperature=temperature, top_k=10**30).tolist()) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_has_no_token_and_harms_no_other(temperature):
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 0.0, 900.0], [float("nan")] * 3])
    params = [SamplingParams(temperature=temperature, top_p=0.5)] * 3
    assert sample(logits, params, [0, 0, 0]).tolist() == [-1, 2, -1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": 10**400},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"stop": ("",)},
    ],
)
def test_wrong_parameters_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
