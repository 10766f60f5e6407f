//! One proxied connection: forwards both directions and applies faults.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::ProxyState;
use super::faults::ChunkAction;
use crate::wait::lock;

const CHUNK_BYTES_MAX: usize = 16 * 1024;

/// Forwards both directions until one side closes, a fault occurs, or the task is aborted.
pub(super) async fn run(client: TcpStream, number: u64, shared: Arc<ProxyState>) {
    let _open = ProxiedConnection::count(&shared);
    wait_until_forwarding(&shared, number, Duration::ZERO).await;
    let Ok(server) = TcpStream::connect(shared.target).await else { return };
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);

    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let should_drop_reply = AtomicBool::new(false);
    // The other future is dropped with its sockets: both directions close together.
    tokio::select! {
        _ = pump_requests(from_client, to_server, &shared, number, &should_drop_reply) => {}
        _ = pump_replies(from_server, to_client, &shared, number, &should_drop_reply) => {}
    }
}

async fn pump_requests(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: &ProxyState,
    number: u64,
    should_drop_reply: &AtomicBool,
) -> std::io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES_MAX];
    loop {
        let length = from.read(&mut chunk).await?;
        if length == 0 {
            return Ok(());
        }
        let delay = lock(&shared.one_shots).request_delay(&chunk[..length]);
        wait_until_forwarding(shared, number, delay).await;
        let verdict = lock(&shared.one_shots).next_action(&chunk[..length]);
        match verdict {
            ChunkAction::Forward => {}
            ChunkAction::CutAfter(bytes) => return to.write_all(&chunk[..bytes]).await,
            ChunkAction::DropReply => should_drop_reply.store(true, Ordering::SeqCst),
        }
        to.write_all(&chunk[..length]).await?;
    }
}

async fn pump_replies(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: &ProxyState,
    number: u64,
    should_drop_reply: &AtomicBool,
) -> std::io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES_MAX];
    loop {
        let length = from.read(&mut chunk).await?;
        // The server has answered, so the request took effect, but the client gets no reply.
        if length == 0 || should_drop_reply.load(Ordering::SeqCst) {
            return Ok(());
        }
        let random_delay = lock(&shared.one_shots).delay();
        wait_until_forwarding(shared, number, random_delay).await;
        to.write_all(&chunk[..length]).await?;
    }
}

/// Waits for the delay, and while the proxy is stalled or has forgotten this connection.
async fn wait_until_forwarding(shared: &ProxyState, number: u64, random_delay: Duration) {
    let mut faults = shared.faults.subscribe();
    let delay = faults.borrow().delay + random_delay;
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    let _ = faults.wait_for(|faults| !faults.stalled && number > faults.forgotten).await;
}

/// Counts a connection while it is open.
struct ProxiedConnection<'a>(&'a ProxyState);

impl<'a> ProxiedConnection<'a> {
    fn count(shared: &'a ProxyState) -> ProxiedConnection<'a> {
        shared.open.fetch_add(1, Ordering::SeqCst);
        ProxiedConnection(shared)
    }
}

impl Drop for ProxiedConnection<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}
