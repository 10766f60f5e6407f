//! The active prompt of each integration, as runs use it.
//!
//! Upstream: `handler` asks at the beginning of a run. Downstream: a [`PromptSource`], which `tickets::prompts` implements in SQL.
//! Guarantees: a run that begins [`PROMPT_AGE_MAX`] plus [`READ_TIMEOUT`] after a change, or later, uses the new version,
//! without a restart. If the source cannot be read, or has a prompt that this process cannot parse, runs go on with the
//! last known one. A process that knows none defers its runs: it never falls back to another prompt.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use metrics::counter;
use tokio::time::{Instant, timeout};
use tracing::{error, info, warn};

use crate::desk::prompt::SystemPrompt;
use crate::desk::prompt_template::{PromptTemplate, PromptValues};

/// Counter of failed reads of the active prompts.
pub const PROMPT_READ_FAILURES: &str = "headwater_prompt_read_failures_total";

/// A run that finds the known prompts older than this reads them again.
pub const PROMPT_AGE_MAX: Duration = Duration::from_secs(3);

/// Timeout of one read.
pub const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// The active prompt of one integration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActivePrompt {
    /// The integration.
    pub integration: String,
    /// Its active version; 0 is the built-in prompt.
    pub version: i64,
    /// The text of that version.
    pub content: String,
}

/// Where prompts are stored.
#[async_trait]
pub trait PromptSource: Send + Sync + std::fmt::Debug {
    /// The active prompts, without integrations that use the built-in one.
    async fn active_prompts(&self) -> Result<Vec<ActivePrompt>, String>;
}

/// What a process knows of the active prompts.
#[derive(Debug)]
pub(crate) struct PromptVersions {
    source: Arc<dyn PromptSource>,
    state: Mutex<KnownPrompts>,
}

#[derive(Debug, Default)]
struct KnownPrompts {
    /// By integration; `None` before the first successful read.
    prompts: Option<HashMap<String, KnownPrompt>>,
    /// When the last read began.
    read_at: Option<Instant>,
}

#[derive(Clone, Debug)]
struct KnownPrompt {
    version: i64,
    /// An error if this process cannot parse it and knows no earlier version.
    template: Result<PromptTemplate, String>,
}

impl PromptVersions {
    pub(crate) fn new(source: Arc<dyn PromptSource>) -> Self {
        Self { source, state: Mutex::default() }
    }

    /// The prompt of an integration. Fails if none is known, with the reason.
    pub(crate) async fn prompt(&self, values: &PromptValues) -> Result<SystemPrompt, String> {
        let problem = if self.should_read() { self.read().await.err() } else { None };
        let state = self.state();
        let Some(prompts) = &state.prompts else {
            let problem = problem.unwrap_or_else(|| "no read succeeded yet".to_owned());
            return Err(format!("reading the active prompts: {problem}"));
        };
        match prompts.get(&values.integration) {
            None => Ok(SystemPrompt::built_in()),
            Some(KnownPrompt { version, template: Ok(template) }) => {
                Ok(SystemPrompt::custom(*version, template.render(values)))
            }
            Some(KnownPrompt { version, template: Err(problem) }) => Err(format!(
                "version {version} of the prompt of integration `{}` cannot be used by this process: {problem}; \
                 set a new one with `headwater prompt set {}`",
                values.integration, values.integration
            )),
        }
    }

    /// Whether this caller reads. While prompts are known, one caller reads and the others use the known ones.
    fn should_read(&self) -> bool {
        let mut state = self.state();
        let is_due = state.read_at.is_none_or(|at| at.elapsed() >= PROMPT_AGE_MAX);
        if is_due {
            state.read_at = Some(Instant::now());
        }
        is_due || state.prompts.is_none()
    }

    async fn read(&self) -> Result<(), String> {
        // On its own task: a cancelled call would leave its connection in an unknown state.
        let source = Arc::clone(&self.source);
        let reading = tokio::spawn(async move { source.active_prompts().await });
        let found = match timeout(READ_TIMEOUT, reading).await {
            Ok(Ok(found)) => found,
            Ok(Err(panic)) => Err(panic.to_string()),
            Err(_) => Err(format!("no answer within {READ_TIMEOUT:?}")),
        };
        match found {
            Ok(found) => {
                self.set(found);
                Ok(())
            }
            Err(error) => {
                counter!(PROMPT_READ_FAILURES).increment(1);
                warn!(%error, "reading the active prompts failed; runs use the last known ones");
                Err(error)
            }
        }
    }

    fn set(&self, found: Vec<ActivePrompt>) {
        let mut state = self.state();
        let before = state.prompts.take().unwrap_or_default();
        let known = found.into_iter().map(|one| {
            let earlier = before.get(&one.integration);
            let (integration, known) = (one.integration.clone(), parse(one, earlier));
            (integration, known)
        });
        state.prompts = Some(known.collect());
    }

    fn state(&self) -> MutexGuard<'_, KnownPrompts> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

fn parse(found: ActivePrompt, before: Option<&KnownPrompt>) -> KnownPrompt {
    let ActivePrompt { integration, version, content } = found;
    if let Some(before) = before.filter(|before| before.version == version) {
        return before.clone();
    }
    match PromptTemplate::parse(&content) {
        Ok(template) => {
            info!(integration, version, "using this version of the prompt");
            KnownPrompt { version, template: Ok(template) }
        }
        Err(problem) => {
            // A newer program may know more variables.
            error!(integration, version, error = %problem, "cannot use this version of the prompt");
            let usable = before.filter(|before| before.template.is_ok()).cloned();
            usable.unwrap_or(KnownPrompt { version, template: Err(problem.to_string()) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what a test has set.
    #[derive(Debug)]
    struct FakeSource(Mutex<Result<Vec<ActivePrompt>, String>>);

    #[async_trait]
    impl PromptSource for FakeSource {
        async fn active_prompts(&self) -> Result<Vec<ActivePrompt>, String> {
            self.0.lock().unwrap().clone()
        }
    }

    fn active(version: i64, content: &str) -> Result<Vec<ActivePrompt>, String> {
        let integration = "shop".to_owned();
        Ok(vec![ActivePrompt { integration, version, content: content.to_owned() }])
    }

    fn values(integration: &str) -> PromptValues {
        PromptValues { integration: integration.to_owned(), ..PromptValues::default() }
    }

    async fn version(prompts: &PromptVersions) -> Result<i64, String> {
        tokio::time::advance(PROMPT_AGE_MAX).await;
        prompts.prompt(&values("shop")).await.map(|prompt| prompt.version)
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_known_prompt_is_used_while_the_source_fails_and_a_new_one_after_it() {
        let source = Arc::new(FakeSource(Mutex::new(Err("down".into()))));
        let prompts = PromptVersions::new(Arc::clone(&source) as Arc<dyn PromptSource>);
        let set = |found| *source.0.lock().unwrap() = found;
        // Never the built-in one instead of one that could not be read.
        assert!(version(&prompts).await.unwrap_err().contains("down"));
        set(active(1, "One."));
        assert_eq!(version(&prompts).await, Ok(1));
        set(active(2, "Two."));
        assert_eq!(prompts.prompt(&values("shop")).await.unwrap().version, 1, "not read again yet");
        set(Err("down".into()));
        assert_eq!(version(&prompts).await, Ok(1));
        set(active(2, "Two."));
        assert_eq!(version(&prompts).await, Ok(2));
        assert_eq!(prompts.prompt(&values("works")).await, Ok(SystemPrompt::built_in()));
        // Of a newer program.
        set(active(3, "{{weather}}"));
        assert_eq!(version(&prompts).await, Ok(2));
        set(Ok(Vec::new()));
        assert_eq!(version(&prompts).await, Ok(0));
        set(active(3, "{{weather}}"));
        assert!(version(&prompts).await.unwrap_err().contains("unknown variable `weather`"));
    }

    /// Never answers.
    #[derive(Debug)]
    struct StuckSource;

    #[async_trait]
    impl PromptSource for StuckSource {
        async fn active_prompts(&self) -> Result<Vec<ActivePrompt>, String> {
            std::future::pending().await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_that_does_not_answer_delays_a_run_by_a_bounded_time() {
        let prompts = PromptVersions::new(Arc::new(StuckSource));
        let began = Instant::now();
        assert!(version(&prompts).await.unwrap_err().contains("no answer"));
        assert!(began.elapsed() <= PROMPT_AGE_MAX + READ_TIMEOUT + Duration::from_millis(10));
    }
}
