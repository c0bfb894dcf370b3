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
pub(crate) enum Compliance {
    /// No restriction beyond TLS 1.2.
    #[default]
    None,
    /// TLS 1.2 only, ECDHE with AES-GCM, P-256 only.
    Fips140_2,
    /// TLS 1.2 with ECDHE and AES-GCM, TLS 1.3 with AES-GCM; P-256 and P-384 only.
    Fips140_3,
    /// TLS 1.3 only, AES-GCM, X25519MLKEM768 only.
    Pqc,
}

impl Compliance {
    /// The names of `COMPLIANCE_POLICY`.
    pub(crate) const NAMES: &'static str = "fips-140-2, fips-140-3 or pqc";

    /// The policy of a name; none when it is empty, `None` when nobody knows it.
    #[must_use]
    pub(crate) fn of(name: &str) -> Option<Self> {
        Some(match name {
            "" => Self::None,
            "fips-140-2" => Self::Fips140_2,
            "fips-140-3" => Self::Fips140_3,
            "pqc" => Self::Pqc,
            _ => return None,
        })
    }

    /// One of the FIPS policies.
    #[must_use]
    pub(crate) fn is_fips(self) -> bool {
        matches!(self, Self::Fips140_2 | Self::Fips140_3)
    }
}

/// Whether this build's crypto library is its FIPS module, which has then passed its tests (a module that fails
/// them ends the process before anything of ours runs), and approves of what the policy leaves.
///
/// # Errors
/// What is not so.
pub(crate) fn fips_module(policy: Compliance) -> Result<(), &'static str> {
    if ::aws_lc_rs::try_fips_mode().is_err() {
        return Err("the crypto library of this build is not the FIPS module (see pilot-agent --version)");
    }
    if policy.is_fips() && !provider(policy).0.fips() {
        return Err("the FIPS module does not approve of all that the policy leaves");
    }
    Ok(())
}

type Versions = &'static [&'static SupportedProtocolVersion];

const BOTH: Versions = &[&TLS13, &TLS12];
const ONLY_12: Versions = &[&TLS12];
const ONLY_13: Versions = &[&TLS13];

const GCM_12_SUITES: &[SupportedCipherSuite] = &[
    suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    suite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    suite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    suite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
];

const GCM_13_SUITES: &[SupportedCipherSuite] =
    &[suite::TLS13_AES_128_GCM_SHA256, suite::TLS13_AES_256_GCM_SHA384];

/// The crypto functions and the protocol versions that a policy allows.
#[must_use]
pub(crate) fn provider(policy: Compliance) -> (Arc<CryptoProvider>, Versions) {
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
            provider.cipher_suites = GCM_12_SUITES.to_vec();
            provider.kx_groups = vec![kx_group::SECP256R1];
            ONLY_12
        }
        Compliance::Fips140_3 => {
            provider.cipher_suites = [GCM_13_SUITES, GCM_12_SUITES].concat();
            provider.kx_groups = vec![kx_group::SECP256R1, kx_group::SECP384R1];
            BOTH
        }
        Compliance::Pqc => {
            provider.cipher_suites = GCM_13_SUITES.to_vec();
            provider.kx_groups = vec![kx_group::X25519MLKEM768];
            ONLY_13
        }
    };
    (Arc::new(provider), versions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fips_140_3_leaves_aes_gcm_and_two_curves() {
        let (provider, versions) = provider(Compliance::Fips140_3);
        assert_eq!(versions.len(), 2);
        let suites: Vec<_> = provider.cipher_suites.iter().map(|s| format!("{:?}", s.suite())).collect();
        assert_eq!(suites.len(), 6, "{suites:?}");
        assert!(suites.iter().all(|s| s.contains("_GCM_")), "{suites:?}");
        let groups: Vec<_> = provider.kx_groups.iter().map(|g| g.name()).collect();
        assert_eq!(groups, [rustls::NamedGroup::secp256r1, rustls::NamedGroup::secp384r1]);
    }

    /// In a build with the module the library itself judges what a policy leaves.
    #[test]
    fn the_module_approves_of_what_the_policies_leave() {
        for policy in [Compliance::Fips140_2, Compliance::Fips140_3] {
            assert_eq!(provider(policy).0.fips(), cfg!(feature = "fips"), "{policy:?}");
            assert_eq!(fips_module(policy).is_ok(), cfg!(feature = "fips"), "{policy:?}");
        }
        assert!(!provider(Compliance::None).0.fips());
    }

    #[test]
    fn a_policy_that_nobody_knows_is_none() {
        for name in ["fips", "fips-140-9", "FIPS-140-3", "fips-140-3 "] {
            assert_eq!(Compliance::of(name), None, "{name}");
        }
        assert_eq!(Compliance::of(""), Some(Compliance::None));
        assert!(Compliance::of("fips-140-3").is_some_and(Compliance::is_fips));
    }
}
