//! The crypto crate behind TLS, and what `COMPLIANCE_POLICY` leaves of it.
//!
//! The only file that chooses cipher suites and groups; everything that speaks TLS asks here.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite as suite, kx_group};
use rustls::version::{TLS12, TLS13};
use rustls::{SupportedCipherSuite, SupportedProtocolVersion};

/// `COMPLIANCE_POLICY` restrictions on TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compliance {
    /// No restriction beyond TLS 1.2.
    #[default]
    None,
    /// TLS 1.2 only, ECDHE with AES-GCM, P-256 only.
    Fips140_2,
    /// TLS 1.3 only, AES-GCM, X25519MLKEM768 only.
    Pqc,
}

type Versions = &'static [&'static SupportedProtocolVersion];

const BOTH: Versions = &[&TLS13, &TLS12];
const ONLY_12: Versions = &[&TLS12];
const ONLY_13: Versions = &[&TLS13];

const FIPS_SUITES: &[SupportedCipherSuite] = &[
    suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    suite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    suite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    suite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
];

const PQC_SUITES: &[SupportedCipherSuite] =
    &[suite::TLS13_AES_128_GCM_SHA256, suite::TLS13_AES_256_GCM_SHA384];

/// The crypto functions and the protocol versions that a policy allows.
#[must_use]
pub fn provider(policy: Compliance) -> (Arc<CryptoProvider>, Versions) {
    let mut provider = aws_lc_rs::default_provider();
    let versions = match policy {
        Compliance::None => {
            // The hybrid group first, as Go offers it since 1.24: what istiod sends today must not be
            // readable by who records it and waits.
            provider.kx_groups =
                vec![kx_group::X25519MLKEM768, kx_group::X25519, kx_group::SECP256R1, kx_group::SECP384R1];
            BOTH
        }
        Compliance::Fips140_2 => {
            provider.cipher_suites = FIPS_SUITES.to_vec();
            provider.kx_groups = vec![kx_group::SECP256R1];
            ONLY_12
        }
        Compliance::Pqc => {
            provider.cipher_suites = PQC_SUITES.to_vec();
            provider.kx_groups = vec![kx_group::X25519MLKEM768];
            ONLY_13
        }
    };
    (Arc::new(provider), versions)
}
