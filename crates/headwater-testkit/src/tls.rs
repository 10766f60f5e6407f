//! A certificate authority of one test, and a server certificate for the loopback address.

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
}

/// Writes a fresh authority and a certificate for `127.0.0.1` and `localhost` into `directory`.
pub(crate) fn write(directory: &Path) -> Result<Files> {
    let mut authority = CertificateParams::new([])?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "headwater test authority");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

    let key = KeyPair::generate()?;
    let names = ["127.0.0.1".to_string(), "localhost".to_string()];
    let certificate = CertificateParams::new(names)?.signed_by(&key, &authority)?;

    let files = Files {
        authority: directory.join("ca.pem"),
        certificate: directory.join("server.pem"),
        key: directory.join("server.key"),
    };
    fs::write(&files.authority, authority.pem())?;
    fs::write(&files.certificate, certificate.pem())?;
    fs::write(&files.key, key.serialize_pem())?;
    Ok(files)
}
