//! Accepts and serves connections, and closes them gracefully at shutdown.
//!
//! Upstream: `server/run.rs` binds the address early, so that a port in use is reported at once. Downstream: the
//! router. Guarantees: `connections.rs` limits connections; a client that does not send complete headers within
//! `http.read_timeout`, counted from the accept or the previous response, or that sends too many, is disconnected;
//! a client that takes no byte of a response for `http.request_timeout` is disconnected (`write_timeout.rs`); after
//! shutdown is triggered no new request is accepted, and requests in progress have until the deadline.

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

use crate::config::HttpSettings;
use crate::exit::CliError;
use crate::http::ApiError;
use crate::http::client_address::{ClientAddress, client_network};
use crate::http::connections::{
    ConnectionClass, ConnectionLimiter, ConnectionPermit, RESERVED_MAX, RequestInProgress,
};
use crate::http::write_timeout::WriteTimeout;
use crate::server::shutdown_signal::ShutdownSignal;

/// Pause after a failed accept, for example when too many files are open.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Maximum headers of a request.
const HEADERS_MAX: usize = 100;

/// Read buffer of a connection, unless `http.header_bytes_max` is larger.
const BUFFER_BYTES_MAX: usize = 64 * 1024;

/// Header timeout of reserved connections.
const RESERVED_READ_MAX: Duration = Duration::from_secs(2);

/// Open files other than connections: databases, streams, logs.
const OTHER_FILES: u64 = 512;

/// A bound listen address.
#[derive(Debug)]
pub(crate) struct BoundListener {
    listener: TcpListener,
    /// The actual address, with the port chosen by the system for port 0.
    pub(crate) address: SocketAddr,
}

impl BoundListener {
    /// Binds the address.
    pub(crate) async fn bind(setting: &str, address: SocketAddr) -> Result<Self, CliError> {
        let problem = |error: std::io::Error| {
            let advice = match error.kind() {
                ErrorKind::AddrInUse => "stop the other program, or set",
                ErrorKind::PermissionDenied => {
                    "ports below 1024 require privileges; grant them, or set"
                }
                _ => "set",
            };
            CliError::new(format!(
                "cannot listen on {address}: {error}; {advice} `{setting}` to another address"
            ))
        };
        let listener = TcpListener::bind(address).await.map_err(problem)?;
        let address = listener.local_addr().map_err(problem)?;
        Ok(Self { listener, address })
    }

    /// Serves until shutdown, then drains connections for at most `drain`.
    pub(crate) async fn serve(
        self,
        router: Router,
        settings: HttpSettings,
        drain: Duration,
        shutdown: ShutdownSignal,
    ) {
        info!(address = %self.address, "listening");
        raise_file_limit(&settings);
        let open = ConnectionLimiter::new(&settings);
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let accepted = tokio::select! {
                () = shutdown.wait() => break,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let Some(permit) = open.admit(client_network(peer.ip()), Instant::now()) else {
                        continue;
                    };
                    connections.spawn(serve_connection(
                        stream,
                        peer,
                        permit,
                        router.clone(),
                        settings.clone(),
                        shutdown.clone(),
                    ));
                }
                Err(error) => {
                    warn!(%error, "failed to accept a connection");
                    if is_out_of_resources(&error) {
                        open.close_one();
                    }
                    sleep(ACCEPT_RETRY_PAUSE).await;
                }
            }
        }
        // No new connections from here on.
        drop(self.listener);
        let ending = async { while connections.join_next().await.is_some() {} };
        if timeout_at(Instant::now() + drain, ending).await.is_err() {
            warn!(
                count = connections.len(),
                "connections did not end before the deadline, closing them"
            );
        }
    }
}

async fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    permit: ConnectionPermit,
    router: Router,
    settings: HttpSettings,
    shutdown: ShutdownSignal,
) {
    // Responses are small and complete.
    let _ = stream.set_nodelay(true);
    let stream = WriteTimeout::new(stream, settings.request_timeout);
    let service = service_fn(|mut request: Request<Incoming>| {
        let client = ClientAddress::new(peer.ip(), request.headers(), settings.forwarded);
        request.extensions_mut().insert(client);
        let in_progress = permit.begin();
        let is_served = in_progress.is_some() && permit.class.serves(request.uri().path());
        let router = router.clone();
        async move {
            let response = match is_served {
                true => router.oneshot(request.map(Body::new)).await?,
                false => too_many_connections(),
            };
            Ok::<_, Infallible>(
                response.map(|body| TrackedBody { body, _in_progress: in_progress }),
            )
        }
    });
    let is_full = permit.class == ConnectionClass::Full;
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
        // First, so that no request starts on a connection that is being closed.
        biased;
        () = permit.closed() => {
            debug!(%peer, "idle connection closed for another one");
            return;
        }
        ended = connection.as_mut() => ended,
        () = shutdown.wait() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        debug!(%error, "connection ended with an error");
    }
}

/// The response on a connection above the limits.
fn too_many_connections() -> Response<Body> {
    let message = "too many open connections, in total or from this address; try again later";
    let refusal = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message);
    let refusal = refusal.retry_after(Duration::from_secs(1));
    let mut response = refusal.into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// A response body; its request counts as in progress until the body is sent.
struct TrackedBody {
    body: Body,
    _in_progress: Option<RequestInProgress>,
}

impl hyper::body::Body for TrackedBody {
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

/// Raises the file limit of the process to what its connections need, as far as the system allows.
fn raise_file_limit(settings: &HttpSettings) {
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
            "open file limit is too low for `http.connections_max`; raise it (ulimit -n) or lower the setting"
        );
    }
}

/// Whether the process or the system is out of file descriptors or memory.
fn is_out_of_resources(error: &std::io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw_os_error);
    code.is_some_and(|code| {
        [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].contains(&code)
    })
}
