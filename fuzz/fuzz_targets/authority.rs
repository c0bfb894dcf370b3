//! The authority shim: never panics, does not depend on how bytes are split, and passes unchanged whatever
//! has no authority to rewrite.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::net::authority_rewriter::AuthorityRewriter;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn through(input: &[u8], step: usize) -> Result<Vec<u8>, std::io::ErrorKind> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let write = async {
            for piece in input.chunks(step) {
                if client.write_all(piece).await.is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
            drop(client);
        };
        let read = async {
            let mut out = Vec::new();
            AuthorityRewriter::new(server).read_to_end(&mut out).await.map(|_| out).map_err(|e| e.kind())
        };
        tokio::join!(write, read).1
    })
}

// The fuzzer's bytes as frames, so that it need not find the lengths by itself.
fuzz_target!(|data: (u8, Vec<(u8, u8, u8, Vec<u8>)>)| {
    let (step, frames) = data;
    let mut input = PREFACE.to_vec();
    for (kind, flags, stream, payload) in &frames {
        input.extend_from_slice(&(payload.len() as u32).to_be_bytes()[1..]);
        input.extend_from_slice(&[kind % 11, *flags, 0, 0, 0, stream % 8]);
        input.extend_from_slice(payload);
    }
    let whole = through(&input, input.len());
    assert_eq!(whole, through(&input, usize::from(step) + 1));
    if frames.iter().all(|(kind, ..)| kind % 11 != 1) {
        assert_eq!(whole.as_deref(), Ok(&input[..]));
    }
});
