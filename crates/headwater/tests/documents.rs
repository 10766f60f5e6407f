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
        "docs/assignment.md",
        "docs/bus.md",
        "docs/compatibility.md",
        "docs/settings.md",
        "docs/webhooks.md",
        "docs/desk.md",
        "docs/mistakes.md",
        "docs/operations.md",
        "docs/redis.md",
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

/// The capabilities of the five documents, by section of `docs/compatibility.md`. A row that is removed there is missed here.
const CAPABILITIES: [(&str, &str); 5] = [
    (
        "Issues",
        "states webhook claim batch transaction crash scenario-a scenario-b scenario-c lost-nudge schema queries store \
         identity stream reclaim metrics dead-letters migration",
    ),
    (
        "Desk events",
        "stream length types content order ai-group analytics-group notifications dedup ack samples",
    ),
    (
        "Queue",
        "partitions cluster hash partitioners registry leases recovery worker retry max-attempts dead-letters causes \
         replay lifecycle stats trim metrics fields send batch-size poll-timeout max-inflight legacy resize",
    ),
    (
        "Stream assignment",
        "input lock expiry claim stuck done extenders broker shutdown no-rust metrics",
    ),
    (
        "Event bus",
        "streams groups meta lock entry types protocol pool-size timeouts prefix max-len ttl consumer-name block \
         ack-deadline retries fallback health breaker recovery main-loop replies failures security metrics tracing \
         cluster compaction",
    ),
];

/// The text of all Rust files of the crates, product code and tests.
fn sources() -> Result<String> {
    fn add(folder: &Path, text: &mut String) -> Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                add(&path, text)?;
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                *text += &std::fs::read_to_string(&path)?;
            }
        }
        Ok(())
    }
    let mut text = String::new();
    add(&root().join("crates"), &mut text)?;
    Ok(text)
}

/// The words of a cell in backticks.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Whether a word of the column `capability` is a key: `prefix:...`, or a name with a placeholder.
fn key_start(word: &str) -> Option<&str> {
    let is_key =
        !word.contains(' ') && !word.contains('/') && (word.contains(':') || word.contains('<'));
    // Up to the first placeholder; a service name is a placeholder at the start.
    let start = word.split(['<', '{']).find(|part| !part.is_empty())?;
    let start = start.split_once('>').map_or(start, |(_, rest)| rest);
    is_key.then_some(start)
}

#[test]
fn every_capability_of_the_five_documents_is_named_with_its_file_and_test() -> Result<()> {
    let (page, sources) = (read("docs/compatibility.md")?, sources()?);
    let sections: Vec<&str> = page.split("\n## ").skip(1).collect();
    assert_eq!(sections.len(), CAPABILITIES.len());
    for (section, (title, required)) in sections.iter().zip(CAPABILITIES) {
        assert!(section.starts_with(title), "{title} is not the title of its section");
        let rows = section.lines().filter(|line| line.starts_with("| ")).skip(1);
        let mut ids = Vec::new();
        for row in rows {
            let cells: Vec<&str> = row.trim().trim_matches('|').split('|').map(str::trim).collect();
            let [id, capability, place, verdict, why, tests] = cells[..] else {
                anyhow::bail!("a row of {title} has {} cells: {row}", cells.len());
            };
            ids.push(id.split_once('-').map_or(id, |(_, name)| name));
            match verdict {
                "same" => assert_eq!(why, "", "{id}: `same` needs no reason"),
                "different" => assert!(why.len() > 20, "{id}: `different` without a reason"),
                other => anyhow::bail!("{id}: `{other}` is neither `same` nor `different`"),
            }
            assert!(quoted(place).count() > 0, "{id} names no file");
            for path in quoted(place) {
                let path = if path.starts_with("docs/") {
                    root().join(path)
                } else {
                    root().join("crates").join(path)
                };
                assert!(path.exists(), "{id} names {}, which does not exist", path.display());
            }
            assert!(quoted(tests).count() > 0, "{id} names no test");
            for test in quoted(tests) {
                let is_there = ["fn ", "async fn "]
                    .iter()
                    .any(|way| sources.contains(&format!("{way}{test}(")));
                assert!(is_there, "{id} names the test `{test}`, which does not exist");
            }
            for word in quoted(capability) {
                if word.starts_with("headwater_") {
                    assert!(
                        sources.contains(&format!("\"{word}\"")),
                        "{id} names the metric `{word}`"
                    );
                } else if let Some(start) =
                    key_start(word).filter(|start| !start.starts_with("worker:"))
                {
                    assert!(
                        sources.contains(start),
                        "{id} names the key `{word}`: no {start:?} in the code"
                    );
                }
            }
        }
        let required: Vec<&str> = required.split_whitespace().collect();
        assert_eq!(ids, required, "the rows of {title}");
    }
    Ok(())
}
