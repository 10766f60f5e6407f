//! Processor time of a process, as the kernel counts it.

use anyhow::{Context, Result};

/// The kernel counts processor time in hundredths of a second, on every Linux there is.
const TICKS_PER_SECOND: f64 = 100.0;

/// The processor time of a process so far, its own and the kernel's for it; `None` is the process itself.
pub fn processor_seconds(process: Option<u32>) -> Result<f64> {
    let process = process.map_or_else(|| "self".to_owned(), |id| id.to_string());
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name may hold anything, so what follows it is counted from its end.
    let (_, after_name) = stat.rsplit_once(')').context("no process name")?;
    let ticks = |field: usize| -> Result<f64> {
        Ok(after_name.split_whitespace().nth(field).context("too few fields")?.parse()?)
    };
    Ok((ticks(11)? + ticks(12)?) / TICKS_PER_SECOND)
}
