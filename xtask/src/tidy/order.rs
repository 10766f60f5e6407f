//! The order of the crates: each may use only those of a lower layer.
//!
//! Reads manifests line by line. That is enough for the plain tables that this workspace writes,
//! and keeps a TOML parser out of xtask.

/// Every crate that others may build on, with its layer.
const LAYERS: [(&str, u8); 9] = [
    ("headwater-stream", 1),
    ("headwater-assignment", 2),
    ("headwater-queue", 2),
    ("headwater-bus", 3),
    ("headwater-issue", 4),
    ("headwater-analytics", 4),
    ("headwater-conformance", 5),
    ("headwater-console", 5),
    ("headwater", 6),
];

const TESTKIT: &str = "headwater-testkit";
const BINARY: &str = "headwater";
const CONSOLE: &str = "headwater-console";
const XTASK: &str = "xtask";

/// Crates for programs. A library that used them would push them on its users.
const FOR_PROGRAMS: [&str; 3] = ["anyhow", "axum", "clap"];

/// What must change in `manifests`, which are pairs of path and text.
pub(crate) fn check(manifests: &[(String, String)]) -> Vec<String> {
    let mut findings = Vec::new();
    for (path, text) in manifests {
        let manifest = Manifest::read(text);
        for dependency in &manifest.dependencies {
            if let Some(reason) = objection(&manifest.name, dependency) {
                findings.push(format!("{path}: `{dependency}` {reason}"));
            }
        }
        if layer(&manifest.name).is_none() && ![TESTKIT, XTASK].contains(&manifest.name.as_str()) {
            findings.push(format!("{path}: `{}` has no layer yet", manifest.name));
        }
    }
    findings
}

/// Why the crate `name` must not use `dependency`, outside its tests.
fn objection(name: &str, dependency: &str) -> Option<String> {
    if name == XTASK {
        return Some("would slow down the first command on a new machine".to_owned());
    }
    if dependency == TESTKIT {
        return Some("is for tests, move it to [dev-dependencies]".to_owned());
    }
    // The console is a part of the program: routes for its HTTP server.
    let is_of_console = name == CONSOLE && dependency == "axum";
    if FOR_PROGRAMS.contains(&dependency) && ![BINARY, TESTKIT].contains(&name) && !is_of_console {
        return Some(format!("is for programs, only `{BINARY}` may use it"));
    }
    // The test kit has no layer: it stands below all and may use none.
    match (layer(name).unwrap_or(0), layer(dependency)) {
        (mine, Some(theirs)) if theirs >= mine => {
            Some(format!("is not below `{name}` in the order of crates"))
        }
        _ => None,
    }
}

fn layer(name: &str) -> Option<u8> {
    LAYERS.iter().find(|(known, _)| *known == name).map(|(_, layer)| *layer)
}

/// The part of a manifest that matters here.
#[derive(Debug, Default, PartialEq, Eq)]
struct Manifest {
    name: String,
    /// All but those for tests only.
    dependencies: Vec<String>,
}

impl Manifest {
    fn read(text: &str) -> Self {
        let mut manifest = Self::default();
        let mut table = String::new();
        for line in text.lines().map(str::trim) {
            if line.starts_with('#') {
                continue;
            }
            if let Some(header) = line.strip_prefix('[').and_then(|line| line.split(']').next()) {
                table = header.trim().to_owned();
                // A dependency can have a table of its own: [dependencies.redis].
                manifest.dependencies.extend(own_table(&table).map(str::to_owned));
            } else if let Some((key, value)) = line.split_once('=') {
                if table == "package" && key.trim() == "name" {
                    manifest.name = unquote(value).to_owned();
                } else if is_dependency_table(&table) {
                    manifest.dependencies.push(dependency(key, value).to_owned());
                } else if own_table(&table).is_some() && key.trim() == "package" {
                    manifest.dependencies.push(unquote(value).to_owned());
                }
            }
        }
        manifest
    }
}

/// Also for one platform, as in `target.'cfg(unix)'.dependencies`; never those for tests.
fn is_dependency_table(table: &str) -> bool {
    ["dependencies", "build-dependencies"].contains(&table)
        || (table.starts_with("target.")
            && (table.ends_with(".dependencies") || table.ends_with(".build-dependencies")))
}

fn own_table(table: &str) -> Option<&str> {
    let (parent, name) = table.rsplit_once('.')?;
    is_dependency_table(parent).then_some(unquote(name))
}

/// The crate behind `key = value`, which can be renamed: `kv = { package = "redis" }`.
fn dependency<'a>(key: &'a str, value: &'a str) -> &'a str {
    let renamed = value.split(['{', ',', '}']).find_map(|field| {
        let (name, value) = field.split_once('=')?;
        (name.trim() == "package").then_some(unquote(value))
    });
    // `redis.workspace = true` has the crate before the dot.
    renamed.unwrap_or_else(|| unquote(key.split('.').next().unwrap_or(key)))
}

fn unquote(text: &str) -> &str {
    let text = text.split('#').next().unwrap_or(text);
    text.trim().trim_matches(['"', '\''])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(name: &str, rest: &str) -> Vec<String> {
        let text = format!("[package]\nname = \"{name}\"\n{rest}");
        check(&[("Cargo.toml".to_owned(), text)])
    }

    #[test]
    fn a_crate_may_use_those_below_it() {
        let below = "[dependencies]\nheadwater-stream.workspace = true\nheadwater-bus = \"1\"\n";
        assert_eq!(findings("headwater-issue", below), [""; 0]);
        assert_eq!(findings("headwater", "[dependencies]\nclap = \"4\"\n"), [""; 0]);
    }

    #[test]
    fn a_crate_must_not_use_itself_its_neighbour_or_one_above() {
        for above in ["headwater-bus", "headwater-issue", "headwater"] {
            let rest = format!("[dependencies]\n{above}.workspace = true\n");
            assert_eq!(findings("headwater-bus", &rest).len(), 1, "for {above}");
        }
        let neighbour = "[dependencies]\nheadwater-issue.workspace = true\n";
        assert_eq!(findings("headwater-analytics", neighbour).len(), 1);
        let kit = "[dependencies]\nheadwater-stream.workspace = true\n";
        assert_eq!(findings("headwater-testkit", kit).len(), 1);
    }

    #[test]
    fn the_test_kit_is_for_tests() {
        let rest = "dependencies]\nheadwater-testkit.workspace = true\n";
        assert_eq!(findings("headwater-stream", &format!("[dev-{rest}")), [""; 0]);
        assert_eq!(findings("headwater-stream", &format!("[{rest}")).len(), 1);
        assert_eq!(findings("headwater-stream", &format!("[build-{rest}")).len(), 1);
    }

    #[test]
    fn libraries_leave_the_crates_for_programs_alone_outside_tests() {
        for name in FOR_PROGRAMS {
            let rest = format!("dependencies]\n{name} = \"1\"\n");
            assert_eq!(findings("headwater-queue", &format!("[{rest}")).len(), 1);
            assert_eq!(findings("headwater-queue", &format!("[dev-{rest}")), [""; 0]);
        }
        assert_eq!(findings("headwater-testkit", "[dependencies]\nanyhow = \"1\"\n"), [""; 0]);
        assert_eq!(findings("headwater-console", "[dependencies]\naxum = \"1\"\n"), [""; 0]);
        assert_eq!(findings("headwater-console", "[dependencies]\nclap = \"1\"\n").len(), 1);
    }

    #[test]
    fn every_way_to_write_a_dependency_is_seen() {
        let ways = [
            "[dependencies]\nclap = { version = \"4\", optional = true }\n",
            "[dependencies]\nclap.workspace = true # why not\n",
            "[dependencies]\ncli = { version = \"4\", package = \"clap\" }\n",
            "[dependencies.clap]\nversion = \"4\"\n",
            "[dependencies.cli]\npackage = \"clap\"\n",
            "[target.'cfg(unix)'.dependencies]\nclap = \"4\"\n",
            "[target.'cfg(unix)'.dependencies.clap]\nversion = \"4\"\n",
        ];
        for way in ways {
            assert_eq!(findings("headwater-stream", way).len(), 1, "for {way}");
        }
        assert_eq!(findings("headwater-stream", "[dev-dependencies.clap]\n"), [""; 0]);
        assert_eq!(findings("headwater-stream", "[features]\nclap = []\n"), [""; 0]);
    }

    #[test]
    fn xtask_has_no_dependencies_and_a_new_crate_needs_a_layer() {
        assert_eq!(findings("xtask", "[dependencies]\n"), [""; 0]);
        assert_eq!(findings("xtask", "[dependencies]\nlibc = \"0.2\"\n").len(), 1);
        assert_eq!(findings("headwater-common", "").len(), 1);
    }
}
