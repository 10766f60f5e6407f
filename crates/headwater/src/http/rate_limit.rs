//! Rate limit per client: a token bucket for each.
//!
//! Upstream: `timeouts.rs`. Downstream: `auth.rs`. Guarantees: a client cannot use up the limit of another; memory is
//! bounded. `client_address.rs` says who the client is.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use tokio::time::Instant;

use crate::config::HttpSettings;
use crate::http::ApiError;
use crate::http::client_address::client_of;
use crate::server::app_state::HttpServer;

/// Maximum number of tracked clients.
const CLIENTS_MAX: usize = 10_000;

/// Token buckets of all clients.
pub(crate) struct RateLimiter {
    buckets: Mutex<HashMap<IpAddr, Bucket>>,
    per_second: f64,
    burst: f64,
}

#[derive(Clone, Copy)]
struct Bucket {
    /// Requests left at the time `at`.
    left: f64,
    at: Instant,
}

impl RateLimiter {
    /// Limits from the settings.
    pub(crate) fn new(settings: &HttpSettings) -> Self {
        Self {
            buckets: Mutex::default(),
            per_second: f64::from(settings.rate_per_second),
            burst: f64::from(settings.rate_burst),
        }
    }

    /// As many per minute, all of them at once if need be.
    pub(super) fn per_minute(count: u32) -> Self {
        let burst = f64::from(count);
        Self { buckets: Mutex::default(), per_second: burst / 60.0, burst }
    }

    /// Takes one request of a client, or returns the time until the next is allowed.
    pub(super) fn take(&self, client: IpAddr, now: Instant) -> Result<(), Duration> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= CLIENTS_MAX && !buckets.contains_key(&client) {
            self.evict(&mut buckets, now);
        }
        let bucket = buckets.entry(client).or_insert(Bucket { left: self.burst, at: now });
        bucket.left = self.refilled(bucket, now);
        bucket.at = now;
        if bucket.left < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - bucket.left) / self.per_second));
        }
        bucket.left -= 1.0;
        Ok(())
    }

    fn refilled(&self, bucket: &Bucket, now: Instant) -> f64 {
        let since = now.saturating_duration_since(bucket.at).as_secs_f64();
        (bucket.left + since * self.per_second).min(self.burst)
    }

    /// Removes full buckets, which equal new ones. If too many remain, removes the fuller half: clients at their
    /// limit stay limited.
    fn evict(&self, buckets: &mut HashMap<IpAddr, Bucket>, now: Instant) {
        buckets.retain(|_, bucket| self.refilled(bucket, now) < self.burst);
        if buckets.len() < CLIENTS_MAX {
            return;
        }
        let mut all: Vec<_> =
            buckets.iter().map(|(client, bucket)| (self.refilled(bucket, now), *client)).collect();
        all.sort_by(|one, other| other.0.total_cmp(&one.0));
        for (_, client) in &all[..all.len() / 2] {
            buckets.remove(client);
        }
    }
}

/// Middleware: rejects requests above the limit with 429.
pub(crate) async fn apply(
    State(server): State<HttpServer>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    // Liveness probes are never limited, or the process would be taken for dead.
    if request.uri().path() == "/health/live" {
        return Ok(next.run(request).await);
    }
    match server.rate_limiter.take(client_of(&request), Instant::now()) {
        Ok(()) => Ok(next.run(request).await),
        Err(wait) => {
            let message = "too many requests; try again later";
            let refusal =
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", message);
            Err(refusal.retry_after(wait))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn rate(per_second: u32, burst: u32) -> RateLimiter {
        RateLimiter {
            buckets: Mutex::default(),
            per_second: f64::from(per_second),
            burst: f64::from(burst),
        }
    }

    fn address(number: u32) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(number))
    }

    #[test]
    fn a_burst_is_allowed_then_the_rate_applies_per_client() {
        let rate = rate(10, 3);
        let now = Instant::now();
        for _ in 0..3 {
            assert_eq!(rate.take(address(1), now), Ok(()));
        }
        let wait = rate.take(address(1), now).unwrap_err();
        assert_eq!(wait, Duration::from_millis(100));
        assert_eq!(rate.take(address(2), now), Ok(()));
        assert_eq!(rate.take(address(1), now + wait), Ok(()));
        assert!(rate.take(address(1), now + wait).is_err());
        // A longer pause does not accumulate more than one burst.
        let later = now + Duration::from_secs(3600);
        assert_eq!((0..10).filter(|_| rate.take(address(1), later).is_ok()).count(), 3);
    }

    #[test]
    fn memory_is_bounded_and_limited_clients_stay_limited() {
        let rate = rate(1, 2);
        let now = Instant::now();
        while rate.take(address(0), now).is_ok() {}
        for number in 1..=3 * CLIENTS_MAX as u32 {
            assert!(rate.take(address(number), now).is_ok());
            assert!(rate.buckets.lock().unwrap().len() <= CLIENTS_MAX);
        }
        assert!(rate.take(address(0), now).is_err());
    }
}
