//! An SDS stream's requests: no input confuses the state; a response is only ever about names asked for.
#![no_main]

use std::collections::BTreeSet;

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::sds::encode::SECRET_TYPE;
use pilot_agent::testing::sds::session::{Action, Request, Session};

const NAMES: [&str; 4] = ["default", "ROOTCA", "file-root:a", ""];

fuzz_target!(|steps: Vec<[u8; 4]>| {
    let (mut sotw, mut delta) = (Session::default(), Session::default());
    let mut sent = 0_u32;
    for [names, nonce, kind, leave] in steps {
        let pick = |bits: u8| -> Vec<String> {
            let all = NAMES.iter().enumerate();
            all.filter(|(n, _)| bits >> n & 1 == 1).map(|(_, name)| (*name).to_owned()).collect()
        };
        let request = Request {
            names: pick(names),
            leave: pick(leave),
            type_url: if kind & 1 == 0 { SECRET_TYPE.to_owned() } else { "x".to_owned() },
            nonce: if nonce == 0 { String::new() } else { u32::from(nonce).to_string() },
            node: (kind & 2 == 0).then(|| "sidecar~1".to_owned()),
            error: (kind & 4 != 0).then(|| "no".to_owned()),
        };
        for (session, action) in [(&mut sotw, 0), (&mut delta, 1)].map(|(s, which)| {
            let action = if which == 0 { s.request(&request) } else { s.delta(&request) };
            (s, action)
        }) {
            if let Action::Respond(names) = action {
                assert!(names.iter().all(|n| request.names.contains(n)));
                assert!(names.iter().all(|n| session.follows(n)));
                assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
                sent += 1;
                session.sent(&sent.to_string());
            }
        }
    }
});
