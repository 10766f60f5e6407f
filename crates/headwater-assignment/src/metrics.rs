//! Metric names of stream assignment.
//!
//! All metrics have the label `service`. They go to the recorder that the program installed for the
//! `metrics` facade.

use std::time::Duration;

use metrics::{counter, gauge, histogram};

/// Streams without an owner found by the first sweep of a process.
const STARTUP_RECOVERED: &str = "headwater_assignment_startup_recovered_total";
/// Attempts to claim a stream, by `result`.
const CLAIMS: &str = "headwater_assignment_claims_total";
/// Leases acquired, renewed, released and lost.
const LOCKS_ACQUIRED: &str = "headwater_assignment_locks_acquired_total";
const LOCKS_EXTENDED: &str = "headwater_assignment_locks_extended_total";
const LOCKS_RELEASED: &str = "headwater_assignment_locks_released_total";
const LOCKS_LOST: &str = "headwater_assignment_locks_lost_total";
/// Work on streams: started, ended, and duration.
const PROCESSING_STARTED: &str = "headwater_assignment_processing_started_total";
const PROCESSING_ENDED: &str = "headwater_assignment_processing_ended_total";
const PROCESSING_SECONDS: &str = "headwater_assignment_processing_seconds";
/// Notifications by `kind`: queued, and dropped because the queue was full.
const NOTIFICATIONS: &str = "headwater_assignment_notifications_total";
const NOTIFICATIONS_DROPPED: &str = "headwater_assignment_notifications_dropped_total";
/// Lease hints from the backend, by `kind`.
const HINTS: &str = "headwater_assignment_hints_total";
/// Streams that exceeded `owners_max`, and malformed input entries.
const QUARANTINED: &str = "headwater_assignment_quarantined_total";
const MALFORMED: &str = "headwater_assignment_malformed_total";
/// Streams that cannot be assigned because their lease key holds a value of another type.
const BLOCKED: &str = "headwater_assignment_blocked";
/// Streams currently owned.
const OWNED: &str = "headwater_assignment_owned";
/// Duration of one heartbeat for all streams, and failed heartbeats.
const HEARTBEAT_SECONDS: &str = "headwater_assignment_heartbeat_seconds";
const HEARTBEATS_FAILED: &str = "headwater_assignment_heartbeats_failed_total";

/// Recorder handle of one assignment.
#[derive(Clone, Debug)]
pub(crate) struct AssignmentMetrics {
    service: String,
}

impl AssignmentMetrics {
    pub(crate) fn new(service: &str) -> Self {
        Self { service: service.to_owned() }
    }

    pub(crate) fn startup_recovered(&self, count: usize) {
        self.count(STARTUP_RECOVERED, count);
    }

    pub(crate) fn claim(&self, result: &'static str) {
        self.count_one_of(CLAIMS, "result", result);
    }

    pub(crate) fn locks_acquired(&self, count: usize) {
        self.count(LOCKS_ACQUIRED, count);
    }

    pub(crate) fn locks_extended(&self, count: usize) {
        self.count(LOCKS_EXTENDED, count);
    }

    pub(crate) fn locks_released(&self, count: usize) {
        self.count(LOCKS_RELEASED, count);
    }

    pub(crate) fn locks_lost(&self, count: usize) {
        self.count(LOCKS_LOST, count);
    }

    pub(crate) fn processing_started(&self) {
        self.count(PROCESSING_STARTED, 1);
    }

    pub(crate) fn processing_ended(&self, took: Duration) {
        self.count(PROCESSING_ENDED, 1);
        histogram!(PROCESSING_SECONDS, "service" => self.service.clone()).record(took);
    }

    pub(crate) fn notification(&self, kind: &'static str) {
        self.count_one_of(NOTIFICATIONS, "kind", kind);
    }

    pub(crate) fn notification_dropped(&self, kind: &'static str) {
        self.count_one_of(NOTIFICATIONS_DROPPED, "kind", kind);
    }

    pub(crate) fn hint(&self, kind: &'static str) {
        self.count_one_of(HINTS, "kind", kind);
    }

    pub(crate) fn quarantined(&self) {
        self.count(QUARANTINED, 1);
    }

    pub(crate) fn malformed(&self) {
        self.count(MALFORMED, 1);
    }

    pub(crate) fn owned(&self, count: usize) {
        gauge!(OWNED, "service" => self.service.clone()).set(count as f64);
    }

    pub(crate) fn blocked(&self, count: usize) {
        gauge!(BLOCKED, "service" => self.service.clone()).set(count as f64);
    }

    pub(crate) fn heartbeat(&self, took: Duration) {
        histogram!(HEARTBEAT_SECONDS, "service" => self.service.clone()).record(took);
    }

    pub(crate) fn heartbeat_failed(&self) {
        self.count(HEARTBEATS_FAILED, 1);
    }

    fn count(&self, name: &'static str, count: usize) {
        counter!(name, "service" => self.service.clone()).increment(count as u64);
    }

    fn count_one_of(&self, name: &'static str, label: &'static str, value: &'static str) {
        counter!(name, "service" => self.service.clone(), label => value).increment(1);
    }
}
