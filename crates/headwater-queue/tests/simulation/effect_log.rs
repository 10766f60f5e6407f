//! The effect log of consumers: it records the highest epoch of each partition and rejects lower ones.
//!
//! One file with one lock for each group. A killed process releases the lock; a paused one blocks the others until it resumes,
//! which only costs time.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use super::now_ms;

/// One effect of a handler.
#[derive(Clone, Debug)]
pub(crate) struct Effect {
    pub(crate) key: String,
    pub(crate) number: u64,
    pub(crate) kind: String,
    /// Partition and epoch, for diagnosis.
    pub(crate) origin: String,
    pub(crate) at_ms: u64,
}

pub(crate) struct EffectLog {
    directory: PathBuf,
    group: String,
}

impl EffectLog {
    pub(crate) fn open(directory: &Path, group: &str) -> Self {
        Self { directory: directory.to_owned(), group: group.to_owned() }
    }

    /// Logs the effect. Returns `false` if an owner with a higher epoch has written before.
    pub(crate) fn put(
        &self,
        partition: u16,
        epoch: Option<u64>,
        key: &str,
        number: u64,
        kind: &str,
    ) -> anyhow::Result<bool> {
        let mut log = self.locked_log()?;
        if let Some(epoch) = epoch {
            let mut highest = OpenOptions::new()
                .create(true)
                .truncate(false)
                .read(true)
                .write(true)
                .open(self.directory.join(format!("epoch-{}-{partition}", self.group)))?;
            let mut text = String::new();
            highest.read_to_string(&mut text)?;
            if text.trim().parse().is_ok_and(|highest: u64| epoch < highest) {
                return Ok(false);
            }
            highest.rewind()?;
            highest.write_all(format!("{epoch}\n").as_bytes())?;
        }
        let (epoch, now) = (epoch.unwrap_or(0), now_ms());
        log.write_all(format!("{key} {number} {kind} {partition} {epoch} {now}\n").as_bytes())?;
        Ok(true)
    }

    /// All effects in the order they happened.
    pub(crate) fn effects(&self) -> anyhow::Result<Vec<Effect>> {
        let mut text = String::new();
        self.locked_log()?.read_to_string(&mut text)?;
        text.lines()
            .map(|line| {
                let mut words = line.split(' ');
                let mut word = || words.next().map(str::to_owned);
                let effect = (|| {
                    Some(Effect {
                        key: word()?,
                        number: word()?.parse().ok()?,
                        kind: word()?,
                        origin: format!("{} in epoch {}", word()?, word()?),
                        at_ms: word()?.parse().ok()?,
                    })
                })();
                effect.ok_or_else(|| anyhow::anyhow!("not an effect: {line:?}"))
            })
            .collect()
    }

    fn locked_log(&self) -> anyhow::Result<File> {
        let path = self.directory.join(format!("effects-{}", self.group));
        let log = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        log.lock()?;
        Ok(log)
    }
}
