//! The one list of all promises, and the macros that make tests of it.
//!
//! `always` marks what also holds when a call is repeated because its reply was lost, `steady` what does not: an
//! answer that tells whether this very call made the difference, or a stream without doubles.

use super::failure::TestResult;

/// A promise: its seam, its name, and whether it holds when calls are repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promise {
    /// The module it stands in.
    pub seam: &'static str,
    /// The sentence.
    pub name: &'static str,
    /// Whether it also holds when a call is repeated because its reply was lost.
    pub always: bool,
}

/// Makes a `#[test]` of every promise, in a module per seam. See the [module](crate::stream).
#[macro_export]
macro_rules! stream_suite {
    ($setup:expr) => {
        $crate::__stream_cases! { __stream_tests steady $setup }
    };
    ($setup:expr, faulty) => {
        $crate::__stream_cases! { __stream_tests faulty $setup }
    };
}

/// Passes the list of promises on to another macro.
#[doc(hidden)]
#[macro_export]
macro_rules! __stream_cases {
    ($then:ident $($context:tt)*) => {
        $crate::$then! { ($($context)*)
            append {
                always ids_grow_within_a_call_and_over_calls,
                always ids_grow_over_two_connections,
                always ids_go_on_growing_after_the_newest_entry_was_deleted,
                always ids_go_on_growing_when_the_stream_was_emptied,
                always an_id_carries_the_time_of_the_backends_clock,
                steady a_batch_keeps_its_order,
                always a_batch_of_the_largest_size_is_taken_whole,
                always an_empty_batch_appends_nothing,
                always every_byte_value_survives_in_names_and_values,
                always empty_names_and_values_survive,
                always repeated_field_names_survive_in_order,
                always as_many_fields_as_allowed_survive,
                always an_entry_of_the_largest_size_survives,
                always streams_do_not_mix,
                always entries_appended_by_64_tasks_at_once_are_all_there,
                always appends_to_several_streams_do_not_touch_each_other,
                always entries_may_be_made_while_they_are_sent,
            }
            once {
                always a_new_id_is_appended_and_a_known_one_is_not,
                always an_id_that_stands_twice_in_one_call_is_appended_once,
                always a_call_repeated_as_a_whole_changes_nothing,
                always of_32_who_append_an_id_at_once_one_does,
                always batches_that_overlap_and_run_at_once_append_each_id_once,
                always a_lapsed_id_is_new_again,
                always a_duplicate_does_not_prolong_the_time_an_id_is_known,
                always where_an_id_is_can_be_asked_without_appending,
                always an_id_is_known_after_its_entry_is_gone,
                always ids_of_two_streams_and_of_other_scopes_do_not_mix,
                always ids_and_fields_keep_their_bytes,
                always the_largest_batch_is_taken_whole_and_once,
                always no_entries_are_no_work,
                always a_retention_trims_what_was_appended_once,
                always what_was_appended_once_is_delivered_like_any_entry,
            }
            groups {
                always a_group_from_the_beginning_gets_every_entry,
                always a_group_from_the_end_gets_what_comes_after,
                always a_group_after_an_id_gets_what_follows_it,
                always a_group_from_the_end_of_a_missing_stream_gets_its_first_entry,
                always ensuring_a_group_creates_its_stream,
                steady ensuring_a_group_tells_whether_it_is_new,
                always ensuring_a_group_again_keeps_its_position,
                always every_group_gets_every_entry,
                always each_entry_goes_to_one_consumer_of_a_group,
                always a_group_of_the_same_name_on_another_stream_is_another_group,
                always a_removed_group_forgets_what_was_pending,
                always removing_a_group_leaves_the_others_alone,
                always there_is_nothing_to_remove_from_a_missing_stream,
                always a_reset_group_goes_on_from_its_new_position_with_nothing_pending,
                always resetting_a_group_leaves_the_others_alone,
                always a_reader_that_waits_goes_on_where_its_group_was_reset_to,
                always a_group_that_does_not_exist_is_not_reset,
            }
            read {
                always a_first_delivery_brings_the_entry_and_counts_one,
                always a_read_brings_entries_in_the_order_of_their_ids,
                always a_read_brings_at_most_count_entries_of_each_stream,
                always batches_come_in_the_order_asked_for_without_empty_ones,
                always streams_in_different_slots_are_read_in_one_call,
                always a_read_of_200_streams_finds_the_one_with_an_entry,
                always a_read_without_wait_returns_at_once,
                always a_read_waits_its_time_when_nothing_comes,
                always a_waiting_read_ends_when_an_entry_arrives,
                always a_read_that_waits_on_several_slots_wakes_for_each_of_them,
                always a_stream_that_does_not_exist_yet_can_be_read,
                always a_deleted_entry_is_not_delivered,
                steady a_lost_group_comes_back_from_the_beginning,
                always a_group_lost_under_a_waiting_read_comes_back_from_the_beginning,
                always a_stream_deleted_under_a_waiting_read_does_not_end_the_reader,
                always what_a_dropped_read_was_given_comes_with_the_next,
                always a_read_dropped_after_a_few_steps_loses_nothing,
                always reads_dropped_at_random_points_lose_and_repeat_nothing,
                always a_dropped_read_of_several_slots_loses_nothing,
                always close_returns_what_a_dropped_read_was_given,
                always a_closed_reader_takes_nothing_more,
                always closing_an_idle_reader_returns_nothing,
                always two_readers_of_one_process_wait_side_by_side,
            }
            settle {
                steady done_ends_the_delivery_and_leaves_the_entry,
                always done_ends_the_delivery_however_often_it_is_repeated,
                always delete_removes_the_entry_for_every_group,
                always append_writes_the_follow_up_and_ends_the_delivery,
                always a_follow_up_may_go_to_the_stream_itself,
                always follow_ups_stand_in_the_order_of_their_entries,
                always an_entry_put_aside_returns_when_it_is_due,
                always follow_ups_keep_their_bytes,
                always a_follow_up_of_one_mebibyte_is_kept_whole,
                always a_released_entry_is_pending_for_nobody_in_particular,
                always a_released_entry_goes_to_the_next_reclaim_and_its_delivery_does_not_count,
                always entries_settled_before_are_stale,
                always entries_never_delivered_are_stale,
                always an_entry_named_twice_is_settled_once,
                always done_and_delete_hold_whoever_says_so,
                always a_follow_up_is_only_written_for_the_consumer_in_hand,
                always a_consumer_whose_entries_were_taken_over_writes_no_follow_up,
                always a_mixed_batch_does_each_thing_once,
                always a_settle_that_cannot_write_its_follow_up_changes_nothing,
                steady what_follows_an_entry_may_be_larger_than_an_entry,
                steady a_dead_letter_may_live_in_another_slot,
                always a_stale_dead_letter_is_not_written_to_another_slot,
                always as_many_entries_as_allowed_are_settled_at_once,
                always an_empty_settle_does_nothing,
                always everything_is_stale_in_a_stream_that_is_gone,
                always everything_is_stale_in_a_group_that_is_gone,
                always an_entry_deleted_meanwhile_can_still_be_settled,
            }
            fences {
                always a_current_fence_lets_a_settle_through,
                always a_renewed_lease_keeps_its_fence_current,
                always a_settle_with_an_old_fence_changes_nothing,
                always a_lease_that_ran_out_fences_even_if_nobody_took_it,
                always a_lease_given_up_fences_even_if_nobody_took_it,
                always a_lease_taken_again_by_its_old_holder_fences_the_old_epoch,
                always a_delete_can_be_repeated_after_the_lease_ended_until_it_has_another_holder,
                always a_delete_that_did_not_happen_is_fenced_after_the_lease_ended,
                always a_settle_with_an_old_fence_writes_no_dead_letter_elsewhere,
                always an_empty_settle_with_an_old_fence_is_fenced,
                always a_current_fence_lets_a_reclaim_through,
                always a_reclaim_with_an_old_fence_takes_nothing,
                always the_new_holder_goes_on_where_the_fenced_one_stopped,
            }
            pending {
                always pending_entries_are_listed_in_id_order_with_owner_and_count,
                always pending_entries_of_one_consumer_can_be_listed,
                always pages_of_pending_entries_show_each_once,
                always pending_entries_can_be_listed_by_idle_time,
                always idle_time_is_told,
                always a_listing_touches_nothing,
                always a_missing_group_has_no_list_of_pending_entries,
                always keep_alive_finds_nothing_in_hand_where_the_group_is_gone,
                always keep_alive_starts_idle_time_anew_and_keeps_the_count,
                always keep_alive_names_what_is_no_longer_in_hand,
                always a_kept_entry_is_not_reclaimed_by_idle_time,
                always pending_entries_of_two_groups_do_not_mix,
            }
            reclaim {
                always a_reclaimed_entry_changes_hands_and_counts_one_more_delivery,
                steady each_reclaim_counts,
                always a_reclaim_from_anyone_takes_ones_own_too,
                steady a_reclaim_from_others_leaves_ones_own,
                steady a_reclaim_from_one_consumer_leaves_the_others,
                always a_reclaim_from_a_consumer_without_entries_finds_nothing,
                always a_reclaim_by_ids_takes_these_whoever_has_them,
                steady a_reclaim_by_idle_time_leaves_what_was_touched_since,
                always a_reclaim_starts_idle_time_anew,
                always the_cursor_goes_through_everything_once,
                steady the_cursor_passes_over_entries_of_others,
                always a_reclaim_begins_after_the_cursor,
                always deleted_entries_are_named_once_and_no_longer_pending,
                steady deleted_entries_are_named_when_asked_for_by_id,
                always released_entries_are_found_among_live_ones,
                always a_release_after_a_crash_keeps_the_count_of_the_crash,
                always there_is_nothing_to_reclaim_where_nothing_is_pending,
                always a_reclaim_of_no_ids_finds_nothing,
                always a_thousand_entries_are_reclaimed_at_once,
            }
            range {
                always a_range_includes_both_ends,
                always a_backward_range_begins_with_the_newest,
                always a_range_brings_at_most_count_entries,
                always pages_of_a_range_show_each_entry_once,
                always ends_between_and_beyond_the_entries_are_fine,
                always a_missing_stream_has_an_empty_range,
                always a_range_shows_entries_whoever_has_read_them,
                always ten_thousand_entries_come_in_one_range,
                always deleted_entries_are_gone_for_good,
                always deleting_entries_leaves_groups_what_they_have_in_hand,
                always there_is_nothing_to_delete_in_a_missing_stream,
                always a_deleted_stream_is_gone_with_its_groups,
                always a_stream_emptied_by_deletes_still_has_its_groups,
            }
            tail {
                always a_tail_reads_what_stands_after_its_position,
                always a_tail_follows_a_stream_page_by_page,
                always a_tail_reads_several_slots_in_the_order_asked_for,
                always a_tail_that_waits_wakes_when_an_entry_arrives,
                always a_tail_waits_its_time_when_nothing_comes,
                always a_tail_leaves_no_trace,
                always a_dropped_tail_read_loses_nothing,
                always a_tail_goes_on_in_a_stream_that_was_deleted_and_came_back,
            }
            trim {
                always a_trim_by_length_keeps_the_newest_exactly,
                steady a_trim_tells_what_it_did,
                always keeping_everything_removes_nothing,
                always there_is_nothing_to_trim_in_a_missing_stream,
                always a_safe_trim_stops_at_the_first_pending_entry,
                always a_safe_trim_stops_at_the_first_unread_entry,
                steady a_safe_trim_within_what_is_done_is_not_held_back,
                always a_safe_trim_heeds_the_slowest_of_all_groups,
                always a_safe_trim_removes_nothing_for_a_group_that_read_nothing,
                always a_safe_trim_leaves_released_entries,
                always a_forced_trim_removes_unread_and_pending_entries,
                always a_trim_by_age_goes_by_the_time_in_the_id,
                always a_safe_trim_by_age_leaves_what_groups_need,
                always a_trim_by_bytes_keeps_about_that_much_of_the_newest,
                always a_safe_trim_by_bytes_leaves_what_groups_need,
                always the_strictest_limit_decides,
                always appending_with_retention_keeps_the_stream_short,
                steady appending_with_retention_never_removes_what_a_group_needs,
            }
            stats {
                always a_missing_stream_has_no_numbers,
                always a_stream_without_groups_has_a_length_and_two_ends,
                always the_two_ends_are_those_of_entries_that_exist,
                always groups_and_consumers_are_sorted_by_name,
                always pending_lag_and_position_follow_the_work,
                always lag_is_right_or_untold_after_deletes_and_odd_starts,
                always lag_counts_only_entries_that_exist,
                always consumers_show_what_they_have_in_hand_and_since_when_they_rest,
                always idle_consumers_are_removed_if_they_have_nothing_in_hand,
                always consumers_that_did_something_lately_stay,
                always a_removed_consumer_can_come_back,
            }
            delays {
                always ids_of_entries_put_aside_grow,
                always putting_nothing_aside_does_nothing,
                always an_entry_is_not_taken_before_it_is_due,
                always a_delay_is_counted_from_now_by_the_backends_clock,
                always due_entries_come_earliest_first,
                always entries_of_one_due_time_keep_the_order_they_were_put_aside,
                steady at_most_count_entries_are_taken,
                always a_past_due_time_is_due_at_once,
                always entries_go_to_the_streams_they_were_put_aside_for,
                always bytes_survive_the_wait,
                always a_cancelled_entry_never_returns,
                always eight_takers_at_once_move_each_entry_once,
                always waiting_for_a_due_entry_ends_when_it_is_due,
                always waiting_ends_early_when_an_earlier_entry_is_put_aside,
                always waiting_ends_early_when_a_settle_puts_an_entry_aside,
                always waiting_ends_after_its_time_when_nothing_is_due,
                always the_numbers_of_a_set_follow_the_work,
                always waiting_entries_are_listed_earliest_first,
                always a_deleted_set_forgets_what_waited,
                always sets_of_delayed_entries_do_not_mix,
                always an_entry_whose_stream_cannot_take_it_stays,
                always an_entry_for_another_slot_is_refused_at_once_or_arrives,
                steady as_many_entries_as_allowed_are_put_aside_at_once,
            }
            leases {
                always a_free_lease_is_won_and_then_held,
                always one_of_32_wins,
                always its_holder_gets_the_same_epoch_again_and_more_time,
                always epochs_grow_with_every_change_of_holder,
                always an_epoch_is_at_least_the_time_it_began,
                always a_lease_runs_out_and_not_before_its_time,
                always a_renewal_extends_the_lease,
                always a_lease_that_is_renewed_outlives_its_time,
                always renewals_are_answered_one_by_one_in_order,
                always a_thousand_leases_are_renewed_and_released_in_one_call,
                always nothing_to_renew_release_or_list_is_fine,
                always a_released_lease_is_free_at_once,
                always leases_are_listed_in_the_order_asked_for,
                always a_zombie_can_neither_renew_nor_release,
                always an_older_epoch_of_the_same_holder_can_neither_renew_nor_release,
                steady a_watch_hears_of_releases,
                steady a_watch_hears_of_expiry_or_says_that_it_cannot,
                steady a_hint_dropped_while_awaited_is_not_lost,
            }
            registry {
                steady a_map_is_created_once,
                steady one_of_16_creates_the_map,
                always an_update_writes_its_fields_and_leaves_the_others,
                steady an_update_with_an_expectation_holds_only_while_it_is_met,
                steady one_of_16_updates_that_expect_the_same_holds,
                always a_missing_map_is_not_updated,
                always a_deleted_map_is_gone,
                always map_values_keep_their_bytes,
                steady a_set_counts_what_is_new_and_what_was_there,
                always a_set_holds_what_was_added_and_not_removed,
                always membership_is_told_in_the_order_asked_for,
                always a_missing_set_is_empty,
                always a_set_without_members_is_a_name_nobody_uses,
                always a_set_lives_as_long_as_the_last_add_said,
            }
            dedup {
                steady an_id_is_fresh_then_busy_then_done,
                steady ids_are_answered_one_by_one_in_order,
                steady an_id_named_twice_is_fresh_once,
                steady one_of_32_gets_the_fresh_id,
                always a_begun_mark_lapses,
                always asking_again_does_not_prolong_a_begun_mark,
                always a_done_mark_lapses,
                always a_done_mark_outlives_the_time_it_was_begun_for,
                always an_abandoned_id_is_fresh_at_once,
                always abandoning_a_done_id_changes_nothing,
                always an_id_can_be_finished_without_having_begun,
                always values_and_ids_keep_their_bytes,
                always scopes_do_not_mix,
                always no_ids_are_no_work,
                steady a_thousand_ids_are_marked_in_one_call,
            }
            kinds {
                always calls_on_streams_are_refused_by_other_kinds,
                always calls_on_delays_are_refused_by_other_kinds,
                always calls_on_leases_are_refused_by_other_kinds,
                always a_value_of_another_kind_among_leases_concerns_only_its_own_lease,
                always calls_on_maps_are_refused_by_other_kinds,
                always calls_on_sets_are_refused_by_other_kinds,
                always a_foreign_stream_among_several_fails_the_read_and_loses_nothing,
            }
            bad_input {
                always entries_beyond_a_limit_are_not_appended,
                steady a_batch_of_the_most_bytes_is_taken,
                always a_retention_of_nothing_is_refused,
                always a_read_beyond_a_limit_delivers_nothing,
                always a_settle_beyond_a_limit_changes_nothing,
                always calls_by_id_are_limited,
                always counts_are_at_least_one_and_limited,
                always entries_beyond_a_limit_are_not_put_aside,
                always an_entry_can_be_put_aside_for_as_long_as_allowed,
                always the_life_of_a_lease_has_a_shortest_and_a_longest,
                always leases_in_one_call_are_limited,
                always a_map_beyond_a_limit_is_not_written,
                always set_members_beyond_a_limit_are_not_added,
                always entries_beyond_a_limit_are_not_appended_once,
                always ids_beyond_a_limit_are_not_marked,
            }
            silence {
                always a_read_that_had_begun_delivers_nothing_after_silence,
                steady silence_leaves_other_consumers_and_groups_alone,
                always a_silenced_consumer_can_read_again,
                always what_was_delivered_before_silence_stays_pending,
                always to_silence_nobody_is_no_error,
            }
            close {
                always a_backend_says_what_it_is,
                always its_clock_goes_forward,
                steady a_closed_backend_is_unavailable,
                steady closing_wakes_those_who_wait,
                steady what_was_begun_before_closing_is_finished,
            }
            concurrency {
                always consumers_that_read_and_settle_at_once_share_every_entry_once,
                always of_eight_who_settle_one_entry_one_writes_the_follow_up,
                always of_eight_who_reclaim_at_once_each_entry_goes_to_one,
                always batches_appended_at_once_do_not_lose_their_inner_order,
                always entries_released_while_others_read_are_all_handled,
            }
            faults {
                always every_append_that_returned_is_in_the_stream,
                always an_append_that_failed_left_a_beginning_of_its_batch_or_nothing,
                always a_repeated_settle_writes_its_follow_up_once,
                always a_failed_settle_happened_whole_or_not_at_all,
                always what_a_failed_read_was_given_is_pending_for_its_consumer,
                always a_reader_goes_on_after_every_cut,
                always a_reader_that_repeats_sees_every_entry_once_and_in_order,
                always a_lease_acquired_twice_after_a_lost_reply_is_one_lease,
                always a_fenced_settle_stays_fenced_however_often_it_is_repeated,
                always an_entry_whose_move_was_not_told_moved_once,
                always a_batch_put_aside_without_an_answer_is_there_whole_or_not_at_all,
                always a_reclaim_without_an_answer_left_its_entries_with_the_taker,
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __stream_tests {
    (($network:ident $setup:expr) $($seam:ident { $($mark:ident $name:ident,)* })*) => {
        $(mod $seam {
            #[allow(unused_imports, reason = "the set-up may name what stands around the suite")]
            use super::*;
            $($crate::__stream_test! { $network $mark $seam $name $setup })*
        })*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __stream_test {
    (faulty steady $seam:ident $name:ident $setup:expr) => {};
    ($network:ident $mark:ident $seam:ident $name:ident $setup:expr) => {
        #[test]
        fn $name() -> $crate::stream::TestResult {
            $crate::stream::run(async { $crate::stream::$seam::$name($setup.await?).await })
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __stream_case_list {
    (() $($seam:ident { $($mark:ident $name:ident,)* })*) => {
        &[$($($crate::stream::Promise {
            seam: stringify!($seam),
            name: stringify!($name),
            always: matches!(stringify!($mark).as_bytes(), b"always"),
        },)*)*]
    };
}

/// Every promise there is.
pub const PROMISES: &[Promise] = crate::__stream_cases! { __stream_case_list };

/// Runs one promise on a runtime of its own, as the tests of the suite do.
pub fn run(promise: impl Future<Output = TestResult>) -> TestResult {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(promise)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_promise_that_is_written_is_in_the_list() {
        // Below the package's folder, where tests run. A path compiled in would be that of whichever
        // checkout built the test first.
        let folder = Path::new("src/stream");
        let mut written = BTreeSet::new();
        for file in fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let seam = path.file_stem().unwrap().to_str().unwrap().to_owned();
            for line in text.lines() {
                if let Some(rest) = line.strip_prefix("pub async fn ")
                    && let Some((name, _)) = rest.split_once('(')
                {
                    written.insert((seam.clone(), name.to_owned()));
                }
            }
        }
        let listed: Vec<(String, String)> =
            PROMISES.iter().map(|p| (p.seam.to_owned(), p.name.to_owned())).collect();
        assert_eq!(written, listed.iter().cloned().collect());
        assert_eq!(written.len(), listed.len(), "no promise is listed twice");
    }

    #[test]
    fn names_of_promises_do_not_sort_tests_into_groups_of_the_runner() {
        for Promise { seam, name, .. } in PROMISES {
            for word in ["cluster", "sentinel", "faulty"] {
                assert!(!name.contains(word), "{seam}::{name} contains {word}");
            }
        }
    }
}
