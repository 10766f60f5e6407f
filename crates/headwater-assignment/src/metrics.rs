//! Metric names of stream assignment.
//!
//! All metrics have the label `service`. They go to the recorder that the program installed for the
//! `metrics` facade.

use std::time::Duration;

use metrics::{counter, gauge, histogram};

/// Streams without an owner found by the first sweep of a process.
pub(crate) const STARTUP_RECOVERED: &str = "headwater_assignment_startup_recovered_total";
/// Attempts to claim a stream, by `result`.
pub(crate) const CLAIMS: &str = "headwater_assignment_claims_total";
/// Leases acquired, renewed, released and lost.
pub(crate) const LOCKS_ACQUIRED: &str = "headwater_assignment_locks_acquired_total";
pub(crate) const LOCKS_EXTENDED: &str = "headwater_assignment_locks_extended_total";
pub(crate) const LOCKS_RELEASED: &str = "headwater_assignment_locks_released_total";
pub(crate) const LOCKS_LOST: &str = "headwater_assignment_locks_lost_total";
/// Work on streams: started, ended, and duration.
pub(crate) const PROCESSING_STARTED: &str = "headwater_assignment_processing_started_total";
pub(crate) const PROCESSING_ENDED: &str = "headwater_assignment_processing_ended_total";
pub(crate) const PROCESSING_SECONDS: &str = "headwater_assignment_processing_seconds";
/// Notifications by `kind`: queued, and dropped because the queue was full.
pub(crate) const NOTIFICATIONS: &str = "headwater_assignment_notifications_total";
pub(crate) const NOTIFICATIONS_DROPPED: &str = "headwater_assignment_notifications_dropped_total";
/// Lease hints from the backend, by `kind`.
pub(crate) const HINTS: &str = "headwater_assignment_hints_total";
/// Streams that exceeded `owners_max`, and malformed input entries.
pub(crate) const QUARANTINED: &str = "headwater_assignment_quarantined_total";
pub(crate) const MALFORMED: &str = "headwater_assignment_malformed_total";
/// Streams that cannot be assigned because their lease key holds a value of another type.
pub(crate) const BLOCKED: &str = "headwater_assignment_blocked";
/// Streams currently owned.
pub(crate) const OWNED: &str = "headwater_assignment_owned";
/// Duration of one heartbeat for all streams, and failed heartbeats.
pub(crate) const HEARTBEAT_SECONDS: &str = "headwater_assignment_heartbeat_seconds";
pub(crate) const HEARTBEATS_FAILED: &str = "headwater_assignment_heartbeats_failed_total";

/// Recorder handle of one assignment.
#[derive(Clone, Debug)]
pub(crate) struct AssignmentMetrics {
    service: String,
}

impl AssignmentMetrics {
    pub(crate) fn new(service: &str) -> Self {
        Self { service: service.to_owned() }
    }

    pub(crate) fn count(&self, name: &'static str, count: usize) {
        counter!(name, "service" => self.service.clone()).increment(count as u64);
    }

    pub(crate) fn count_by(&self, name: &'static str, label: &'static str, value: &'static str) {
        counter!(name, "service" => self.service.clone(), label => value).increment(1);
    }

    pub(crate) fn gauge(&self, name: &'static str, value: usize) {
        gauge!(name, "service" => self.service.clone()).set(value as f64);
    }

    pub(crate) fn time(&self, name: &'static str, took: Duration) {
        histogram!(name, "service" => self.service.clone()).record(took);
    }
}
