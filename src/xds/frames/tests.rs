use proptest::prelude::*;
use prost::Message as _;

use super::*;
use crate::xds::protocol::Protocol;
use crate::xds::rules::{Requests, Responses};
use crate::xds::types;
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use envoy_types::pb::google::protobuf::Any;

const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const FOREIGN: &str = "type.googleapis.com/istio.workload.Address";

fn responses() -> Gate<Responses> {
    Gate::new(Responses { protocol: Protocol::Sotw, own: vec![types::NAME_TABLE], convert: false })
}

fn response(type_url: &str, inner: &str, sizes: &[usize]) -> Vec<u8> {
    let any = |size: &usize| Any { type_url: inner.to_owned(), value: vec![9; *size] };
    let message = DiscoveryResponse {
        version_info: "v".to_owned(),
        resources: sizes.iter().map(any).collect(),
        type_url: type_url.to_owned(),
        nonce: "n".to_owned(),
        ..Default::default()
    };
    message.encode_to_vec()
}

fn framed(message: &[u8]) -> Vec<u8> {
    frame_bytes(message).to_vec()
}

fn cut(bytes: &[u8], sizes: &[usize]) -> Vec<Bytes> {
    let mut rest = Bytes::copy_from_slice(bytes);
    let mut chunks: Vec<Bytes> = sizes.iter().map(|s| rest.split_to((*s).min(rest.len()))).collect();
    chunks.push(rest);
    chunks
}

fn run<R: Rules>(gate: &mut Gate<R>, chunks: &[Bytes]) -> Result<(Vec<u8>, Vec<End>), Error> {
    let (mut bytes, mut ends, mut out) = (Vec::new(), Vec::new(), Vec::new());
    for chunk in chunks {
        gate.push(chunk, &mut out)?;
        for item in out.drain(..) {
            match item {
                Out::Bytes(b) => bytes.extend_from_slice(&b),
                Out::End(end) => ends.push(end),
            }
        }
    }
    Ok((bytes, ends))
}

#[derive(Debug, Clone)]
struct Case {
    message: Vec<u8>,
    verdict: Verdict,
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = prop::collection::vec(0usize..40_000, 0..4);
    prop_oneof![
        4 => sizes.clone().prop_map(|s| Case { message: response(CDS, CDS, &s), verdict: Verdict::Pass }),
        1 => sizes.clone().prop_map(|s| Case { message: response(FOREIGN, FOREIGN, &s), verdict: Verdict::Drop }),
        2 => sizes.prop_map(|s| Case {
            message: response(types::NAME_TABLE, types::NAME_TABLE, &s),
            verdict: Verdict::Collect,
        }),
        // Small enough to be judged by its own type: a foreign body does not mislead.
        1 => (0usize..1000).prop_map(|s| Case {
            message: response(types::NAME_TABLE, CDS, &[s]),
            verdict: Verdict::Collect,
        }),
        1 => Just(Case { message: Vec::new(), verdict: Verdict::Drop }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    // Nothing lost, reordered, duplicated or changed, wherever the chunks are cut.
    #[test]
    fn passing_bytes_are_the_same_at_every_split(
        cases in prop::collection::vec(case(), 0..8),
        sizes in prop::collection::vec(prop_oneof![0usize..8, 0usize..20_000], 0..60),
    ) {
        let stream: Vec<u8> = cases.iter().flat_map(|c| framed(&c.message)).collect();
        let mut gate = responses();
        let (bytes, ends) = run(&mut gate, &cut(&stream, &sizes)).unwrap();
        let passing = cases.iter().filter(|c| c.verdict == Verdict::Pass);
        let expected: Vec<u8> = passing.flat_map(|c| framed(&c.message)).collect();
        prop_assert!(bytes == expected);
        prop_assert_eq!(ends.len(), cases.len());
        for (end, case) in ends.iter().zip(&cases) {
            prop_assert_eq!(end.verdict, case.verdict);
            prop_assert_eq!(end.length, case.message.len() as u64);
            let body = (case.verdict == Verdict::Collect).then(|| Bytes::from(case.message.clone()));
            prop_assert!(end.body == body);
        }
        prop_assert!(gate.whole() && gate.between());
    }
}

#[test]
fn a_large_response_goes_on_before_it_is_whole() {
    let stream = framed(&response(CDS, CDS, &[10 << 20]));
    let mut gate = responses();
    let mut out = Vec::new();
    let mut passed = 0;
    let mut held_most = 0;
    for (n, chunk) in stream.chunks(16_384).enumerate() {
        gate.push(&Bytes::copy_from_slice(chunk), &mut out).unwrap();
        passed += out.drain(..).map(|o| if let Out::Bytes(b) = o { b.len() } else { 0 }).sum::<usize>();
        held_most = held_most.max((n + 1) * 16_384 - passed.min((n + 1) * 16_384));
    }
    assert_eq!(passed, stream.len());
    assert!(held_most <= 3 * 16_384, "{held_most} bytes were held");
}

#[test]
fn a_foreign_first_resource_is_held_until_the_own_type_is_known() {
    let message = response(CDS, FOREIGN, &[100_000]);
    let stream = framed(&message);
    let (bytes, ends) = run(&mut responses(), &cut(&stream, &[30_000, 30_000])).unwrap();
    assert_eq!(bytes, stream);
    assert_eq!(ends[0].verdict, Verdict::Pass);
    let (bytes, ends) =
        run(&mut responses(), &cut(&framed(&response(CDS, types::NAME_TABLE, &[100_000])), &[30_000]))
            .unwrap();
    assert_eq!(ends[0].verdict, Verdict::Pass, "collected by the hint, and passed by its own type");
    assert_eq!(bytes.len(), ends[0].length as usize + HEADER);
}

#[test]
fn compression_flags_and_bad_bytes_end_the_stream() {
    let mut out = Vec::new();
    let mut push = |bytes: &'static [u8]| responses().push(&Bytes::from_static(bytes), &mut out);
    assert_eq!(push(&[1, 0, 0, 0, 1, 0]), Err(Error::Compressed));
    assert_eq!(push(&[9, 0, 0, 0, 1, 0]), Err(Error::Flag(9)));
    assert!(matches!(push(&[0, 0, 0, 0, 2, 0x0a, 0x05]), Err(Error::Malformed(_))));
}

#[test]
fn of_what_is_none_nothing_goes_on_and_all_that_came_before_does() {
    for end in [&b"\xff"[..], b"\x2a\x05n", b"\x0b"] {
        let good = framed(&response(CDS, CDS, &[10]));
        let bad = framed(&[&response(CDS, CDS, &[10])[..], end].concat());
        let (mut gate, mut out) = (responses(), Vec::new());
        let refused = gate.push(&Bytes::from([&good[..], &bad].concat()), &mut out);
        assert!(matches!(refused, Err(Error::Malformed(_))), "{refused:?}");
        let passed = out.iter().filter_map(|o| if let Out::Bytes(b) = o { Some(&b[..]) } else { None });
        assert_eq!(passed.collect::<Vec<_>>().concat(), good, "{end:?}");
        let mut requests =
            Gate::new(Requests { protocol: Protocol::Sotw, limit: 4 << 20, listeners_asked: false });
        out.clear();
        assert!(matches!(requests.push(&Bytes::from(bad), &mut out), Err(Error::Malformed(_))));
        assert_eq!(out, []);
    }
}

#[test]
fn a_request_above_the_limit_is_named_wherever_its_type_stands() {
    let rules = || Requests { protocol: Protocol::Sotw, limit: 1000, listeners_asked: false };
    let names = vec!["n".repeat(100); 50];
    let large = DiscoveryRequest { resource_names: names, type_url: CDS.to_owned(), ..Default::default() };
    let stream = framed(&large.encode_to_vec());
    let mut gate = Gate::new(rules());
    let error = run(&mut gate, &cut(&stream, &[700, 700, 700])).unwrap_err();
    let Error::TooLarge { length, limit, type_url } = error else { panic!("{error}") };
    assert_eq!((length as usize, limit, type_url.as_str()), (stream.len() - HEADER, 1000, CDS));
}

#[test]
fn health_is_dropped_until_listeners_are_asked_for() {
    let request =
        |t: &str| framed(&DiscoveryRequest { type_url: t.to_owned(), ..Default::default() }.encode_to_vec());
    let mut gate = Gate::new(Requests { protocol: Protocol::Sotw, limit: 1 << 20, listeners_asked: false });
    let stream = [request(types::HEALTH), request(types::LISTENER), request(types::HEALTH)].concat();
    let (bytes, ends) = run(&mut gate, &cut(&stream, &[])).unwrap();
    assert_eq!(bytes, [request(types::LISTENER), request(types::HEALTH)].concat());
    assert_eq!(
        ends.iter().map(|e| e.verdict).collect::<Vec<_>>(),
        [Verdict::Drop, Verdict::Pass, Verdict::Pass]
    );
}

#[test]
fn a_name_table_may_come_a_byte_at_a_time_but_not_be_too_large() {
    let own = |size| framed(&response(types::NAME_TABLE, types::NAME_TABLE, &[size]));
    let stream = own(100_000);
    let mut gate = responses();
    let mut out = Vec::new();
    for byte in &stream {
        gate.push(&Bytes::copy_from_slice(&[*byte]), &mut out).unwrap();
    }
    let [Out::End(end)] = &out[..] else { panic!("{} pieces", out.len()) };
    assert_eq!(end.body.as_ref().unwrap(), &stream[HEADER..]);
    let stream = own(crate::xds::rules::COLLECT);
    for chunk in stream.chunks(16_384).rev().skip(1).rev().collect::<Vec<_>>() {
        gate.push(&Bytes::copy_from_slice(chunk), &mut out).unwrap();
        let held = gate.current.as_ref().unwrap().held.all().concat().len();
        assert!(held <= 32_768, "{held} bytes are held of what cannot be used");
    }
    gate.push(&Bytes::copy_from_slice(stream.chunks(16_384).last().unwrap()), &mut out).unwrap();
    let Some(Out::End(end)) = out.last() else { panic!() };
    assert_eq!((end.verdict, &end.body), (Verdict::Collect, &None));
}
