//! The list of all test cases, and the macros that generate tests from it.
//!
//! `always` marks cases that also hold when a call is retried because its reply was lost. `steady` marks
//! cases that do not: they check whether this very call made the change, or expect no duplicates.

use crate::failure::TestResult;

/// A test case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestCase {
    /// Its module.
    pub module: &'static str,
    /// Its name, which states the guarantee.
    pub name: &'static str,
    /// Whether it also holds when a call is retried because its reply was lost.
    pub holds_with_retries: bool,
}

/// Generates a `#[test]` for every test case, one module per topic. See the [module](crate::stream).
#[macro_export]
macro_rules! stream_suite {
    ($setup:expr) => {
        $crate::__stream_cases! { __stream_tests steady $setup }
    };
    ($setup:expr, faulty) => {
        $crate::__stream_cases! { __stream_tests faulty $setup }
    };
}

/// Passes the list of test cases to another macro.
#[doc(hidden)]
#[macro_export]
macro_rules! __stream_cases {
    ($then:ident $($context:tt)*) => {
        $crate::$then! { ($($context)*)
            append {
                always ids_are_ascending_within_a_call_and_across_calls,
                always ids_are_ascending_across_two_connections,
                always ids_stay_ascending_after_the_newest_entry_was_deleted,
                always ids_stay_ascending_after_all_entries_were_deleted,
                always an_id_contains_the_time_of_the_backend_clock,
                steady a_batch_keeps_its_order,
                always a_batch_of_the_maximum_size_is_appended,
                always an_empty_batch_appends_nothing,
                always every_byte_value_is_preserved_in_names_and_values,
                always empty_names_and_values_are_preserved,
                always repeated_field_names_are_preserved_in_order,
                always the_maximum_number_of_fields_is_preserved,
                always an_entry_of_the_maximum_size_is_preserved,
                always streams_are_independent,
                always entries_appended_by_64_concurrent_tasks_are_all_stored,
                always appends_to_several_streams_are_independent,
                always entries_can_be_encoded_lazily,
            }
            append_once {
                always a_new_id_is_appended_and_a_duplicate_is_not,
                always an_id_given_twice_in_one_call_is_appended_once,
                always retrying_a_whole_call_changes_nothing,
                always one_of_32_concurrent_appends_of_an_id_succeeds,
                always overlapping_concurrent_batches_append_each_id_once,
                always an_expired_id_is_new_again,
                always a_duplicate_does_not_extend_the_expiration_of_an_id,
                always the_entry_of_an_id_can_be_looked_up_without_appending,
                always an_id_is_remembered_after_its_entry_was_deleted,
                always ids_of_different_streams_and_scopes_are_independent,
                always ids_and_fields_are_preserved_byte_for_byte,
                always the_maximum_batch_is_appended_once,
                always an_empty_append_once_does_nothing,
                always retention_trims_entries_appended_once,
                always entries_appended_once_are_delivered_normally,
            }
            groups {
                always a_group_from_the_beginning_gets_every_entry,
                always a_group_from_the_end_gets_later_entries,
                always a_group_after_an_id_gets_the_entries_after_it,
                always a_group_from_the_end_of_a_missing_stream_gets_its_first_entry,
                always ensuring_a_group_creates_its_stream,
                steady ensuring_a_group_returns_whether_it_was_created,
                always ensuring_a_group_again_keeps_its_position,
                always a_group_is_created_only_while_its_condition_holds,
                always every_group_gets_every_entry,
                always each_entry_goes_to_one_consumer_of_a_group,
                always a_group_of_the_same_name_on_another_stream_is_another_group,
                always removing_a_group_removes_its_pending_entries,
                always removing_a_group_does_not_affect_other_groups,
                always removing_a_group_of_a_missing_stream_returns_false,
                always a_reset_group_continues_from_its_new_position_with_nothing_pending,
                always resetting_a_group_does_not_affect_other_groups,
                always a_blocked_reader_continues_where_its_group_was_reset_to,
                always a_group_that_does_not_exist_is_not_reset,
            }
            read {
                always a_first_delivery_has_a_delivery_count_of_one,
                always a_read_returns_entries_in_id_order,
                always a_read_returns_at_most_count_entries_per_stream,
                always batches_are_returned_in_request_order_without_empty_ones,
                always streams_in_different_slots_are_read_in_one_call,
                always a_read_of_200_streams_finds_the_one_with_an_entry,
                always a_read_without_wait_returns_at_once,
                always a_read_waits_for_its_timeout_if_nothing_arrives,
                always a_blocked_read_returns_when_an_entry_arrives,
                always a_blocked_read_on_several_slots_wakes_for_each_of_them,
                steady a_stream_that_always_has_entries_delays_no_other,
                always a_stream_that_does_not_exist_yet_can_be_read,
                always a_deleted_entry_is_not_delivered,
                steady a_deleted_group_is_recreated_from_the_beginning,
                always a_group_deleted_during_a_blocked_read_is_recreated_from_the_beginning,
                always a_stream_deleted_during_a_blocked_read_does_not_stop_the_reader,
                steady a_read_of_a_required_group_fails_if_it_is_missing_and_creates_nothing,
                steady a_required_group_deleted_during_a_blocked_read_stays_deleted,
                always the_next_read_returns_entries_delivered_to_a_dropped_read,
                always a_read_dropped_after_a_few_steps_loses_nothing,
                always reads_dropped_at_random_points_lose_and_duplicate_nothing,
                always a_dropped_read_of_several_slots_loses_nothing,
                always close_returns_entries_delivered_to_a_dropped_read,
                always a_closed_reader_receives_nothing_more,
                always closing_an_idle_reader_returns_nothing,
                always two_readers_of_one_process_block_independently,
            }
            rename {
                steady a_renamed_stream_keeps_its_entries_groups_and_pending_entries,
                steady a_stream_is_not_renamed_over_one_with_entries,
                steady an_empty_stream_is_replaced_by_a_renamed_one,
                always a_missing_stream_is_not_renamed,
                steady of_concurrent_renames_to_one_name_one_takes_effect,
                always a_blocked_reader_gets_the_entries_of_a_stream_that_is_renamed_to_its_own,
            }
            settle {
                steady done_acknowledges_the_delivery_and_keeps_the_entry,
                always done_is_idempotent,
                always delete_removes_the_entry_for_every_group,
                always append_writes_the_follow_up_and_acknowledges_the_delivery,
                always a_follow_up_may_target_the_same_stream,
                always follow_ups_are_written_in_the_order_of_their_entries,
                always a_rescheduled_entry_is_promoted_when_it_is_due,
                always follow_ups_are_preserved_byte_for_byte,
                always a_follow_up_of_one_mebibyte_is_preserved,
                always a_released_entry_is_pending_without_a_consumer,
                always a_released_entry_can_be_reclaimed_at_once_and_its_delivery_does_not_count,
                always entries_settled_before_are_stale,
                always entries_never_delivered_are_stale,
                always an_entry_named_twice_is_settled_once,
                always done_and_delete_apply_for_any_consumer,
                always a_follow_up_is_written_only_for_the_owning_consumer,
                always a_consumer_whose_entries_were_reclaimed_writes_no_follow_up,
                always a_mixed_batch_applies_each_settlement_once,
                always a_settle_that_cannot_write_its_follow_up_changes_nothing,
                always a_settle_that_names_a_stream_and_a_delay_set_alike_changes_nothing,
                steady a_follow_up_may_be_larger_than_an_entry,
                steady a_dead_letter_may_be_in_another_slot,
                always a_stale_dead_letter_is_not_written_to_another_slot,
                always the_maximum_number_of_entries_is_settled_in_one_call,
                always an_empty_settle_does_nothing,
                always everything_is_stale_in_a_deleted_stream,
                always everything_is_stale_in_a_removed_group,
                always an_entry_deleted_meanwhile_can_still_be_settled,
            }
            fences {
                always a_settle_with_a_current_fence_is_applied,
                always a_renewed_lease_keeps_its_fence_current,
                always a_settle_with_a_stale_fence_changes_nothing,
                always an_expired_lease_fences_even_without_a_new_holder,
                always a_released_lease_fences_even_without_a_new_holder,
                always a_lease_reacquired_by_its_old_holder_fences_the_old_epoch,
                always a_delete_can_be_retried_after_the_lease_expired_until_it_has_another_holder,
                always a_delete_that_was_not_applied_is_fenced_after_the_lease_expired,
                always a_settle_with_a_stale_fence_writes_no_dead_letter_to_another_slot,
                always an_empty_settle_with_a_stale_fence_is_fenced,
                always a_reclaim_with_a_current_fence_is_applied,
                always a_reclaim_with_a_stale_fence_claims_nothing,
                always the_new_holder_continues_where_the_fenced_one_stopped,
            }
            pending {
                always pending_entries_are_listed_in_id_order_with_owner_and_count,
                always pending_entries_of_one_consumer_can_be_listed,
                always paging_through_pending_entries_returns_each_once,
                always pending_entries_can_be_listed_by_idle_time,
                always idle_time_is_reported,
                always listing_pending_entries_changes_nothing,
                always listing_pending_entries_of_a_missing_group_fails,
                always keep_alive_returns_every_id_if_the_group_was_removed,
                always keep_alive_resets_the_idle_time_and_keeps_the_delivery_count,
                always keep_alive_returns_ids_that_are_no_longer_pending_for_the_consumer,
                always an_entry_kept_alive_is_not_reclaimed_by_idle_time,
                always pending_entries_of_two_groups_are_independent,
            }
            reclaim {
                always a_reclaimed_entry_changes_owner_and_increments_its_delivery_count,
                steady each_reclaim_increments_the_delivery_count,
                always a_reclaim_of_own_entries_is_not_one_more_delivery,
                always a_reclaim_from_anyone_includes_own_entries,
                steady a_reclaim_from_others_excludes_own_entries,
                steady a_reclaim_from_one_consumer_excludes_other_consumers,
                always a_reclaim_from_a_consumer_without_entries_returns_nothing,
                always a_reclaim_by_ids_claims_them_from_any_consumer,
                steady a_reclaim_by_idle_time_excludes_recently_active_entries,
                always a_reclaim_resets_the_idle_time,
                always the_cursor_visits_everything_once,
                steady the_cursor_skips_entries_of_other_consumers,
                always a_reclaim_begins_after_the_cursor,
                always deleted_entries_are_reported_once_and_no_longer_pending,
                steady deleted_entries_are_reported_when_reclaimed_by_id,
                always released_entries_are_found_among_live_ones,
                always a_release_after_a_crash_keeps_the_delivery_count_of_the_crash,
                always a_reclaim_without_pending_entries_returns_nothing,
                always a_reclaim_of_no_ids_returns_nothing,
                always a_thousand_entries_are_reclaimed_in_one_call,
            }
            range {
                always a_range_includes_both_ends,
                always a_backward_range_starts_with_the_newest_entry,
                always a_range_returns_at_most_count_entries,
                always paging_through_a_range_returns_each_entry_once,
                always bounds_between_and_beyond_the_entries_are_valid,
                always a_missing_stream_has_an_empty_range,
                always a_range_returns_entries_that_groups_have_read,
                always ten_thousand_entries_are_returned_in_one_range,
                always deleted_entries_do_not_reappear,
                always deleting_entries_keeps_them_pending,
                always deleting_entries_of_a_missing_stream_returns_zero,
                always deleting_a_stream_removes_its_groups,
                always a_stream_emptied_by_deletes_still_has_its_groups,
            }
            tail {
                always a_tail_reads_entries_after_its_position,
                always a_tail_follows_a_stream_page_by_page,
                always a_tail_reads_several_slots_in_request_order,
                always a_blocked_tail_wakes_when_an_entry_arrives,
                always a_tail_waits_for_its_timeout_if_nothing_arrives,
                always a_tail_changes_nothing,
                always a_dropped_tail_read_loses_nothing,
                always a_tail_continues_in_a_stream_that_was_deleted_and_recreated,
            }
            trim {
                always a_trim_by_length_keeps_the_newest_exactly,
                steady a_trim_reports_what_it_removed,
                always keeping_everything_removes_nothing,
                always trimming_a_missing_stream_removes_nothing,
                always a_safe_trim_stops_at_the_first_pending_entry,
                always a_safe_trim_stops_at_the_first_unread_entry,
                steady a_safe_trim_of_acknowledged_entries_is_not_held_back,
                always a_safe_trim_respects_the_slowest_group,
                always a_safe_trim_removes_nothing_for_a_group_that_read_nothing,
                always a_safe_trim_keeps_released_entries,
                always a_forced_trim_removes_unread_and_pending_entries,
                always a_trim_by_age_uses_the_time_in_the_id,
                always a_safe_trim_by_age_keeps_entries_that_groups_need,
                always a_trim_by_bytes_keeps_approximately_that_many_bytes_of_the_newest_entries,
                always a_safe_trim_by_bytes_keeps_entries_that_groups_need,
                always the_strictest_limit_applies,
                always appending_with_retention_keeps_the_stream_short,
                steady appending_with_retention_never_removes_entries_that_a_group_needs,
            }
            stats {
                always a_missing_stream_has_no_stats,
                always a_stream_without_groups_has_a_length_and_first_and_last_ids,
                always first_and_last_ids_are_those_of_existing_entries,
                always groups_and_consumers_are_sorted_by_name,
                always pending_count_lag_and_position_are_up_to_date,
                always lag_is_correct_or_unknown_after_deletes_and_unusual_starts,
                always lag_counts_only_existing_entries,
                always consumer_stats_show_pending_entries_and_idle_time,
                always idle_consumers_without_pending_entries_are_removed,
                always a_consumer_is_removed_unless_entries_are_pending_for_it,
                always recently_active_consumers_are_kept,
                always a_removed_consumer_can_rejoin,
            }
            delays {
                always delay_ids_are_ascending,
                always scheduling_nothing_does_nothing,
                always an_entry_is_not_promoted_before_it_is_due,
                always a_delay_starts_now_by_the_backend_clock,
                always due_entries_are_promoted_earliest_first,
                always entries_with_equal_due_times_keep_their_scheduling_order,
                steady at_most_count_entries_are_promoted,
                always a_due_time_in_the_past_is_due_at_once,
                always entries_are_promoted_to_their_target_streams,
                always delayed_entries_are_preserved_byte_for_byte,
                always a_cancelled_entry_is_never_promoted,
                always eight_concurrent_callers_promote_each_entry_once,
                always waiting_for_a_due_entry_returns_when_it_is_due,
                always waiting_returns_early_when_an_earlier_entry_is_scheduled,
                always waiting_returns_early_when_a_settle_reschedules_an_entry,
                always waiting_returns_after_its_timeout_if_nothing_is_due,
                always delay_stats_are_up_to_date,
                always delayed_entries_are_listed_earliest_first,
                always deleting_a_delay_set_removes_its_entries,
                always delay_sets_are_independent,
                always an_entry_whose_stream_rejects_it_stays_scheduled,
                always an_entry_for_another_slot_is_rejected_at_once_or_promoted,
                steady the_maximum_number_of_entries_is_scheduled_in_one_call,
            }
            leases {
                always a_free_lease_is_acquired_and_then_held,
                always one_of_32_concurrent_callers_acquires_the_lease,
                always the_holder_reacquires_with_the_same_epoch_and_a_new_ttl,
                always every_change_of_holder_increases_the_epoch,
                always an_epoch_is_at_least_its_acquisition_time,
                always a_lease_expires_and_not_before_its_ttl,
                always a_renewal_extends_the_lease,
                always a_renewed_lease_outlives_its_original_ttl,
                always renewal_results_are_in_request_order,
                always a_thousand_leases_are_renewed_and_released_in_one_call,
                always renewing_releasing_and_listing_no_leases_succeeds,
                always a_released_lease_is_free_at_once,
                always leases_are_listed_in_request_order,
                always a_former_holder_can_neither_renew_nor_release,
                always an_older_epoch_of_the_same_holder_can_neither_renew_nor_release,
                steady a_watch_reports_releases,
                steady a_watch_reports_expiration_or_declares_that_it_does_not,
                steady a_cancelled_wait_for_a_hint_does_not_lose_it,
            }
            registry {
                steady a_map_is_created_once,
                steady one_of_16_concurrent_callers_creates_the_map,
                always an_update_writes_its_fields_and_keeps_the_others,
                steady a_conditional_update_applies_only_if_the_condition_holds,
                steady one_of_16_concurrent_conditional_updates_applies,
                always a_missing_map_is_not_updated,
                always a_deleted_map_does_not_exist,
                always map_values_are_preserved_byte_for_byte,
                steady set_add_and_remove_return_how_many_members_changed,
                always a_set_contains_added_and_not_removed_members,
                always membership_is_returned_in_request_order,
                always a_missing_set_is_empty,
                always the_name_of_an_empty_set_is_free,
                always a_set_expires_after_the_ttl_of_the_last_add,
            }
            dedup {
                steady an_id_is_fresh_then_in_progress_then_done,
                steady dedup_results_are_in_request_order,
                steady an_id_given_twice_is_fresh_once,
                steady one_of_32_concurrent_callers_gets_the_fresh_id,
                always an_in_progress_record_expires,
                always asking_again_does_not_extend_an_in_progress_record,
                always a_done_record_expires,
                always a_done_record_outlives_its_in_progress_ttl,
                always an_abandoned_id_is_fresh_at_once,
                always abandoning_a_done_id_changes_nothing,
                always an_id_can_be_finished_without_having_begun,
                always values_and_ids_are_preserved_byte_for_byte,
                always scopes_are_independent,
                always no_ids_do_nothing,
                steady a_thousand_ids_are_begun_in_one_call,
            }
            wrong_type {
                always stream_calls_on_another_type_fail_with_wrong_type,
                always delay_calls_on_another_type_fail_with_wrong_type,
                always lease_calls_on_another_type_fail_with_wrong_type,
                always a_value_of_another_type_among_leases_affects_only_its_own_lease,
                always map_calls_on_another_type_fail_with_wrong_type,
                always set_calls_on_another_type_fail_with_wrong_type,
                always a_wrong_type_among_several_streams_fails_the_read_and_loses_nothing,
            }
            bad_input {
                always entries_beyond_a_limit_are_not_appended,
                steady a_batch_of_the_maximum_bytes_is_appended,
                always a_zero_retention_is_rejected,
                always a_read_beyond_a_limit_delivers_nothing,
                always a_settle_beyond_a_limit_changes_nothing,
                always calls_by_id_are_limited,
                always counts_are_at_least_one_and_limited,
                always entries_beyond_a_limit_are_not_scheduled,
                always an_entry_can_be_scheduled_with_the_maximum_delay,
                always the_ttl_of_a_lease_has_a_minimum_and_a_maximum,
                always leases_in_one_call_are_limited,
                always a_map_beyond_a_limit_is_not_written,
                always set_members_beyond_a_limit_are_not_added,
                always entries_beyond_a_limit_are_not_appended_once,
                always ids_beyond_a_limit_are_not_begun,
            }
            disconnect_reader {
                always a_read_in_flight_delivers_nothing_after_disconnect,
                steady disconnect_does_not_affect_other_consumers_and_groups,
                always a_disconnected_consumer_can_read_again,
                always entries_delivered_before_disconnect_stay_pending,
                always disconnecting_without_readers_succeeds,
            }
            close {
                always a_backend_describes_itself,
                always the_backend_clock_advances,
                steady a_closed_backend_is_unavailable,
                steady closing_wakes_blocked_calls,
                steady calls_in_flight_complete_before_close,
            }
            concurrency {
                always concurrent_consumers_process_every_entry_once,
                always one_of_eight_concurrent_settles_of_an_entry_writes_the_follow_up,
                always eight_concurrent_reclaims_assign_each_entry_to_one_consumer,
                always concurrent_batches_keep_their_internal_order,
                always entries_released_during_concurrent_reads_are_all_processed,
            }
            fault_injection {
                always every_append_that_returned_is_stored,
                always a_failed_append_stored_a_prefix_of_its_batch_or_nothing,
                always a_retried_settle_writes_its_follow_up_once,
                always a_failed_settle_was_applied_completely_or_not_at_all,
                always entries_delivered_to_a_failed_read_are_pending_for_its_consumer,
                always a_reader_recovers_from_every_disconnect,
                always a_retrying_reader_sees_every_entry_once_and_in_order,
                always a_lease_acquired_twice_after_a_lost_reply_is_one_lease,
                always a_fenced_settle_stays_fenced_on_every_retry,
                always an_entry_promoted_without_a_reply_is_promoted_once,
                always a_batch_scheduled_without_a_reply_is_stored_completely_or_not_at_all,
                always a_reclaim_without_a_reply_assigned_the_entries_to_its_consumer,
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __stream_tests {
    (($network:ident $setup:expr) $($module:ident { $($retries:ident $name:ident,)* })*) => {
        $(mod $module {
            #[allow(unused_imports, reason = "the setup expression may use items around the suite")]
            use super::*;
            $($crate::__stream_test! { $network $retries $module $name $setup })*
        })*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __stream_test {
    (faulty steady $module:ident $name:ident $setup:expr) => {};
    ($network:ident $retries:ident $module:ident $name:ident $setup:expr) => {
        #[test]
        fn $name() -> $crate::stream::TestResult {
            $crate::stream::run(async { $crate::stream::$module::$name($setup.await?).await })
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __stream_case_list {
    (() $($module:ident { $($retries:ident $name:ident,)* })*) => {
        &[$($($crate::stream::TestCase {
            module: stringify!($module),
            name: stringify!($name),
            holds_with_retries: matches!(stringify!($retries).as_bytes(), b"always"),
        },)*)*]
    };
}

/// All test cases.
pub const TEST_CASES: &[TestCase] = crate::__stream_cases! { __stream_case_list };

/// Runs one test case on its own runtime, as the generated tests do.
pub fn run(case: impl Future<Output = TestResult>) -> TestResult {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(case)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_test_case_is_listed() {
        // Relative to the package directory, where tests run. An absolute path would be that of the checkout that
        // was built first.
        let folder = Path::new("src/stream");
        let mut written = BTreeSet::new();
        for file in fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let module = path.file_stem().unwrap().to_str().unwrap().to_owned();
            for line in text.lines() {
                if let Some(rest) = line.strip_prefix("pub async fn ")
                    && let Some((name, _)) = rest.split_once('(')
                {
                    written.insert((module.clone(), name.to_owned()));
                }
            }
        }
        let listed: Vec<(String, String)> =
            TEST_CASES.iter().map(|p| (p.module.to_owned(), p.name.to_owned())).collect();
        assert_eq!(written, listed.iter().cloned().collect());
        assert_eq!(written.len(), listed.len(), "no test case is listed twice");
    }

    #[test]
    fn test_case_names_do_not_match_test_runner_groups() {
        for TestCase { module, name, .. } in TEST_CASES {
            for word in ["cluster", "sentinel", "faulty"] {
                assert!(!name.contains(word), "{module}::{name} contains {word}");
            }
        }
    }
}
