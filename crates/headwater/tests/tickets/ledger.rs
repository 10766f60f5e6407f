//! The token ledger in SQL: budgets, settlements and expiry.

use headwater::desk::budget::{Ledger, ReserveDecision, TokenBudget, TokenReservation};
use headwater_issue::{IssueId, StoreConnection};
use headwater_stream::clock::{Clock, SystemClock};
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use crate::Fixture;

fn reservation(issue: i64, day: u64, tokens: u64) -> TokenReservation {
    let (id, issue_id, prompt_tokens) = (Uuid::now_v7(), IssueId(issue), tokens / 2);
    let (integration, user) = ("desk".to_owned(), Some("ada".to_owned()));
    let is_stranger = false;
    TokenReservation { id, issue_id, integration, user, is_stranger, day, tokens, prompt_tokens }
}

pub(crate) async fn concurrent_reservations_never_exceed_a_budget(fixture: Fixture) {
    let budget = TokenBudget {
        issue_tokens_max: 1000,
        day_tokens_max: 1550,
        user_tokens_max: 9999,
        ..TokenBudget::default()
    };
    let calls = (0..40).map(|number| {
        let tickets = fixture.tickets.clone();
        tokio::spawn(async move {
            tickets.reserve(&reservation(number % 2, 7, 100), &budget).await.unwrap()
        })
    });
    let mut granted = 0;
    for call in calls.collect::<Vec<_>>() {
        match call.await.unwrap() {
            ReserveDecision::Granted => granted += 1,
            // Nothing is settled, so the budget is not definitely exceeded.
            other => assert_eq!(other, ReserveDecision::Pending),
        }
    }
    assert!(granted <= 15, "{granted}");
    // Rejected concurrent reservations left nothing behind: sequentially, all that fit are granted.
    for number in 0..40 {
        let wanted = reservation(number % 2, 7, 100);
        let reserved = fixture.tickets.reserve(&wanted, &budget).await.unwrap();
        granted += u32::from(reserved == ReserveDecision::Granted);
    }
    assert_eq!(granted, 15);
    assert_eq!(tokens_of_day(&fixture, 7).await, 1500);

    let reserve = async |issue, day, tokens| {
        fixture.tickets.reserve(&reservation(issue, day, tokens), &budget).await.unwrap()
    };
    assert_eq!(reserve(5, 7, 100).await, ReserveDecision::Pending);
    assert_eq!(reserve(5, 8, 1001).await, ReserveDecision::IssueBudgetExceeded);
    assert_eq!(reserve(5, 8, 1551).await, ReserveDecision::IssueBudgetExceeded);
    // Unused tokens are returned, and a rejection reserves nothing.
    let all = reservation(5, 8, 1000);
    assert_eq!(fixture.tickets.reserve(&all, &budget).await.unwrap(), ReserveDecision::Granted);
    assert_eq!(reserve(5, 8, 1).await, ReserveDecision::Pending);
    fixture.tickets.settle(&all, 10).await.unwrap();
    let rest = reservation(5, 8, 990);
    assert_eq!(fixture.tickets.reserve(&rest, &budget).await.unwrap(), ReserveDecision::Granted);
    fixture.tickets.settle(&rest, 990).await.unwrap();
    assert_eq!(reserve(5, 9, 1).await, ReserveDecision::IssueBudgetExceeded);
    assert_eq!(reserve(6, 8, 551).await, ReserveDecision::DayBudgetExceeded);
}

pub(crate) async fn a_spent_budget_of_an_integration_or_an_author_stops_no_other(fixture: Fixture) {
    use ReserveDecision::{
        DayBudgetExceeded, Granted, StrangersBudgetExceeded, UserBudgetExceeded,
    };
    let budget = TokenBudget {
        day_tokens_max: 1000,
        user_tokens_max: 600,
        strangers_tokens_max: 700,
        ..Default::default()
    };
    // Settled and aggregated tokens of strangers count. Those of earlier days are deleted.
    let today = SystemClock.now().as_millis() / (24 * 60 * 60 * 1000);
    for (user, tokens, expected) in [
        ("x", 300, Granted),
        ("y", 300, Granted),
        ("z", 101, StrangersBudgetExceeded),
        ("z", 100, Granted),
    ] {
        let (integration, user) = ("public".to_owned(), Some(user.to_owned()));
        let wanted = TokenReservation {
            integration,
            user,
            is_stranger: true,
            ..reservation(tokens as i64, today, tokens)
        };
        let decision = fixture.tickets.reserve(&wanted, &budget).await.unwrap();
        assert_eq!(decision, expected, "{wanted:?}");
        if decision == Granted {
            fixture.tickets.settle(&wanted, tokens).await.unwrap();
            fixture.tickets.maintain().await.unwrap();
        }
    }
    let known = TokenReservation { integration: "public".to_owned(), ..reservation(9, today, 200) };
    assert_eq!(fixture.tickets.reserve(&known, &budget).await.unwrap(), Granted);
    for (integration, user, tokens, expected) in [
        ("hub", "eve", 500, Granted),
        ("hub", "eve", 200, UserBudgetExceeded),
        ("hub", "ada", 500, Granted),
        ("hub", "bob", 100, DayBudgetExceeded),
        ("lab", "eve", 500, Granted),
    ] {
        let (integration, user) = (integration.to_owned(), Some(user.to_owned()));
        let wanted =
            TokenReservation { integration, user, ..reservation(tokens as i64, 7, tokens) };
        let decision = fixture.tickets.reserve(&wanted, &budget).await.unwrap();
        assert_eq!(decision, expected, "{wanted:?}");
        if decision == Granted {
            fixture.tickets.settle(&wanted, tokens).await.unwrap();
        }
    }
}

pub(crate) async fn a_reservation_is_settled_once_despite_repeated_or_late_calls(fixture: Fixture) {
    let budget = TokenBudget::default();
    let wanted = reservation(1, 7, 1000);
    assert_eq!(fixture.tickets.reserve(&wanted, &budget).await.unwrap(), ReserveDecision::Granted);
    for used in [300, 300, 5] {
        fixture.tickets.settle(&wanted, used).await.unwrap();
        assert_eq!(tokens_of_day(&fixture, 7).await, 300);
    }
    // Settled before the reservation arrived, with unknown outcome: no tokens used.
    let late = reservation(1, 7, 1000);
    fixture.tickets.settle(&late, 0).await.unwrap();
    fixture.tickets.reserve(&late, &budget).await.unwrap();
    assert_eq!(tokens_of_day(&fixture, 7).await, 300);

    // Aggregation does not change the sum, and the reservation stays settled.
    let open = reservation(1, 7, 1000);
    fixture.tickets.reserve(&open, &budget).await.unwrap();
    for _ in 0..2 {
        fixture.tickets.maintain().await.unwrap();
        fixture.tickets.settle(&wanted, 300).await.unwrap();
        assert_eq!(tokens_of_day(&fixture, 7).await, 1300);
    }
    fixture.tickets.settle(&open, 200).await.unwrap();
    fixture.tickets.maintain().await.unwrap();
    assert_eq!(
        (tokens_of_day(&fixture, 7).await, query_number(&fixture, AGGREGATED).await),
        (500, 500)
    );
}

pub(crate) async fn an_unsettled_reservation_expires_and_counts_as_its_prompt(fixture: Fixture) {
    let budget = TokenBudget {
        issue_tokens_max: 1000,
        day_tokens_max: 1000,
        user_tokens_max: 1000,
        ..TokenBudget::default()
    };
    let lost = reservation(1, 7, 1000);
    assert_eq!(fixture.tickets.reserve(&lost, &budget).await.unwrap(), ReserveDecision::Granted);
    let wanted = reservation(1, 7, 500);
    assert_eq!(fixture.tickets.reserve(&wanted, &budget).await.unwrap(), ReserveDecision::Pending);
    execute(&fixture, "UPDATE desk_reservations SET expires_at = 1").await;
    assert_eq!(fixture.tickets.reserve(&wanted, &budget).await.unwrap(), ReserveDecision::Granted);
    fixture.tickets.settle(&wanted, 100).await.unwrap();
    fixture.tickets.maintain().await.unwrap();
    assert_eq!(
        (tokens_of_day(&fixture, 7).await, query_number(&fixture, AGGREGATED).await),
        (600, 600)
    );
    // Aggregated rows are deleted later.
    execute(&fixture, "UPDATE desk_reservations SET expires_at = 1").await;
    fixture.tickets.delete_old_reservations().await.unwrap();
    assert_eq!(query_number(&fixture, "SELECT count(*) FROM desk_reservations").await, 0);
    assert_eq!(tokens_of_day(&fixture, 7).await, 600);
}

pub(crate) async fn the_next_run_of_an_issue_lets_what_a_dead_one_has_reserved_expire_soon(
    fixture: Fixture,
) {
    let budget =
        TokenBudget { day_tokens_max: 2000, user_tokens_max: 2000, ..TokenBudget::default() };
    let (dead, running) = (reservation(1, 7, 1000), reservation(2, 7, 1000));
    for one in [&dead, &running] {
        let decision = fixture.tickets.reserve(one, &budget).await.unwrap();
        assert_eq!(decision, ReserveDecision::Granted);
    }
    let next = reservation(1, 7, 500);
    assert_eq!(fixture.tickets.reserve(&next, &budget).await.unwrap(), ReserveDecision::Pending);
    // Two minutes later.
    execute(&fixture, "UPDATE desk_reservations SET expires_at = expires_at - 120000").await;
    assert_eq!(fixture.tickets.reserve(&next, &budget).await.unwrap(), ReserveDecision::Granted);
    fixture.tickets.maintain().await.unwrap();
    // The prompt of the dead run, and the others in full.
    assert_eq!(tokens_of_day(&fixture, 7).await, 500 + 1000 + 500);
    fixture.tickets.settle(&running, 300).await.unwrap();
    assert_eq!(tokens_of_day(&fixture, 7).await, 500 + 300 + 500);
}

const AGGREGATED: &str = "SELECT tokens FROM desk_usage WHERE scope = 'day:000007:desk'";

/// Tokens counted against a day.
async fn tokens_of_day(fixture: &Fixture, day: u64) -> i64 {
    let usage = format!(
        "SELECT coalesce(max(tokens), 0) FROM desk_usage WHERE scope = 'day:{day:06}:desk'"
    );
    let open = format!(
        "SELECT CAST(coalesce(sum(tokens), 0) AS bigint) FROM desk_reservations WHERE day_scope = 'day:{day:06}:desk' AND NOT rolled_up"
    );
    query_number(fixture, &usage).await + query_number(fixture, &open).await
}

async fn query_number(fixture: &Fixture, sql: &str) -> i64 {
    let sql = AssertSqlSafe(sql.to_owned());
    let mut reading = fixture.store.read_connection().await.unwrap();
    let number = match reading.connection() {
        StoreConnection::Sqlite(sqlite) => sqlx::query_scalar(sql).fetch_one(sqlite).await.unwrap(),
        StoreConnection::Postgres(postgres) => {
            sqlx::query_scalar(sql).fetch_one(postgres).await.unwrap()
        }
        other => panic!("{other:?}"),
    };
    reading.release().await;
    number
}

async fn execute(fixture: &Fixture, sql: &str) {
    let mut transaction = fixture.store.begin().await.unwrap();
    let sql = AssertSqlSafe(sql.to_owned());
    match transaction.connection() {
        StoreConnection::Sqlite(sqlite) => {
            sqlx::query(sql).execute(sqlite).await.unwrap();
        }
        StoreConnection::Postgres(postgres) => {
            sqlx::query(sql).execute(postgres).await.unwrap();
        }
        other => panic!("{other:?}"),
    }
    transaction.commit().await.unwrap();
}
