//! The directory of the package under test.

use std::path::PathBuf;

/// The directory of the package under test. Determined at run time, because two checkouts may share a target directory.
///
/// # Panics
/// Outside of `cargo test` and `cargo nextest`, which set `CARGO_MANIFEST_DIR`.
pub fn package_folder() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR for tests").into()
}
