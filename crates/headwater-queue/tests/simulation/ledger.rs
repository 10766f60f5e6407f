//! Compares messages confirmed to producers with the logged effects.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use headwater_testkit::ChaosCounts;

use super::deployment::LossWindow;
use super::effect_log::{Effect, EffectLog};
use super::processes::{GROUPS, is_delayed};

/// Whether a message is poison: the handler sends it to the dead letters.
pub(crate) fn is_poison(number: u64) -> bool {
    number.is_multiple_of(29)
}

/// A dead letter is written within so many milliseconds after its effect was logged.
const SETTLE_MAX_MS: u64 = 1000;

/// The times between which the confirmed attempt was written, in milliseconds since 1970, and the partition.
///
/// A producer may learn of a write long after it happened: results of a batch are returned together, and another partition
/// of it may wait for a server that is dead.
pub(crate) type Origin = (RangeInclusive<u64>, u16);
/// The origin of each number of a key.
pub(crate) type Confirmed = BTreeMap<String, BTreeMap<u64, Origin>>;

pub(crate) struct Ledger {
    directory: PathBuf,
    /// When confirmed writes may be lost.
    windows: Vec<LossWindow>,
}

impl Ledger {
    pub(crate) fn open(directory: &Path, windows: Vec<LossWindow>) -> Self {
        Self { directory: directory.to_owned(), windows }
    }

    /// Whether some server may have lost the dead letter of an effect that was logged at this time.
    pub(crate) fn may_have_lost_dead_letter(&self, logged_ms: u64) -> bool {
        let writing = logged_ms..=logged_ms + SETTLE_MAX_MS;
        self.windows.iter().any(|window| window.overlaps(&writing))
    }

    /// Whether the server of this partition may have lost a confirmed message.
    fn may_be_lost(&self, (writing, partition): &Origin) -> bool {
        let mut windows = self.windows.iter();
        windows.any(|window| window.overlaps(writing) && window.partitions.contains(partition))
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
                let mut words = line.split(' ');
                let key = words.next().unwrap_or_default();
                let mut number = || words.next()?.parse::<u64>().ok();
                // An incomplete line of a killed producer is not a confirmation.
                let (Some(sent), Some(from), Some(to), Some(partition), Some(0)) =
                    (number(), number(), number(), number(), number())
                else {
                    continue;
                };
                let origin = (from..=to, u16::try_from(partition)?);
                confirmed.entry(key.to_owned()).or_default().insert(sent, origin);
            }
        }
        Ok(confirmed)
    }

    fn effects(&self, group: &str) -> Result<Vec<Effect>> {
        EffectLog::open(&self.directory, group).effects()
    }

    /// Confirmed messages without an effect in a group, with their origin.
    fn unhandled(&self, group: &str) -> Result<Vec<(String, u64, Origin)>> {
        let effects = self.effects(group)?;
        let seen: HashSet<(&str, u64)> =
            effects.iter().map(|effect| (effect.key.as_str(), effect.number)).collect();
        let confirmed = self.confirmed()?;
        let all = confirmed.iter().flat_map(|(key, numbers)| {
            numbers.iter().map(move |(number, origin)| (key, *number, origin))
        });
        Ok(all
            .filter(|(key, number, _)| !seen.contains(&(key.as_str(), *number)))
            .map(|(key, number, origin)| (key.clone(), number, origin.clone()))
            .collect())
    }

    /// Confirmed messages without an effect in a group that no server may have lost.
    pub(crate) fn missing(&self, group: &str) -> Result<Vec<(String, u64, Origin)>> {
        let unhandled = self.unhandled(group)?.into_iter();
        Ok(unhandled.filter(|(_, _, origin)| !self.may_be_lost(origin)).collect())
    }

    /// Checks that the first effect of a number comes after those of all smaller numbers of its key, except those that a
    /// server may have lost.
    pub(crate) fn check_order(&self, group: &str) -> Result<()> {
        let (effects, confirmed) = (self.effects(group)?, self.confirmed()?);
        let mut last: HashMap<&str, u64> = HashMap::new();
        for Effect { key, number, kind, .. } in &effects {
            let last = last.entry(key).or_insert(0);
            let may_be_lost = |skipped: u64| {
                let origin = confirmed.get(key).and_then(|numbers| numbers.get(&skipped));
                origin.is_some_and(|origin| self.may_be_lost(origin))
            };
            let is_in_order = is_delayed(key) || (*last + 1..*number).all(may_be_lost);
            ensure!(is_in_order, "{}", out_of_order(&effects, key, *number));
            *last = (*number).max(*last);
            let expected = if is_poison(*number) { "dead" } else { "done" };
            ensure!(kind == expected, "{key} {number} is {kind}, not {expected}");
        }
        Ok(())
    }

    /// When the poison messages that must be dead letters of a group had their effect, by key and number.
    pub(crate) fn poison(&self, group: &str) -> Result<HashMap<(String, u64), u64>> {
        let effects = self.effects(group)?.into_iter().filter(|effect| is_poison(effect.number));
        Ok(effects.map(|effect| ((effect.key, effect.number), effect.at_ms)).collect())
    }

    /// The counts of all groups. Also prints what each group did.
    pub(crate) fn counts(&self) -> Result<ChaosCounts> {
        let sent: usize = self.confirmed()?.values().map(BTreeMap::len).sum();
        let mut counts = ChaosCounts { sent: sent as u64, ..Default::default() };
        let windows = self.windows.iter().map(LossWindow::duration);
        counts.longest_loss_window = windows.max().unwrap_or_default();
        let mut lost = HashSet::new();
        for group in GROUPS {
            let effects = self.effects(group)?;
            let once: HashSet<(&str, u64)> =
                effects.iter().map(|effect| (effect.key.as_str(), effect.number)).collect();
            let doubled = effects.len() - once.len();
            let unhandled = self.unhandled(group)?;
            println!(
                "`{group}`: {sent} messages confirmed, {} effects, {doubled} of them repeated, {} lost with unreplicated writes",
                effects.len(),
                unhandled.len()
            );
            counts.doubled += doubled as u64;
            lost.extend(unhandled.into_iter().map(|(key, number, _)| (key, number)));
        }
        counts.lost = lost.len() as u64;
        counts.handled = counts.sent - counts.lost;
        Ok(counts)
    }
}

/// The effects of a key around a number that was out of order.
fn out_of_order(effects: &[Effect], key: &str, number: u64) -> String {
    let around = number.saturating_sub(5)..number + 5;
    let near = effects.iter().filter(|effect| effect.key == key && around.contains(&effect.number));
    let lines: Vec<String> = near
        .map(|effect| {
            format!("{} {} in {} at {}", effect.number, effect.kind, effect.origin, effect.at_ms)
        })
        .collect();
    format!("{key}: {number} is out of order\n{}", lines.join("\n"))
}
