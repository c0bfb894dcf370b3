//! `resolv.conf`: whatever stands there, what is used of it is words, and reading it again says the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::dns::resolv::parse;

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let read = parse(&text);
    assert!(read.nameservers.iter().all(|n| !n.is_empty() && !n.contains(char::is_whitespace)));
    if let Some(search) = &read.search {
        assert!(!search.is_empty() && !search.starts_with('.') && !search.ends_with('.'));
    }
    assert_eq!(parse(&text), read);
});
