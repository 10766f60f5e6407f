//! The bytes between us and a server: TCP or TLS, with what is to be written and what has come.
//!
//! Upstream: `connection` (one caller) and `link` (many). Not here: what the bytes mean.

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
use super::url::{Access, Address};
use crate::error::{Result, StreamError};

/// How much is read at once at least.
const READ_BYTES: usize = 64 * 1024;

/// A stream of bytes with its buffers.
pub(super) struct Wire {
    stream: Stream,
    pub(super) inbox: BytesMut,
    pub(super) outbox: BytesMut,
    flushed: bool,
}

enum Stream {
    Tcp(Arc<TcpStream>),
    Tls(Box<TlsStream<TcpStream>>),
}

/// What TLS needs, made once; `None` for plain TCP.
pub(super) type Tls = Option<Arc<ClientConfig>>;

/// Reads the certificates to trust, if TLS is asked for.
pub(super) async fn tls(access: &Access) -> Result<Tls> {
    if !access.tls {
        return Ok(None);
    }
    let authority = access.authority.clone();
    // Reading certificates is blocking work.
    let roots = tokio::task::spawn_blocking(move || roots(authority.as_deref()))
        .await
        .map_err(|error| StreamError::unavailable("reading certificates failed", error))??;
    let provider = Arc::new(crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| StreamError::invalid("the TLS set-up", error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Some(Arc::new(config)))
}

fn roots(authority: Option<&Path>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(file) = authority else {
        let native = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(native.certs);
        if roots.is_empty() {
            return Err(StreamError::invalid(
                "the stream URL",
                "this system has no certificates to trust; name one with `?ca=FILE`",
            ));
        }
        return Ok(roots);
    };
    let wrong = |error: &dyn std::fmt::Display| {
        StreamError::invalid("`ca` in the stream URL", format!("{}: {error}", file.display()))
    };
    let certificates = CertificateDer::pem_file_iter(file).map_err(|error| wrong(&error))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|error| wrong(&error))?;
        roots.add(certificate).map_err(|error| wrong(&error))?;
    }
    if roots.is_empty() {
        return Err(wrong(&"it holds no certificate"));
    }
    Ok(roots)
}

impl Wire {
    /// Connects, without a deadline of its own.
    pub(super) async fn connect(address: &Address, tls: &Tls) -> io::Result<Self> {
        let tcp = TcpStream::connect((address.host.as_str(), address.port)).await?;
        tcp.set_nodelay(true)?;
        let stream = match tls {
            None => Stream::Tcp(Arc::new(tcp)),
            Some(config) => {
                let name = ServerName::try_from(address.host.clone())
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
                let connector = TlsConnector::from(Arc::clone(config));
                Stream::Tls(Box::new(connector.connect(name, tcp).await?))
            }
        };
        let (inbox, outbox) = (BytesMut::with_capacity(READ_BYTES), BytesMut::new());
        Ok(Self { stream, inbox, outbox, flushed: true })
    }

    /// The socket, where others may write to it, too.
    pub(super) fn socket(&self) -> Option<Arc<TcpStream>> {
        match &self.stream {
            Stream::Tcp(stream) => Some(Arc::clone(stream)),
            Stream::Tls(_) => None,
        }
    }

    /// Writes what is in the outbox; ready when all of it is with the system.
    pub(super) fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.outbox.is_empty() {
            let written = ready!(match &mut self.stream {
                Stream::Tcp(stream) => poll_write(stream, cx, &self.outbox),
                Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, &self.outbox),
            })?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.outbox.advance(written);
            self.flushed = false;
        }
        if let (Stream::Tls(stream), false) = (&mut self.stream, self.flushed) {
            ready!(Pin::new(stream.as_mut()).poll_flush(cx))?;
        }
        self.flushed = true;
        Poll::Ready(Ok(()))
    }

    /// Takes a complete reply out of the inbox.
    pub(super) fn take(&mut self, length: usize) -> Bytes {
        let reply = self.inbox.split_to(length).freeze();
        if length > SHARED_BYTES_MAX {
            // What follows lies in memory as large as that reply, and whoever keeps a little of it would keep it all.
            let rest = std::mem::take(&mut self.inbox);
            self.inbox.extend_from_slice(&rest);
        }
        reply
    }

    /// Reads more into the inbox, with room for at least `wanted` bytes in it.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        wanted: usize,
    ) -> Poll<io::Result<()>> {
        let missing = wanted.saturating_sub(self.inbox.len());
        if self.inbox.capacity() - self.inbox.len() < missing.max(READ_BYTES / 4) {
            self.inbox.reserve(missing.max(READ_BYTES));
        }
        // A read that is not ready has taken nothing, so its future need not be kept.
        let read = ready!(match &mut self.stream {
            Stream::Tcp(stream) => poll_read(stream, cx, &mut self.inbox),
            Stream::Tls(stream) => pin!(stream.read_buf(&mut self.inbox)).poll(cx),
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
