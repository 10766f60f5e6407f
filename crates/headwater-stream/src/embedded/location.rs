//! The part of a URL after `embedded:`: a directory or `memory`, and parameters.
//!
//! | parameter | meaning | default |
//! |---|---|---|
//! | `sync` | `always`: a call returns when it is synced; `interval`: when it is written, synced every
//! second | `always` |
//! | `max_bytes` | memory limit for entries, delayed entries, deduplication records, sets and maps | 1 GiB |
//! | `compact_bytes` | log bytes after which a snapshot replaces the log | 64 MiB |

use std::path::PathBuf;

use super::log::SyncMode;
use crate::error::{Result, StreamError};

pub(super) const MAX_BYTES_DEFAULT: u64 = 1024 * 1024 * 1024;
pub(super) const COMPACT_BYTES_DEFAULT: u64 = 64 * 1024 * 1024;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Location {
    /// `None` for memory.
    pub(super) directory: Option<PathBuf>,
    pub(super) sync: SyncMode,
    pub(super) max_bytes: u64,
    pub(super) compact_bytes: u64,
}

impl Location {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (place, parameters) = text.split_once('?').unwrap_or((text, ""));
        if place.is_empty() {
            return Err(invalid(
                "`embedded:` must be followed by `memory` or a directory".to_owned(),
            ));
        }
        let directory = (place != "memory").then(|| PathBuf::from(place));
        let mut location = Self {
            directory,
            sync: SyncMode::Always,
            max_bytes: MAX_BYTES_DEFAULT,
            compact_bytes: COMPACT_BYTES_DEFAULT,
        };
        for parameter in parameters.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            match name {
                "sync" => location.sync = sync(value)?,
                "max_bytes" => location.max_bytes = bytes(name, value)?,
                "compact_bytes" => location.compact_bytes = bytes(name, value)?,
                _ => {
                    return Err(invalid(format!(
                        "unknown parameter `{name}`; `embedded:` accepts `sync`, `max_bytes` and `compact_bytes`"
                    )));
                }
            }
        }
        Ok(location)
    }
}

fn sync(value: &str) -> Result<SyncMode> {
    match value {
        "always" => Ok(SyncMode::Always),
        "interval" => Ok(SyncMode::Interval),
        _ => Err(invalid(format!("`sync={value}`: expected `always` or `interval`"))),
    }
}

fn bytes(name: &str, value: &str) -> Result<u64> {
    match value.parse() {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(invalid(format!("`{name}={value}`: expected a number of bytes of at least 1"))),
    }
}

fn invalid(problem: String) -> StreamError {
    StreamError::invalid("the stream URL", problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_memory_or_a_directory_with_parameters() {
        let memory = Location::parse("memory").unwrap();
        assert_eq!((memory.directory, memory.max_bytes), (None, MAX_BYTES_DEFAULT));
        let durable =
            Location::parse("./memory?sync=interval&max_bytes=7&compact_bytes=9").unwrap();
        assert_eq!(durable.directory, Some(PathBuf::from("./memory")));
        assert_eq!(durable.sync, SyncMode::Interval);
        assert_eq!((durable.max_bytes, durable.compact_bytes), (7, 9));
    }

    #[test]
    fn an_invalid_location_is_rejected() {
        for bad in
            ["", "?sync=always", "d?sync=never", "d?max_bytes=0", "d?max_bytes=1G", "d?color=red"]
        {
            assert!(matches!(Location::parse(bad), Err(StreamError::Invalid { .. })), "{bad}");
        }
    }
}
