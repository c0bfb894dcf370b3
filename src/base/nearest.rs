//! The known name that an unknown one was probably meant to be.

/// Shorter words are near too many others.
const SHORTEST: usize = 4;

/// The nearest of `known`, if it is near enough to be a slip of the fingers: one letter left out, added, changed or
/// swapped with its neighbour, two of them in words of ten letters and more. Case does not count as a difference
/// of its own; a word that is known gives nothing.
#[must_use]
pub(crate) fn nearest<'a>(
    word: &str,
    known: impl IntoIterator<Item = &'a str, IntoIter: Clone>,
) -> Option<&'a str> {
    let known = known.into_iter();
    let length = word.chars().count();
    let allowed = match length {
        0..SHORTEST => return None,
        SHORTEST..10 => 1,
        _ => 2,
    };
    // Most are.
    if known.clone().any(|candidate| candidate == word) {
        return None;
    }
    let lower = word.to_lowercase();
    let (letters, length) = (Letters::of(&lower), lower.chars().count());
    let mut best = None;
    for candidate in known {
        let longer_or_shorter = candidate.is_ascii() && candidate.len().abs_diff(length) > allowed;
        if longer_or_shorter || letters.apart(&Letters::of(candidate)) > 2 * allowed {
            continue;
        }
        let distance = strsim::osa_distance(&lower, &candidate.to_lowercase());
        if distance <= allowed && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// How often each letter is there, case aside; some share a place. Comparing a word with all that are known letter by
/// letter took a tenth of an agent's start, and seconds in a pod that is told the addresses of hundreds of services.
struct Letters([i16; 32]);

impl Letters {
    fn of(word: &str) -> Self {
        let mut counts = [0_i16; 32];
        for letter in word.chars().flat_map(char::to_lowercase) {
            let count = &mut counts[letter as usize % 32];
            *count = count.saturating_add(1);
        }
        Self(counts)
    }

    /// At most two for each slip: a letter changed is one less and another more, two swapped are none.
    fn apart(&self, other: &Self) -> usize {
        self.0.iter().zip(other.0).map(|(a, b)| usize::from(a.abs_diff(b))).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        // What is passed over without a closer look is not near.
        #[test]
        fn slips_change_few_letters(word in "[a-dA-D_İß]{0,12}", other in "[a-dA-D_İß]{0,12}") {
            let (word, other) = (word.to_lowercase(), other.to_lowercase());
            let distance = strsim::osa_distance(&word, &other);
            prop_assert!(Letters::of(&word).apart(&Letters::of(&other)) <= 2 * distance);
        }
    }

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
