//! Search for words: the tool of the model, and within a list of tickets.

use headwater::desk::ReplyTarget;
use headwater::desk::tools::{SearchQuery, TicketSearch};
use headwater::tickets::{TicketFilter, TicketSearchPage, TicketStatus, TicketWords};
use uuid::Uuid;

use crate::{Fixture, reply, row, ticket};

pub(crate) async fn a_search_finds_words_only_in_tickets_of_the_same_user(fixture: Fixture) {
    let mine =
        fixture.tickets.create(ticket("Router 100% broken", "no light", "ada")).await.unwrap();
    fixture
        .tickets
        .deliver(&row(mine, "k"), ReplyTarget::Answer, &reply("Turn it off"))
        .await
        .unwrap();
    fixture.tickets.create(ticket("Router secret of bob", "bobs password", "bob")).await.unwrap();
    let here = fixture.tickets.create(ticket("Router again", "router", "ada")).await.unwrap();
    let found = async |words: &str, user: Option<&str>| {
        let query = SearchQuery {
            words: words.into(),
            user_id: user.map(str::to_owned),
            except: here.ticket_id.to_string(),
        };
        let found = fixture.tickets.search(&query).await.unwrap();
        found.into_iter().map(|ticket| (ticket.title, ticket.answer)).collect::<Vec<_>>()
    };
    let expected = vec![("Router 100% broken".to_owned(), Some("Turn it off".to_owned()))];
    assert_eq!(found("my ROUTER please", Some("ada")).await, expected);
    assert_eq!(found("LIGHT", Some("ada")).await, expected);
    assert_eq!(found("100%", Some("ada")).await, expected);
    for nothing in ["%%%", "___", "a", "", "password"] {
        assert_eq!(found(nothing, Some("ada")).await, [], "{nothing}");
    }
    assert_eq!(found("router", None).await.len(), 2);
}

/// Titles, matching, searched, and the cursor of the next page.
type FoundPage = (Vec<String>, usize, usize, Option<i64>);

async fn search(fixture: &Fixture, words: &str, filter: &TicketFilter, limit: usize) -> FoundPage {
    let words = TicketWords::parse(words).unwrap();
    let found = fixture.tickets.search_list(filter, &words, limit).await.unwrap();
    let TicketSearchPage { tickets, searched, matching, next, .. } = found;
    (tickets.into_iter().map(|ticket| ticket.title).collect(), matching, searched, next)
}

pub(crate) async fn a_list_is_searched_within_its_filter(fixture: Fixture) {
    let mut made = Vec::new();
    for (title, content, user) in [
        ("Router blinks", "red light", "ada"),
        ("Parcel", "the ROUTER came broken", "bob"),
        ("Invoice", "too high", "ada"),
        ("100% off", "coupon", "ada"),
    ] {
        made.push(fixture.tickets.create(ticket(title, content, user)).await.unwrap());
    }
    fixture.tickets.close(made[0].ticket_id).await.unwrap();
    let all = TicketFilter::default();
    let titles = |found: FoundPage| (found.0, found.2);
    let owned = |titles: &[&str]| titles.iter().map(|title| (*title).to_owned()).collect();
    for (words, filter, expected, searched) in [
        ("router please", all.clone(), &["Parcel", "Router blinks"][..], 4),
        ("a coupon or invoice", all.clone(), &["100% off", "Invoice"], 4),
        (
            "LIGHT",
            TicketFilter { user_id: Some("ada".into()), ..all.clone() },
            &["Router blinks"],
            3,
        ),
        (
            "router",
            TicketFilter { status: Some(TicketStatus::Open), ..all.clone() },
            &["Parcel"],
            3,
        ),
        (
            "router",
            TicketFilter { status: Some(TicketStatus::Closed), ..all.clone() },
            &["Router blinks"],
            1,
        ),
        (
            "router",
            TicketFilter { oldest_first: true, ..all.clone() },
            &["Router blinks", "Parcel"],
            4,
        ),
        ("router", TicketFilter { handed_over: Some(true), ..all.clone() }, &[], 0),
        ("100%", all.clone(), &["100% off"], 4),
        ("%%%", all.clone(), &[], 4),
        ("___", all.clone(), &[], 4),
    ] {
        let expected: (Vec<String>, usize) = (owned(expected), searched);
        assert_eq!(
            titles(search(&fixture, words, &filter, 10).await),
            expected,
            "{words} {filter:?}"
        );
    }
    // A full page says where the next one begins.
    let (first, matching, _, next) = search(&fixture, "router", &all, 1).await;
    assert_eq!((first, matching), (owned(&["Parcel"]), 2));
    assert!(next.is_some());
    let rest = TicketFilter { after: next, ..all };
    assert_eq!(search(&fixture, "router", &rest, 1).await, (owned(&["Router blinks"]), 1, 1, None));
}

/// Tickets without messages.
async fn add_fillers(fixture: &Fixture, count: usize) {
    let ids: Vec<Uuid> = (0..count).map(|_| Uuid::now_v7()).collect();
    let ids = serde_json::to_string(&ids).unwrap();
    let mut transaction = fixture.store.begin().await.unwrap();
    for insert in [
        "INSERT INTO issues (integration_id, external_project_id, external_issue_id, created_at, updated_at)
            SELECT g.id, '', v.value, headwater_now(), headwater_now()
            FROM headwater_each($1) AS v, integrations AS g WHERE g.name = 'desk'",
        "INSERT INTO tickets (ticket_id, issue_id, title, created_at, updated_at)
            SELECT i.external_issue_id::uuid, i.id, 'Filler', headwater_now(), headwater_now()
            FROM issues AS i WHERE i.external_issue_id IN (SELECT value FROM headwater_each($1))",
    ] {
        transaction.connection().execute(insert, &[(&ids).into()]).await.unwrap();
    }
    transaction.commit().await.unwrap();
}

pub(crate) async fn a_search_of_a_list_continues_where_its_page_ended(fixture: Fixture) {
    fixture.tickets.create(ticket("Old router", "x", "ada")).await.unwrap();
    add_fillers(&fixture, 1500).await;
    fixture.tickets.create(ticket("New router", "x", "ada")).await.unwrap();
    for (words, oldest_first, pages) in [
        ("router", false, [(&["New router"][..], 1000), (&["Old router"], 502)]),
        ("router", true, [(&["Old router"], 1000), (&["New router"], 502)]),
        // An empty page that is not the last one.
        ("parcel", false, [(&[], 1000), (&[], 502)]),
    ] {
        let mut filter = TicketFilter { oldest_first, ..TicketFilter::default() };
        for (titles, expected) in pages {
            let (found, matching, searched, next) = search(&fixture, words, &filter, 10).await;
            assert_eq!(
                (&found[..], matching),
                (
                    &titles.iter().map(|title| (*title).to_owned()).collect::<Vec<_>>()[..],
                    titles.len()
                )
            );
            assert_eq!((searched, next.is_some()), (expected, expected == 1000), "{words}");
            filter.after = next;
        }
    }
    // Tickets of one user are found behind those of others.
    let of_ada = TicketFilter { user_id: Some("ada".into()), ..TicketFilter::default() };
    let (found, matching, searched, next) = search(&fixture, "router", &of_ada, 10).await;
    assert_eq!((found.len(), matching, searched, next), (2, 2, 2, None));
}
