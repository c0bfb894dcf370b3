//! The streaming scanner against prost: what prost decodes the scanner finds, at any split.
#![no_main]

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::xds::scan::{Facts, Malformed, Message, Scanner, TEXT};
use prost::Message as _;
use prost::encoding::{DecodeContext, WireType, decode_key, skip_field};

fn scan(message: Message, bytes: &[u8], step: usize) -> Result<Facts, Malformed> {
    let mut scanner = Scanner::new(message, bytes.len() as u64);
    for piece in bytes.chunks(step) {
        scanner.push(piece)?;
    }
    scanner.finish()
}

fn same(found: &str, real: &str) {
    if real.len() <= TEXT {
        assert_eq!(found, real);
    }
}

// prost reads an entry of a map (field 5) as one whatever its wire type says, and goes on behind what it took for it.
fn versions_are_messages(mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        let Ok((number, wire)) = decode_key(&mut bytes) else { return false };
        if number == 5 && wire != WireType::LengthDelimited {
            return false;
        }
        if skip_field(wire, number, &mut bytes, DecodeContext::default()).is_err() {
            return false;
        }
    }
    true
}

fuzz_target!(|data: (u8, u8, &[u8])| {
    let (kind, step, bytes) = data;
    let message = [Message::SotwRequest, Message::DeltaRequest, Message::SotwResponse, Message::DeltaResponse]
        [usize::from(kind % 4)];
    let whole = scan(message, bytes, usize::MAX);
    assert_eq!(whole, scan(message, bytes, usize::from(step) + 1));
    // As `()` every field is an unknown one and its wire type counts; prost takes a map's entries of any.
    if <()>::decode(bytes).is_err() {
        return;
    }
    let facts = whole.as_ref().ok();
    let own = || facts.expect("prost takes it").type_url.as_deref().unwrap_or_default();
    let found = || facts.expect("prost takes it");
    match message {
        Message::SotwRequest => {
            let Ok(real) = DiscoveryRequest::decode(bytes) else { return };
            same(own(), &real.type_url);
            same(&found().nonce, &real.response_nonce);
            assert_eq!(found().count, real.resource_names.len() as u64);
            assert_eq!(found().rejected, real.error_detail.is_some());
            assert_eq!(found().error_code, real.error_detail.map_or(0, |e| e.code));
        }
        Message::DeltaRequest => {
            if !versions_are_messages(bytes) {
                return;
            }
            let Ok(real) = DeltaDiscoveryRequest::decode(bytes) else { return };
            same(own(), &real.type_url);
            same(&found().nonce, &real.response_nonce);
            assert_eq!(found().count, real.resource_names_subscribe.len() as u64);
            assert_eq!(found().rejected, real.error_detail.is_some());
        }
        Message::SotwResponse => {
            let Ok(real) = DiscoveryResponse::decode(bytes) else { return };
            same(own(), &real.type_url);
            same(&found().version, &real.version_info);
            same(&found().nonce, &real.nonce);
            assert_eq!(found().count, real.resources.len() as u64);
        }
        _ => {
            let Ok(real) = DeltaDiscoveryResponse::decode(bytes) else { return };
            same(own(), &real.type_url);
            same(&found().nonce, &real.nonce);
            assert_eq!(found().count, real.resources.len() as u64);
            assert_eq!(found().removed, real.removed_resources.len() as u64);
        }
    }
});
