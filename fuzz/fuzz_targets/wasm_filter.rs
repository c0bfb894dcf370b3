//! Extension configs: any bytes are judged or refused; what is rewritten is a local file or a stand-in, can be
//! judged again, and is then left alone.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::wasm::filter::{Decision, judge};

fuzz_target!(|bytes: &[u8]| {
    let resource = Bytes::copy_from_slice(bytes);
    let Ok(Decision::Remote(filter)) = judge(&resource) else { return };
    for made in [filter.local("/data/module.wasm"), filter.replaced()] {
        let made = made.expect("what was judged can be rewritten");
        assert!(matches!(judge(&made), Ok(Decision::Untouched)));
    }
});
