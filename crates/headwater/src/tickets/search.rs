//! Full-text search over tickets, for the `search_tickets` tool of the model.
//!
//! Upstream: `desk::tools`. Guarantees: words are matched literally; wildcards in them are escaped.

use std::time::Duration;

use async_trait::async_trait;

use crate::desk::tools::{FoundTicket, SearchQuery, TicketSearch};
use crate::limits::{SEARCH_EXCERPT_BYTES_MAX, SEARCH_RESULTS_MAX, SEARCH_WORDS_MAX};
use crate::text;
use crate::tickets::sql::statements::{self, SearchParameters};
use crate::tickets::store::Tickets;
use crate::tickets::ticket::TicketError;

/// Shorter words are ignored: they would match almost every ticket.
const WORD_LETTERS_MIN: usize = 3;

/// How long the model waits for a search.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(10);

#[async_trait]
impl TicketSearch for Tickets {
    async fn search(&self, query: &SearchQuery) -> Result<Vec<FoundTicket>, String> {
        let patterns = patterns(&query.words);
        if patterns.is_empty() {
            return Ok(Vec::new());
        }
        let (tickets, query) = (self.clone(), query.clone());
        // Runs on its own task, so that a dropped run or a timeout does not cancel the query half-way.
        let searching = tokio::spawn(async move {
            let search = SearchParameters {
                patterns: &patterns,
                user_id: query.user_id.as_deref(),
                except: &query.except,
                limit: SEARCH_RESULTS_MAX as i64,
            };
            tickets.read(async |connection| statements::search(connection, &search).await).await
        });
        let found = match tokio::time::timeout(SEARCH_TIMEOUT, searching).await {
            Ok(Ok(found)) => found.map_err(|error: TicketError| error.to_string()),
            Ok(Err(panic)) => Err(panic.to_string()),
            Err(_) => Err(format!("timed out after {SEARCH_TIMEOUT:?}")),
        };
        let mut found = found?;
        for ticket in &mut found {
            let shortened =
                |answer: &String| text::cut(answer, SEARCH_EXCERPT_BYTES_MAX).to_owned();
            ticket.answer = ticket.answer.as_ref().map(shortened);
        }
        Ok(found)
    }
}

/// A `LIKE` pattern for each word, with wildcards escaped.
fn patterns(words: &str) -> Vec<String> {
    let is_word = |word: &&str| word.chars().count() >= WORD_LETTERS_MIN;
    let words = words.split_whitespace().filter(is_word).take(SEARCH_WORDS_MAX);
    let escaped = |word: &str| word.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_");
    words.map(|word| format!("%{}%", escaped(word))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_in_words_are_escaped() {
        assert_eq!(patterns("a 100%_x \\ router"), ["%100\\%\\_x%", "%router%"]);
    }
}
