"""Which calls serve a batch's prompts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.attention.segments import DENSE_ROWS, MAX_SEGMENTS, plan_segments

CASES = {
    "one length": ([512] * 3, [512] * 3, None, [(0, 3, 512)]),
    "one short prompt alone is dense too": ([128], [128], None, [(0, 1, 128)]),
    "a length that is no multiple": ([500] * 3, [500] * 3, None, [(0, 3, None)]),
    "several lengths": ([200, 512, 130], [200, 512, 130], None, [(0, 3, None)]),
    "cut at the end": ([2048, 2048, 1000], [2048, 2048, 1000], None, [(0, 2, 2048), (2, 3, None)]),
    "cut at the start": ([1048, 2048, 2048], [2048, 2048, 2048], None, [(0, 1, None), (1, 3, 2048)]),
    "cut at both": ([40, 1024, 1024, 9], [90, 1024, 1024, 9], None, [(0, 1, None), (1, 3, 1024), (3, 4, None)]),
    "half of a dense length is another dense one": ([2048, 1024], [2048, 1024], None, [(0, 1, 2048), (1, 2, 1024)]),
    "too short to be worth a call": ([100, 256, 256, 100], [100, 256, 256, 100], None, [(0, 4, None)]),
    "too many lengths": (
        [1024, 2048, 1152, 4096, 1280],
        [1024, 2048, 1152, 4096, 1280],
        None,
        [(0, 3, None), (3, 4, 4096), (4, 5, None)],
    ),
    "continued prompts of one length": ([512] * 3, [1024] * 3, None, [(0, 3, None)]),
    "within the window": ([512] * 3, [512] * 3, 512, [(0, 3, 512)]),
    "beyond the window": ([512] * 3, [512] * 3, 511, [(0, 3, None)]),
}


@pytest.mark.parametrize("name", CASES)
def test_segments(name):
    query_lens, seq_lens, window, expected = CASES[name]
    made = plan_segments(np.array(query_lens, np.int32), np.array(seq_lens, np.int32), window)
    assert [(s.first, s.last, s.length) for s in made] == expected


def test_what_is_fresh_needs_no_cache():
    made = plan_segments(np.array([40, 2048, 9], np.int32), np.array([90, 2048, 9], np.int32), None)
    assert [s.fresh for s in made] == [False, True, True]
    (merged,) = plan_segments(np.array([40, 9], np.int32), np.array([90, 9], np.int32), None)
    assert not merged.fresh


LENGTHS = st.one_of(st.integers(1, 40).map(lambda n: 128 * n), st.integers(2, 3000))


PROMPTS = st.tuples(LENGTHS, st.sampled_from([0, 0, 0, 77]))  # new tokens, tokens before them


@settings(deadline=None)
@given(
    st.lists(st.tuples(LENGTHS, st.sampled_from([0, 0, 0, 77])), min_size=1, max_size=12), st.sampled_from([None, 900])
)
def test_segments_cover_all_prompts_and_dense_ones_are(prompts, window):
    query_lens = np.array([n for n, _ in prompts], np.int32)
    seq_lens = query_lens + np.array([before for _, before in prompts], np.int32)
    made = plan_segments(query_lens, seq_lens, window)
    assert [k for s in made for k in range(s.first, s.last)] == list(range(len(prompts)))
    assert len(made) <= MAX_SEGMENTS
    for s in made:
        assert s.fresh == (query_lens[s.first : s.last] == seq_lens[s.first : s.last]).all()
        if s.length is not None:
            assert s.fresh
            assert (query_lens[s.first : s.last] == s.length).all()
            assert s.length % 128 == 0
            assert window is None or s.length <= window
            assert len(made) == 1 or s.length * (s.last - s.first) >= DENSE_ROWS
    assert not any(a.length is None and b.length is None for a, b in itertools.pairwise(made))
