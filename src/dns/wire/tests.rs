use super::*;

fn query(name: &str, qtype: u16) -> Vec<u8> {
    let mut out = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    out.extend(encode(name).unwrap());
    out.push(0);
    out.extend(qtype.to_be_bytes());
    out.extend([0, 1]);
    out
}

fn asked(message: &[u8]) -> Query {
    match screen(message) {
        Screened::Ask(query) => query,
        other => panic!("{other:?}"),
    }
}

#[test]
fn sixty_four_addresses_are_cut_to_what_512_bytes_hold() {
    let message = query("Host.Example.com", A);
    let q = asked(&message);
    assert_eq!(q.host(), "host.example.com.");
    let record = |n| Record { owner: q.owner().to_vec(), data: Data::Address(IpAddr::from([10, 0, 0, n])) };
    let records: Vec<_> = (0..64).map(record).collect();
    let reply = q.reply(&message, Rcode::NoError, &records, q.udp_limit());
    assert!(well_formed(&reply) && reply.len() <= 512);
    assert_eq!(reply[2] & 0x02, 0x02);
    // 512 less 34 of header and question, 16 for each record whose owner points at the question.
    assert_eq!(u16_at(&reply, 6), Some(29));
    let whole = q.reply(&message, Rcode::NoError, &records, 65535);
    assert_eq!((u16_at(&whole, 6), whole[2] & 0x02), (Some(64), 0));
    assert!(!well_formed(&whole[..whole.len() - 1]));
}

#[test]
fn a_huge_answer_is_cut_at_what_a_datagram_holds() {
    let mut message = query("host.example.com", A);
    message[11] = 1;
    // OPT: the root, its type, the size, no extended code, no data.
    message.extend([0, 0, 41, 0xff, 0xff, 0, 0, 0, 0, 0, 0]);
    let q = asked(&message);
    assert_eq!(q.udp_limit(), UDP_MAX);
    let record = Record { owner: q.owner().to_vec(), data: Data::Address(IpAddr::from([10, 0, 0, 1])) };
    let reply = q.reply(&message, Rcode::NoError, &vec![record; 5000], q.udp_limit());
    assert!(reply.len() <= UDP_MAX && reply.len() > UDP_MAX - 32, "{}", reply.len());
    assert_eq!(reply[2] & 0x02, 0x02, "marked as cut");
}

#[test]
fn what_was_announced_and_never_came_is_not_missed() {
    let good = query("a.b", A);
    assert!(matches!(mended(&good), Cow::Borrowed(_)));
    let more = |counts: [u8; 3]| {
        let mut message = good.clone();
        (message[7], message[9], message[11]) = (counts[0], counts[1], counts[2]);
        message
    };
    assert_eq!(mended(&more([1, 1, 2])), good, "no record is there");
    assert_eq!(asked(&mended(&more([0, 0, 1]))).host(), "a.b.");
    // OPT: the root, its type, the size, no extended code, no data.
    let opt = [0, 0, 41, 4, 0xd0, 0, 0, 0, 0, 0, 0];
    let twice = [more([0, 0, 2]), opt.to_vec()].concat();
    let once = [more([0, 0, 1]), opt.to_vec()].concat();
    assert_eq!(mended(&twice), once);
    assert_eq!(asked(&mended(&twice)).udp_limit(), 1232);
    let name = good.len() - 4;
    for (length, rest) in [(name, [0, 0, 0, 0]), (name + 2, [0, 1, 0, 0])] {
        assert_eq!(mended(&good[..length]), [&good[..name], &rest[..]].concat());
    }
    // Only among the last records it says how much there is room for.
    assert_eq!(asked(&[more([1, 0, 0]), opt.to_vec()].concat()).udp_limit(), UDP_MIN);
    for bad in [&good[..name - 1], &good[..name + 1], &good[..name + 3], &twice[..twice.len() - 1]] {
        assert!(matches!(mended(bad), Cow::Borrowed(_)), "{bad:?}");
        assert!(matches!(screen(bad), Screened::Refuse(_)), "{bad:?}");
    }
    match screen(&good[..HEADER]) {
        Screened::Refuse(reply) => assert_eq!(reply, [0xab, 0xcd, 0x81, 5, 0, 0, 0, 0, 0, 0, 0, 0]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_reply_that_ends_early_is_one_all_the_same() {
    let mut reply = query("a.b", A);
    (reply[2], reply[3], reply[7]) = (0x81, 0x85, 2);
    let bare = [&reply[..4], &[0; 8]].concat();
    assert_eq!(mended_reply(&reply[..HEADER]), bare, "a header that announces a question and records");
    assert!(matches!(mended_reply(&bare), Cow::Borrowed(_)));
    let record = b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x0a\0\0\x01";
    let mut whole = [&reply[..], record].concat();
    assert!(!well_formed(&whole));
    assert!(!well_formed(&mended_reply(&whole[..whole.len() - 1])), "half a record is none");
    let mended = mended_reply(&whole).into_owned();
    whole[7] = 1;
    assert_eq!(mended, whole);
    assert!(well_formed(&whole) && matches!(mended_reply(&whole), Cow::Borrowed(_)));
}

#[test]
fn what_is_no_query_is_ignored_or_refused() {
    let good = query("a.b", A);
    assert!(matches!(screen(&good[..11]), Screened::Ignore));
    let with = |at: usize, byte: u8| {
        let mut message = good.clone();
        message[at] = byte;
        screen(&message)
    };
    assert!(matches!(with(2, 0x81), Screened::Ignore));
    let rcode = |s| if let Screened::Refuse(r) = s { r[3] & 15 } else { 99 };
    assert_eq!(rcode(with(2, 0x10)), 4);
    assert_eq!(rcode(with(5, 0)), 1);
    assert_eq!(rcode(with(5, 2)), 1);
    assert_eq!(rcode(with(11, 1)), 1);
    assert_eq!(rcode(with(12, 0xc0)), 1);
    assert_eq!(rcode(screen(&good[..good.len() - 1])), 1);
}

#[test]
fn records_beside_the_question_are_passed_over_whatever_they_hold() {
    let mut message = query("a.b", A);
    message[11] = 1;
    // A record of the root, of this type, with this data.
    let with = |kind: u8, data: &[u8]| {
        let length = u8::try_from(data.len()).unwrap();
        [&message[..], &[0, 0, kind, 4, 0xd0, 0, 0, 0, 0, 0, length], data].concat()
    };
    for odd in [with(41, &[0, 10, 0, 8, 1]), with(1, &[10, 0, 0])] {
        assert_eq!(asked(&odd).host(), "a.b.");
    }
}

proptest::proptest! {
    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
        let _ = well_formed(&bytes);
        let reply = mended_reply(&bytes);
        proptest::prop_assert!(matches!(mended_reply(&reply), Cow::Borrowed(_)));
        let bytes = mended(&bytes);
        if let Screened::Ask(q) = screen(&bytes) {
            let _ = q.host();
            let reply = q.reply(&bytes, Rcode::NoError, &[], q.udp_limit());
            proptest::prop_assert!(well_formed(&reply));
        }
    }
}
