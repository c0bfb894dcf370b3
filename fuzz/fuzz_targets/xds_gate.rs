//! The gate against a model: what passes is exactly the frames of the messages that may pass, in order and
//! byte for byte, wherever the chunks are cut; own requests put in between never stand inside a message.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::xds::Protocol;
use pilot_agent::testing::xds::frames::{Gate, Out, Verdict, frame_bytes};
use pilot_agent::testing::xds::rules::{Requests, Responses};
use pilot_agent::testing::xds::types;

#[derive(Debug, Arbitrary)]
struct Input {
    requests: bool,
    messages: Vec<(u8, u16)>,
    cuts: Vec<u16>,
    put: Vec<bool>,
}

const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const OWN: &[u8] = b"\0\0\0\0\x05OWN!!";

fn text(tag: u8, text: &str, into: &mut Vec<u8>) {
    into.push(tag << 3 | 2);
    into.push(text.len() as u8);
    into.extend_from_slice(text.as_bytes());
}

// A message of a type, with as much in it as asked for.
fn message(requests: bool, kind: u8, size: u16) -> (Vec<u8>, &'static str) {
    let type_url = [CDS, types::NAME_TABLE, types::LISTENER, types::HEALTH, "other"][usize::from(kind % 5)];
    let mut bytes = Vec::new();
    // A health report is judged when it is whole, and only one that is large goes on before.
    let size = if type_url == types::HEALTH { size / 4 } else { size };
    let filler = vec![b'x'; usize::from(size) * 2];
    if requests {
        bytes.push(3 << 3 | 2);
    } else {
        let mut any = Vec::new();
        text(1, type_url, &mut any);
        any.push(2 << 3 | 2);
        prost::encoding::encode_varint(filler.len() as u64, &mut any);
        any.extend_from_slice(&filler);
        bytes.push(2 << 3 | 2);
        prost::encoding::encode_varint(any.len() as u64, &mut bytes);
        bytes.extend_from_slice(&any);
    }
    if requests {
        prost::encoding::encode_varint(filler.len() as u64, &mut bytes);
        bytes.extend_from_slice(&filler);
    }
    text(4, type_url, &mut bytes);
    (bytes, type_url)
}

fuzz_target!(|input: Input| {
    let made: Vec<_> = input.messages.iter().take(20).map(|(k, s)| message(input.requests, *k, *s)).collect();
    let stream: Vec<u8> = made.iter().flat_map(|(m, _)| frame_bytes(m).to_vec()).collect();
    let mut listeners = false;
    let expected: Vec<u8> = made
        .iter()
        .filter(|(_, t)| {
            let passes = if input.requests {
                *t != types::HEALTH || listeners
            } else {
                types::for_envoy(t)
            };
            listeners |= *t == types::LISTENER;
            passes
        })
        .flat_map(|(m, _)| frame_bytes(m).to_vec())
        .collect();

    let mut requests = Gate::new(Requests { protocol: Protocol::Sotw, limit: 1 << 30, listeners_asked: false });
    let own = vec![types::NAME_TABLE];
    let mut responses = Gate::new(Responses { protocol: Protocol::Sotw, own, convert: false });
    let (mut rest, mut out, mut sent, mut ends) = (&stream[..], Vec::new(), Vec::new(), 0);
    let mut puts = 0;
    let mut cuts = input.cuts.iter().map(|c| usize::from(*c)).chain(std::iter::repeat(usize::MAX));
    let mut put = input.put.iter().copied();
    while !rest.is_empty() {
        let (piece, more) = rest.split_at(cuts.next().unwrap_or(1).clamp(1, rest.len()));
        rest = more;
        let piece = Bytes::copy_from_slice(piece);
        let pushed = if input.requests { requests.push(&piece, &mut out) } else { responses.push(&piece, &mut out) };
        pushed.expect("every message is sound");
        for item in out.drain(..) {
            match item {
                Out::Bytes(bytes) => sent.extend_from_slice(&bytes),
                Out::End(end) => {
                    ends += 1;
                    assert_ne!(end.verdict, Verdict::Undecided);
                    assert_eq!(end.body.is_some(), end.verdict == Verdict::Collect);
                }
            }
        }
        let between = if input.requests { requests.between() } else { responses.between() };
        if between && put.next().unwrap_or(false) {
            sent.extend_from_slice(OWN);
            puts += 1;
        }
    }
    assert_eq!(ends, made.len());
    // Take the frames apart again: ours stand between messages, and the rest is what was to pass.
    let (mut rest, mut passed, mut found) = (&sent[..], Vec::new(), 0);
    while !rest.is_empty() {
        let length = u32::from_be_bytes([rest[1], rest[2], rest[3], rest[4]]) as usize;
        let (frame, more) = rest.split_at(5 + length);
        rest = more;
        if frame == OWN { found += 1 } else { passed.extend_from_slice(frame) }
    }
    assert_eq!(found, puts);
    assert!(passed == expected);
});
