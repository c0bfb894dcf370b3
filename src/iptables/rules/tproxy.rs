//! Step 24: the marks by which TPROXY tells the proxy's own connections apart.

use super::{Builder, INBOUND, lo_out, tcp};
use crate::iptables::model::{Family, Match, Table, Target};
use crate::iptables::options::{OUTBOUND_MARK, PASSTHROUGH_V4, PASSTHROUGH_V6};

impl Builder<'_> {
    // Step 24, block 8.2; made even when nothing inbound is captured, as the Go agent does.
    pub(super) fn tproxy(&mut self) {
        let o = self.o;
        let mark = || Match::Mark { not: false, mark: o.tproxy_mark.clone() };
        let t = Table::Mangle;
        self.rule(t, "PREROUTING", vec![tcp(), mark()], Target::SaveMark);
        self.rule(t, "OUTPUT", vec![tcp(), lo_out(), mark()], Target::Return);
        let users = o.proxy_uids.iter().map(|id| Match::Uid { not: false, id: id.clone() });
        let groups = o.proxy_gids.iter().map(|id| Match::Gid { not: false, id: id.clone() });
        for owner in users.chain(groups) {
            for family in [Family::V4, Family::V6] {
                let matches = vec![self.not_loopback(family), tcp(), lo_out(), owner.clone()];
                self.only(family, t, "OUTPUT", matches, Target::SetMark(OUTBOUND_MARK.to_owned()));
            }
        }
        self.rule(t, "OUTPUT", vec![tcp(), Match::ConnMark(o.tproxy_mark.clone())], Target::RestoreMark);
        self.insert(1, None, t, INBOUND, vec![tcp(), mark()], Target::Return);
        for (family, from) in [(Family::V4, PASSTHROUGH_V4), (Family::V6, PASSTHROUGH_V6)] {
            let matches = vec![tcp(), Match::Src(from.to_owned()), Match::In("lo".to_owned())];
            self.insert(2, Some(family), t, INBOUND, matches, Target::Return);
        }
        let own = Match::Mark { not: true, mark: OUTBOUND_MARK.to_owned() };
        let matches = vec![tcp(), Match::In("lo".to_owned()), own];
        self.insert(3, None, t, INBOUND, matches, Target::Return);
    }
}
