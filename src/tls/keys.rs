//! Private keys: made, printed as PEM in the form the consumer expects, and used to sign a request.
//!
//! A [`Key`] holds the crypto crate's own object; its private half leaves it only through
//! [`Key::to_pem`], zeroized when dropped. Making an RSA key is the one slow step of a start, so it
//! runs off the runtime ([`generate_off_runtime`]); the very first may race two threads
//! ([`Effort::Race`]), because the search for primes is luck and the better of two draws is shorter.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _,
    RSA_PKCS1_SHA256, RsaKeyPair,
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

/// What key to make and how to print it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyOptions {
    /// Kind and size.
    pub algorithm: Algorithm,
    /// `PKCS8_KEY`: print as PKCS#8 instead of the algorithm's own form.
    pub pkcs8: bool,
}

/// Kind and size of a key, as configured; what cannot be made is refused when a key is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Algorithm {
    /// RSA with this many bits: 2048 or more. Sizes between those the crypto crate makes (2048, 3072,
    /// 4096, 8192) are rounded up.
    Rsa(i64),
    /// ECDSA on a curve.
    Ecdsa(Curve),
    /// An `ECC_SIGNATURE_ALGORITHM` that nobody knows.
    Unsupported(String),
}

/// Curves for ECDSA keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Curve {
    /// secp256r1, signed with SHA-256.
    #[default]
    P256,
    /// secp384r1, signed with SHA-384.
    P384,
}

impl Default for KeyOptions {
    fn default() -> Self {
        Self { algorithm: Algorithm::Rsa(2048), pkcs8: false }
    }
}

impl KeyOptions {
    /// From the settings as written: `WORKLOAD_RSA_KEY_SIZE`, `ECC_SIGNATURE_ALGORITHM`, `ECC_CURVE`
    /// and `PKCS8_KEY`. Never fails: like the Go agent, bad values surface at the first request.
    #[must_use]
    pub(crate) fn from_settings(rsa_bits: i64, ecc_algorithm: &str, ecc_curve: &str, pkcs8: bool) -> Self {
        let algorithm = match (ecc_algorithm, ecc_curve) {
            ("", _) => Algorithm::Rsa(rsa_bits),
            ("ECDSA", "P384") => Algorithm::Ecdsa(Curve::P384),
            // Any other curve text means P-256, as in the Go agent.
            ("ECDSA", _) => Algorithm::Ecdsa(Curve::P256),
            (other, _) => Algorithm::Unsupported(other.to_owned()),
        };
        Self { algorithm, pkcs8 }
    }
}

/// Why no key was made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The words are those of the Go agent.
    #[error("requested key size does not meet the minimum required size of 2048 (requested: {0})")]
    TooSmall(i64),
    /// Above what the crypto crate makes.
    #[error(
        "requested key size is above the maximum of 8192 (requested: {0}): set WORKLOAD_RSA_KEY_SIZE to 2048, 3072 or 4096"
    )]
    TooLarge(i64),
    /// The words are those of the Go agent, and the value.
    #[error(
        "csr cert generation fails due to unsupported EC signature algorithm {0:?}: set ECC_SIGNATURE_ALGORITHM to ECDSA, or leave it unset for RSA"
    )]
    Unsupported(String),
    /// The crypto crate refused.
    #[error("cannot make a private key: {0}")]
    Crypto(&'static str),
    /// The system gives no thread to make it on.
    #[error("cannot make a private key: no thread to make it on")]
    NoThread,
}

/// A private key.
pub struct Key {
    pair: Pair,
    pkcs8: bool,
}

enum Pair {
    Rsa(Box<RsaKeyPair>),
    Ecdsa(Box<EcdsaKeyPair>, Curve),
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.pair {
            Pair::Rsa(_) => "Key(RSA ..)",
            Pair::Ecdsa(_, Curve::P256) => "Key(P-256 ..)",
            Pair::Ecdsa(_, Curve::P384) => "Key(P-384 ..)",
        })
    }
}

/// The size that will be made for a requested one.
fn rsa_size(bits: i64) -> Result<KeySize, Error> {
    match bits {
        ..2048 => Err(Error::TooSmall(bits)),
        2048 => Ok(KeySize::Rsa2048),
        2049..=3072 => Ok(KeySize::Rsa3072),
        3073..=4096 => Ok(KeySize::Rsa4096),
        4097..=8192 => Ok(KeySize::Rsa8192),
        _ => Err(Error::TooLarge(bits)),
    }
}

/// Makes a key on the calling thread: about 60 ms for RSA 2048, seconds for RSA 4096, below 1 ms on a
/// curve.
///
/// # Errors
/// When the options cannot be met.
pub fn generate(options: &KeyOptions) -> Result<Key, Error> {
    let pair = match &options.algorithm {
        Algorithm::Rsa(bits) => {
            let size = rsa_size(*bits)?;
            Pair::Rsa(Box::new(RsaKeyPair::generate(size).map_err(|_| Error::Crypto("RSA"))?))
        }
        Algorithm::Ecdsa(curve) => {
            let kind = match curve {
                Curve::P256 => &ECDSA_P256_SHA256_ASN1_SIGNING,
                Curve::P384 => &ECDSA_P384_SHA384_ASN1_SIGNING,
            };
            Pair::Ecdsa(Box::new(EcdsaKeyPair::generate(kind).map_err(|_| Error::Crypto("ECDSA"))?), *curve)
        }
        Algorithm::Unsupported(name) => return Err(Error::Unsupported(name.clone())),
    };
    Ok(Key { pair, pkcs8: options.pkcs8 })
}

/// How much of the machine one key may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// One thread: for renewals, which have time.
    Single,
    /// Two threads for RSA where two processors are ours (a container's CPU quota counts); the first
    /// result wins and the other is dropped. For the first key, which everybody waits for.
    Race,
}

/// Makes a key beside the runtime's threads, so that no timer or socket waits for it.
///
/// # Errors
/// As [`generate`].
pub(crate) async fn generate_off_runtime(options: &KeyOptions, effort: Effort) -> Result<Key, Error> {
    // Refused at once, without a thread.
    match &options.algorithm {
        Algorithm::Ecdsa(_) | Algorithm::Unsupported(_) => return generate(options),
        Algorithm::Rsa(bits) => rsa_size(*bits).map(|_| ())?,
    }
    let spare = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = if effort == Effort::Race && spare > 1 { 2 } else { 1 };
    // Plain threads: they leave nothing behind, while the runtime's blocking pool keeps its own idle.
    let (done, made) = tokio::sync::mpsc::channel(threads);
    let mut begun = Err(Error::NoThread);
    for _ in 0..threads {
        let (done, options) = (done.clone(), options.clone());
        let starting = Starting::new();
        let thread = keygen(move || {
            let _ = aws_lc_rs::rand::fill(&mut [0]);
            drop(starting);
            // The loser of a race finds nobody listening.
            let _ = done.try_send(generate(&options));
        });
        // One is enough.
        begun = begun.or(thread.map_err(|_| Error::NoThread));
    }
    drop(done);
    match (begun, &options.algorithm) {
        (Ok(()), _) => first(made).await,
        // Where the pod has used up its processes, a certificate that ends is worse than a moment in which nobody else has
        // a turn. Sizes that would take seconds wait for a thread.
        (Err(_), Algorithm::Rsa(..=IN_PLACE_BITS)) => generate(options),
        (Err(none), _) => Err(none),
    }
}

/// The largest RSA key that may be made between two turns of everybody else: a few hundred milliseconds at most.
const IN_PLACE_BITS: i64 = 3072;

// Begins `job` on a thread.
fn keygen(job: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    #[cfg(test)]
    crate::base::lane::scarce::check()?;
    let thread = std::thread::Builder::new().name("keygen".to_owned()).stack_size(256 * 1024);
    // As of every other thread: the main one has the signals.
    let job = move || {
        crate::base::handover::block_signals();
        job();
    };
    thread.spawn(job).map(drop)
}

// The first key; where there is none, why.
async fn first<T>(mut made: tokio::sync::mpsc::Receiver<Result<T, Error>>) -> Result<T, Error> {
    let mut why = Error::Crypto("the thread that made it panicked");
    while let Some(made) = made.recv().await {
        match made {
            Ok(key) => return Ok(key),
            Err(error) => why = error,
        }
    }
    Err(why)
}

/// Threads that have not drawn their first random number.
static STARTING: AtomicUsize = AtomicUsize::new(0);

/// Counts as long as it lives.
struct Starting;

impl Starting {
    fn new() -> Self {
        STARTING.fetch_add(1, Ordering::SeqCst);
        Self
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        STARTING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// To be called before the process ends: the crypto crate clears its random state then, and a thread that
/// would first ask for it afterwards aborts the process, whose exit status would be lost. Threads that have
/// begun are merely held. Waits for microseconds as a rule, and 100 ms at most.
pub(crate) fn settle() {
    for _ in 0..1000 {
        if STARTING.load(Ordering::SeqCst) == 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
}

impl Key {
    /// The private key in PEM: PKCS#1 or SEC 1, or PKCS#8 where the options asked for it, ending with a
    /// newline.
    ///
    /// # Errors
    /// When the crypto crate cannot print it.
    pub fn to_pem(&self) -> Result<Zeroizing<String>, Error> {
        let unprintable = |_| Error::Crypto("it cannot be printed");
        match &self.pair {
            Pair::Rsa(key) => {
                let der = key.as_der().map_err(unprintable)?;
                if self.pkcs8 {
                    return Ok(pem("PRIVATE KEY", der.as_ref()));
                }
                let inner =
                    pkcs1_of(der.as_ref()).ok_or(Error::Crypto("its PKCS#8 form is not as expected"))?;
                Ok(pem("RSA PRIVATE KEY", inner))
            }
            Pair::Ecdsa(key, _) if self.pkcs8 => {
                Ok(pem("PRIVATE KEY", key.to_pkcs8v1().map_err(unprintable)?.as_ref()))
            }
            Pair::Ecdsa(key, _) => {
                Ok(pem("EC PRIVATE KEY", key.private_key().as_der().map_err(unprintable)?.as_ref()))
            }
        }
    }

    /// DER of the subject public key info, as it will stand in a certificate for this key.
    #[must_use]
    pub(crate) fn spki(&self) -> Vec<u8> {
        rcgen::PublicKeyData::subject_public_key_info(self)
    }
}

impl rcgen::PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        match &self.pair {
            Pair::Rsa(key) => key.public_key().as_ref(),
            Pair::Ecdsa(key, _) => key.public_key().as_ref(),
        }
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        match &self.pair {
            Pair::Rsa(_) => &rcgen::PKCS_RSA_SHA256,
            Pair::Ecdsa(_, Curve::P256) => &rcgen::PKCS_ECDSA_P256_SHA256,
            Pair::Ecdsa(_, Curve::P384) => &rcgen::PKCS_ECDSA_P384_SHA384,
        }
    }
}

impl rcgen::SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let random = SystemRandom::new();
        match &self.pair {
            Pair::Rsa(key) => {
                let mut signature = vec![0; key.public_modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, &random, message, &mut signature)
                    .map_err(|_| rcgen::Error::RingUnspecified)?;
                Ok(signature)
            }
            Pair::Ecdsa(key, _) => {
                let signature = key.sign(&random, message).map_err(|_| rcgen::Error::RingUnspecified)?;
                Ok(signature.as_ref().to_vec())
            }
        }
    }
}

/// The `RSAPrivateKey` inside a PKCS#8 `PrivateKeyInfo` (version, algorithm, octet string).
fn pkcs1_of(pkcs8: &[u8]) -> Option<&[u8]> {
    let (body, _) = element(pkcs8, 0x30)?;
    let (_, rest) = element(body, 0x02)?;
    let (_, rest) = element(rest, 0x30)?;
    element(rest, 0x04).map(|(inner, _)| inner)
}

/// Content of the DER element with this tag at the front of `from`, and what follows it.
fn element(from: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&first, rest) = from.split_first()?;
    let (&length, rest) = rest.split_first()?;
    if first != tag {
        return None;
    }
    let (length, rest) = if length < 0x80 {
        (usize::from(length), rest)
    } else {
        let (digits, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
        if digits.len() > 4 {
            return None;
        }
        (digits.iter().fold(0, |n, d| n << 8 | usize::from(*d)), rest)
    };
    rest.split_at_checked(length)
}

/// PEM text as Go prints it: 64 columns, a newline at the end.
#[must_use]
pub(crate) fn pem(label: &str, der: &[u8]) -> Zeroizing<String> {
    // Sized once: a buffer that grows would leave copies of a key behind.
    let encoded = Zeroizing::new(STANDARD.encode(der));
    let size = encoded.len() + encoded.len().div_ceil(64) + 2 * label.len() + 40;
    let mut text = Zeroizing::new(String::with_capacity(size));
    for part in ["-----BEGIN ", label, "-----\n"] {
        text.push_str(part);
    }
    let mut rest = encoded.as_str();
    while !rest.is_empty() {
        let (line, after) = rest.split_at(rest.len().min(64));
        text.push_str(line);
        text.push('\n');
        rest = after;
    }
    for part in ["-----END ", label, "-----\n"] {
        text.push_str(part);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls_pki_types::PrivateKeyDer;
    use rustls_pki_types::pem::PemObject;

    fn spki_of_pem(pem: &str) -> Vec<u8> {
        let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap();
        let signer = rustls::crypto::aws_lc_rs::sign::any_supported_type(&key).unwrap();
        signer.public_key().unwrap().as_ref().to_vec()
    }

    #[test]
    fn each_form_has_its_label_and_reads_back() {
        let rows = [
            (Algorithm::Rsa(2048), "RSA PRIVATE KEY"),
            (Algorithm::Ecdsa(Curve::P256), "EC PRIVATE KEY"),
            (Algorithm::Ecdsa(Curve::P384), "EC PRIVATE KEY"),
        ];
        for (algorithm, own) in rows {
            for (pkcs8, label) in [(false, own), (true, "PRIVATE KEY")] {
                let key = generate(&KeyOptions { algorithm: algorithm.clone(), pkcs8 }).unwrap();
                let text = key.to_pem().unwrap();
                assert!(text.starts_with(&format!("-----BEGIN {label}-----\n")), "{algorithm:?} {pkcs8}");
                assert!(text.ends_with(&format!("-----END {label}-----\n")), "{algorithm:?} {pkcs8}");
                assert!(text.lines().all(|l| l.len() <= 64));
                assert_eq!(spki_of_pem(&text), key.spki(), "{algorithm:?} {pkcs8}");
            }
        }
    }

    #[test]
    fn sec1_names_its_curve_and_carries_the_public_half() {
        let options = KeyOptions { algorithm: Algorithm::Ecdsa(Curve::P256), pkcs8: false };
        let key = generate(&options).unwrap();
        let PrivateKeyDer::Sec1(der) =
            PrivateKeyDer::from_pem_slice(key.to_pem().unwrap().as_bytes()).unwrap()
        else {
            panic!("not SEC 1")
        };
        let (body, _) = element(der.secret_sec1_der(), 0x30).unwrap();
        let (_, rest) = element(body, 0x02).unwrap();
        let (private, rest) = element(rest, 0x04).unwrap();
        let (curve, rest) = element(rest, 0xa0).unwrap();
        let (_, rest) = element(rest, 0xa1).unwrap();
        assert_eq!(private.len(), 32);
        assert_eq!(curve, [0x06, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7], "prime256v1");
        assert!(rest.is_empty());
    }

    #[test]
    fn settings_are_read_as_the_go_agent_reads_them() {
        let read = |bits, alg, curve| KeyOptions::from_settings(bits, alg, curve, false).algorithm;
        assert_eq!(read(2048, "", "P384"), Algorithm::Rsa(2048));
        assert_eq!(read(4096, "ECDSA", "P256"), Algorithm::Ecdsa(Curve::P256));
        assert_eq!(read(2048, "ECDSA", "P384"), Algorithm::Ecdsa(Curve::P384));
        assert_eq!(read(2048, "ECDSA", "P521"), Algorithm::Ecdsa(Curve::P256));
        assert_eq!(read(2048, "ED25519", ""), Algorithm::Unsupported("ED25519".to_owned()));
    }

    #[tokio::test]
    async fn what_cannot_be_made_is_refused_with_the_value() {
        for (algorithm, words) in [
            (Algorithm::Rsa(1024), "minimum required size of 2048 (requested: 1024)"),
            (Algorithm::Rsa(-1), "(requested: -1)"),
            (Algorithm::Rsa(16384), "maximum of 8192 (requested: 16384)"),
            (Algorithm::Unsupported("ED25519".to_owned()), "unsupported EC signature algorithm \"ED25519\""),
        ] {
            let options = KeyOptions { algorithm, pkcs8: false };
            let error = generate_off_runtime(&options, Effort::Race).await.unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn sizes_in_between_are_rounded_up() {
        assert!(matches!(rsa_size(2560), Ok(KeySize::Rsa3072)));
        assert!(matches!(rsa_size(3073), Ok(KeySize::Rsa4096)));
    }

    #[tokio::test]
    async fn a_race_gives_one_key() {
        let key = generate_off_runtime(&KeyOptions::default(), Effort::Race).await.unwrap();
        assert_eq!(format!("{key:?}"), "Key(RSA ..)");
    }

    #[tokio::test]
    async fn without_a_thread_keys_that_are_soon_made_are_made_all_the_same() {
        let _none = crate::base::lane::scarce::NoThreads::from_now_on();
        let made = async |bits| {
            let options = KeyOptions { algorithm: Algorithm::Rsa(bits), pkcs8: false };
            generate_off_runtime(&options, Effort::Race).await.map(|key| format!("{key:?}"))
        };
        assert_eq!(made(2048).await.as_deref(), Ok("Key(RSA ..)"));
        assert_eq!(made(4096).await, Err(Error::NoThread));
    }

    #[tokio::test]
    async fn who_fails_in_a_race_leaves_it_to_the_other() {
        let race = |results: Vec<Result<u8, Error>>| {
            let (done, made) = tokio::sync::mpsc::channel(2);
            results.into_iter().for_each(|result| done.try_send(result).unwrap());
            first(made)
        };
        let failed = || Err(Error::Crypto("RSA"));
        assert_eq!(race(vec![failed(), Ok(1)]).await, Ok(1));
        assert_eq!(race(vec![Ok(1), failed()]).await, Ok(1));
        assert_eq!(race(vec![failed(), failed()]).await, failed());
        assert!(race(Vec::new()).await.unwrap_err().to_string().ends_with("panicked"));
    }

    #[test]
    fn der_elements_are_cut_at_every_length_without_panic() {
        let der = [0x30, 0x82, 0x01, 0x00, 0x02];
        for n in 0..=der.len() {
            assert!(element(&der[..n], 0x30).is_none());
        }
        assert!(element(&[0x30, 0xff, 1, 2], 0x30).is_none());
    }
}
