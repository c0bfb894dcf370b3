//! Is this machine's clock right? Judged by what others have dated: the token, istiod's certificate, its `Date`.

use std::time::{Duration, SystemTime};

use super::Check;
use crate::istiod::auth::claims::Claims;
use crate::tls::cert::Cert;
use crate::trouble::Kind;

const NAME: &str = "clock";
/// Clocks differ by so much without harm: istiod back-dates certificates by two minutes.
const TOLERATED: Duration = Duration::from_secs(120);

/// The check; `chains` are what servers have shown, their own certificate first.
pub(super) fn check(
    now: SystemTime,
    claims: Option<&Claims>,
    chains: &[Vec<Cert>],
    date: Option<&str>,
) -> Check {
    let said = format!("it is {} by this machine", crate::base::clock::rfc3339(now));
    if let Some(theirs) = date.and_then(http_date) {
        let (behind, ahead) = (theirs.duration_since(now), now.duration_since(theirs));
        for (off, word) in [(behind, "behind"), (ahead, "ahead of")] {
            if let Some(off) = off.ok().filter(|off| *off > TOLERATED) {
                let said = format!("{said}, {} {word} istiod's clock", crate::trouble::span(off));
                return Check::fail(NAME, Kind::ClockWrong, said);
            }
        }
    }
    let later = |at: SystemTime| at.duration_since(now).ok().filter(|off| *off > TOLERATED);
    let leaf = chains.iter().filter_map(|chain| chain.first());
    let certificate = leaf.clone().find_map(|leaf| later(leaf.not_before));
    let issued = claims.and_then(|c| c.issued).and_then(later);
    if let Some(off) = issued {
        // Who wrote the token has a clock too; a token from the future was not made on this one.
        let also = if certificate.is_some() { ", and istiod's certificate is not valid yet" } else { "" };
        let said = format!(
            "{said}, but the token was issued {} later{also}: this clock is behind",
            crate::trouble::span(off)
        );
        return Check::fail(NAME, Kind::ClockWrong, said);
    }
    let mut agrees: Vec<&str> = Vec::new();
    if claims.is_some_and(|c| c.issued.is_some()) {
        agrees.push("the token's date");
    }
    if leaf.clone().next().is_some() && certificate.is_none() {
        agrees.push("istiod's certificate");
    }
    let expired = leaf.clone().any(|leaf| leaf.not_after < now);
    let token_over = claims.and_then(|c| c.expires).is_some_and(|at| at < now);
    if expired && token_over {
        let said = format!(
            "{said}: both the token and istiod's certificate have expired by then, so this clock may be ahead"
        );
        return Check::warn(NAME, said, Kind::ClockWrong.hint());
    }
    if certificate.is_some() || expired {
        let hint = "compare it with istiod's: by this clock istiod's certificate is not valid now";
        return Check::warn(NAME, said, hint);
    }
    match agrees.as_slice() {
        [] => Check::skip(NAME, format!("{said}; nothing dated by others is there to compare it with")),
        all => Check::ok(NAME, format!("{said}, not contradicted by {}", all.join(" and "))),
    }
}

/// `Sun, 06 Nov 1994 08:49:37 GMT`.
fn http_date(text: &str) -> Option<SystemTime> {
    let parsed = jiff::fmt::rfc2822::parse(text.trim()).ok()?;
    Some(SystemTime::from(parsed.timestamp()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Outcome;

    #[test]
    fn a_clock_is_judged_by_what_others_have_dated() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let hour = Duration::from_secs(3600);
        let token = |issued: SystemTime| Claims { issued: Some(issued), ..Claims::default() };
        let state = |claims: Option<&Claims>, date: Option<&str>| check(now, claims, &[], date).state;
        assert_eq!(state(None, None), Outcome::Skip);
        assert_eq!(state(Some(&token(now - hour)), None), Outcome::Ok);
        // One date or several: the same words.
        let said = check(now, Some(&token(now - hour)), &[], None).said;
        assert!(said.ends_with("not contradicted by the token's date"), "{said}");
        assert_eq!(state(Some(&token(now + hour)), None), Outcome::Fail);
        assert_eq!(state(None, Some("Sun, 06 Nov 1994 08:49:37 GMT")), Outcome::Skip);
        assert_eq!(state(None, Some("Sun, 06 Nov 1994 09:49:37 GMT")), Outcome::Fail);
        assert_eq!(state(None, Some("Sun, 06 Nov 1994 07:49:37 GMT")), Outcome::Fail);
    }
}
