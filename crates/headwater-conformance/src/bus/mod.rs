//! The public conformance suite: one test per guarantee of a bus.
//!
//! Pass [`bus_suite!`](crate::bus_suite) an expression that creates a [`BusTestEnv`]; the macro generates one
//! `#[test]` for each case:
//!
//! ```ignore
//! mod my_bus {
//!     async fn setup() -> headwater_conformance::bus::BusTestEnv {
//!         headwater_conformance::bus::BusTestEnv::new(MyBus::open(headwater_conformance::bus::registry()).await)
//!     }
//!     headwater_conformance::bus_suite!(setup());
//! }
//! ```
//!
//! Tests assert no timing below seconds and use unique names, so they may share one server.

#![allow(missing_docs, reason = "the name of a case is its documentation")]
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod env;

pub mod bad_input;
pub mod closing;
pub mod durable;
pub mod live;
pub mod publish;

pub use env::{Announced, BusTestEnv, HandlerLog, Noted, Unregistered, registry};

/// Generates a `#[test]` for every case. See the [module](crate::bus).
#[macro_export]
macro_rules! bus_suite {
    ($setup:expr) => {
        $crate::__bus_cases! { ($setup)
            live {
                a_handler_receives_each_event_once,
                handlers_run_in_the_order_of_their_subscriptions,
                handlers_of_one_subscription_run_in_order,
                a_handler_receives_only_events_of_its_type,
                a_subscription_to_a_session_receives_only_its_events,
                a_failed_handler_does_not_stop_the_others,
                a_panicking_handler_does_not_stop_the_others,
                a_handler_that_exceeds_its_timeout_has_failed,
                unsubscribe_returns_whether_the_subscription_existed,
                an_event_published_by_a_handler_joins_the_trace,
                many_handlers_that_publish_do_not_deadlock,
            }
            publish {
                a_batch_keeps_its_order,
                an_empty_batch_has_no_results,
                an_event_has_a_complete_envelope,
                a_dropped_publish_is_completed,
                a_healthy_bus_reports_its_health,
                publishing_under_the_same_id_is_idempotent,
                event_ids_are_scoped_to_their_session,
            }
            durable {
                a_group_receives_each_event_of_its_own_process_once,
                live_and_durable_subscriptions_receive_each_event_once,
                every_group_receives_every_event,
                a_failed_event_is_retried,
                a_panicked_event_is_retried,
                only_the_failed_handlers_of_an_event_are_retried,
                an_event_that_runs_out_of_attempts_does_not_block_others,
                a_permanent_failure_is_not_retried,
                events_without_a_handler_do_not_block_others,
                a_group_is_subscribed_once_and_free_after_unsubscribe,
                at_most_concurrency_events_are_handled_at_once,
                health_reports_pending_and_lag,
            }
            bad_input {
                an_unregistered_type_is_rejected,
                a_payload_of_one_mebibyte_is_accepted_and_a_larger_one_rejected,
                an_invalid_session_id_is_rejected,
                a_session_event_without_a_session_is_rejected,
                one_invalid_event_rejects_the_whole_batch,
                invalid_subscriptions_are_rejected,
            }
            closing {
                a_closed_bus_rejects_calls,
                closing_waits_for_handlers,
                closing_is_idempotent,
                an_event_waiting_for_its_retry_does_not_delay_closing,
            }
        }
    };
}

/// Generates tests from a list of cases.
#[doc(hidden)]
#[macro_export]
macro_rules! __bus_cases {
    (($setup:expr) $($module:ident { $($case:ident,)* })*) => {
        $(mod $module {
            #[allow(unused_imports)]
            use super::*;

            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                $crate::bus::$module::$case($setup.await).await;
            })*
        })*
    };
}
