//! `/etc/hosts` with the lines that `istioctl x workload entry configure` wrote for istiod.

use std::io;
use std::path::Path;

/// A line that would not be one of `/etc/hosts`, where it would spoil what the machine knows.
pub(super) fn odd(from: &str, content: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(content);
    let odd = text.lines().enumerate().filter_map(|(at, line)| {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let address = words.next()?;
        let why = if address.parse::<std::net::IpAddr>().is_err() {
            format!("{address:?} is no IP address")
        } else if words.next().is_none() {
            format!("no name follows {address}")
        } else {
            return None;
        };
        Some(format!("{from}:{}: {why}; a line is an address and names", at + 1))
    });
    odd.collect()
}

/// The machine's hosts with those of the folder. Whoever looks a name up takes the first line that has it: an older line loses
/// the names, and goes when it has no other.
///
/// # Errors
/// When the machine's cannot be read; that there are none is no error.
pub(super) fn merged(place: &Path, wanted: &[u8]) -> io::Result<Vec<u8>> {
    let now = match std::fs::read(place) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        other => text_of(&other?),
    };
    let wanted = text_of(wanted);
    let names = |line: &str| -> Vec<String> {
        let line = line.split('#').next().unwrap_or_default();
        line.split_whitespace().skip(1).map(str::to_owned).collect()
    };
    let new: Vec<&str> = wanted.lines().map(str::trim).filter(|line| !names(line).is_empty()).collect();
    let taken: Vec<String> = new.iter().flat_map(|line| names(line)).collect();
    let is_taken = |name: &String| taken.iter().any(|other| other.eq_ignore_ascii_case(name));
    let rest = |line: &str| {
        let theirs = names(line);
        if new.contains(&line) || !theirs.iter().any(is_taken) {
            return Some(line.to_owned());
        }
        let left: Vec<String> = theirs.into_iter().filter(|name| !is_taken(name)).collect();
        let address = line.split_whitespace().next().unwrap_or_default();
        let comment = line.split_once('#').map(|(_, comment)| format!(" #{comment}")).unwrap_or_default();
        (!left.is_empty()).then(|| format!("{address} {}{comment}", left.join(" ")))
    };
    let mut lines: Vec<String> = now.lines().filter_map(rest).collect();
    let missing = new.iter().filter(|line| !now.lines().any(|there| there == **line));
    lines.extend(missing.map(|line| (*line).to_owned()));
    let mut text = lines.join("\n");
    text.push('\n');
    Ok(bytes_of(&text))
}

// Of a comment in an older encoding each byte is kept: as a text it is a character that nobody writes.
const BYTES: u32 = 0x0010_ff00;

fn text_of(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().filter_map(|byte| char::from_u32(BYTES + u32::from(*byte))));
    }
    text
}

fn bytes_of(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for char in text.chars() {
        match u32::from(char).checked_sub(BYTES).and_then(|byte| u8::try_from(byte).ok()) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hosts_file_gains_the_new_line_and_loses_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("hosts");
        std::fs::write(&place, "127.0.0.1 localhost\n192.0.2.1 istiod.istio-system.svc\n").unwrap();
        let both = merged(&place, b"192.0.2.9 istiod.istio-system.svc\n").unwrap();
        assert_eq!(both, b"127.0.0.1 localhost\n192.0.2.9 istiod.istio-system.svc\n");
        std::fs::write(&place, &both).unwrap();
        assert_eq!(merged(&place, b"192.0.2.9 istiod.istio-system.svc\n").unwrap(), both);
        let old = "192.0.2.1  istiod.istio-system.svc istiod\tIstiod.Istio-System.svc # east\n::1 localhost # istiod\n";
        std::fs::write(&place, old).unwrap();
        assert_eq!(
            String::from_utf8(merged(&place, b"192.0.2.9 istiod.istio-system.svc\n").unwrap()).unwrap(),
            "192.0.2.1 istiod # east\n::1 localhost # istiod\n192.0.2.9 istiod.istio-system.svc\n"
        );
    }

    #[test]
    fn what_is_no_utf_8_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("hosts");
        std::fs::write(
            &place,
            b"127.0.0.1 localhost # f\xfcr alle, \xc3\xbc\n192.0.2.1 istiod x # \xff\xfe\n",
        )
        .unwrap();
        let merged = merged(&place, b"192.0.2.9 istiod\n").unwrap();
        assert_eq!(
            merged,
            b"127.0.0.1 localhost # f\xfcr alle, \xc3\xbc\n192.0.2.1 x # \xff\xfe\n192.0.2.9 istiod\n"
        );
    }

    #[test]
    fn a_line_that_is_none_of_a_hosts_file_is_named() {
        let told = odd("d/hosts", b"# by a tool\n192.0.2.9 istiod # up\n\nnot an ip line\nfd00::1\n");
        assert_eq!(
            told,
            [
                "d/hosts:4: \"not\" is no IP address; a line is an address and names",
                "d/hosts:5: no name follows fd00::1; a line is an address and names",
            ]
        );
    }
}
