//! Compares messages confirmed to producers with the logged effects.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use super::effect_log::{Effect, EffectLog};

/// Whether a message is poison: the handler sends it to the dead letters.
pub(crate) fn is_poison(number: u64) -> bool {
    number.is_multiple_of(29)
}

/// The highest confirmed number of each key; all from 1 are confirmed.
pub(crate) type Confirmed = BTreeMap<String, u64>;

pub(crate) struct Ledger {
    directory: PathBuf,
}

impl Ledger {
    pub(crate) fn open(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// Reads the confirmations that producers log.
    pub(crate) fn confirmed(&self) -> Result<Confirmed> {
        let mut confirmed = Confirmed::new();
        for file in std::fs::read_dir(&self.directory)? {
            let path = file?.path();
            if path.extension().is_none_or(|extension| extension != "confirmed") {
                continue;
            }
            for line in std::fs::read_to_string(path)?.lines() {
                let (key, number) = line.split_once(' ').unwrap_or((line, ""));
                // An incomplete line of a killed producer is not a confirmation.
                let Ok(number) = number.parse::<u64>() else { continue };
                let last = confirmed.entry(key.to_owned()).or_insert(0);
                *last = number.max(*last);
            }
        }
        Ok(confirmed)
    }

    /// Confirmed messages without an effect.
    pub(crate) fn missing(&self) -> Result<Vec<(String, u64)>> {
        let effects = EffectLog::open(&self.directory).effects()?;
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

    /// Checks that the first effect of a number comes after those of all smaller numbers of its key.
    pub(crate) fn check_order(&self) -> Result<()> {
        let effects = EffectLog::open(&self.directory).effects()?;
        let mut last: HashMap<&str, u64> = HashMap::new();
        for Effect { key, number, kind, .. } in &effects {
            let last = last.entry(key).or_insert(0);
            ensure!(*number <= *last + 1, "{}", out_of_order(&effects, key, *number));
            *last = (*number).max(*last);
            let expected = if is_poison(*number) { "dead" } else { "done" };
            ensure!(kind == expected, "{key} {number} is {kind}, not {expected}");
        }
        Ok(())
    }

    pub(crate) fn summary(&self) -> Result<String> {
        let confirmed: u64 = self.confirmed()?.values().sum();
        let effects = EffectLog::open(&self.directory).effects()?.len();
        let again = effects as u64 - confirmed.min(effects as u64);
        Ok(format!("{confirmed} messages confirmed, {effects} effects, {again} of them repeated"))
    }
}

/// The effects of a key around a number that was out of order.
fn out_of_order(effects: &[Effect], key: &str, number: u64) -> String {
    let around = number.saturating_sub(5)..number + 5;
    let near = effects.iter().filter(|effect| effect.key == key && around.contains(&effect.number));
    let lines: Vec<String> = near
        .map(|effect| format!("{} {} in {}", effect.number, effect.kind, effect.origin))
        .collect();
    format!("{key}: {number} is out of order\n{}", lines.join("\n"))
}
