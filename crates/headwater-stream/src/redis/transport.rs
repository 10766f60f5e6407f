//! A TCP, unix or TLS socket with its read and write buffers.
//!
//! Upstream: `connection` (one caller) and `multiplexed` (many). Guarantees: the operating system closes a TCP connection whose
//! peer is silent for about half a minute (keep-alive). Not here: the protocol, and faster checks (`multiplexed`, `pubsub`).

use std::fmt;
use std::io;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use super::reply::SHARED_BYTES_MAX;
use super::url::{Address, ConnectionParams};
use crate::error::{Result, StreamError};

/// Free space that is reserved for a read.
const READ_BYTES: usize = 64 * 1024;

/// Keep-alive probes start after this long without traffic, and are repeated this often.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(15);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);

/// A socket with its buffers.
pub(super) struct Transport {
    socket: Socket,
    pub(super) read_buffer: BytesMut,
    pub(super) write_buffer: BytesMut,
    flushed: bool,
}

enum Socket {
    Plain(Arc<PlainSocket>),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A socket without TLS.
pub(super) enum PlainSocket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// TLS settings; `None` without TLS.
pub(super) type TlsConfig = Option<TlsSettings>;

/// Certificates, and the name that the server's certificate must have; `None` for the host.
#[derive(Clone)]
pub(super) struct TlsSettings {
    config: Arc<ClientConfig>,
    server_name: Option<ServerName<'static>>,
}

/// Loads the certificates, if TLS is enabled.
pub(super) async fn tls(params: &ConnectionParams) -> Result<TlsConfig> {
    if !params.tls {
        return Ok(None);
    }
    let params = params.clone();
    // Reading certificates is blocking work.
    let settings = tokio::task::spawn_blocking(move || load_tls(&params))
        .await
        .map_err(|error| StreamError::unavailable("failed to read certificates", error))??;
    Ok(Some(settings))
}

fn load_tls(params: &ConnectionParams) -> Result<TlsSettings> {
    let invalid =
        |error: &dyn fmt::Display| StreamError::invalid("the TLS configuration", error.to_string());
    let provider = Arc::new(crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| invalid(&error))?
        .with_root_certificates(roots(params.ca_file.as_deref())?);
    let config = match &params.client_certificate {
        None => config.with_no_client_auth(),
        Some((certificate, key)) => {
            let certificates = certificates(certificate, "`cert`")?;
            let private_key = PrivateKeyDer::from_pem_file(key)
                .map_err(|error| invalid_file("`key`", key, &error))?;
            config
                .with_client_auth_cert(certificates, private_key)
                .map_err(|error| invalid_file("`cert`", certificate, &error))?
        }
    };
    let server_name = params.server_name.clone().map(ServerName::try_from).transpose();
    let server_name = server_name.map_err(|error| invalid(&error))?;
    Ok(TlsSettings { config: Arc::new(config), server_name })
}

fn roots(ca_file: Option<&Path>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(file) = ca_file else {
        let native = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(native.certs);
        if roots.is_empty() {
            return Err(StreamError::invalid(
                "the stream URL",
                "no trusted certificates found on this system; set one with `?ca=FILE`",
            ));
        }
        return Ok(roots);
    };
    for certificate in certificates(file, "`ca`")? {
        roots.add(certificate).map_err(|error| invalid_file("`ca`", file, &error))?;
    }
    Ok(roots)
}

/// The certificates of a file, at least one.
fn certificates(file: &Path, setting: &str) -> Result<Vec<CertificateDer<'static>>> {
    let invalid = |error: &dyn fmt::Display| invalid_file(setting, file, error);
    let read = CertificateDer::pem_file_iter(file).map_err(|error| invalid(&error))?;
    let read: std::result::Result<Vec<_>, _> = read.collect();
    let read = read.map_err(|error| invalid(&error))?;
    if read.is_empty() {
        return Err(invalid(&"no certificate in the file"));
    }
    Ok(read)
}

fn invalid_file(setting: &str, file: &Path, error: &dyn fmt::Display) -> StreamError {
    let problem = format!("{}: {error}", file.display());
    StreamError::invalid(format!("{setting} in the stream URL"), problem)
}

impl Transport {
    /// Connects. The caller sets the deadline.
    pub(super) async fn connect(address: &Address, tls: &TlsConfig) -> io::Result<Self> {
        let socket = if address.is_unix() {
            let unix = UnixStream::connect(&address.host).await?;
            Socket::Plain(Arc::new(PlainSocket::Unix(unix)))
        } else {
            let tcp = connect_tcp(address).await?;
            match tls {
                None => Socket::Plain(Arc::new(PlainSocket::Tcp(tcp))),
                Some(TlsSettings { config, server_name }) => {
                    let name = match server_name {
                        Some(name) => name.clone(),
                        None => ServerName::try_from(address.host.clone())
                            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?,
                    };
                    let connector = TlsConnector::from(Arc::clone(config));
                    Socket::Tls(Box::new(connector.connect(name, tcp).await?))
                }
            }
        };
        let (read_buffer, write_buffer) = (BytesMut::with_capacity(READ_BYTES), BytesMut::new());
        Ok(Self { socket, read_buffer, write_buffer, flushed: true })
    }

    /// The socket, if other tasks may write to it. `None` with TLS.
    pub(super) fn socket(&self) -> Option<Arc<PlainSocket>> {
        match &self.socket {
            Socket::Plain(stream) => Some(Arc::clone(stream)),
            Socket::Tls(_) => None,
        }
    }

    /// Writes the write buffer; ready when the socket has accepted all of it.
    pub(super) fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.write_buffer.is_empty() {
            let written = ready!(match &mut self.socket {
                Socket::Plain(stream) => stream.poll_write(cx, &self.write_buffer),
                Socket::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, &self.write_buffer),
            })?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.write_buffer.advance(written);
            self.flushed = false;
        }
        if let (Socket::Tls(stream), false) = (&mut self.socket, self.flushed) {
            ready!(Pin::new(stream.as_mut()).poll_flush(cx))?;
        }
        self.flushed = true;
        Poll::Ready(Ok(()))
    }

    /// Takes a complete reply out of the read buffer.
    pub(super) fn take(&mut self, length: usize) -> Bytes {
        let reply = self.read_buffer.split_to(length).freeze();
        if length > SHARED_BYTES_MAX {
            // The rest shares the allocation of that large reply: copy it, or a small entry would keep all of it alive.
            let rest = std::mem::take(&mut self.read_buffer);
            self.read_buffer.extend_from_slice(&rest);
        }
        reply
    }

    /// Reads more into the read buffer, which gets capacity for at least `wanted` bytes.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        wanted: usize,
    ) -> Poll<io::Result<()>> {
        let missing = wanted.saturating_sub(self.read_buffer.len());
        if self.read_buffer.capacity() - self.read_buffer.len() < missing.max(READ_BYTES / 4) {
            self.read_buffer.reserve(missing.max(READ_BYTES));
        }
        // A pending read has consumed nothing, so its future can be dropped.
        let read = ready!(match &mut self.socket {
            Socket::Plain(stream) => stream.poll_read(cx, &mut self.read_buffer),
            Socket::Tls(stream) => pin!(stream.read_buf(&mut self.read_buffer)).poll(cx),
        })?;
        if read == 0 {
            return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl PlainSocket {
    /// Writes what the socket accepts now.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write(bytes),
            Self::Unix(stream) => stream.try_write(bytes),
        }
    }

    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(match self {
                Self::Tcp(stream) => stream.poll_write_ready(cx),
                Self::Unix(stream) => stream.poll_write_ready(cx),
            })?;
            match self.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut BytesMut) -> Poll<io::Result<usize>> {
        loop {
            let read = match self {
                Self::Tcp(stream) => {
                    ready!(stream.poll_read_ready(cx))?;
                    stream.try_read_buf(buffer)
                }
                Self::Unix(stream) => {
                    ready!(stream.poll_read_ready(cx))?;
                    stream.try_read_buf(buffer)
                }
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read),
            }
        }
    }
}

async fn connect_tcp(address: &Address) -> io::Result<TcpStream> {
    let tcp = TcpStream::connect((address.host.as_str(), address.port)).await?;
    tcp.set_nodelay(true)?;
    // Probes keep the entry of a NAT alive, and detect a peer that is gone without closing the connection.
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_AFTER).with_interval(KEEPALIVE_EVERY);
    SockRef::from(&tcp).set_tcp_keepalive(&keepalive.with_retries(3))?;
    Ok(tcp)
}
