//! Whether a database was made by the very migrations that this program has.
//!
//! Upstream: `migrate` of both dialects, when a store is opened. Downstream: the table `headwater_migration_checksums`.
//! Promises: a migration whose text was changed after it was applied is noticed, and the database left as it is. One that
//! was made before there were checksums is taken for what its version says, once.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::error::IssueError;

/// What the text of a migration is known by.
pub(crate) fn checksum(sql: &str) -> String {
    Sha256::digest(sql).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How a database compares to the migrations that this program has.
pub(crate) enum Verdict {
    /// It fits; the checksums of these versions are yet to be written down.
    Fits(Vec<(i64, String)>),
    /// It has this version, which is newer than all that are known.
    Newer(usize),
    /// This version of it was made by another text.
    Differs(usize),
}

/// Compares what was applied, with the checksums that were written down for it, with what is known.
pub(crate) fn compare(known: &[&str], applied: usize, written: &BTreeMap<i64, String>) -> Verdict {
    if applied > known.len() {
        return Verdict::Newer(applied);
    }
    let mut missing = Vec::new();
    for (sql, version) in known.iter().zip(1_i64..) {
        let ours = checksum(sql);
        match written.get(&version) {
            // Nobody wrote it down, or it is about to be applied.
            None => missing.push((version, ours)),
            Some(theirs) if *theirs == ours => {}
            Some(_) => return Verdict::Differs(usize::try_from(version).unwrap_or(usize::MAX)),
        }
    }
    Verdict::Fits(missing)
}

/// Why a database cannot be used, and what to do.
pub(crate) fn newer(version: usize, known: &[&str]) -> IssueError {
    let known = known.len();
    let problem = format!(
        "it has version {version}, this program knows versions up to {known}; upgrade this program"
    );
    IssueError::Schema { problem }
}

/// The same for one that another text made.
pub(crate) fn differs(version: usize) -> IssueError {
    let problem = format!(
        "its migration {version} was applied with another text than that of this program; run the program \
         that made it, or restore a backup into a new database"
    );
    IssueError::Schema { problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_is_the_digest_of_the_text() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(checksum(""), empty);
        assert_ne!(checksum("SELECT 1"), checksum("SELECT 1 "));
    }
}
