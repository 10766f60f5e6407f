//! `cargo xtask tidy`: checks that the compiler does not make.
//!
//! `text` checks single files, `order` the manifests of all crates, `names` the type names of all product code, `layout` the
//! folders of the binary. All are pure functions from text to findings. This file collects the files of the checkout and
//! reports the findings.

mod layout;
mod names;
mod order;
mod text;

use std::fs;

use crate::cargo::workspace_root;
use crate::checkout::tracked_files;
use crate::exit::ExitError;

pub(crate) fn run() -> Result<(), ExitError> {
    let root = workspace_root()?;
    let mut findings = Vec::new();
    let mut manifests = Vec::new();
    let mut sources = Vec::new();
    for path in tracked_files(&root)? {
        // Skips deleted but uncommitted files, and images.
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        findings.extend(text::check(&path, &text));
        if path.ends_with("/Cargo.toml") {
            manifests.push((path, text));
        } else if path.ends_with(".rs") {
            sources.push((path, text));
        }
    }
    findings.extend(order::check(&manifests));
    findings.extend(layout::check(sources.iter().map(|(path, _)| path.as_str())));
    findings.extend(names::check(&sources));

    if findings.is_empty() {
        return Ok(());
    }
    for finding in &findings {
        eprintln!("{finding}");
    }
    Err(ExitError::new(format!("tidy found {} problem(s)", findings.len())))
}
