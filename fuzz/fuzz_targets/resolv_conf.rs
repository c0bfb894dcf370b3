//! `resolv.conf`: whatever stands there, what is used of it is words, and reading it again says the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::dns::resolv::parse;

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let read = parse(&text);
    assert!(read.nameservers.iter().all(|n| !n.is_empty() && !n.contains(char::is_whitespace)));
    if let Some(search) = &read.search {
        let names = text.split_whitespace().map(str::to_lowercase);
        for name in names.clone().chain(names.map(|name| format!("a.{name}."))) {
            let inner = search.inner(&name);
            assert!(inner.is_none_or(|inner| inner.ends_with('.')
                && inner.len() < name.len()
                && name.starts_with(inner)));
        }
    }
    assert_eq!(parse(&text), read);
});
