//! Headers, statuses and frames of gRPC, on our sockets and from upstream.
#![no_main]

use libfuzzer_sys::fuzz_target;

const NAMES: [&[u8]; 6] =
    [b"content-type", b"grpc-timeout", b"grpc-status", b"grpc-message", b"grpc-status-details-bin", b"x-bin"];

fuzz_target!(|input: (Vec<(u8, Vec<u8>)>, Vec<u8>)| {
    let (fields, body) = input;
    let named = |n: u8| NAMES[usize::from(n) % NAMES.len()];
    let mut all: Vec<(&[u8], &[u8])> = vec![(b"content-type", b"application/grpc")];
    all.extend(fields.iter().map(|(n, value)| (named(*n), value.as_slice())));
    pilot_agent::testing::net::fuzz::call(&all, &body);
});
