//! What the desk needs of the ticket tables: a search, and the token ledger.
//!
//! Upstream: `desk`. Promises: words of a search are words, never patterns. Reservations of all processes count together,
//! and none waits for another: each has a row of its own, and budgets are sums over rows. A reservation is inserted before
//! the sums are checked for good, so of two that do not fit together at least one sees the other; both may be refused, and
//! ask again.

use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::clock::Timestamp;

use crate::desk::budget::{self, Budget, Ledger, RESERVATION_TTL, Reservation, Reserved, Spent};
use crate::desk::tools::{FoundTicket, SearchQuery, TicketSearch};
use crate::limits::{SEARCH_EXCERPT_BYTES_MAX, SEARCH_RESULTS_MAX, SEARCH_WORDS_MAX};
use crate::text;
use crate::tickets::sql::rows::{self, ReservationRow, SearchRow};
use crate::tickets::store::{Tickets, look, now, on};
use crate::tickets::ticket::TicketError;

/// Shorter words find everything.
const WORD_LETTERS_MIN: usize = 3;

/// How long the model waits for a search.
const SEARCH_WITHIN: Duration = Duration::from_secs(10);

/// More than any budget that can be set, so that sums stay within a column.
const TOKENS_MAX: i64 = 10_000_000_000_000;

#[async_trait]
impl TicketSearch for Tickets {
    async fn search(&self, query: &SearchQuery) -> Result<Vec<FoundTicket>, String> {
        let patterns = patterns(&query.words);
        if patterns.is_empty() {
            return Ok(Vec::new());
        }
        let (tickets, query) = (self.clone(), query.clone());
        // On a task of its own: the run may be dropped, or not wait any longer, and no query is left half-way.
        let searching = tokio::spawn(async move {
            let search = SearchRow {
                patterns: &patterns,
                user_id: query.user_id.as_deref(),
                except: &query.except,
                limit: SEARCH_RESULTS_MAX as i64,
            };
            look!(tickets.store, search(&search))
        });
        let found = match tokio::time::timeout(SEARCH_WITHIN, searching).await {
            Ok(Ok(found)) => found.map_err(|error: TicketError| error.to_string()),
            Ok(Err(panic)) => Err(panic.to_string()),
            Err(_) => Err(format!("no answer within {SEARCH_WITHIN:?}")),
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

    async fn maintain(&self) -> Result<(), String> {
        self.roll_up(now()).await.map_err(|error| error.to_string())
    }
}

impl Tickets {
    async fn try_reserve(
        &self,
        reservation: &Reservation,
        budget: &Budget,
    ) -> Result<Reserved, TicketError> {
        let row = row(reservation, now());
        let decide =
            |[issue, day]: [Spent; 2]| budget::decide(issue, day, reservation.tokens, budget);
        let mut transaction = self.store.begin().await?;
        let before = on!(transaction.connection(), token_usage(&row, rows::ms(now())))?;
        let reserved = decide(before);
        if reserved != Reserved::Granted {
            return Ok(reserved);
        }
        on!(transaction.connection(), insert_reservation(&row))?;
        transaction.commit().await?;
        // Others may have reserved at the same time; now each sees all that were committed before.
        let after = look!(self.store, token_usage(&row, rows::ms(now())))?;
        let reserved = decide(after);
        if reserved != Reserved::Granted {
            let mut transaction = self.store.begin().await?;
            on!(transaction.connection(), remove_reservation(&row))?;
            transaction.commit().await?;
        }
        Ok(reserved)
    }

    async fn try_settle(&self, reservation: &Reservation, used: u64) -> Result<(), TicketError> {
        let now = now();
        let row = row(reservation, now);
        let mut transaction = self.store.begin().await?;
        on!(transaction.connection(), settle_reservation(&row, number(used), rows::ms(now)))?;
        transaction.commit().await?;
        Ok(())
    }

    /// Sums up what is settled, so that budgets are sums over few rows.
    async fn roll_up(&self, now: Timestamp) -> Result<(), TicketError> {
        let forget = rows::ms(now.before(RESERVATION_TTL));
        let mut transaction = self.store.begin().await?;
        on!(transaction.connection(), roll_up_reservations(rows::ms(now), forget))?;
        transaction.commit().await?;
        Ok(())
    }
}

fn row(reservation: &Reservation, now: Timestamp) -> ReservationRow {
    ReservationRow {
        id: reservation.id.to_string(),
        issue_id: reservation.issue_id.0,
        day: number(reservation.day),
        tokens: number(reservation.tokens),
        tokens_if_lost: number(reservation.prompt_tokens.min(reservation.tokens)),
        expires_at: rows::ms(now.after(RESERVATION_TTL)),
    }
}

fn number(tokens: u64) -> i64 {
    i64::try_from(tokens).unwrap_or(TOKENS_MAX).min(TOKENS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_in_words_are_only_letters() {
        assert_eq!(patterns("a 100%_x \\ router"), ["%100\\%\\_x%", "%router%"]);
    }
}
