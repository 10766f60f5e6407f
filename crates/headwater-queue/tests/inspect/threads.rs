//! All futures are `Send`, as HTTP servers need.

use std::time::Duration;

use headwater_queue::{
    DeadLetterQuery, DeadLetterSelection, DeadLetters, MessageQuery, PendingFilter, Policies,
    PurgeConfig, Queue, ReplayConfig, Reset, ResetTo, Sampler, Tail, TailConfig, Trim,
};
use headwater_stream::EntryId;

fn assert_send<T: Send>(_: T) {}

/// Never called; it only has to compile.
#[allow(dead_code, reason = "the compiler checks it")]
fn every_future_is_send(
    queue: &Queue,
    letters: &DeadLetters,
    tail: &mut Tail,
    sampler: &mut Sampler,
) {
    let topics = queue.topics();
    assert_send(topics.create("t", 1, Policies::default()));
    assert_send(topics.describe("t"));
    assert_send(topics.grow("t", 2));
    assert_send(topics.delete("t"));
    let inspect = queue.inspect();
    assert_send(inspect.topic("t"));
    assert_send(inspect.group("t", "g"));
    assert_send(inspect.groups("t"));
    assert_send(inspect.pending("t", "g", &PendingFilter::default()));
    assert_send(inspect.messages("t", &MessageQuery::default()));
    assert_send(inspect.message("t", 0, EntryId::MIN));
    assert_send(queue.reset_group("t", "g", &Reset::to(ResetTo::End)));
    assert_send(queue.trim("t", &Trim::default()));
    assert_send(queue.tail("t", TailConfig::default()));
    assert_send(tail.next(Duration::ZERO));
    assert_send(queue.dead_letters("t"));
    assert_send(letters.browse(&DeadLetterQuery::default()));
    assert_send(letters.show(EntryId::MIN));
    assert_send(letters.replay(DeadLetterSelection::Ids(Vec::new()), &ReplayConfig::default()));
    assert_send(letters.purge(DeadLetterSelection::Ids(Vec::new()), &PurgeConfig::default()));
    assert_send(sampler.run_once());
}
