//! A secret as Envoy's message.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::DataSource;
use envoy_types::pb::envoy::config::core::v3::data_source::Specifier;
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3 as tls;
use envoy_types::pb::google::protobuf::Any;
use prost::Message;
use zeroize::Zeroize;

use super::revoked::Revoked;
use crate::secrets::{Identity, Secret};

/// The type URL of every resource and response here.
pub const SECRET_TYPE: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// Hardware or instruction set that holds the private key's operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PrivateKeyProvider {
    /// Which.
    pub provider: KeyAccelerator,
    /// `pollDelay`. Only the part below a second is sent, as by the Go agent.
    pub poll_delay: Option<Duration>,
    /// `fallback`.
    pub fallback: bool,
}

/// The providers that Envoy knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyAccelerator {
    /// AVX-512 instructions.
    CryptoMb,
    /// QuickAssist.
    Qat,
}

impl KeyAccelerator {
    fn name(self) -> &'static str {
        match self {
            Self::CryptoMb => "cryptomb",
            Self::Qat => "qat",
        }
    }

    fn type_url(self) -> &'static str {
        match self {
            Self::CryptoMb => {
                "type.googleapis.com/envoy.extensions.private_key_providers.cryptomb.v3alpha.CryptoMbPrivateKeyMethodConfig"
            }
            Self::Qat => {
                "type.googleapis.com/envoy.extensions.private_key_providers.qat.v3alpha.QatPrivateKeyMethodConfig"
            }
        }
    }
}

/// Both providers' configuration messages have these two fields; the crate of Envoy's types leaves
/// Envoy's contrib extensions out.
#[derive(Clone, PartialEq, prost::Message)]
struct Method {
    #[prost(message, optional, tag = "1")]
    private_key: Option<DataSource>,
    #[prost(message, optional, tag = "2")]
    poll_delay: Option<prost_types::Duration>,
}

/// Encodes by the settings of this agent.
#[derive(Debug, Default)]
pub(crate) struct Encoder {
    /// Set: keys go into it instead of standing inline.
    pub private_key_provider: Option<PrivateKeyProvider>,
    /// Named in every root while its file exists.
    pub crl: Revoked,
}

impl Encoder {
    /// To be called before `secrets` are encoded.
    pub(crate) async fn prepare(&self, secrets: &[(String, Secret)]) {
        if secrets.iter().any(|(_, secret)| matches!(secret, Secret::Roots(_))) {
            self.crl.look().await;
        }
    }

    /// The resource under the name it was asked for.
    #[must_use]
    pub(crate) fn encode(&self, name: &str, secret: &Secret) -> Any {
        let content = match secret {
            Secret::Identity(identity) => tls::secret::Type::TlsCertificate(self.certificate(identity)),
            Secret::Roots(roots) => tls::secret::Type::ValidationContext(tls::CertificateValidationContext {
                trusted_ca: Some(inline(&roots.pem)),
                crl: self.crl(),
                ..Default::default()
            }),
        };
        let mut message = tls::Secret { name: name.to_owned(), r#type: Some(content) };
        let value = message.encode_to_vec();
        if let Some(tls::secret::Type::TlsCertificate(certificate)) = &mut message.r#type {
            wipe(certificate);
        }
        Any { type_url: SECRET_TYPE.to_owned(), value }
    }

    fn certificate(&self, identity: &Identity) -> tls::TlsCertificate {
        let mut certificate =
            tls::TlsCertificate { certificate_chain: Some(inline(&identity.chain)), ..Default::default() };
        let key = inline(&identity.key);
        let Some(settings) = &self.private_key_provider else {
            certificate.private_key = Some(key);
            return certificate;
        };
        let nanos = |d: Duration| i32::try_from(d.subsec_nanos()).unwrap_or_default();
        let poll_delay = settings.poll_delay.map(|d| prost_types::Duration { seconds: 0, nanos: nanos(d) });
        let mut method = Method { private_key: Some(key), poll_delay };
        let typed = Any { type_url: settings.provider.type_url().to_owned(), value: method.encode_to_vec() };
        wipe_source(method.private_key.as_mut());
        certificate.private_key_provider = Some(tls::PrivateKeyProvider {
            provider_name: settings.provider.name().to_owned(),
            fallback: settings.fallback,
            config_type: Some(tls::private_key_provider::ConfigType::TypedConfig(typed)),
        });
        certificate
    }

    fn crl(&self) -> Option<DataSource> {
        let path = self.crl.file()?.to_string_lossy().into_owned();
        Some(DataSource { specifier: Some(Specifier::Filename(path)), ..Default::default() })
    }
}

/// A version of a resource for delta streams: it changes with the content, and tells nothing of a key.
#[must_use]
pub(crate) fn version(secret: &Secret) -> String {
    let mut hasher = DefaultHasher::new();
    match secret {
        Secret::Identity(identity) => identity.chain.hash(&mut hasher),
        Secret::Roots(roots) => roots.pem.hash(&mut hasher),
    }
    format!("{:016x}", hasher.finish())
}

fn inline(bytes: &[u8]) -> DataSource {
    DataSource { specifier: Some(Specifier::InlineBytes(bytes.to_vec())), ..Default::default() }
}

fn wipe(certificate: &mut tls::TlsCertificate) {
    wipe_source(certificate.private_key.as_mut());
    if let Some(tls::PrivateKeyProvider {
        config_type: Some(tls::private_key_provider::ConfigType::TypedConfig(typed)),
        ..
    }) = &mut certificate.private_key_provider
    {
        typed.value.zeroize();
    }
}

fn wipe_source(source: Option<&mut DataSource>) {
    if let Some(DataSource { specifier: Some(Specifier::InlineBytes(bytes)), .. }) = source {
        bytes.zeroize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secrets::Roots;
    use std::sync::Arc;
    use tls::secret::Type;

    fn identity() -> Secret {
        let key = zeroize::Zeroizing::new(b"key".to_vec());
        Secret::Identity(Arc::new(Identity { chain: b"chain".to_vec(), key }))
    }

    fn certificate(encoder: &Encoder) -> tls::TlsCertificate {
        let any = encoder.encode("default", &identity());
        assert_eq!(any.type_url, SECRET_TYPE);
        let secret = tls::Secret::decode(any.value.as_slice()).unwrap();
        assert_eq!(secret.name, "default");
        let Some(Type::TlsCertificate(certificate)) = secret.r#type else { panic!("no certificate") };
        assert_eq!(certificate.certificate_chain, Some(inline(b"chain")));
        certificate
    }

    #[test]
    fn keys_stand_inline() {
        let certificate = certificate(&Encoder::default());
        assert_eq!(certificate.private_key, Some(inline(b"key")));
        assert_eq!(certificate.private_key_provider, None);
    }

    #[test]
    fn a_provider_takes_the_key() {
        for (provider, name) in [(KeyAccelerator::CryptoMb, "cryptomb"), (KeyAccelerator::Qat, "qat")] {
            let poll_delay = Some(Duration::new(3, 10_000_000));
            let settings = PrivateKeyProvider { provider, poll_delay, fallback: true };
            let encoder = Encoder { private_key_provider: Some(settings), ..Encoder::default() };
            let certificate = certificate(&encoder);
            assert_eq!(certificate.private_key, None);
            let got = certificate.private_key_provider.unwrap();
            assert_eq!(got.provider_name, name);
            assert!(got.fallback);
            let Some(tls::private_key_provider::ConfigType::TypedConfig(typed)) = got.config_type else {
                panic!("no configuration")
            };
            assert!(typed.type_url.contains(&format!(".{name}.v3alpha.")));
            let method = Method::decode(typed.value.as_slice()).unwrap();
            assert_eq!(method.private_key, Some(inline(b"key")));
            assert_eq!(method.poll_delay, Some(prost_types::Duration { seconds: 0, nanos: 10_000_000 }));
        }
    }

    #[tokio::test]
    async fn the_revocation_list_is_named_while_it_exists() {
        let dir = tempfile::tempdir().unwrap();
        let crl = dir.path().join("crl.pem");
        let encoder = Encoder { private_key_provider: None, crl: Revoked::new(Some(crl.clone())) };
        let roots = Secret::Roots(Arc::new(Roots { pem: b"root".to_vec() }));
        let context = async || {
            encoder.prepare(&[(String::new(), roots.clone())]).await;
            let any = encoder.encode("ROOTCA", &roots);
            match tls::Secret::decode(any.value.as_slice()).unwrap().r#type {
                Some(Type::ValidationContext(context)) => context,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(context().await.trusted_ca, Some(inline(b"root")));
        assert_eq!(context().await.crl, None);
        std::fs::write(&crl, "x").unwrap();
        let named = Some(Specifier::Filename(crl.to_str().unwrap().to_owned()));
        assert_eq!(context().await.crl.unwrap().specifier, named);
    }
}
