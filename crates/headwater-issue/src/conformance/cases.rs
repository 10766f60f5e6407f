//! The one list of all promises, and the macros that make tests of it.

use super::StoreTestResult;

/// Makes a `#[test]` of every promise, in a module per subject. See the [module](crate::conformance).
#[macro_export]
macro_rules! store_conformance_suite {
    ($setup:expr) => {
        $crate::__store_conformance_tests! { ($setup)
            record {
                an_event_creates_its_issue_and_queues_it,
                the_same_event_again_is_a_duplicate_that_nudges_while_it_waits,
                a_duplicate_of_a_processed_event_changes_nothing,
                events_of_one_issue_share_one_nudge,
                issue_numbers_repeat_between_projects_and_integrations,
                a_key_used_for_another_event_is_refused_and_stores_nothing,
                one_key_serves_two_integrations,
                twins_in_one_batch_are_stored_once,
                a_false_twin_does_not_take_the_place_of_the_right_one,
                an_event_without_a_key_is_stored_once_by_what_it_says,
                the_same_event_of_two_projects_without_a_key_is_two_events,
                a_burst_in_a_quiet_window_is_one_run_with_all_its_events,
                no_event_waits_longer_than_the_longest_wait,
                a_quiet_window_ends_with_as_many_events_as_a_run_can_have,
                a_backoff_does_not_end_with_the_number_of_events,
                a_run_that_was_put_off_stays_so_however_many_events_come,
                the_largest_and_the_deepest_payloads_come_back,
                as_many_events_as_allowed_are_taken_in_one_call,
                text_in_any_script_comes_back,
                a_payload_that_a_store_cannot_hold_is_sanitized_and_the_original_is_kept,
                originals_are_stored_once_and_only_with_their_event,
                no_events_are_no_work,
            }
            claims {
                a_claim_brings_all_pending_events_in_order,
                a_claim_brings_at_most_as_many_events_as_asked_for,
                a_run_is_bounded_in_bytes_and_never_empty,
                a_second_worker_is_told_who_has_the_issue,
                an_issue_that_is_missing_or_idle_says_so,
                an_issue_named_twice_is_won_once,
                issues_are_claimed_in_one_call_and_answered_in_order,
                a_claim_that_ran_out_goes_to_the_next_worker_with_a_new_epoch,
                too_many_claims_that_ran_out_quarantine_the_issue,
                a_heartbeat_keeps_a_claim_and_tells_of_newer_events,
                a_heartbeat_of_a_lost_claim_says_so_and_changes_nothing,
            }
            completion {
                a_completed_run_leaves_its_issue_idle,
                an_event_that_arrives_while_processing_is_not_lost,
                events_beyond_the_run_requeue_the_issue,
                a_zombie_completes_nothing_and_writes_nothing,
                a_repeated_completion_says_so_and_changes_nothing,
                fields_are_merged_and_discussions_replaced,
                a_completion_counts_only_its_own_unprocessed_events,
                a_fenced_completion_does_not_fail_its_neighbours,
                a_run_may_complete_without_having_handled_anything,
                a_completion_after_its_claim_was_swept_is_fenced,
                fields_that_would_grow_beyond_their_limit_are_refused,
            }
            failure {
                a_failed_run_is_tried_again_after_its_backoff,
                the_last_failure_quarantines_and_keeps_the_error,
                a_hopeless_failure_quarantines_at_once,
                a_run_that_is_put_off_counts_no_attempt_however_often,
                events_for_a_quarantined_issue_wait_for_its_release,
                a_zombie_cannot_fail_a_run,
                a_claim_given_back_counts_no_attempt,
                a_success_forgets_the_failures_before_it,
                an_error_text_of_any_kind_is_kept,
                a_quarantine_leaves_a_dead_letter_that_outlives_it,
                a_claim_that_quarantines_leaves_a_dead_letter,
            }
            sweep {
                an_overdue_nudge_is_sent_again_and_only_once,
                an_issue_that_is_not_due_is_not_nudged,
                a_claim_that_ran_out_is_requeued_and_nudged,
                claims_that_run_out_again_and_again_are_quarantined,
                a_sweep_stops_at_its_limit_and_says_so,
                a_live_claim_is_left_alone,
                what_an_operator_frees_is_nudged_by_the_next_sweep,
                what_was_delivered_is_removed_after_a_while_and_nothing_else,
            }
            outbox {
                replies_come_in_order_one_issue_at_a_time,
                a_reply_that_failed_holds_back_the_later_ones_of_its_issue_only,
                a_dead_reply_lets_the_later_ones_go_on,
                a_dead_reply_can_be_tried_again,
                a_dead_reply_that_is_tried_again_is_the_next_of_its_issue,
                deliverers_that_die_are_counted_until_an_operator_tries_again,
                a_reply_of_a_dead_deliverer_comes_back_with_the_same_key,
                a_released_reply_counts_no_attempt,
                a_way_that_is_closed_counts_no_attempt,
                no_reply_waits_for_an_event_and_each_kind_keeps_its_order,
                two_deliverers_never_have_the_same_reply,
                a_backlog_of_one_target_does_not_hold_back_another,
                free_slots_go_to_the_target_with_the_fewest_in_flight,
                failing_targets_share_one_limit,
                a_row_settled_twice_is_settled_once,
                an_entry_in_the_outbox_wakes_who_waits_for_it,
                idempotency_keys_are_never_used_twice,
                a_wait_for_the_outbox_ends,
            }
            transaction {
                what_a_transaction_wrote_is_there_when_it_is_committed,
                a_transaction_that_is_dropped_leaves_nothing,
                a_row_is_written_once_however_often_its_transaction_is_repeated,
                a_key_of_another_row_is_refused_and_nothing_is_written,
                bad_rows_are_refused_and_leave_the_transaction_usable,
                rows_of_transactions_and_of_runs_come_in_the_order_of_their_commits,
                a_row_written_while_the_one_before_it_is_settled_is_not_left_behind,
                a_committed_transaction_wakes_who_waits_for_the_outbox,
            }
            admin {
                an_integration_is_created_once_and_keeps_its_provider,
                pages_of_issues_show_each_once,
                issues_are_listed_by_status_and_quarantine,
                event_logs_are_listed_by_whether_they_are_processed,
                an_issue_is_found_by_its_outside_names,
                a_release_of_a_free_issue_changes_nothing,
                an_operator_can_end_a_wait_but_not_a_run,
                an_operator_is_told_what_is_missing,
                the_facts_tell_who_is_alive,
                a_worker_lives_as_long_as_it_said,
                the_backlog_is_counted,
                the_audit_adds_up_in_every_state,
            }
            bad_input {
                a_bad_event_does_not_fail_its_neighbours,
                batches_beyond_a_limit_are_refused_whole,
                a_completion_that_cannot_be_kept_is_refused,
                options_that_make_no_sense_are_refused,
            }
            concurrency {
                events_recorded_by_64_at_once_are_all_there_once,
                twins_recorded_at_once_are_stored_once,
                of_eight_workers_one_wins_the_claim,
                recorders_and_workers_at_once_lose_and_repeat_nothing,
                batches_in_any_order_never_block_each_other,
                rows_written_while_others_are_delivered_are_all_delivered_in_order,
            }
            differential {
                random_sequences_of_calls_follow_the_state_machine,
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __store_conformance_tests {
    (($setup:expr) $($subject:ident { $($name:ident,)* })*) => {
        $(mod $subject {
            #[allow(unused_imports, reason = "the set-up may name what stands around the suite")]
            use super::*;
            $(#[test]
            fn $name() -> $crate::conformance::StoreTestResult {
                $crate::conformance::run(async {
                    $crate::conformance::$subject::$name($setup.await?).await
                })
            })*
        })*
    };
}

/// Runs one promise on a runtime of its own, as the tests of the suite do.
pub fn run(promise: impl Future<Output = StoreTestResult>) -> StoreTestResult {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build()?.block_on(promise)
}
