//! Prompts of integrations in SQL: their versions, and which one is active.
//!
//! Upstream: the routes of prompts; `desk::prompt_versions` reads the active ones. Downstream: the tables `prompts` and
//! `prompt_versions`.
//! Guarantees: a stored version parses and never changes; a number is used once. Storing and activating a version is one
//! transaction, under the lock of the row of the integration. At most [`PROMPT_VERSIONS_KEPT`] versions of an integration are
//! kept, the active one always.

use async_trait::async_trait;
use headwater_issue::{SqlRow, StoreConnection, Transaction};
use headwater_stream::clock::Timestamp;

use crate::desk::prompt::BUILT_IN_PROMPT;
use crate::desk::prompt_template::{InvalidPrompt, PromptTemplate};
use crate::desk::prompt_versions::{ActivePrompt, PromptSource};
use crate::limits::{PROMPT_COMMENT_BYTES_MAX, PROMPT_VERSIONS_KEPT};
use crate::tickets::sql::statements::{execute, from_ms, list};
use crate::tickets::store::{Tickets, retry_on_conflict};
use crate::tickets::ticket::TicketError;

/// Which version of the prompt of an integration is active.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptState {
    /// The integration.
    pub integration: String,
    /// The active version; 0 is the built-in prompt.
    pub version: i64,
    /// The newest version that was stored; 0 if none was.
    pub newest: i64,
    /// When the active version was chosen; `None` if it never was.
    pub changed_at: Option<Timestamp>,
    /// Who chose it.
    pub changed_by: Option<String>,
}

/// A version of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptVersion {
    /// Its number; 0 is the built-in prompt.
    pub version: i64,
    /// The text, with variables.
    pub content: String,
    /// Why it was written.
    pub comment: Option<String>,
    /// When it was stored; `None` for the built-in one.
    pub created_at: Option<Timestamp>,
    /// Who stored it.
    pub created_by: Option<String>,
}

impl PromptVersion {
    fn built_in() -> Self {
        let content = BUILT_IN_PROMPT.to_owned();
        Self { version: 0, content, comment: None, created_at: None, created_by: None }
    }
}

/// A change of the active prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptChange {
    /// Stores a text as the next version and activates it. The text that is active already changes nothing.
    Set {
        /// The text.
        content: String,
        /// Why.
        comment: Option<String>,
    },
    /// Activates an earlier version; `None` is the one before the active one.
    Rollback(Option<i64>),
}

/// Why a prompt was not changed or found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PromptError {
    /// The text does not parse.
    #[error(transparent)]
    Invalid(#[from] InvalidPrompt),
    /// There is no such version.
    #[error(
        "integration `{integration}` has no version {version} of its prompt; `headwater prompt list {integration}` shows all"
    )]
    NoVersion {
        /// The integration.
        integration: String,
        /// The version.
        version: i64,
    },
    /// Another version became active in the meantime.
    #[error(
        "version {active} of the prompt of integration `{integration}` is active, not the expected version {expected}; read it first"
    )]
    Conflict {
        /// The integration.
        integration: String,
        /// What the caller has seen.
        expected: i64,
        /// What is active.
        active: i64,
    },
    /// The database failed, or the comment is invalid.
    #[error(transparent)]
    Ticket(#[from] TicketError),
}

/// Result of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedPrompt {
    /// The state after it.
    pub state: PromptState,
    /// False if that version was active before.
    pub changed: bool,
}

const VERSIONS: &str =
    "SELECT version, content, comment, created_at, created_by FROM prompt_versions
     WHERE integration = $1 AND version < $2 AND ($3::bigint IS NULL OR version = $3)
     ORDER BY version DESC LIMIT $4";

fn read_version(row: &SqlRow) -> Result<PromptVersion, sqlx::Error> {
    Ok(PromptVersion {
        version: row.get(0)?,
        content: row.get(1)?,
        comment: row.get(2)?,
        created_at: Some(from_ms(row.get(3)?)),
        created_by: row.get(4)?,
    })
}

fn read_state(row: &SqlRow) -> Result<PromptState, sqlx::Error> {
    Ok(PromptState {
        integration: row.get(0)?,
        version: row.get(1)?,
        newest: row.get(2)?,
        changed_at: Some(from_ms(row.get(3)?)),
        changed_by: row.get(4)?,
    })
}

impl PromptState {
    fn built_in(integration: &str) -> Self {
        let integration = integration.to_owned();
        Self { integration, version: 0, newest: 0, changed_at: None, changed_by: None }
    }
}

async fn state(
    connection: StoreConnection<'_>,
    integration: &str,
) -> Result<PromptState, TicketError> {
    let select = "SELECT integration, version, newest, changed_at, changed_by FROM prompts
         WHERE integration = $1";
    let found = list(connection, "prompt", select, &[integration.into()], read_state).await?;
    Ok(found.into_iter().next().unwrap_or_else(|| PromptState::built_in(integration)))
}

async fn version(
    connection: StoreConnection<'_>,
    integration: &str,
    version: i64,
) -> Result<Option<PromptVersion>, TicketError> {
    if version == 0 {
        return Ok(Some(PromptVersion::built_in()));
    }
    let parameters = [integration.into(), i64::MAX.into(), version.into(), 1_i64.into()];
    Ok(list(connection, "prompt version", VERSIONS, &parameters, read_version).await?.pop())
}

impl Tickets {
    /// Which version of the prompt of an integration is active.
    pub async fn prompt_state(&self, integration: &str) -> Result<PromptState, TicketError> {
        self.read(async |connection| state(connection, integration).await).await
    }

    /// A version of the prompt of an integration.
    pub async fn prompt_version(
        &self,
        integration: &str,
        number: i64,
    ) -> Result<PromptVersion, PromptError> {
        let found = self.read(async |connection| version(connection, integration, number).await);
        let integration = integration.to_owned();
        found.await?.ok_or(PromptError::NoVersion { integration, version: number })
    }

    /// At most `limit` versions below `before`, newest first, without the built-in one.
    pub async fn prompt_versions(
        &self,
        integration: &str,
        before: Option<i64>,
        limit: usize,
    ) -> Result<Vec<PromptVersion>, TicketError> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let before = before.unwrap_or(i64::MAX);
        let parameters = [integration.into(), before.into(), None::<i64>.into(), limit.into()];
        self.read(async |connection| {
            list(connection, "prompt versions", VERSIONS, &parameters, read_version).await
        })
        .await
    }

    /// The stored version before this one, or 0.
    pub async fn prompt_version_before(
        &self,
        integration: &str,
        number: i64,
    ) -> Result<i64, TicketError> {
        let found = self.prompt_versions(integration, Some(number), 1).await?;
        Ok(found.first().map_or(0, |version| version.version))
    }

    /// Changes the active prompt of an integration. `expected`, if given, is the active version that the caller has seen.
    pub async fn change_prompt(
        &self,
        integration: &str,
        change: PromptChange,
        expected: Option<i64>,
        by: &str,
    ) -> Result<ChangedPrompt, PromptError> {
        let change = checked(change)?;
        retry_on_conflict(|| self.change_prompt_once(integration, &change, expected, by)).await?
    }

    async fn change_prompt_once(
        &self,
        integration: &str,
        change: &PromptChange,
        expected: Option<i64>,
        by: &str,
    ) -> Result<Result<ChangedPrompt, PromptError>, TicketError> {
        let mut transaction = self.store.begin().await?;
        let before = lock(transaction.as_mut(), integration, by).await?;
        if let Some(expected) = expected.filter(|expected| *expected != before.version) {
            let (integration, active) = (integration.to_owned(), before.version);
            return Ok(Err(PromptError::Conflict { integration, expected, active }));
        }
        let unchanged =
            |before: PromptState| Ok(Ok(ChangedPrompt { state: before, changed: false }));
        let (number, newest) = match change {
            PromptChange::Set { content, comment } => {
                let active = version(transaction.connection(), integration, before.version).await?;
                if active.is_some_and(|active| active.content == *content) {
                    return unchanged(before);
                }
                let number = before.newest + 1;
                let insert = "INSERT INTO prompt_versions (integration, version, content, comment, created_at, created_by)
                     VALUES ($1, $2, $3, $4, headwater_ms(headwater_now()), $5)";
                let parameters = [
                    integration.into(),
                    number.into(),
                    content.into(),
                    comment.as_deref().into(),
                    by.into(),
                ];
                execute(transaction.connection(), "store prompt", insert, &parameters).await?;
                (number, number)
            }
            PromptChange::Rollback(to) => {
                let number = match to {
                    Some(number) => *number,
                    None => before_active(transaction.as_mut(), &before).await?,
                };
                if version(transaction.connection(), integration, number).await?.is_none() {
                    let integration = integration.to_owned();
                    return Ok(Err(PromptError::NoVersion { integration, version: number }));
                }
                if number == before.version {
                    return unchanged(before);
                }
                (number, before.newest)
            }
        };
        let update = "UPDATE prompts SET version = $2, newest = $3, changed_by = $4,
                 changed_at = headwater_ms(headwater_now()) WHERE integration = $1";
        let parameters = [integration.into(), number.into(), newest.into(), by.into()];
        execute(transaction.connection(), "activate prompt", update, &parameters).await?;
        let delete = "DELETE FROM prompt_versions WHERE integration = $1 AND version <= $2 AND version <> $3";
        let parameters =
            [integration.into(), (newest - PROMPT_VERSIONS_KEPT).into(), number.into()];
        execute(transaction.connection(), "remove prompts", delete, &parameters).await?;
        let state = state(transaction.connection(), integration).await?;
        transaction.commit().await?;
        Ok(Ok(ChangedPrompt { state, changed: true }))
    }
}

/// Locks the row of an integration until the end of the transaction; creates it if it is missing.
async fn lock(
    transaction: &mut dyn Transaction,
    integration: &str,
    by: &str,
) -> Result<PromptState, TicketError> {
    let insert = "INSERT INTO prompts (integration, version, newest, changed_at, changed_by)
         VALUES ($1, 0, 0, headwater_ms(headwater_now()), $2) ON CONFLICT (integration) DO NOTHING";
    let parameters = [integration.into(), by.into()];
    execute(transaction.connection(), "lock prompt", insert, &parameters).await?;
    let select = "SELECT integration, version, newest, changed_at, changed_by FROM prompts
         WHERE integration = $1 FOR UPDATE";
    let parameters = [integration.into()];
    let found = list(transaction.connection(), "lock prompt", select, &parameters, read_state);
    Ok(found.await?.pop().unwrap_or_else(|| PromptState::built_in(integration)))
}

/// The stored version before the active one, or 0.
async fn before_active(
    transaction: &mut dyn Transaction,
    active: &PromptState,
) -> Result<i64, TicketError> {
    let none = None::<i64>;
    let parameters =
        [(&active.integration).into(), active.version.into(), none.into(), 1_i64.into()];
    let found = list(transaction.connection(), "prompt", VERSIONS, &parameters, read_version);
    Ok(found.await?.first().map_or(0, |version| version.version))
}

/// Checks a change, and puts its texts into the form in which they are stored.
fn checked(change: PromptChange) -> Result<PromptChange, PromptError> {
    let PromptChange::Set { content, comment } = change else { return Ok(change) };
    let content = content.replace("\r\n", "\n").trim_end().to_owned();
    PromptTemplate::parse(&content)?;
    let comment = comment.map(|comment| crate::text::one_line(&comment, usize::MAX));
    let comment = comment.filter(|comment| !comment.is_empty());
    if comment.as_ref().is_some_and(|comment| comment.len() > PROMPT_COMMENT_BYTES_MAX) {
        let problem = format!("`comment` is longer than {PROMPT_COMMENT_BYTES_MAX} bytes");
        return Err(TicketError::Invalid(problem).into());
    }
    Ok(PromptChange::Set { content, comment })
}

#[async_trait]
impl PromptSource for Tickets {
    async fn active_prompts(&self) -> Result<Vec<ActivePrompt>, String> {
        let select = "SELECT p.integration, p.version, v.content FROM prompts p
             JOIN prompt_versions v ON v.integration = p.integration AND v.version = p.version";
        let read = |row: &SqlRow| {
            let (integration, version) = (row.get(0)?, row.get(1)?);
            Ok(ActivePrompt { integration, version, content: row.get(2)? })
        };
        let found =
            self.read(async |connection| list(connection, "prompts", select, &[], read).await);
        found.await.map_err(|error| error.to_string())
    }
}
