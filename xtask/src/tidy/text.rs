//! Checks on the text of one file.

/// Maximum number of lines of a file.
const LINES_MAX: usize = 700;

/// Root directories that are specific to one machine.
const PERSONAL_FOLDERS: [&str; 4] = ["home", "root", "Users", "work"];

/// In two parts, so that this file is not a finding itself.
const UNFINISHED: [&str; 2] = [concat!("todo", "!("), concat!("unimplemented", "!(")];

/// The findings in the file at `path`, each starting with its location.
pub(crate) fn check(path: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        if let Some(folder) = personal_path(line) {
            findings.push(format!("{path}:{number}: a path of one machine: {folder}"));
        }
    }
    if path.ends_with(".rs") {
        findings.extend(check_rust(path, text));
    }
    findings
}

fn check_rust(path: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        if let Some(name) = UNFINISHED.iter().find(|name| line.contains(**name)) {
            findings.push(format!("{path}:{number}: unfinished: {name}...)"));
        }
    }
    if path.contains("/src/") && !begins_with_documentation(text) {
        findings.push(format!("{path}:1: missing module documentation (start with `//!`)"));
    }
    let lines = text.lines().count();
    if lines > LINES_MAX {
        findings.push(format!("{path}: {lines} lines, the maximum is {LINES_MAX}"));
    }
    findings
}

fn begins_with_documentation(text: &str) -> bool {
    text.starts_with("//!") || text.starts_with("#![doc = include_str!")
}

/// The first machine-specific directory in an absolute path of `line`.
fn personal_path(line: &str) -> Option<String> {
    PERSONAL_FOLDERS
        .iter()
        .map(|folder| format!("/{folder}/"))
        .find(|folder| line.match_indices(folder).any(|(at, _)| is_absolute(&line[..at])))
}

/// Whether an absolute path starts after `before`. In `~/a`, `src/a` and `{folder}/a` the slash continues a path.
fn is_absolute(before: &str) -> bool {
    !before.ends_with(|end: char| end.is_alphanumeric() || "_-.~})>]*".contains(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_one_machine_is_found_with_its_line() {
        for folder in PERSONAL_FOLDERS {
            let text = format!("fine\nlet path = \"/{folder}/ann/data\";\n");
            let findings = check("docs/a.md", &text);
            assert_eq!(findings, [format!("docs/a.md:2: a path of one machine: /{folder}/")]);
        }
    }

    #[test]
    fn relative_paths_and_addresses_are_not_of_one_machine() {
        for before in ["~", "src", "https://example.com", "{folder}", ".."] {
            for folder in PERSONAL_FOLDERS {
                let text = format!("see {before}/{folder}/data\n");
                assert_eq!(check("docs/a.md", &text), [""; 0], "for {before}");
            }
        }
    }

    #[test]
    fn unfinished_code_is_found_in_rust_files_only() {
        for name in UNFINISHED {
            let text = format!("//! A file.\nfn f() {{ {name}) }}\n");
            assert_eq!(check("crates/a/src/b.rs", &text).len(), 1);
            assert_eq!(check("docs/a.md", &text), [""; 0]);
        }
    }

    #[test]
    fn a_source_file_says_what_it_is() {
        let documented = ["//! A file.\n", "#![doc = include_str!(\"../README.md\")]\n"];
        for text in documented {
            assert_eq!(check("crates/a/src/lib.rs", text), [""; 0]);
        }
        assert_eq!(check("crates/a/src/lib.rs", "mod b;\n").len(), 1);
        assert_eq!(check("crates/a/src/b/c.rs", "").len(), 1);
        assert_eq!(check("crates/a/tests/d.rs", "mod b;\n"), [""; 0]);
    }

    #[test]
    fn a_file_may_have_as_many_lines_as_the_maximum_and_no_more() {
        let longest = "//! A line.\n".repeat(LINES_MAX);
        assert_eq!(check("crates/a/src/b.rs", &longest), [""; 0]);

        let longer = longest + "//! One more.\n";
        assert_eq!(check("crates/a/src/b.rs", &longer).len(), 1);
        assert_eq!(check("Cargo.lock", &longer), [""; 0]);
    }
}
