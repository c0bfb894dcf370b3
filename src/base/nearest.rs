//! The known name that an unknown one was probably meant to be.

/// Shorter words are near too many others.
const SHORTEST: usize = 4;

/// The nearest of `known`, if it is near enough to be a slip of the fingers: one letter left out, added, changed or
/// swapped with its neighbour, two of them in words of ten letters and more. Case does not count as a difference
/// of its own; a word that is known gives nothing.
#[must_use]
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let length = word.chars().count();
    let allowed = match length {
        0..SHORTEST => return None,
        SHORTEST..10 => 1,
        _ => 2,
    };
    let lower = word.to_lowercase();
    let mut best = None;
    for candidate in known {
        if candidate == word {
            return None;
        }
        let distance = strsim::osa_distance(&lower, &candidate.to_lowercase());
        if distance <= allowed && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_found_and_other_words_are_not() {
        let known = ["dry-run", "domain", "ISTIO_META_DNS_CAPTURE", "concurrency", "ip"];
        for (word, wanted) in [
            ("dry-rnu", Some("dry-run")),
            ("dryrun", Some("dry-run")),
            ("Domain", Some("domain")),
            ("ISTIO_META_DNS_CAPTRUE", Some("ISTIO_META_DNS_CAPTURE")),
            ("ISTIO_META_DSN_CAPTRUE", Some("ISTIO_META_DNS_CAPTURE")),
            ("concurency", Some("concurrency")),
            ("domain", None),
            ("human", None),
            ("ipp", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, known), wanted, "{word}");
        }
    }
}
