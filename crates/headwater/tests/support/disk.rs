//! A small file system that can be filled.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use headwater_testkit::unique;

/// A file system of 6 MiB in memory, which only root can mount.
pub(crate) struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts it on a directory; `None` without the rights to do so.
    pub(crate) fn mount(path: &Path) -> Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root can mount a small file system");
            return Ok(None);
        }
        let name = unique("headwater");
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=6m", &name])
            .arg(path)
            .output()?;
        ensure!(mount.status.success(), "{mount:?}");
        Ok(Some(Self(path.to_owned())))
    }

    /// Fills the free space.
    pub(crate) fn fill(&self) -> Result<()> {
        let mut filler = std::fs::File::create(self.0.join("filler"))?;
        let page = [0_u8; 4096];
        while std::io::Write::write_all(&mut filler, &page).is_ok() {}
        Ok(())
    }

    pub(crate) fn free(&self) -> Result<()> {
        Ok(std::fs::remove_file(self.0.join("filler"))?)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
