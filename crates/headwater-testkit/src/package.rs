//! Where the package that is tested lies.

use std::path::PathBuf;

/// The folder of the package whose test this is. Asked at run time: a path compiled in would be wrong where two checkouts
/// share a target directory.
///
/// # Panics
/// Outside of `cargo test` and `cargo nextest`, which tell it.
pub fn package_folder() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR")
        .expect("cargo starts the tests and says where they are")
        .into()
}
