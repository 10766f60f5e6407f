//! Trace context across processes (W3C `traceparent`): spans for sends and handler calls.
//!
//! Upstream: `producer` opens a span per send, `consumer` one per handler call. Downstream: `tracing`, and through a
//! [`TraceBridge`] a trace collector.
//! Guarantees: a message carries the context of the span that sent it in the header `traceparent`; a `traceparent` set by
//! the application is not changed. A send in a handler belongs to the trace of the handled message. If no span is
//! recorded and there is no trace to continue, nothing is added to the message and a send has no extra cost.

use std::cell::RefCell;
use std::fmt;

use fastrand::Rng;
use tracing::field::{Empty, display};
use tracing::{Span, debug_span};
use uuid::Uuid;

use crate::message::{Message, MessageHeaders};
use crate::topic::{GroupName, Partition, TopicName};

/// The header that carries a [`TraceContext`].
pub const TRACEPARENT: &str = "traceparent";

const SAMPLED: u8 = 1;

/// One span in one trace, as the header `traceparent` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceContext {
    trace_id: u128,
    span_id: u64,
    flags: u8,
}

impl TraceContext {
    /// The context with these ids; `None` if one of them is zero, which is invalid.
    pub fn new(trace_id: u128, span_id: u64, is_sampled: bool) -> Option<Self> {
        let flags = if is_sampled { SAMPLED } else { 0 };
        (trace_id != 0 && span_id != 0).then_some(Self { trace_id, span_id, flags })
    }

    /// The first span of a new trace.
    pub fn root() -> Self {
        let trace_id = u128::from(random()) << 64 | u128::from(random());
        Self { trace_id, span_id: random(), flags: SAMPLED }
    }

    /// A new span of the same trace.
    pub fn child(self) -> Self {
        Self { span_id: random(), ..self }
    }

    /// The context of the message that the current task handles; `None` outside of a handler.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(|context| *context).ok()
    }

    /// The trace id.
    pub fn trace_id(self) -> u128 {
        self.trace_id
    }

    /// The span id.
    pub fn span_id(self) -> u64 {
        self.span_id
    }

    /// Whether the sampled flag is set.
    pub fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// Parses a `traceparent`; `None` if it is invalid.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let dashes = [2, 35, 52].iter().all(|at| bytes.get(*at) == Some(&b'-'));
        let hex = |from: usize, to: usize| {
            let digits = bytes.get(from..to)?;
            let is_hex = |b: &u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
            digits.iter().all(is_hex).then(|| u128::from_str_radix(&text[from..to], 16).ok())?
        };
        let version = hex(0, 2)?;
        // Later versions may append fields; ff is invalid.
        let has_valid_end = match version {
            0xff => false,
            0 => bytes.len() == 55,
            _ => bytes.len() == 55 || bytes.get(55) == Some(&b'-'),
        };
        if !(dashes && has_valid_end) {
            return None;
        }
        let (span_id, flags) =
            (u64::try_from(hex(36, 52)?).ok()?, u8::try_from(hex(53, 55)?).ok()?);
        Self::new(hex(3, 35)?, span_id, flags & SAMPLED != 0)
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, self.flags)
    }
}

/// Connects spans of `tracing` to the ids of a trace collector. Without a bridge, this crate generates ids and records
/// them as fields of the spans.
pub trait TraceBridge: fmt::Debug + Send + Sync {
    /// The context of a span, if the collector knows it.
    fn context(&self, span: &Span) -> Option<TraceContext>;

    /// Sets the parent of a span to a span of another process.
    fn set_parent(&self, span: &Span, parent: TraceContext);
}

/// A span and its trace context.
#[derive(Clone, Debug)]
pub(crate) struct TracedSpan {
    pub(crate) span: Span,
    /// The context for messages sent in the span, and for the handler.
    pub(crate) context: Option<TraceContext>,
}

/// The span of a send. Its context is for messages without one.
pub(crate) fn send_span(
    bridge: Option<&dyn TraceBridge>,
    topic: &TopicName,
    partition: Option<Partition>,
    headers: &MessageHeaders,
) -> TracedSpan {
    let span = debug_span!(
        "send",
        %topic,
        partition,
        trace_id = Empty,
        span_id = Empty,
        parent_span_id = Empty
    );
    let given = if headers.is_empty() { None } else { headers.get(TRACEPARENT) };
    let parent = match given {
        Some(text) => TraceContext::parse(text),
        None => TraceContext::current()
            .or_else(|| bridge.and_then(|bridge| bridge.context(&Span::current()))),
    };
    trace(bridge, span, parent)
}

/// The span of a handler call, a child of the send.
pub(crate) fn handle_span(
    bridge: Option<&dyn TraceBridge>,
    message: &Message,
    group: &GroupName,
) -> TracedSpan {
    let span = debug_span!(
        "handle",
        topic = %message.topic,
        partition = message.partition,
        %group,
        entry_id = %message.id,
        attempt = message.attempt,
        trace_id = Empty,
        span_id = Empty,
        parent_span_id = Empty
    );
    let parent = message.headers.get(TRACEPARENT).and_then(|text| TraceContext::parse(text));
    trace(bridge, span, parent)
}

fn trace(bridge: Option<&dyn TraceBridge>, span: Span, parent: Option<TraceContext>) -> TracedSpan {
    if span.is_disabled() {
        // This span is not recorded, but its parent and children may be.
        return TracedSpan { span, context: parent.map(TraceContext::child) };
    }
    if let (Some(bridge), Some(parent)) = (bridge, parent) {
        bridge.set_parent(&span, parent);
    }
    let known = bridge.and_then(|bridge| bridge.context(&span));
    let context =
        known.unwrap_or_else(|| parent.map_or_else(TraceContext::root, TraceContext::child));
    span.record("trace_id", display(format_args!("{:032x}", context.trace_id)));
    span.record("span_id", display(format_args!("{:016x}", context.span_id)));
    if let Some(parent) = parent {
        span.record("parent_span_id", display(format_args!("{:016x}", parent.span_id)));
    }
    TracedSpan { span, context: Some(context) }
}

tokio::task_local! {
    static CURRENT: TraceContext;
}

/// Runs a handler with a current context, so that its sends belong to the trace.
pub(crate) async fn with_context<F: Future>(
    context: Option<TraceContext>,
    handler: F,
) -> F::Output {
    match context {
        Some(context) => CURRENT.scope(context, handler).await,
        None => handler.await,
    }
}

/// A random number that is not zero. Trace ids must be unique over processes, for which the seed of `fastrand` (time and thread) is
/// too weak; they need not be unpredictable.
fn random() -> u64 {
    thread_local! {
        static RANDOM: RefCell<Rng> = RefCell::new(Rng::with_seed(Uuid::new_v4().as_u64_pair().1));
    }
    RANDOM.with_borrow_mut(|random| random.u64(1..))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_context_parses_its_own_text() {
        let context = TraceContext::parse(EXAMPLE).unwrap();
        assert_eq!(context.trace_id(), 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!((context.span_id(), context.is_sampled()), (0x00f0_67aa_0ba9_02b7, true));
        assert_eq!(context.to_string(), EXAMPLE);
        let (root, other) = (TraceContext::root(), TraceContext::root());
        assert_eq!(TraceContext::parse(&root.to_string()), Some(root));
        assert_ne!(root.trace_id(), other.trace_id());
        assert_eq!(root.child().trace_id(), root.trace_id());
        assert_ne!(root.child().span_id(), root.span_id());
    }

    #[test]
    fn an_invalid_traceparent_is_rejected() {
        for text in [
            "",
            "00",
            "no such",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00_4bf92f3577b34da6a3ce929d0e0e4736_00f067aa0ba902b7_01",
            "00-4bf92f3577b34da6a3ce929d0e0e473键-0f067aa0ba902b7-01",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01x",
        ] {
            assert_eq!(TraceContext::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn unknown_fields_of_a_later_version_are_ignored() {
        let later = EXAMPLE.replacen("00", "cc", 1) + "-later-fields";
        assert_eq!(TraceContext::parse(&later), TraceContext::parse(EXAMPLE));
    }

    #[tokio::test]
    async fn a_send_in_a_handler_continues_its_trace_and_other_sends_have_none() {
        let topic = TopicName::new("orders").unwrap();
        let send = |headers: MessageHeaders| send_span(None, &topic, None, &headers).context;
        assert_eq!(send(MessageHeaders::new()), None);
        let handled = TraceContext::root();
        let sent =
            with_context(Some(handled), async { send(MessageHeaders::new()) }).await.unwrap();
        assert_eq!(sent.trace_id(), handled.trace_id());
        assert_ne!(sent.span_id(), handled.span_id());
        assert_eq!(TraceContext::current(), None);
    }
}
