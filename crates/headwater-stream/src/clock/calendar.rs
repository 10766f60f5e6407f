//! Timestamps as text: RFC 3339.
//!
//! Days are counted in years that begin in March, so that the leap day is the last day of its year.

const DAY_MS: u64 = 86_400_000;
/// Days from 0000-03-01 to 1970-01-01.
const EPOCH_DAYS: i64 = 719_468;
/// Days in 400 years.
const ERA_DAYS: i64 = 146_097;
/// 9999-12-31T23:59:59.999Z
const LAST_MS: u64 = 253_402_300_799_999;

pub(super) fn format(ms: u64) -> String {
    let ms = ms.min(LAST_MS);
    let days = (ms / DAY_MS) as i64 + EPOCH_DAYS;
    let era = days / ERA_DAYS;
    let day_of_era = days % ERA_DAYS;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    let time = ms % DAY_MS;
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        time / 3_600_000,
        time / 60_000 % 60,
        time / 1000 % 60,
        time % 1000
    )
}

pub(super) fn parse(text: &str) -> Option<u64> {
    parse_usual(text.as_bytes()).or_else(|| parse_any(text))
}

/// Fast path for the usual form, 2026-01-01T00:00:00.000Z; every message contains one.
fn parse_usual(text: &[u8]) -> Option<u64> {
    let text: &[u8; 24] = text.try_into().ok()?;
    let separators = [text[4], text[7], text[10], text[13], text[16], text[19], text[23]];
    if separators != *b"--T::.Z" {
        return None;
    }
    let digits = |from: usize, to: usize| {
        text[from..to].iter().try_fold(0_i64, |sum, byte| {
            let digit = byte.wrapping_sub(b'0');
            (digit < 10).then_some(sum * 10 + i64::from(digit))
        })
    };
    let date = [digits(0, 4)?, digits(5, 7)?, digits(8, 10)?];
    let time = [digits(11, 13)?, digits(14, 16)?, digits(17, 19)?, digits(20, 23)?];
    instant(date, time, 0)
}

fn parse_any(text: &str) -> Option<u64> {
    let mut rest = text;
    let year = number(&mut rest, 4)?;
    let month = {
        separator(&mut rest, "-")?;
        number(&mut rest, 2)?
    };
    let day = {
        separator(&mut rest, "-")?;
        number(&mut rest, 2)?
    };
    separator(&mut rest, "Tt ")?;
    let hour = number(&mut rest, 2)?;
    let minute = {
        separator(&mut rest, ":")?;
        number(&mut rest, 2)?
    };
    let second = {
        separator(&mut rest, ":")?;
        number(&mut rest, 2)?
    };
    let ms = fraction(&mut rest)?;
    let offset_minutes = offset(rest)?;
    instant([year, month, day], [hour, minute, second, ms], offset_minutes)
}

/// The instant in milliseconds; `None` for an invalid date or time.
fn instant(date: [i64; 3], time: [i64; 4], offset_minutes: i64) -> Option<u64> {
    let ([year, month, day], [hour, minute, second, ms]) = (date, time);
    let fits = (1..=12).contains(&month)
        && (1..=month_days(year, month)).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !fits {
        return None;
    }
    // Clamp a leap second to the last millisecond of its minute.
    let (second, ms) = if second == 60 { (59, 999) } else { (second, ms) };
    let seconds = days_since_epoch(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second
        - offset_minutes * 60;
    u64::try_from(seconds * 1000 + ms).ok()
}

fn number(rest: &mut &str, digits: usize) -> Option<i64> {
    let (head, tail) = rest.split_at_checked(digits)?;
    *rest = tail;
    head.bytes().all(|b| b.is_ascii_digit()).then(|| head.parse().ok()).flatten()
}

fn separator(rest: &mut &str, allowed: &str) -> Option<()> {
    let first = rest.chars().next().filter(|first| allowed.contains(*first))?;
    *rest = &rest[first.len_utf8()..];
    Some(())
}

fn fraction(rest: &mut &str) -> Option<i64> {
    let Some(tail) = rest.strip_prefix('.') else { return Some(0) };
    let digits = tail.bytes().take_while(u8::is_ascii_digit).count();
    *rest = &tail[digits..];
    let shown: String = tail[..digits].chars().chain("000".chars()).take(3).collect();
    (digits > 0).then(|| shown.parse().ok()).flatten()
}

fn offset(rest: &str) -> Option<i64> {
    let sign = match rest.as_bytes().first()? {
        b'Z' | b'z' if rest.len() == 1 => return Some(0),
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    let mut rest = &rest[1..];
    let hours = number(&mut rest, 2)?;
    separator(&mut rest, ":")?;
    let minutes = number(&mut rest, 2)?;
    (rest.is_empty() && hours < 24 && minutes < 60).then_some(sign * (hours * 60 + minutes))
}

fn month_days(year: i64, month: i64) -> i64 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

fn days_since_epoch(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let year_of_era = year.rem_euclid(400);
    let march_month = (month + 9) % 12;
    let day_of_year = (153 * march_month + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    year.div_euclid(400) * ERA_DAYS + day_of_era - EPOCH_DAYS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_round_trip_over_leap_years_and_centuries() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (951_868_799_999, "2000-02-29T23:59:59.999Z"),
            (1_767_225_600_250, "2026-01-01T00:00:00.250Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
            (LAST_MS, "9999-12-31T23:59:59.999Z"),
        ] {
            assert_eq!(format(ms), text);
            assert_eq!(parse(text), Some(ms));
        }
        for day in (0..LAST_MS / DAY_MS).step_by(13) {
            let (ms, text) = (day * DAY_MS + 1, format(day * DAY_MS + 1));
            assert_eq!((parse_usual(text.as_bytes()), parse_any(&text)), (Some(ms), Some(ms)));
        }
        assert_eq!(format(u64::MAX), "9999-12-31T23:59:59.999Z");
    }

    #[test]
    fn other_spellings_of_the_same_instant_are_parsed() {
        for text in [
            "2026-01-01T00:00:00Z",
            "2026-01-01 00:00:00.000000999z",
            "2026-01-01T01:30:00+01:30",
            "2025-12-31T22:00:00.0-02:00",
        ] {
            assert_eq!(parse(text), Some(1_767_225_600_000), "{text}");
        }
    }

    #[test]
    fn invalid_instants_are_rejected() {
        for text in [
            "",
            "2026",
            "2026-01-01",
            "2026-13-01T00:00:00Z",
            "2026-02-29T00:00:00Z",
            "2026-01-01T24:00:00Z",
            "2026-01-01T00:00:00",
            "2026-01-01T00:00:00.Z",
            "2026-01-01T00:00:00Zx",
            "1969-12-31T23:59:59Z",
            "2026-01-01T00:00:00+0100",
            "键",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
