//! Connections: accepts them, limits them, and lets them end in good order.
//!
//! Upstream: `run` binds the address early, so that a port in use is told at once. Downstream: the router.
//! Promises: connections are accepted at once and limited by `connections`; a client that does not send complete headers within
//! `http.read_timeout`, counted from the accept or the last answer, or sends too many of them, is cut off; after the stop
//! no new request is taken, and what is under way has until the deadline.

use std::convert::Infallible;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};
use tower::ServiceExt;
use tracing::{debug, info, warn};

use crate::config::Http;
use crate::exit::Failure;
use crate::http::ApiError;
use crate::http::connections::{Class, Connections, InProgress, Permit, RESERVED_MAX};
use crate::http::rate_limit::network;
use crate::server::shutdown::Stopping;

/// How long to wait when the system has no connection to give, for example because too many files are open.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Headers of one request.
const HEADERS_MAX: usize = 100;

/// Bytes that are read ahead from one connection, unless `http.header_bytes_max` is more.
const BUFFER_BYTES_MAX: usize = 64 * 1024;

/// How long a connection beyond the limits may take to send its headers.
const RESERVED_READ_MAX: Duration = Duration::from_secs(2);

/// Files that are open beside connections: databases, streams, logs.
const OTHER_FILES: u64 = 512;

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
        raise_file_limit(&settings);
        let open = Connections::new(&settings);
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let accepted = tokio::select! {
                () = stopping.begun() => break,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let Some(permit) = open.admit(network(peer.ip()), Instant::now()) else {
                        continue;
                    };
                    connections.spawn(serve_connection(
                        stream,
                        peer,
                        permit,
                        router.clone(),
                        settings.clone(),
                        stopping.clone(),
                    ));
                }
                Err(error) => {
                    warn!(%error, "a connection was not accepted");
                    if is_out_of_resources(&error) {
                        open.close_one();
                    }
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
    permit: Permit,
    router: Router,
    settings: Http,
    stopping: Stopping,
) {
    // Answers are small and complete.
    let _ = stream.set_nodelay(true);
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        let in_progress = permit.begin();
        let is_served = in_progress.is_some() && permit.class.serves(request.uri().path());
        let router = router.clone();
        async move {
            let response = match is_served {
                true => router.oneshot(request.map(Body::new)).await?,
                false => too_many_connections(),
            };
            Ok::<_, Infallible>(response.map(|body| Answer { body, _in_progress: in_progress }))
        }
    });
    let is_full = permit.class == Class::Full;
    let read_timeout = settings.read_timeout;
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(if is_full {
            read_timeout
        } else {
            read_timeout.min(RESERVED_READ_MAX)
        })
        .keep_alive(is_full)
        .max_header_size(settings.header_bytes_max)
        .max_headers(HEADERS_MAX)
        .max_buf_size(settings.header_bytes_max.max(BUFFER_BYTES_MAX))
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        // First, so that no request begins on a connection that is given up.
        biased;
        () = permit.closed() => {
            debug!(%peer, "an idle connection was closed for another one");
            return;
        }
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

/// The answer on a connection beyond the limits.
fn too_many_connections() -> Response<Body> {
    let message = "too many connections are open here, or from this address; try again";
    let refusal = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message);
    let refusal = refusal.retry_after(Duration::from_secs(1));
    let mut response = refusal.into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The body of an answer; its request is in progress until it is sent.
struct Answer {
    body: Body,
    _in_progress: Option<InProgress>,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Lets this process open as many files as its connections need, as far as the system allows.
fn raise_file_limit(settings: &Http) {
    let wanted = settings.connections_max as u64 + RESERVED_MAX as u64 + OTHER_FILES;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= wanted) {
        return;
    }
    let raised = maximum.map_or(wanted, |maximum| maximum.min(wanted));
    let set = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum });
    if set.is_err() || raised < wanted {
        warn!(
            limit = maximum,
            wanted,
            "the limit of open files is low for `http.connections_max`; raise it (ulimit -n) or lower the setting"
        );
    }
}

/// Whether the process or the system has no file or memory left for a connection.
fn is_out_of_resources(error: &std::io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw_os_error);
    code.is_some_and(|code| {
        [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].contains(&code)
    })
}
