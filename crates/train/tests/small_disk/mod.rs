//! A file system that fills up.

use std::path::PathBuf;

pub struct SmallDisk(pub PathBuf);

impl SmallDisk {
    /// So many MiB in memory; none where the user may not mount.
    pub fn mount(mib: usize) -> Option<Self> {
        let path = tempfile::tempdir().unwrap().keep();
        let done = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "none"])
            .arg(&path)
            .stderr(std::process::Stdio::null())
            .status();
        if done.is_ok_and(|s| s.success()) {
            return Some(SmallDisk(path));
        }
        std::fs::remove_dir(path).ok();
        None
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}
