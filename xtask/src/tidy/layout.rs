//! The layout of the binary's sources: few folders, which read as the data flows.

/// The sources of the binary.
const SOURCES: &str = "crates/headwater/src/";

/// What lies directly in [`SOURCES`].
const ENTRIES: [&str; 18] = [
    "main.rs",
    "lib.rs",
    "entry.rs",
    "exit.rs",
    "http_client.rs",
    "limits.rs",
    "text.rs",
    "config",
    "server",
    "http",
    "inbound",
    "tickets",
    "desk",
    "outbound",
    "api",
    "analytics",
    "telemetry",
    "cli",
];

/// Files that lie outside the layout.
pub(crate) fn check<'a>(paths: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let is_misplaced = |path: &&str| {
        let entry = path.strip_prefix(SOURCES).and_then(|rest| rest.split('/').next());
        entry.is_some_and(|entry| !ENTRIES.contains(&entry))
    };
    let finding = |path| format!("{path}: does not belong to a folder of {SOURCES}");
    paths.into_iter().filter(is_misplaced).map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_beside_the_folders_is_found() {
        let paths = [
            "crates/headwater/src/run.rs",
            "crates/headwater/src/server/run.rs",
            "crates/headwater/src/lib.rs",
            "crates/headwater-queue/src/run.rs",
        ];
        assert_eq!(check(paths).len(), 1);
    }
}
