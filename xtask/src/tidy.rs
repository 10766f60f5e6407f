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
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::workspace_root;
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

/// The paths of all files under version control, relative to the root.
fn tracked_files(root: &Path) -> Result<Vec<String>, ExitError> {
    // Also reads a checkout that belongs to another user, as in a container.
    let listing = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "-z"])
        .current_dir(root)
        .output()
        .ok()
        .filter(|output| output.status.success());
    match listing {
        Some(output) => Ok(String::from_utf8_lossy(&output.stdout)
            .split_terminator('\0')
            .map(str::to_owned)
            .collect()),
        // A source archive has no history, and git may not be installed.
        None => files_below(root)
            .map_err(|error| ExitError::new(format!("reading the checkout failed: {error}"))),
    }
}

/// The paths of all files below `root` except build output and history.
fn files_below(root: &Path) -> std::io::Result<Vec<String>> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder))? {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            let kind = entry.file_type()?;
            if kind.is_dir() && path != Path::new(".git") && path != Path::new("target") {
                folders.push(path);
            } else if kind.is_file() {
                files.push(path.to_string_lossy().into_owned());
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_version_control_the_same_files_are_found() {
        // A test runs in the directory of its package; a compiled-in path may belong to another checkout.
        let root = Path::new(".");
        let files = files_below(root).unwrap();
        assert!(files.contains(&"Cargo.toml".to_owned()));
        assert!(files.contains(&"src/tidy/text.rs".to_owned()));
    }
}
