//! Faults: what a disk can do to a spool, for tests. In a running program there are none.
//!
//! Upstream: tests of the spool, which order them. Downstream: `file` asks before it touches the disk.

use std::io;

/// What may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Write,
    SetLength,
    SyncDirectory,
}

/// Operations that are to fail, once each.
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
