//! What a server refuses, and what that means to the caller.

use std::fmt;

use crate::error::StreamError;

/// An error reply: `CODE and what the server says`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    code: String,
    text: String,
}

/// What to do about a refused command. In every case but the last, the server did nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Remedy {
    /// Send it to this server from now on.
    Moved { address: String },
    /// Send it to this server, this once.
    Ask { address: String },
    /// Load the script and send it again.
    LoadScript,
    /// Look for the primary, then send it again.
    FindPrimary,
    /// Send it again a little later.
    Wait,
    /// It stays refused.
    None,
}

/// Why an answer is none.
#[derive(Debug)]
pub(super) enum Failure {
    /// The server refused the command.
    Refused(Refusal),
    /// The server answered something else than it should.
    Shape(String),
}

/// What our scripts answer when a key holds a foreign value; the key follows.
const CODE_WRONG_TYPE: &str = "HWTYPE";
/// What our scripts answer when the presented lease is not current.
const CODE_FENCED: &str = "HWFENCED";

/// Codes that a script of an old server wraps into its own error.
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

impl Refusal {
    pub(super) fn new(line: &[u8]) -> Self {
        let line = String::from_utf8_lossy(line);
        // Before Redis 7 an error inside a script reads `ERR Error running script (…): @user_script:1: OOM …`.
        let inner = line.starts_with("ERR Error running script").then(|| {
            WRAPPED_CODES.iter().find_map(|code| line.find(&format!(": {code} ")).map(|at| at + 2))
        });
        let line = &line[inner.flatten().unwrap_or(0)..];
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

    /// Whether the server says that there is no such stream.
    pub(super) fn is_no_key(&self) -> bool {
        self.code == "ERR"
            && (self.text.starts_with("no such key")
                || self.text.contains("requires the key to exist"))
    }

    /// Whether the server took a waiting client off its key: the key or the server's role changed.
    pub(super) fn is_unblocked(&self) -> bool {
        self.code == "UNBLOCKED"
    }

    pub(super) fn remedy(&self) -> Remedy {
        let address = || self.text.split(' ').nth(1).unwrap_or_default().to_owned();
        match self.code.as_str() {
            "MOVED" => Remedy::Moved { address: address() },
            "ASK" => Remedy::Ask { address: address() },
            "NOSCRIPT" => Remedy::LoadScript,
            "READONLY" => Remedy::FindPrimary,
            "LOADING" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN" | "BUSY" => Remedy::Wait,
            _ => Remedy::None,
        }
    }

    /// The error for the caller; `name` is what the command was about.
    pub(super) fn about(self, name: &str) -> StreamError {
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
                    problem: format!("the server refused the call: {self}"),
                    source: None,
                }
            }
            "CROSSSLOT" => StreamError::invalid(
                name,
                "the names of this call live in different slots of the cluster; give them the same hash tag `{…}`",
            ),
            _ => StreamError::Protocol { problem: format!("`{name}`: {self}") },
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.code, self.text)
    }
}

impl Failure {
    pub(super) fn shape(problem: impl std::fmt::Display) -> Self {
        Self::Shape(format!("{problem}"))
    }

    /// The error for the caller; `name` is what the command was about.
    pub(super) fn about(self, name: impl AsRef<str>) -> StreamError {
        match self {
            Self::Refused(refusal) => refusal.about(name.as_ref()),
            Self::Shape(problem) => StreamError::Protocol { problem },
        }
    }

    /// The error for a caller who named a group of a stream.
    pub(super) fn in_group(self, stream: impl AsRef<str>, group: impl AsRef<str>) -> StreamError {
        match self {
            Self::Refused(refusal) if refusal.is_no_group() || refusal.is_no_key() => {
                StreamError::NoGroup {
                    stream: stream.as_ref().to_owned(),
                    group: group.as_ref().to_owned(),
                }
            }
            other => other.about(stream),
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
        assert_eq!(Refusal::new(line).code(), "OOM");
        assert_eq!(Refusal::new(b"ERR something else").code(), "ERR");
    }

    #[test]
    fn each_refusal_is_sorted_by_what_the_caller_does_next() {
        let about = |line: &str| Refusal::new(line.as_bytes()).about("orders");
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
        let moved = Refusal::new(b"MOVED 3999 127.0.0.1:6381").remedy();
        assert_eq!(moved, Remedy::Moved { address: "127.0.0.1:6381".to_owned() });
        assert_eq!(Refusal::new(b"ERR x").remedy(), Remedy::None);
    }
}
