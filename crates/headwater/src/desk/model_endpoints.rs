//! The model endpoints of the desk, each with its circuit breaker, in the order in which runs try them.
//!
//! Upstream: `build` makes them from the settings, `handler` calls them. No I/O. Guarantees: an integration uses the endpoints
//! of its policy in the order given there, or all in the order of the settings; a failing endpoint is skipped until its
//! breaker lets a call test it.

use std::sync::Arc;
use std::time::Duration;

use headwater_issue::HandlerError;

use crate::desk::breaker::{BreakerOpen, CircuitBreaker};
use crate::desk::model::{LanguageModel, ModelError};
use crate::desk::model_runs::Prices;

/// Counter of answers of another endpoint than the first one of the integration. Labels: `integration`, `model`.
pub const MODEL_FALLBACKS: &str = "headwater_model_fallbacks_total";

/// Id of the model that [`Desk::new`](crate::desk::Desk::new) gets.
pub const DEFAULT_MODEL: &str = "default";

/// A named model.
#[derive(Clone, Debug)]
pub struct ModelEndpoint {
    /// Its id, as integrations name it.
    pub id: String,
    /// The model.
    pub model: Arc<dyn LanguageModel>,
    /// Price of its tokens.
    pub prices: Prices,
}

/// Whether a model endpoint is called, as this process sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelEndpointState {
    /// Its id.
    pub id: String,
    /// Name of the model, as in metrics and reports.
    pub model: String,
    /// False while its circuit breaker is open: only single calls test whether it works again.
    pub is_available: bool,
}

/// A model with its breaker.
#[derive(Debug)]
pub(crate) struct GuardedModel {
    pub(crate) endpoint: ModelEndpoint,
    /// Name in metrics, reports, sessions and logs.
    pub(crate) label: String,
    pub(crate) breaker: CircuitBreaker,
}

/// All models of the desk.
#[derive(Debug)]
pub(crate) struct ModelEndpoints(Vec<GuardedModel>);

impl ModelEndpoints {
    /// `pause` is the pause before the first test of a failing endpoint.
    pub(crate) fn new(endpoints: Vec<ModelEndpoint>, pause: Duration) -> Self {
        let guarded = endpoints.into_iter().map(|endpoint| {
            let name = endpoint.model.name();
            let label = match endpoint.id.as_str() {
                DEFAULT_MODEL => name.to_owned(),
                id => format!("{id}:{name}"),
            };
            let breaker = CircuitBreaker::of_model(&label, pause);
            GuardedModel { endpoint, label, breaker }
        });
        Self(guarded.collect())
    }

    /// The endpoints of these ids, in this order; without ids, all of them.
    pub(crate) fn in_order(&self, ids: &[String]) -> Vec<&GuardedModel> {
        let chosen = ids.iter().filter_map(|id| self.0.iter().find(|one| one.endpoint.id == *id));
        let chosen: Vec<&GuardedModel> = chosen.collect();
        if chosen.is_empty() { self.0.iter().collect() } else { chosen }
    }

    pub(crate) fn states(&self) -> Vec<ModelEndpointState> {
        let state = |one: &GuardedModel| ModelEndpointState {
            id: one.endpoint.id.clone(),
            model: one.label.clone(),
            is_available: !one.breaker.is_open(),
        };
        self.0.iter().map(state).collect()
    }
}

/// What the endpoints said that did not answer a call.
#[derive(Debug, Default)]
pub(crate) struct UnansweredCall {
    failures: Vec<(String, ModelError)>,
    open: Option<BreakerOpen>,
}

/// How a run ends that no endpoint answers.
#[derive(Debug)]
pub(crate) enum NoEndpoint {
    /// Calls failed.
    Failed(ModelError),
    /// No endpoint may be called now.
    Waiting(HandlerError),
}

impl UnansweredCall {
    /// A call of an endpoint failed, and not because of its content.
    pub(crate) fn failed(&mut self, endpoint: &GuardedModel, error: ModelError) {
        self.failures.push((endpoint.label.clone(), error));
    }

    /// An endpoint may not be called now.
    pub(crate) fn skipped(&mut self, open: BreakerOpen) {
        let is_sooner = self.open.as_ref().is_none_or(|known| open.after < known.after);
        if is_sooner {
            self.open = Some(open);
        }
    }

    /// `pause` is the shortest time until the run may be repeated.
    pub(crate) fn into_end(mut self, pause: Duration) -> NoEndpoint {
        if self.failures.len() == 1
            && let Some((_, error)) = self.failures.pop()
        {
            return NoEndpoint::Failed(error);
        }
        if self.failures.is_empty() {
            let open = self.open.unwrap_or_default();
            let reason = format!("waiting for the model: {}", open.last_error);
            return NoEndpoint::Waiting(HandlerError::defer(open.after.max(pause), reason));
        }
        let is_ours =
            |(_, error): &(String, ModelError)| matches!(error, ModelError::InvalidRequest(_));
        let are_ours = self.failures.iter().all(is_ours);
        let shown = self.failures.iter().map(|(label, error)| format!("{label}: {error}"));
        let reason = shown.collect::<Vec<_>>().join("; ");
        NoEndpoint::Failed(match are_ours {
            true => ModelError::InvalidRequest(reason),
            false => ModelError::Unavailable(format!("no model endpoint answered: {reason}")),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use headwater_issue::IssueId;

    use super::*;
    use crate::desk::ScriptedModel;

    fn endpoints(ids: &[&str]) -> ModelEndpoints {
        let endpoint = |id: &&str| ModelEndpoint {
            id: (*id).to_owned(),
            model: Arc::new(ScriptedModel::default()),
            prices: Prices::default(),
        };
        ModelEndpoints::new(ids.iter().map(endpoint).collect(), Duration::from_secs(5))
    }

    #[test]
    fn a_policy_chooses_endpoints_and_their_order() {
        let all = endpoints(&["default", "fast", "large"]);
        let labels = |ids: &[&str]| -> Vec<String> {
            let ids: Vec<String> = ids.iter().map(|id| (*id).to_owned()).collect();
            all.in_order(&ids).iter().map(|one| one.label.clone()).collect()
        };
        assert_eq!(labels(&[]), ["scripted", "fast:scripted", "large:scripted"]);
        assert_eq!(labels(&["large", "default"]), ["large:scripted", "scripted"]);
    }

    #[test]
    fn one_failed_endpoint_keeps_its_error_and_several_are_named() {
        let all = endpoints(&["default", "fast"]);
        let all = all.in_order(&[]);
        let after = Some(Duration::from_secs(30));
        let limited = ModelError::RateLimited { after, reason: "429".into() };
        let mut one = UnansweredCall::default();
        one.failed(all[0], limited.clone());
        assert!(
            matches!(one.into_end(Duration::ZERO), NoEndpoint::Failed(error) if error == limited)
        );
        let mut two = UnansweredCall::default();
        two.failed(all[0], limited);
        two.failed(all[1], ModelError::Unauthorized("401".into()));
        let NoEndpoint::Failed(error) = two.into_end(Duration::ZERO) else {
            panic!("calls failed")
        };
        let text = error.to_string();
        assert!(text.contains("scripted: ") && text.contains("fast:scripted: "), "{text}");
    }

    #[test]
    fn an_endpoint_is_unavailable_while_its_breaker_is_open() {
        let all = endpoints(&["default", "fast"]);
        let breaker = &all.0[1].breaker;
        let now = Instant::now();
        let denied = ModelError::Unauthorized("401".into());
        breaker.admit(IssueId(1), now).unwrap().failed(&denied, now);
        let states = |all: &ModelEndpoints| -> Vec<bool> {
            all.states().iter().map(|state| state.is_available).collect()
        };
        assert_eq!(states(&all), [true, false]);
        breaker.admit(IssueId(2), now).unwrap().succeeded();
        assert_eq!(states(&all), [true, true]);
    }
}
