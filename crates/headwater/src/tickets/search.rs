//! Search for words over tickets: for the `search_tickets` tool of the model, and within a list of tickets.
//!
//! Upstream: `desk::tools` and `api/tickets.rs`. Guarantees: words are matched literally; wildcards in them are escaped. A search
//! compares the texts of at most [`SEARCHED_MAX`] tickets, and one in a list says how many it compared. At most [`SEARCHES_MAX`] lists are
//! searched at the same time, so that searches, which run to their end, leave connections of the database to others.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater_issue::IssueError;
use uuid::Uuid;

use crate::desk::tools::{FoundTicket, SearchQuery, TicketSearch};
use crate::limits::{SEARCH_EXCERPT_BYTES_MAX, SEARCH_RESULTS_MAX, SEARCH_WORDS_MAX};
use crate::text;
use crate::tickets::sql::statements;
use crate::tickets::sql::ticket_lists::{self, SearchParameters};
use crate::tickets::store::{SEARCHES_MAX, Tickets};
use crate::tickets::ticket::{Ticket, TicketError, TicketFilter};

pub(crate) use crate::tickets::sql::ticket_lists::SEARCHED_MAX;

/// Shorter words are ignored: they would match almost every ticket.
const WORD_LETTERS_MIN: usize = 3;

/// Maximum characters of words to look for in a list.
const WORDS_CHARS_MAX: usize = 200;

/// How long the model waits for a search.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Words to look for in a list of tickets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TicketWords {
    /// A `LIKE` pattern for each word.
    patterns: Vec<String>,
}

impl TicketWords {
    /// The words of a text. Fails if none of them is long enough to be looked for.
    pub fn parse(text: &str) -> Result<Self, TicketError> {
        let patterns = patterns(text);
        if patterns.is_empty() || text.chars().count() > WORDS_CHARS_MAX {
            return Err(TicketError::Invalid(format!(
                "`words` must have a word of {WORD_LETTERS_MIN} letters or more, and at most {WORDS_CHARS_MAX} characters"
            )));
        }
        Ok(Self { patterns })
    }
}

/// A page of the tickets of a list that have a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TicketSearchPage {
    /// Those that have one, in the order of the list.
    pub tickets: Vec<Ticket>,
    /// How many tickets of the list were searched.
    pub searched: usize,
    /// How many of them have a word, also those that do not fit on the page.
    pub matching: usize,
    /// The number of the ticket behind which the next page begins; `None` if there is nothing left to search.
    pub next: Option<i64>,
}

impl Tickets {
    /// One page of the tickets of a list that have one of the words in their title or messages. Searches at most
    /// `SEARCHED_MAX` tickets of the list, so a page may have few tickets or none although there is a next page. A search
    /// that is dropped runs to its end. Fails with [`TicketError::SearchesBusy`] while two others run.
    pub async fn search_list(
        &self,
        filter: &TicketFilter,
        words: &TicketWords,
        limit: usize,
    ) -> Result<TicketSearchPage, TicketError> {
        let permit = Arc::clone(&self.searches).try_acquire_owned();
        let permit = permit.map_err(|_| TicketError::SearchesBusy(SEARCHES_MAX))?;
        let (tickets, filter, words) = (self.clone(), filter.clone(), words.clone());
        // On its own task, so that a query is not cancelled half-way. It has the permit, because it may outlive its caller.
        let searching = tokio::spawn(async move {
            let found = tickets.search_list_once(&filter, &words, limit).await;
            drop(permit);
            found
        });
        searching.await.unwrap_or_else(|panic| {
            let problem = format!("searching tickets: {panic}");
            Err(IssueError::Unavailable { problem, source: None }.into())
        })
    }

    async fn search_list_once(
        &self,
        filter: &TicketFilter,
        words: &TicketWords,
        limit: usize,
    ) -> Result<TicketSearchPage, TicketError> {
        let searched = self
            .read(async |connection| {
                ticket_lists::search_list(connection, filter, &words.patterns).await
            })
            .await?;
        let matching = searched.iter().filter(|ticket| ticket.has_word);
        let matching: Vec<i64> = matching.map(|ticket| ticket.number).collect();
        let on_page = &matching[..limit.min(matching.len())];
        let next = match matching.len() > on_page.len() {
            true => on_page.last().copied(),
            false => {
                let last = searched.last().map(|ticket| ticket.number);
                last.filter(|_| searched.len() == SEARCHED_MAX)
            }
        };
        let mut tickets = match on_page {
            [] => Vec::new(),
            numbers => {
                self.read(async |connection| {
                    ticket_lists::numbered_tickets(connection, numbers).await
                })
                .await?
            }
        };
        if !filter.oldest_first {
            tickets.reverse();
        }
        Ok(TicketSearchPage { tickets, searched: searched.len(), matching: matching.len(), next })
    }

    /// The ticket that has a message.
    pub(crate) async fn ticket_of_message(
        &self,
        message_id: Uuid,
    ) -> Result<Option<Ticket>, TicketError> {
        let message =
            self.read(async |connection| statements::message(connection, message_id).await).await?;
        match message {
            Some(message) => self.ticket(message.ticket_id).await,
            None => Ok(None),
        }
    }
}

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
            tickets.read(async |connection| ticket_lists::search(connection, &search).await).await
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

/// A `LIKE` pattern for each word, with wildcards escaped. No stored text has NUL, and PostgreSQL takes none.
fn patterns(words: &str) -> Vec<String> {
    let is_word = |word: &&str| word.chars().count() >= WORD_LETTERS_MIN && !word.contains('\0');
    let words = words.split_whitespace().filter(is_word).take(SEARCH_WORDS_MAX);
    let escaped = |word: &str| word.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_");
    words.map(|word| format!("%{}%", escaped(word))).collect()
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use headwater_issue::{DebounceWindow, Nudger, StoreOptions, connect};
    use tokio::time::sleep;

    use super::*;

    #[test]
    fn wildcards_in_words_are_escaped() {
        assert_eq!(patterns("a 100%_x \\ router"), ["%100\\%\\_x%", "%router%"]);
    }

    #[test]
    fn words_in_a_list_must_be_long_enough_to_be_looked_for() {
        assert!(TicketWords::parse("of a router").is_ok());
        for text in ["", " ", "a of", "\0nul", &"router ".repeat(40)] {
            assert!(matches!(TicketWords::parse(text), Err(TicketError::Invalid(_))), "{text}");
        }
    }

    #[tokio::test]
    async fn a_search_whose_caller_is_gone_counts_until_it_ends() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("a.db").display());
        let store = connect(&url, &StoreOptions::default()).await.unwrap();
        let streams =
            headwater_stream::connect("embedded:memory", &Default::default()).await.unwrap();
        let debounce = DebounceWindow::default();
        let tickets = Tickets::open(store, Nudger::new(streams), debounce).await.unwrap();
        let (all, words) = (TicketFilter::default(), TicketWords::parse("router").unwrap());

        // Its task has not run yet when the caller drops it.
        for _ in 0..SEARCHES_MAX {
            assert!(tickets.search_list(&all, &words, 10).now_or_never().is_none());
        }
        let refused = tickets.search_list(&all, &words, 10).await;
        assert!(matches!(refused, Err(TicketError::SearchesBusy(SEARCHES_MAX))), "{refused:?}");

        while tickets.searches.available_permits() < SEARCHES_MAX {
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(tickets.search_list(&all, &words, 10).await.unwrap().searched, 0);
    }
}
