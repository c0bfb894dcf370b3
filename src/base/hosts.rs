//! The file of host names, for names that end with a dot.
//!
//! The C library looks there for what is written and nothing else, so the line of `istiod.istio-system.svc` does not lead
//! `istiod.istio-system.svc.` anywhere. The Go agent takes the dot for what it is, the mark of a whole name.

use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::Path;

/// Where it stands.
pub(super) const FILE: &str = "/etc/hosts";
/// More is not read of it.
const LONGEST: u64 = 1 << 20;

/// The addresses that `file` has for a name of several labels with a dot at its end; none for any other name.
pub(super) fn of_absolute(file: &Path, name: &str) -> Vec<IpAddr> {
    let Some(name) = name.strip_suffix('.').filter(|name| name.contains('.')) else { return Vec::new() };
    let mut bytes = Vec::new();
    if File::open(file).and_then(|file| file.take(LONGEST).read_to_end(&mut bytes)).is_err() {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(&bytes);
    text.lines().filter_map(|line| address(line, name)).collect()
}

fn address(line: &str, name: &str) -> Option<IpAddr> {
    let mut words = line.split('#').next()?.split_ascii_whitespace();
    let ip = words.next()?.parse().ok()?;
    words.any(|word| word.strip_suffix('.').unwrap_or(word).eq_ignore_ascii_case(name)).then_some(ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dot_at_the_end_is_no_part_of_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hosts");
        let text = "127.0.0.1 localhost\n10.0.0.1\tistiod.istio-system.SVC x # a.b\n::1 a.b. istiod.istio-system.svc\nno a.b\n#1.1.1.1 a.b\n";
        std::fs::write(&file, text).unwrap();
        let of = |name: &str| of_absolute(&file, name).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(of("Istiod.istio-system.svc."), ["10.0.0.1", "::1"]);
        assert_eq!(of("a.b."), ["::1"]);
        for other in ["istiod.istio-system.svc", "localhost.", "localhost", "x.", "c.d.", ".", ""] {
            assert!(of(other).is_empty(), "{other}");
        }
        assert!(of_absolute(&dir.path().join("none"), "a.b.").is_empty());
    }
}
