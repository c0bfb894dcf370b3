//! A disk of a few kilobytes that a test can fill.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A small file system, mounted until dropped.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts it at `path`, which is made.
    ///
    /// # Panics
    /// When it cannot be mounted: the test needs root, and never passes without having run.
    pub fn mount(path: &Path) -> Self {
        std::fs::create_dir_all(path).expect("our directory");
        let output = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64k,mode=0777", "tmpfs"])
            .arg(path)
            .output()
            .expect("mount can be run");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "a small disk cannot be mounted ({said}); its test needs root");
        Self(path.to_owned())
    }

    /// Takes all room that is left.
    pub fn fill(&self) {
        use std::io::Write;
        let mut file = std::fs::File::create(self.0.join("filler")).expect("a file fits");
        while file.write_all(&[0; 512]).is_ok() {}
    }

    /// Gives the room back.
    pub fn empty(&self) {
        std::fs::remove_file(self.0.join("filler")).expect("it was filled");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        // The agent's directory was dropped before and could not remove the place of the mount.
        let _ = std::fs::remove_dir(&self.0);
        let _ = self.0.parent().map(std::fs::remove_dir);
    }
}
