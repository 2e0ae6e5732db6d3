# SPDX-License-Identifier: BSD-3-Clause
"""The tests that a slow target runs by default; ``pytest --all-backends`` runs all of them."""

from __future__ import annotations

import pytest

# Each kind of mask, bias and call on fixed problems.
_ESSENTIAL = frozenset(
    {
        "test_grouped_heads[query-2-3]",
        "test_grouped_heads[kv-1-8]",
        "test_causal_is_aligned_to_the_bottom_right[5.0-1-300]",
        "test_causal_is_aligned_to_the_bottom_right[5.0-130-5]",
        "test_causal_equals_its_mask",
        "test_large_scores_do_not_overflow",
        "test_documents_of_a_packed_row[100]",
        "test_block_diagonal_boolean_mask",
        "test_head_dims[3]",
        "test_head_dims[100]",
        "test_empty_rows_are_zero_and_have_zero_gradients",
        "test_no_queries_or_no_keys[none-0-5]",
        "test_no_queries_or_no_keys[rows-5-0]",
        "test_no_batch",
        "test_sizes_of_zero[2-7-0-keys]",
        "test_few_queries_of_a_group[9]",
        "test_dropped_keys_are_never_read",
        "test_what_all_heads_drop[row_mask_and_bias-nan_value-3.0]",
        "test_what_one_head_drops_and_another_keeps[40-bias-nan_value-3.0]",
        "test_what_one_head_drops_and_another_keeps[40-row_bias-nan_key-3.0]",
        "test_what_one_head_drops_and_another_keeps[40-mask-inf_value-0.0]",
        "test_what_empty_rows_hold_reaches_nothing",
        "test_sums_of_a_bias_gradient[key-17]",
        "test_bias_of_minus_infinity_is_not_kept",
        "test_smallest_finite_bias",
        "test_gradients_of_a_row_sum_to_zero[usual-torch.bfloat16]",
        "test_gradients_of_a_row_sum_to_zero[packed-torch.float16]",
        "test_lse_of_low_biases",
        "test_gradient_of_the_bias_alone",
        "test_gradient_of_one_tensor_alone[value]",
        "test_gradient_of_lse_alone",
        "test_expanded_mask_and_bias_equal_their_copies",
        "test_negated_and_parameter_inputs",
        "test_merging_two_halves_by_lse",
        "test_bounds_as_far_out_as_integers_go[1]",
        "test_packed_sequences[keys-intervals-True]",
        "test_packed_sequences[rows-rows-True]",
        "test_probabilities",
        "test_forms_of_results",
        "test_autocast[bias_dtype0]",
        "test_dense",
        "test_varlen",
        "test_good_arguments_are_good",
        "test_func_grad_equals_autograd",
        "test_double_backward_is_refused",
        "test_activation_checkpointing[False-last]",
        "test_compiles_whole[window-False]",
        "test_compiles_whole[last-False]",
        "test_opcheck_of_forward[rows-True]",
        "test_opcheck_of_forward[rows-False]",
        "test_fake_tensors_take_the_fake_kernel",
        "test_several_calls_share_a_plan[keys-True]",
        "test_backward_keeps_the_plan_and_no_copy",
        "test_dense_sinks[rows-near]",
        "test_dense_sinks[intervals-far]",
        "test_packed_sinks",
        "test_pages_and_sinks",
        "test_rows_that_keep_nothing_but_the_sink",
        "test_mass[padded window]",
        "test_mass[row bias]",
        "test_packed_mass[row mask]",
        "test_mass_of_lists[key bias-2-False]",
        "test_mass_of_sizes_of_zero",
        "test_results_in_order",
        "test_widths_and_forms[(24, 16)-rows]",
        "test_widths_and_forms[(16, 24)-causal]",
        "test_pages[0-False]",
        "test_blocks[(4, 8)-2]",
        "test_block_masks[documents]",
        "test_block_masks[heads]",
    }
)
# The part of these that the plain formula does not run.
_OF_KERNELS = frozenset(
    {
        "test_double_backward_is_refused",
        "test_gradients_of_a_row_sum_to_zero[packed-torch.float16]",
        "test_gradients_of_a_row_sum_to_zero[usual-torch.bfloat16]",
    }
)
_DRAWN = frozenset(
    {"test_drawn_calls_are_right_by_any_backend", "test_drawn_lists_are_right_by_any_backend"}
)
# Small cases of every kind of mask, bias and call for Triton's interpreter. It runs with
# TRITON_INTERPRET=1 and takes about a minute for them.
_INTERPRETED = frozenset(
    {
        "test_grouped_heads[query-2-3]",
        "test_large_scores_do_not_overflow",
        "test_documents_of_a_packed_row[100]",
        "test_empty_rows_are_zero_and_have_zero_gradients[rows]",
        "test_sizes_of_zero[2-7-0-keys]",
        "test_no_queries_or_no_keys[none-0-5]",
        "test_no_queries_or_no_keys[rows-5-0]",
        "test_no_batch",
        "test_dropped_keys_are_never_read[nan-bias]",
        "test_dropped_keys_are_never_read[nan-intervals]",
        "test_what_all_heads_drop[row_mask_and_bias-nan_value-3.0]",
        "test_what_one_head_drops_and_another_keeps[40-bias-nan_value-3.0]",
        "test_what_one_head_drops_and_another_keeps[40-row_bias-nan_key-3.0]",
        "test_gradient_of_the_bias_alone",
        "test_gradient_of_one_tensor_alone[value]",
        "test_gradient_of_lse_alone",
        "test_gradient_of_out_with_any_strides[sliced]",
        "test_merging_two_halves_by_lse",
        "test_expanded_mask_and_bias_equal_their_copies",
        "test_packed_sequences[keys-intervals-True]",
        "test_packed_sequences[rows-rows-False]",
        "test_paged_keys[none-0-True-False]",
        "test_paged_keys[keys-0-True-True]",
        "test_paged_keys[keys-3-False-True]",
        "test_no_rows_where_there_might_be_some",
        "test_selection_is_per_sequence[none-keys-True]",
        "test_exactly_window_keys_are_kept_despite_ties",
        "test_good_arguments_are_good",
        "test_forms_of_results",
        "test_autocast[bias_dtype0]",
        "test_func_grad_equals_autograd",
        "test_double_backward_is_refused",
        "test_compiles_whole[window-False]",
        "test_compiles_whole[last-False]",
        "test_opcheck_of_backward[wanted2]",
        "test_several_calls_share_a_plan[keys-True]",
        "test_forms_of_lists",
        "test_what_is_not_listed_reaches_nothing[True-2.0-3]",
        "test_what_a_bias_drops_reaches_nothing[attn_bias]",
        "test_what_a_bias_drops_reaches_nothing[index_bias]",
        "test_a_key_listed_twice_counts_twice",
        "test_small_scales_leave_gradients_their_digits",
        "test_listed_pages[table0-3-8]",
        "test_lists_without_queries_or_keys[3-sizes1]",
        "test_lists_without_queries_or_keys[0-sizes0]",
        "test_mass[none]",
        "test_mass[pairs dropped]",
        "test_mass[last and first]",
        "test_mass[far sinks]",
        "test_packed_mass[key bias]",
        "test_packed_mass[row mask]",
        "test_mass_of_lists[sink-1-False]",
        "test_mass_of_what_one_head_drops_and_another_keeps",
        "test_mass_of_sizes_of_zero",
        "test_widths_and_forms[(24, 16)-rows]",
        "test_pages[0-False]",
        "test_lists[(24, 16)-True]",
        "test_blocks[(1, 4)-2]",
    }
)
# Keys are targets. A test function's name stands for all of its cases; a single case omits the
# target: "test_head_dims", "test_head_dims[16]". Targets without an entry run everything.
SUBSETS: dict[str, frozenset[str]] = {
    "cpu-reference": (_ESSENTIAL - _OF_KERNELS) | _DRAWN,
    "cpu-flex": _ESSENTIAL,
    # Each kind of call is compiled first.
    "cuda-flex": _ESSENTIAL,
    "cpu-triton": _INTERPRETED,
}
_FIXTURES = ("target", "kernel_target")
COLLECTED = pytest.StashKey[dict[str, set[str]]]()  # `names_of` this run's tests


def is_chosen(item: pytest.Item) -> bool:
    """Return whether a test runs without --all-backends."""
    target, names = _target_and_names(item)
    return target not in SUBSETS or bool(names & SUBSETS[target])


def names_of(items: list[pytest.Item]) -> dict[str, set[str]]:
    """Return for each target the names that subsets may use for its tests."""
    names: dict[str, set[str]] = {}
    for item in items:
        target, own = _target_and_names(item)
        names.setdefault(target, set()).update(own)
    return names


def _target_and_names(item: pytest.Item) -> tuple[str, set[str]]:
    """Return the target of a test, or "", and the names that a subset may use for it."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return "", set()
    parameters = item.callspec.params
    target = next((str(parameters[fixture]) for fixture in _FIXTURES if fixture in parameters), "")
    case = item.callspec.id.replace(f"{target}-", "").replace(f"-{target}", "")
    return target, {item.originalname, f"{item.originalname}[{case}]"}
