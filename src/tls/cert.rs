//! Reads certificate chains: dates, identities, whether a key belongs to them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use memchr::memmem;
use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::base::quote::cut;

/// Where a block begins: at the start of a line.
const BEGIN: &[u8] = b"-----BEGIN ";
/// Where it begins when files were joined of which the first has no line break at its end: behind the last block's end.
const JOINED: &[u8] = b"----------BEGIN ";

/// What is wrong with PEM or DER input.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not PEM, or a block that is not what it says.
    #[error("not readable as PEM: {0}")]
    Pem(String),
    /// Envoy reads no such text.
    #[error("a block begins on the line where another ends: a line break is missing between them")]
    Joined,
    /// No certificate in the text.
    #[error("no certificate in it")]
    Empty,
    /// A certificate that does not parse.
    #[error("certificate {index} does not parse: {reason}")]
    Certificate {
        /// Position in the text, from 0.
        index: usize,
        /// The parser's word.
        reason: String,
    },
    /// A key that does not parse or is of an unknown kind.
    #[error("private key does not parse: {0}")]
    Key(String),
    /// Certificate and key are not a pair.
    #[error("private key does not match the first certificate")]
    Mismatch,
}

/// One certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cert {
    /// DER bytes.
    pub der: Vec<u8>,
    /// Start of validity.
    pub not_before: SystemTime,
    /// End of validity.
    pub not_after: SystemTime,
    /// URI subject alternative names, in order (a SPIFFE ID is the only one of a workload).
    pub uris: Vec<String>,
    /// Basic constraints say CA.
    pub is_ca: bool,
    /// DER of the subject's name.
    pub subject: Vec<u8>,
    /// DER of the issuer's name; equal to the subject's for a root.
    pub issuer: Vec<u8>,
    /// DER of the subject public key info.
    pub spki: Vec<u8>,
    /// Serial number in hexadecimal.
    pub serial: String,
}

/// Of the names of a certificate so many are told. A workload has one.
const TOLD: usize = 4;
/// And so much of each, in bytes: namespace, account and trust domain of the longest kind are 600.
const LONGEST: usize = 1024;

impl Cert {
    /// Its URI names for people: a CA may write as many as it likes, and whatever it likes into them.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let more = self.uris.len().saturating_sub(TOLD);
        let told = self.uris.iter().take(TOLD).map(|uri| cut(uri, LONGEST).into_owned());
        told.chain((more > 0).then(|| format!("and {more} more"))).collect()
    }
}

/// Reads every certificate of a PEM text; other block kinds and text between blocks are passed over.
///
/// # Errors
/// When the text is not PEM, holds no certificate, or one of them does not parse.
pub fn parse_chain(pem: &[u8]) -> Result<Vec<Cert>, Error> {
    if memmem::find(pem, JOINED).is_some() {
        return Err(Error::Joined);
    }
    let mut certs = Vec::new();
    for (index, der) in CertificateDer::pem_slice_iter(pem).enumerate() {
        let der = der.map_err(|e| Error::Pem(said(&e)))?;
        certs.push(parse_der(&der).map_err(|reason| Error::Certificate { index, reason })?);
    }
    if certs.is_empty() { Err(Error::Empty) } else { Ok(certs) }
}

/// What the reader says, without bytes in the place of text.
fn said(error: &pem::Error) -> String {
    match error {
        pem::Error::MissingSectionEnd { end_marker } => {
            format!("the end of a section is missing: {}", String::from_utf8_lossy(end_marker))
        }
        pem::Error::IllegalSectionStart { .. } => "a section does not begin as it must".to_owned(),
        error => error.to_string(),
    }
}

/// Reads one certificate.
///
/// # Errors
/// The parser's word.
pub fn parse_der(der: &[u8]) -> Result<Cert, String> {
    let (rest, cert) = X509Certificate::from_der(der).map_err(|e| e.to_string())?;
    if !rest.is_empty() {
        return Err(format!("{} bytes follow it", rest.len()));
    }
    let uris = match cert.subject_alternative_name() {
        Ok(Some(san)) => san
            .value
            .general_names
            .iter()
            .filter_map(|n| if let GeneralName::URI(u) = n { Some((*u).to_owned()) } else { None })
            .collect(),
        Ok(None) => Vec::new(),
        Err(e) => return Err(e.to_string()),
    };
    Ok(Cert {
        not_before: date(cert.validity().not_before.timestamp()),
        not_after: date(cert.validity().not_after.timestamp()),
        uris,
        is_ca: cert.is_ca(),
        subject: cert.subject().as_raw().to_vec(),
        issuer: cert.issuer().as_raw().to_vec(),
        spki: cert.public_key().raw.to_vec(),
        serial: format!("{:x}", cert.serial),
        der: der.to_vec(),
    })
}

fn date(seconds: i64) -> SystemTime {
    let span = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 { UNIX_EPOCH - span } else { UNIX_EPOCH + span }
}

/// Checks that the chain parses, the key parses, and the key belongs to the first certificate.
/// Validity dates are not looked at (the Go agent does not either for files, #37722).
///
/// # Errors
/// Which of the three is not so.
pub fn check_pair(chain_pem: &[u8], key_pem: &[u8]) -> Result<Vec<Cert>, Error> {
    let chain = parse_chain(chain_pem)?;
    let key = PrivateKeyDer::from_pem_slice(key_pem).map_err(|e| Error::Key(e.to_string()))?;
    let signer =
        rustls::crypto::aws_lc_rs::sign::any_supported_type(&key).map_err(|e| Error::Key(e.to_string()))?;
    let spki = signer.public_key().ok_or_else(|| Error::Key("it has no public half".to_owned()))?;
    if spki.as_ref() == chain[0].spki { Ok(chain) } else { Err(Error::Mismatch) }
}

/// The certificates of a text that need not be all readable.
#[derive(Debug, Default)]
pub struct Readable {
    /// Those that parse, each encoded anew; empty when none does.
    pub pem: String,
    /// Blocks that do not.
    pub dropped: usize,
    /// The text ends inside a block: perhaps somebody is still writing it.
    pub unfinished: bool,
    reason: String,
}

impl Readable {
    /// Why the first dropped block does not parse, or that there was none at all.
    #[must_use]
    pub fn trouble(&self) -> &str {
        if self.reason.is_empty() { "no certificate in it" } else { &self.reason }
    }
}

/// The certificates of a bundle, and what cannot be read of it: each begin line begins anew, so a block without an end
/// hides no other, nor does one whose end has the next one's beginning on its line.
pub(crate) fn each_cert(text: &[u8]) -> impl Iterator<Item = Result<CertificateDer<'static>, pem::Error>> {
    let mut rest = text;
    let sections = std::iter::from_fn(move || {
        let mut begins = memmem::find_iter(rest, BEGIN);
        let next = begins.find(|at| rest[..*at].ends_with(b"\n") || rest[..*at].ends_with(b"-----"));
        let (section, after) = rest.split_at(next.unwrap_or(rest.len()));
        rest = after;
        (!section.is_empty()).then_some(section)
    });
    sections.flat_map(CertificateDer::pem_slice_iter)
}

/// Keeps what is readable of a bundle: one bad block must not take the trust of all others away.
#[must_use]
pub fn readable_certs(text: &[u8]) -> Readable {
    let mut out = Readable::default();
    for der in each_cert(text) {
        out.unfinished = matches!(der, Err(rustls_pki_types::pem::Error::MissingSectionEnd { .. }));
        let parsed = der.map_err(|e| said(&e)).and_then(|der| parse_der(&der).map(|_| der));
        match parsed {
            Ok(der) => out.pem.push_str(&super::keys::pem("CERTIFICATE", &der)),
            Err(reason) => {
                out.dropped += 1;
                if out.reason.is_empty() {
                    out.reason = reason;
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_the_names_of_a_certificate_a_few_are_told_in_one_line() {
        let params = |uris: &[String]| {
            let mut params = rcgen::CertificateParams::default();
            let name = |uri: &String| rcgen::SanType::URI(uri.as_str().try_into().unwrap());
            params.subject_alt_names = uris.iter().map(name).collect();
            params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap()
        };
        let names = |uris: &[String]| parse_der(params(uris).der()).unwrap().names();
        assert_eq!(names(&["spiffe://a/ns/b/sa/c".to_owned()]), ["spiffe://a/ns/b/sa/c"]);
        let many: Vec<_> = (0..1000).map(|n| format!("spiffe://a/{n}")).collect();
        assert_eq!(
            names(&many).join(", "),
            "spiffe://a/0, spiffe://a/1, spiffe://a/2, spiffe://a/3, and 996 more"
        );
        let long = names(&[format!("spiffe://a/{}", "x".repeat(100_000)), "a\n\u{1b}[31m".to_owned()]);
        assert!(long[0].len() < 1100 && long[0].ends_with("(100011 bytes)"), "{}", long[0]);
        assert_eq!(long[1], "a\\n\\u{1b}[31m");
    }

    #[test]
    fn what_is_wrong_with_pem_is_text() {
        let of = |text: &str| parse_chain(text.as_bytes()).unwrap_err().to_string();
        let cut = of("-----BEGIN CERTIFICATE-----\nMIIB\n");
        assert_eq!(cut, "not readable as PEM: the end of a section is missing: CERTIFICATE");
        let bad = of("-----BEGIN CERTIFICATE\nMIIB\n");
        assert_eq!(bad, "not readable as PEM: a section does not begin as it must");
    }

    /// As `cat` makes it of files of which the first has no line break at its end.
    #[test]
    fn roots_that_were_joined_without_a_line_break_all_count_and_a_chain_does_not() {
        let one = || {
            let key = rcgen::KeyPair::generate().unwrap();
            rcgen::CertificateParams::default().self_signed(&key).unwrap().pem()
        };
        let (a, b, c) = (one(), one(), one());
        let joined = format!("{}{}{c}", a.trim_end(), b.trim_end());
        let readable = readable_certs(joined.as_bytes());
        assert_eq!((readable.pem, readable.dropped), (format!("{a}{b}{c}").replace('\r', ""), 0));
        assert!(matches!(parse_chain(joined.as_bytes()), Err(Error::Joined)));
        assert_eq!(parse_chain(format!("{a}{b}").as_bytes()).unwrap().len(), 2);
    }

    // Keys in PKCS #8, made for this test.
    const RSA_1024: &str = "MIICWwIBAAKBgQC5vsLpatwMeEGpjkqMM7zW7Dkl21oynngJcRPd4++1Hu6JjhQSfgYJ9zm8dSEUuwdow9QXu1h6GWHPwjwz \
         khDrsJ0V5zDysIfTFmvlZ/Sp3gQ0scGbn9maw8zCJ/8B6KE1cyeEXtz3by8Qvgi1TMcnj504xt6E672RGusuEK+xMwIDAQAB \
         AoGADlRpNRjJYSzl4+7WUXqsVuhigEkr7DvNhuzyW2v6Uj7QqEwNwF94l8w66A8hPjgvmiWBd1M8wC61HRIfEttx8ptIErst \
         KUEbSGtez7e5CRG9HVYyDoSEwpH0viP11OZUMdrZJH5rl0ky7aUBzRCB1MYQeijyeYIy+1/bfJhrAgECQQDaeBWs6aegnddv \
         vsdV3eyp4kK68ZWYSL/swmIEOqxoBvyqN3WQoajiu8FuaB5ICo6YAre+JjnlkPzzXBL8SednAkEA2aeIKhTXTUD+jgGejMjt \
         RAWjNtfi3HaSZhAKosF0e0f8EumcMd95Pik95YdfAL3zTTYJd+Cs0BLHDHo4203EVQJAJuAji0dwysYLphjew8rf6EMY+Mcw \
         hY68iFb2tiXys/g6UdfYlcoOkXozq3/fk5Y9VZN2OuH2f4FTYcLKphZIlQJAP626MsWiMCIB1741iu8GK86Sb+s9nk66ik3L \
         Ls72q1LmNwpN/nFpYXxjdZHjg64PTtmub3o2VTIJNmdT1yWreQJAE34GJcqHG8BCkq5Q3aZVhaKpmzsOVIeZHsiml+BxH0p8 \
         /cnsO9iUsZegH0dPMLs8Wb5+iirDFllDA8sQ7obXug==";
    const P_224: &str = "MHgCAQAwEAYHKoZIzj0CAQYFK4EEACEEYTBfAgEBBByFd5d680ogzje2GW/fCfSmftJqqwQgXtmbKOSgoTwDOgAEv5qi2u5w \
         /IobGFLoHvNCwBi5ol4Ftjm7Tpi0o4kQDfKJkgAKlA7K+qPKm6UQ45OjrGttHRVLaO8=";

    #[test]
    fn a_key_that_envoy_refuses_is_named_and_makes_no_pair() {
        let key = rcgen::KeyPair::generate().unwrap();
        let chain = rcgen::CertificateParams::default().self_signed(&key).unwrap().pem();
        let refused = |key: &str| check_pair(chain.as_bytes(), key.as_bytes()).unwrap_err();
        check_pair(chain.as_bytes(), key.serialize_pem().as_bytes()).unwrap();
        let of = |der: &str| format!("-----BEGIN PRIVATE KEY-----\n{der}\n-----END PRIVATE KEY-----\n");
        let other = key.serialize_pem().replace("PRIVATE KEY", "RSA PRIVATE KEY");
        for pem in [of(RSA_1024), of(P_224), other] {
            assert!(matches!(refused(&pem), Error::Key(_)), "{}", refused(&pem));
        }
        // A key of another pair is read, and does not fit.
        let strange = rcgen::KeyPair::generate().unwrap().serialize_pem();
        assert!(matches!(refused(&strange), Error::Mismatch));
    }
}
