//! Memory budget for the bodies of all requests (`http.body_memory_bytes_max`).
//!
//! Upstream: `timeouts.rs` gives every request a [`BodyMemory`]; `body.rs` and imports reserve from it before they
//! read or decode. Guarantees: reservations never exceed the budget, and those of one client never exceed half of it. A
//! request waits up to [`WAIT_MAX`] for memory, then it is rejected with 503. Reservations are released when the
//! request ends. Decoded JSON takes much more memory than its text, so [`decoded_bytes`] estimates it in advance.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::http::ApiError;

/// How long a request waits for memory.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// Estimated memory of a decoded object: a `serde_json` map node has room for 11 fields; a message of `produce` needs
/// about as much.
const OBJECT_BYTES: u64 = 1024;
/// Estimated memory of any other value: its slot in a growing list plus its allocation.
const VALUE_BYTES: u64 = 160;

/// The budget of all requests.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    bytes_max: u64,
    used: Mutex<MemoryUsage>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct MemoryUsage {
    all: u64,
    by_client: HashMap<IpAddr, u64>,
}

impl BodyBudget {
    pub(crate) fn new(bytes_max: u64) -> Arc<Self> {
        Arc::new(Self { bytes_max, used: Mutex::default(), freed: Notify::new() })
    }

    /// The reservation of one request of `client`.
    pub(crate) fn for_request(self: &Arc<Self>, client: IpAddr) -> Arc<BodyMemory> {
        Arc::new(BodyMemory { budget: Arc::clone(self), client, bytes: Mutex::new(0) })
    }

    fn client_bytes_max(&self) -> u64 {
        self.bytes_max / 2
    }

    fn try_reserve(&self, client: IpAddr, bytes: u64) -> bool {
        let mut used = self.used();
        let of_client = used.by_client.get(&client).copied().unwrap_or(0);
        if used.all + bytes > self.bytes_max || of_client + bytes > self.client_bytes_max() {
            return false;
        }
        used.all += bytes;
        used.by_client.insert(client, of_client + bytes);
        true
    }

    fn release(&self, client: IpAddr, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let mut used = self.used();
        used.all -= bytes;
        if let Some(of_client) = used.by_client.get_mut(&client) {
            *of_client -= bytes;
            if *of_client == 0 {
                used.by_client.remove(&client);
            }
        }
        drop(used);
        self.freed.notify_waiters();
    }

    fn used(&self) -> MutexGuard<'_, MemoryUsage> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory reserved by one request; released on drop.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    budget: Arc<BodyBudget>,
    client: IpAddr,
    bytes: Mutex<u64>,
}

impl BodyMemory {
    /// Reserves `bytes` more. Cancel-safe: a dropped future has reserved nothing.
    ///
    /// Fails with 413 if no request may have that much, and with 503 if it is not free in time.
    pub(crate) async fn reserve(&self, bytes: u64) -> Result<(), ApiError> {
        let client_max = self.budget.client_bytes_max();
        if bytes > client_max {
            let message = format!(
                "request body needs more than {client_max} bytes of memory, half of `http.body_memory_bytes_max`; \
                 send fewer values in one request"
            );
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message));
        }
        let deadline = Instant::now() + WAIT_MAX;
        loop {
            let freed = self.budget.freed.notified();
            tokio::pin!(freed);
            // Enabled before the attempt, so that no release is missed.
            freed.as_mut().enable();
            if self.budget.try_reserve(self.client, bytes) {
                *self.bytes.lock().unwrap_or_else(PoisonError::into_inner) += bytes;
                return Ok(());
            }
            if timeout_at(deadline, freed).await.is_err() {
                return Err(ApiError::unavailable(
                    "memory for request bodies (`http.body_memory_bytes_max`) is exhausted; try again later",
                ));
            }
        }
    }

    /// A separate reservation of the same client, released earlier than that of the request.
    pub(crate) fn for_part(&self) -> Arc<Self> {
        self.budget.for_request(self.client)
    }
}

impl Drop for BodyMemory {
    fn drop(&mut self) {
        let bytes = *self.bytes.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.budget.release(self.client, bytes);
    }
}

/// Upper estimate of the memory that this JSON takes when decoded, its text excluded. Works on invalid JSON as well.
pub(crate) fn decoded_bytes(json: &[u8]) -> u64 {
    let (mut objects, mut values, mut string_bytes) = (0_u64, 1_u64, 0_u64);
    let (mut is_in_string, mut is_escaped) = (false, false);
    for byte in json {
        if is_in_string {
            string_bytes += 1;
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' => is_escaped = true,
                b'"' => is_in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => is_in_string = true,
            b'{' => objects += 1,
            // Each of these starts or precedes a value.
            b'[' | b',' | b':' => values += 1,
            _ => {}
        }
    }
    objects * OBJECT_BYTES + values * VALUE_BYTES + string_bytes
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn client(number: u32) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(number))
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_waits_for_memory_and_is_rejected_if_none_is_released() {
        let budget = BodyBudget::new(100);
        let (first, second) = (budget.for_request(client(1)), budget.for_request(client(2)));
        first.reserve(50).await.unwrap();
        second.reserve(50).await.unwrap();
        let third = budget.for_request(client(3));
        let refused = third.reserve(1).await.unwrap_err();
        assert_eq!(
            (refused.status(), refused.code()),
            (StatusCode::SERVICE_UNAVAILABLE, "unavailable")
        );
        let (waited, ()) = tokio::join!(third.reserve(50), async {
            tokio::task::yield_now().await;
            drop(first);
        });
        assert_eq!(waited, Ok(()));
        drop((second, third));
        let used = budget.used();
        assert_eq!((used.all, used.by_client.len()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn one_client_can_reserve_at_most_half_of_the_budget() {
        let budget = BodyBudget::new(100);
        let (first, second) = (budget.for_request(client(1)), budget.for_request(client(1)));
        first.reserve(30).await.unwrap();
        assert!(second.reserve(30).await.is_err());
        let too_large = second.reserve(51).await.unwrap_err();
        assert_eq!(too_large.status(), StatusCode::PAYLOAD_TOO_LARGE);
        budget.for_request(client(2)).reserve(50).await.unwrap();
        drop(first);
        second.reserve(50).await.unwrap();
    }

    #[test]
    fn the_estimate_counts_values_and_ignores_string_contents() {
        let estimate = |json: &str| decoded_bytes(json.as_bytes());
        assert_eq!(estimate(r#""[{,:\"[{,""#), VALUE_BYTES + 10);
        assert!(estimate(&"{\"\":0},".repeat(100_000)) > 100_000 * OBJECT_BYTES);
        assert!(estimate(&"[],".repeat(100_000)) > 200_000 * VALUE_BYTES);
        // A typical body needs a few times its size.
        let usual = serde_json::json!({"title": "A parcel is late", "content": "x".repeat(1000)});
        let usual = usual.to_string();
        assert!(estimate(&usual) < 4 * usual.len() as u64, "{}", estimate(&usual));
    }
}
