//! The kernel's text files, parts of which other processes choose: names, arguments, control groups.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::envoy::kernel;

fuzz_target!(|input: (u16, &[u8])| {
    let (port, bytes) = input;
    let text = String::from_utf8_lossy(bytes);
    let _ = (kernel::parent(&text), kernel::oom_kills(&text), kernel::bound_inode(&text, port, "0A"));
    assert!(!kernel::control_group(&text).contains('\n'));
    let _ = kernel::envoys_config(bytes);
    // Whatever a process calls itself, its parent is the one the kernel names.
    let name: String = text.chars().filter(|c| *c != '\0').collect();
    assert_eq!(kernel::parent(&format!("7 ({name}) S 42 7 7 0 -1")), Some(42));
});
