//! A filter whose result is not cached per callsite.
//!
//! Upstream: `telemetry` wraps the filters of its layers in it. Why: `log_enabled!`, which `sqlx` calls after each
//! statement on PostgreSQL, leaves its result in thread-local state. With cached interest the next span or event on
//! that thread was given that stale result and was lost.

use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Filter};

/// Evaluates the inner filter every time, unless it is never interested in a callsite.
pub(super) struct UncachedFilter<F>(pub(super) F);

impl<S, F: Filter<S>> Filter<S> for UncachedFilter<F> {
    fn enabled(&self, metadata: &Metadata<'_>, context: &Context<'_, S>) -> bool {
        self.0.enabled(metadata, context)
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        let interest = self.0.callsite_enabled(metadata);
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
    struct CountingLayer(Arc<AtomicUsize>);

    impl CountingLayer {
        fn count(&self) -> usize {
            self.0.load(Ordering::SeqCst)
        }
    }

    impl<S: Subscriber> Layer<S> for CountingLayer {
        fn on_new_span(&self, _: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }

        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    type AnyLayer = Box<dyn Layer<Registry> + Send + Sync>;

    /// Asks like `log_enabled!` of the crate `log`.
    fn ask_if_enabled() {
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
    fn log_enabled_does_not_drop_the_next_span() {
        let (logs, traces) = (CountingLayer::default(), CountingLayer::default());
        let ours =
            traces.clone().with_filter(UncachedFilter(filter_fn(|metadata| metadata.is_span())));
        let layers: Vec<AnyLayer> =
            vec![logs.clone().with_filter(UncachedFilter(LevelFilter::INFO)).boxed(), ours.boxed()];
        tracing::subscriber::with_default(Registry::default().with(layers), || {
            for _ in 0..3 {
                ask_if_enabled();
                let _span = tracing::info_span!("a span");
            }
        });
        assert_eq!((logs.count(), traces.count()), (3, 3));
    }

    #[test]
    fn log_enabled_does_not_drop_the_next_event() {
        let logs = CountingLayer::default();
        let layers: Vec<AnyLayer> =
            vec![logs.clone().with_filter(UncachedFilter(LevelFilter::INFO)).boxed()];
        tracing::subscriber::with_default(Registry::default().with(layers), || {
            for _ in 0..3 {
                ask_if_enabled();
                tracing::info!("an event");
            }
        });
        assert_eq!(logs.count(), 3);
    }
}
