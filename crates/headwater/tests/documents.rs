//! Checks of the documentation.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

fn root() -> PathBuf {
    headwater_testkit::package_folder().join("../..")
}

fn read(path: &str) -> Result<String> {
    std::fs::read_to_string(root().join(path)).with_context(|| path.to_owned())
}

#[test]
fn the_handler_in_the_readme_is_the_example_that_is_compiled() -> Result<()> {
    let example = read("crates/headwater/examples/own_handler.rs")?;
    let (_, code) = example.split_once("\n\n").context("code after its first lines")?;
    assert!(read("README.md")?.contains(&format!("```rust\n{}\n```", code.trim())));
    let lines = code.lines().filter(|line| !line.trim().is_empty()).count();
    assert!(lines <= 15, "{lines} lines");
    Ok(())
}

#[test]
fn every_link_to_a_file_leads_somewhere() -> Result<()> {
    let documents = [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "docs/analytics.md",
        "docs/settings.md",
        "docs/webhooks.md",
        "docs/desk.md",
        "docs/operations.md",
        "docs/topics.md",
    ];
    for document in documents {
        let text = read(document)?;
        let folder = Path::new(document).parent().context("a folder")?;
        for link in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            if link.is_empty() || link.contains("://") {
                continue;
            }
            assert!(root().join(folder).join(link).exists(), "{document} links to {link}");
        }
    }
    Ok(())
}

#[test]
fn the_map_has_at_most_1200_words() -> Result<()> {
    let words = read("ARCHITECTURE.md")?.split_whitespace().count();
    assert!(words <= 1200, "{words} words");
    Ok(())
}
