//! The files of the checkout, and which of their lines are product code.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::exit::ExitError;

/// The paths of all files under version control, relative to the root.
pub(crate) fn tracked_files(root: &Path) -> Result<Vec<String>, ExitError> {
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

/// Whether this is a source file of a crate, not of its tests, benches or examples.
pub(crate) fn is_product_code(path: &str) -> bool {
    let is_test = path.ends_with("/tests.rs") || path.ends_with("_tests.rs");
    path.contains("/src/") && !path.contains("/tests/") && !is_test
}

/// The numbered lines before the unit tests, which close a file.
pub(crate) fn product_lines(text: &str) -> impl Iterator<Item = (&str, u32)> {
    text.lines().zip(1..).take_while(|(line, _)| *line != "mod tests {")
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
