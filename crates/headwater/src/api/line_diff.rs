//! The difference between two texts, line by line.
//!
//! Upstream: the routes of prompts and drafts. No I/O. The work is limited: texts that differ in too many lines are shown as
//! removed and added as a whole.

use serde::Serialize;
use utoipa::ToSchema;

/// Maximum product of the numbers of lines that are compared with each other.
const COMPARISONS_MAX: usize = 500 * 500;

/// A line of one or both texts.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct DiffLine {
    /// `same`, `removed` or `added`.
    change: &'static str,
    text: String,
}

/// The lines of both texts, those that both have once.
pub(super) fn difference(older: &str, newer: &str) -> Vec<DiffLine> {
    let (mut old, mut new): (Vec<&str>, Vec<&str>) =
        (older.lines().collect(), newer.lines().collect());
    let mut lines = Vec::with_capacity(old.len().max(new.len()));
    let line = |change, text: &str| DiffLine { change, text: text.to_owned() };
    let before = old.iter().zip(&new).take_while(|(one, other)| one == other).count();
    lines.extend(old.drain(..before).map(|text| line("same", text)));
    new.drain(..before);
    let after = old.iter().rev().zip(new.iter().rev()).take_while(|(one, other)| one == other);
    let after = after.count();
    let rest = old.split_off(old.len() - after);
    new.truncate(new.len() - after);
    lines.extend(changes(&old, &new).into_iter().map(|(change, text)| line(change, text)));
    lines.extend(rest.into_iter().map(|text| line("same", text)));
    lines
}

/// The changes, by the longest common subsequence.
fn changes<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<(&'static str, &'a str)> {
    let removed = old.iter().map(|text| ("removed", *text));
    if old.len().saturating_mul(new.len()) > COMPARISONS_MAX {
        return removed.chain(new.iter().map(|text| ("added", *text))).collect();
    }
    // The length of the longest common subsequence of `old[i..]` and `new[j..]`.
    let mut common = vec![vec![0_u32; new.len() + 1]; old.len() + 1];
    for i in (0..old.len()).rev() {
        for j in (0..new.len()).rev() {
            common[i][j] = match old[i] == new[j] {
                true => common[i + 1][j + 1] + 1,
                false => common[i + 1][j].max(common[i][j + 1]),
            };
        }
    }
    let (mut i, mut j, mut found) = (0, 0, Vec::new());
    while i < old.len() || j < new.len() {
        if i < old.len() && j < new.len() && old[i] == new[j] {
            found.push(("same", old[i]));
            (i, j) = (i + 1, j + 1);
        } else if j == new.len() || i < old.len() && common[i + 1][j] >= common[i][j + 1] {
            found.push(("removed", old[i]));
            i += 1;
        } else {
            found.push(("added", new[j]));
            j += 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short(older: &str, newer: &str) -> String {
        let sign = |line: &DiffLine| match line.change {
            "same" => ' ',
            "removed" => '-',
            _ => '+',
        };
        let lines = difference(older, newer);
        lines
            .iter()
            .map(|line| format!("{}{}", sign(line), line.text))
            .collect::<Vec<_>>()
            .join("|")
    }

    #[test]
    fn the_difference_has_each_common_line_once() {
        assert_eq!(short("a\nb\nc\nd", "a\nx\nc\nd"), " a|-b|+x| c| d");
        assert_eq!(short("a\nb\nc", "b\nc\ne"), "-a| b| c|+e");
        assert_eq!(short("a", "a\na"), " a|+a");
        assert_eq!((short("", ""), short("a", "")), (String::new(), "-a".to_owned()));
    }

    #[test]
    fn texts_with_very_many_different_lines_are_compared_as_a_whole() {
        let lines = |letter: char| format!("same\n{}end", format!("{letter}\n").repeat(30_000));
        let found = difference(&lines('a'), &lines('b'));
        assert_eq!(found.len(), 60_002);
        assert_eq!((found[0].change, found[1].change), ("same", "removed"));
        assert_eq!((found[60_000].change, found[60_001].change), ("added", "same"));
    }
}
