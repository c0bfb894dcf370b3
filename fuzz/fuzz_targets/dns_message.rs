//! DNS messages: whatever bytes come, a reply is well formed, for this query, and no longer than it may be.
#![no_main]

use std::net::{IpAddr, Ipv4Addr};

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::dns::wire::{self, Data, Rcode, Record, Screened};

fuzz_target!(|input: (u8, &[u8])| {
    let (count, message) = input;
    let message = &*wire::mended(message);
    let query = match wire::screen(message) {
        Screened::Ignore => return,
        Screened::Refuse(reply) => {
            assert!(wire::well_formed(&reply) && wire::id(&reply) == wire::id(message));
            return;
        }
        Screened::Ask(query) => query,
    };
    assert!(query.host().ends_with('.'));
    let address = |n| Data::Address(IpAddr::V4(Ipv4Addr::new(10, 0, 0, n)));
    let records: Vec<Record> =
        (0..count).map(|n| Record { owner: query.owner().to_vec(), data: address(n) }).collect();
    for limit in [wire::UDP_MIN, query.udp_limit(), usize::from(u16::MAX)] {
        let reply = query.reply(message, Rcode::NoError, &records, limit);
        assert!(wire::well_formed(&reply) && reply.len() <= limit && wire::id(&reply) == wire::id(message));
    }
});
