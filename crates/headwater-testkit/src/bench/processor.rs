//! CPU time of a process as counted by the kernel.

use anyhow::{Context, Result};

/// Linux counts CPU time in ticks of 10 ms.
const TICKS_PER_SECOND: f64 = 100.0;

/// User and system CPU time of a process so far; `None` means this process.
pub fn processor_seconds(process: Option<u32>) -> Result<f64> {
    let process = process.map_or_else(|| "self".to_owned(), |id| id.to_string());
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name may contain any character, so fields are counted from its end.
    let (_, after_name) = stat.rsplit_once(')').context("no process name")?;
    let ticks = |field: usize| -> Result<f64> {
        Ok(after_name.split_whitespace().nth(field).context("too few fields")?.parse()?)
    };
    Ok((ticks(11)? + ticks(12)?) / TICKS_PER_SECOND)
}
