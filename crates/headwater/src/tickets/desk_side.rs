//! What the desk needs of the ticket tables: a search, and the books of tokens.
//!
//! Upstream: `desk`. Promises: words of a search are words, never patterns; reservations of all processes share one row per
//! budget, so a limit holds for all of them together.

use async_trait::async_trait;

use super::rows::SearchRow;
use super::store::{Tickets, look, on};
use super::ticket::TicketError;
use crate::desk::budget::{Budget, Ledger, Reservation, Reserved};
use crate::desk::tools::{FoundTicket, SearchQuery, TicketSearch};
use crate::limits::{SEARCH_EXCERPT_BYTES_MAX, SEARCH_RESULTS_MAX, SEARCH_WORDS_MAX};
use crate::text;

/// Shorter words find everything.
const WORD_LETTERS_MIN: usize = 3;

#[async_trait]
impl TicketSearch for Tickets {
    async fn search(&self, query: &SearchQuery) -> Result<Vec<FoundTicket>, String> {
        let patterns = patterns(&query.words);
        if patterns.is_empty() {
            return Ok(Vec::new());
        }
        let search = SearchRow {
            patterns: &patterns,
            user_id: query.user_id.as_deref(),
            except: &query.except,
            limit: SEARCH_RESULTS_MAX as i64,
        };
        let found = look!(self.store, search(&search));
        let mut found = found.map_err(|error: TicketError| error.to_string())?;
        for ticket in &mut found {
            let shortened =
                |answer: &String| text::cut(answer, SEARCH_EXCERPT_BYTES_MAX).to_owned();
            ticket.answer = ticket.answer.as_ref().map(shortened);
        }
        Ok(found)
    }
}

/// A pattern of `LIKE` for each word; what would be a wildcard is escaped.
fn patterns(words: &str) -> Vec<String> {
    let is_word = |word: &&str| word.chars().count() >= WORD_LETTERS_MIN;
    let words = words.split_whitespace().filter(is_word).take(SEARCH_WORDS_MAX);
    let escaped = |word: &str| word.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_");
    words.map(|word| format!("%{}%", escaped(word))).collect()
}

#[async_trait]
impl Ledger for Tickets {
    async fn reserve(
        &self,
        reservation: &Reservation,
        budget: &Budget,
    ) -> Result<Reserved, String> {
        self.try_reserve(reservation, budget).await.map_err(|error| error.to_string())
    }

    async fn settle(&self, reservation: &Reservation, used: u64) -> Result<(), String> {
        self.try_settle(reservation, used).await.map_err(|error| error.to_string())
    }
}

impl Tickets {
    async fn try_reserve(
        &self,
        reservation: &Reservation,
        budget: &Budget,
    ) -> Result<Reserved, TicketError> {
        let (of_issue, of_day) = scopes(reservation);
        let (tokens, issue_max) = (number(reservation.tokens), number(budget.issue_tokens_max));
        let day_max = number(budget.day_tokens_max);
        // Dropped without a commit, both are as before.
        let mut transaction = self.store.begin().await?;
        if !on!(transaction.connection(), spend(&of_issue, tokens, issue_max))? {
            return Ok(Reserved::IssueSpent);
        }
        if !on!(transaction.connection(), spend(&of_day, tokens, day_max))? {
            return Ok(Reserved::DaySpent);
        }
        transaction.commit().await?;
        Ok(Reserved::Granted)
    }

    async fn try_settle(&self, reservation: &Reservation, used: u64) -> Result<(), TicketError> {
        let (of_issue, of_day) = scopes(reservation);
        let by = number(used).saturating_sub(number(reservation.tokens));
        if by == 0 {
            return Ok(());
        }
        let mut transaction = self.store.begin().await?;
        on!(transaction.connection(), correct(&of_issue, by))?;
        on!(transaction.connection(), correct(&of_day, by))?;
        transaction.commit().await?;
        Ok(())
    }
}

fn scopes(reservation: &Reservation) -> (String, String) {
    (format!("issue:{}", reservation.issue_id), format!("day:{}", reservation.day))
}

/// Small enough that sums stay within the column.
fn number(tokens: u64) -> i64 {
    i64::try_from(tokens).unwrap_or(i64::MAX).min(i64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_in_words_are_only_letters() {
        assert_eq!(patterns("a 100%_x \\ router"), ["%100\\%\\_x%", "%router%"]);
    }
}
