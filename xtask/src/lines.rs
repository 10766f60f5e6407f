//! `cargo xtask lines`: counts the lines of product code, per crate.
//!
//! A line counts if it is neither blank nor a comment. Unit tests, test files, benches and examples do not count, nor do
//! the crates that only tests use.

use std::collections::BTreeMap;
use std::fs;

use crate::cargo::workspace_root;
use crate::checkout::{is_product_code, product_lines, tracked_files};
use crate::exit::ExitError;

/// Crates that only tests and contributors use.
const NOT_PRODUCT: [&str; 3] = ["headwater-conformance", "headwater-testkit", "xtask"];

pub(crate) fn run() -> Result<(), ExitError> {
    let root = workspace_root()?;
    let mut crates: BTreeMap<String, usize> = BTreeMap::new();
    for path in tracked_files(&root)? {
        let Some(name) = product_crate(&path) else { continue };
        // Skips deleted but uncommitted files.
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        *crates.entry(name.to_owned()).or_default() += count(&path, &text);
    }
    for (name, lines) in &crates {
        println!("{lines:>7}  {name}");
    }
    println!("{:>7}  in all", crates.values().sum::<usize>());
    Ok(())
}

/// The crate whose product code the file is.
fn product_crate(path: &str) -> Option<&str> {
    let name = path.strip_prefix("crates/")?.split('/').next()?;
    let is_source = comment_start(path).is_some() && is_product_code(path);
    (is_source && !NOT_PRODUCT.contains(&name)).then_some(name)
}

/// How a comment line begins in a source file.
fn comment_start(path: &str) -> Option<&str> {
    match path.rsplit('.').next()? {
        "rs" | "js" | "css" => Some("//"),
        "sql" | "lua" => Some("--"),
        _ => None,
    }
}

fn count(path: &str, text: &str) -> usize {
    let Some(comment) = comment_start(path) else { return 0 };
    let is_code = |line: &str| !line.is_empty() && !line.starts_with(comment);
    product_lines(text).filter(|(line, _)| is_code(line.trim())).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_lines_comments_and_unit_tests_do_not_count() {
        let text = "//! A file.\n\nfn f() {\n    // Why.\n    g();\n}\n\n#[cfg(test)]\nmod tests {\n    fn t() {}\n}\n";
        assert_eq!(count("crates/a/src/b.rs", text), 4, "three of `f`, one attribute");
        assert_eq!(count("crates/a/src/b.sql", "-- Why.\nSELECT 1;\n"), 1);
    }

    #[test]
    fn only_sources_of_crates_that_users_get_count() {
        assert_eq!(product_crate("crates/headwater/src/text.rs"), Some("headwater"));
        for path in [
            "crates/headwater/tests/desk.rs",
            "crates/headwater/src/desk/tests.rs",
            "crates/headwater/README.md",
            "crates/headwater-testkit/src/lib.rs",
            "xtask/src/main.rs",
        ] {
            assert_eq!(product_crate(path), None, "for {path}");
        }
    }
}
