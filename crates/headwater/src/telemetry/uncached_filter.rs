//! A filter that is asked anew for every span and event.
//!
//! Upstream: `telemetry` puts it around the filters of its layers. Why: somebody who only asks whether he would be heard, as
//! `sqlx` does by `log_enabled!` after each statement on Postgres, leaves the answer behind on his thread. A filter whose answer is kept for good
//! is not asked again, so the next span or event on that thread was given the answer meant for another, and lost.

use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Filter};

/// Asks the filter inside each time, unless it never wants to hear of a place.
pub(super) struct Fresh<F>(pub(super) F);

impl<S, F: Filter<S>> Filter<S> for Fresh<F> {
    fn enabled(&self, about: &Metadata<'_>, context: &Context<'_, S>) -> bool {
        self.0.enabled(about, context)
    }

    fn callsite_enabled(&self, about: &'static Metadata<'static>) -> Interest {
        let interest = self.0.callsite_enabled(about);
        if interest.is_never() { interest } else { Interest::sometimes() }
    }

    fn event_enabled(&self, event: &Event<'_>, context: &Context<'_, S>) -> bool {
        self.0.event_enabled(event, context)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        self.0.max_level_hint()
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        self.0.on_new_span(attributes, id, context);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        self.0.on_record(id, values, context);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        self.0.on_enter(id, context);
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        self.0.on_exit(id, context);
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        self.0.on_close(id, context);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tracing::Subscriber;
    use tracing::callsite::Callsite;
    use tracing_subscriber::filter::filter_fn;
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::{Layer, Registry};

    use super::*;

    /// Counts spans and events.
    #[derive(Clone, Default)]
    struct Heard(Arc<AtomicUsize>);

    impl Heard {
        fn count(&self) -> usize {
            self.0.load(Ordering::SeqCst)
        }
    }

    impl<S: Subscriber> Layer<S> for Heard {
        fn on_new_span(&self, _: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }

        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    type AnyLayer = Box<dyn Layer<Registry> + Send + Sync>;

    /// As the crate `log` asks for `log_enabled!`.
    fn only_ask() {
        let place = tracing::callsite! {
            name: "a statement",
            kind: tracing::metadata::Kind::EVENT,
            target: "sqlx::query",
            level: tracing::Level::DEBUG,
            fields:
        };
        let _ = tracing::dispatcher::get_default(|current| current.enabled(place.metadata()));
    }

    #[test]
    fn whoever_only_asks_costs_the_next_span_nothing() {
        let (logs, traces) = (Heard::default(), Heard::default());
        let ours = traces.clone().with_filter(Fresh(filter_fn(|about| about.is_span())));
        let layers: Vec<AnyLayer> =
            vec![logs.clone().with_filter(Fresh(LevelFilter::INFO)).boxed(), ours.boxed()];
        tracing::subscriber::with_default(Registry::default().with(layers), || {
            for _ in 0..3 {
                only_ask();
                let _span = tracing::info_span!("a span");
            }
        });
        assert_eq!((logs.count(), traces.count()), (3, 3));
    }

    #[test]
    fn nor_does_it_cost_the_next_line_of_the_log_anything() {
        let logs = Heard::default();
        let layers: Vec<AnyLayer> =
            vec![logs.clone().with_filter(Fresh(LevelFilter::INFO)).boxed()];
        tracing::subscriber::with_default(Registry::default().with(layers), || {
            for _ in 0..3 {
                only_ask();
                tracing::info!("an event");
            }
        });
        assert_eq!(logs.count(), 3);
    }
}
