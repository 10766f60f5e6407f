//! Reads and writes durations, sizes and positions as people write them: `5m`, `10MB`, `2026-11-15`.
//!
//! Upstream: the value parsers of `verbs/`, and `output.rs`. Guarantees: a value that cannot be read is rejected with the
//! allowed forms; what is shown is rounded, so programs get the exact numbers (`--json`).

use std::time::Duration;

use headwater_stream::EntryId;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use uuid::Uuid;

/// Units of a size. Decimal ones are the default, as disks and networks are sold; `MiB` is binary.
const SIZES: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1000),
    ("B", 1),
];
/// Word that removes a limit.
pub(super) const NONE: &str = "none";

/// Parses a duration: `500ms`, `5s`, `2h`.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    crate::config::time(text)
        .ok_or_else(|| "expected a number with ms, s, m, h or d, such as 5s".to_owned())
}

/// Parses a size in bytes: `500`, `10MB`, `1GiB`. Units may be lower case.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let wrong = || "expected bytes or a number with kB, MB, GB, KiB, MiB or GiB, such as 10MB";
    let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let unit = unit.trim_start();
    if unit.is_empty() {
        return Ok(number);
    }
    let known = SIZES.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
    let (_, bytes) = known.ok_or_else(wrong)?;
    number.checked_mul(bytes).ok_or_else(|| "the number is too large".to_owned())
}

/// A limit of `topic alter`: a new value, or `none` to remove it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LimitArg(pub(super) Option<u64>);

/// Parses a count or `none`.
pub(super) fn count_or_none(text: &str) -> Result<LimitArg, String> {
    or_none(text, |text| text.parse().map_err(|_| "expected a number or `none`".to_owned()))
}

/// Parses a size or `none`.
pub(super) fn size_or_none(text: &str) -> Result<LimitArg, String> {
    or_none(text, size).map_err(|wrong| format!("{wrong}, or `none`"))
}

/// Parses a duration in milliseconds, or `none`.
pub(super) fn time_or_none(text: &str) -> Result<LimitArg, String> {
    or_none(text, |text| time(text).map(milliseconds))
        .map_err(|wrong| format!("{wrong}, or `none`"))
}

fn or_none(text: &str, parse: impl Fn(&str) -> Result<u64, String>) -> Result<LimitArg, String> {
    if text == NONE { Ok(LimitArg(None)) } else { parse(text).map(|value| LimitArg(Some(value))) }
}

/// Parses a count of at least 1.
pub(super) fn at_least_one(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("expected at least 1".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err("expected a number".to_owned()),
    }
}

/// Parses a limit of a list, at least 1.
pub(super) fn limit(text: &str) -> Result<usize, String> {
    usize::try_from(at_least_one(text)?).map_err(|_| "the number is too large".to_owned())
}

/// Parses the id of an issue or an outbox row.
pub(super) fn number(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| "expected a numeric id; `list` shows the ids".to_owned())
}

/// Parses a UUID.
pub(super) fn uuid(text: &str) -> Result<Uuid, String> {
    text.parse()
        .map_err(|_| "expected a UUID such as 6f1c1a35-5a0e-4f6f-8f43-3d1f7a1a0001".to_owned())
}

/// Parses a time for the API: a time, a date (midnight UTC), or how long ago (`5m`).
pub(super) fn moment(text: &str) -> Result<String, String> {
    moment_at(text, SystemClock.now()).ok_or_else(|| {
        "expected a time such as 2026-11-15T10:00:00Z, a date such as 2026-11-15, or an age such as 5m"
            .to_owned()
    })
}

/// Parses a position for the API: an entry id, or whatever [`moment`] accepts.
pub(super) fn position(text: &str) -> Result<String, String> {
    if text.parse::<EntryId>().is_ok() && text.contains('-') {
        return Ok(text.to_owned());
    }
    moment_at(text, SystemClock.now()).ok_or_else(|| {
        "expected an entry id such as 1700000000000-0, a time such as 2026-11-15T10:00:00Z, a date such as 2026-11-15, \
         or an age such as 5m"
            .to_owned()
    })
}

/// Parses the start of a tail: `beginning` or a position.
pub(super) fn tail_start(text: &str) -> Result<String, String> {
    if text == "beginning" {
        return Ok(text.to_owned());
    }
    position(text).map_err(|wrong| wrong.replacen("expected", "expected `beginning`,", 1))
}

/// Parses the target of a reset: `beginning`, `end` or a position.
pub(super) fn reset_target(text: &str) -> Result<String, String> {
    if ["beginning", "end"].contains(&text) {
        return Ok(text.to_owned());
    }
    position(text).map_err(|wrong| wrong.replacen("expected", "expected `beginning`, `end`,", 1))
}

fn moment_at(text: &str, now: Timestamp) -> Option<String> {
    if let Some(age) = crate::config::time(text) {
        return Some(now.before(age).to_rfc3339());
    }
    let midnight = format!("{text}T00:00:00Z");
    let seconds = format!("{}Z", text.replacen(' ', "T", 1));
    [text, &midnight, &seconds]
        .into_iter()
        .find(|form| Timestamp::from_rfc3339(form).is_some())
        .map(str::to_owned)
}

/// A duration in milliseconds, for the API.
pub(super) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A duration for people, in its largest unit with at most one decimal: `200 ms`, `1.5 s`, `7 d`.
pub(super) fn show_milliseconds(ms: u64) -> String {
    let units = [("d", 86_400_000_u64), ("h", 3_600_000), ("m", 60_000), ("s", 1000)];
    let unit = units.into_iter().find(|(_, unit_ms)| ms >= *unit_ms);
    unit.map_or_else(|| format!("{ms} ms"), |(name, unit_ms)| scaled(ms, unit_ms, name))
}

/// A size for people: binary units if they fit exactly (`1 MiB`), otherwise decimal ones (`10 MB`).
pub(super) fn show_size(bytes: u64) -> String {
    let exact = SIZES
        .into_iter()
        .find(|(name, unit)| name.ends_with("iB") && bytes >= *unit && bytes.is_multiple_of(*unit));
    if let Some((name, unit)) = exact {
        return format!("{} {name}", bytes / unit);
    }
    let decimal = SIZES.into_iter().filter(|(name, _)| !name.ends_with("iB"));
    let unit = decimal.into_iter().find(|(_, unit)| bytes >= *unit);
    unit.map_or_else(|| format!("{bytes} B"), |(name, unit)| scaled(bytes, unit, name))
}

/// A rate for people.
pub(super) fn show_rate(per_second: f64) -> String {
    match per_second {
        rate if rate >= 100.0 => format!("{rate:.0}/s"),
        rate => format!("{rate:.1}/s"),
    }
}

fn scaled(value: u64, unit: u64, name: &str) -> String {
    if value.is_multiple_of(unit) || value / unit >= 100 {
        return format!("{} {name}", value / unit);
    }
    format!("{:.1} {name}", value as f64 / unit as f64).replace(".0 ", " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_decimal_and_binary_units() {
        for (text, bytes) in [
            ("500", 500),
            ("10MB", 10_000_000),
            ("10 mb", 10_000_000),
            ("1GiB", 1 << 30),
            ("7B", 7),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for wrong in ["", "MB", "10XB", "-1", "1.5MB", "99999999999999TB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1024, "1 KiB"),
            (10_000_000, "10 MB"),
            (1_048_576, "1 MiB"),
            (1_300_001, "1.3 MB"),
            (123_456_789, "123 MB"),
        ] {
            assert_eq!(show_size(bytes), text);
        }
    }

    #[test]
    fn durations_are_shown_in_their_largest_unit() {
        for (ms, text) in [
            (0, "0 ms"),
            (200, "200 ms"),
            (1500, "1.5 s"),
            (60_000, "1 m"),
            (90_000, "1.5 m"),
            (604_800_000, "7 d"),
        ] {
            assert_eq!(show_milliseconds(ms), text);
        }
    }

    #[test]
    fn positions_are_ids_times_dates_and_ages() {
        let now = Timestamp::from_rfc3339("2026-11-15T10:00:00Z").unwrap();
        for (text, at) in [
            ("5m", "2026-11-15T09:55:00.000Z"),
            ("2026-11-14", "2026-11-14T00:00:00.000Z"),
            ("2026-11-14 08:00:00", "2026-11-14T08:00:00.000Z"),
            ("2026-11-14T08:00:00+01:00", "2026-11-14T07:00:00.000Z"),
        ] {
            let found = moment_at(text, now).and_then(|at| Timestamp::from_rfc3339(&at));
            assert_eq!(found, Timestamp::from_rfc3339(at), "{text}");
        }
        assert_eq!(position("5-1"), Ok("5-1".to_owned()));
        for wrong in ["yesterday", "2026-13-01", "", "5", "5x"] {
            assert!(position(wrong).is_err() && moment(wrong).is_err(), "{wrong}");
        }
        assert_eq!(tail_start("beginning"), Ok("beginning".to_owned()));
        assert!(tail_start("end").is_err() && reset_target("end").is_ok());
    }

    #[test]
    fn a_limit_is_a_number_or_none() {
        assert_eq!(size_or_none("none"), Ok(LimitArg(None)));
        assert_eq!(time_or_none("7d"), Ok(LimitArg(Some(604_800_000))));
        assert_eq!(count_or_none("5"), Ok(LimitArg(Some(5))));
        assert!(count_or_none("many").is_err() && at_least_one("0").is_err());
    }
}
