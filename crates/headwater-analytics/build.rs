//! Puts the DuckDB library next to the programs that are built, and lets the tests of this package find it.
//!
//! Guarantees: no program of another package contains a path of the machine that built it.

use std::path::{Path, PathBuf};
use std::{env, fs, io, process};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=DUCKDB_LIB_DIR");
    if env::var_os("CARGO_FEATURE_DUCKDB").is_none() {
        return;
    }
    let macos = env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "macos");
    let library = if macos { "libduckdb.dylib" } else { "libduckdb.so" };
    // Without the variable the library is one of the system, which the loader finds.
    if let Some(folder) = env::var_os("DUCKDB_LIB_DIR").map(PathBuf::from) {
        // Documentation tests run in a temporary directory, so they need the whole path.
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.display());
        let source = folder.join(library);
        println!("cargo:rerun-if-changed={}", source.display());
        if let Err(error) = place(&source) {
            println!(
                "cargo:warning=cannot copy {} next to the programs: {error}",
                source.display()
            );
        }
    }
}

/// Links or copies the library into the directory of the build profile, in one step: programs there may be running.
fn place(source: &Path) -> io::Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or(io::ErrorKind::NotFound)?);
    // OUT_DIR is <profile>/build/<package>/out.
    let profile = out.ancestors().nth(3).ok_or(io::ErrorKind::NotFound)?;
    let target = profile.join(source.file_name().ok_or(io::ErrorKind::InvalidInput)?);
    let part = target.with_extension(format!("part{}", process::id()));
    if fs::hard_link(source, &part).is_err() {
        fs::copy(source, &part)?;
    }
    fs::rename(&part, target)?;
    // If both were links to one file, the rename has left this one.
    let _ = fs::remove_file(part);
    Ok(())
}
