//! DNS messages, as far as the server reads and writes them. Pure, and safe on any bytes.
//!
//! Why not `hickory-proto`: it decodes and encodes whole messages, and here most of them are forwarded as they came;
//! of the others only the question is read, and only A and AAAA records are written. It would cost 431 KB of binary and
//! 0.3 MB of resident memory.

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::IpAddr;

/// Query type A.
pub(crate) const A: u16 = 1;
/// Query type AAAA.
pub(crate) const AAAA: u16 = 28;
const CNAME: u16 = 5;
const OPT: u16 = 41;
const HEADER: usize = 12;
/// What a UDP message may have without EDNS (RFC 1035).
pub const UDP_MIN: usize = 512;
/// What an IPv4 datagram can hold.
const UDP_MAX: usize = 65507;
/// Seconds an answer of ours may be kept, as the Go agent says.
const TTL: u32 = 30;

const QR: u16 = 0x8000;
const OPCODE: u16 = 0x7800;
const AA: u16 = 0x0400;
const TC: u16 = 0x0200;
const RD: u16 = 0x0100;
const RA_AD_CD: u16 = 0x00b0;
const CD: u16 = 0x0010;
const NOTIFY: u16 = 4 << 11;

/// Result codes (RFC 1035).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Rcode {
    /// Answered, perhaps with nothing.
    NoError = 0,
    /// The query cannot be understood.
    FormErr = 1,
    /// Nobody could answer.
    ServFail = 2,
    /// Not an operation we know.
    NotImp = 4,
    /// Not for us.
    Refused = 5,
}

/// A query that may be answered.
#[derive(Debug)]
pub struct Query {
    flags: u16,
    question_end: usize,
    /// The name in lower case, as labels with their lengths, without the final zero.
    name: Vec<u8>,
    /// What is asked for.
    pub qtype: u16,
    edns: Option<u16>,
}

/// What to do with a message.
#[derive(Debug)]
pub enum Screened {
    /// Nothing.
    Ignore,
    /// Send this.
    Refuse(Vec<u8>),
    /// Answer.
    Ask(Query),
}

/// A record of an answer.
#[derive(Debug, Clone)]
pub struct Record {
    /// Lower-case labels with their lengths, without the final zero.
    pub owner: Vec<u8>,
    /// What the owner has.
    pub data: Data,
}

/// The contents of a [`Record`].
#[derive(Debug, Clone)]
pub enum Data {
    /// A or AAAA.
    Address(IpAddr),
    /// Another name, encoded like an owner.
    Cname(Vec<u8>),
}

fn u16_at(message: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(message.get(at..at + 2)?.try_into().ok()?))
}

/// The message's ID.
#[must_use]
pub fn id(message: &[u8]) -> Option<u16> {
    u16_at(message, 0)
}

// The end of a name that may point backwards; where it points to is only bounded, not followed.
fn skip_name(message: &[u8], mut at: usize) -> Option<usize> {
    let start = at;
    loop {
        let length = usize::from(*message.get(at)?);
        match length {
            0 => return Some(at + 1),
            1..=63 => at += 1 + length,
            192.. => {
                let target = usize::from(u16_at(message, at)? & 0x3fff);
                return (target < start).then_some(at + 2);
            }
            _ => return None,
        }
        if at - start > 254 {
            return None;
        }
    }
}

// The end of `count` records, and the sender's UDP size if one of them is OPT.
fn skip_records(message: &[u8], mut at: usize, count: u32) -> Option<(usize, Option<u16>)> {
    let mut edns = None;
    for _ in 0..count {
        at = skip_name(message, at)?;
        if u16_at(message, at)? == OPT {
            edns = u16_at(message, at + 2);
        }
        at += 10 + usize::from(u16_at(message, at + 8)?);
        if at > message.len() {
            return None;
        }
    }
    Some((at, edns))
}

/// Whether all sections are there to their ends. A reply that was cut off is not well formed.
#[must_use]
pub fn well_formed(message: &[u8]) -> bool {
    let walk = || {
        let mut at = HEADER;
        for _ in 0..u16_at(message, 4)? {
            at = skip_name(message, at)? + 4;
        }
        let records =
            [6, 8, 10].into_iter().map(|i| u16_at(message, i).map(u32::from)).sum::<Option<u32>>()?;
        skip_records(message, at, records).filter(|(end, _)| *end <= message.len())
    };
    walk().is_some()
}

/// Whether a reply is to this query: it has its number, and its question, if it repeats one. Letters may come back in
/// another case, and of a question that was cut off the type is 0.
#[must_use]
pub(crate) fn is_reply(reply: &[u8], query: &[u8]) -> bool {
    let question = |message: &[u8]| {
        let end = skip_name(message, HEADER)?;
        Some((message.get(HEADER..end)?.to_ascii_lowercase(), u16_at(message, end)?))
    };
    let same = || match (question(reply), question(query)) {
        (Some((name, kind)), Some((asked, wanted))) => name == asked && [0, wanted].contains(&kind),
        _ => false,
    };
    id(reply) == id(query) && (!repeats_question(reply) || same())
}

/// Whether a reply says what it answers.
#[must_use]
pub(crate) fn repeats_question(reply: &[u8]) -> bool {
    u16_at(reply, 4) != Some(0)
}

/// Where the times of a reply's records are, those of OPT left out.
#[must_use]
pub(crate) fn ttls(message: &[u8]) -> Option<Vec<usize>> {
    let mut at = HEADER;
    for _ in 0..u16_at(message, 4)? {
        at = skip_name(message, at)? + 4;
    }
    let records = [6, 8, 10].into_iter().map(|i| u16_at(message, i).map(u32::from)).sum::<Option<u32>>()?;
    let mut places = Vec::new();
    for _ in 0..records {
        at = skip_name(message, at)?;
        if u16_at(message, at)? != OPT {
            places.push(at + 4);
        }
        at += 10 + usize::from(u16_at(message, at + 8)?);
    }
    (at <= message.len()).then_some(places)
}

/// The seconds at such a place.
#[must_use]
pub(crate) fn ttl_at(message: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(message.get(at..at + 4)?.try_into().ok()?))
}

/// Whether a reply holds records, and all there are.
#[must_use]
pub(crate) fn is_whole_answer(message: &[u8]) -> bool {
    let flags = u16_at(message, 2).unwrap_or_default();
    flags & QR != 0 && flags & (TC | 0xf) == 0 && u16_at(message, 6).is_some_and(|n| n > 0)
}

/// Whether a reply was cut.
#[must_use]
pub(crate) fn is_cut(message: &[u8]) -> bool {
    u16_at(message, 2).is_some_and(|flags| flags & TC != 0)
}

/// What somebody is told who has no room for this reply: its question, and that it was cut.
#[must_use]
pub(crate) fn cut(reply: &[u8]) -> Option<Vec<u8>> {
    let mut at = HEADER;
    for _ in 0..u16_at(reply, 4)? {
        at = skip_name(reply, at)? + 4;
    }
    let mut out = reply.get(..at)?.to_vec();
    out[2] |= (TC >> 8) as u8;
    out[6..HEADER].fill(0);
    Some(out)
}

/// Whether a reply says that its server could not answer, and not that there is no such name or record.
#[must_use]
pub(crate) fn is_failure(message: &[u8]) -> bool {
    u16_at(message, 2).is_none_or(|flags| !matches!(flags & 0xf, 0 | 3))
}

/// A query that ends before all is there that its header announces, as the Go agent's library understands it: at the end
/// of a record, or of the question, the rest was never meant, and a question without a class, or without a type, has 0 for
/// it.
#[must_use]
pub fn mended(message: &[u8]) -> Cow<'_, [u8]> {
    let accepted = |at, most| u16_at(message, at).is_some_and(|n| n <= most);
    let is_query = message.len() > HEADER
        && u16_at(message, 4) == Some(1)
        && accepted(6, 1)
        && accepted(8, 1)
        && accepted(10, 2);
    is_query.then(|| mend(message)).flatten().map_or(Cow::Borrowed(message), Cow::Owned)
}

/// As [`mended`], of a reply, which may be a header and nothing else, as some servers refuse.
#[must_use]
pub fn mended_reply(message: &[u8]) -> Cow<'_, [u8]> {
    mend(message).map_or(Cow::Borrowed(message), Cow::Owned)
}

// `None`: there is nothing to mend, or it cannot be.
fn mend(message: &[u8]) -> Option<Vec<u8>> {
    let mut announced = [0; 4];
    for (count, at) in announced.iter_mut().zip([4, 6, 8, 10]) {
        *count = u16_at(message, at)?;
    }
    let mut there = [0; 4];
    let (mut at, mut missing) = (HEADER, 0);
    if message.len() > HEADER {
        for _ in 0..announced[0] {
            let end = skip_name(message, at)?;
            missing = match message.len().checked_sub(end)? {
                0 => 4,
                // Half a type, or half a class.
                1 | 3 => return None,
                rest => 4_usize.saturating_sub(rest),
            };
            at = end + 4 - missing;
        }
        there[0] = announced[0];
    }
    for (there, count) in there.iter_mut().zip(announced).skip(1) {
        while *there < count && at != message.len() {
            (at, _) = skip_records(message, at, 1)?;
            *there += 1;
        }
    }
    if missing == 0 && there == announced {
        return None;
    }
    let mut out = message.to_vec();
    out.truncate(at);
    out.resize(at + missing, 0);
    for (count, at) in there.into_iter().zip([4, 6, 8, 10]) {
        out[at..at + 2].copy_from_slice(&count.to_be_bytes());
    }
    Some(out)
}

/// Sorts out what is no query.
#[must_use]
pub fn screen(message: &[u8]) -> Screened {
    if message.len() < HEADER {
        return Screened::Ignore;
    }
    let at = |i| u16_at(message, i).unwrap_or_default();
    let flags = at(2);
    if flags & QR != 0 {
        return Screened::Ignore;
    }
    let kept = flags & (TC | RD | RA_AD_CD);
    if flags & OPCODE != 0 && flags & OPCODE != NOTIFY {
        return Screened::Refuse(header(message, QR | (flags & OPCODE) | kept, Rcode::NotImp));
    }
    let refuse = || Screened::Refuse(header(message, QR | kept, Rcode::FormErr));
    if at(4) != 1 || at(6) > 1 || at(8) > 1 || at(10) > 2 {
        return refuse();
    }
    if message.len() == HEADER {
        // It announces a question and asks none.
        return Screened::Refuse(header(message, QR | copied(flags), Rcode::Refused));
    }
    let Some((name, end)) = question_name(message) else { return refuse() };
    let (Some(qtype), Some(_class)) = (u16_at(message, end), u16_at(message, end + 2)) else {
        return refuse();
    };
    let question_end = end + 4;
    // Of all sections only the last may hold OPT.
    let records = skip_records(message, question_end, u32::from(at(6)) + u32::from(at(8)));
    let records = records.and_then(|(end, _)| skip_records(message, end, at(10).into()));
    let Some((_, edns)) = records else {
        let mut out = header(message, QR | kept, Rcode::FormErr);
        out[5] = 1;
        out.extend_from_slice(&message[HEADER..question_end]);
        return Screened::Refuse(out);
    };
    Screened::Ask(Query { flags, question_end, name, qtype, edns })
}

// What a reply has of its query's flags.
fn copied(flags: u16) -> u16 {
    flags & if flags & OPCODE == 0 { RD | CD } else { OPCODE }
}

fn header(message: &[u8], flags: u16, rcode: Rcode) -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    out.extend_from_slice(&message[..2]);
    out.extend_from_slice(&(flags | rcode as u16).to_be_bytes());
    out.resize(HEADER, 0);
    out
}

// A question's name stands first in the message: there is nothing it could point to.
fn question_name(message: &[u8]) -> Option<(Vec<u8>, usize)> {
    let end = skip_name(message, HEADER)?;
    let name = &message[HEADER..end - 1];
    let mut at = 0;
    while at < name.len() {
        if name[at] > 63 {
            return None;
        }
        at += 1 + usize::from(name[at]);
    }
    (message[end - 1] == 0 && at == name.len()).then(|| (name.to_ascii_lowercase(), end))
}

/// A dotted name with or without a final dot, encoded; `None` when no message can carry it.
#[must_use]
pub(crate) fn encode(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() + 1);
    for label in text.strip_suffix('.').unwrap_or(text).split('.') {
        let length = u8::try_from(label.len()).ok().filter(|n| (1..=63).contains(n))?;
        out.push(length);
        out.extend_from_slice(label.as_bytes());
    }
    (out.len() < 255).then_some(out)
}

impl Query {
    /// The name in lower case with a final dot. Bytes that no host has are shown so that none matches, as in the Go agent.
    #[must_use]
    pub fn host(&self) -> String {
        let mut out = String::with_capacity(self.name.len() + 1);
        let mut rest = self.name.as_slice();
        while let Some((length, tail)) = rest.split_first() {
            let (label, tail) = tail.split_at(usize::from(*length).min(tail.len()));
            for byte in label {
                match byte {
                    b'.' | b'\\' | b' ' | b'\'' | b'@' | b';' | b'(' | b')' | b'"' => {
                        out.extend(['\\', char::from(*byte)]);
                    }
                    0x21..=0x7e => out.push(char::from(*byte)),
                    other => out.push_str(&format!("\\{other:03}")),
                }
            }
            out.push('.');
            rest = tail;
        }
        if out.is_empty() { ".".to_owned() } else { out }
    }

    /// The name as an owner of records.
    #[must_use]
    pub fn owner(&self) -> &[u8] {
        &self.name
    }

    /// The largest reply a client that asks over UDP takes.
    #[must_use]
    pub fn udp_limit(&self) -> usize {
        self.edns.map_or(UDP_MIN, |n| usize::from(n).clamp(UDP_MIN, UDP_MAX))
    }

    /// A reply of our own to `message`, of which this is the question, in at most `limit` bytes.
    #[must_use]
    pub fn reply(&self, message: &[u8], rcode: Rcode, records: &[Record], limit: usize) -> Vec<u8> {
        let aa = if rcode == Rcode::NoError { AA } else { 0 };
        let mut out = header(message, QR | copied(self.flags) | aa, rcode);
        out[5] = 1;
        out.extend_from_slice(&message[HEADER..self.question_end]);
        let plain: usize = records.iter().map(|r| r.owner.len() + 11 + r.data.len()).sum();
        let mut names = (out.len() + plain > limit).then(Compressor::default);
        if let Some(names) = &mut names {
            names.learn(&message[HEADER..self.question_end - 5], HEADER);
        }
        let mut kept = 0_u16;
        for record in records {
            let before = out.len();
            record.write(&mut out, names.as_mut());
            if out.len() > limit || kept == u16::MAX {
                out.truncate(before);
                out[2] |= (TC >> 8) as u8;
                break;
            }
            kept += 1;
        }
        out[6..8].copy_from_slice(&kept.to_be_bytes());
        out
    }
}

impl Data {
    fn len(&self) -> usize {
        match self {
            Self::Address(IpAddr::V4(_)) => 4,
            Self::Address(IpAddr::V6(_)) => 16,
            Self::Cname(name) => name.len() + 1,
        }
    }
}

impl Record {
    fn write<'a>(&'a self, out: &mut Vec<u8>, mut names: Option<&mut Compressor<'a>>) {
        write_name(out, &self.owner, names.as_deref_mut());
        let kind = match &self.data {
            Data::Address(IpAddr::V4(_)) => A,
            Data::Address(IpAddr::V6(_)) => AAAA,
            Data::Cname(_) => CNAME,
        };
        out.extend_from_slice(&kind.to_be_bytes());
        out.extend_from_slice(&1_u16.to_be_bytes());
        out.extend_from_slice(&TTL.to_be_bytes());
        let length_at = out.len();
        out.extend_from_slice(&[0, 0]);
        match &self.data {
            Data::Address(IpAddr::V4(ip)) => out.extend_from_slice(&ip.octets()),
            Data::Address(IpAddr::V6(ip)) => out.extend_from_slice(&ip.octets()),
            Data::Cname(name) => write_name(out, name, names),
        }
        let length = u16::try_from(out.len() - length_at - 2).unwrap_or_default();
        out[length_at..length_at + 2].copy_from_slice(&length.to_be_bytes());
    }
}

/// Where the ends of names stand that were written already; spelled the same, as clients may compare.
#[derive(Default)]
struct Compressor<'a>(HashMap<&'a [u8], u16>);

impl<'a> Compressor<'a> {
    fn learn(&mut self, name: &'a [u8], at: usize) {
        let mut from = 0;
        while from < name.len() {
            if let Some(place) = u16::try_from(at + from).ok().filter(|p| *p < 0x4000) {
                self.0.entry(&name[from..]).or_insert(place);
            }
            from += 1 + usize::from(name[from]);
        }
    }
}

fn write_name<'a>(out: &mut Vec<u8>, name: &'a [u8], names: Option<&mut Compressor<'a>>) {
    let Some(names) = names else {
        out.extend_from_slice(name);
        out.push(0);
        return;
    };
    let at = out.len();
    let mut from = 0;
    while from < name.len() {
        if let Some(place) = names.0.get(&name[from..]).copied() {
            out.extend_from_slice(&name[..from]);
            out.extend_from_slice(&(0xc000 | place).to_be_bytes());
            names.learn(name, at);
            return;
        }
        from += 1 + usize::from(name[from]);
    }
    out.extend_from_slice(name);
    out.push(0);
    names.learn(name, at);
}

#[cfg(test)]
mod tests;
