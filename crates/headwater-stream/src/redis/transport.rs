//! A TCP or TLS socket with its read and write buffers.
//!
//! Upstream: `connection` (one caller) and `multiplexed` (many). Not here: the protocol.

use std::io;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use super::reply::SHARED_BYTES_MAX;
use super::url::{Address, ConnectionParams};
use crate::error::{Result, StreamError};

/// Free space that is reserved for a read.
const READ_BYTES: usize = 64 * 1024;

/// A socket with its buffers.
pub(super) struct Transport {
    socket: Socket,
    pub(super) read_buffer: BytesMut,
    pub(super) write_buffer: BytesMut,
    flushed: bool,
}

enum Socket {
    Tcp(Arc<TcpStream>),
    Tls(Box<TlsStream<TcpStream>>),
}

/// TLS configuration; `None` for plain TCP.
pub(super) type TlsConfig = Option<Arc<ClientConfig>>;

/// Loads the trusted certificates, if TLS is enabled.
pub(super) async fn tls(params: &ConnectionParams) -> Result<TlsConfig> {
    if !params.tls {
        return Ok(None);
    }
    let ca_file = params.ca_file.clone();
    // Reading certificates is blocking work.
    let roots = tokio::task::spawn_blocking(move || roots(ca_file.as_deref()))
        .await
        .map_err(|error| StreamError::unavailable("failed to read certificates", error))??;
    let provider = Arc::new(crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| StreamError::invalid("the TLS configuration", error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Some(Arc::new(config)))
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
    let invalid_ca = |error: &dyn std::fmt::Display| {
        StreamError::invalid("`ca` in the stream URL", format!("{}: {error}", file.display()))
    };
    let certificates = CertificateDer::pem_file_iter(file).map_err(|error| invalid_ca(&error))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|error| invalid_ca(&error))?;
        roots.add(certificate).map_err(|error| invalid_ca(&error))?;
    }
    if roots.is_empty() {
        return Err(invalid_ca(&"no certificate in the file"));
    }
    Ok(roots)
}

impl Transport {
    /// Connects. The caller sets the deadline.
    pub(super) async fn connect(address: &Address, tls: &TlsConfig) -> io::Result<Self> {
        let tcp = TcpStream::connect((address.host.as_str(), address.port)).await?;
        tcp.set_nodelay(true)?;
        let socket = match tls {
            None => Socket::Tcp(Arc::new(tcp)),
            Some(config) => {
                let name = ServerName::try_from(address.host.clone())
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
                let connector = TlsConnector::from(Arc::clone(config));
                Socket::Tls(Box::new(connector.connect(name, tcp).await?))
            }
        };
        let (read_buffer, write_buffer) = (BytesMut::with_capacity(READ_BYTES), BytesMut::new());
        Ok(Self { socket, read_buffer, write_buffer, flushed: true })
    }

    /// The socket, if other tasks may write to it. `None` with TLS.
    pub(super) fn socket(&self) -> Option<Arc<TcpStream>> {
        match &self.socket {
            Socket::Tcp(stream) => Some(Arc::clone(stream)),
            Socket::Tls(_) => None,
        }
    }

    /// Writes the write buffer; ready when the socket has accepted all of it.
    pub(super) fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.write_buffer.is_empty() {
            let written = ready!(match &mut self.socket {
                Socket::Tcp(stream) => poll_write(stream, cx, &self.write_buffer),
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
            Socket::Tcp(stream) => poll_read(stream, cx, &mut self.read_buffer),
            Socket::Tls(stream) => pin!(stream.read_buf(&mut self.read_buffer)).poll(cx),
        })?;
        if read == 0 {
            return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
        }
        Poll::Ready(Ok(()))
    }
}

fn poll_write(stream: &TcpStream, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
    loop {
        ready!(stream.poll_write_ready(cx))?;
        match stream.try_write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            written => return Poll::Ready(written),
        }
    }
}

fn poll_read(
    stream: &TcpStream,
    cx: &mut Context<'_>,
    buffer: &mut BytesMut,
) -> Poll<io::Result<usize>> {
    loop {
        ready!(stream.poll_read_ready(cx))?;
        match stream.try_read_buf(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            read => return Poll::Ready(read),
        }
    }
}
