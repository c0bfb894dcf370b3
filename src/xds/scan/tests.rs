use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use proptest::prelude::*;
use proptest::sample::Index;
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint};

use super::*;

fn scan(message: Message, bytes: &[u8], cuts: &[usize]) -> Result<Facts, Malformed> {
    let mut scanner = Scanner::new(message, bytes.len() as u64);
    let mut cuts: Vec<usize> = cuts.iter().map(|c| c % (bytes.len() + 1)).collect();
    cuts.sort_unstable();
    let mut from = 0;
    for to in cuts.into_iter().chain([bytes.len()]) {
        scanner.push(&bytes[from..to])?;
        from = to;
    }
    scanner.finish()
}

fn delimited(tag: u32, body: &[u8]) -> Vec<u8> {
    let mut field = Vec::new();
    encode_key(tag, WireType::LengthDelimited, &mut field);
    encode_varint(body.len() as u64, &mut field);
    field.extend_from_slice(body);
    field
}

fn varint(tag: u32, value: u64) -> Vec<u8> {
    let mut field = Vec::new();
    encode_key(tag, WireType::Varint, &mut field);
    encode_varint(value, &mut field);
    field
}

fn text() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![Just(Vec::new()), "[a-zäß./]{0,20}".prop_map(String::into_bytes), Just(vec![b'x'; TEXT + 3])]
}

// One field that may stand in any of the messages: known ones with sound content, and unknown ones of
// every wire type.
fn field() -> impl Strategy<Value = Vec<u8>> {
    let body = || {
        let parts = (text(), prop::collection::vec(any::<u8>(), 0..300));
        parts.prop_map(|(t, v)| [delimited(1, &t), delimited(2, &v)].concat())
    };
    let resource = (text(), body(), any::<bool>()).prop_map(|(name, body, there)| {
        let body = if there { delimited(2, &body) } else { Vec::new() };
        [delimited(3, &name), body, delimited(1, b"7")].concat()
    });
    let status = (any::<i32>(), text())
        .prop_map(|(code, text)| [varint(1, i64::from(code) as u64), delimited(2, &text)].concat());
    let group = |inner: Vec<u8>| {
        let mut field = Vec::new();
        encode_key(77, WireType::StartGroup, &mut field);
        field.extend(inner);
        encode_key(77, WireType::EndGroup, &mut field);
        field
    };
    prop_oneof![
        // Marked, to be numbered by the message they go into.
        body().prop_map(|b| delimited(1000, &b)),
        resource.prop_map(|r| delimited(1001, &r)),
        text().prop_map(|t| delimited(1002, &t)),
        text().prop_map(|t| delimited(1003, &t)),
        text().prop_map(|t| delimited(1004, &t)),
        text().prop_map(|t| delimited(1005, &t)),
        status.prop_map(|s| delimited(1006, &s)),
        (200u32..3000, prop::collection::vec(any::<u8>(), 0..50)).prop_map(|(t, b)| delimited(t + 2000, &b)),
        (5000u32..6000, any::<u64>()).prop_map(|(t, v)| varint(t, v)),
        any::<u64>().prop_map(move |v| group(varint(9, v))),
    ]
}

// Gives the marked fields the numbers they have in `message`, and drops those it has not.
fn numbered(message: Message, fields: &[Vec<u8>]) -> Vec<u8> {
    // sotw resource, delta resource, type, version, nonce, names, status
    let numbers: [u32; 7] = match message {
        Message::SotwRequest => [0, 0, 4, 1, 5, 3, 6],
        Message::DeltaRequest => [0, 0, 2, 0, 6, 3, 7],
        Message::SotwResponse => [2, 0, 4, 1, 5, 0, 0],
        Message::DeltaResponse => [0, 2, 4, 1, 5, 6, 0],
        Message::Other => [0; 7],
    };
    let mut bytes = Vec::new();
    for field in fields {
        let mut rest = &field[..];
        let (tag, _) = prost::encoding::decode_key(&mut rest).unwrap();
        match tag.checked_sub(1000).and_then(|at| numbers.get(at as usize)) {
            Some(0) => {}
            Some(number) => {
                encode_key(*number, WireType::LengthDelimited, &mut bytes);
                bytes.extend_from_slice(rest);
            }
            None => bytes.extend_from_slice(field),
        }
    }
    bytes
}

fn kept(text: &str) -> &str {
    let mut end = text.len().min(TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn own(facts: &Facts) -> &str {
    facts.type_url.as_deref().unwrap_or_default()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn it_finds_what_prost_finds(fields in prop::collection::vec(field(), 0..12),
                                 cuts in prop::collection::vec(any::<usize>(), 0..20)) {
        let bytes = numbered(Message::SotwResponse, &fields);
        let facts = scan(Message::SotwResponse, &bytes, &cuts).unwrap();
        let real = DiscoveryResponse::decode(&bytes[..]).unwrap();
        prop_assert_eq!((own(&facts), &*facts.version, &*facts.nonce, facts.count),
            (kept(&real.type_url), kept(&real.version_info), kept(&real.nonce), real.resources.len() as u64));
        let hint = real.resources.iter().find(|r| !r.type_url.is_empty()).map(|r| kept(&r.type_url));
        prop_assert_eq!(facts.hint.as_deref(), hint);

        let bytes = numbered(Message::DeltaResponse, &fields);
        let facts = scan(Message::DeltaResponse, &bytes, &cuts).unwrap();
        let real = DeltaDiscoveryResponse::decode(&bytes[..]).unwrap();
        prop_assert_eq!((own(&facts), &*facts.version, &*facts.nonce, facts.count, facts.removed),
            (kept(&real.type_url), kept(&real.system_version_info), kept(&real.nonce),
             real.resources.len() as u64, real.removed_resources.len() as u64));
        let first = real.resources.iter().filter_map(|r| r.resource.as_ref()).find(|r| !r.type_url.is_empty());
        prop_assert_eq!(facts.hint.as_deref(), first.map(|r| kept(&r.type_url)));

        let bytes = numbered(Message::SotwRequest, &fields);
        let facts = scan(Message::SotwRequest, &bytes, &cuts).unwrap();
        let real = DiscoveryRequest::decode(&bytes[..]).unwrap();
        prop_assert_eq!((own(&facts), &*facts.version, &*facts.nonce, facts.count, facts.rejected),
            (kept(&real.type_url), kept(&real.version_info), kept(&real.response_nonce),
             real.resource_names.len() as u64, real.error_detail.is_some()));
        let detail = real.error_detail.unwrap_or_default();
        prop_assert_eq!((facts.error_code, &*facts.error_message), (detail.code, kept(&detail.message)));

        let bytes = numbered(Message::DeltaRequest, &fields);
        let facts = scan(Message::DeltaRequest, &bytes, &cuts).unwrap();
        let real = DeltaDiscoveryRequest::decode(&bytes[..]).unwrap();
        prop_assert_eq!((own(&facts), &*facts.nonce, facts.count, facts.rejected),
            (kept(&real.type_url), kept(&real.response_nonce),
             real.resource_names_subscribe.len() as u64, real.error_detail.is_some()));
    }

    #[test]
    fn what_prost_takes_it_takes_and_splits_change_nothing(
        fields in prop::collection::vec(field(), 0..6),
        flips in prop::collection::vec((any::<Index>(), any::<u8>()), 0..4),
        cuts in prop::collection::vec(any::<usize>(), 0..20),
    ) {
        for message in [Message::SotwResponse, Message::DeltaResponse, Message::SotwRequest, Message::DeltaRequest] {
            let mut bytes = numbered(message, &fields);
            if !bytes.is_empty() {
                for (at, to) in &flips {
                    let at = at.index(bytes.len());
                    bytes[at] = *to;
                }
            }
            let whole = scan(message, &bytes, &[]);
            prop_assert_eq!(&whole, &scan(message, &bytes, &cuts));
            // As `()` every field is an unknown one and its wire type counts; prost does not look at that of
            // a map's entries, so it alone would take bytes that no other decoder takes.
            let sound = <()>::decode(&bytes[..]).is_ok();
            let real = match message {
                Message::SotwResponse => DiscoveryResponse::decode(&bytes[..]).is_ok(),
                Message::DeltaResponse => DeltaDiscoveryResponse::decode(&bytes[..]).is_ok(),
                Message::SotwRequest => DiscoveryRequest::decode(&bytes[..]).is_ok(),
                _ => DeltaDiscoveryRequest::decode(&bytes[..]).is_ok(),
            };
            prop_assert!(!(sound && real) || whole.is_ok(), "{:?}", whole);
        }
    }
}

#[test]
fn the_hint_comes_with_the_first_bytes_of_a_large_response() {
    let any = [delimited(1, b"type"), delimited(2, &vec![0; 1 << 20])].concat();
    let bytes = [delimited(1, b"v"), delimited(2, &any), delimited(4, b"type")].concat();
    let mut scanner = Scanner::new(Message::SotwResponse, bytes.len() as u64);
    scanner.push(&bytes[..100]).unwrap();
    assert_eq!(scanner.facts().hint.as_deref(), Some("type"));
    assert_eq!(scanner.facts().type_url, None);
}

#[test]
fn long_texts_are_cut_at_a_character_and_few_names_are_kept() {
    let long = [&[b'x'; TEXT - 1][..], "é".as_bytes()].concat();
    let facts = scan(Message::SotwResponse, &delimited(1, &long), &[]).unwrap();
    assert_eq!(facts.version, "x".repeat(TEXT - 1));
    for (text, end) in [([b'x'; TEXT - 1].to_vec(), 0xff), (Vec::new(), 0xc3)] {
        let bytes = delimited(1, &[&text[..], &[end]].concat());
        assert_eq!(scan(Message::SotwResponse, &bytes, &[]), Err(Malformed::Utf8), "cut by the sender");
    }
    let names = delimited(3, "ä".repeat(300).as_bytes()).repeat(NAMES + 1);
    let facts = scan(Message::SotwRequest, &names, &[]).unwrap();
    assert_eq!((facts.count, facts.names), (NAMES as u64 + 1, vec!["ä".repeat(256); NAMES]));
}

#[test]
fn a_request_is_bare_where_nothing_is_known() {
    assert!(Facts::default().is_bare());
    for facts in [
        Facts { version: "1".to_owned(), ..Facts::default() },
        Facts { nonce: "1".to_owned(), ..Facts::default() },
        Facts { known: 1, ..Facts::default() },
        Facts { rejected: true, ..Facts::default() },
    ] {
        assert!(!facts.is_bare(), "{facts:?}");
    }
}

#[test]
fn nonsense_is_refused_and_its_reason_named() {
    let whole = |bytes: &[u8]| scan(Message::SotwResponse, bytes, &[]).unwrap_err();
    assert_eq!(whole(&[0xff; 11]), Malformed::Varint);
    assert_eq!(whole(&[0x00, 0x01]), Malformed::Tag);
    assert_eq!(whole(&[0x0f]), Malformed::Tag);
    assert_eq!(whole(&[0x0a, 0x05, b'a']), Malformed::Length);
    // Fewer bytes than the frame has said: between two fields, and inside one.
    for cut in [&[0x0a, 1, b'a'][..], &[0x0a, 1]] {
        let mut scanner = Scanner::new(Message::SotwResponse, 4);
        scanner.push(cut).unwrap();
        assert_eq!(scanner.finish().unwrap_err(), Malformed::Length);
    }
    assert_eq!(whole(&[0x0a]), Malformed::Length);
    assert_eq!(whole(&[0x0c]), Malformed::Group);
    assert_eq!(whole(&[0x0b]), Malformed::Group);
    assert_eq!(whole(&[0x0a, 0x01, 0xff]), Malformed::Utf8);
    assert_eq!(whole(&[0x12, 0x02, 0x0a, 0x05]), Malformed::Length, "an inner field reaches out");
    // ... though there are bytes behind it: a text, a number of a fixed size, and one that is not.
    for reaching in [
        &[0x12, 3, 0x0a, 2, b'a', b'b'][..],
        &[0x12, 2, 0x0d, 0, 0, 0, 0],
        &[0x12, 1, 0x08, 1],
        &[0x12, 1, 0x88, 1, 1],
    ] {
        assert_eq!(whole(reaching), Malformed::Length, "{reaching:?}");
    }
    let nested = |depth: usize| [[0x0b].repeat(depth), [0x0c].repeat(depth)].concat();
    assert!(scan(Message::SotwResponse, &nested(GROUPS), &[]).is_ok());
    assert_eq!(whole(&nested(GROUPS + 1)), Malformed::Group);
}
