//! Error replies of a server, and how they map to retries and to [`StreamError`].

use std::fmt;

use crate::error::StreamError;

/// An error reply: `CODE message`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServerError {
    code: String,
    text: String,
}

/// How to retry a command that the server rejected. In every case but `Fail`, the command had no effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RetryAction {
    /// Send it to this server from now on.
    Moved { address: String },
    /// Send it to this server once.
    Ask { address: String },
    /// Load the script and re-send it.
    LoadScript,
    /// Find the new primary and re-send it.
    FindPrimary,
    /// Re-send it after a pause.
    Wait,
    /// Do not retry.
    Fail,
}

/// Why a reply could not be used.
#[derive(Debug)]
pub(super) enum ReplyError {
    /// The server replied with an error.
    Server(ServerError),
    /// The reply has an unexpected type or value.
    Unexpected(String),
}

/// Error code of our scripts for a key that holds a value of another type; the key follows.
const CODE_WRONG_TYPE: &str = "HWTYPE";
/// Error code of our scripts for a stale lease.
const CODE_FENCED: &str = "HWFENCED";

/// Codes that servers before Redis 7 wrap into a script error.
const WRAPPED_CODES: [&str; 9] = [
    "WRONGTYPE",
    "NOGROUP",
    "OOM",
    "MISCONF",
    "READONLY",
    "NOPERM",
    "NOREPLICAS",
    "MASTERDOWN",
    "CLUSTERDOWN",
];

impl ServerError {
    pub(super) fn new(line: &[u8]) -> Self {
        let line = String::from_utf8_lossy(line);
        // Before Redis 7 an error inside a script reads `ERR Error running script (…): @user_script:1: OOM …`, or with `-` before the
        // code; one that the script returns begins with `@user_script`.
        let begins = ["ERR Error running script", "@user_script"];
        let inner = begins.iter().any(|begin| line.starts_with(begin)).then(|| {
            let at = |before: &str, code: &str| {
                line.find(&format!("{before}{code} ")).map(|at| at + before.len())
            };
            WRAPPED_CODES.iter().find_map(|code| at(": ", code).or_else(|| at(": -", code)))
        });
        let line = &line[inner.flatten().unwrap_or(0)..];
        // `EXEC` itself was rejected; the reason follows.
        let line =
            line.strip_prefix("EXECABORT Transaction discarded because of: ").unwrap_or(line);
        let (code, text) = line.split_once(' ').unwrap_or((line, ""));
        Self { code: code.to_owned(), text: text.to_owned() }
    }

    pub(super) fn code(&self) -> &str {
        &self.code
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn is_no_group(&self) -> bool {
        self.code == "NOGROUP"
    }

    pub(super) fn is_wrong_type(&self) -> bool {
        self.code == "WRONGTYPE"
    }

    pub(super) fn is_fenced(&self) -> bool {
        self.code == CODE_FENCED
    }

    /// Whether the server is at its memory limit.
    pub(super) fn is_full(&self) -> bool {
        self.code == "OOM"
    }

    /// Whether the server could not compile a script.
    pub(super) fn is_no_script(&self) -> bool {
        self.code == "ERR" && self.text.starts_with("Error compiling script")
    }

    /// Whether the stream does not exist.
    pub(super) fn is_no_key(&self) -> bool {
        self.code == "ERR"
            && (self.text.starts_with("no such key")
                || self.text.contains("requires the key to exist"))
    }

    /// Whether the server ended a blocking read because the key or the server's role changed.
    pub(super) fn is_unblocked(&self) -> bool {
        self.code == "UNBLOCKED"
    }

    pub(super) fn retry_action(&self) -> RetryAction {
        let address = || self.text.split(' ').nth(1).unwrap_or_default().to_owned();
        match self.code.as_str() {
            "MOVED" => RetryAction::Moved { address: address() },
            "ASK" => RetryAction::Ask { address: address() },
            "NOSCRIPT" => RetryAction::LoadScript,
            "READONLY" => RetryAction::FindPrimary,
            "LOADING" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN" | "BUSY" => RetryAction::Wait,
            _ => RetryAction::Fail,
        }
    }

    /// The error for the caller; `name` is the key of the command.
    pub(super) fn into_stream_error(self, name: &str) -> StreamError {
        let name = name.to_owned();
        match self.code.as_str() {
            "WRONGTYPE" => StreamError::WrongType { name },
            CODE_WRONG_TYPE => StreamError::WrongType { name: self.text },
            "NOGROUP" => StreamError::NoGroup { stream: name, group: String::new() },
            "OOM" | "MISCONF" => StreamError::Full { problem: self.to_string() },
            "NOPERM" | "NOAUTH" | "WRONGPASS" => StreamError::Denied { problem: self.to_string() },
            "READONLY" | "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "BUSY"
            | "UNBLOCKED" | "NOREPLICAS" | "MOVED" | "ASK" | "NOSCRIPT" | "UNKILLABLE" => {
                StreamError::Unavailable {
                    problem: format!("the server rejected the call: {self}"),
                    source: None,
                }
            }
            "CROSSSLOT" => StreamError::invalid(
                name,
                "the names in this call are in different cluster slots; give them the same hash tag `{…}`",
            ),
            _ => StreamError::Protocol { problem: format!("`{name}`: {self}") },
        }
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.code, self.text)
    }
}

impl ReplyError {
    pub(super) fn unexpected(problem: impl std::fmt::Display) -> Self {
        Self::Unexpected(format!("{problem}"))
    }

    /// The error for the caller; `name` is the key of the command.
    pub(super) fn into_stream_error(self, name: impl AsRef<str>) -> StreamError {
        match self {
            Self::Server(error) => error.into_stream_error(name.as_ref()),
            Self::Unexpected(problem) => StreamError::Protocol { problem },
        }
    }

    /// The error for the caller of a command on a group.
    pub(super) fn into_group_error(
        self,
        stream: impl AsRef<str>,
        group: impl AsRef<str>,
    ) -> StreamError {
        match self {
            Self::Server(error) if error.is_no_group() || error.is_no_key() => {
                StreamError::NoGroup {
                    stream: stream.as_ref().to_owned(),
                    group: group.as_ref().to_owned(),
                }
            }
            other => other.into_stream_error(stream),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_inside_a_script_of_an_old_server_is_recognised() {
        let line =
            b"ERR Error running script (call to f_1): @user_script:3: OOM command not allowed";
        assert_eq!(ServerError::new(line).code(), "OOM");
        let line = b"ERR Error running script (call to f_1): @user_script:3: @user_script: 3: -OOM command";
        assert_eq!(ServerError::new(line).code(), "OOM");
        assert_eq!(ServerError::new(b"@user_script: 97: -OOM command not allowed").code(), "OOM");
        assert_eq!(ServerError::new(b"ERR something else").code(), "ERR");
        let line = b"EXECABORT Transaction discarded because of: BUSY Redis is busy";
        assert_eq!(ServerError::new(line).code(), "BUSY");
    }

    #[test]
    fn each_server_error_maps_to_the_matching_stream_error() {
        let about = |line: &str| ServerError::new(line.as_bytes()).into_stream_error("orders");
        assert!(
            matches!(about("WRONGTYPE x"), StreamError::WrongType { name } if name == "orders")
        );
        assert!(matches!(about("HWTYPE a b"), StreamError::WrongType { name } if name == "a b"));
        assert!(matches!(about("OOM x"), StreamError::Full { .. }));
        assert!(matches!(about("MISCONF x"), StreamError::Full { .. }));
        assert!(matches!(about("NOAUTH x"), StreamError::Denied { .. }));
        assert!(matches!(about("LOADING x"), StreamError::Unavailable { .. }));
        assert!(matches!(about("CROSSSLOT x"), StreamError::Invalid { .. }));
        assert!(matches!(about("ERR x"), StreamError::Protocol { .. }));
    }

    #[test]
    fn a_redirection_names_its_address() {
        let moved = ServerError::new(b"MOVED 3999 127.0.0.1:6381").retry_action();
        assert_eq!(moved, RetryAction::Moved { address: "127.0.0.1:6381".to_owned() });
        assert_eq!(ServerError::new(b"ERR x").retry_action(), RetryAction::Fail);
    }
}
