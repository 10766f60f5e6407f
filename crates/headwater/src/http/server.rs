//! Connections: accepts them, limits them, and lets them end in good order.
//!
//! Upstream: `run` binds the address early, so that a port in use is told at once. Downstream: the router.
//! Promises: at most `http.connections_max` connections; a client that sends its headers slowly, or too many of them, is cut off;
//! after the stop no new request is taken, and what is under way has until the deadline.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};
use tower::ServiceExt;
use tracing::{debug, info, warn};

use crate::failure::Failure;
use crate::settings::Http;
use crate::stop::Stopping;

/// How long to wait when the system has no connection to give, for example because too many files are open.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Headers of one request.
const HEADERS_MAX: usize = 100;

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// An address that is ours.
#[derive(Debug)]
pub(crate) struct Listening {
    listener: TcpListener,
    /// With the port that the system chose, if the setting said 0.
    pub(crate) address: SocketAddr,
}

impl Listening {
    /// Takes the address.
    pub(crate) async fn bind(setting: &str, address: SocketAddr) -> Result<Self, Failure> {
        let problem = |error: std::io::Error| {
            let advice = match error.kind() {
                ErrorKind::AddrInUse => "stop the program that does, or set",
                ErrorKind::PermissionDenied => "ports below 1024 need rights; get them, or set",
                _ => "set",
            };
            Failure::new(format!(
                "cannot listen on {address}: {error}; {advice} `{setting}` to another address"
            ))
        };
        let listener = TcpListener::bind(address).await.map_err(problem)?;
        let address = listener.local_addr().map_err(problem)?;
        Ok(Self { listener, address })
    }

    /// Serves until the stop, and then until the connections have ended, or for `drain`.
    pub(crate) async fn serve(
        self,
        router: Router,
        settings: Http,
        drain: Duration,
        stopping: Stopping,
    ) {
        info!(address = %self.address, "listening");
        let free = Arc::new(Semaphore::new(settings.connections_max));
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let accepting = async {
                let permit = Arc::clone(&free).acquire_owned().await.expect("it is never closed");
                (permit, self.listener.accept().await)
            };
            let (permit, accepted) = tokio::select! {
                () = stopping.begun() => break,
                accepted = accepting => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let connection = serve_connection(
                        stream,
                        peer,
                        router.clone(),
                        settings.clone(),
                        stopping.clone(),
                    );
                    connections.spawn(async move {
                        connection.await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    warn!(%error, "a connection was not accepted");
                    sleep(ACCEPT_AGAIN_AFTER).await;
                }
            }
        }
        // Nobody can connect from here on.
        drop(self.listener);
        let ending = async { while connections.join_next().await.is_some() {} };
        if timeout_at(Instant::now() + drain, ending).await.is_err() {
            warn!(count = connections.len(), "connections did not end, they are cut off");
        }
    }
}

async fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    settings: Http,
    stopping: Stopping,
) {
    // Answers are small and complete.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        router.clone().oneshot(request.map(Body::new))
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(settings.read_timeout)
        .max_header_size(settings.header_bytes_max)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopping.begun() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        debug!(%error, "a connection ended");
    }
}
