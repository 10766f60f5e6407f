//! Replay in recorded batches, and the outcomes of the messages.

use crate::fixture::on_every_backend;

on_every_backend! {
    sending_a_batch_again_appends_nothing_and_returns_the_same_entries
    candidates_are_bounded_by_the_last_letter_and_say_what_was_replayed_before
    outcomes_follow_a_message_through_its_retries_to_its_end
    an_edited_letter_is_sent_once_with_its_new_payload
}

mod bodies {
    use std::collections::HashMap;

    use anyhow::{Context, Result};
    use headwater_queue::{
        DeadLetterFilter, DeadLetters, ReplayOrder, ReplayOutcomes, ReplayReadiness,
        ReplayedLetter, ReplayedLetterOutcome,
    };
    use headwater_stream::{EntryId, Fields, Retention};

    use crate::fixture::*;

    async fn letters(fixture: &QueueFixture) -> Result<DeadLetters> {
        Ok(fixture.queue.dead_letters(&fixture.topic).await?)
    }

    /// A dead letter of the group.
    async fn letter(fixture: &QueueFixture, original: &str, payload: &str) -> Result<EntryId> {
        let fields = [
            ("payload", payload),
            ("partitionId", "0"),
            ("originalMessageId", original),
            ("retryGroup", GROUP),
            ("reason", "no address"),
        ];
        fixture.foreign_letter(&fields).await
    }

    /// Everything that can be replayed, as orders.
    async fn orders(fixture: &QueueFixture) -> Result<Vec<ReplayOrder>> {
        let letters = letters(fixture).await?;
        let last = letters.last_id().await?.context("a letter")?;
        let all = DeadLetterFilter::default();
        let page = letters.candidates(&all, (EntryId::MIN, last), 100, 3).await?;
        assert!(page.has_ended);
        let order = |one: &headwater_queue::ReplayCandidate| match one.readiness {
            ReplayReadiness::Ready(partition) => Some(ReplayOrder {
                letter: one.letter.id,
                partition,
                identity: one.letter.identity(),
            }),
            _ => None,
        };
        Ok(page.items.iter().filter_map(order).collect())
    }

    pub(super) async fn sending_a_batch_again_appends_nothing_and_returns_the_same_entries(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        letter(&fixture, "1-0", "a").await?;
        let gone = letter(&fixture, "2-0", "b").await?;
        let orders = orders(&fixture).await?;
        let letters = letters(&fixture).await?;
        assert_eq!(letters.replayed_entries(&orders).await?, [None, None], "nothing is sent yet");

        // One is purged after it was recorded.
        letters.delete_replayed(&[gone]).await?;
        let sent = letters.send_again(&orders).await?;
        assert!(sent[0].is_some() && sent[1].is_none(), "{sent:?}");
        assert_eq!(letters.send_again(&orders).await?, sent);
        assert_eq!(letters.replayed_entries(&orders).await?, sent);
        assert_eq!(fixture.entries(0).await?.len(), 1);
        assert_eq!(fixture.remaining_letters().await?, []);
        Ok(())
    }

    pub(super) async fn candidates_are_bounded_by_the_last_letter_and_say_what_was_replayed_before(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        let first = letter(&fixture, "1-0", "a").await?;
        let copy = letter(&fixture, "1-0", "a").await?;
        let foreign = fixture.foreign_letter(&[("payload", "x")]).await?;
        let newer = letter(&fixture, "4-0", "d").await?;
        let letters = letters(&fixture).await?;
        let all = DeadLetterFilter::default();
        let page = letters.candidates(&all, (EntryId::MIN, foreign), 100, 3).await?;
        let found: Vec<_> =
            page.items.iter().map(|one| (one.letter.id, one.readiness.clone())).collect();
        assert_eq!(found[0], (first, ReplayReadiness::Ready(0)));
        assert_eq!(found[1], (copy, ReplayReadiness::Replayed));
        assert!(matches!(&found[2], (id, ReplayReadiness::Refused(_)) if *id == foreign));
        assert_eq!((found.len(), page.last, page.has_ended), (3, Some(foreign), true));

        // In pages: the next one begins after the last.
        let page = letters.candidates(&all, (EntryId::MIN, newer), 1, 3).await?;
        assert_eq!((page.items.len(), page.last, page.has_ended), (1, Some(first), false));
        let page = letters.candidates(&all, (foreign, newer), 10, 3).await?;
        assert_eq!((page.items.len(), page.last, page.has_ended), (1, Some(newer), true));
        Ok(())
    }

    pub(super) async fn outcomes_follow_a_message_through_its_retries_to_its_end(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        for (original, payload) in [("1-0", "settled"), ("2-0", "failed"), ("3-0", "retried")] {
            letter(&fixture, original, payload).await?;
        }
        let orders = orders(&fixture).await?;
        let letters = letters(&fixture).await?;
        let mut seen = ReplayOutcomes::new(letters.last_id().await?.context("a letter")?);
        let entries = letters.send_again(&orders).await?;
        let open: Vec<ReplayedLetter> = orders
            .iter()
            .zip(&entries)
            .map(|(order, entry)| ReplayedLetter {
                letter: order.letter,
                partition: order.partition,
                entry: *entry,
                group: Some(GROUP.to_owned()),
            })
            .collect();
        assert_eq!(letters.outcomes(&mut seen, &open).await?, [], "there is no group");
        fixture.group(0).await?;
        assert_eq!(letters.outcomes(&mut seen, &open).await?, [], "they are not delivered");
        let delivered = fixture.deliver(0, "c", 10).await?;
        assert_eq!(delivered.len(), 3);
        assert_eq!(letters.outcomes(&mut seen, &open).await?, [], "they are pending");

        // One is done, one fails again, one is in the stream again under a newer id.
        let copy_to = async |stream, entry: &Fields, reason: &str| {
            let fields = entry.iter().cloned();
            let reason = (bytes::Bytes::from("reason"), bytes::Bytes::from(reason.to_owned()));
            let fields = Fields::new(fields.chain([reason]));
            fixture.backend().append(&stream, &[fields], &Retention::KEEP_ALL).await
        };
        let failed =
            copy_to(fixture.letters_stream().await?, &delivered[1].fields, "again").await?;
        let retried = copy_to(fixture.stream(0).await?, &delivered[2].fields, "later").await?;
        let ids: Vec<EntryId> = delivered.iter().map(|one| one.id).collect();
        fixture.settle(0, "c", &ids).await?;
        let found: HashMap<_, _> = letters.outcomes(&mut seen, &open).await?.into_iter().collect();
        let again =
            ReplayedLetterOutcome::FailedAgain { letter: failed[0], reason: "again".to_owned() };
        let expected =
            [(open[0].letter, ReplayedLetterOutcome::Settled), (open[1].letter, again.clone())];
        assert_eq!(found, HashMap::from(expected.clone()));

        // A successor that knows nothing finds the same, and the retry when it is settled.
        let mut anew = ReplayOutcomes::new(open[2].letter);
        let found: HashMap<_, _> = letters.outcomes(&mut anew, &open).await?.into_iter().collect();
        assert_eq!(found, HashMap::from(expected));
        assert_eq!(letters.outcomes(&mut seen, &open[2..]).await?, [], "its retry waits");
        fixture.deliver(0, "c", 10).await?;
        assert_eq!(letters.outcomes(&mut seen, &open[2..]).await?, [], "its retry is pending");
        fixture.settle(0, "c", &retried).await?;
        let settled = [(open[2].letter, ReplayedLetterOutcome::Settled)];
        assert_eq!(letters.outcomes(&mut seen, &open[2..]).await?, settled);
        Ok(())
    }

    pub(super) async fn an_edited_letter_is_sent_once_with_its_new_payload(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        let id = letter(&fixture, "1-0", "wrong").await?;
        letter(&fixture, "1-0", "wrong").await?;
        let letters = letters(&fixture).await?;
        let (entry, is_sent) = letters.replay_edited(id, "right".into()).await?;
        assert!(is_sent);
        let copy = fixture.remaining_letters().await?[0];
        let (again, is_sent) = letters.replay_edited(copy, "third".into()).await?;
        assert_eq!((again, is_sent), (entry, false), "a copy of it was sent before");
        let stored = fixture.entries(0).await?;
        assert_eq!(stored.len(), 1);
        assert_eq!((text(&stored[0], "payload"), stored[0].id), (Some("right"), entry));
        assert_eq!(text(&stored[0], "retryGroup"), Some(GROUP));
        Ok(())
    }
}
