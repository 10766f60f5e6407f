//! An HTTP server moves its work between threads: every call allows that.

use std::time::Duration;

use headwater_queue::{
    DeadLetterQuery, DeadLetterSelection, DeadLetters, MessageQuery, PendingFilter, Policies,
    PurgeConfig, Queue, ReplayConfig, Reset, ResetTo, Sampler, Tail, TailConfig, Trim,
};
use headwater_stream::EntryId;

fn moves<T: Send>(_: T) {}

/// Never called: that it compiles is the test.
#[allow(dead_code, reason = "the compiler checks it")]
fn every_call_can_move_between_threads(
    queue: &Queue,
    letters: &DeadLetters,
    tail: &mut Tail,
    sampler: &mut Sampler,
) {
    let topics = queue.topics();
    moves(topics.create("t", 1, Policies::default()));
    moves(topics.describe("t"));
    moves(topics.grow("t", 2));
    moves(topics.delete("t"));
    let inspect = queue.inspect();
    moves(inspect.topic("t"));
    moves(inspect.group("t", "g"));
    moves(inspect.groups("t"));
    moves(inspect.pending("t", "g", &PendingFilter::default()));
    moves(inspect.messages("t", &MessageQuery::default()));
    moves(inspect.message("t", 0, EntryId::MIN));
    moves(queue.reset_group("t", "g", &Reset::to(ResetTo::End)));
    moves(queue.trim("t", &Trim::default()));
    moves(queue.tail("t", TailConfig::default()));
    moves(tail.next(Duration::ZERO));
    moves(queue.dead_letters("t"));
    moves(letters.browse(&DeadLetterQuery::default()));
    moves(letters.show(EntryId::MIN));
    moves(letters.replay(DeadLetterSelection::Ids(Vec::new()), &ReplayConfig::default()));
    moves(letters.purge(DeadLetterSelection::Ids(Vec::new()), &PurgeConfig::default()));
    moves(sampler.run_once());
}
