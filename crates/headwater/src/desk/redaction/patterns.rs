//! Finds personal data in text: e-mail addresses, phone and card numbers, IBANs, and custom patterns.
//!
//! Upstream: `redaction`. No I/O. An escape of JSON, such as `\n`, before a value is no part of it: a text may be JSON that was cut.
//! Guarantees: linear time in the length of the text for the built-in patterns: the `regex` crate
//! does not backtrack, and a candidate of bounded length is checked in constant time. Cards have a valid check digit (Luhn),
//! IBANs a valid checksum (ISO 7064), so that other numbers stay readable.

use std::ops::Range;

use regex::{Regex, RegexBuilder};

/// Names of the built-in patterns.
pub(crate) const BUILT_IN: &[&str] = &["email", "phone", "card", "iban"];

/// Memory of a compiled custom pattern.
const COMPILED_BYTES_MAX: usize = 1024 * 1024;

const EMAIL: &str =
    r"[\p{L}\p{N}._%+'-]+(?:@|\\+u0040)[\p{L}\p{N}](?:[\p{L}\p{N}-]*\.)+\p{L}[\p{L}\p{N}-]+";
const PHONE: &str = r"[+(]?[0-9][0-9 ().\-/\x{a0}]{5,22}[0-9]";
const CARD: &str = r"[0-9](?:[ -]?[0-9]){12,18}";
const IBAN: &str = r"[A-Za-z]{2}[0-9]{2}(?:[ -]?[A-Za-z0-9]){11,30}";

/// Bytes of an escape such as `\u000a`.
const ESCAPE_BYTES_MAX: usize = 6;

/// Digits of a phone number, with the code of its country.
const PHONE_DIGITS: Range<usize> = 7..16;

/// Where a candidate that begins at `start` and ends at most at `end` ends; `None` if it is another text.
type CandidateCheck = fn(text: &str, start: usize, end: usize) -> Option<usize>;

/// Finds one kind of data.
pub(super) struct Detector {
    /// In placeholders.
    pub(super) kind: String,
    regex: Regex,
    /// Without it, every match is found.
    check: Option<CandidateCheck>,
    /// Whether a match begins after an escape of JSON. A custom pattern may contain escapes.
    skips_escapes: bool,
}

impl Detector {
    pub(super) fn of(kind: &str, regex: Regex) -> Self {
        Self { kind: kind.to_owned(), regex, check: None, skips_escapes: false }
    }

    /// A pattern of [`BUILT_IN`].
    pub(super) fn built_in(name: &str) -> Option<Self> {
        let (pattern, check): (&str, Option<CandidateCheck>) = match name {
            "email" => (EMAIL, None),
            "phone" => (PHONE, Some(phone)),
            "card" => (CARD, Some(card)),
            "iban" => (IBAN, Some(iban)),
            _ => return None,
        };
        let regex = Regex::new(pattern).expect("the pattern is valid");
        Some(Self { kind: name.to_uppercase(), regex, check, skips_escapes: true })
    }

    pub(super) fn custom(name: &str, pattern: &str) -> Result<Self, String> {
        let regex = RegexBuilder::new(pattern).size_limit(COMPILED_BYTES_MAX).build();
        let regex = regex.map_err(|error| crate::text::one_line(&error.to_string(), 300))?;
        Ok(Self::of(&name.to_uppercase(), regex))
    }

    pub(super) fn find(&self, text: &str) -> Vec<Range<usize>> {
        if !self.skips_escapes {
            let found = self.regex.find_iter(text).map(|found| found.range());
            return found.filter(|range| !range.is_empty()).collect();
        }
        let (mut found, mut at) = (Vec::new(), 0);
        while let Some(candidate) = self.regex.find_at(text, at) {
            let (start, end) = (candidate.start(), candidate.end());
            let escape = escape_end(text, start);
            if let Some(end) = escape.filter(|end| *end > start) {
                at = end;
                continue;
            }
            let before = text[..start].chars().next_back().filter(|_| escape.is_none());
            let is_inside = before.is_some_and(char::is_alphanumeric);
            let checked = match self.check {
                Some(check) => check(text, start, end).filter(|_| !is_inside),
                None => Some(end),
            };
            at = match checked {
                Some(end) => {
                    found.push(start..end);
                    end
                }
                // Behind the first group of letters or digits: another one may begin after it.
                None => {
                    let rest = text[start..].char_indices().skip(1);
                    let group =
                        rest.skip_while(|(_, c)| c.is_alphanumeric()).map(|(at, _)| at).next();
                    start + group.unwrap_or(text.len() - start)
                }
            };
        }
        found
    }
}

/// Where the escape of JSON ends, such as `\n` or `\u000a`, that `at` is inside of or behind of; `None` if there is none.
fn escape_end(text: &str, at: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let starts = at.saturating_sub(ESCAPE_BYTES_MAX)..at;
    starts.rev().find_map(|start| {
        let rest = &bytes[start..];
        let length = match rest {
            [b'\\', b'n' | b'r' | b't' | b'b' | b'f', ..] => 2,
            [b'\\', b'u', digits @ ..]
                if digits.iter().take_while(|c| c.is_ascii_hexdigit()).count() >= 4 =>
            {
                ESCAPE_BYTES_MAX
            }
            _ => return None,
        };
        (start + length >= at).then_some(start + length)
    })
}

/// Ends of a candidate, longest first, that no letter or digit follows; each with its letters and digits.
fn ends(text: &str, start: usize, end: usize) -> Vec<(usize, String)> {
    let (mut found, mut compact) = (Vec::new(), String::new());
    for (at, c) in text[start..end].char_indices() {
        if !c.is_alphanumeric() {
            continue;
        }
        compact.push(c);
        let next = start + at + c.len_utf8();
        if !text[next..].chars().next().is_some_and(char::is_alphanumeric) {
            found.push((next, compact.clone()));
        }
    }
    found.reverse();
    found
}

fn phone(text: &str, start: usize, end: usize) -> Option<usize> {
    let shown = &text[start..end];
    let is_inside = text[end..].chars().next().is_some_and(char::is_alphanumeric);
    let digits = shown.chars().filter(char::is_ascii_digit).count();
    let groups: Vec<usize> = shown
        .split(|c: char| !c.is_ascii_digit())
        .map(str::len)
        .filter(|length| *length > 0)
        .collect();
    // With the code of a country or an area, or written as in North America.
    let is_phone =
        shown.starts_with(['+', '(', '0']) || groups == [3, 3, 4] || groups == [1, 3, 3, 4];
    let is_date = matches!(groups[..], [1..=2, 1..=2, 2 | 4] | [4, 1..=2, 1..=2]);
    (is_phone && !is_date && !is_inside && PHONE_DIGITS.contains(&digits)).then_some(end)
}

fn card(text: &str, start: usize, end: usize) -> Option<usize> {
    let is_card = |(_, digits): &(usize, String)| digits.len() >= 13 && has_check_digit(digits);
    ends(text, start, end).into_iter().find(is_card).map(|(end, _)| end)
}

/// The Luhn algorithm.
fn has_check_digit(digits: &str) -> bool {
    let sum: u32 = digits
        .chars()
        .rev()
        .filter_map(|c| c.to_digit(10))
        .enumerate()
        .map(|(place, digit)| match place % 2 {
            0 => digit,
            _ if digit > 4 => digit * 2 - 9,
            _ => digit * 2,
        })
        .sum();
    sum.is_multiple_of(10)
}

fn iban(text: &str, start: usize, end: usize) -> Option<usize> {
    let is_iban =
        |(_, text): &(usize, String)| (15..=34).contains(&text.len()) && has_checksum(text);
    ends(text, start, end).into_iter().find(is_iban).map(|(end, _)| end)
}

/// ISO 7064, MOD 97-10: the first four characters behind the others, letters as numbers from 10.
fn has_checksum(iban: &str) -> bool {
    let (head, rest) = iban.split_at(4);
    let remainder = rest.chars().chain(head.chars()).try_fold(0_u32, |remainder, c| {
        let value = c.to_digit(36)?;
        let shift = if value < 10 { 10 } else { 100 };
        Some((remainder * shift + value) % 97)
    });
    remainder == Some(1)
}
