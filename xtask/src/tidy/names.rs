//! Type names: one name has one meaning in the whole workspace.

use std::collections::BTreeMap;

use crate::checkout::{is_product_code, product_lines};

/// Names that product code may define more than once, and why.
const ALLOWED: [(&str, &str); 2] = [
    ("Inner", "the shared part behind an `Arc`, private to its file"),
    ("Result", "an alias for the error type of a module, as in the standard library"),
];

/// Type names that are defined more than once in product code. `files` are pairs of path and text.
///
/// Tests, benches and examples are programs of their own and are not checked.
pub(crate) fn check<'a>(files: impl IntoIterator<Item = &'a (String, String)>) -> Vec<String> {
    let mut places: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (path, text) in files {
        if !path.ends_with(".rs") || !is_product_code(path) {
            continue;
        }
        for (line, number) in product_lines(text) {
            if let Some(name) = defined_type(line) {
                places.entry(name).or_default().push(format!("{path}:{number}"));
            }
        }
    }
    places.retain(|name, places| {
        places.len() > 1 && !ALLOWED.iter().any(|(allowed, _)| allowed == name)
    });
    let finding = |(name, places): (&str, Vec<String>)| {
        format!("the type name `{name}` is defined more than once: {}", places.join(", "))
    };
    places.into_iter().map(finding).collect()
}

/// The type that a line defines. An indented `type` is an associated type.
fn defined_type(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let code = match code.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.strip_prefix(' ')?,
        None => code,
    };
    let (keyword, rest) = code.split_once(' ')?;
    let is_type = ["struct", "enum", "trait", "union"].contains(&keyword)
        || (keyword == "type" && !line.starts_with(' '));
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    let name = &rest[..end];
    (is_type && name.starts_with(char::is_uppercase)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(files: &[(&str, &str)]) -> usize {
        let files: Vec<_> =
            files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        check(&files).len()
    }

    #[test]
    fn a_name_defined_twice_is_found_whatever_it_names() {
        for other in ["enum Place {", "trait Place: Send {", "pub(crate) type Place<T> = Vec<T>;"] {
            let files = [("a/src/x.rs", "pub struct Place;\n"), ("b/src/y.rs", other)];
            assert_eq!(findings(&files), 1, "for {other}");
        }
        assert_eq!(findings(&[("a/src/x.rs", "mod m {\n    struct Place;\n}\nstruct Place;")]), 1);
    }

    #[test]
    fn tests_associated_types_and_allowed_names_may_repeat() {
        let again = [
            ("b/tests/y.rs", "struct Place;"),
            ("b/src/y.rs", "    type Place = u8;"),
            ("b/src/y.rs", "#[cfg(test)]\nmod tests {\n    struct Place;\n}"),
            ("b/src/tests/y.rs", "struct Place;"),
            ("b/src/y.rs", "struct Placed;"),
        ];
        for other in again {
            assert_eq!(findings(&[("a/src/x.rs", "struct Place;"), other]), 0, "for {other:?}");
        }
        assert_eq!(
            findings(&[("a/src/x.rs", "struct Inner;"), ("b/src/y.rs", "struct Inner {")]),
            0
        );
    }
}
