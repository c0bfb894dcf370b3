//! Google's two CAs as far as an agent asks them: the same signatures, in other messages.

use bytes::Bytes;
use prost::Message;

use crate::grpc::{Code, Status};
use crate::messages::{self, Request, Response};

const MESH: &str = "/google.security.meshca.v1.MeshCertificateService/CreateCertificate";
const POOL: &str = "/google.cloud.security.privateca.v1.CertificateAuthorityService/CreateCertificate";
const ROOTS: &str = "/google.cloud.security.privateca.v1.CertificateAuthorityService/FetchCaCerts";

/// The messages of a certificate service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// istiod's own.
    Istio,
    /// Mesh CA.
    Mesh,
    /// A pool of the Certificate Authority Service.
    Pool,
    /// The pool's roots.
    Roots,
}

#[derive(Clone, PartialEq, Message)]
struct MeshRequest {
    #[prost(string, tag = "2")]
    csr: String,
    #[prost(message, optional, tag = "3")]
    validity: Option<prost_types::Duration>,
}

#[derive(Clone, PartialEq, Message)]
struct PoolRequest {
    #[prost(message, optional, tag = "3")]
    certificate: Option<Certificate>,
}

#[derive(Clone, PartialEq, Message)]
struct Certificate {
    #[prost(message, optional, tag = "3")]
    config: Option<Config>,
    #[prost(message, optional, tag = "5")]
    lifetime: Option<prost_types::Duration>,
    #[prost(string, tag = "9")]
    pem: String,
    #[prost(string, repeated, tag = "11")]
    chain: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Config {
    #[prost(message, optional, tag = "3")]
    public_key: Option<PublicKey>,
}

#[derive(Clone, PartialEq, Message)]
struct PublicKey {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct Chains {
    #[prost(message, repeated, tag = "1")]
    chains: Vec<Chain>,
}

#[derive(Clone, PartialEq, Message)]
struct Chain {
    #[prost(string, repeated, tag = "1")]
    certificates: Vec<String>,
}

impl Form {
    /// The service that answers at a path.
    pub(crate) fn of(path: &str) -> Option<Self> {
        match path {
            messages::PATH => Some(Self::Istio),
            MESH => Some(Self::Mesh),
            POOL => Some(Self::Pool),
            ROOTS => Some(Self::Roots),
            _ => None,
        }
    }

    /// What is asked, as istiod would be.
    pub(crate) fn request(self, message: Bytes) -> Result<Request, Status> {
        let broken =
            |e: prost::DecodeError| Status::new(Code::Internal, format!("the request does not decode: {e}"));
        let seconds = |time: Option<prost_types::Duration>| time.map_or(0, |t| t.seconds);
        match self {
            Self::Istio => Request::decode(message).map_err(broken),
            Self::Mesh => {
                let asked = MeshRequest::decode(message).map_err(broken)?;
                Ok(Request { csr: asked.csr, validity_duration: seconds(asked.validity), metadata: None })
            }
            Self::Pool => {
                let asked = PoolRequest::decode(message).map_err(broken)?.certificate.unwrap_or_default();
                let key = asked.config.and_then(|config| config.public_key).unwrap_or_default().key;
                let csr = String::from_utf8_lossy(&key).into_owned();
                Ok(Request { csr, validity_duration: seconds(asked.lifetime), metadata: None })
            }
            Self::Roots => Ok(Request::default()),
        }
    }

    /// The answer with this chain.
    pub(crate) fn response(self, response: Response) -> Vec<u8> {
        let chain = response.cert_chain;
        match self {
            Self::Istio | Self::Mesh => Response { cert_chain: chain }.encode_to_vec(),
            Self::Pool => {
                let mut chain = chain.into_iter();
                let pem = chain.next().unwrap_or_default();
                Certificate { pem, chain: chain.collect(), ..Certificate::default() }.encode_to_vec()
            }
            Self::Roots => Chains { chains: vec![Chain { certificates: chain }] }.encode_to_vec(),
        }
    }
}
