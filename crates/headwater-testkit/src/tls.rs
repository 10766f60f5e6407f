//! A certificate authority of one test, a server certificate for the loopback address or a name, and a client certificate.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

/// The files a server with TLS needs.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    pub(crate) authority: PathBuf,
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    pub(crate) client: (PathBuf, PathBuf),
}

/// Writes a fresh authority, a server certificate for `names` and a client certificate into `directory`.
pub(crate) fn write(directory: &Path, names: &[String]) -> Result<Files> {
    let mut authority = CertificateParams::new([])?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "headwater test authority");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(names)?.signed_by(&key, &authority)?;
    let client_key = KeyPair::generate()?;
    let client = CertificateParams::new([])?.signed_by(&client_key, &authority)?;

    let files = Files {
        authority: directory.join("ca.pem"),
        certificate: directory.join("server.pem"),
        key: directory.join("server.key"),
        client: (directory.join("client.pem"), directory.join("client.key")),
    };
    fs::write(&files.authority, authority.pem())?;
    fs::write(&files.certificate, certificate.pem())?;
    fs::write(&files.key, key.serialize_pem())?;
    fs::write(&files.client.0, client.pem())?;
    fs::write(&files.client.1, client_key.serialize_pem())?;
    Ok(files)
}
