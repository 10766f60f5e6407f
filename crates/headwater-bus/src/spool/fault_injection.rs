//! Disk faults for tests of the spool. Without tests nothing is injected.
//!
//! Upstream: tests inject faults. Downstream: `file` checks before each disk operation.

use std::io;

/// An operation that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Write,
    SetLength,
    SyncDirectory,
}

/// Operations that fail once each.
#[derive(Debug, Default)]
pub(super) struct SpoolFaults(Vec<Operation>);

impl SpoolFaults {
    #[cfg(test)]
    pub(super) fn inject(&mut self, operations: &[Operation]) {
        self.0.extend(operations);
    }

    pub(super) fn check(&mut self, operation: Operation) -> io::Result<()> {
        let Some(at) = self.0.iter().position(|ordered| *ordered == operation) else {
            return Ok(());
        };
        self.0.remove(at);
        Err(io::Error::from(io::ErrorKind::StorageFull))
    }
}
