//! What was confirmed to producers against what happened.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use super::sink::{Effect, Sink};

/// Every so often a message is poison: the handler gives it up at once.
pub(crate) fn is_poison(number: u64) -> bool {
    number.is_multiple_of(29)
}

/// The numbers of a key that were confirmed: 1 up to this one.
pub(crate) type Confirmed = BTreeMap<String, u64>;

pub(crate) struct Books {
    directory: PathBuf,
}

impl Books {
    pub(crate) fn open(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// Producers write a line after each confirmation.
    pub(crate) fn confirmed(&self) -> Result<Confirmed> {
        let mut confirmed = Confirmed::new();
        for file in std::fs::read_dir(&self.directory)? {
            let path = file?.path();
            if path.extension().is_none_or(|extension| extension != "confirmed") {
                continue;
            }
            for line in std::fs::read_to_string(path)?.lines() {
                let (key, number) = line.split_once(' ').unwrap_or((line, ""));
                // A producer that is killed in the middle of a line has confirmed nothing with it.
                let Ok(number) = number.parse::<u64>() else { continue };
                let last = confirmed.entry(key.to_owned()).or_insert(0);
                *last = number.max(*last);
            }
        }
        Ok(confirmed)
    }

    /// Confirmed messages without an effect.
    pub(crate) fn missing(&self) -> Result<Vec<(String, u64)>> {
        let effects = Sink::open(&self.directory).effects()?;
        let seen: HashSet<(&str, u64)> =
            effects.iter().map(|effect| (effect.key.as_str(), effect.number)).collect();
        let confirmed = self.confirmed()?;
        let all =
            confirmed.iter().flat_map(|(key, last)| (1..=*last).map(move |number| (key, number)));
        Ok(all
            .filter(|(key, number)| !seen.contains(&(key.as_str(), *number)))
            .map(|(key, number)| (key.clone(), number))
            .collect())
    }

    /// A number happens for the first time only after all smaller ones of its key.
    pub(crate) fn check_order(&self) -> Result<()> {
        let effects = Sink::open(&self.directory).effects()?;
        let mut last: HashMap<&str, u64> = HashMap::new();
        for Effect { key, number, kind, .. } in &effects {
            let last = last.entry(key).or_insert(0);
            ensure!(*number <= *last + 1, "{}", too_early(&effects, key, *number));
            *last = (*number).max(*last);
            let expected = if is_poison(*number) { "dead" } else { "done" };
            ensure!(kind == expected, "{key} {number} is {kind}, not {expected}");
        }
        Ok(())
    }

    pub(crate) fn summary(&self) -> Result<String> {
        let confirmed: u64 = self.confirmed()?.values().sum();
        let effects = Sink::open(&self.directory).effects()?.len();
        let again = effects as u64 - confirmed.min(effects as u64);
        Ok(format!("{confirmed} messages confirmed, {effects} effects, {again} of them again"))
    }
}

/// What happened to a key around a number that came before its turn.
fn too_early(effects: &[Effect], key: &str, number: u64) -> String {
    let around = number.saturating_sub(5)..number + 5;
    let near = effects.iter().filter(|effect| effect.key == key && around.contains(&effect.number));
    let lines: Vec<String> = near
        .map(|effect| format!("{} {} in {}", effect.number, effect.kind, effect.place))
        .collect();
    format!("{key}: {number} came before its turn\n{}", lines.join("\n"))
}
