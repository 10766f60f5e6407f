//! The public suite: every promise of a bus, as a test whose name is the promise.
//!
//! A bus's author gives [`bus_suite!`](crate::bus_suite) an expression that makes an [`BusTestEnv`]; the macro makes
//! one `#[test]` of each promise:
//!
//! ```ignore
//! mod my_bus {
//!     async fn setup() -> headwater_bus::conformance::BusTestEnv {
//!         headwater_bus::conformance::BusTestEnv::new(MyBus::open(headwater_bus::conformance::registry()).await)
//!     }
//!     headwater_bus::bus_suite!(setup());
//! }
//! ```
//!
//! Promises: nothing is asserted to be faster than seconds, and names are unique, so tests may share one server.

#![allow(missing_docs, reason = "the name of a promise is its documentation")]
#![allow(
    clippy::unwrap_used,
    reason = "a promise that cannot be tested to its end is a failed test"
)]

mod env;

pub mod bad_input;
pub mod closing;
pub mod durable;
pub mod live;
pub mod publish;

pub use env::{Announced, BusTestEnv, HandlerLog, Noted, Unregistered, registry};

/// Makes a `#[test]` of every promise. See the [module](crate::conformance).
#[macro_export]
macro_rules! bus_suite {
    ($setup:expr) => {
        $crate::__bus_cases! { ($setup)
            live {
                a_handler_gets_what_is_published_once,
                handlers_run_in_the_order_of_their_subscriptions,
                handlers_of_one_subscription_run_in_their_order,
                a_handler_gets_only_events_of_its_type,
                a_subscription_to_a_session_gets_only_its_events,
                a_handler_that_fails_does_not_stop_the_others,
                a_handler_that_panics_does_not_stop_the_others,
                a_handler_that_takes_too_long_has_failed,
                unsubscribing_tells_whether_there_was_a_subscription,
                a_handler_may_publish_and_goes_on_with_the_trace,
                handlers_that_publish_in_great_numbers_do_not_wait_for_each_other,
            }
            publish {
                a_batch_keeps_its_order,
                an_empty_batch_is_nothing,
                an_event_carries_what_surrounds_it,
                a_publish_that_is_dropped_is_carried_out_to_its_end,
                a_healthy_bus_says_so,
                an_event_with_an_id_counts_once,
                an_id_counts_in_its_own_session_only,
            }
            durable {
                a_group_gets_each_event_of_its_own_process_once,
                live_and_durable_subscriptions_get_each_event_once,
                two_groups_get_every_event,
                what_fails_is_tried_again,
                what_panics_is_tried_again,
                of_several_handlers_only_those_that_failed_run_again,
                what_runs_out_of_tries_does_not_hold_up_the_rest,
                a_handler_that_gives_up_is_not_asked_again,
                types_without_a_handler_do_not_hold_up_the_rest,
                a_group_is_subscribed_once_and_free_again_afterwards,
                no_more_than_concurrency_events_are_in_hand_at_once,
                health_tells_what_is_in_hand_and_what_waits,
            }
            bad_input {
                a_type_that_is_not_registered_is_refused,
                an_event_of_one_mebibyte_is_taken_and_a_byte_more_is_refused,
                a_session_with_odd_characters_is_refused,
                an_event_without_a_session_is_refused,
                one_bad_event_keeps_its_whole_batch_out,
                subscriptions_that_make_no_sense_are_refused,
            }
            closing {
                a_closed_bus_refuses_everything,
                closing_waits_for_handlers,
                closing_twice_is_fine,
                an_event_that_waits_for_its_next_try_does_not_hold_up_closing,
            }
        }
    };
}

/// Makes tests of a list of promises.
#[doc(hidden)]
#[macro_export]
macro_rules! __bus_cases {
    (($setup:expr) $($module:ident { $($case:ident,)* })*) => {
        $(mod $module {
            #[allow(unused_imports)]
            use super::*;

            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                $crate::conformance::$module::$case($setup.await).await;
            })*
        })*
    };
}
