"""Faults that systems of this kind have had, by number, and the tests that show that this one has them not.

A file of its own because the cases cross all packages. `test_faults.py` checks that every test named here exists, and
runs all of them once more under `python -O`: what holds only thanks to an `assert` would not hold there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault. Tests are `file::function`, with all their parameters."""

    what: str
    tests: tuple[str, ...] = ()
    """Tests that run in one process."""
    rank_tests: tuple[str, ...] = ()
    """Tests that start ranks."""


SLICES, AGREEMENT, POLICY = "tests/dbo/test_slices.py", "tests/dbo/test_agreement.py", "tests/dbo/test_policy.py"
RUNNER, WORK, UNWINDING = "tests/dbo/test_runner.py", "tests/dbo/test_work.py", "tests/dbo/test_unwinding_ranks.py"
MODELS, ROUTER, TORCH = "tests/moe/test_models.py", "tests/moe/test_router.py", "tests/moe/all2all/test_torch_dist.py"
CONFORMANCE, REGISTRY = "tests/moe/all2all/test_conformance.py", "tests/moe/all2all/test_registry.py"
DEEPEP, PARTITION = "tests/moe/all2all/test_deepep.py", "tests/dbo/test_sm_partition.py"
ENGINE, GENERATE = "tests/launch/test_engine.py", "tests/launch/test_generate.py"

FAULTS = {
    # splitting
    1: Fault(
        what="the later part of a request that was cut starts at position 0 again",
        tests=(
            f"{SLICES}::test_the_second_half_of_a_request_goes_on_where_the_first_ended",
            f"{SLICES}::test_a_cut_inside_the_second_of_three_requests",
            f"{SLICES}::test_one_request_over_three_ubatches",
            f"{SLICES}::test_every_cut_against_brute_force",
            f"{MODELS}::test_cut_requests",
        ),
    ),
    2: Fault(
        what="a field of the batch is dropped, or shared, because nobody said how it is cut",
        tests=(
            f"{SLICES}::test_a_field_without_a_rule_fails_when_its_class_is_made",
            f"{SLICES}::test_a_field_from_a_class_that_is_no_batch_needs_a_rule_too",
            f"{SLICES}::test_a_batch_class_that_is_not_a_dataclass_is_refused_rather_than_losing_fields",
        ),
    ),
    3: Fault(
        what="one ubatch's metadata overwrites its sibling's",
        tests=(
            f"{SLICES}::test_parts_made_first_and_used_later_in_any_order_do_not_share_what_differs",
            f"{MODELS}::test_whole_requests_in_any_order",
        ),
    ),
    4: Fault(
        what="a table of the whole batch is read with the row numbers of a ubatch",
        tests=(
            f"{SLICES}::test_index_fields_have_as_many_rows_as_their_ubatch_for_a_batch_of_32",
            f"{MODELS}::test_many_lengths_in_one_decode",
        ),
    ),
    5: Fault(
        what="the last ubatch is empty on one rank and not on another",
        tests=(
            f"{AGREEMENT}::test_the_table",
            f"{AGREEMENT}::test_a_plan_splits_exactly_when_every_part_of_every_rank_has_a_token",
        ),
        rank_tests=(f"{MODELS}::test_two_ranks",),
    ),
    6: Fault(
        what="a cut gives views that a kernel finds misaligned",
        tests=(
            f"{SLICES}::test_odd_cuts_give_views_unless_a_kernel_needs_aligned_rows",
            f"{SLICES}::test_alignment_moves_the_cut_to_a_multiple",
        ),
    ),
    7: Fault(
        what="an input of the tokens has another length than the padded batch",
        tests=(
            f"{SLICES}::test_a_field_that_was_not_padded_is_refused_for_every_number_of_ubatches",
            f"{SLICES}::test_padding_is_pure_shares_what_is_long_enough_and_reaches_into_structures",
        ),
    ),
    8: Fault(
        what="a model returns something else than one tensor",
        tests=(f"{RUNNER}::test_a_model_may_return_anything",),
    ),
    # agreement between ranks
    9: Fault(
        what="a rank without work leaves an agreement out, and collectives drift apart",
        tests=(f"{AGREEMENT}::test_random_runs_are_planned_alike_on_every_rank",),
        rank_tests=(
            f"{AGREEMENT}::test_random_runs_between_processes",
            f"{ENGINE}::test_ranks_with_unequal_work_stay_in_step",
        ),
    ),
    10: Fault(
        what="ranks that finish at different steps learn of the end at different steps",
        tests=(f"{AGREEMENT}::test_ranks_that_finish_at_different_steps_learn_of_the_end_from_the_same_vote",),
    ),
    11: Fault(
        what="ranks conclude different things from the same numbers, or cut into unequal parts",
        tests=(
            f"{AGREEMENT}::test_the_table",
            f"{AGREEMENT}::test_a_plan_splits_exactly_when_every_part_of_every_rank_has_a_token",
            f"{POLICY}::test_one_rank_below_its_threshold_keeps_all_from_splitting",
        ),
    ),
    12: Fault(
        what="one rank is configured differently",
        tests=(
            "tests/dbo/test_config.py::test_ranks_configured_differently_differ_in_exactly_that_shared_option",
            "tests/dbo/test_peers.py::test_options_that_differ_are_named_on_every_rank",
        ),
        rank_tests=("tests/launch/test_failures.py::test_one_rank_is_different",),
    ),
    13: Fault(
        what="a rank chooses its graph by its own number of tokens",
        tests=(f"{AGREEMENT}::test_all_take_the_padded_size_of_the_largest_when_a_graph_runs",),
    ),
    14: Fault(
        what="one rank has no graph for its step, or the ranks do not split, and the others' graphs go with it",
        tests=(
            f"{AGREEMENT}::test_a_rank_beyond_the_largest_captured_size_takes_all_to_the_lowest_mode_without_padding",
            f"{AGREEMENT}::test_backing_out_of_a_split_keeps_the_graph",
        ),
    ),
    15: Fault(
        what="the threshold of one kind of step is used for the other",
        tests=(
            f"{POLICY}::test_each_threshold_holds_for_its_own_kind_of_step",
            f"{POLICY}::test_a_rank_that_decodes_beside_one_that_prefills_is_held_to_its_own_threshold",
        ),
    ),
    16: Fault(
        what="a rank without requests, or one that stops early, keeps the others waiting",
        rank_tests=(
            f"{ENGINE}::test_ranks_with_unequal_work_stay_in_step",
            f"{GENERATE}::test_an_interrupt_ends_after_a_step_and_resume_does_the_rest",
            f"{GENERATE}::test_a_killed_rank_ends_all_and_loses_nothing",
            "tests/launch/test_mesh.py::test_a_rank_that_leaves_early_is_named",
        ),
    ),
    # the ubatch protocol
    17: Fault(
        what="a ubatch fails, and its sibling or another rank waits for ever",
        tests=(
            f"{RUNNER}::test_an_error_at_every_point",
            f"{RUNNER}::test_the_first_error_wins_and_later_ones_are_noted",
            f"{RUNNER}::test_the_runner_works_after_every_error",
            f"{RUNNER}::test_a_wait_that_never_ends_runs_into_the_step_limit",
            f"{WORK}::test_a_failed_peer_ends_the_wait",
            "tests/dbo/test_turn_protocol.py::test_no_deadlock_and_never_two_at_once",
        ),
        rank_tests=(f"{UNWINDING}::test_a_sample_of_failures",),
    ),
    18: Fault(
        what="ubatches yield unequally often, or return early",
        tests=(f"{RUNNER}::test_unequal_yields_and_early_returns",),
    ),
    19: Fault(
        what="something has room for two ubatches and there are three",
        tests=(
            f"{RUNNER}::test_same_bits_whatever_the_order",
            f"{RUNNER}::test_turns_go_round_in_order",
            f"{REGISTRY}::test_more_ubatches_than_operations_in_flight_are_refused",
        ),
        rank_tests=(
            f"{CONFORMANCE}::test_in_flight",
            "tests/moe/test_layer.py::test_ubatches_change_nothing",
        ),
    ),
    20: Fault(
        what="state of the calling thread is missing in its ubatches, or leaks between them",
        tests=(
            f"{RUNNER}::test_ubatches_have_the_callers_state",
            f"{RUNNER}::test_a_state_that_spans_a_yield_stays_in_its_ubatch",
            f"{RUNNER}::test_a_state_that_is_set_outright_ends_with_its_ubatch",
            f"{RUNNER}::test_a_mode_of_the_caller_sees_what_its_ubatches_do",
        ),
    ),
    21: Fault(
        what="a check is an assert, which `python -O` takes away",
        tests=(
            "tests/test_faults.py::test_tests_can_fail_without_asserts",
            "tests/dbo/test_config.py::test_a_bad_value_is_named_with_what_is_allowed",
            f"{RUNNER}::test_refusals",
            f"{RUNNER}::test_refuses_wrong_options",
            f"{RUNNER}::test_one_step_at_a_time_whoever_asks",
            f"{WORK}::test_refuses_a_wrong_order",
            f"{PARTITION}::test_refuses_impossible_counts",
            f"{AGREEMENT}::test_one_vote_at_a_time_and_its_plan_is_kept",
            f"{AGREEMENT}::test_several_ranks_need_a_group",
            f"{AGREEMENT}::test_a_field_that_is_no_int32_is_named_before_anything_is_cast",
            f"{SLICES}::test_a_batch_that_does_not_fit_the_plan_is_refused",
            f"{REGISTRY}::test_a_name_that_does_not_work_is_explained",
        ),
        rank_tests=(f"{UNWINDING}::test_failures_without_assertions",),
    ),
    # routing and all2all
    27: Fault(
        what="rows of padding are routed, counted or sent, or harm other rows",
        tests=(
            f"{ROUTER}::test_padding_is_not_routed_whatever_it_holds",
            f"{MODELS}::test_nan_in_padding_reaches_no_row",
        ),
        rank_tests=(f"{TORCH}::test_rows_on_the_wire", f"{CONFORMANCE}::test_every_case"),
    ),
    28: Fault(
        what="routing at its extremes: one expert, one rank, none of a rank, top 1, top all, uneven experts",
        tests=(
            f"{REGISTRY}::test_expert_ranges_partition_the_experts",
            f"{DEEPEP}::test_refuses_with_a_remedy_what_the_kernels_cannot_do",
            "tests/moe/test_experts.py::test_all_rows_to_one_expert",
        ),
        rank_tests=(f"{CONFORMANCE}::test_every_case",),
    ),
    29: Fault(
        what="a rank sends nothing, or receives nothing",
        tests=(f"{ROUTER}::test_no_tokens", f"{MODELS}::test_no_tokens"),
        rank_tests=(f"{CONFORMANCE}::test_every_case", "tests/moe/test_layer.py::test_equals_the_reference"),
    ),
    30: Fault(
        what="ids of another width leave half of each id unset",
        rank_tests=(f"{CONFORMANCE}::test_in_use", f"{CONFORMANCE}::test_every_case"),
    ),
    31: Fault(
        what="a hidden size or top-k that kernels refuse",
        tests=(
            f"{DEEPEP}::test_low_latency_refuses_what_its_kernels_cannot_hold",
            f"{DEEPEP}::test_rows_are_widened_only_where_they_must_be",
            f"{DEEPEP}::test_both_kernels_are_made_for_the_same_ranks_and_each_for_its_batches",
        ),
        rank_tests=(f"{CONFORMANCE}::test_every_case",),
    ),
    32: Fault(
        what="one token more or less than the cap",
        tests=(f"{DEEPEP}::test_low_latency_takes_its_cap_and_not_a_row_more",),
        rank_tests=(f"{CONFORMANCE}::test_in_use", f"{TORCH}::test_more_tokens_than_announced_are_refused"),
    ),
    33: Fault(
        what="a transport that loses or swaps tokens goes unnoticed",
        tests=(f"{REGISTRY}::test_the_self_test_refuses_a_broken_transport",),
        rank_tests=(f"{REGISTRY}::test_the_self_test_runs_between_ranks", f"{CONFORMANCE}::test_in_use"),
    ),
}
