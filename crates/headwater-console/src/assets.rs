//! The style sheet and the scripts, embedded in the binary.
//!
//! Guarantees: the address of an asset contains the hash of its content, so that browsers keep it for a year and load
//! the new one after an upgrade; clients that accept it get the compressed form.

use std::io::Write;
use std::sync::LazyLock;

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};

/// Path prefix of all assets.
const PREFIX: &str = "/console/assets/";

/// Hexadecimal digits of the hash in an address.
const HASH_DIGITS: usize = 16;

const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// An embedded file.
struct Asset {
    name: &'static str,
    kind: &'static str,
    address: String,
    content: Bytes,
    compressed: Bytes,
}

static ASSETS: LazyLock<[Asset; 5]> = LazyLock::new(|| {
    // The main script imports the others by their addresses, so those have their hashes first.
    let patch = asset("patch.js", JAVASCRIPT, include_str!("../assets/patch.js").to_owned());
    let rows = asset("rows.js", JAVASCRIPT, include_str!("../assets/rows.js").to_owned());
    let main = include_str!("../assets/console.js").replace("./patch.js", &patch.address);
    let main = main.replace("./rows.js", &rows.address);
    [
        asset("console.css", CSS, include_str!("../assets/console.css").to_owned()),
        asset("console.js", JAVASCRIPT, main),
        asset("icon.svg", SVG, include_str!("../assets/icon.svg").to_owned()),
        patch,
        rows,
    ]
});

fn asset(name: &'static str, kind: &'static str, content: String) -> Asset {
    let hash = hex::encode(Sha256::digest(content.as_bytes()));
    let address = format!("{PREFIX}{}/{name}", &hash[..HASH_DIGITS]);
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    // Writing to memory cannot fail.
    let compressed = encoder.write_all(content.as_bytes()).and_then(|()| encoder.finish());
    let compressed = compressed.unwrap_or_default().into();
    Asset { name, kind, address, content: content.into(), compressed }
}

/// The address of an asset.
pub(crate) fn address(name: &str) -> &'static str {
    let asset = ASSETS.iter().find(|asset| asset.name == name);
    asset.map_or("", |asset| &asset.address)
}

/// `/console/assets/{hash}/{name}`.
pub(crate) fn routes() -> Router {
    Router::new().route("/console/assets/{hash}/{name}", get(serve))
}

async fn serve(Path((hash, name)): Path<(String, String)>, headers: HeaderMap) -> Response {
    let address = format!("{PREFIX}{hash}/{name}");
    let Some(asset) = ASSETS.iter().find(|asset| asset.address == address) else {
        return (StatusCode::NOT_FOUND, "no such asset; reload the page").into_response();
    };
    let accepted = headers.get(header::ACCEPT_ENCODING).and_then(|value| value.to_str().ok());
    let common = [
        (header::CONTENT_TYPE, asset.kind),
        (header::CACHE_CONTROL, "public, max-age=31536000, immutable"),
        (header::VARY, "accept-encoding"),
    ];
    match accepted.is_some_and(|accepted| accepted.contains("gzip")) {
        true => {
            let compressed = [(header::CONTENT_ENCODING, "gzip")];
            (common, compressed, asset.compressed.clone()).into_response()
        }
        false => (common, asset.content.clone()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limit for scripts and styles of a page, compressed.
    const PAGE_BYTES_MAX: usize = 25 * 1000;

    #[test]
    fn scripts_and_styles_of_a_page_are_small() {
        let bytes: usize = ASSETS.iter().map(|asset| asset.compressed.len()).sum();
        assert!(bytes <= PAGE_BYTES_MAX, "{bytes} bytes");
        assert!(ASSETS.iter().all(|asset| asset.compressed.len() > 50));
    }

    #[test]
    fn the_main_script_imports_the_other_by_its_hashed_address() {
        let main = ASSETS.iter().find(|asset| asset.name == "console.js").unwrap();
        let text = std::str::from_utf8(&main.content).unwrap();
        for name in ["patch.js", "rows.js"] {
            assert!(text.contains(address(name)) && !text.contains(&format!("./{name}")), "{name}");
        }
    }
}
