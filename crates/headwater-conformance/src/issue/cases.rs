//! The list of all cases, and the macros that generate tests from it.

use super::TestResult;

/// Generates a `#[test]` for every case, in a module per subject. See the [module](crate::issue).
#[macro_export]
macro_rules! store_suite {
    ($setup:expr) => {
        $crate::__store_tests! { ($setup)
            record {
                an_event_creates_its_issue_and_queues_it,
                the_trace_of_an_event_is_returned_with_its_run,
                a_duplicate_of_a_pending_event_nudges_again,
                a_duplicate_of_a_processed_event_changes_nothing,
                events_of_one_issue_share_one_nudge,
                issue_numbers_repeat_between_projects_and_integrations,
                a_key_used_for_a_different_event_is_a_conflict_and_stores_nothing,
                keys_are_unique_per_integration,
                duplicates_in_one_batch_are_stored_once,
                a_conflicting_event_in_a_batch_does_not_hide_a_duplicate,
                an_event_without_a_key_is_deduplicated_by_its_content,
                equal_events_of_two_projects_without_a_key_are_both_stored,
                a_burst_in_a_debounce_window_is_one_run_with_all_its_events,
                no_event_waits_longer_than_max_wait,
                a_debounce_window_ends_early_at_events_max,
                events_do_not_end_a_backoff,
                events_do_not_end_the_delay_of_a_deferred_run,
                payloads_of_maximum_size_and_depth_are_returned_unchanged,
                a_batch_of_maximum_size_is_recorded,
                text_in_any_script_is_returned_unchanged,
                a_payload_that_jsonb_cannot_store_is_sanitized_and_the_original_is_kept,
                originals_are_stored_once_and_only_with_their_event,
                empty_batches_have_no_effect,
                new_and_known_issues_of_a_batch_count_their_own_events,
                a_new_issue_starts_with_the_debounce_window_of_its_batch,
                two_batches_that_create_the_same_issues_at_once_lose_no_event,
            }
            claims {
                a_claim_returns_all_pending_events_in_order,
                a_claim_returns_at_most_events_max_events,
                a_claim_is_limited_in_bytes_and_never_empty,
                a_second_worker_gets_the_owner_of_the_claim,
                a_claim_of_an_idle_or_missing_issue_reports_so,
                an_issue_named_twice_is_claimed_once,
                results_of_a_batch_of_claims_are_in_order,
                each_issue_of_a_batch_is_claimed_with_its_own_events,
                an_expired_claim_goes_to_the_next_worker_with_a_new_epoch,
                too_many_expired_claims_quarantine_the_issue,
                a_heartbeat_renews_a_claim_and_reports_newer_events,
                a_heartbeat_of_a_lost_claim_reports_the_loss_and_changes_nothing,
            }
            completion {
                a_completed_run_leaves_its_issue_idle,
                an_event_that_arrives_while_processing_is_not_lost,
                events_beyond_the_run_requeue_the_issue,
                a_completion_of_a_lost_claim_is_fenced_and_writes_nothing,
                a_repeated_completion_is_reported_and_changes_nothing,
                fields_are_merged_and_discussions_replaced,
                a_completion_counts_only_its_own_unprocessed_events,
                a_fenced_completion_does_not_fail_the_batch,
                valid_fenced_repeated_and_unknown_runs_of_a_batch_have_their_own_results,
                a_run_may_complete_without_processing_any_event,
                a_completion_after_its_claim_was_swept_is_fenced,
                fields_over_the_size_limit_are_rejected,
            }
            failure {
                a_failed_run_is_retried_after_its_backoff,
                the_last_failure_quarantines_and_keeps_the_error,
                a_permanent_failure_quarantines_at_once,
                a_deferred_run_counts_no_attempt_however_often,
                events_for_a_quarantined_issue_wait_for_its_release,
                a_failure_of_a_lost_claim_is_fenced,
                a_released_claim_counts_no_attempt,
                a_success_resets_the_failure_counters,
                an_error_text_is_sanitized_and_truncated,
                a_quarantine_leaves_a_dead_letter_that_remains_after_the_release,
                a_claim_that_quarantines_leaves_a_dead_letter,
            }
            sweep {
                an_overdue_nudge_is_sent_again_and_only_once,
                an_issue_that_is_not_due_is_not_nudged,
                an_expired_claim_is_requeued_and_nudged,
                repeatedly_expired_claims_are_quarantined,
                a_sweep_stops_at_its_limit_and_reports_more,
                a_live_claim_is_left_alone,
                a_released_or_retried_issue_is_nudged_by_the_next_sweep,
                only_delivered_rows_and_released_dead_letters_are_removed_after_their_retention,
            }
            outbox {
                replies_of_an_issue_are_taken_in_order_one_at_a_time,
                a_failed_reply_blocks_only_later_replies_of_its_issue,
                a_dead_reply_unblocks_later_replies,
                a_dead_reply_can_be_retried,
                the_facts_about_a_row_follow_its_state,
                rows_are_listed_by_status_and_issue_in_both_directions,
                a_retried_dead_reply_is_the_next_of_its_issue,
                unsettled_deliveries_are_counted_until_an_operator_retries,
                a_reply_of_a_dead_deliverer_is_redelivered_with_the_same_key,
                a_released_reply_counts_no_attempt,
                an_unavailable_target_counts_no_attempt,
                no_reply_waits_for_an_event_and_each_kind_keeps_its_order,
                two_deliverers_never_take_the_same_reply,
                a_backlog_of_one_target_does_not_block_another,
                free_slots_go_to_the_target_with_the_fewest_in_flight,
                failing_targets_share_one_limit,
                a_row_settled_twice_is_settled_once,
                a_new_outbox_row_wakes_a_waiting_deliverer,
                idempotency_keys_are_unique,
                a_wait_for_the_outbox_times_out,
            }
            transaction {
                changes_of_a_transaction_are_visible_after_the_commit,
                a_dropped_transaction_is_rolled_back,
                an_outbox_row_is_written_once_however_often_its_transaction_is_repeated,
                a_key_used_for_a_different_row_is_a_conflict_and_nothing_is_written,
                invalid_rows_are_rejected_and_the_transaction_stays_usable,
                rows_of_transactions_and_runs_are_delivered_in_commit_order,
                a_row_written_while_the_previous_one_is_settled_is_delivered,
                a_committed_transaction_wakes_a_waiting_deliverer,
            }
            runs {
                every_end_of_a_run_leaves_a_row,
                runs_are_paged_newest_first_with_their_events,
                runs_are_deleted_after_their_retention_and_with_their_issue,
                a_run_that_was_already_stored_does_not_prevent_a_completion,
            }
            admin {
                an_integration_is_created_once_and_keeps_its_provider,
                pages_of_issues_contain_each_issue_once,
                issues_are_listed_by_status_and_quarantine,
                event_logs_are_listed_by_whether_they_are_processed,
                an_event_log_is_found_by_its_id,
                an_issue_is_found_by_its_ids_at_the_provider,
                releasing_an_issue_that_is_not_quarantined_changes_nothing,
                a_retry_ends_a_wait_but_not_a_run,
                operations_on_missing_objects_are_not_found,
                the_facts_report_live_workers,
                a_worker_is_alive_until_its_heartbeat_expires,
                the_backlog_is_counted,
                the_consistency_report_is_consistent_in_every_state,
                a_consistency_check_reads_pages_and_can_be_resumed,
            }
            bad_input {
                an_invalid_event_does_not_fail_the_batch,
                batches_over_a_limit_are_rejected,
                an_invalid_completion_is_rejected,
                invalid_options_are_rejected,
            }
            concurrency {
                events_recorded_by_64_concurrent_callers_are_stored_once,
                concurrent_duplicates_are_stored_once,
                one_of_eight_concurrent_claims_wins,
                concurrent_recorders_and_workers_lose_and_repeat_nothing,
                a_consistency_check_during_changes_reports_no_inconsistency,
                batches_in_any_order_do_not_deadlock,
                rows_written_during_deliveries_are_delivered_in_order,
            }
            differential {
                random_sequences_of_calls_match_the_state_machine,
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __store_tests {
    (($setup:expr) $($subject:ident { $($name:ident,)* })*) => {
        $(mod $subject {
            #[allow(unused_imports, reason = "the set-up expression may use items of the parent module")]
            use super::*;
            $(#[test]
            fn $name() -> $crate::issue::TestResult {
                $crate::issue::run(async {
                    $crate::issue::$subject::$name($setup.await?).await
                })
            })*
        })*
    };
}

/// Runs one case on its own runtime.
pub fn run(case: impl Future<Output = TestResult>) -> TestResult {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build()?.block_on(case)
}
