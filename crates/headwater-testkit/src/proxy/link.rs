//! One connection through the proxy: two pumps, and the gate each chunk passes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::Shared;
use super::faults::Verdict;
use crate::wait::lock;

const CHUNK_BYTES_MAX: usize = 16 * 1024;

/// Forwards both ways until one side closes, a fault says so, or the task is aborted.
pub(super) async fn run(client: TcpStream, shared: Arc<Shared>) {
    let _open = Open::count(&shared);
    gate(&shared, Duration::ZERO).await;
    let Ok(server) = TcpStream::connect(shared.target).await else { return };
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);

    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let reply_is_doomed = AtomicBool::new(false);
    // The loser is dropped with its sockets: a connection closes both ways at once.
    tokio::select! {
        _ = pump_requests(from_client, to_server, &shared, &reply_is_doomed) => {}
        _ = pump_replies(from_server, to_client, &shared, &reply_is_doomed) => {}
    }
}

async fn pump_requests(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: &Shared,
    reply_is_doomed: &AtomicBool,
) -> std::io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES_MAX];
    loop {
        let length = from.read(&mut chunk).await?;
        if length == 0 {
            return Ok(());
        }
        let delay = lock(&shared.one_shots).request_delay(&chunk[..length]);
        gate(shared, delay).await;
        let verdict = lock(&shared.one_shots).judge(length);
        match verdict {
            Verdict::Forward => {}
            Verdict::CutAfter(bytes) => return to.write_all(&chunk[..bytes]).await,
            Verdict::DropReply => reply_is_doomed.store(true, Ordering::SeqCst),
        }
        to.write_all(&chunk[..length]).await?;
    }
}

async fn pump_replies(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: &Shared,
    reply_is_doomed: &AtomicBool,
) -> std::io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES_MAX];
    loop {
        let length = from.read(&mut chunk).await?;
        // The server has answered, so the request took effect; the client will not know.
        if length == 0 || reply_is_doomed.load(Ordering::SeqCst) {
            return Ok(());
        }
        let random_delay = lock(&shared.one_shots).delay();
        gate(shared, random_delay).await;
        to.write_all(&chunk[..length]).await?;
    }
}

/// Holds a chunk back: for the delay, and for as long as the proxy is stalled.
async fn gate(shared: &Shared, random_delay: Duration) {
    let mut faults = shared.faults.subscribe();
    let delay = faults.borrow().delay + random_delay;
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    let _ = faults.wait_for(|faults| !faults.stalled).await;
}

/// Counts a connection for as long as it is open.
struct Open<'a>(&'a Shared);

impl<'a> Open<'a> {
    fn count(shared: &'a Shared) -> Open<'a> {
        shared.open.fetch_add(1, Ordering::SeqCst);
        Open(shared)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}
