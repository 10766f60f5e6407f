//! Types of setting values: validation, and a description of the allowed values.
//!
//! Upstream: `table.rs` gives each setting a type. Downstream: `sources.rs` validates every value once; `Settings`
//! reads them. Guarantees: a value that passed `check` can be parsed by the function of its type. Error texts do not
//! contain the value, which may be secret.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use tracing_subscriber::EnvFilter;

/// Type of a setting.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ValueType {
    /// URL of a stream backend.
    StreamUrl,
    /// URL of a database.
    DatabaseUrl,
    /// `http://` or `https://`.
    WebUrl,
    /// `scripted:`, or a URL of an OpenAI-compatible endpoint.
    ModelUrl,
    /// Address and port to listen on.
    Listen,
    /// An integer.
    Count {
        /// Minimum.
        min: u64,
        /// Maximum.
        max: u64,
    },
    /// A price: a non-negative decimal number.
    Price,
    /// A duration with a unit.
    Time {
        /// Minimum.
        min: Duration,
        /// Maximum.
        max: Duration,
    },
    /// `true` or `false`.
    Switch,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Some of these words, separated by commas.
    Words(&'static [&'static str]),
    /// A log filter.
    Filter,
    /// Any text.
    Text,
    /// Any text; never shown, and without a flag, because arguments are visible in the process list.
    Secret,
}

const STREAM_SCHEMES: [&str; 7] = [
    "embedded:",
    "redis://",
    "rediss://",
    "unix://",
    "redis+unix://",
    "redis-sentinel://",
    "redis-cluster://",
];
const DATABASE_SCHEMES: [&str; 3] = ["sqlite:", "postgres://", "postgresql://"];
/// URL prefix of the built-in model.
pub(crate) const SCRIPTED: &str = "scripted:";
/// Maximum price.
const PRICE_MAX: f64 = 1e9;
const WEB_SCHEMES: [&str; 2] = ["http://", "https://"];

impl ValueType {
    /// The allowed values, in words that follow "allowed:".
    pub(crate) fn allowed(&self) -> String {
        match self {
            Self::StreamUrl => "`embedded:DIR`, `embedded:memory`, `redis://HOST:PORT`, `rediss://`, `unix:///PATH`, `redis-sentinel://` or `redis-cluster://`".to_owned(),
            Self::DatabaseUrl => "`sqlite:FILE` or `postgres://USER:PASSWORD@HOST/DATABASE`".to_owned(),
            Self::WebUrl => "a URL that begins with `http://` or `https://`".to_owned(),
            Self::ModelUrl => "`scripted:`, `scripted:TIME` with a delay per response, or a URL that begins with `http://` or `https://`".to_owned(),
            Self::Listen => "an address and a port, such as `127.0.0.1:8080`".to_owned(),
            Self::Count { min, max } => format!("a number from {min} to {max}"),
            Self::Price => "a number such as `2.5`".to_owned(),
            Self::Time { min, max } => format!("a duration from {} to {}, such as `800ms`, `5s`, `2m` or `1h`", show_time(*min), show_time(*max)),
            Self::Switch => "`true` or `false`".to_owned(),
            Self::Choice(words) => words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", "),
            Self::Words(words) => {
                let words = words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
                format!("some of {words}, separated by commas")
            }
            Self::Filter => "a level (`error`, `warn`, `info`, `debug`, `trace`), or directives such as `info,headwater_issue=debug`".to_owned(),
            Self::Text | Self::Secret => "any text".to_owned(),
        }
    }

    /// Whether `value` is valid.
    pub(crate) fn check(&self, value: &str) -> Result<(), InvalidValue> {
        let is_allowed = match self {
            Self::StreamUrl => begins_with(value, &STREAM_SCHEMES),
            Self::DatabaseUrl => begins_with(value, &DATABASE_SCHEMES),
            Self::WebUrl => begins_with(value, &WEB_SCHEMES) && reqwest::Url::parse(value).is_ok(),
            Self::ModelUrl => match value.strip_prefix(SCRIPTED) {
                Some(delay) => delay.is_empty() || time(delay).is_some(),
                None => Self::WebUrl.check(value).is_ok(),
            },
            Self::Listen => listen(value).is_some(),
            Self::Count { min, max } => {
                value.parse().is_ok_and(|count: u64| (*min..=*max).contains(&count))
            }
            Self::Price => price(value).is_some(),
            Self::Time { min, max } => {
                time(value).is_some_and(|length| (*min..=*max).contains(&length))
            }
            Self::Switch => ["true", "false"].contains(&value),
            Self::Choice(words) => words.contains(&value),
            Self::Words(words) => value.split(',').all(|word| words.contains(&word.trim())),
            Self::Filter => !value.is_empty() && EnvFilter::try_new(value).is_ok(),
            Self::Text | Self::Secret => !value.contains('\0'),
        };
        if is_allowed { Ok(()) } else { Err(InvalidValue) }
    }
}

/// A value that its type does not allow.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InvalidValue;

fn begins_with(value: &str, schemes: &[&str]) -> bool {
    schemes.iter().any(|scheme| value.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty()))
}

/// Parses a listen address; host names such as `localhost` are resolved.
pub(crate) fn listen(value: &str) -> Option<SocketAddr> {
    value.to_socket_addrs().ok()?.next()
}

/// Parses a price: digits with an optional fraction.
pub(crate) fn price(value: &str) -> Option<f64> {
    let is_plain = value.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    value.parse().ok().filter(|price| is_plain && *price <= PRICE_MAX)
}

/// Parses a duration: an integer and one of the units ms, s, m, h, d.
pub(crate) fn time(value: &str) -> Option<Duration> {
    let digits = value.find(|character: char| !character.is_ascii_digit())?;
    let (number, unit) = value.split_at(digits);
    let number: u64 = number.parse().ok()?;
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return None,
    };
    Some(Duration::from_millis(number.checked_mul(unit_ms)?))
}

fn show_time(length: Duration) -> String {
    let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s")];
    let ms = length.as_millis();
    let unit = units.into_iter().find(|(unit_ms, _)| ms > 0 && ms.is_multiple_of(*unit_ms));
    unit.map_or_else(|| format!("{ms}ms"), |(unit_ms, unit)| format!("{}{unit}", ms / unit_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_a_number_and_a_unit() {
        assert_eq!(time("800ms"), Some(Duration::from_millis(800)));
        assert_eq!(time("2m"), Some(Duration::from_secs(120)));
        for invalid_value in
            ["", "5", "s", "5 s", "-5s", "1.5s", "5S", "99999999999999999999s", "5s5"]
        {
            assert_eq!(time(invalid_value), None, "{invalid_value}");
        }
        for text in ["0ms", "800ms", "5s", "15m", "1h", "1d", "90s"] {
            assert_eq!(time(text).map(show_time).as_deref(), Some(text));
        }
    }

    #[test]
    fn values_out_of_range_or_of_another_type_are_invalid() {
        let count = ValueType::Count { min: 1, max: 10 };
        for invalid_value in ["0", "11", "-1", "1.0", "one", "", " 1", "1 "] {
            assert_eq!(count.check(invalid_value), Err(InvalidValue), "{invalid_value}");
        }
        assert!(count.check("10").is_ok());
        assert!(ValueType::Listen.check("127.0.0.1").is_err());
        assert!(ValueType::Listen.check("127.0.0.1:99999").is_err());
        assert!(ValueType::Listen.check("[::1]:80").is_ok());
        assert!(ValueType::StreamUrl.check("redis://").is_err());
        assert!(ValueType::StreamUrl.check("http://localhost").is_err());
        assert!(ValueType::DatabaseUrl.check("mysql://localhost/a").is_err());
        assert!(ValueType::WebUrl.check("http://").is_err());
        assert!(ValueType::Switch.check("yes").is_err());
        for invalid_value in ["", ".", "-1", "1e3", "inf", "NaN", "1,5", "99999999999"] {
            assert_eq!(ValueType::Price.check(invalid_value), Err(InvalidValue), "{invalid_value}");
        }
        assert_eq!(price("0.075"), Some(0.075));
        assert!(ValueType::Filter.check("headwater=loud").is_err());
    }
}
