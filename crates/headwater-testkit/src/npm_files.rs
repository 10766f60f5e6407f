//! Files of npm packages that `cargo xtask setup` downloads (`xtask/src/npm_files.rs`).

use std::env;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

/// A file that tests read.
#[derive(Clone, Copy, Debug)]
pub enum NpmFile {
    /// The accessibility checker axe-core.
    AxeCore,
    /// The official JSON schema of OpenAPI 3.1.
    OpenApiSchema,
}

impl NpmFile {
    /// The text of the file.
    pub fn read(self) -> Result<String> {
        let path = match self {
            Self::AxeCore => "axe-core-4.14.0/axe.min.js",
            Self::OpenApiSchema => "openapi-schemas-2.9.0/schemas/v3.1/schema.json",
        };
        fs::read_to_string(cache()?.join(path))
            .with_context(|| format!("{path} is missing: run `cargo xtask setup`"))
    }
}

/// The folder into which `cargo xtask setup` downloads.
pub(crate) fn cache() -> Result<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
    Ok(cache.context("neither XDG_CACHE_HOME nor HOME is set")?.join("headwater"))
}
