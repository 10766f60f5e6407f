//! The metrics of the Redis client: name, labels, meaning.

/// Attempts to connect. Labels: result (`ok`, `failed`).
pub(super) const CONNECTS: &str = "headwater_redis_connects_total";
/// Connections that were lost or closed because the server did not answer.
pub(super) const DISCONNECTS: &str = "headwater_redis_disconnects_total";
/// Calls that were sent again. Labels: result (`unreachable`: no connection or no reply; `refused`: rejected for the moment).
pub(super) const CALL_RETRIES: &str = "headwater_redis_retries_total";
/// Redirections by a cluster. Labels: result (`moved`, `ask`).
pub(super) const REDIRECTS: &str = "headwater_redis_redirects_total";
/// Requests without a reply on the shared connections of this process.
pub(super) const REQUESTS_IN_FLIGHT: &str = "headwater_redis_requests_in_flight";
